//! Topics: named logs of records, which anybody may read.

use std::time::Duration;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Serialize, Serializer, de::IgnoredAny};

use super::{KeyHash, Offset, Rfc3339, TopicName, unix_time::rfc_3339};

/// The most topics.
pub const MOST_TOPICS: u32 = 1000;
/// The most partitions of a topic.
pub const MOST_TOPIC_PARTITIONS: u32 = 256;
/// The most records of a call.
pub const MOST_PUBLISHED: usize = 1000;

const MAX_VALUE_BYTES: usize = 1 << 20;
const MAX_KEY_BYTES: usize = 4096;
const MAX_ID_BYTES: usize = 256;
pub const MAX_ATTRIBUTES: usize = 64;
pub const MAX_ATTRIBUTES_BYTES: usize = 16 << 10;
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What a topic is made with, and keeps. The oldest records leave first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    pub partitions: u32,
    pub retention_age: Duration,
    pub retention_records: u64,
    pub retention_bytes: u64,
    /// Somebody else has made it on Kafka: taskd never makes, trims or deletes it, and has no bounds
    /// for it.
    pub is_attached: bool,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            partitions: 1,
            retention_age: DAY,
            retention_records: 1_000_000,
            retention_bytes: 512 << 20,
            is_attached: false,
        }
    }
}

impl TopicSettings {
    /// Returns the first mistake: the name of a setting, and what it must be.
    pub fn mistake(&self) -> Option<(&'static str, String)> {
        let age = Duration::from_secs(1)..=3650 * DAY;
        if !(1..=MOST_TOPIC_PARTITIONS).contains(&self.partitions) {
            return Some((
                "partitions",
                format!("must be 1 to {MOST_TOPIC_PARTITIONS}"),
            ));
        }
        if !age.contains(&self.retention_age) {
            return Some(("retention_age", "must be 1s to 3650days".to_owned()));
        }
        if !(1..=1_000_000_000_000).contains(&self.retention_records) {
            return Some(("retention_records", "must be 1 to 1000000000000".to_owned()));
        }
        if !(1 << 10..=1 << 50).contains(&self.retention_bytes) {
            return Some((
                "retention_bytes",
                "must be 1KiB to 1PiB (1125899906842624)".to_owned(),
            ));
        }
        None
    }
}

/// The settings of a topic that a call gives. The others stay, or are the defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutTopic {
    pub partitions: Option<u32>,
    pub retention_age: Option<Duration>,
    pub retention_records: Option<u64>,
    pub retention_bytes: Option<u64>,
    pub attached: Option<bool>,
}

impl PutTopic {
    /// Whether it gives a setting that an attached topic does not have.
    pub fn has_settings(&self) -> bool {
        self.partitions.is_some()
            || self.retention_age.is_some()
            || self.retention_records.is_some()
            || self.retention_bytes.is_some()
    }

    pub fn over(&self, settings: &TopicSettings) -> TopicSettings {
        TopicSettings {
            partitions: self.partitions.unwrap_or(settings.partitions),
            retention_age: self.retention_age.unwrap_or(settings.retention_age),
            retention_records: self.retention_records.unwrap_or(settings.retention_records),
            retention_bytes: self.retention_bytes.unwrap_or(settings.retention_bytes),
            is_attached: self.attached.unwrap_or(settings.is_attached),
        }
    }
}

/// A topic, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    pub name: TopicName,
    pub settings: TopicSettings,
    pub created_unix_ms: i64,
    /// Somebody has begun to delete it.
    pub is_deleting: bool,
}

/// A topic in an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TopicView {
    pub name: String,
    pub partitions: u32,
    /// How long a record stays.
    #[serde(serialize_with = "duration")]
    #[schemars(with = "String")]
    pub retention_age: Duration,
    /// How many records stay, in all partitions together.
    pub retention_records: u64,
    /// How many bytes of records stay, in all partitions together.
    pub retention_bytes: u64,
    /// Somebody else has made it on Kafka, and its retention is not taskd's.
    pub attached: bool,
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub created_at: i64,
    /// What each partition has; only for one topic.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub offsets: Vec<PartitionOffsets>,
}

impl From<&Topic> for TopicView {
    fn from(topic: &Topic) -> Self {
        Self {
            name: topic.name.to_string(),
            partitions: topic.settings.partitions,
            retention_age: topic.settings.retention_age,
            retention_records: topic.settings.retention_records,
            retention_bytes: topic.settings.retention_bytes,
            attached: topic.settings.is_attached,
            created_at: topic.created_unix_ms,
            offsets: Vec::new(),
        }
    }
}

/// The first and the last record of a partition; neither if it never had one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PartitionOffsets {
    pub partition: u32,
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "text_or_none"
    )]
    #[schemars(with = "Option<String>")]
    pub first: Option<Offset>,
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "text_or_none"
    )]
    #[schemars(with = "Option<String>")]
    pub last: Option<Offset>,
}

fn duration<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*time))
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn text_or_none<S: Serializer>(offset: &Option<Offset>, serializer: S) -> Result<S::Ok, S::Error> {
    match offset {
        Some(offset) => serializer.collect_str(offset),
        None => serializer.serialize_none(),
    }
}

/// A record to publish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewRecord {
    pub value: Bytes,
    /// Records with the same key are in one partition, in order. Empty: none.
    pub key: Bytes,
    /// A name may have several values.
    pub attributes: Vec<(String, String)>,
    /// What tells a repeat from another record. Empty: none.
    pub id: String,
    /// The value is a text, even if it looks like JSON.
    pub is_text: bool,
}

/// The attribute of a text that would be read as JSON, for example `7`.
pub const TEXT_MARK: (&str, &str) = ("taskd-encoding", "text");

impl NewRecord {
    /// A record as a log has it.
    pub fn of_log(
        value: Bytes,
        key: Bytes,
        mut attributes: Vec<(String, String)>,
        id: String,
    ) -> Self {
        let is_mark = |(name, value): &(String, String)| (&**name, &**value) == TEXT_MARK;
        let is_text = attributes.iter().any(is_mark);
        attributes.retain(|attribute| !is_mark(attribute));
        Self {
            value,
            key,
            attributes,
            id,
            is_text,
        }
    }

    /// The attributes as a log keeps them: with a mark if the value is a text that looks like JSON.
    pub fn marked_attributes(&self) -> Vec<(String, String)> {
        let mut attributes = self.attributes.clone();
        let looks_like_json = || serde_json::from_slice::<IgnoredAny>(&self.value).is_ok();
        if self.is_text && looks_like_json() {
            let (name, value) = TEXT_MARK;
            attributes.push((name.to_owned(), value.to_owned()));
        }
        attributes
    }

    /// Returns why the record cannot be published.
    pub fn mistake(&self) -> Option<String> {
        let too_long = |what: &str, bytes: usize, most: usize| {
            (bytes > most).then(|| format!("{what} {bytes} bytes; at most {most}"))
        };
        let attributes: usize = self
            .attributes
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        if self.attributes.len() > MAX_ATTRIBUTES {
            let count = self.attributes.len();
            return Some(format!(
                "attributes have {count} values; at most {MAX_ATTRIBUTES}"
            ));
        }
        for (name, _) in &self.attributes {
            if name.is_empty() {
                return Some("an attribute has no name".to_owned());
            }
            // taskd's own headers of records on Kafka, and of the tasks that become of records.
            if name.starts_with("taskd-") {
                return Some("names of attributes must not begin with taskd-".to_owned());
            }
        }
        too_long("value has", self.value.len(), MAX_VALUE_BYTES)
            .or_else(|| too_long("key has", self.key.len(), MAX_KEY_BYTES))
            .or_else(|| too_long("id has", self.id.len(), MAX_ID_BYTES))
            .or_else(|| too_long("attributes have", attributes, MAX_ATTRIBUTES_BYTES))
    }

    /// The partition of a record with a key; `None`: any.
    pub fn partition(&self, topic: &TopicName, partitions: u32) -> Option<u32> {
        if self.key.is_empty() {
            return None;
        }
        Some(KeyHash::of(topic.as_str(), &self.key).partition(partitions))
    }
}

/// What became of a record to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum PublishStatus {
    /// The topic has it.
    Stored,
    /// It is invalid, and would be the next time.
    Rejected,
    /// It may be stored or not: publish it again.
    TryLater,
}

/// The answer for a record to publish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Published {
    pub status: PublishStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partition: Option<u32>,
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "text_or_none"
    )]
    #[schemars(with = "Option<String>")]
    pub offset: Option<Offset>,
    /// Why it is not stored.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl Published {
    pub fn stored(partition: u32, offset: Offset) -> Self {
        Self {
            status: PublishStatus::Stored,
            partition: Some(partition),
            offset: Some(offset),
            error: String::new(),
        }
    }

    pub fn failed(status: PublishStatus, error: String) -> Self {
        Self {
            status,
            partition: None,
            offset: None,
            error,
        }
    }
}

/// Where a reader of a topic begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFrom {
    /// `0`: with the first record that is there.
    First,
    /// `$`: with the next record.
    Next,
    /// After an offset of the only partition.
    After(Offset),
    /// `0:5-0,1:7-0`: after an offset in each partition; the others from the first record.
    AfterEach(Vec<(u32, Offset)>),
    /// `2030-01-02T03:04:05Z`: with the first record published at this time, in unix ms.
    At(i64),
    /// `-1h`: with the first record published in the last hour.
    Ago(Duration),
}

/// A request to read a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadTopic {
    pub from: ReadFrom,
    /// `None`: all.
    pub partition: Option<u32>,
    /// At most this many records; 0: 100.
    pub limit: u32,
    /// How long to wait for a record if there is none.
    pub wait: Duration,
}

/// A record of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicRecord {
    pub partition: u32,
    pub offset: Offset,
    pub published_unix_ms: i64,
    pub record: NewRecord,
}

/// Records of a topic, those of a partition in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicPage {
    pub records: Vec<TopicRecord>,
    /// Where this page begins, as `next`.
    pub begin: String,
    /// Where the next page begins, as [`ReadFrom`] reads it.
    pub next: String,
}

/// A topic that taskd writes, and that subscriptions may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnTopic {
    DeadLetters,
    Events,
}

/// The attribute of their records with the queue of the task.
pub const OWN_QUEUE: &str = "queue";

impl OwnTopic {
    pub const ALL: [Self; 2] = [Self::DeadLetters, Self::Events];

    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|own| own.as_str() == name)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::DeadLetters => "dead-letters",
            Self::Events => "events",
        }
    }
}

/// The name of a topic of users. Those of taskd are taken.
pub fn topic_of_users(name: &str) -> Result<TopicName, String> {
    const TAKEN: [&str; 5] = [
        "pipeline",
        "task-results",
        "expirations",
        "dead-letters",
        "events",
    ];
    let topic = TopicName::new(name).map_err(|error| error.to_string())?;
    if matches!(topic.as_str(), "." | "..") {
        return Err(format!("topic {name:?}: no topic may be called so"));
    }
    if TAKEN.contains(&topic.as_str()) {
        return Err(format!(
            "topic {name:?} is one of taskd's own; choose another name"
        ));
    }
    Ok(topic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_a_key_have_one_partition() {
        let topic = topic_of_users("t").unwrap();
        let of_key = |key: &str| {
            let key = Bytes::copy_from_slice(key.as_bytes());
            NewRecord {
                key,
                ..NewRecord::default()
            }
            .partition(&topic, 16)
        };
        assert_eq!(of_key(""), None);
        assert_eq!(of_key("a"), of_key("a"));
        let partitions: std::collections::BTreeSet<_> =
            (0..100).map(|n| of_key(&n.to_string())).collect();
        assert!(partitions.len() > 10, "{partitions:?}");
    }

    #[test]
    fn what_is_too_large_is_named_with_its_bound() {
        let said = |record: NewRecord| record.mistake().unwrap();
        let of_attributes = |attributes: Vec<(String, String)>| NewRecord {
            attributes,
            ..NewRecord::default()
        };
        let value = NewRecord {
            value: vec![0; MAX_VALUE_BYTES + 1].into(),
            ..NewRecord::default()
        };
        assert_eq!(said(value), "value has 1048577 bytes; at most 1048576");
        let attribute = || ("n".to_owned(), "v".to_owned());
        assert_eq!(
            said(of_attributes(vec![attribute(); 65])),
            "attributes have 65 values; at most 64"
        );
        let large = ("n".to_owned(), "v".repeat(MAX_ATTRIBUTES_BYTES));
        assert_eq!(
            said(of_attributes(vec![large])),
            "attributes have 16385 bytes; at most 16384"
        );
        let said = topic_of_users("events").unwrap_err();
        assert!(said.contains("one of taskd's own"), "{said}");
    }
}
