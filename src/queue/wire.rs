//! Arguments as the scripts take them, and answers as they give them.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use redis::Value;

use super::{Code, Error, Event, Inspected, OutboxEntry, RecordStatus, Result};
use crate::model::TaskId;

/// A msgpack array of texts, '' when there are none. As *str*: Redis's cmsgpack cannot read *bin*.
pub(super) fn packed_strings(texts: &[String]) -> Vec<u8> {
    let mut packed = Vec::new();
    if texts.is_empty() {
        return packed;
    }
    // Writing to a Vec does not fail.
    drop(rmp::encode::write_array_len(&mut packed, u32::try_from(texts.len()).unwrap_or(u32::MAX)));
    texts.iter().for_each(|text| drop(rmp::encode::write_str(&mut packed, text)));
    packed
}

pub(super) fn packed_ms(durations: &[Duration]) -> Vec<u8> {
    let mut packed = Vec::new();
    drop(rmp::encode::write_array_len(&mut packed, u32::try_from(durations.len()).unwrap_or(u32::MAX)));
    for duration in durations {
        let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        drop(rmp::encode::write_uint(&mut packed, ms));
    }
    packed
}

pub(super) fn items(value: Value) -> Result<Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(Error::Answer(format!("{other:?} where a list should be"))),
    }
}

pub(super) fn bytes(value: Option<Value>) -> Result<Bytes> {
    match value {
        Some(Value::BulkString(bytes)) => Ok(bytes.into()),
        other => Err(Error::Answer(format!("{other:?} where bytes should be"))),
    }
}

pub(super) fn text(value: Option<Value>) -> Result<String> {
    match value {
        Some(Value::SimpleString(text)) => Ok(text),
        other => String::from_utf8(bytes(other)?.to_vec()).map_err(|e| Error::Answer(e.to_string())),
    }
}

pub(super) fn number<T: TryFrom<i64>>(value: Option<Value>) -> Result<T> {
    let number = match value {
        Some(Value::Int(number)) => number,
        other => {
            let text = text(other)?;
            text.parse().map_err(|_| Error::Answer(format!("{text:?} where a number should be")))?
        }
    };
    T::try_from(number).map_err(|_| Error::Answer(format!("number {number} is out of range")))
}

pub(super) fn numbers(value: Value, count: usize) -> Result<Vec<i64>> {
    let numbers = items(value)?.into_iter().map(|n| number(Some(n))).collect::<Result<Vec<i64>>>()?;
    if numbers.len() != count {
        return Err(Error::Answer(format!("{} numbers instead of {count}", numbers.len())));
    }
    Ok(numbers)
}

pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(super) fn pairs(value: Value, count: usize) -> Result<Vec<(Code, i64)>> {
    let answers = items(value)?;
    if answers.len() != count {
        return Err(Error::Answer(format!("{} answers to {count} items", answers.len())));
    }
    answers.into_iter().map(|pair| numbers(pair, 2).and_then(|n| Ok((Code::from_number(n[0])?, n[1])))).collect()
}

pub(super) fn task_id(value: Option<Value>) -> Result<TaskId> {
    TaskId::from_slice(&bytes(value)?).ok_or_else(|| Error::Answer("an id that has not 16 bytes".into()))
}

pub(super) fn inspected(value: Value) -> Result<Option<Inspected>> {
    if matches!(value, Value::Int(0)) {
        return Ok(None);
    }
    let mut fields = items(value)?.into_iter();
    let status = match text(fields.next())?.as_str() {
        "L" => RecordStatus::Live,
        "F" => RecordStatus::Completed,
        "D" => RecordStatus::Dead,
        "X" => RecordStatus::Cancelled,
        other => return Err(Error::Answer(format!("record status {other:?}"))),
    };
    let mut next = || number(fields.next());
    Ok(Some(Inspected {
        status,
        replicas: next()?,
        credited: next()?,
        held: next()?,
        failures: next()?,
        waiting: next()?,
    }))
}

pub(super) fn outbox_entry(value: Value) -> Result<OutboxEntry> {
    let mut entry = items(value)?.into_iter();
    let id = text(entry.next())?;
    let at_unix_ms = id.split('-').next().and_then(|ms| ms.parse().ok()).unwrap_or(0);
    let fields = items(entry.next().ok_or_else(|| Error::Answer("an entry without fields".into()))?)?;
    let mut fields = fields.into_iter();
    let (mut completed, mut by_name) = (Vec::new(), HashMap::new());
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        match text(Some(name))?.as_str() {
            "c" => completed.push(bytes(Some(value))?),
            name => drop(by_name.insert(name.to_owned(), value)),
        }
    }
    let mut take = |name: &str| by_name.remove(name);
    let event = if !completed.is_empty() {
        Event::Completed(completed)
    } else if let Some(id) = take("d") {
        Event::Died { id: task_id(Some(id))?, attempts: number(take("a"))?, reason: lossy(take("r"))? }
    } else {
        let id = task_id(take("x"))?;
        Event::Expired {
            id,
            worker: lossy(take("w"))?,
            attempts: number(take("a"))?,
            dead: number::<u8>(take("e"))? == 1,
        }
    };
    Ok(OutboxEntry { id, at_unix_ms, event })
}

pub(super) fn lossy(value: Option<Value>) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(value)?).into_owned())
}
