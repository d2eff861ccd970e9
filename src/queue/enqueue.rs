//! For the fanout: shards are opened and closed, partitions have owners, tasks go in.

use std::time::Duration;

use super::{
    Closing, Enqueue, Enqueued, Error, Queue, Result, keys, scripts,
    wire::{items, number, numbers, packed_strings, text, unsigned},
};
use crate::model::{Offset, ShardId};

/// Shards of one call, at most.
const AT_ONCE: usize = 1000;

impl Queue {
    /// The number of the shard's life in Redis; `None`: never opened, or lost.
    pub async fn generation(&self, shard: &ShardId) -> Result<Option<u64>> {
        let key = keys::generation(self.0.redis.prefix(), shard);
        Ok(redis::cmd("GET").arg(key).query_async(&mut self.0.redis.conn()).await?)
    }

    /// Gives a shard that has no generation one, in one step with an empty state: records of `pipeline` up to `offset` count as enqueued.
    /// What stands in its outbox stays. Does nothing when the shard has a generation.
    pub async fn open_shard(
        &self,
        shard: &ShardId,
        life: u64,
        topic_generation: &str,
        offset: Option<Offset>,
    ) -> Result<()> {
        let stored = offset.map(|offset| format!("{topic_generation}/{offset}")).unwrap_or_default();
        self.call(&scripts::OPEN, shard, 1, |call| {
            call.arg(life).arg(stored);
        })
        .await?;
        Ok(())
    }

    /// The numbers of the shards' lives in Redis, in order, at once.
    pub async fn generations(&self, shards: &[ShardId]) -> Result<Vec<Option<u64>>> {
        let mut generations = Vec::with_capacity(shards.len());
        for shards in shards.chunks(AT_ONCE) {
            let keys: Vec<_> = shards.iter().map(|shard| keys::generation(self.0.redis.prefix(), shard)).collect();
            let some: Vec<Option<u64>> = redis::cmd("MGET").arg(keys).query_async(&mut self.0.redis.conn()).await?;
            generations.extend(some);
        }
        Ok(generations)
    }

    /// Opens shards, each in its life, all at once.
    pub async fn open_shards(&self, shards: &[(ShardId, u64)], topic_generation: &str) -> Result<()> {
        for shards in shards.chunks(AT_ONCE) {
            let opening = shards.iter().map(|(shard, life)| self.open_shard(shard, *life, topic_generation, None));
            futures::future::try_join_all(opening).await?;
        }
        Ok(())
    }

    /// Removes all keys of a shard in which nothing has happened for `idle`.
    pub async fn close_shard(&self, shard: &ShardId, idle: Duration) -> Result<Closing> {
        let idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        let value = self
            .call(&scripts::CLOSE, shard, 1, |call| {
                call.arg(idle_ms);
            })
            .await?;
        Ok(match numbers(value, 2)?[..] {
            [-1, life] => Closing::Closed(unsigned(life)),
            [-2, _] => Closing::InUse,
            [left, _] => Closing::In(Duration::from_millis(unsigned(left))),
            _ => return Err(Error::Answer("not two numbers".into())),
        })
    }

    pub async fn enqueue(&self, shard: &ShardId, batch: &Enqueue<'_>) -> Result<Enqueued> {
        let script = if batch.tasks.is_empty() { &scripts::PASS } else { &scripts::ENQUEUE };
        let value = self
            .call(script, shard, batch.tasks.len(), |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str()).arg(batch.topic_generation);
                call.arg(batch.predecessor.map(|p| p.to_string()).unwrap_or_default()).arg(batch.upto.to_string());
                call.arg(batch.high_water_tasks).arg(batch.high_water_bytes).arg(batch.epoch);
                call.arg(batch.live_tasks_max);
                for task in batch.tasks {
                    call.arg(task.offset.to_string()).arg(task.id.as_bytes()).arg(task.replicas);
                    call.arg(task.not_before_unix_ms).arg(&task.body[..]).arg(packed_strings(&task.credited));
                }
            })
            .await?;
        self.touch(shard);
        let mut answer = items(value)?.into_iter();
        match text(answer.next())?.as_str() {
            "ok" => Ok(Enqueued::Done { dealt_with: number(answer.next())?, added: number(answer.next())? }),
            "fenced" => Ok(Enqueued::Fenced(number(answer.next())?)),
            _ => Ok(Enqueued::Behind(text(answer.next())?.parse().ok())),
        }
    }

    /// Forgets how far the shard has read `pipeline`, because its offsets come a second time. Only the owner of the partition may do it.
    pub async fn rewind(&self, shard: &ShardId, epoch: u64) -> Result<()> {
        self.call(&scripts::REWIND, shard, 1, |call| {
            call.arg(epoch);
        })
        .await?;
        Ok(())
    }
}
