//! Names that users choose, validated when they are created.

use std::{borrow::Borrow, fmt, sync::Arc};

use super::{is_hidden, printable};

/// A queue's name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`. Redis keys contain it, so braces and
/// colons are not allowed.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueName(Arc<str>);

/// The queue of the HTTP calls of workflows. Only taskd inserts its tasks, and works on them.
pub const HTTP_QUEUE: &str = "wf.http";

/// A topic's name, of the same form.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopicName(Arc<str>);

/// A subscription's name, of the same form.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubscriptionName(Arc<str>);

/// A topology's name, of the same form.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TopologyName(Arc<str>);

/// A worker's name: 1 to 128 bytes without control characters or invisible characters. It is shown
/// in tables, logs and acts.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerName(Arc<str>);

/// Why a name is invalid, in one line for the user.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidName(String);

impl QueueName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        checked("queue", name).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TopicName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        checked("topic", name).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SubscriptionName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        checked("subscription", name).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TopologyName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        checked("topology", name).map(Self)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Checks the name of a queue, of a topic, of a subscription or of a topology.
fn checked(kind: &str, name: &str) -> Result<Arc<str>, InvalidName> {
    if name.is_empty() {
        return Err(InvalidName(format!("{kind} is missing")));
    }
    // Check the length first: an error must not show a name of several megabytes.
    let length = name.chars().count();
    if length > 64 {
        return Err(InvalidName(format!(
            "{kind} name has {length} characters; at most 64"
        )));
    }
    let odd = name
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')));
    if let Some(odd) = odd {
        return Err(InvalidName(format!(
            "{kind} {name:?} contains {odd:?}; use A-Z a-z 0-9 . _ -"
        )));
    }
    Ok(name.into())
}

/// Allows lookups by `&str` in maps with queue names as keys.
impl Borrow<str> for QueueName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl WorkerName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName(
                "worker is missing: say who asks, so that no worker is credited twice".into(),
            ));
        }
        if name.len() > 128 {
            return Err(InvalidName(format!(
                "worker name has {} bytes; at most 128",
                name.len()
            )));
        }
        if name.chars().any(char::is_control) {
            return Err(InvalidName(format!(
                "worker {name:?} contains a control character"
            )));
        }
        if let Some(hidden) = name.chars().find(|c| is_hidden(*c)) {
            let hidden = u32::from(hidden);
            let name = printable(name);
            return Err(InvalidName(format!(
                "worker \"{name}\" contains U+{hidden:04X}, which cannot be seen"
            )));
        }
        Ok(Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
text!(QueueName);
text!(TopicName);
text!(SubscriptionName);
text!(TopologyName);
text!(WorkerName);

/// A part of a queue, whose Redis keys share one cluster slot. Its number is that of the `pipeline`
/// partition that feeds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    pub queue: QueueName,
    pub number: u32,
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.queue, self.number)
    }
}
