//! For changes of live work: tasks that are in the queue, or on their way to it.

use std::ops::Deref;

use super::{
    enqueue::Enqueuer,
    error::{Error, Result},
    keys,
    shards::Shards,
    wire::{numbers, unsigned},
};
use crate::{
    model::{ChangingTask, ShardId},
    redis_pool::scripts,
};

/// The queue's decision about a change of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitrated {
    /// Now, or before.
    Done,
    /// Its workers have completed it.
    Completed,
    Dead,
    /// It was sent again since. Nothing was changed.
    SentAgain,
}

/// The answers of one shard, and the generation that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArbitratedTasks {
    pub generation: u64,
    /// In order.
    pub answers: Vec<Arbitrated>,
}

/// The side of the queue that changes live work.
#[derive(Clone)]
pub struct Changer(pub(super) Shards);

impl Deref for Changer {
    type Target = Shards;

    fn deref(&self) -> &Shards {
        &self.0
    }
}

impl Changer {
    /// Opens shards, each in its generation, all at once.
    pub async fn open_shards(&self, shards: &[(ShardId, u64)], topic_generation: &str) -> Result<()> {
        Enqueuer(self.0.clone()).open_shards(shards, topic_generation).await
    }

    /// The generation of a shard in Redis.
    pub async fn generation(&self, shard: &ShardId) -> Result<u64> {
        let key = keys::generation(self.prefix(), shard);
        let generation: Option<u64> = redis::cmd("GET").arg(key).query_async(&mut self.conn()).await?;
        generation.ok_or(Error::NoGeneration)
    }

    /// Cancels tasks of one shard, also those that have not arrived. At most 1,000.
    pub async fn cancel(&self, shard: &ShardId, tasks: &[&ChangingTask]) -> Result<ArbitratedTasks> {
        let value = self
            .call(&scripts::CANCEL, shard, tasks.len(), |call| {
                for task in tasks {
                    call.arg(task.id.as_bytes()).arg(task.replicas).arg(task.epoch);
                }
            })
            .await?;
        self.touch(shard);
        let numbers = numbers(value, tasks.len() + 1)?;
        let answers = numbers[1..].iter().map(|number| arbitrated(*number)).collect::<Result<_>>()?;
        Ok(ArbitratedTasks { generation: unsigned(numbers[0]), answers })
    }
}

fn arbitrated(number: i64) -> Result<Arbitrated> {
    Ok(match number {
        1 => Arbitrated::Done,
        2 => Arbitrated::Completed,
        3 => Arbitrated::Dead,
        4 => Arbitrated::SentAgain,
        other => return Err(Error::Answer(format!("an answer {other} to a change"))),
    })
}
