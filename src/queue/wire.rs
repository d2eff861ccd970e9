//! Encodes arguments as the scripts take them, and decodes their answers.

use std::{collections::HashMap, fmt, time::Duration};

use bytes::Bytes;
use redis::Value;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, SeqAccess, Visitor},
};
use uuid::Uuid;

use super::{
    error::{Error, Result},
    stats::Stats,
    types::{Code, Event, Inspected, OutboxEntry, RecordStatus},
};
use crate::{
    model::{Failure, LeaseNumber, Offset, TaskId},
    wire::framed_reports,
};

/// A new seed for each call: Redis gives every script run the same one.
pub(super) fn seed() -> u32 {
    Uuid::new_v4().as_fields().0 >> 1
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A msgpack array of texts as `cmsgpack` reads it; empty if there are none.
pub(super) fn packed_strings(texts: &[String]) -> Vec<u8> {
    if texts.is_empty() {
        Vec::new()
    } else {
        packed(texts)
    }
}

pub(super) fn packed_ms(durations: &[Duration]) -> Vec<u8> {
    packed(
        &durations
            .iter()
            .map(|duration| ms(*duration))
            .collect::<Vec<_>>(),
    )
}

pub(super) fn packed(values: &(impl Serialize + ?Sized)) -> Vec<u8> {
    rmp_serde::to_vec(values).expect("texts and numbers can be packed")
}

/// Returns the items of a list that must be present.
pub(super) fn list(value: Option<Value>) -> Result<Vec<Value>> {
    items(value.ok_or_else(|| Error::Answer("a list is missing".into()))?)
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
        other => {
            String::from_utf8(bytes(other)?.to_vec()).map_err(|e| Error::Answer(e.to_string()))
        }
    }
}

pub(super) fn stream_id(value: Option<Value>) -> Result<Offset> {
    let id = text(value)?;
    id.parse()
        .map_err(|_| Error::Answer(format!("{id:?} where the id of an entry should be")))
}

pub(super) fn number<T: TryFrom<i64>>(value: Option<Value>) -> Result<T> {
    let number = match value {
        Some(Value::Int(number)) => number,
        other => {
            let text = text(other)?;
            text.parse()
                .map_err(|_| Error::Answer(format!("{text:?} where a number should be")))?
        }
    };
    T::try_from(number).map_err(|_| Error::Answer(format!("number {number} is out of range")))
}

pub(super) fn numbers(value: Value, count: usize) -> Result<Vec<i64>> {
    let numbers = items(value)?
        .into_iter()
        .map(|n| number(Some(n)))
        .collect::<Result<Vec<i64>>>()?;
    if numbers.len() != count {
        return Err(Error::Answer(format!(
            "{} numbers instead of {count}",
            numbers.len()
        )));
    }
    Ok(numbers)
}

pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(super) fn pairs(value: Value, count: usize) -> Result<Vec<(Code, i64)>> {
    let answers = items(value)?;
    if answers.len() != count {
        return Err(Error::Answer(format!(
            "{} answers to {count} items",
            answers.len()
        )));
    }
    answers
        .into_iter()
        .map(|pair| numbers(pair, 2).and_then(|n| Ok((Code::from_number(n[0])?, n[1]))))
        .collect()
}

pub(super) fn task_id(value: Option<Value>) -> Result<TaskId> {
    id(&bytes(value)?)
}

/// Reads ids that follow each other in a string.
pub(super) fn task_ids(value: Option<Value>) -> Result<Vec<TaskId>> {
    bytes(value)?.chunks(16).map(id).collect()
}

fn id(bytes: &[u8]) -> Result<TaskId> {
    TaskId::from_slice(bytes).ok_or_else(|| Error::Answer("an id that has not 16 bytes".into()))
}

pub(super) fn inspected(value: Value) -> Result<Option<Inspected>> {
    if matches!(value, Value::Int(0)) {
        return Ok(None);
    }
    let mut fields = items(value)?.into_iter();
    let status = record_status(fields.next())?;
    let mut next = || number(fields.next());
    Ok(Some(Inspected {
        status,
        replicas: next()?,
        credited: next()?,
        held: next()?,
        failures: next()?,
        waiting: next()?,
        epoch: next()?,
    }))
}

pub(super) fn record_status(value: Option<Value>) -> Result<RecordStatus> {
    Ok(match text(value)?.as_str() {
        "L" => RecordStatus::Live,
        "F" => RecordStatus::Completed,
        "D" => RecordStatus::Dead,
        "X" => RecordStatus::Cancelled,
        other => return Err(Error::Answer(format!("record status {other:?}"))),
    })
}

/// Reads a shard's stored offset with its topic generation.
pub(super) fn stored_offset(text: &str) -> Option<(String, Offset)> {
    let (topic, at) = text.rsplit_once('/')?;
    Some((topic.to_owned(), at.parse().ok()?))
}

pub(super) fn stats(value: Value) -> Result<Stats> {
    let n = numbers(value, 12)?;
    Ok(Stats {
        open: unsigned(n[0]),
        leases: unsigned(n[1]),
        delayed: unsigned(n[2]),
        live: unsigned(n[3]),
        waiting_bytes: unsigned(n[4]),
        outbox: unsigned(n[5]),
        finals: unsigned(n[6]),
        oldest_created_unix_ms: (n[7] >= 0).then_some(n[7]),
        ahead: unsigned(n[8]),
        behind: unsigned(n[9]),
        limit_keys: unsigned(n[10]),
        crowded_keys: unsigned(n[11]),
    })
}

pub(super) fn outbox_entry(value: Value) -> Result<OutboxEntry> {
    let mut entry = items(value)?.into_iter();
    let id = text(entry.next())?;
    let at_unix_ms = id
        .split('-')
        .next()
        .and_then(|ms| ms.parse().ok())
        .unwrap_or(0);
    let fields = items(
        entry
            .next()
            .ok_or_else(|| Error::Answer("an entry without fields".into()))?,
    )?;
    let mut fields = fields.into_iter().peekable();
    let mut events = Vec::new();
    let mut failures = Vec::new();
    let mut size = 0;
    while let Some(name) = fields.next() {
        let name = text(Some(name))?;
        let first = bytes(fields.next())?;
        size += first.len();
        if name == "b" {
            let (reports, failed) = framed_reports(first).map_err(Error::Answer)?;
            events.extend(reports.into_iter().map(Event::Completed));
            failures.extend(failed);
            continue;
        }
        // The fields of an event end where the next one begins.
        let mut rest = HashMap::new();
        size += name.len();
        while let Some(Value::BulkString(next)) = fields.peek() {
            if matches!(&next[..], b"b" | b"d" | b"x") {
                break;
            }
            let name = text(fields.next())?;
            let value = bytes(fields.next())?;
            size += name.len() + value.len();
            rest.insert(name, value);
        }
        events.push(event(&name, &first, &rest)?);
    }
    Ok(OutboxEntry {
        id,
        at_unix_ms,
        events,
        failures,
        bytes: size,
    })
}

fn event(name: &str, id: &[u8], rest: &HashMap<String, Bytes>) -> Result<Event> {
    let id = self::id(id)?;
    let field = |name: &str| {
        rest.get(name)
            .ok_or_else(|| Error::Answer(format!("an event without its field {name}")))
    };
    let lossy = |name: &str| Ok::<_, Error>(String::from_utf8_lossy(field(name)?).into_owned());
    let attempts = lossy("a")?
        .parse()
        .map_err(|_| Error::Answer("attempts that are no number".into()))?;
    match name {
        "d" => {
            let History(history) = rmp_serde::from_slice(field("h")?).map_err(|error| {
                Error::Answer(format!("a history that cannot be read: {error}"))
            })?;
            // A task that was never sent again has no epoch here.
            let epoch = rest.get("e").map_or(Ok("0".into()), |_| lossy("e"))?;
            let epoch = epoch
                .parse()
                .map_err(|_| Error::Answer("an epoch that is no number".into()))?;
            Ok(Event::Died {
                id,
                attempts,
                reason: lossy("r")?,
                history,
                epoch,
            })
        }
        "x" => {
            let number = |name: &str| -> Result<u64> {
                lossy(name)?
                    .parse()
                    .map_err(|_| Error::Answer(format!("a field {name} that is no number")))
            };
            let lease = LeaseNumber {
                generation: number("n")?,
                grant: number("g")?,
            };
            let leased_unix_ms = match rest.get("s") {
                Some(_) => i64::try_from(number("s")?).unwrap_or(0),
                None => 0,
            };
            let worker = lossy("w")?;
            let dead = lossy("e")? == "1";
            Ok(Event::Expired {
                id,
                worker,
                attempts,
                dead,
                lease,
                leased_unix_ms,
            })
        }
        other => Err(Error::Answer(format!("an event {other:?}"))),
    }
}

/// Failures, read from a flat msgpack array {ms, worker, reason, …}.
struct History(Vec<Failure>);

impl<'de> Deserialize<'de> for History {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Flat;

        impl<'de> Visitor<'de> for Flat {
            type Value = History;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a flat array of failures")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<History, A::Error> {
                let mut failures = Vec::new();
                while let Some(at_unix_ms) = seq.next_element()? {
                    let mut text = || {
                        seq.next_element::<Lossy>()?
                            .ok_or_else(|| de::Error::custom("cut off"))
                    };
                    failures.push(Failure {
                        at_unix_ms,
                        worker: text()?.0,
                        reason: text()?.0,
                    });
                }
                Ok(History(failures))
            }
        }

        deserializer.deserialize_seq(Flat)
    }
}

/// A text that may have been cut inside a character.
struct Lossy(String);

impl<'de> Deserialize<'de> for Lossy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Lossy;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E>(self, text: &str) -> Result<Lossy, E> {
                Ok(Lossy(text.to_owned()))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Lossy, E> {
                Ok(Lossy(String::from_utf8_lossy(bytes).into_owned()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_read_with_texts_that_were_cut() {
        // {1700000000000, 'w', '\xc3', 5, '', 'no'}
        let packed = b"\x96\xcf\x00\x00\x01\x8b\xcf\xe5\x68\x00\xa1w\xa1\xc3\x05\xa0\xa2no";
        let History(failures) = rmp_serde::from_slice(packed).unwrap();
        let failure = |at_unix_ms, worker: &str, reason: &str| Failure {
            at_unix_ms,
            worker: worker.into(),
            reason: reason.into(),
        };
        assert_eq!(
            failures,
            [
                failure(1_700_000_000_000, "w", "\u{fffd}"),
                failure(5, "", "no")
            ]
        );
        assert!(rmp_serde::from_slice::<History>(b"\x92\x05\xa1w").is_err());
    }
}
