//! The filter of keys seen before: one hash per queue in Redis (in a cluster each on its own node), key hash → task id. A hint: "seen" is said only of keys whose task is
//! stored, SQL decides about the rest. So an entry may be missing at any time, and a crash loses nothing.

use std::collections::BTreeMap;

use redis::RedisError;

use crate::{
    model::{KeyHash, QueueName, TaskId},
    redis_pool::Redis,
};

/// So many bytes of the SHA-256 stand in the filter: no two keys of one queue share them.
const HASH_BYTES: usize = 16;

#[derive(Clone)]
pub struct Filter {
    redis: Redis,
}

impl Filter {
    pub fn new(redis: Redis) -> Self {
        Self { redis }
    }

    fn key(&self, queue: &QueueName) -> String {
        format!("{}:{{{queue}}}:seen", self.redis.prefix())
    }

    /// The task of each key, where the filter knows one; in order.
    pub async fn seen(&self, keys: &[(QueueName, KeyHash)]) -> Result<Vec<Option<TaskId>>, RedisError> {
        let mut seen = vec![None; keys.len()];
        for (queue, places) in by_queue(keys.iter().map(|(queue, _)| queue)) {
            let mut command = redis::cmd("HMGET");
            command.arg(self.key(queue));
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            let ids: Vec<Option<Vec<u8>>> = command.query_async(&mut self.redis.conn()).await?;
            for (place, id) in places.into_iter().zip(ids) {
                seen[place] = id.and_then(|id| TaskId::from_slice(&id));
            }
        }
        Ok(seen)
    }

    /// Remembers stored tasks; forgets others of the queue where it has more than `limit(queue)`.
    pub async fn mark(
        &self,
        tasks: &[(QueueName, KeyHash, TaskId)],
        limit: impl Fn(&QueueName) -> u64,
    ) -> Result<(), RedisError> {
        for (queue, places) in by_queue(tasks.iter().map(|(queue, ..)| queue)) {
            let key = self.key(queue);
            let mut command = redis::cmd("HSET");
            command.arg(&key);
            places.iter().for_each(|place| {
                command.arg(&tasks[*place].1.0[..HASH_BYTES]).arg(tasks[*place].2.as_bytes());
            });
            let mut pipe = redis::pipe();
            pipe.add_command(command).ignore().hlen(&key);
            let (known,): (u64,) = pipe.query_async(&mut self.redis.conn()).await?;
            let excess = known.saturating_sub(limit(queue)).min(10_000);
            if excess > 0 {
                let mut command = redis::cmd("HRANDFIELD");
                let fields: Vec<Vec<u8>> = command.arg(&key).arg(excess).query_async(&mut self.redis.conn()).await?;
                let () = redis::cmd("HDEL").arg(&key).arg(fields).query_async(&mut self.redis.conn()).await?;
            }
        }
        Ok(())
    }

    /// Forgets all keys of a queue: SQL knows them.
    pub async fn forget_queue(&self, queue: &QueueName) -> Result<(), RedisError> {
        redis::cmd("UNLINK").arg(self.key(queue)).query_async(&mut self.redis.conn()).await
    }

    /// Forgets keys: of tasks that are dead or cancelled, so that SQL says so to who sends them again.
    pub async fn forget(&self, keys: &[(QueueName, KeyHash)]) -> Result<(), RedisError> {
        for (queue, places) in by_queue(keys.iter().map(|(queue, _)| queue)) {
            let mut command = redis::cmd("HDEL");
            command.arg(self.key(queue));
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            let () = command.query_async(&mut self.redis.conn()).await?;
        }
        Ok(())
    }
}

/// The places of each queue in a list.
fn by_queue<'a>(queues: impl Iterator<Item = &'a QueueName>) -> BTreeMap<&'a QueueName, Vec<usize>> {
    let mut places: BTreeMap<&QueueName, Vec<usize>> = BTreeMap::new();
    queues.enumerate().for_each(|(place, queue)| places.entry(queue).or_default().push(place));
    places
}
