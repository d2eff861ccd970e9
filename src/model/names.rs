//! Names that users choose, checked once where they come in.

use std::{borrow::Borrow, fmt, sync::Arc};

/// A queue's name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`. It stands in Redis keys, so braces and colons are out.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueName(Arc<str>);

/// A worker's name: 1 to 128 bytes without control characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerName(Arc<str>);

/// One line for the user who chose the name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidName(String);

impl QueueName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName("queue is missing".into()));
        }
        // Before it is shown: what somebody sends as a name may have megabytes.
        let length = name.chars().count();
        if length > 64 {
            return Err(InvalidName(format!("queue name has {length} characters; at most 64")));
        }
        let odd = name.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')));
        if let Some(odd) = odd {
            return Err(InvalidName(format!("queue {name:?} contains {odd:?}; use A-Z a-z 0-9 . _ -")));
        }
        Ok(Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A map by queue may be asked with a text.
impl Borrow<str> for QueueName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl WorkerName {
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        if name.is_empty() {
            return Err(InvalidName("worker is missing: say who asks, so that no worker is credited twice".into()));
        }
        if name.len() > 128 {
            return Err(InvalidName(format!("worker name has {} bytes; at most 128", name.len())));
        }
        if name.chars().any(char::is_control) {
            return Err(InvalidName(format!("worker {name:?} contains a control character")));
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
text!(WorkerName);

/// One Redis-sized piece of a queue: all its keys share a cluster slot. The number is the partition of `pipeline` that feeds it.
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
