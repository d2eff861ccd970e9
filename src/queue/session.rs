//! Ends the leases of a session.

use std::time::Duration;

use super::{
    error::{Result, lost_without_generation},
    types::{Code, OUTBOX_FULL_BYTES, RejectMode, Rejection},
    wire::{packed_ms, pairs, seed},
    worker::WorkerQueue,
};
use crate::{
    model::{LeaseToken, ShardId, TaskId, WorkerName},
    redis_pool::scripts,
};

/// The most leases in one call.
const AT_ONCE: usize = 500;

/// A lease of a session that ended.
#[derive(Clone, Debug)]
pub struct EndedLease {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    /// The last deadline that the session knows. A lease with another deadline is left alone.
    pub deadline_unix_ms: i64,
    pub started: Started,
}

/// Whether the worker had started a task: then the end of its lease is a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    No,
    /// Not known. The end counts as a failure if the task has reached the worker.
    Perhaps,
    Yes,
}

/// What the end of a lease means for its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEnd {
    /// The lease was already over, or was extended elsewhere.
    None,
    /// The task is offered again, at no cost.
    Offered,
    /// The end counted as a failure: the task waits for its backoff, …
    Failed,
    /// … or is dead.
    Dead,
}

impl WorkerQueue {
    /// Ends leases of one shard. Returns one outcome per lease.
    pub async fn end_leases(
        &self,
        shard: &ShardId,
        leases: &[EndedLease],
        backoff: &[Duration],
        reason: &str,
    ) -> Result<Vec<LeaseEnd>> {
        let mut ends = Vec::with_capacity(leases.len());
        for leases in leases.chunks(AT_ONCE) {
            let since = self.announcer().now_unix_ms();
            let answer = self.call(&scripts::SESSION_END, shard, leases.len(), |call| {
                call.arg(seed())
                    .arg(self.wake_channel())
                    .arg(shard.queue.as_str())
                    .arg(packed_ms(backoff));
                call.arg(OUTBOX_FULL_BYTES).arg(reason);
                for lease in leases {
                    call.arg(lease.id.as_bytes())
                        .arg(lease.token.generation)
                        .arg(lease.token.grant);
                    call.arg(lease.worker.as_str())
                        .arg(lease.deadline_unix_ms)
                        .arg(lease.started as u8);
                    call.arg(self.failed_attempt(lease, reason));
                }
            });
            let answer = answer.await.and_then(|value| pairs(value, leases.len()));
            self.offered(shard);
            self.note_ended(shard);
            // A shard that Redis lost has no leases.
            let lost = || vec![(Code::LeaseLost, 0); leases.len()];
            let answers = lost_without_generation(answer, lost)?;
            let ended = leases
                .iter()
                .zip(&answers)
                .filter(|(_, (_, outcome))| matches!(outcome, 1 | 2));
            self.announcer().announce(
                &shard.queue,
                since,
                ended.map(|(lease, _)| (lease.id, None)),
            );
            ends.extend(answers.into_iter().map(|(_, outcome)| match outcome {
                1 => LeaseEnd::Offered,
                2 => LeaseEnd::Failed,
                3 => LeaseEnd::Dead,
                _ => LeaseEnd::None,
            }));
        }
        Ok(ends)
    }

    fn failed_attempt(&self, lease: &EndedLease, reason: &str) -> Vec<u8> {
        if lease.started == Started::No {
            return Vec::new();
        }
        let EndedLease {
            id, token, worker, ..
        } = lease.clone();
        let mode = RejectMode::Retry(None);
        self.history().rejected(&Rejection {
            id,
            token,
            worker,
            mode,
            reason: reason.to_owned(),
            limit: Default::default(),
        })
    }
}
