//! For workers: claim, complete, reject, extend.

use std::{ops::Deref, sync::Arc, time::Duration};

use redis::Value;
use tokio::sync::mpsc;

use super::{
    Claim, Code, Completion, Delivery, Error, Extension, Granted, Leased, RejectMode, Rejection, Result, Shard, Shards,
    error::lost_without_generation,
    ms, seed,
    shard::{Notes, Reach},
    types::Undelivered,
    upkeep::{OUTBOX_FULL, OUTBOX_FULL_BYTES},
    wire::{bytes, items, number, packed_ms, pairs, task_id},
};
use crate::{
    model::{LeaseToken, Priority, ShardId},
    redis_pool::{Batch, Call, Script, scripts},
};

/// Elements that one claim looks at, at most, before it answers `more`.
const SCAN_BUDGET: usize = 2000;
/// Tasks and requests in one script call, at most: far below what Lua's stack holds.
pub(super) const MAX_COMBINED: usize = 1000;
/// Bytes that the answer to one call may have, about. While Redis writes it, no other caller is served.
const CALL_BYTES: usize = 16 << 20;
/// Leases of a shard that may be out at full memory. With none, a Redis in which everything waits would stay full.
const LEASES_AT_FULL_MEMORY: usize = 16;
/// Bytes in a shard's outbox at which completions are refused. Workers that hold leases when claims pause have room for
/// their reports.
const OUTBOX_MAX_BYTES: usize = 4 * OUTBOX_FULL_BYTES;

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
    /// Leases tasks of the shard to the worker. A shard that Redis lost has nothing.
    pub async fn claim(&self, shard: &Shard, claim: Claim) -> Result<Granted> {
        let (weight, worker) = (claim.max_tasks, claim.worker.clone());
        match shard.claims.call(claim, weight).await {
            Err(Error::NoGeneration) => {
                let (notes, release) = (Arc::clone(&shard.notes), self.0.0.release.clone());
                let delivery = Delivery { worker, leases: Vec::new(), shard: shard.id.clone(), notes, release };
                Ok(Granted { tasks: Vec::new(), more: false, delivery })
            }
            other => other,
        }
    }

    /// The priorities of which the shard has elements, the most urgent first. Elements that are spent, or that the
    /// caller has done, count too.
    pub async fn peek(&self, shard: &Shard) -> Result<Vec<Priority>> {
        let sum = lost_without_generation(shard.peeks.call((), 1).await, || 0)?;
        Ok(Priority::ALL.into_iter().enumerate().filter(|(i, _)| sum >> i & 1 == 1).map(|(_, p)| p).collect())
    }

    /// Credits the worker. When it answers `Ok`, the report is as durable as Redis.
    pub async fn complete(&self, completion: Completion) -> Result<Code> {
        let id = completion.token.shard.clone();
        let answer = match self.shard(&id) {
            Some(shard) => {
                // Large reports count as many, so that an outbox entry stays below some 16 MiB.
                let weight = 1 + completion.report.len() / (16 << 10);
                shard.completions.call(completion, weight).await
            }
            // Another process may know the shard. A made-up token finds nothing.
            None => complete(self.reach(&id), vec![completion]).await.map(|codes| codes[0]),
        };
        lost_without_generation(answer, || Code::LeaseLost)
    }

    /// Rejects leases of one shard; answers per item, and whether the task is dead now.
    pub async fn reject(
        &self,
        shard: &ShardId,
        rejections: &[Rejection],
        backoff: &[Duration],
    ) -> Result<Vec<(Code, bool)>> {
        let answer = self
            .call(&scripts::REJECT, shard, rejections.len(), |call| {
                call.arg(seed()).arg(self.wake_channel()).arg(shard.queue.as_str()).arg(packed_ms(backoff));
                for item in rejections {
                    let (mode, delay) = match item.mode {
                        RejectMode::Retry(None) => ("retry", String::new()),
                        RejectMode::Retry(Some(delay)) => ("retry", delay.as_millis().to_string()),
                        RejectMode::Never => ("never", String::new()),
                        RejectMode::Release => ("release", String::new()),
                    };
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(mode).arg(delay).arg(item.reason.as_str());
                }
            })
            .await
            .and_then(|value| pairs(value, rejections.len()));
        self.touch(shard);
        let lost = || vec![(Code::LeaseLost, 0); rejections.len()];
        let answers = lost_without_generation(answer, lost)?;
        Ok(answers.into_iter().map(|(code, dead)| (code, dead != 0)).collect())
    }

    /// Extends leases of one shard; answers per item, and the new deadline in unix ms.
    pub async fn extend(&self, shard: &ShardId, extensions: &[Extension]) -> Result<Vec<(Code, i64)>> {
        let answer = self
            .call(&scripts::EXTEND, shard, extensions.len(), |call| {
                for item in extensions {
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(ms(item.by));
                }
            })
            .await
            .and_then(|value| pairs(value, extensions.len()));
        lost_without_generation(answer, || vec![(Code::LeaseLost, 0); extensions.len()])
    }
}

pub(super) async fn claim(
    reach: Reach,
    notes: Arc<Notes>,
    release: mpsc::UnboundedSender<Undelivered>,
    requests: Vec<Claim>,
) -> Result<Vec<Granted>> {
    let delivered = notes.take_delivered();
    let mut conn = reach.redis.conn();
    let ask = |script: &'static Script, leases_max: Option<usize>| {
        let mut call = reach.call(script).of_items(requests.len());
        call.arg(SCAN_BUDGET).arg(OUTBOX_FULL).arg(OUTBOX_FULL_BYTES).arg(CALL_BYTES);
        call.arg(leases_max.map(|max| max.to_string()).unwrap_or_default());
        call.arg(delivered.len()).arg(&delivered);
        for (place, request) in requests.iter().enumerate() {
            let most = leases_max.map_or(request.max_tasks, |max| usize::from(place < max));
            argue(&mut call, request, most);
        }
        call
    };
    let mut answer = ask(&scripts::CLAIM, None).run(&mut conn).await.map_err(Error::from);
    if answer.as_ref().is_err_and(Error::is_out_of_memory) {
        let trickle = ask(&scripts::CLAIM_AT_FULL_MEMORY, Some(LEASES_AT_FULL_MEMORY));
        answer = trickle.run(&mut conn).await.map_err(Error::from);
    }
    if answer.is_err() {
        notes.put_back_delivered(delivered);
    }
    let granted = read_grants(answer?, requests, &notes, &release)?;
    if granted.iter().any(|one| !one.is_empty()) {
        notes.touch();
    }
    Ok(granted)
}

fn argue(call: &mut Call, request: &Claim, max_tasks: usize) {
    let lease_ms = request.lease.map_or(0, ms);
    let priority = request.priority.map_or(0, |priority| priority as u8);
    call.arg(request.worker.as_str()).arg(max_tasks).arg(request.max_bytes).arg(u8::from(request.is_first));
    call.arg(lease_ms).arg(priority);
}

fn read_grants(
    answer: Value,
    requests: Vec<Claim>,
    notes: &Arc<Notes>,
    release: &mpsc::UnboundedSender<Undelivered>,
) -> Result<Vec<Granted>> {
    let mut answer = items(answer)?.into_iter();
    let generation = number(answer.next())?;
    let paused = number::<u8>(answer.next())? == 1;
    let mut granted = Vec::with_capacity(requests.len());
    for request in requests {
        let (shard, notes, release) = (notes.id.clone(), Arc::clone(notes), release.clone());
        let delivery = Delivery { worker: request.worker, leases: Vec::new(), shard, notes, release };
        let mut one = Granted { tasks: Vec::new(), more: false, delivery };
        if !paused {
            let part = answer.next().ok_or_else(|| Error::Answer("a claim is missing".into()))?;
            read_grant(&mut one, generation, part)?;
        }
        granted.push(one);
    }
    Ok(granted)
}

fn read_grant(one: &mut Granted, generation: u64, answer: Value) -> Result<()> {
    let mut parts = items(answer)?.into_iter();
    let grant = number(parts.next())?;
    one.more = number::<u8>(parts.next())? == 1;
    for task in parts {
        let mut fields = items(task)?.into_iter();
        let (id, body) = (task_id(fields.next())?, bytes(fields.next())?);
        let (shard, attempt) = (one.delivery.shard.clone(), number(fields.next())?);
        let token = LeaseToken { shard, generation, grant, attempt };
        one.delivery.leases.push((id, token.clone()));
        one.tasks.push(Leased { id, token, body, expires_unix_ms: number(fields.next())? });
    }
    Ok(())
}

pub(super) async fn peek(reach: Reach, callers: usize) -> Result<Vec<u8>> {
    let answer = reach.call(&scripts::PEEK).of_items(callers).run(&mut reach.redis.conn()).await?;
    Ok(vec![number(Some(answer))?; callers])
}

pub(super) async fn complete(reach: Reach, completions: Vec<Completion>) -> Result<Vec<Code>> {
    let mut call = reach.call(&scripts::COMPLETE).of_items(completions.len());
    call.arg(OUTBOX_MAX_BYTES);
    for item in &completions {
        call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
        call.arg(item.worker.as_str()).arg(item.token.attempt).arg(&item.report[..]);
    }
    let answer = match reach.redis.durability() {
        None => call.run(&mut reach.redis.conn()).await?,
        Some(durability) => {
            let (mut conn, _turn) = reach.redis.waiting_conn().await?;
            let mut batch = Batch::default();
            batch.script(call);
            durability.ask(&mut batch, reach.keys.waited());
            let mut answers = batch.run_all(&mut conn).await?;
            durability.judge_last(&mut answers)?;
            answers.swap_remove(0)
        }
    };
    let answer = items(answer)?;
    if answer.len() != completions.len() {
        return Err(Error::Answer(format!("{} codes for {} completions", answer.len(), completions.len())));
    }
    answer.into_iter().map(|code| Code::from_number(number(Some(code))?)).collect()
}
