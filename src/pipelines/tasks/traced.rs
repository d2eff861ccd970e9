//! The spans `claim` and `work`: a task goes to its worker, and its worker reports it.

use std::{
    collections::HashMap,
    time::{SystemTime, UNIX_EPOCH},
};

use super::batch::{Outcomes, Placed};
use crate::{
    model::{LeaseToken, LeaseTrace, LeasedTask, SpanId, TaskId, TraceContext, WorkerName},
    queue::Code,
    telemetry::{
        metrics::Rejected,
        traces::{self, Hop, WorkEnd},
    },
};

/// Records the claim of a sampled task. The worker gets the span of its work as the parent of its
/// own spans, and the token carries it to the process that gets the report.
pub(super) fn claimed(mut task: LeasedTask, worker: &WorkerName, since: SystemTime) -> LeasedTask {
    let Some(parent) = TraceContext::sampled(&task.body.traceparent).filter(|_| traces::is_on())
    else {
        return task;
    };
    let attempt = task.token.attempt;
    let now = traces::now();
    let work = parent.at(work_of(parent, &task, worker, attempt));
    // A worker's first attempt of a task with several replicas is the first of its replica; a later
    // attempt may follow any worker's failure, so nothing says which was the first.
    let first = (attempt > 1 && task.body.replicas <= 1).then(|| work_of(parent, &task, worker, 1));
    traces::record(traces::Span {
        hop: Hop::Claim,
        context: work.at(traces::claim_of(work, task.token.lease())),
        parent: Some(parent.span),
        link: first.map(|first| parent.at(first)),
        start: since,
        end: now,
        task: task.id,
        queue: task.token.shard.queue.clone(),
        worker: Some(worker.as_str().to_owned()),
        attempt: Some(attempt),
        outcome: "leased",
        error: String::new(),
    });
    task.body.traceparent = work.to_string();
    let leased = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let leased_unix_us = u64::try_from(leased.as_micros()).unwrap_or(u64::MAX);
    task.token.trace = Some(Box::new(LeaseTrace {
        work,
        first,
        leased_unix_us,
    }));
    task
}

/// The span of an attempt. With one replica the attempts come one after the other, so that a later
/// one can name the first; with several the worker tells them apart.
fn work_of(parent: TraceContext, task: &LeasedTask, worker: &WorkerName, attempt: u32) -> SpanId {
    let worker = if task.body.replicas > 1 {
        worker.as_str()
    } else {
        ""
    };
    SpanId::derived(
        parent,
        "work",
        &[
            task.id.as_bytes(),
            &attempt.to_be_bytes(),
            worker.as_bytes(),
        ],
    )
}

/// The sampled items of a report. Most reports have none.
pub(super) struct Works(Vec<Work>);

struct Work {
    place: usize,
    task: TaskId,
    token: LeaseToken,
    trace: Box<LeaseTrace>,
    reason: String,
}

impl Works {
    pub(super) fn of<T>(
        items: &[Placed<T>],
        parts: impl Fn(&T) -> (TaskId, &LeaseToken, &str),
    ) -> Self {
        let work = |placed: &Placed<T>| {
            let (task, token, reason) = parts(&placed.item);
            let trace = token.trace.clone()?;
            Some(Work {
                place: placed.place,
                task,
                token: token.clone(),
                trace,
                reason: reason.to_owned(),
            })
        };
        Self(items.iter().filter_map(work).collect())
    }

    /// Records the work on completed tasks, and on those whose lease was over, which was in vain.
    pub(super) fn completed(self, worker: &WorkerName, outcomes: &Outcomes<Code>) {
        self.end(worker, outcomes, |code| match code {
            Code::Ok => Some("completed"),
            Code::LeaseLost => Some("lease_lost"),
            Code::Repeat
            | Code::AlreadyCompleted
            | Code::UnknownTask
            | Code::Cancelled
            | Code::NotLimited => None,
        });
    }

    /// Records the work on rejected tasks. One that was not started has no span, because its next
    /// lease is the same attempt.
    pub(super) fn rejected(self, worker: &WorkerName, outcomes: &Outcomes<(Code, Rejected)>) {
        self.end(worker, outcomes, |(code, end)| match (code, end) {
            (Code::Ok, Rejected::Retried) => Some("rejected"),
            (Code::Ok, Rejected::Dead) => Some("dead"),
            _ => None,
        });
    }

    fn end<A>(
        self,
        worker: &WorkerName,
        outcomes: &Outcomes<A>,
        outcome_of: impl Fn(&A) -> Option<&'static str>,
    ) {
        if self.0.is_empty() {
            return;
        }
        let outcomes = outcomes
            .iter()
            .filter_map(|(place, outcome)| Some((*place, outcome_of(outcome.as_ref().ok()?)?)));
        let outcomes: HashMap<usize, &str> = outcomes.collect();
        for Work {
            place,
            task,
            token,
            trace,
            reason,
        } in self.0
        {
            let Some(outcome) = outcomes.get(&place).copied() else {
                continue;
            };
            let error = match outcome {
                "completed" => String::new(),
                outcome if reason.is_empty() => outcome.to_owned(),
                _ => reason,
            };
            let LeaseToken { shard, attempt, .. } = &token;
            let queue = &shard.queue;
            let worker = worker.as_str();
            let attempt = *attempt;
            let lease = token.lease();
            traces::record_work(
                &trace,
                WorkEnd {
                    task,
                    queue,
                    worker,
                    attempt,
                    lease,
                    outcome,
                    error,
                },
            );
        }
    }
}
