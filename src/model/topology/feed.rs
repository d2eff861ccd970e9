//! Feeds: sources of records, each of which opens a tree.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::model::{
    Matching, Offset, QueueName, SubscriptionName, TaskId, TopicPattern, derived_task_id,
};

/// The most feeds of a topology.
pub(super) const MOST_FEEDS: usize = 64;

/// A feed of a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedSettings {
    /// `TOPOLOGY.FEED`
    pub name: SubscriptionName,
    /// The place of the stage that gets its records.
    pub into: usize,
    pub source: FeedSource,
    pub ack: FeedAck,
    /// How many acknowledgements are sent together at most.
    pub ack_batch: u32,
    /// How long an acknowledgement waits for others at most.
    pub ack_interval: Duration,
}

/// Where a feed reads.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedSource {
    /// A subscription of the feed's name reads it.
    Topic {
        topic: TopicPattern,
        start: String,
        matching: Matching,
    },
    RedisStream(RedisStream),
    RedisList(RedisList),
}

/// A stream of a Redis that is not taskd's.
#[derive(Clone, Debug, PartialEq)]
pub struct RedisStream {
    pub url: String,
    pub key: String,
    pub group: String,
    /// Where the group begins if it is not there: `0`, `$` or the id of an entry.
    pub start: String,
    /// How many entries are read at once.
    pub count: u32,
    /// How long a read waits for entries.
    pub block: Duration,
    /// Entries are also deleted when they are acknowledged.
    pub delete: bool,
    /// The field that has the payload; the others are headers. Empty: all fields are the payload, in JSON.
    pub payload: String,
    /// What becomes of entries that other consumers of the group have: the first rule that fits.
    pub pending: Vec<PendingRule>,
}

/// What becomes of an entry that a consumer has had for long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRule {
    /// It was delivered at least this long ago.
    pub idle: Duration,
    /// It was delivered at least this often.
    pub deliveries: u32,
    pub act: PendingAct,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PendingAct {
    /// It opens a tree.
    Claim,
    Ack,
    /// It is acknowledged and deleted.
    Delete,
    /// It is copied, and acknowledged.
    Move(MoveTo),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveTo {
    Stream(String),
    List(String),
    SortedSet(String),
    /// A queue of taskd.
    Queue(QueueName),
}

/// A list of a Redis that is not taskd's.
#[derive(Clone, Debug, PartialEq)]
pub struct RedisList {
    pub url: String,
    pub key: String,
    /// Items are taken from the right end.
    pub from_right: bool,
    /// How many items are taken at once.
    pub count: u32,
}

/// When a record is acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeedAck {
    /// When SQL has its tree.
    #[default]
    Stored,
    /// When its tree has ended.
    Done,
    /// Never: it is gone as soon as it is read.
    None,
}

impl FeedAck {
    pub const ALL: [Self; 3] = [Self::Stored, Self::Done, Self::None];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Done => "done",
            Self::None => "none",
        }
    }
}

impl FeedSource {
    /// The `type` of a file.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Topic { .. } => "topic",
            Self::RedisStream(_) => "redis_stream",
            Self::RedisList(_) => "redis_list",
        }
    }

    /// A subscription reads it.
    pub fn is_topic(&self) -> bool {
        matches!(self, Self::Topic { .. })
    }

    /// Tells this source from others, whatever the credentials in its URL. Empty for topics, whose
    /// positions are the topic's own.
    pub fn identity(&self) -> String {
        let (url, key, group) = match self {
            Self::Topic { .. } => return String::new(),
            Self::RedisStream(stream) => (&*stream.url, &*stream.key, &*stream.group),
            Self::RedisList(list) => (&*list.url, &*list.key, ""),
        };
        let place = url.split_once("://").map_or(url, |(_, place)| place);
        let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
        let (place, parameters) = place.split_once('?').unwrap_or((place, ""));
        let mut parameters = parameters.split('&');
        let database = parameters.find(|one| one.starts_with("db="));
        let mut hash = Sha256::new();
        for part in [self.kind(), place, database.unwrap_or_default(), key, group] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        let hash = hash.finalize();
        hash[..16]
            .iter()
            .fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
    }

    /// What is read: a topic, or a key of Redis.
    pub fn reads(&self) -> &str {
        match self {
            Self::Topic { topic, .. } => topic.as_str(),
            Self::RedisStream(stream) => &stream.key,
            Self::RedisList(list) => &list.key,
        }
    }
}

/// Derives the id of the task that a record of a feed becomes, so that a record that is read again
/// has the same task. `source` is its [identity](FeedSource::identity), and `run` tells a source that
/// lost its data from what it was before.
pub fn feed_task_id(feed: &SubscriptionName, source: &str, run: u64, at: Offset) -> TaskId {
    let mut hash = Sha256::new();
    hash.update(b"feed");
    for part in [feed.as_str(), source] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.update(run.to_be_bytes());
    hash.update(at.major.to_be_bytes());
    hash.update(at.minor.to_be_bytes());
    derived_task_id(hash, at.minor, at.major)
}

/// What became of the records of a feed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FeedCounts {
    /// Records that opened a tree.
    pub trees: u64,
    /// Records that were stored before.
    pub duplicates: u64,
    /// Records that the queue refused. Each has a dead letter.
    pub refused: u64,
    /// Records that the source has forgotten because they were acknowledged.
    pub acknowledged: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_no_part_of_the_identity_of_a_source() {
        let identity = |url: &str, key: &str| {
            let source = FeedSource::RedisList(RedisList {
                url: url.to_owned(),
                key: key.to_owned(),
                from_right: false,
                count: 1,
            });
            source.identity()
        };
        let one = identity("redis://h:1/2", "k");
        assert_eq!(identity("rediss://user:p@ss?@h:1/2", "k"), one);
        assert_eq!(identity("redis://h:1/2?protocol=resp3", "k"), one);
        for (url, key) in [
            ("redis://h:1/3", "k"),
            ("redis://h:2/2", "k"),
            ("redis://h:1/2", "l"),
        ] {
            assert_ne!(identity(url, key), one, "{url} {key}");
        }
        let socket = |db: &str| identity(&format!("unix:///s?db={db}&pass=x"), "k");
        assert_ne!(socket("1"), socket("2"));
    }
}
