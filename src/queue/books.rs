//! Counts of what the shards hold, for the books (`lua/books.lua`).

use futures::StreamExt as _;
use redis::Value;

use super::{
    enqueue::AT_ONCE,
    error::{Error, Result},
    keys::LANES,
    shards::Shards,
    wire::{numbers, unsigned},
};
use crate::{
    model::ShardId,
    redis_pool::{Batch, Call, Connection, scripts},
};

/// How many shards of a cluster are asked concurrently.
const OF_A_CLUSTER: usize = 64;

/// The counts of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Tasks that are not final.
    pub live: u64,
    /// Live tasks with a replica to claim.
    pub open: u64,
    pub leases: u64,
    /// Replicas in backoff, and tasks before their time.
    pub delayed: u64,
    /// Entries of the outbox.
    pub outbox: u64,
    /// Final records.
    pub finals: u64,
    /// Elements by lane, in the order of [`LANES`].
    pub lanes: [u64; LANES.len()],
    /// Items that wait behind limit keys. Some may count no more.
    pub behind: u64,
}

impl Shards {
    /// Returns the counts of these shards, in order; `None` for a shard without a generation in
    /// Redis. Uses one exchange if possible. An error that concerns more than one shard ends the
    /// call.
    pub async fn holdings(&self, shards: &[ShardId]) -> Result<Vec<Result<Option<Holding>>>> {
        let call = |shard: &ShardId| self.reach(shard).call(&scripts::BOOKS);
        let answers = self.ask_all(shards, call).await?;
        Ok(answers.into_iter().map(read).collect())
    }

    /// Calls a script of each shard that changes nothing. Answers in order, in one exchange where
    /// that is possible. An error that is not of one shard ends the call.
    pub(super) async fn ask_all(
        &self,
        shards: &[ShardId],
        call: impl Fn(&ShardId) -> Call,
    ) -> Result<Vec<Result<Value>>> {
        if self.is_cluster() {
            let asked: Vec<_> = shards
                .iter()
                .map(|shard| ask(self.conn(), call(shard)))
                .collect();
            let answers = futures::stream::iter(asked).buffered(OF_A_CLUSTER);
            Ok(answers.collect().await)
        } else {
            let mut answers = Vec::with_capacity(shards.len());
            for shards in shards.chunks(AT_ONCE) {
                let mut batch = Batch::default();
                shards
                    .iter()
                    .for_each(|shard| batch.repeatable(call(shard)));
                let some = batch.run(&mut self.conn()).await?;
                answers.extend(some.into_iter().map(|answer| answer.map_err(Error::from)));
            }
            Ok(answers)
        }
    }
}

async fn ask(mut conn: Connection, call: Call) -> Result<Value> {
    Ok(call.run(&mut conn).await?)
}

fn read(answer: Result<Value>) -> Result<Option<Holding>> {
    let value = match answer {
        Err(Error::NoGeneration) => return Ok(None),
        other => other?,
    };
    if matches!(value, Value::Int(0)) {
        return Ok(Some(Holding::default()));
    }
    let n: Vec<u64> = numbers(value, 7 + LANES.len())?
        .into_iter()
        .map(unsigned)
        .collect();
    let mut lanes = [0; LANES.len()];
    lanes.copy_from_slice(&n[6..6 + LANES.len()]);
    Ok(Some(Holding {
        live: n[0],
        open: n[1],
        leases: n[2],
        delayed: n[3],
        outbox: n[4],
        finals: n[5],
        lanes,
        behind: n[6 + LANES.len()],
    }))
}
