//! A list of a Redis that is not taskd's. A script moves items into a hash beside the list, where
//! they stay until they are acknowledged.

use std::time::Duration;

use async_trait::async_trait;
use redis::Value;
use tokio::sync::Mutex;

use super::{
    reply::{array, bytes, pair, pairs, unexpected},
    source::{AtOnce, Error, Feed, FeedContent, FeedRecord, Result, connect},
};
use crate::{
    model::{FeedAck, Offset, RedisList},
    redis_pool::{Connection, scripts},
};

/// The field of the hash that counts the items. The hash stays because of it, even if it has none.
const NUMBER: &str = "number";
/// How long an empty list is left alone. A script cannot wait for items.
const LEFT_ALONE: Duration = Duration::from_millis(100);

pub(super) struct List {
    settings: RedisList,
    hash: String,
    ack: FeedAck,
    /// How many items are asked for.
    at_once: AtOnce,
    conn: Mutex<Option<Connection>>,
    /// The cursor of HSCAN over the items that were handed out before. `None`: all of them are read.
    again: Mutex<Option<u64>>,
}

impl List {
    pub(super) fn new(settings: RedisList, reader: &str, ack: FeedAck) -> Self {
        Self {
            hash: format!("{}:{reader}", settings.key),
            at_once: AtOnce::new(settings.count),
            settings,
            ack,
            conn: Mutex::default(),
            again: Mutex::default(),
        }
    }

    async fn conn(&self) -> Result<Connection> {
        let conn = self.conn.lock().await;
        conn.clone().ok_or(Error::Closed)
    }

    async fn taken_before(&self, cursor: u64) -> Result<(u64, Vec<FeedRecord>)> {
        let mut scan = redis::cmd("HSCAN");
        scan.arg(&self.hash).arg(cursor);
        scan.arg("COUNT").arg(self.at_once.get());
        let answer = scan.query_async::<Value>(&mut self.conn().await?).await?;
        let (cursor, items) = pair(answer)?;
        let cursor = bytes(cursor)?;
        let cursor = std::str::from_utf8(&cursor)
            .ok()
            .and_then(|cursor| cursor.parse().ok())
            .ok_or_else(unexpected)?;
        let items = pairs(items)?.into_iter();
        let items = items.filter(|(field, _)| field != NUMBER.as_bytes());
        let mut records = items
            .map(|(field, item)| record(&field, item, true))
            .collect::<Result<Vec<_>>>()?;
        records.sort_by_key(|record| record.reference);
        Ok((cursor, records))
    }

    async fn read(&self) -> Result<Vec<FeedRecord>> {
        let mut again = self.again.lock().await;
        while let Some(cursor) = *again {
            let (cursor, records) = self.taken_before(cursor).await?;
            *again = (cursor != 0).then_some(cursor);
            if !records.is_empty() {
                return Ok(records);
            }
        }
        self.take().await
    }

    async fn take(&self) -> Result<Vec<FeedRecord>> {
        let mut take = scripts::FEED_TAKE.call(&[&self.settings.key, &self.hash]);
        let pop = if self.settings.from_right {
            "RPOP"
        } else {
            "LPOP"
        };
        take.arg(self.at_once.get()).arg(pop);
        take.arg(u8::from(self.ack != FeedAck::None));
        let answer = match take.run(&mut self.conn().await?).await? {
            Value::Nil => return Err(Error::Forgotten),
            answer => array(answer)?,
        };
        let mut records = Vec::with_capacity(answer.len() / 2);
        let mut answer = answer.into_iter();
        while let (Some(field), Some(item)) = (answer.next(), answer.next()) {
            records.push(record(&bytes(field)?, bytes(item)?, false)?);
        }
        Ok(records)
    }
}

fn record(field: &[u8], item: bytes::Bytes, may_be_repeated: bool) -> Result<FeedRecord> {
    let reference = std::str::from_utf8(field).ok();
    let reference: Option<Offset> = reference.and_then(|field| field.parse().ok());
    Ok(FeedRecord {
        reference: reference.ok_or_else(unexpected)?,
        may_be_repeated,
        content: Some(FeedContent {
            payload: item,
            attributes: Vec::new(),
        }),
    })
}

#[async_trait]
impl Feed for List {
    async fn open(&self) -> Result<bool> {
        let mut conn = connect(&self.settings.url).await?.conn();
        let mut exists = redis::cmd("EXISTS");
        exists.arg(&self.hash);
        let is_there = exists.query_async::<u64>(&mut conn).await? > 0;
        *self.conn.lock().await = Some(conn);
        *self.again.lock().await = Some(0);
        Ok(is_there)
    }

    async fn begin(&self) -> Result<()> {
        let mut begin = redis::cmd("HSETNX");
        begin.arg(&self.hash).arg(NUMBER).arg(0);
        begin.query_async::<()>(&mut self.conn().await?).await?;
        Ok(())
    }

    async fn next(&self) -> Result<Vec<FeedRecord>> {
        let read = self.read().await;
        match &read {
            Ok(_) => self.at_once.grow(),
            Err(Error::Redis(error)) if error.is_timeout() => {
                self.at_once.shrink();
                return Err(Error::Slow);
            }
            Err(_) => {}
        }
        let records = read?;
        if records.is_empty() {
            tokio::time::sleep(LEFT_ALONE).await;
        }
        Ok(records)
    }

    async fn ack(&self, references: &[Offset]) -> Result<u64> {
        let fields: Vec<String> = references.iter().map(ToString::to_string).collect();
        let mut remove = redis::cmd("HDEL");
        remove.arg(&self.hash).arg(&fields);
        Ok(remove.query_async(&mut self.conn().await?).await?)
    }

    /// Nobody else takes items from the hash.
    async fn keep(&self) -> Result<()> {
        Ok(())
    }

    async fn health(&self) -> Result<Option<u64>> {
        let mut length = redis::cmd("LLEN");
        length.arg(&self.settings.key);
        Ok(Some(length.query_async(&mut self.conn().await?).await?))
    }

    async fn close(&self) {
        *self.conn.lock().await = None;
    }
}
