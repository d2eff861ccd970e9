//! Workers report what became of tasks: completed, rejected, or still being worked on. Each item
//! has its own answer.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::future;

use super::{
    batch::{Outcomes, answer, by_shard, per_shard, shards},
    error::Error,
    handle::{self, Handle},
    schema,
    traced::Works,
};
use crate::{
    model::{
        Completed, Completion, ECHO, Extension, Item, ItemAnswer, ItemStatus, LeaseToken,
        MAX_RECORD_BYTES, Rejection, ShardId, StoredStatus, TaskId, WorkerName, shorten, validate,
    },
    queue::{self, Code, RejectMode},
    store::StateFor,
    telemetry::metrics::{self, Rejected},
    wire,
};

/// The most tasks that one completion may discover.
const MAX_DISCOVERED: usize = 10_000;
/// The longest reason of a rejection.
const MAX_REASON_BYTES: usize = 4096;
/// The longest delay of a rejection. A time that no clock can represent would never come.
const MAX_REJECT_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a worker has to wait for a task that it gave back before starting it. Others may have
/// it at once.
const REST: Duration = Duration::from_secs(1);

/// The completions of one shard, with their indices.
type Group = (ShardId, Vec<usize>, Arc<[queue::Completion]>);

impl Handle {
    /// Reports tasks as finished.
    pub async fn complete(
        &self,
        worker: &str,
        items: Vec<Item<Completion>>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        let worker = handle::worker(worker)?;
        // A crash after this changes nothing: the worker repeats its report, and another file may
        // route it then.
        let mut items = self.route_outputs(items, MAX_DISCOVERED).await;
        let invalid = self.note_invalid_discoveries(&mut items);
        schema::note_misfits(&self.settings, &mut items, &invalid, MAX_DISCOVERED).await;
        let notes: Vec<String> = items
            .iter()
            .map(|item| {
                item.report
                    .as_ref()
                    .map_or_else(|_| String::new(), |report| report.not_stored.note())
            })
            .collect();
        let (answers, items) = self.accept(items, |id, token, report| {
            self.completion(&worker, id, token, report)
        })?;
        let works = Works::of(&items, |item| (item.id, &item.token, ""));
        let groups: Vec<Group> = by_shard(items)
            .into_iter()
            .map(|(shard, (places, items))| (shard, places, items.into()))
            .collect();
        let calls = groups
            .iter()
            .map(|(shard, _, items)| self.queue.complete_all(shard, items));
        let answered = future::join_all(calls).await;
        let mut outcomes: Outcomes<Code> = groups
            .iter()
            .zip(answered)
            .flat_map(|((_, places, _), codes)| places.iter().copied().zip(codes))
            .collect();
        let bytes = |items: &[queue::Completion]| items.iter().map(|item| item.report.len()).sum();
        self.reported.add(
            groups
                .iter()
                .map(|(shard, _, items)| (shard.clone(), bytes(items))),
        );
        works.completed(&worker, &outcomes);
        self.ask_sql(&worker, &groups, &mut outcomes).await;
        let mut answers = answer(answers, outcomes, |_, code| code)?;
        for (answer, note) in answers.iter_mut().zip(notes) {
            if answer.status == ItemStatus::Ok {
                answer.error = note;
            }
        }
        Ok(answers)
    }

    /// Records the invalid discovered tasks in their reports, and returns their places. The
    /// completions count nevertheless, and the pipeline that stores the other tasks sends the
    /// invalid ones to dead-letters.
    fn note_invalid_discoveries(&self, items: &mut [Item<Completion>]) -> HashSet<schema::Place> {
        let stages = self.stages();
        let mut invalid = HashSet::new();
        for (place, item) in items.iter_mut().enumerate() {
            let Ok(report) = &mut item.report else {
                continue;
            };
            // A completion with more of them is refused for that.
            for (index, task) in report
                .discovered
                .iter_mut()
                .enumerate()
                .take(MAX_DISCOVERED)
            {
                // Completions may be repeated without idempotency keys.
                task.idempotency_key.clear();
                // A deadline that has passed is no error here: it ends the task, with a letter.
                let rules = self.settings.task_rules(&task.queue).for_accepted();
                let checked = validate::check(task, &rules, 0).map(|_| ());
                let checked = checked.and_then(|()| match stages.of(&task.queue) {
                    Some((topology, stage)) => topology.stages[stage].is_for_one_worker(task),
                    None => Ok(()),
                });
                if let Err(error) = checked {
                    let key = String::from_utf8_lossy(&task.key);
                    report
                        .not_stored
                        .add(|| format!("discovered key {:?}: {error}", shorten(&key, ECHO)));
                    invalid.insert((place, index));
                }
            }
        }
        invalid
    }

    /// Asks SQL about leases that the queue has lost, or attributes to others: a repeat is answered
    /// `OK` for as long as SQL has its result.
    async fn ask_sql(&self, worker: &WorkerName, groups: &[Group], outcomes: &mut Outcomes<Code>) {
        let unsure = |outcome: &queue::Result<Code>| {
            matches!(
                outcome,
                Ok(Code::UnknownTask | Code::LeaseLost | Code::AlreadyCompleted)
            )
        };
        if !outcomes.iter().any(|(_, outcome)| unsure(outcome)) {
            return;
        }
        let tokens = groups.iter().flat_map(|(_, places, items)| {
            places
                .iter()
                .copied()
                .zip(items.iter().map(|item| (item.id, &item.token)))
        });
        let tokens: HashMap<usize, (TaskId, &LeaseToken)> = tokens.collect();
        let asked: Vec<_> = outcomes
            .iter()
            .filter(|(_, outcome)| unsure(outcome))
            .map(|(place, _)| tokens[place].0)
            .collect();
        let states = self
            .store
            .states_for(worker, &asked)
            .await
            .map_err(Arc::new);
        let states = states.map(|states| {
            states
                .into_iter()
                .map(|state| (state.id, state))
                .collect::<HashMap<_, _>>()
        });
        for (place, outcome) in outcomes.iter_mut().filter(|(_, outcome)| unsure(outcome)) {
            let (id, token) = &tokens[place];
            match &states {
                Ok(states) => {
                    if let Some(code) = states.get(id).and_then(|state| code_in_sql(state, token)) {
                        *outcome = Ok(code);
                    }
                }
                Err(error) => *outcome = Err(queue::Error::Unsure(Arc::clone(error) as _)),
            }
        }
    }

    fn completion(
        &self,
        worker: &WorkerName,
        id: TaskId,
        token: LeaseToken,
        report: Completion,
    ) -> Result<queue::Completion, String> {
        let limit = report.limit;
        limit.check()?;
        let max = self.settings.limits.max_result_bytes;
        if report.result.len() > max {
            return Err(format!(
                "result has {} bytes; at most {max}",
                report.result.len()
            ));
        }
        let mut joining = report.joining;
        let parts = joining.as_deref_mut().map(|joining| &mut joining.parts);
        let parts = parts.map_or(&mut [][..], Vec::as_mut_slice);
        let count = report.discovered.len() + report.unreadable.len() + parts.len();
        if count > MAX_DISCOVERED {
            return Err(format!(
                "discovered has {count} tasks; at most {MAX_DISCOVERED}: insert the others first"
            ));
        }
        for part in parts {
            part.encoding = validate::part(part)?;
        }
        let result_encoding = validate::encoding("result", report.result_encoding, &report.result)?;
        let discovered = report
            .discovered
            .into_iter()
            .map(Ok)
            .chain(report.unreadable.into_iter().map(Err));
        let completed = Completed {
            worker: worker.as_str().to_owned(),
            result: report.result,
            result_encoding,
            discovered: discovered.collect(),
            joining,
            attempt: token.attempt,
            lease: token.lease(),
            leased_unix_ms: token.leased_unix_ms,
            traceparent: token
                .trace
                .as_ref()
                .map(|trace| trace.work.to_string())
                .unwrap_or_default(),
        };
        let report = wire::completed_report(id, completed, MAX_RECORD_BYTES).map_err(|bytes| {
            format!("result and discovered have {bytes} bytes together; at most {MAX_RECORD_BYTES}: insert tasks apart")
        })?;
        Ok(queue::Completion {
            id,
            token,
            worker: worker.clone(),
            report,
            limit,
        })
    }

    /// Gives tasks back, to be tried again or never.
    pub async fn reject(
        &self,
        worker: &str,
        items: Vec<Item<Rejection>>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        let worker = handle::worker(worker)?;
        let (answers, items) = self.accept(items, |id, token, report| {
            rejection(&worker, id, token, report)
        })?;
        let shards = shards(&items);
        let works = Works::of(&items, |item| (item.id, &item.token, &item.reason));
        let outcomes = per_shard(items, |shard, items| async move {
            let backoff = &self.settings.queues.get(&shard.queue).backoff;
            let answers = self.queue.reject(&shard, &items, backoff).await?;
            let outcome =
                |(item, (code, is_dead)): (&queue::Rejection, _)| match (item.mode, is_dead) {
                    (mode, _) if mode.is_free() => (code, Rejected::Returned),
                    (_, true) => (code, Rejected::Dead),
                    (_, false) => (code, Rejected::Retried),
                };
            Ok(items.iter().zip(answers).map(outcome).collect())
        });
        let outcomes = outcomes.await;
        self.reported
            .add(shards.into_iter().map(|shard| (shard, 0)));
        works.rejected(&worker, &outcomes);
        for end in [Rejected::Dead, Rejected::Retried, Rejected::Returned] {
            let ended = outcomes
                .iter()
                .filter(|(_, one)| matches!(one, Ok((Code::Ok, one)) if *one == end));
            metrics::tasks_rejected(end, ended.count());
        }
        answer(answers, outcomes, |_, (code, _end)| code)
    }

    /// Extends leases.
    pub async fn extend(
        &self,
        worker: &str,
        items: Vec<Item<Extension>>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        let worker = handle::worker(worker)?;
        let (answers, items) = self.accept(items, |id, token, report| {
            let by = report
                .by
                .ok_or("by is missing: how long from now, for example 30s")?;
            validate::lease_duration("by", by, self.settings.limits.max_lease)?;
            Ok(queue::Extension {
                id,
                token,
                worker: worker.clone(),
                by,
            })
        })?;
        let outcomes = per_shard(items, |shard, items| async move {
            self.queue.extend(&shard, &items).await
        });
        answer(answers, outcomes.await, |answer, (code, until_unix_ms)| {
            answer.lease_expires_unix_ms = (code == Code::Ok).then_some(until_unix_ms);
            code
        })
    }
}

fn rejection(
    worker: &WorkerName,
    id: TaskId,
    token: LeaseToken,
    report: Rejection,
) -> Result<queue::Rejection, String> {
    let Rejection {
        reason,
        retry,
        delay,
        not_started,
        limit,
    } = report;
    limit.check()?;
    if reason.len() > MAX_REASON_BYTES {
        return Err(format!(
            "reason has {} bytes; at most {MAX_REASON_BYTES}",
            reason.len()
        ));
    }
    if let Some(delay) = delay.filter(|delay| *delay > MAX_REJECT_DELAY) {
        return Err(format!(
            "delay is {}s; at most {}s, 365 days",
            delay.as_secs(),
            MAX_REJECT_DELAY.as_secs()
        ));
    }
    if not_started && !retry {
        return Err(
            "not_started does not go with \"retry\": false: the task counts no failure".into(),
        );
    }
    let mode = match (not_started, retry) {
        (true, _) => match delay.filter(|delay| delay.as_millis() > 0) {
            Some(delay) => RejectMode::PutOff(delay),
            None => RejectMode::Rest(REST),
        },
        (false, true) => RejectMode::Retry(delay),
        (false, false) => RejectMode::Never,
    };
    Ok(queue::Rejection {
        id,
        token,
        worker: worker.clone(),
        mode,
        reason,
        limit,
    })
}

/// Returns the answer of SQL, if it knows more than the queue.
///
/// With a token of another queue, returns nothing about the task, because its caller may not be
/// allowed to reach that queue.
fn code_in_sql(state: &StateFor, token: &LeaseToken) -> Option<Code> {
    if state.shard.queue != token.shard.queue {
        return None;
    }
    match state.completed_under {
        // Compare the shard, too, because each shard counts its generations and grants by itself.
        Some(stored) if state.shard == token.shard && stored == token.lease() => Some(Code::Repeat),
        Some(_) => Some(Code::AlreadyCompleted),
        None => match state.status {
            StoredStatus::Completed => Some(Code::AlreadyCompleted),
            StoredStatus::Cancelled => Some(Code::Cancelled),
            StoredStatus::Unfinished | StoredStatus::Dead => None,
        },
    }
}
