//! The workers' side of the queue: claim, complete, reject, extend.

use std::{borrow::Cow, ops::Deref, sync::Arc, time::Duration};

use futures::future;

use super::{
    calls::{MAX_COMBINED, complete},
    delivery::{Delivery, Granted},
    error::{Error, Result, lost_without_generation},
    shard::Shard,
    shards::Shards,
    types::{
        Claim, Code, Completion, Extension, OUTBOX_FULL_BYTES, RejectMode, Rejection, Together,
    },
    wake_message::WakeMessage,
    wire::{ms, packed, packed_ms, pairs, seed},
};
use crate::{
    model::{LimitReport, Priority, ShardId, TaskStatus},
    redis_pool::scripts,
};

/// The tasks service's side of the queue.
#[derive(Clone)]
pub struct WorkerQueue(pub(super) Shards);

impl Deref for WorkerQueue {
    type Target = Shards;

    fn deref(&self) -> &Shards {
        &self.0
    }
}

impl WorkerQueue {
    /// Leases tasks of the shard to the worker. Grants nothing if Redis lost the shard.
    pub async fn claim(&self, shard: &Shard, claim: Claim) -> Result<Granted> {
        let weight = claim.max_tasks;
        let worker = claim.worker.clone();
        match shard.claims.call(claim, weight).await {
            Err(Error::NoGeneration) => {
                let cache = Arc::clone(&shard.cache);
                let release = self.release();
                let delivery = Delivery {
                    worker,
                    leases: Vec::new(),
                    shard: shard.id.clone(),
                    cache,
                    release,
                };
                Ok(Granted {
                    tasks: Vec::new(),
                    more: false,
                    overdue: 0,
                    again_soon: false,
                    delivery,
                })
            }
            other => {
                if let Ok(granted) = &other
                    && !granted.is_empty()
                {
                    // After the claim, and before the worker knows of it.
                    let announcer = self.announcer();
                    let assigned = granted
                        .tasks
                        .iter()
                        .map(|task| (task.id, Some(TaskStatus::Assigned)));
                    announcer.announce(&shard.id.queue, announcer.now_unix_ms(), assigned);
                }
                other
            }
        }
    }

    /// Returns the priorities of which the shard has elements, the most urgent first. Counts
    /// elements that are spent, or that the caller has done, too.
    ///
    /// `may_be_known`: an answer of the last second is good enough, if nothing has come since as
    /// far as this process knows. A caller with many queues takes tasks from only a few of them at
    /// a time.
    pub async fn peek(&self, shard: &Shard, may_be_known: bool) -> Result<Vec<Priority>> {
        let sum = match shard.cache.priorities().filter(|_| may_be_known) {
            Some(known) => known,
            None => lost_without_generation(shard.peeks.call((), 1).await, || 0)?,
        };
        Ok(Priority::ALL
            .into_iter()
            .enumerate()
            .filter(|(i, _)| sum >> i & 1 == 1)
            .map(|(_, p)| p)
            .collect())
    }

    /// Credits the worker. If this returns `Ok`, the report is as durable as Redis.
    pub async fn complete(&self, completion: Completion) -> Result<Code> {
        let shard = completion.token.shard.clone();
        self.complete_all(&shard, &[completion].into())
            .await
            .swap_remove(0)
    }

    /// Completes several leases, all of this shard. Returns one outcome per completion.
    pub async fn complete_all(
        &self,
        id: &ShardId,
        completions: &Arc<[Completion]>,
    ) -> Vec<Result<Code>> {
        let shard = self.shard(id);
        let shard = shard.as_ref();
        let calls = Together::parts(completions, MAX_COMBINED).into_iter().map(
            |(part, weight)| async move {
                let count = part.len();
                let answer = match shard {
                    Some(shard) => shard.completions.call(part, weight).await,
                    // The shard is not known here, but another process may know it. A made-up token
                    // finds nothing.
                    None => complete(self.reach(id), None, vec![part])
                        .await
                        .map(|answers| answers.concat()),
                };
                match lost_without_generation(answer, || vec![Code::LeaseLost; count]) {
                    Ok(codes) => codes.into_iter().map(Ok).collect(),
                    Err(error) => vec![Err(error); count],
                }
            },
        );
        future::join_all(calls).await.concat()
    }

    /// Rejects leases of one shard. Returns for each item the code, and whether the task is dead
    /// now.
    pub async fn reject(
        &self,
        shard: &ShardId,
        rejections: &[Rejection],
        backoff: &[Duration],
    ) -> Result<Vec<(Code, bool)>> {
        let since = self.announcer().now_unix_ms();
        let rejecting = |wake: &WakeMessage| {
            let mut call = self
                .reach(shard)
                .call(&scripts::REJECT)
                .of_items(rejections.len());
            call.arg(seed())
                .arg(self.wake_channel())
                .arg(wake.to_string())
                .arg(packed_ms(backoff));
            call.arg(OUTBOX_FULL_BYTES);
            for item in rejections {
                let (mode, delay) = match item.mode {
                    RejectMode::Retry(None) => ("retry", String::new()),
                    RejectMode::Retry(Some(delay)) => ("retry", delay.as_millis().to_string()),
                    RejectMode::Never => ("never", String::new()),
                    RejectMode::Release => ("release", String::new()),
                    RejectMode::PutOff(delay) => ("put_off", delay.as_millis().to_string()),
                    RejectMode::Rest(rest) => ("rest", rest.as_millis().to_string()),
                };
                call.arg(item.id.as_bytes())
                    .arg(item.token.generation)
                    .arg(item.token.grant);
                let mode = match item.limit.is_empty() {
                    true => Cow::Borrowed(mode),
                    false => {
                        let LimitReport { hold, pace } = item.limit;
                        format!("{mode} {} {}", ms(hold), ms(pace)).into()
                    }
                };
                call.arg(item.worker.as_str())
                    .arg(&*mode)
                    .arg(delay)
                    .arg(item.reason.as_str());
                call.arg(self.history().rejected(item));
            }
            call
        };
        let count = rejections.len();
        let read = move |answer| pairs(answer, count);
        let goes_out = rejections.iter().any(|item| item.mode.is_at_once());
        let answer = self
            .offer(shard, goes_out, rejecting, read, |answers| {
                answers.iter().filter(is_open).count()
            })
            .await;
        self.note_ended(shard);
        let answers = lost_without_generation(answer, || vec![(Code::LeaseLost, 0); count])?;
        let rejected = rejections
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| is_open(answer));
        self.announcer().announce(
            &shard.queue,
            since,
            rejected.map(|(item, _)| (item.id, None)),
        );
        Ok(answers
            .into_iter()
            .map(|(code, dead)| (code, dead != 0))
            .collect())
    }

    /// Extends leases of one shard. Returns for each item the code, and the new deadline in unix
    /// ms.
    pub async fn extend(
        &self,
        shard: &ShardId,
        extensions: &[Extension],
    ) -> Result<Vec<(Code, i64)>> {
        self.prolong(shard, extensions, None).await
    }

    /// Extends leases that their worker may not have yet: an undelivered one stays undelivered.
    /// With `known`, a lease whose deadline differs from that is left alone: its answer is `Ok`
    /// with the deadline 0.
    pub async fn keep(
        &self,
        shard: &ShardId,
        extensions: &[Extension],
        known: Option<&Vec<i64>>,
    ) -> Result<Vec<(Code, i64)>> {
        self.prolong(
            shard,
            extensions,
            Some(known.map(packed).unwrap_or_default()),
        )
        .await
    }

    async fn prolong(
        &self,
        shard: &ShardId,
        extensions: &[Extension],
        by_taskd: Option<Vec<u8>>,
    ) -> Result<Vec<(Code, i64)>> {
        let answer = self
            .call(&scripts::EXTEND, shard, extensions.len(), |call| {
                for item in extensions {
                    call.arg(item.id.as_bytes())
                        .arg(item.token.generation)
                        .arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(ms(item.by));
                }
                if let Some(known) = by_taskd {
                    call.arg(known);
                }
            })
            .await
            .and_then(|value| pairs(value, extensions.len()));
        if let Some((shard, shortest)) = self
            .shard(shard)
            .zip(extensions.iter().map(|item| item.by).min())
        {
            shard.cache.note_lease(shortest);
        }
        lost_without_generation(answer, || vec![(Code::LeaseLost, 0); extensions.len()])
    }
}

/// Returns whether the rejection counted and its task is still live.
fn is_open(answer: &&(Code, i64)) -> bool {
    matches!(answer, (Code::Ok, 0))
}
