//! What answers show of a topology.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{FeedAck, FeedCounts, FeedSettings, Stage, Topology};
use crate::model::{
    Priority, Rfc3339, TaskRules, TopicName, TopologyName, TreeOnDead, unix_time::rfc_3339,
};

/// A topology in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TopologyView {
    pub name: String,
    /// How often it was applied.
    pub version: u64,
    /// Who applied it last.
    pub applied_by: String,
    #[serde(serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub applied_at: i64,
    /// The file; only for one topology.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// What dead tasks mean for a tree.
    pub on_dead: TreeOnDead,
    /// The time within which a tree must end.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "some_time")]
    #[schemars(with = "Option<String>")]
    pub timeout: Option<Duration>,
    /// The queue that gets a task when a tree has ended.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub then: String,
    /// The most open trees whose roots are in start stages; 0: no bound.
    pub max_open: u32,
    /// How many are open. 0 without a bound.
    pub open: u64,
    /// The stages with the settings in force.
    pub stages: Vec<StageView>,
    pub feeds: Vec<FeedView>,
    /// Why this process does not follow it: its file is of another version of taskd.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// A stage with the settings in force: its own, or those of its queue.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct StageView {
    pub name: String,
    pub queue: String,
    /// Inserts begin here.
    pub start: bool,
    /// The fork: it gets one task for each task of that stage.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub join: String,
    /// The topic into which taskd publishes its tasks.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topic: String,
    #[serde(serialize_with = "time")]
    #[schemars(with = "String")]
    pub lease: Duration,
    pub max_attempts: u32,
    #[serde(serialize_with = "priority")]
    #[schemars(with = "String")]
    pub priority: Priority,
    /// Where its outputs go.
    pub edges: Vec<EdgeView>,
}

/// An edge to another stage.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EdgeView {
    pub port: String,
    pub to: String,
    /// The condition in JSON.
    #[serde(rename = "match", skip_serializing_if = "String::is_empty")]
    pub matching: String,
}

/// A feed in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct FeedView {
    pub name: String,
    /// `topic`, `redis_stream` or `redis_list`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The topic, or the key in Redis.
    pub reads: String,
    /// [What it reads](crate::model::FeedSource::identity), to find its counts.
    #[serde(skip)]
    pub source: String,
    /// The stage that gets its records.
    pub into: String,
    pub ack: FeedAck,
    #[serde(flatten)]
    pub counts: FeedCounts,
    /// Records that the source may forget, and has not yet.
    pub acks_pending: u64,
    /// Why it reads nothing now. Empty: it reads.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub held: String,
}

impl FeedView {
    /// The view of a feed of which only the settings are known.
    pub fn new(of: &Topology, feed: &FeedSettings) -> Self {
        let name = feed.name.as_str();
        let prefix = format!("{}.", of.name);
        Self {
            name: name.strip_prefix(&prefix).unwrap_or(name).to_owned(),
            kind: feed.source.kind().to_owned(),
            reads: feed.source.reads().to_owned(),
            source: feed.source.identity(),
            into: of.stages[feed.into].name.clone(),
            ack: feed.ack,
            counts: FeedCounts::default(),
            acks_pending: 0,
            held: String::new(),
        }
    }
}

impl TopologyView {
    /// A topology of which only the file is known.
    pub fn new(
        name: &TopologyName,
        version: u64,
        applied_by: String,
        applied_at: i64,
        text: String,
    ) -> Self {
        Self {
            name: name.to_string(),
            version,
            applied_by,
            applied_at,
            text,
            on_dead: TreeOnDead::default(),
            timeout: None,
            then: String::new(),
            max_open: 0,
            open: 0,
            stages: Vec::new(),
            feeds: Vec::new(),
            error: String::new(),
        }
    }
}

impl StageView {
    /// The view of a stage whose queue has these rules.
    pub fn new(of: &Topology, stage: &Stage, rules: &TaskRules) -> Self {
        let edges = stage.edges.iter().map(|edge| EdgeView {
            port: edge.port.clone(),
            to: of.stages[edge.to].name.clone(),
            matching: match edge.matching.names().next() {
                Some(_) => edge.matching.to_json().to_string(),
                None => String::new(),
            },
        });
        Self {
            name: stage.name.clone(),
            queue: stage.queue.as_str().to_owned(),
            start: stage.is_start,
            join: stage
                .join
                .map(|fork| of.stages[fork].name.clone())
                .unwrap_or_default(),
            topic: stage
                .topic
                .as_ref()
                .map_or("", TopicName::as_str)
                .to_owned(),
            lease: stage.lease.unwrap_or(rules.lease),
            max_attempts: stage.max_attempts.unwrap_or(rules.max_attempts),
            priority: stage.priority.unwrap_or(rules.priority),
            edges: edges.collect(),
        }
    }
}

fn time<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*time))
}

#[expect(clippy::ref_option, reason = "serde calls it so")]
fn some_time<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => self::time(time, serializer),
        None => serializer.serialize_none(),
    }
}

fn priority<S: Serializer>(priority: &Priority, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(priority.as_str())
}
