//! Subscriptions: each turns the records of a topic into tasks of a queue.

use std::{fmt, str::FromStr, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{
    Matching, Offset, OnDead, OwnTopic, QueueName, Rfc3339, SubscriptionName, TaskId, TopicName,
    unix_time::rfc_3339,
};

/// The most subscriptions.
pub const MOST_SUBSCRIPTIONS: u32 = 1000;

/// The headers of a record's task that name its subscription and its replay number.
pub const SUBSCRIPTION_HEADERS: [&str; 2] = ["taskd-subscription", "taskd-replay"];

/// The bits of a task's id that follow its time, and order the tasks of a millisecond.
const PLACE_MASK: u64 = (1 << 12) - 1;

/// The topics of a subscription: one name, or all names that begin with a prefix (`PREFIX*`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicPattern(Arc<str>);

impl TopicPattern {
    pub fn new(text: &str) -> Result<Self, String> {
        let name = text.strip_suffix('*').unwrap_or(text);
        let is_own = OwnTopic::of(text).is_some();
        let is_every_topic_of_users = text == "*";
        if !is_own && !is_every_topic_of_users {
            super::topic_of_users(name)?;
        }
        Ok(Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The prefix of the names; `None` for one topic.
    pub fn prefix(&self) -> Option<&str> {
        self.0.strip_suffix('*')
    }

    pub fn includes(&self, topic: &TopicName) -> bool {
        match self.prefix() {
            Some(prefix) => {
                topic.as_str().starts_with(prefix) && OwnTopic::of(topic.as_str()).is_none()
            }
            None => topic.as_str() == self.as_str(),
        }
    }
}

impl fmt::Display for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which tasks of a subscription go one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SequenceBy {
    /// None: workers take them in any order.
    #[default]
    None,
    /// Those of records with the same key.
    Key,
}

/// What is given for a subscription. What is left out stays, or is the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutSubscription {
    pub topic: Option<String>,
    pub queue: Option<String>,
    pub start: Option<String>,
    /// JSON, as [`Matching::read`] reads it.
    pub matching: Option<Value>,
    pub sequence: Option<SequenceBy>,
    pub on_dead: Option<OnDead>,
}

/// A subscription, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    pub name: SubscriptionName,
    pub topics: TopicPattern,
    pub queue: QueueName,
    /// Where it began when it was made, as given.
    pub start: String,
    pub matching: Matching,
    pub sequence: SequenceBy,
    pub on_dead: OnDead,
    pub created_unix_ms: i64,
    /// How often it has been changed.
    pub version: u64,
}

/// Where to send a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeekTo {
    pub place: String,
    /// Cancel the unfinished tasks that its records have become since it was last sent.
    pub cancels: bool,
}

/// Which partition of a topic a subscription has read up to some place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PositionKey {
    pub subscription: SubscriptionName,
    pub topic: TopicName,
    pub partition: u32,
}

/// The place up to which a subscription has read a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadUpTo {
    /// The last record that was read; `None`: none yet.
    pub after: Option<Offset>,
    /// How many records were appended to the partition up to here. `None` if it is not known; then
    /// the next record that is read tells.
    pub count: Option<u64>,
    /// How often the subscription was sent back.
    pub replay: u64,
}

/// What became of records that a subscription has read:
/// read = tasks + duplicates + filtered + refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ReadCounts {
    /// Records that were read.
    pub read: u64,
    /// Records whose `id` had a task already.
    pub duplicates: u64,
    /// Records that `match` left out.
    pub filtered: u64,
    /// Records that the queue refused. Each has a dead letter.
    pub refused: u64,
    /// Records that retention deleted before they were read.
    pub skipped: u64,
}

impl ReadCounts {
    pub fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.duplicates += other.duplicates;
        self.filtered += other.filtered;
        self.refused += other.refused;
        self.skipped += other.skipped;
    }
}

/// A position, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub key: PositionKey,
    pub up_to: ReadUpTo,
    pub counts: ReadCounts,
}

impl Position {
    /// A position before the first record of a partition.
    pub fn at_beginning(key: PositionKey) -> Self {
        Self {
            key,
            up_to: ReadUpTo {
                count: Some(0),
                ..ReadUpTo::default()
            },
            counts: ReadCounts::default(),
        }
    }
}

/// A step of a position, which counts only if the position is still where the page was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PositionMove {
    pub key: PositionKey,
    pub from: ReadUpTo,
    pub to: ReadUpTo,
    /// What is added to the counts.
    pub counts: ReadCounts,
}

/// Derives the id of the task that a record becomes, so that a record that is read again has the
/// same task. Ids sort as the records of a partition do.
pub fn record_task_id(
    subscription: &Subscription,
    replay: u64,
    topic: &TopicName,
    partition: u32,
    offset: Offset,
    published_unix_ms: i64,
) -> TaskId {
    let mut hash = Sha256::new();
    for text in [subscription.name.as_str(), topic.as_str()] {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    }
    hash.update(subscription.created_unix_ms.to_be_bytes());
    hash.update(replay.to_be_bytes());
    hash.update(partition.to_be_bytes());
    hash.update(offset.major.to_be_bytes());
    hash.update(offset.minor.to_be_bytes());
    // On Redis Streams the time is the major part, and the minor part counts the records of a
    // millisecond. On Kafka the major part counts all records.
    let is_time = offset.major == published_unix_ms.unsigned_abs();
    let place = if is_time { offset.minor } else { offset.major };
    derived_task_id(hash, place, published_unix_ms.max(0).unsigned_abs())
}

/// The id of a task with this hash and time. Those of one time sort by their places.
pub fn derived_task_id(hash: Sha256, place: u64, unix_ms: u64) -> TaskId {
    let mut after_time = [0; 10];
    after_time.copy_from_slice(&hash.finalize()[..10]);
    let [high, low] = ((place & PLACE_MASK) as u16).to_be_bytes();
    after_time[0] = high;
    after_time[1] = low;
    // An id has 48 bits for it.
    let unix_ms = unix_ms.min((1 << 48) - 1);
    TaskId(uuid::Builder::from_unix_timestamp_millis(unix_ms, &after_time).into_uuid())
}

/// What becomes of what a subscription has to read, for a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SubscriptionView {
    pub name: String,
    /// A topic, or all that begin so: `PREFIX*`.
    pub topic: String,
    pub queue: String,
    /// Where it began when it was made.
    pub start: String,
    #[serde(rename = "match")]
    pub matching: Value,
    pub sequence: SequenceBy,
    pub on_dead: OnDead,
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub created_at: i64,
    /// Records that are not read yet.
    pub behind: u64,
    /// How long ago the oldest record that is not read yet was published; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_seconds: Option<u64>,
    /// Tasks of the queue that wait.
    pub waiting: u64,
    /// Tasks of the queue that workers have.
    pub leased: u64,
    /// Tasks of the queue that are completed.
    pub done: u64,
    /// Tasks of the queue that are dead.
    pub dead: u64,
    /// Records that became tasks.
    pub tasks: u64,
    #[serde(flatten)]
    pub counts: ReadCounts,
    /// How far it has read each partition; only for one subscription.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<PositionView>,
    /// The bulk change that cancels the tasks of before; only in the answer of a seek that asks for
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bulk: Option<Uuid>,
}

/// How far a subscription has read a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PositionView {
    pub topic: String,
    pub partition: u32,
    /// The last record that was read; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<String>,
    /// How often the subscription was sent back.
    pub replay: u64,
    /// Records that are not read yet.
    pub behind: u64,
    #[serde(flatten)]
    pub counts: ReadCounts,
}

macro_rules! names {
    ($type:ident: $($variant:ident = $name:literal),+) => {
        impl $type {
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$variant),)+
                    _ => Err(format!(
                        "unknown value {:?}; expected {}",
                        super::shorten(text, super::ECHO),
                        [$($name),+].join(" or ")
                    )),
                }
            }
        }
    };
}
names!(SequenceBy: None = "none", Key = "key");
names!(OnDead: Next = "next", Hold = "hold");

#[cfg(test)]
mod tests {
    use super::*;

    fn subscription(name: &str, created_unix_ms: i64) -> Subscription {
        Subscription {
            name: SubscriptionName::new(name).unwrap(),
            topics: TopicPattern::new("t*").unwrap(),
            queue: QueueName::new("q").unwrap(),
            start: "0".to_owned(),
            matching: Matching::default(),
            sequence: SequenceBy::None,
            on_dead: OnDead::Next,
            created_unix_ms,
            version: 1,
        }
    }

    #[test]
    fn a_pattern_is_a_topic_or_a_prefix() {
        let topic = |name: &str| TopicName::new(name).unwrap();
        let one = TopicPattern::new("orders").unwrap();
        assert!(one.includes(&topic("orders")) && !one.includes(&topic("orders2")));
        let many = TopicPattern::new("orders.*").unwrap();
        assert!(many.includes(&topic("orders.eu")) && !many.includes(&topic("orders")));
        assert!(TopicPattern::new("*").unwrap().includes(&topic("any")));
        // Those of taskd are named.
        assert!(!TopicPattern::new("*").unwrap().includes(&topic("events")));
        let events = TopicPattern::new("events").unwrap();
        assert!(events.includes(&topic("events")));
        for wrong in ["", "a b", "a*b", "pipeline", "expirations", "**"] {
            assert!(TopicPattern::new(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_part_of_a_place_makes_another_task_and_ids_sort_as_records_do() {
        let topic = TopicName::new("t").unwrap();
        let other = TopicName::new("u").unwrap();
        let at = 1_764_000_000_123;
        let redis = |minor| Offset {
            major: at as u64,
            minor,
        };
        let id = |of: &Subscription, replay, topic: &TopicName, partition, offset| {
            record_task_id(of, replay, topic, partition, offset, at)
        };
        let one = subscription("s", 1);
        let first = id(&one, 0, &topic, 0, redis(0));
        assert_eq!(first, id(&one, 0, &topic, 0, redis(0)));
        assert_eq!(first.created_unix_ms(), at);
        for another in [
            id(&subscription("s2", 1), 0, &topic, 0, redis(0)),
            // A subscription that was deleted and made again.
            id(&subscription("s", 2), 0, &topic, 0, redis(0)),
            id(&one, 1, &topic, 0, redis(0)),
            id(&one, 0, &other, 0, redis(0)),
            id(&one, 0, &topic, 1, redis(0)),
            id(&one, 0, &topic, 0, redis(1)),
        ] {
            assert_ne!(first, another);
        }
        let ids: Vec<TaskId> = (0..4000)
            .map(|minor| id(&one, 0, &topic, 0, redis(minor)))
            .collect();
        assert!(ids.is_sorted());
        let kafka = (1 << 20..(1 << 20) + 4096).map(|major| Offset { major, minor: 0 });
        let ids: Vec<TaskId> = kafka.map(|offset| id(&one, 0, &topic, 0, offset)).collect();
        assert!(ids.is_sorted());
    }
}
