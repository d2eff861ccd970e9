//! For workers: claim, complete, give back, extend.

use std::{sync::Arc, time::Duration};

use redis::Value;
use tokio::sync::mpsc;

use super::{
    Claim, Code, Completion, Delivery, Error, Extension, Granted, HandBack, How, Leased, Queue, Result, Shard,
    keys::ShardKeys,
    lost_without_generation, run,
    scripts::{self, Call, Script},
    seed,
    shard::Notes,
    types::Undelivered,
    upkeep::{OUTBOX_FULL, OUTBOX_FULL_BYTES},
    wire::{bytes, items, number, packed_ms, pairs, task_id},
};
use crate::{
    model::{LeaseToken, Priority, ShardId},
    redis_pool::{Connection, Redis},
    telemetry::metrics,
};

/// Elements that one claim looks at, at most, before it answers `more`.
const SCAN_BUDGET: usize = 2000;
/// Tasks and requests in one script call, at most: far below what Lua's stack holds.
pub(super) const MAX_COMBINED: usize = 1000;
/// Bytes that the answer to one call may have, about: as long as Redis writes it, nobody else is served.
const CALL_BYTES: usize = 16 << 20;
/// Leases of a shard that may be out at full memory. With none, a Redis in which everything waits would stay full for ever.
const LEASES_AT_FULL_MEMORY: usize = 16;
/// Bytes in a shard's outbox at which completions are refused. Those who hold leases when claims pause have room for their reports.
const OUTBOX_MAX_BYTES: usize = 4 * OUTBOX_FULL_BYTES;

impl Queue {
    /// Leases tasks of the shard to the worker. A shard that Redis lost has nothing.
    pub async fn claim(&self, shard: &Shard, claim: Claim) -> Result<Granted> {
        let (weight, worker) = (claim.max_tasks, claim.worker.clone());
        match shard.claims.call(claim, weight).await {
            Err(Error::NoGeneration) => {
                let (notes, release) = (Arc::clone(&shard.notes), self.0.release.clone());
                let delivery = Delivery { worker, leases: Vec::new(), shard: shard.id.clone(), notes, release };
                Ok(Granted { tasks: Vec::new(), more: false, delivery })
            }
            other => other,
        }
    }

    /// The priorities of which the shard has elements, the most urgent first. What is spent or was done by the caller counts too.
    pub async fn peek(&self, shard: &Shard) -> Result<Vec<Priority>> {
        let sum = lost_without_generation(shard.peeks.call((), 1).await, || 0)?;
        Ok(Priority::ALL.into_iter().enumerate().filter(|(i, _)| sum >> i & 1 == 1).map(|(_, p)| p).collect())
    }

    /// Credits the worker. When it answers `Ok`, the report is as durable as Redis.
    pub async fn complete(&self, completion: Completion) -> Result<Code> {
        let id = completion.token.shard.clone();
        let answer = match self.shard(&id) {
            Some(shard) => {
                // Large reports count as many: an outbox entry stays below some 16 MiB.
                let weight = 1 + completion.report.len() / (16 << 10);
                shard.completions.call(completion, weight).await
            }
            // Another process may know the shard; a token that was made up finds nothing.
            None => complete(self.0.redis.clone(), self.keys(&id), vec![completion]).await.map(|codes| codes[0]),
        };
        lost_without_generation(answer, || Code::LeaseLost)
    }

    /// Gives leases of one shard back; answers per item, and whether the task is dead now.
    pub async fn hand_back(
        &self,
        shard: &ShardId,
        back: &[HandBack],
        backoff: &[Duration],
    ) -> Result<Vec<(Code, bool)>> {
        let answer = self
            .call(&scripts::REJECT, shard, back.len(), |call| {
                call.arg(seed()).arg(self.wake_channel()).arg(shard.queue.as_str()).arg(packed_ms(backoff));
                for item in back {
                    let (mode, delay) = match item.how {
                        How::Retry(None) => ("retry", String::new()),
                        How::Retry(Some(delay)) => ("retry", delay.as_millis().to_string()),
                        How::Never => ("never", String::new()),
                        How::Release => ("release", String::new()),
                    };
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(mode).arg(delay).arg(item.reason.as_str());
                }
            })
            .await
            .and_then(|value| pairs(value, back.len()));
        self.touch(shard);
        let lost = || vec![(Code::LeaseLost, 0); back.len()];
        let answers = lost_without_generation(answer, lost)?;
        Ok(answers.into_iter().map(|(code, dead)| (code, dead != 0)).collect())
    }

    /// Extends leases of one shard; answers per item, and the new deadline in unix ms.
    pub async fn extend(&self, shard: &ShardId, extensions: &[Extension]) -> Result<Vec<(Code, i64)>> {
        let answer = self
            .call(&scripts::EXTEND, shard, extensions.len(), |call| {
                for item in extensions {
                    let by = u64::try_from(item.by.as_millis()).unwrap_or(u64::MAX);
                    call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
                    call.arg(item.worker.as_str()).arg(by);
                }
            })
            .await
            .and_then(|value| pairs(value, extensions.len()));
        lost_without_generation(answer, || vec![(Code::LeaseLost, 0); extensions.len()])
    }

    /// Reports the grants whose answers have reached their workers.
    pub(super) async fn report_delivered(&self, shard: &Shard) -> Result<()> {
        loop {
            let grants = shard.notes.take_delivered();
            if grants.is_empty() {
                return Ok(());
            }
            let reported = self.call(&scripts::DELIVERED, &shard.id, grants.len(), |call| {
                call.arg(&grants);
            });
            match reported.await {
                Ok(_) => {}
                // Its leases went with it.
                Err(Error::NoGeneration) => return Ok(()),
                Err(error) => {
                    shard.notes.put_back_delivered(grants);
                    return Err(error);
                }
            }
        }
    }
}

pub(super) async fn claim(
    mut conn: Connection,
    keys: ShardKeys,
    shard: ShardId,
    notes: Arc<Notes>,
    release: mpsc::UnboundedSender<Undelivered>,
    requests: Vec<Claim>,
) -> Result<Vec<Granted>> {
    let delivered = notes.take_delivered();
    let ask = |script: &'static Script, leases_max: Option<usize>| {
        let mut call = script.on(&keys, None);
        call.arg(SCAN_BUDGET).arg(OUTBOX_FULL).arg(OUTBOX_FULL_BYTES).arg(CALL_BYTES);
        call.arg(leases_max.map(|max| max.to_string()).unwrap_or_default());
        call.arg(delivered.len()).arg(&delivered);
        for (place, request) in requests.iter().enumerate() {
            let most = leases_max.map_or(request.max_tasks, |max| usize::from(place < max));
            argue(&mut call, request, most);
        }
        call
    };
    let mut answer = run(&scripts::CLAIM, requests.len(), &ask(&scripts::CLAIM, None), &mut conn).await;
    if answer.as_ref().is_err_and(Error::is_out_of_memory) {
        let trickle = ask(&scripts::CLAIM_AT_FULL_MEMORY, Some(LEASES_AT_FULL_MEMORY));
        answer = run(&scripts::CLAIM_AT_FULL_MEMORY, requests.len(), &trickle, &mut conn).await;
    }
    if answer.is_err() {
        notes.put_back_delivered(delivered);
    }
    let mut answer = items(answer?)?.into_iter();
    let generation = number(answer.next())?;
    let paused = number::<u8>(answer.next())? == 1;
    let mut granted = Vec::with_capacity(requests.len());
    for request in requests {
        let (shard, notes, release) = (shard.clone(), Arc::clone(&notes), release.clone());
        let delivery = Delivery { worker: request.worker, leases: Vec::new(), shard, notes, release };
        let mut one = Granted { tasks: Vec::new(), more: false, delivery };
        if !paused {
            let part = answer.next().ok_or_else(|| Error::Answer("a claim is missing".into()))?;
            read_grant(&mut one, generation, part)?;
        }
        granted.push(one);
    }
    if granted.iter().any(|one| !one.is_empty()) {
        notes.touch();
    }
    Ok(granted)
}

fn argue(call: &mut Call, request: &Claim, max_tasks: usize) {
    let lease_ms = request.lease.map_or(0, |lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
    let priority = request.priority.map_or(0, |priority| priority as u8);
    call.arg(request.worker.as_str()).arg(max_tasks).arg(request.max_bytes).arg(u8::from(request.is_first));
    call.arg(lease_ms).arg(priority);
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

pub(super) async fn peek(mut conn: Connection, keys: ShardKeys, callers: usize) -> Result<Vec<u8>> {
    let sum = number(Some(run(&scripts::PEEK, callers, &scripts::PEEK.on(&keys, None), &mut conn).await?))?;
    Ok(vec![sum; callers])
}

pub(super) async fn complete(redis: Redis, keys: ShardKeys, completions: Vec<Completion>) -> Result<Vec<Code>> {
    let mut call = scripts::COMPLETE.on(&keys, None);
    call.arg(OUTBOX_MAX_BYTES);
    for item in &completions {
        call.arg(item.id.as_bytes()).arg(item.token.generation).arg(item.token.grant);
        call.arg(item.worker.as_str()).arg(item.token.attempt).arg(&item.report[..]);
    }
    let answer = match redis.durability() {
        None => run(&scripts::COMPLETE, completions.len(), &call, &mut redis.conn()).await?,
        Some(durability) => {
            let (mut conn, _turn) = redis.waiting_conn().await?;
            let started = std::time::Instant::now();
            let answer = call.run_durably(&mut conn, durability, keys.waiting()).await;
            metrics::redis_script(scripts::COMPLETE.name, completions.len(), started.elapsed());
            answer?
        }
    };
    let answer = items(answer)?;
    if answer.len() != completions.len() {
        return Err(Error::Answer(format!("{} codes for {} completions", answer.len(), completions.len())));
    }
    answer.into_iter().map(|code| Code::from_number(number(Some(code))?)).collect()
}
