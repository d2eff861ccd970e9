//! Subscriptions.

use std::collections::BTreeMap;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::{Unread, object};
use crate::model::{OnDead, PutSubscription, SeekTo, SequenceBy};

/// A subscription. What is left out stays, or is the default.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "a subscription")]
#[schemars(rename = "PutSubscription")]
pub(in crate::ingress) struct Settings {
    /// The topic whose records it reads, or all that begin so: `PREFIX*`. It never changes.
    topic: Option<String>,
    /// The queue of its tasks; without it the queue with its name.
    queue: Option<String>,
    /// Where it begins when it is made: `0`, `$` (without it), an offset, a time, or `-1h`.
    start: Option<String>,
    /// What a record must have: names of attributes, or `$key`, with the values of which one must
    /// match. At most 32 values.
    #[serde(rename = "match")]
    #[schemars(with = "Option<BTreeMap<String, Tests>>")]
    matching: Option<Value>,
    /// Which tasks go one after the other.
    sequence: Option<SequenceBy>,
    /// What the death of a task means for the next ones of its sequence.
    on_dead: Option<OnDead>,
}

#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "only the document of the API has this type")]
enum Tests {
    One(Test),
    More(Vec<Test>),
}

/// A value, how it begins, or whether there is one.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "only the document of the API has this type")]
enum Test {
    Equals(String),
    Prefix { prefix: String },
    Exists { exists: bool },
}

pub(in crate::ingress) fn settings(body: &Bytes) -> Result<PutSubscription, Unread> {
    let settings: Settings = object(body)?;
    Ok(PutSubscription {
        topic: settings.topic,
        queue: settings.queue,
        start: settings.start,
        matching: settings.matching,
        sequence: settings.sequence,
        on_dead: settings.on_dead,
    })
}

/// Where a subscription goes on.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with a place")]
pub(in crate::ingress) struct Seek {
    /// `0`, `$`, an offset, a time, or `-1h`.
    to: String,
    /// Cancel the unfinished tasks that records have become since it was last sent.
    #[serde(default)]
    cancel: bool,
}

pub(in crate::ingress) fn seek(body: &Bytes) -> Result<SeekTo, Unread> {
    let seek: Seek = object(body)?;
    Ok(SeekTo {
        place: seek.to,
        cancels: seek.cancel,
    })
}
