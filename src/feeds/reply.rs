//! Parses the responses of Redis.

use bytes::Bytes;
use redis::{RedisResult, Value};

pub(super) use crate::redis_pool::reply::{array, offset, pair, unexpected};
use crate::{model::Offset, redis_pool::reply};

/// An entry of a stream: its id, and its fields. `None`: it was deleted.
pub(super) type Entry = (Offset, Option<Vec<(Bytes, Bytes)>>);

/// The entries in the response of XREADGROUP for one stream. Empty if the wait ended without any.
pub(super) fn entries(answer: Value) -> RedisResult<Vec<Entry>> {
    let list = match answer {
        Value::Nil => return Ok(Vec::new()),
        // RESP3
        Value::Map(streams) => streams.into_iter().next().map(|(_, list)| list),
        Value::Array(streams) => match streams.into_iter().next() {
            Some(stream) => Some(pair(stream)?.1),
            None => None,
        },
        _ => return Err(unexpected()),
    };
    list.map_or(Ok(Vec::new()), self::list)
}

/// The entries in the response of XRANGE and XCLAIM.
pub(super) fn list(answer: Value) -> RedisResult<Vec<Entry>> {
    array(answer)?.into_iter().map(entry).collect()
}

fn entry(item: Value) -> RedisResult<Entry> {
    let (id, fields) = pair(item)?;
    let fields = match fields {
        Value::Nil => None,
        fields => Some(pairs(fields)?),
    };
    Ok((offset(id)?, fields))
}

/// Names and values that follow each other.
pub(super) fn pairs(list: Value) -> RedisResult<Vec<(Bytes, Bytes)>> {
    let mut pairs = Vec::new();
    let mut items = match list {
        Value::Map(items) => {
            for (name, value) in items {
                pairs.push((bytes(name)?, bytes(value)?));
            }
            return Ok(pairs);
        }
        list => array(list)?.into_iter(),
    };
    while let (Some(name), Some(value)) = (items.next(), items.next()) {
        pairs.push((bytes(name)?, bytes(value)?));
    }
    Ok(pairs)
}

pub(super) fn bytes(value: Value) -> RedisResult<Bytes> {
    Ok(reply::bytes(value)?.into())
}
