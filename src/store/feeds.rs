//! Feeds of topologies that are outside of taskd, and the records that they have to acknowledge.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::model::{FeedCounts, SubscriptionName};

/// A feed, as SQL has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFeed {
    pub name: SubscriptionName,
    /// Its source had lost its data before each run.
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
    /// All feeds that have been read.
    async fn feeds(&self) -> Result<Vec<StoredFeed>>;

    /// Stores a feed as it is now, in place of what is stored. Does nothing if a later run is stored.
    async fn keep_feed(&self, feed: &StoredFeed) -> Result<()>;

    /// References of records whose trees have ended, which the source may forget, in any order.
    /// A tree that ends adds one ([`FeedRef`](crate::model::FeedRef)).
    async fn due_acks(&self, feed: &SubscriptionName, limit: u32) -> Result<Vec<String>>;

    /// Adds references of records whose trees have ended, and which the source has handed out again.
    async fn add_acks(&self, feed: &SubscriptionName, references: &[String]) -> Result<()>;

    /// How many such references there are.
    async fn count_acks(&self, feed: &SubscriptionName) -> Result<u64>;

    /// Removes references that the source has forgotten.
    async fn remove_acks(&self, feed: &SubscriptionName, references: &[String]) -> Result<()>;

    /// Removes feeds other than these, and what they had to acknowledge, if that is older than `age`
    /// by the database's clock.
    async fn forget_feeds(&self, known: &[SubscriptionName], age: Duration) -> Result<()>;
}
