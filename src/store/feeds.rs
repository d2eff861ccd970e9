//! Feeds of topologies that are outside of taskd, and the records that they have to acknowledge.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::model::{FeedCounts, SubscriptionName, TaskId};

/// A feed, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFeed {
    pub name: SubscriptionName,
    /// The [identity](crate::model::FeedSource::identity) of what it reads.
    pub source: String,
    /// A new run begins when the source does not know taskd. No two sources of a feed have the same.
    pub run: u64,
    pub counts: FeedCounts,
    /// Records to acknowledge.
    pub acks_pending: u64,
    /// Why it reads nothing. Empty: it reads.
    pub held: String,
}

/// Stores feeds.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Feeds: Send + Sync {
    /// All feeds that have been read. One that has read several sources is there with each of them,
    /// with the present one last.
    async fn feeds(&self) -> Result<Vec<StoredFeed>>;

    /// Stores a feed as it is now, in place of what is stored of it and its source. Does nothing if a
    /// later run is stored. Returns the run that is stored then.
    async fn keep_feed(&self, feed: &StoredFeed) -> Result<u64>;

    /// References of records of a run whose trees have ended, which the source may forget, in any
    /// order. A tree that ends adds one ([`FeedRef`](crate::model::FeedRef)).
    async fn due_acks(&self, feed: &SubscriptionName, run: u64, limit: u32) -> Result<Vec<String>>;

    /// Those of these references that [`Self::due_acks`] would return without a limit.
    async fn due_among(
        &self,
        feed: &SubscriptionName,
        references: &[String],
    ) -> Result<Vec<String>>;

    /// How many such references of a run there are.
    async fn count_acks(&self, feed: &SubscriptionName, run: u64) -> Result<u64>;

    /// Removes references that the source has forgotten.
    async fn remove_acks(&self, feed: &SubscriptionName, references: &[String]) -> Result<()>;

    /// Those of these trees that are open, and will add a reference for this feed at their end.
    async fn open_of_feed(&self, feed: &SubscriptionName, trees: &[TaskId]) -> Result<Vec<TaskId>>;

    /// Removes feeds with sources other than these, if the last call that named them, or the last change
    /// of them, is older than `age` by the database's clock; and references that are older and of no
    /// run that is stored.
    async fn forget_feeds(&self, known: &[(SubscriptionName, String)], age: Duration)
    -> Result<()>;
}
