//! Explains where a task is and why a worker does not get it, in words for people who do not know
//! taskd's internals.

use std::time::Duration;

use super::{
    error::Error,
    facts::{CROWDED_COUNTED, Facts},
    reader::{Reader, view},
};
use crate::{
    config::QueueSettings,
    model::{
        Access, Explanation, LeaseView, StoredStatus, TaskId, TaskPlace, WorkerName, WorkerReason,
        WorkerView, deadline_passed, to_rfc_3339,
    },
    queue::{self, BehindLimit, ExplainedRecord, Ineligibility, Pause, RecordStatus},
    store::{BEFORE_COUNTED, Place},
};

impl Reader {
    /// Returns `None` if there is no such task. Tells of its tree if `access` reaches the tree's root.
    pub(super) async fn explain(
        &self,
        id: TaskId,
        worker: Option<&WorkerName>,
        access: Option<&Access>,
    ) -> Result<Option<Explanation>, Error> {
        let mut facts = self.facts(id, worker).await?;
        // A task that went back from the bus to SQL while we asked was found nowhere. Ask again.
        if facts
            .as_ref()
            .is_some_and(|facts| facts.place() == TaskPlace::Lost)
        {
            facts = self.facts(id, worker).await?;
        }
        let explain = |mut facts: Facts| {
            facts.tree = facts
                .tree
                .filter(|tree| access.is_some_and(|access| access.reaches(tree.queue.as_str())));
            let settings = self.settings.queues.get(&facts.detail.task.queue);
            facts.explain(settings, worker)
        };
        Ok(facts.map(explain))
    }
}

impl Facts {
    fn explain(self, settings: &QueueSettings, worker: Option<&WorkerName>) -> Explanation {
        let place = self.place();
        let (next, next_unix_ms) = self.next(place);
        let record = self.record();
        Explanation {
            place,
            says: self.says(place),
            since_unix_ms: self.since(place),
            next,
            next_unix_ms,
            leases: record.map_or_else(Vec::new, |record| record.held.iter().map(lease).collect()),
            completed_by: record
                .map_or_else(|| self.credited.clone(), |record| record.credited.clone()),
            failures: record.map_or_else(Vec::new, |record| record.log.clone()),
            notes: self.notes(place, settings),
            worker: worker.map(|worker| self.worker(worker, place)),
            now_unix_ms: self.now_unix_ms,
            task: view(
                self.detail.clone().into(),
                record.map(ExplainedRecord::inspected),
                self.now_unix_ms,
            ),
        }
    }

    fn says(&self, place: TaskPlace) -> String {
        let said = match place {
            TaskPlace::Finished => match self.detail.status {
                StoredStatus::Dead => "it is dead: it failed for good",
                StoredStatus::Cancelled => "it was cancelled",
                StoredStatus::Completed | StoredStatus::Unfinished => "it is completed",
            },
            TaskPlace::Outbox => "it is stored in SQL, and on its way to the bus",
            TaskPlace::Parked if self.is_crowded() => return self.waits_in_sql(),
            TaskPlace::Parked => {
                "it is parked: it stays in SQL, because its queue or Redis was full"
            }
            TaskPlace::Scheduled => "it stays in SQL until its time is near",
            TaskPlace::Behind => return self.waits_in_sequence(),
            TaskPlace::Bus => "it is on the bus, and not in its queue yet",
            TaskPlace::Waiting if self.behind_limit().is_some() => return self.waits_for_limit(),
            TaskPlace::Waiting => "it waits in its queue for a worker",
            TaskPlace::Leased => return self.holders(),
            TaskPlace::Delayed if self.is_before_its_time() => {
                "it is in its queue, and its time has not come"
            }
            TaskPlace::Delayed => "it failed, and waits for its next attempt",
            TaskPlace::Reported => match self.record().map(|record| record.status) {
                Some(RecordStatus::Dead) => "it is dead, and the report is on its way to SQL",
                Some(RecordStatus::Cancelled) => {
                    "it was cancelled, and the report is on its way to SQL"
                }
                _ => "its workers have completed it, and the report is on its way to SQL",
            },
            TaskPlace::Lost => "it is stored in SQL, but Redis has lost it; taskd brings it back",
        };
        said.to_owned()
    }

    /// What the task waits for behind its limit key.
    fn behind_limit(&self) -> Option<BehindLimit> {
        self.record()?.limit
    }

    /// "it waits for example.org: 2 of 2 running, next start in 1.4s, 37 before it".
    fn waits_for_limit(&self) -> String {
        let Some(limit) = self.behind_limit() else {
            return String::new();
        };
        let mut said = format!(
            "it waits for {}: {}",
            self.detail.task.limit_key, limit.leased
        );
        said += &format!(" of {} running", limit.at_a_time.max(0));
        if limit.has_own_limits {
            said += " (own limits)";
        }
        if limit.next_start_unix_ms > self.now_unix_ms {
            let wait = limit.next_start_unix_ms - self.now_unix_ms;
            said += &format!(", next start in {:.1}s", wait as f64 / 1000.0);
        }
        said += &match limit.before {
            Some(before) => format!(", {before} before it"),
            None => ", many before it".to_owned(),
        };
        if self.crowded > 0 {
            said += &format!(", {} more in SQL", self.crowded_count());
        }
        said
    }

    /// "it waits for example.org in SQL, as one of 120: enough tasks of that key are in Redis".
    fn waits_in_sql(&self) -> String {
        format!(
            "it waits for {} in SQL, as one of {}: enough tasks of that key are in Redis",
            self.detail.task.limit_key,
            self.crowded_count()
        )
    }

    /// "it waits behind task T in sequence example.org, 3 before it".
    fn waits_in_sequence(&self) -> String {
        let Some(place) = &self.sequence else {
            return "it waits behind others of its sequence".to_owned();
        };
        let before = match place.before {
            BEFORE_COUNTED.. => format!("{BEFORE_COUNTED} or more"),
            few => few.to_string(),
        };
        let is_held = if place.is_held {
            ", which is dead and holds the others"
        } else {
            ""
        };
        format!(
            "it waits behind task {}{is_held} in sequence {}, {before} before it",
            place.head, place.name
        )
    }

    fn crowded_count(&self) -> String {
        match self.crowded {
            0..=CROWDED_COUNTED => self.crowded.to_string(),
            _ => format!("more than {CROWDED_COUNTED}"),
        }
    }

    /// Says "worker w holds it", or how many workers do.
    fn holders(&self) -> String {
        match self.record().map_or(&[][..], |record| &record.held) {
            [one] => format!("worker {} holds it", one.worker),
            several => format!("{} workers hold it", several.len()),
        }
    }

    /// Of a delayed task: without a failure there is no backoff, so it waits for its `not_before`.
    fn is_before_its_time(&self) -> bool {
        self.record().is_some_and(|record| record.failures == 0)
    }

    fn since(&self, place: TaskPlace) -> Option<i64> {
        let task = &self.detail.task;
        let record = self.record();
        let inserted = task.id.created_unix_ms();
        let last_failure = record
            .and_then(|record| record.log.last())
            .map(|failure| failure.at_unix_ms);
        let has_failed = record.is_some_and(|record| record.failures > 0);
        match place {
            TaskPlace::Finished => Some(self.detail.updated_unix_ms),
            // A task that came back to SQL did so after its insert, and nothing records when.
            TaskPlace::Outbox | TaskPlace::Parked | TaskPlace::Scheduled | TaskPlace::Behind => {
                let came_back = matches!(
                    self.place_in_sql,
                    Some(Place::Off {
                        came_back: true,
                        ..
                    })
                );
                (!came_back).then_some(inserted)
            }
            TaskPlace::Bus => self.on_bus.as_ref().and_then(|on_bus| on_bus.since_unix_ms),
            // Since the first of the leases.
            TaskPlace::Leased => {
                let since: Option<Vec<i64>> = record
                    .and_then(|record| record.held.iter().map(|held| held.since_unix_ms).collect());
                since.and_then(|since| since.into_iter().min())
            }
            TaskPlace::Waiting if !has_failed => Some(inserted.max(task.not_before_unix_ms)),
            TaskPlace::Delayed if !has_failed => Some(inserted),
            TaskPlace::Delayed => last_failure,
            TaskPlace::Reported => record.map(|record| record.final_unix_ms),
            TaskPlace::Waiting | TaskPlace::Lost => None,
        }
    }

    /// Returns what happens to the task next, and when, if that is known.
    fn next(&self, place: TaskPlace) -> (String, Option<i64>) {
        let due = match self.place_in_sql {
            // A task that is sent again is due at 0, that is, at once. There is no time to show.
            Some(Place::Off { due_unix_ms, .. }) => due_unix_ms.filter(|due| *due > 0),
            _ => None,
        };
        let record = self.record();
        match place {
            TaskPlace::Finished => ("nothing happens to it any more".to_owned(), None),
            TaskPlace::Outbox => (
                "taskd publishes it at once; if the process died that stored it, the watchdog does"
                    .to_owned(),
                due,
            ),
            TaskPlace::Parked if self.is_crowded() => (
                "the watchdog brings it to its queue when few tasks of its limit key are left there"
                    .to_owned(),
                None,
            ),
            TaskPlace::Parked => (
                "the watchdog publishes it when its queue has room again".to_owned(),
                None,
            ),
            TaskPlace::Scheduled => (
                "the watchdog publishes it, shortly before its time".to_owned(),
                due,
            ),
            TaskPlace::Behind => {
                let is_held = self.sequence.as_ref().is_some_and(|place| place.is_held);
                let what = if is_held {
                    "somebody sends the dead task again or purges it; then the sequence goes on"
                } else {
                    "it goes to its queue when all before it in its sequence have ended"
                };
                (what.to_owned(), None)
            }
            TaskPlace::Bus => (
                "the fanout reads it, and puts it into its queue".to_owned(),
                None,
            ),
            TaskPlace::Waiting if self.behind_limit().is_some() => {
                let time = self.behind_limit().map(|limit| limit.next_start_unix_ms);
                let what = "its limit key lets it start, when leases of that key end or its time has come; then \
                            a worker gets it";
                (what.to_owned(), time.filter(|at| *at > self.now_unix_ms))
            }
            TaskPlace::Waiting => (self.claimed_next(), None),
            TaskPlace::Leased => {
                let first = record.and_then(|record| {
                    record
                        .held
                        .iter()
                        .filter_map(|held| held.expires_unix_ms)
                        .min()
                });
                ("a worker completes or rejects it; otherwise it has failed when its lease expires".into(), first)
            }
            TaskPlace::Delayed => {
                let first = record.and_then(|record| record.due_unix_ms.iter().min().copied());
                ("the watchdog offers it to workers".to_owned(), first)
            }
            TaskPlace::Reported => (
                "taskd reads the report, and SQL shows its end".to_owned(),
                None,
            ),
            TaskPlace::Lost => (
                "the watchdog finds it, and publishes it again".to_owned(),
                due,
            ),
        }
    }

    fn claimed_next(&self) -> String {
        let queue = &self.detail.task.queue;
        let before = self.record().and_then(|record| record.before);
        let which = match self.names_in_use() {
            Some(names) => format!(" with another name than {names}"),
            None => String::new(),
        };
        let claimed = format!(
            "a worker{which} that asks for tasks of queue {queue} gets it{}",
            ahead(before)
        );
        if self.is_paused {
            return format!("an operator resumes queue {queue}; then {claimed}");
        }
        if self.pause().is_some() {
            return format!("its shard gives out tasks again; then {claimed}");
        }
        claimed
    }

    /// The workers that have completed the task or hold it: it needs others.
    fn names_in_use(&self) -> Option<String> {
        const SHOWN: usize = 3;
        let record = self.record()?;
        let credited = record.credited.iter().map(String::as_str);
        let held = record.held.iter().map(|held| held.worker.as_str());
        let names: Vec<&str> = credited.chain(held).collect();
        let more = match names.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} others"),
        };
        let shown = names[..names.len().min(SHOWN)].join(", ");
        (!names.is_empty()).then(|| shown + &more)
    }

    fn notes(&self, place: TaskPlace, settings: &QueueSettings) -> Vec<String> {
        let task = &self.detail.task;
        let mut notes = Vec::new();
        match (place, self.record()) {
            (TaskPlace::Finished, _) if !self.detail.reason.is_empty() => {
                notes.push(format!("reason: {}", self.detail.reason));
            }
            (TaskPlace::Leased, Some(record)) => {
                let waiting = record.waiting as usize;
                let left = (record.replicas as usize)
                    .saturating_sub(record.credited.len() + record.held.len() + waiting);
                if left > 0 {
                    notes.push(format!(
                        "{left} of its {} replicas wait for other workers",
                        record.replicas
                    ));
                }
                if waiting > 0 {
                    notes.push(format!(
                        "{waiting} of its {} replicas wait for their next attempt",
                        record.replicas
                    ));
                }
            }
            _ => {}
        }
        let limit = task.backoff.map_or(0, |backoff| backoff.give_up_after_ms);
        if limit > 0 && place != TaskPlace::Finished && self.detail.epoch == 0 {
            let limit = humantime::format_duration(Duration::from_millis(limit));
            let from = if task.not_before_unix_ms > task.created_unix_ms {
                "its not_before"
            } else {
                "its insert"
            };
            notes.push(format!(
                "it is dead if its next attempt would begin later than {limit} after {from}"
            ));
        }
        if let Some(deadline) = self.deadline(place) {
            notes.push(deadline);
        }
        if let Some(tree) = &self.tree {
            notes.push(tree.says());
        }
        if let Some(on_bus) = &self.on_bus {
            notes.push(format!(
                "about {} records of pipeline are not processed yet",
                on_bus.backlog
            ));
        }
        if let Some((shard, stats)) = &self.full {
            notes.push(format!(
                "shard {shard} holds {} tasks ahead of its foremost worker (high_water_tasks {}), {} bytes \
                 (high_water_bytes {}) and {} live tasks (at most {}); room is below nine tenths of each",
                stats.ahead,
                settings.high_water_tasks,
                stats.waiting_bytes,
                settings.high_water_bytes,
                stats.live,
                settings.live_tasks_max(),
            ));
        }
        if let Some((worker, _)) = self.record().and_then(|record| record.reserved.as_ref()) {
            notes.push(format!("an operator has reserved it for worker {worker}"));
        }
        if self.is_paused && place != TaskPlace::Finished {
            notes.push(format!(
                "queue {} is paused: no worker gets anything of it until it is resumed",
                task.queue
            ));
        }
        let in_sql = place != TaskPlace::Finished && self.record().is_none();
        if let Some(shortage) = self.shortage.as_ref().filter(|_| in_sql) {
            notes.push(shortage.why.clone());
        }
        if !in_sql && let Some(pause) = self.pause() {
            let number = task.partition;
            let why = says_pause(pause);
            notes.push(format!(
                "shard {}:{number} gives no worker anything now: {why}",
                task.queue
            ));
        }
        notes
    }

    fn deadline(&self, place: TaskPlace) -> Option<String> {
        let deadline = self.detail.task.deadline_unix_ms;
        if deadline == 0
            || self.detail.epoch > 0
            || matches!(place, TaskPlace::Finished | TaskPlace::Reported)
        {
            return None;
        }
        Some(match deadline > self.now_unix_ms {
            true => format!(
                "it is dead if it is not completed by {}",
                to_rfc_3339(deadline)
            ),
            false => format!(
                "{}: the watchdog is about to end it",
                deadline_passed(deadline)
            ),
        })
    }

    /// Why its shard gives out nothing now. `is_paused`: an operator has paused the whole queue.
    fn pause(&self) -> Option<Pause> {
        let is_full = self
            .shortage
            .as_ref()
            .is_some_and(|shortage| shortage.is_full);
        self.shard.as_ref()?.pause(is_full)
    }

    /// Says whether this worker gets the task, and if not, why: by `bar` of `lua/lib/record.lua`,
    /// which decides claims as well.
    #[allow(clippy::too_many_lines, reason = "a branch for each reason")]
    fn worker(&self, worker: &WorkerName, place: TaskPlace) -> WorkerView {
        let view = |reason, says: String, until_unix_ms| WorkerView {
            worker: worker.to_string(),
            reason,
            says,
            until_unix_ms,
        };
        if self.has_completed {
            let says = format!("{worker} has completed it, and no worker does a task twice");
            return view(WorkerReason::CompletedIt, says, None);
        }
        let Some(record) = self.record() else {
            let (reason, says) = match place {
                TaskPlace::Finished => (WorkerReason::Finished, "it is finished"),
                _ => (WorkerReason::NotInQueue, "it is not in its queue now"),
            };
            return view(reason, says.to_owned(), self.next(place).1);
        };
        let first_lease = record
            .held
            .iter()
            .filter_map(|held| held.expires_unix_ms)
            .min();
        let own_lease = record
            .held
            .iter()
            .find(|held| held.worker == worker.as_str());
        let first_due = record.due_unix_ms.iter().min().copied();
        let Some(bar) = record.bar else {
            if self.is_paused {
                let says = format!(
                    "nobody gets it now: queue {} is paused",
                    self.detail.task.queue
                );
                return view(WorkerReason::QueuePaused, says, None);
            }
            if let Some(pause) = self.pause() {
                return view(
                    WorkerReason::ClaimsPaused,
                    format!("nobody gets it now: {}", says_pause(pause)),
                    None,
                );
            }
            if let Some(limit) = record.limit {
                let until = Some(limit.next_start_unix_ms).filter(|at| *at > self.now_unix_ms);
                return view(WorkerReason::LimitReached, self.waits_for_limit(), until);
            }
            let queue = &self.detail.task.queue;
            let ahead = ahead(record.before_worker);
            let says = format!("the worker gets it by asking for tasks of queue {queue}{ahead}");
            return view(WorkerReason::MayGet, says, None);
        };
        let (reason, says, until) = match bar {
            Ineligibility::Final => (
                WorkerReason::Finished,
                "its end is decided".to_owned(),
                None,
            ),
            Ineligibility::Completed => {
                let says = format!("{worker} has completed it, and no worker does a task twice");
                (WorkerReason::CompletedIt, says, None)
            }
            Ineligibility::Holds => {
                let until = own_lease.and_then(|lease| lease.expires_unix_ms);
                (
                    WorkerReason::HoldsIt,
                    format!("{worker} holds it already"),
                    until,
                )
            }
            Ineligibility::Refused => {
                let says = format!(
                    "{worker} has failed it as often as one worker may, or an operator took it from {worker}"
                );
                (WorkerReason::RefusedIt, says, None)
            }
            Ineligibility::Reserved => {
                let (other, until) = record.reserved.clone().unwrap_or_default();
                let says = format!("an operator has reserved it for worker {other}");
                (
                    WorkerReason::ReservedForAnother,
                    says,
                    Some(until).filter(|until| (1..queue::NEVER).contains(until)),
                )
            }
            Ineligibility::Scheduled => (
                WorkerReason::NotDue,
                "its time has not come".to_owned(),
                first_due,
            ),
            Ineligibility::Rests => (
                WorkerReason::InBackoff,
                format!("{worker} gave it back a moment ago, and others come first"),
                None,
            ),
            Ineligibility::Backoff => (
                WorkerReason::InBackoff,
                "it waits for its next attempt".to_owned(),
                first_due,
            ),
            Ineligibility::Leased => {
                let says = format!("{}, and no replica is left", self.holders());
                (
                    WorkerReason::LeasedByOthers,
                    says,
                    // When the first lease ends, or a replica's backoff if that is earlier.
                    first_lease.min(first_due.or(first_lease)),
                )
            }
        };
        view(reason, says, until)
    }
}

fn lease(held: &queue::TaskLease) -> LeaseView {
    let queue::TaskLease {
        worker,
        expires_unix_ms,
        is_delivered,
        ..
    } = held.clone();
    LeaseView {
        worker,
        expires_unix_ms,
        is_delivered,
    }
}

/// Says how many tasks of its lane go before it, if that is known.
fn ahead(before: Option<u64>) -> String {
    match before {
        None => String::new(),
        Some(0) => "; it is the next of its priority".to_owned(),
        Some(1) => "; one task of its priority may go before it".to_owned(),
        Some(count) => format!("; {count} tasks of its priority may go before it"),
    }
}

fn says_pause(pause: Pause) -> &'static str {
    match pause {
        Pause::Outbox => "its outbox is full, because the bus takes no reports",
        Pause::Memory => "Redis has no memory left, and enough leases are out",
    }
}
