//! Topics of users.

use async_trait::async_trait;

use super::Result;
use crate::model::{Act, Topic, TopicName};

/// The outcome of storing a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptTopic {
    /// It is as asked now.
    Yes,
    /// It has this many partitions, which is more than asked.
    Fewer(u32),
    /// There are [`MOST_TOPICS`](crate::model::MOST_TOPICS) already.
    NoRoom,
    /// Somebody has begun to delete it.
    Deleting,
    /// It is attached, and should not be, or the other way round.
    Other,
}

/// Stores which topics exist.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Topics: Send + Sync {
    /// All topics, by name.
    async fn topics(&self) -> Result<Vec<Topic>>;

    /// Adds a topic, or changes its settings. Records the act.
    async fn keep_topic(&self, topic: &Topic, act: &Act) -> Result<KeptTopic>;

    /// Marks a topic as being deleted, and records the act. Returns whether there is one.
    async fn begin_delete_topic(&self, name: &TopicName, act: &Act) -> Result<bool>;

    /// Removes a topic that is being deleted, unless another one was made with its name since.
    async fn end_delete_topic(&self, topic: &Topic) -> Result<()>;
}
