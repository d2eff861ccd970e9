//! Parses Redis's responses to read commands without copying values.

use bytes::Bytes;
use redis::{RedisResult, Value};

use crate::{
    bus::{LogMessage, LogRecord},
    model::Offset,
    redis_pool::reply::{array, bytes, offset, pair, unexpected},
};

/// An entry of a stream. It has no value if it was deleted and only a consumer's pending list still
/// has its id.
pub(super) struct Entry {
    pub(super) offset: Offset,
    pub(super) value: Option<Bytes>,
}

/// Parses the response of XREAD and XREADGROUP: entries by stream. Empty if the wait ended without
/// entries.
pub(super) fn streams(reply: Value) -> RedisResult<Vec<(Vec<u8>, Vec<Entry>)>> {
    let streams: Vec<(Value, Value)> = match reply {
        Value::Nil => return Ok(Vec::new()),
        // RESP3
        Value::Map(streams) => streams,
        Value::Array(streams) => streams.into_iter().map(pair).collect::<RedisResult<_>>()?,
        _ => return Err(unexpected()),
    };
    streams
        .into_iter()
        .map(|(key, list)| Ok((bytes(key)?, entries(list)?)))
        .collect()
}

/// Parses the response of `bus_take_over.lua`: whether there is more, and the entries that were
/// taken over.
pub(super) fn taken_over(reply: Value) -> RedisResult<(bool, Vec<Entry>)> {
    let (more, list) = pair(reply)?;
    Ok((more == Value::Int(1), entries(list)?))
}

pub(super) fn entries(list: Value) -> RedisResult<Vec<Entry>> {
    array(list)?.into_iter().map(entry).collect()
}

fn entry(item: Value) -> RedisResult<Entry> {
    let (id, fields) = pair(item)?;
    let value = match fields {
        Value::Nil => None,
        fields => Some(value(array(fields)?)?),
    };
    Ok(Entry {
        offset: offset(id)?,
        value,
    })
}

/// The value of field `v`.
///
/// An entry without this field was not written by taskd. It is read as an empty record, which
/// cannot be decoded and so is handled as poison instead of blocking the partition.
fn value(fields: Vec<Value>) -> RedisResult<Bytes> {
    let mut fields = fields.into_iter();
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        if matches!(&name, Value::BulkString(name) if name == b"v") {
            return bytes(value).map(Bytes::from);
        }
    }
    Ok(Bytes::new())
}

/// Parses the response of XRANGE on a log.
pub(super) fn log_messages(partition: u32, list: Value) -> RedisResult<Vec<LogMessage>> {
    let mut messages = Vec::new();
    for item in array(list)? {
        let (id, fields) = pair(item)?;
        let offset = offset(id)?;
        let (record, number) = log_record(partition, array(fields)?)?;
        messages.push(LogMessage {
            offset,
            // Redis makes ids from its clock.
            published_unix_ms: i64::try_from(offset.major).unwrap_or(i64::MAX),
            number,
            record,
        });
    }
    Ok(messages)
}

/// Parses a record, and how many were appended before it.
fn log_record(partition: u32, fields: Vec<Value>) -> RedisResult<(LogRecord, u64)> {
    let mut number = 0;
    let mut record = LogRecord {
        partition,
        ..LogRecord::default()
    };
    let mut fields = fields.into_iter();
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        let value = bytes(value)?;
        match &bytes(name)?[..] {
            b"v" => record.value = value.into(),
            b"k" => record.key = value.into(),
            b"a" => record.attributes = serde_json::from_slice(&value).unwrap_or_default(),
            b"i" => record.id = String::from_utf8(value).unwrap_or_default(),
            // `bus_publish.lua` writes '<bytes> <records>'.
            b"before" => {
                let before = String::from_utf8(value).unwrap_or_default();
                let records = before.split_once(' ').map(|(_, records)| records.parse());
                number = records.and_then(Result::ok).unwrap_or_default();
            }
            _ => {}
        }
    }
    Ok((record, number))
}
