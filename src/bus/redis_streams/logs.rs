//! Logs on Redis Streams.
//!
//! The reports of taskd are in the slot of the bus, so that appending to them notices a Redis that
//! has lost everything. Each partition of another log has a slot of its own. There a loss needs no
//! notice: offsets are times, so new records lie after those that were lost.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::future::try_join_all;
use redis::{RedisError, Value};
use tokio::sync::Semaphore;

use super::{
    publish::{chunks, offsets},
    reply,
    streams::{Extent, Streams, ask_extent, extent},
};
use crate::{
    bus::{Error, Log, LogEnd, LogMessage, LogRecord, Logs, PAGE_BYTES, Result, Retention},
    model::Offset,
    redis_pool::{Batch, Call, scripts},
};

/// How many records of a page an exchange asks for, at first and at most. Their sizes are not known
/// before: each may have a megabyte, whatever those before it had.
const AT_FIRST: usize = 16;
const AT_MOST: usize = 128;
/// How many exchanges at a time may ask for more than [`AT_FIRST`].
const LARGE: usize = 4;
/// How many records a call of `bus_publish.lua` deletes at most, and how many such calls the trim of
/// a partition makes.
const TRIM_PAGE: u64 = 1000;
const TRIMS_AT_ONCE: u32 = 100;
/// How many records one call deletes that all subscriptions have read, and how many such calls a
/// partition gets.
const READ_PAGE: u64 = 1000;
const READ_TRIMS: u32 = 1000;

pub(super) struct StreamLogs {
    streams: Arc<Streams>,
    large: Semaphore,
}

impl StreamLogs {
    pub(super) fn new(streams: Arc<Streams>) -> Self {
        let large = Semaphore::new(LARGE);
        Self { streams, large }
    }

    fn key(&self, log: &Log, partition: u32) -> String {
        if log.is_report {
            self.streams.key(&log.name, partition)
        } else {
            format!("{}:log", self.tag(log, partition))
        }
    }

    fn tag(&self, log: &Log, partition: u32) -> String {
        let prefix = self.streams.redis.prefix();
        format!("{prefix}:{{topic:{}:{partition}}}", log.name)
    }

    fn keys(&self, log: &Log) -> Vec<String> {
        let partitions = 0..log.partitions;
        partitions
            .map(|partition| self.key(log, partition))
            .collect()
    }

    /// Appends records to one partition.
    async fn append_to(
        &self,
        log: &Log,
        partition: u32,
        records: &[&LogRecord],
    ) -> Result<Vec<Offset>> {
        let mut appended = Vec::with_capacity(records.len());
        for chunk in chunks(records, |record| record.bytes()) {
            let mut batch = Batch::default();
            batch.script(append(log, &self.key(log, partition), chunk)?);
            let mut answers;
            if log.is_report {
                batch.command(self.streams.ask_generation());
                let waited = format!("{}:{{bus}}:waited", self.streams.redis.prefix());
                answers = self.streams.write(log.name.clone(), batch, &waited).await?;
                self.streams.pop_generation(&mut answers)?;
            } else {
                let waited = format!("{}:waited", self.tag(log, partition));
                answers = self.streams.write(log.name.clone(), batch, &waited).await?;
            }
            let places = vec![(0..chunk.len()).collect()];
            let offsets = offsets(&places, answers, chunk.len());
            appended.extend(offsets.map_err(Error::publish(log.name.clone()))?);
        }
        Ok(appended)
    }

    /// Deletes the oldest records of a partition that has more bytes than it may keep, for example
    /// because the bound was lowered.
    async fn trim_bytes(&self, log: &Log, key: &str, keep: Retention) -> Result<u64> {
        let failed = Error::trim::<RedisError>(log.name.clone());
        let mut trimmed = 0;
        for _ in 0..TRIMS_AT_ONCE {
            let mut call = scripts::BUS_PUBLISH.call(&[key]);
            call.arg(keep.bytes).arg(keep.records).arg("trim").arg(0);
            let call = call.of_items(0);
            let answer = call.run(&mut self.streams.redis.conn()).await;
            let count: u64 = answer
                .and_then(|answer| Ok(redis::from_redis_value(answer)?))
                .map_err(&failed)?;
            trimmed += count;
            if count < TRIM_PAGE {
                break;
            }
        }
        Ok(trimmed)
    }

    async fn extents(&self, log: &Log) -> Result<Vec<Extent>> {
        self.extents_of(log, &self.keys(log)).await
    }

    /// The extents of some partitions of a log. No record is sent.
    async fn extents_of(&self, log: &Log, keys: &[String]) -> Result<Vec<Extent>> {
        if log.is_report {
            return self.streams.extents_of(log.name.clone(), keys).await;
        }
        let extents = keys.iter().map(|key| async {
            let asked = ask_extent(key).run(&mut self.streams.redis.conn()).await;
            let answer = asked.map_err(Error::read::<RedisError>(log.name.clone()))?;
            extent(&log.name, answer)
        });
        try_join_all(extents).await
    }
}

fn end(extent: &Extent) -> LogEnd {
    LogEnd {
        last: extent.last,
        count: extent.appended,
    }
}

/// The call that appends these records.
fn append(log: &Log, key: &str, records: &[&LogRecord]) -> Result<Call> {
    let keep = log.keep.of_each(log.partitions);
    let age = match keep.age {
        Duration::MAX => 0,
        age => u64::try_from(age.as_millis()).unwrap_or(0).max(1),
    };
    let mut append = scripts::BUS_PUBLISH.call(&[key]);
    append
        .arg(keep.bytes)
        .arg(keep.records)
        .arg("trim")
        .arg(age);
    for record in records {
        append.arg(&record.value[..]);
        if log.is_report {
            // The keys of reports are for Kafka.
            append.arg("").arg("").arg("");
            continue;
        }
        let attributes = if record.attributes.is_empty() {
            String::new()
        } else {
            serde_json::to_string(&record.attributes).map_err(Error::publish(log.name.clone()))?
        };
        append.arg(&record.key[..]).arg(attributes).arg(&record.id);
    }
    Ok(append.of_items(records.len()))
}

#[async_trait]
impl Logs for StreamLogs {
    /// Only taskd makes keys of this form.
    async fn exists(&self, _log: &Log) -> Result<bool> {
        Ok(false)
    }

    /// A stream comes into being with its first record.
    async fn make(&self, log: &Log) -> Result<u32> {
        Ok(log.partitions)
    }

    async fn delete(&self, log: &Log) -> Result<()> {
        for partition in 0..log.partitions {
            let mut unlink = redis::cmd("UNLINK");
            unlink.arg(self.key(log, partition));
            if !log.is_report {
                unlink.arg(format!("{}:waited", self.tag(log, partition)));
            }
            let deleted: Result<(), RedisError> =
                unlink.query_async(&mut self.streams.redis.conn()).await;
            deleted.map_err(Error::trim(log.name.clone()))?;
        }
        Ok(())
    }

    async fn append(&self, log: &Log, records: &[LogRecord]) -> Result<Vec<Offset>> {
        let asked = records.iter().map(|record| record.partition);
        crate::bus::check_partitions(log.name.clone(), asked, log.partitions)?;
        let mut by_partition: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, record) in records.iter().enumerate() {
            by_partition
                .entry(record.partition)
                .or_default()
                .push(place);
        }
        let appends = by_partition
            .into_iter()
            .map(|(partition, places)| async move {
                let some: Vec<&LogRecord> = places.iter().map(|place| &records[*place]).collect();
                let offsets = self.append_to(log, partition, &some).await?;
                Ok::<_, Error>(places.into_iter().zip(offsets))
            });
        let mut offsets = vec![Offset::default(); records.len()];
        for (place, offset) in try_join_all(appends).await?.into_iter().flatten() {
            offsets[place] = offset;
        }
        Ok(offsets)
    }

    async fn read(
        &self,
        log: &Log,
        partition: u32,
        mut after: Option<Offset>,
        max: usize,
    ) -> Result<Vec<LogMessage>> {
        let key = self.key(log, partition);
        let failed = Error::read::<RedisError>(log.name.clone());
        let mut read: Vec<LogMessage> = Vec::new();
        let (mut bytes, mut largest) = (0, 1);
        let mut count = AT_FIRST.min(max);
        while count > 0 {
            let large = (count > AT_FIRST).then(|| self.large.try_acquire());
            if let Some(Err(_)) = large {
                count = AT_FIRST;
            }
            let mut batch = Batch::default();
            let mut range = redis::cmd("XRANGE");
            let from = after.map_or_else(|| "-".to_owned(), |after| format!("({after}"));
            range.arg(&key).arg(from).arg("+").arg("COUNT").arg(count);
            batch.command(range);
            if log.is_report {
                // Asked after the records, so that offsets of another generation are recognized.
                batch.command(self.streams.ask_generation());
            }
            let answered = batch.run_all(&mut self.streams.redis.conn()).await;
            let mut answers: Vec<Value> = answered.map_err(&failed)?;
            if log.is_report {
                self.streams.pop_generation(&mut answers)?;
            }
            let list = answers.pop().unwrap_or(Value::Nil);
            let page = reply::log_messages(partition, list).map_err(&failed)?;
            let is_last = page.len() < count;
            for message in &page {
                bytes += message.record.bytes();
                largest = largest.max(message.record.bytes());
            }
            read.extend(page);
            after = read.last().map(|message| message.offset);
            if is_last || bytes >= PAGE_BYTES {
                break;
            }
            let fitting = (PAGE_BYTES - bytes).div_ceil(largest);
            count = fitting.min(4 * count).min(AT_MOST).min(max - read.len());
        }
        Ok(read)
    }

    async fn first(&self, log: &Log) -> Result<Vec<Option<Offset>>> {
        let extents = self.extents(log).await?;
        Ok(extents.iter().map(|extent| extent.first).collect())
    }

    async fn ends(&self, log: &Log) -> Result<Vec<Option<Offset>>> {
        let extents = self.extents(log).await?;
        Ok(extents.iter().map(|extent| extent.last).collect())
    }

    async fn counted_end(&self, log: &Log, partition: u32) -> Result<LogEnd> {
        let extents = self.extents_of(log, &[self.key(log, partition)]).await?;
        Ok(extents.first().map(end).unwrap_or_default())
    }

    async fn counted_ends(&self, log: &Log) -> Result<Vec<LogEnd>> {
        let extents = self.extents(log).await?;
        Ok(extents.iter().map(end).collect())
    }

    async fn at_time(&self, log: &Log, unix_ms: i64) -> Result<Vec<Option<Offset>>> {
        let before = u64::try_from(unix_ms).ok().and_then(|ms| ms.checked_sub(1));
        let before = before.map(|major| Offset {
            major,
            minor: u64::MAX,
        });
        // A place after the end would look like one in a log that has lost its records.
        let extents = self.extents(log).await?;
        Ok(extents
            .iter()
            .map(|extent| before.min(extent.last))
            .collect())
    }

    async fn size(&self, log: &Log) -> Result<u64> {
        let failed = Error::read::<RedisError>(log.name.clone());
        let failed = &failed;
        let keys = self.keys(log);
        let sizes = keys.iter().map(|key| async move {
            let mut usage = redis::cmd("MEMORY");
            usage.arg("USAGE").arg(key);
            let size: Option<u64> = usage
                .query_async(&mut self.streams.redis.conn())
                .await
                .map_err(failed)?;
            Ok::<_, Error>(size.unwrap_or(0))
        });
        Ok(try_join_all(sizes).await?.into_iter().sum())
    }

    /// Deletes whole nodes of the stream, which costs little.
    async fn trim_to(&self, log: &Log, partition: u32, up_to: Offset) -> Result<u64> {
        let failed = Error::trim::<RedisError>(log.name.clone());
        let least = Offset {
            minor: up_to.minor.saturating_add(1),
            ..up_to
        };
        let mut trimmed = 0;
        for _ in 0..READ_TRIMS {
            let mut trim = redis::cmd("XTRIM");
            trim.arg(self.key(log, partition))
                .arg("MINID")
                .arg("~")
                .arg(least.to_string())
                .arg("LIMIT")
                .arg(READ_PAGE);
            let count: u64 = trim
                .query_async(&mut self.streams.redis.conn())
                .await
                .map_err(&failed)?;
            trimmed += count;
            if count == 0 {
                break;
            }
        }
        Ok(trimmed)
    }

    async fn trim(&self, log: &Log, keep: Retention) -> Result<u64> {
        let failed = Error::trim::<RedisError>(log.name.clone());
        let mut conn = self.streams.redis.conn();
        // Redis creates the ids from its own clock.
        let (secs, micros): (u64, u64) = redis::cmd("TIME")
            .query_async(&mut conn)
            .await
            .map_err(&failed)?;
        let now_ms = u128::from(secs * 1000 + micros / 1000);
        let keep = keep.of_each(log.partitions);
        let mut trimmed = 0;
        for key in self.keys(log) {
            let mut pipe = redis::pipe();
            pipe.cmd("XTRIM")
                .arg(&key)
                .arg("MAXLEN")
                .arg("=")
                .arg(keep.records);
            pipe.cmd("XTRIM")
                .arg(&key)
                .arg("MINID")
                .arg("=")
                .arg(now_ms.saturating_sub(keep.age.as_millis()).to_string());
            let counts: [u64; 2] = pipe.query_async(&mut conn).await.map_err(&failed)?;
            trimmed += counts.iter().sum::<u64>();
            if !log.is_report {
                trimmed += self.trim_bytes(log, &key, keep).await?;
            }
        }
        Ok(trimmed)
    }
}
