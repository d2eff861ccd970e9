//! The queue's side of changes of live work: of tasks that are in the queue, or on their way to it.

use std::ops::Deref;

use super::{
    enqueue::Enqueuer,
    error::{Error, Result},
    keys,
    shards::Shards,
    wire::{numbers, unsigned},
};
use crate::{
    model::{ChangingTask, Requeue, ShardId},
    redis_pool::scripts,
    wire,
};

/// The end of a reservation without one: the last time that RFC 3339 can represent.
pub const NEVER: i64 = 253_402_300_799_999;

/// The queue's decision about a change of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitrated {
    /// The change was made, now or before.
    Done,
    /// Workers have completed the task.
    Completed {
        /// How many workers completed it, as far as the script says so.
        credited: u32,
    },
    Dead,
    Cancelled,
    /// The task was sent again since. Nothing was changed.
    SentAgain,
    /// The task has not arrived in the queue.
    Absent,
    NotDue,
    /// The worker for whom it should be reserved has completed it.
    CompletedByWorker,
    /// The reservation of the task has not ended.
    Reserved {
        until_unix_ms: i64,
    },
    /// Nothing was changed, because the bus accepts no reports.
    OutboxFull,
}

/// The answers of one shard, and its generation.
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
    /// Opens shards, each in its generation, all concurrently.
    pub async fn open_shards(
        &self,
        shards: &[(ShardId, u64)],
        topic_generation: &str,
    ) -> Result<()> {
        Enqueuer(self.0.clone())
            .open_shards(shards, topic_generation)
            .await
    }

    /// The generation of a shard in Redis.
    pub async fn generation(&self, shard: &ShardId) -> Result<u64> {
        let key = keys::generation(self.prefix(), shard);
        let generation: Option<u64> = redis::cmd("GET")
            .arg(key)
            .query_async(&mut self.conn())
            .await?;
        generation.ok_or(Error::NoGeneration)
    }

    /// Cancels tasks of one shard, also those that have not arrived. At most 1,000.
    pub async fn cancel(
        &self,
        shard: &ShardId,
        tasks: &[&ChangingTask],
    ) -> Result<ArbitratedTasks> {
        let value = self
            .call(&scripts::CANCEL, shard, tasks.len(), |call| {
                call.arg(self.wake_channel());
                for task in tasks {
                    call.arg(task.id.as_bytes())
                        .arg(task.replicas)
                        .arg(task.epoch);
                }
            })
            .await?;
        self.note_ended(shard);
        let numbers = numbers(value, tasks.len() + 1)?;
        let answers = numbers[1..]
            .iter()
            .map(|number| arbitrated(*number, 0))
            .collect::<Result<_>>()?;
        Ok(ArbitratedTasks {
            generation: unsigned(numbers[0]),
            answers,
        })
    }

    /// Gives tasks of one shard the NUM and the priority that SQL has. It rewrites their bodies, so
    /// pass only a few tasks at a time.
    pub async fn update(
        &self,
        shard: &ShardId,
        tasks: &[&ChangingTask],
    ) -> Result<ArbitratedTasks> {
        let value = self
            .call(&scripts::CHANGE, shard, tasks.len(), |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str());
                for task in tasks {
                    call.arg(task.id.as_bytes())
                        .arg(task.replicas)
                        .arg(task.priority as u8)
                        .arg(task.epoch);
                    call.arg(&wire::body_values(task.replicas, task.priority)[..]);
                }
            })
            .await?;
        self.offered(shard);
        self.note_ended(shard);
        let numbers = numbers(value, 2 * tasks.len() + 1)?;
        let answer = |pair: &[i64]| arbitrated(pair[0], u32::try_from(pair[1]).unwrap_or(u32::MAX));
        let answers = numbers[1..]
            .chunks_exact(2)
            .map(answer)
            .collect::<Result<_>>()?;
        Ok(ArbitratedTasks {
            generation: unsigned(numbers[0]),
            answers,
        })
    }

    /// Offers tasks of one shard again. At most 1,000.
    pub async fn requeue(
        &self,
        shard: &ShardId,
        tasks: &[&ChangingTask],
        requeue: &Requeue,
    ) -> Result<ArbitratedTasks> {
        let (mode, worker, until_unix_ms) = match requeue {
            Requeue::All => ("all", "", 0),
            Requeue::AwayFrom(worker) => ("away", worker.as_str(), 0),
            Requeue::To {
                worker,
                until_unix_ms,
            } => ("to", worker.as_str(), until_unix_ms.unwrap_or(NEVER)),
            Requeue::Free => ("free", "", 0),
        };
        let value = self
            .call(&scripts::REQUEUE, shard, tasks.len(), |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str());
                for task in tasks {
                    call.arg(task.id.as_bytes())
                        .arg(task.epoch)
                        .arg(mode)
                        .arg(worker)
                        .arg(until_unix_ms);
                }
            })
            .await?;
        self.offered(shard);
        self.note_ended(shard);
        let announcer = self.announcer();
        announcer.announce(
            &shard.queue,
            announcer.now_unix_ms(),
            tasks.iter().map(|task| (task.id, None)),
        );
        let numbers = numbers(value, 2 * tasks.len() + 1)?;
        let answer = |pair: &[i64]| match pair {
            [9, until_unix_ms] => Ok(Arbitrated::Reserved {
                until_unix_ms: *until_unix_ms,
            }),
            pair => arbitrated(pair[0], 0),
        };
        let answers = numbers[1..]
            .chunks_exact(2)
            .map(answer)
            .collect::<Result<_>>()?;
        Ok(ArbitratedTasks {
            generation: unsigned(numbers[0]),
            answers,
        })
    }
}

pub(super) fn arbitrated(number: i64, credited: u32) -> Result<Arbitrated> {
    Ok(match number {
        1 => Arbitrated::Done,
        2 => Arbitrated::Completed { credited },
        3 => Arbitrated::Dead,
        4 => Arbitrated::SentAgain,
        5 => Arbitrated::Absent,
        6 => Arbitrated::Cancelled,
        7 => Arbitrated::NotDue,
        8 => Arbitrated::CompletedByWorker,
        other => return Err(Error::Answer(format!("an answer {other} to a change"))),
    })
}
