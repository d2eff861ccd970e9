//! A stream of a Redis that is not taskd's, read by a group.

use std::{collections::HashMap, time::Duration};

use async_trait::async_trait;
use redis::{RedisResult, Value, aio::MultiplexedConnection};
use tokio::sync::Mutex;

use super::{
    entry::record,
    pending::Rules,
    reply::{self, Entry},
    source::{AtOnce, Error, Feed, FeedRecord, Result, TakenOver, connect},
};
use crate::{
    model::{FeedAck, Offset, RedisStream},
    redis_pool::Redis,
};

/// How long a read may take beyond its wait, so that a Redis that hangs becomes an error.
const ANSWER: Duration = Duration::from_secs(5);
/// How many entries are kept or acknowledged by one command.
const AT_ONCE: usize = 1000;

pub(super) struct Stream {
    settings: RedisStream,
    /// The name of the consumer.
    reader: String,
    ack: FeedAck,
    redis: Mutex<Option<Redis>>,
    reading: Mutex<Reading>,
    /// How many entries are asked for.
    at_once: AtOnce,
    /// The last pending entry that was looked at. `None`: the next look begins with the first.
    pending_after: Mutex<Option<Offset>>,
}

/// Where the reads are.
#[derive(Default)]
struct Reading {
    conn: Option<MultiplexedConnection>,
    /// The last entry of those that were handed out before. `None`: all of them are read.
    again_after: Option<Offset>,
}

impl Stream {
    pub(super) fn new(settings: RedisStream, reader: &str, ack: FeedAck) -> Self {
        Self {
            at_once: AtOnce::new(settings.count),
            settings,
            reader: reader.to_owned(),
            ack,
            redis: Mutex::default(),
            reading: Mutex::default(),
            pending_after: Mutex::default(),
        }
    }

    /// The connection that does not block.
    async fn redis(&self) -> Result<Redis> {
        let redis = self.redis.lock().await;
        redis.clone().ok_or(Error::Closed)
    }

    fn read(&self, again_after: Option<Offset>) -> redis::Cmd {
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP")
            .arg(&self.settings.group)
            .arg(&self.reader);
        read.arg("COUNT").arg(self.at_once.get());
        if again_after.is_none() {
            let block = self.settings.block.as_millis() as u64;
            read.arg("BLOCK").arg(block.max(1));
            if self.ack == FeedAck::None {
                read.arg("NOACK");
            }
        }
        read.arg("STREAMS").arg(&self.settings.key);
        match again_after {
            Some(after) => read.arg(after.to_string()),
            None => read.arg(">"),
        };
        read
    }

    async fn next_entries(&self, reading: &mut Reading) -> Result<Vec<Entry>> {
        let mut conn = match reading.conn.take() {
            Some(conn) => conn,
            None => self.redis().await?.dedicated(&self.settings.key).await?,
        };
        let read = self.read(reading.again_after);
        let answer = read.query_async::<Value>(&mut conn);
        let within = tokio::time::timeout(self.settings.block + ANSWER, answer).await;
        let Ok(reply) = within else {
            self.at_once.shrink();
            return Err(Error::Slow);
        };
        let reply = reply.map_err(|error| match error.code() {
            Some("NOGROUP") => Error::Forgotten,
            _ => error.into(),
        })?;
        self.at_once.grow();
        reading.conn = Some(conn);
        Ok(reply::entries(reply)?)
    }

    fn command(&self, name: &str) -> redis::Cmd {
        let mut command = redis::cmd(name);
        command.arg(&self.settings.key).arg(&self.settings.group);
        command
    }
}

#[async_trait]
impl Feed for Stream {
    async fn open(&self) -> Result<bool> {
        let redis = connect(&self.settings.url).await?;
        let mut conn = redis.conn();
        *self.redis.lock().await = Some(redis);
        *self.reading.lock().await = Reading {
            conn: None,
            again_after: Some(Offset { major: 0, minor: 0 }),
        };
        let mut groups = redis::cmd("XINFO");
        groups.arg("GROUPS").arg(&self.settings.key);
        let groups: RedisResult<Vec<HashMap<String, Value>>> = groups.query_async(&mut conn).await;
        let groups = match groups {
            Ok(groups) => groups,
            // There is no other answer for a stream that is not there.
            Err(error) if error.to_string().contains("no such key") => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut names = groups
            .into_iter()
            .filter_map(|mut group| group.remove("name"));
        Ok(names.any(|name| {
            reply::bytes(name).is_ok_and(|name| name == self.settings.group.as_bytes())
        }))
    }

    async fn begin(&self) -> Result<()> {
        let mut create = redis::cmd("XGROUP");
        create.arg("CREATE").arg(&self.settings.key);
        create.arg(&self.settings.group).arg(&self.settings.start);
        create.arg("MKSTREAM");
        let mut conn = self.redis().await?.conn();
        match create.query_async::<()>(&mut conn).await {
            Err(error) if error.code() != Some("BUSYGROUP") => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn next(&self) -> Result<Vec<FeedRecord>> {
        let mut reading = self.reading.lock().await;
        let entries = self.next_entries(&mut reading).await?;
        let may_be_repeated = reading.again_after.is_some();
        if may_be_repeated {
            reading.again_after = entries.last().map(|(id, _)| *id);
        }
        let records = entries.into_iter();
        Ok(records
            .map(|entry| record(&self.settings, entry, may_be_repeated))
            .collect())
    }

    async fn ack(&self, references: &[Offset]) -> Result<u64> {
        let mut conn = self.redis().await?.conn();
        let mut acknowledged = 0;
        for some in references.chunks(AT_ONCE) {
            let ids: Vec<String> = some.iter().map(ToString::to_string).collect();
            // First, because an entry that is deleted and still pending is handed out again.
            if self.settings.delete {
                let mut delete = redis::cmd("XDEL");
                delete.arg(&self.settings.key).arg(&ids);
                delete.query_async::<u64>(&mut conn).await?;
            }
            let mut ack = self.command("XACK");
            ack.arg(&ids);
            acknowledged += ack.query_async::<u64>(&mut conn).await?;
        }
        Ok(acknowledged)
    }

    async fn keep(&self) -> Result<()> {
        let mut conn = self.redis().await?.conn();
        let mut after = None;
        loop {
            let mut page = self.command("XPENDING");
            match after {
                Some(after) => page.arg(format!("({after}")),
                None => page.arg("-"),
            };
            page.arg("+").arg(AT_ONCE).arg(&self.reader);
            let mut ids = Vec::new();
            for entry in reply::array(page.query_async(&mut conn).await?)? {
                let id = reply::array(entry)?.into_iter().next();
                ids.push(reply::offset(id.ok_or_else(reply::unexpected)?)?);
            }
            let Some(last) = ids.last().copied() else {
                return Ok(());
            };
            let is_last = ids.len() < AT_ONCE;
            let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
            // Without JUSTID it would count as a delivery.
            let mut claim = self.command("XCLAIM");
            claim.arg(&self.reader).arg(0).arg(&ids).arg("JUSTID");
            claim.query_async::<Value>(&mut conn).await?;
            if is_last {
                return Ok(());
            }
            after = Some(last);
        }
    }

    async fn take_over(&self) -> Result<TakenOver> {
        if self.settings.pending.is_empty() {
            return Ok(TakenOver::default());
        }
        let mut after = self.pending_after.lock().await;
        let rules = Rules {
            settings: &self.settings,
            reader: &self.reader,
        };
        let mut conn = self.redis().await?.conn();
        let (taken, next) = rules.apply(&mut conn, *after).await?;
        *after = next;
        Ok(taken)
    }

    async fn health(&self) -> Result<Option<u64>> {
        let mut conn = self.redis().await?.conn();
        let mut groups = redis::cmd("XINFO");
        groups.arg("GROUPS").arg(&self.settings.key);
        let groups: Vec<HashMap<String, Value>> = groups.query_async(&mut conn).await?;
        for mut group in groups {
            let name = group
                .remove("name")
                .and_then(|name| reply::bytes(name).ok());
            if name.is_some_and(|name| name == self.settings.group.as_bytes())
                && let Some(Value::Int(lag)) = group.get("lag")
            {
                return Ok(u64::try_from(*lag).ok());
            }
        }
        Ok(None)
    }

    async fn close(&self) {
        self.reading.lock().await.conn = None;
        *self.redis.lock().await = None;
    }
}
