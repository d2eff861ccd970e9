//! The workers that hold the leases of shards (`lua/workers.lua`).

use redis::Value;

use super::{
    error::{Error, Result},
    shards::Shards,
    wire::items,
};
use crate::{
    model::ShardId,
    redis_pool::{Call, scripts},
};

/// The workers that hold leases of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseHolders {
    /// Each with its leases.
    pub workers: Vec<(String, u64)>,
    /// Leases that were not read.
    pub unread: u64,
}

impl Shards {
    /// The workers that hold leases of these shards, by up to `most` leases of each. Answers in
    /// order.
    pub async fn lease_holders(
        &self,
        shards: &[ShardId],
        most: usize,
    ) -> Result<Vec<Result<LeaseHolders>>> {
        let call = |shard: &ShardId| {
            let mut call: Call = self.reach(shard).call(&scripts::WORKERS).of_items(most);
            call.arg(most);
            call
        };
        let answers = self.ask_all(shards, call).await?;
        Ok(answers.into_iter().map(read).collect())
    }
}

fn read(answer: Result<Value>) -> Result<LeaseHolders> {
    let mut values = match answer {
        // Redis has lost the shard, and its leases.
        Err(Error::NoGeneration) => return Ok(LeaseHolders::default()),
        other => items(other?)?.into_iter(),
    };
    let number = |value| redis::from_redis_value::<u64>(value).map_err(redis::RedisError::from);
    let mut holders = LeaseHolders::default();
    if let Some(unread) = values.next() {
        holders.unread = number(unread)?;
    }
    while let (Some(worker), Some(leases)) = (values.next(), values.next()) {
        let worker: String = redis::from_redis_value(worker).map_err(redis::RedisError::from)?;
        holders.workers.push((worker, number(leases)?));
    }
    Ok(holders)
}
