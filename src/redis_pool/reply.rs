//! Parts of the responses of Redis, without copying values.

use redis::{ErrorKind, RedisError, RedisResult, Value};

use crate::model::Offset;

/// A stream id.
pub fn offset(id: Value) -> RedisResult<Offset> {
    let id = String::from_utf8(bytes(id)?).map_err(|_| unexpected())?;
    id.parse().map_err(|_| unexpected())
}

pub fn pair(value: Value) -> RedisResult<(Value, Value)> {
    <[Value; 2]>::try_from(array(value)?)
        .map(Into::into)
        .map_err(|_| unexpected())
}

pub fn array(value: Value) -> RedisResult<Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(unexpected()),
    }
}

pub fn bytes(value: Value) -> RedisResult<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.into_bytes()),
        Value::Int(number) => Ok(number.to_string().into_bytes()),
        _ => Err(unexpected()),
    }
}

pub fn unexpected() -> RedisError {
    (
        ErrorKind::UnexpectedReturnType,
        "not what Redis 7.0 answers to this command; check what the redis url names",
    )
        .into()
}
