//! Publishing, with a limit on the size of `task-results`.

use std::collections::BTreeMap;

use redis::{ErrorKind, RedisError, Value};

use super::{
    failure::Failure,
    streams::{Streams, position},
};
use crate::{
    bus::{Cause, Error, Record, Result, Topic, TopicName},
    model::Offset,
    redis_pool::{Batch, Call, scripts},
};

/// Limits of one pipeline, so that a large batch does not delay all other calls on the connection.
const CHUNK_RECORDS: usize = 1000;
const CHUNK_BYTES: usize = 4 << 20;

/// Limits the unread records of `task-results`, over all partitions, while the database is
/// unavailable. It holds about a million reports without results, and equals `high_water_bytes` of
/// one queue. When it is exceeded, the forwarder waits, the shards' outboxes fill up, and claims
/// pause.
const BACKLOG_BYTES: u64 = 256 << 20;
/// The minimum limit of a partition, however many partitions share the total.
const LEAST_BACKLOG_BYTES: u64 = 1 << 20;

impl Streams {
    /// Publishes the records in one round trip.
    pub(super) async fn publish_chunk(
        &self,
        topic: Topic,
        records: &[Record],
    ) -> Result<Vec<Offset>> {
        let mut batch = Batch::default();
        let appends = self.append(topic, records, &mut batch);
        batch.command(self.ask_generation());
        let waited = format!("{}:{{bus}}:waited", self.redis.prefix());
        let mut answers = self.write(topic, batch, &waited).await?;
        self.pop_generation(&mut answers)?;
        offsets(&appends, answers, records.len()).map_err(Error::publish(topic))
    }

    /// Runs a batch that appends records, and waits until they are as durable as the settings
    /// demand. The key `waited` is written for that; it has the slot of the other keys.
    pub(super) async fn write(
        &self,
        topic: impl Into<TopicName>,
        mut batch: Batch,
        waited: &str,
    ) -> Result<Vec<Value>> {
        let topic = topic.into();
        let mut conn = self.redis.conn();
        let mut turn = None;
        if let Some(durability) = self.redis.durability() {
            durability.ask(&mut batch, waited);
            let waiting = self.redis.waiting_conn().await;
            let (waiting, its_turn) = waiting.map_err(Error::publish(topic.clone()))?;
            conn = waiting;
            turn = Some(its_turn);
        }
        let answered = batch.run_all(&mut conn).await;
        drop(turn);
        let failed = Error::publish::<Cause>(topic);
        let mut answers = answered.map_err(|e: RedisError| failed(server_words(e)))?;
        if let Some(durability) = self.redis.durability() {
            let judged = durability.judge_last(&mut answers);
            judged.map_err(|shortfall| failed(shortfall.into()))?;
        }
        Ok(answers)
    }

    /// Adds the commands that append the records. Returns the indices of the records in each
    /// command. `pipeline` has no bound here: high water, `max_unfinished` and the memory guard
    /// limit it.
    fn append(&self, topic: Topic, records: &[Record], batch: &mut Batch) -> Vec<Vec<usize>> {
        if topic == Topic::Pipeline {
            for record in records {
                let mut append = redis::cmd("XADD");
                append
                    .arg(self.key(topic, record.partition))
                    .arg("*")
                    .arg("v")
                    .arg(&record.value[..]);
                batch.command(append);
            }
            return (0..records.len()).map(|place| vec![place]).collect();
        }
        let share = BACKLOG_BYTES / u64::from(self.partitions[&topic].max(1));
        let most_bytes = share.max(LEAST_BACKLOG_BYTES);
        let mut by_partition: BTreeMap<u32, (Call, Vec<usize>)> = BTreeMap::new();
        for (place, record) in records.iter().enumerate() {
            let (append, places) = by_partition.entry(record.partition).or_insert_with(|| {
                let mut append = scripts::BUS_PUBLISH.call(&[self.key(topic, record.partition)]);
                append.arg(most_bytes).arg(0).arg("refuse");
                (append, Vec::new())
            });
            append.arg(&record.value[..]);
            places.push(place);
        }
        let append = |(append, places): (Call, Vec<usize>)| {
            batch.script(append.of_items(places.len()));
            places
        };
        by_partition.into_values().map(append).collect()
    }
}

/// The server's error message for a command that failed.
fn server_words(error: RedisError) -> Cause {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => Failure::Refused {
            code: code.to_owned(),
            details: detail.to_owned(),
        }
        .into(),
        _ => error.into(),
    }
}

/// The offsets of the records, in the order of the records.
///
/// Each response is one id, or the ids of all records that its command appended.
pub(super) fn offsets(
    appends: &[Vec<usize>],
    answers: Vec<Value>,
    count: usize,
) -> redis::RedisResult<Vec<Offset>> {
    let wrong = || {
        RedisError::from((
            ErrorKind::UnexpectedReturnType,
            "not the ids of what was appended",
        ))
    };
    let mut offsets = vec![Offset::default(); count];
    for (places, answer) in appends.iter().zip(answers) {
        let ids: Vec<String> = match answer {
            Value::Array(_) => redis::from_redis_value(answer)?,
            id => vec![redis::from_redis_value(id)?],
        };
        if ids.len() != places.len() {
            return Err(wrong());
        }
        for (place, id) in places.iter().zip(ids) {
            offsets[*place] = position(Some(&id)).map_err(|_| wrong())?;
        }
    }
    Ok(offsets)
}

/// Splits `records` into chunks of at most [`CHUNK_RECORDS`] and [`CHUNK_BYTES`], unless one record
/// alone is larger.
pub(super) fn chunks<R>(
    mut records: &[R],
    size: impl Fn(&R) -> usize,
) -> impl Iterator<Item = &[R]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |record: &&R| {
            bytes += size(record);
            bytes <= CHUNK_BYTES
        };
        let fitting = records.iter().take(CHUNK_RECORDS).take_while(fits).count();
        let (chunk, rest) = records.split_at(fitting.max(1).min(records.len()));
        records = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn record(len: usize) -> Record {
        Record {
            partition: 0,
            value: Bytes::from(vec![0; len]),
        }
    }

    #[test]
    fn chunks_are_bounded_and_leave_nothing_out() {
        let sizes = |records: &[Record]| {
            let chunks = chunks(records, |record| record.value.len());
            chunks.map(<[Record]>::len).collect::<Vec<_>>()
        };
        assert!(sizes(&[]).is_empty());
        assert_eq!(
            sizes(&vec![record(1); CHUNK_RECORDS + 1]),
            [CHUNK_RECORDS, 1]
        );
        assert_eq!(sizes(&vec![record(CHUNK_BYTES / 2); 3]), [2, 1]);
        assert_eq!(
            sizes(&[record(1), record(CHUNK_BYTES + 1), record(1)]),
            [1, 1, 1]
        );
    }
}
