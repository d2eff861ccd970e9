//! Parses the responses of Redis.

use bytes::Bytes;
use redis::{ErrorKind, RedisError, RedisResult, Value};

use crate::model::Offset;

/// An entry of a stream: its id, and its fields. `None`: it was deleted.
pub(super) type Entry = (Offset, Option<Vec<(Bytes, Bytes)>>);

/// The entries in the response of XREADGROUP for one stream. None if the wait ended without any.
pub(super) fn entries(reply: Value) -> RedisResult<Vec<Entry>> {
    let list = match reply {
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
pub(super) fn list(reply: Value) -> RedisResult<Vec<Entry>> {
    array(reply)?.into_iter().map(entry).collect()
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

pub(super) fn offset(id: Value) -> RedisResult<Offset> {
    let id = bytes(id)?;
    let id = std::str::from_utf8(&id).ok();
    id.and_then(|id| id.parse().ok()).ok_or_else(unexpected)
}

pub(super) fn pair(value: Value) -> RedisResult<(Value, Value)> {
    <[Value; 2]>::try_from(array(value)?)
        .map(Into::into)
        .map_err(|_| unexpected())
}

pub(super) fn array(value: Value) -> RedisResult<Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(unexpected()),
    }
}

pub(super) fn bytes(value: Value) -> RedisResult<Bytes> {
    match value {
        Value::BulkString(bytes) => Ok(bytes.into()),
        Value::SimpleString(text) => Ok(text.into_bytes().into()),
        Value::Int(number) => Ok(number.to_string().into_bytes().into()),
        _ => Err(unexpected()),
    }
}

pub(super) fn unexpected() -> RedisError {
    (
        ErrorKind::UnexpectedReturnType,
        "not what this command of Redis answers",
    )
        .into()
}
