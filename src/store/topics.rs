//! Topics of users.

use async_trait::async_trait;

use super::Result;
use crate::model::{Act, Topic};

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
    /// Somebody else has made or changed it meanwhile.
    Changed,
}

/// Stores which topics exist.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Topics: Send + Sync {
    /// All topics, by name.
    async fn topics(&self) -> Result<Vec<Topic>>;

    /// Adds a topic, or changes the settings of the one that the caller has read, `known`. Records
    /// the act.
    async fn keep_topic(
        &self,
        topic: &Topic,
        known: Option<&Topic>,
        act: &Act,
    ) -> Result<KeptTopic>;

    /// Marks a topic as being deleted, and records the act. Returns whether it is there: another one
    /// with its name is not meant.
    async fn begin_delete_topic(&self, topic: &Topic, act: &Act) -> Result<bool>;

    /// Removes a topic that is being deleted, unless another one was made with its name since.
    async fn end_delete_topic(&self, topic: &Topic) -> Result<()>;
}
