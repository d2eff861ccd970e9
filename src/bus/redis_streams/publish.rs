//! Publishing, with limits on the size of a topic.

use std::collections::BTreeMap;

use redis::{ErrorKind, RedisError, Value};

use super::{
    failure::Failure,
    streams::{Streams, position},
};
use crate::{
    bus::{Cause, Error, Record, Result, Topic},
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

/// Limits the topics of reports that only people read. The oldest records are deleted first.
const REPORTS_KEPT: u64 = 100_000;
const REPORTS_BYTES: u64 = 64 << 20;
/// Limits the records of `events`, which are small and many.
const EVENTS_KEPT: u64 = 500_000;

/// The limit of one partition.
struct Bound {
    bytes: u64,
    /// 0: no limit.
    records: u64,
    /// What happens when the limit is exceeded, in the terms of `bus_publish.lua`: `refuse` or
    /// `trim`.
    above: &'static str,
}

impl Bound {
    /// `None` for `pipeline`, which is limited by high water, `max_unfinished` and the memory
    /// guard.
    fn of(topic: Topic, partitions: u32) -> Option<Self> {
        match topic {
            Topic::Pipeline => None,
            Topic::TaskResults => {
                let bytes = (BACKLOG_BYTES / u64::from(partitions.max(1))).max(LEAST_BACKLOG_BYTES);
                Some(Self {
                    bytes,
                    records: 0,
                    above: "refuse",
                })
            }
            Topic::Expirations | Topic::DeadLetters => Some(Self {
                bytes: REPORTS_BYTES,
                records: REPORTS_KEPT,
                above: "trim",
            }),
            Topic::Events => {
                let share = u64::from(partitions.max(1));
                Some(Self {
                    bytes: REPORTS_BYTES / share,
                    records: (EVENTS_KEPT / share).max(1),
                    above: "trim",
                })
            }
        }
    }
}

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
        let mut conn = self.redis.conn();
        let mut turn = None;
        if let Some(durability) = self.redis.durability() {
            durability.ask(
                &mut batch,
                &format!("{}:{{bus}}:waited", self.redis.prefix()),
            );
            let (waiting, its_turn) = self
                .redis
                .waiting_conn()
                .await
                .map_err(Error::publish(topic))?;
            conn = waiting;
            turn = Some(its_turn);
        }
        let answered = batch.run_all(&mut conn).await;
        drop(turn);
        let mut answers =
            answered.map_err(|e: RedisError| Error::publish(topic)(server_words(e)))?;
        if let Some(durability) = self.redis.durability() {
            durability
                .judge_last(&mut answers)
                .map_err(Error::publish(topic))?;
        }
        let generation: Option<String> = answers
            .pop()
            .and_then(|value| redis::from_redis_value(value).ok());
        self.check_generation(generation.as_deref())?;
        offsets(&appends, answers, records.len()).map_err(Error::publish(topic))
    }

    /// Adds the commands that append the records. Returns the indices of the records in each
    /// command.
    fn append(&self, topic: Topic, records: &[Record], batch: &mut Batch) -> Vec<Vec<usize>> {
        let Some(bound) = Bound::of(topic, self.partitions[&topic]) else {
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
        };
        let mut by_partition: BTreeMap<u32, (Call, Vec<usize>)> = BTreeMap::new();
        for (place, record) in records.iter().enumerate() {
            let (append, places) = by_partition.entry(record.partition).or_insert_with(|| {
                let mut append = scripts::BUS_PUBLISH.call(&[self.key(topic, record.partition)]);
                append.arg(bound.bytes).arg(bound.records).arg(bound.above);
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
fn offsets(
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
pub(super) fn chunks(mut records: &[Record]) -> impl Iterator<Item = &[Record]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |record: &&Record| {
            bytes += record.value.len();
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
        let sizes = |records: &[Record]| chunks(records).map(<[Record]>::len).collect::<Vec<_>>();
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
