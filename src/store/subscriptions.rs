//! Subscriptions and their positions.

use async_trait::async_trait;

use super::{Result, StoredTopology};
use crate::model::{
    Act, Position, PositionKey, PositionMove, ReadUpTo, Subscription, SubscriptionName,
};

/// The outcome of storing a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptSubscription {
    /// It is as asked now.
    Yes,
    /// It reads this topic, or these, which never change.
    OfTopic(String),
    /// There are [`MOST_SUBSCRIPTIONS`](crate::model::MOST_SUBSCRIPTIONS) already.
    NoRoom,
    /// There is none to change: somebody has deleted it.
    Gone,
    /// Somebody else has made or changed it meanwhile.
    Changed,
    /// It belongs to a feed whose topology was changed or deleted meanwhile.
    OtherFile,
}

/// The outcome of sending a subscription to another place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sought {
    To {
        /// The replay number of its next tasks.
        replay: u64,
        /// Those of its positions before.
        before: Vec<u64>,
    },
    /// There is no such subscription.
    Unknown,
}

/// Stores subscriptions, and how far they have read.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Subscriptions: Send + Sync {
    /// A number that each change of subscriptions and of topics raises.
    async fn feeds_version(&self) -> Result<u64>;

    /// All subscriptions, by name.
    async fn subscriptions(&self) -> Result<Vec<Subscription>>;

    /// Adds a subscription with its first positions, or, with `None` in place of positions, changes
    /// the queue, condition and sequence of the one that has this version. Records the act. That of a
    /// feed is only kept while this is the file of its topology.
    async fn keep_subscription(
        &self,
        subscription: &Subscription,
        positions: Option<&[Position]>,
        feed_of: Option<&StoredTopology>,
        act: &Act,
    ) -> Result<KeptSubscription>;

    /// Removes a subscription with its positions, and records the act. Returns whether there was
    /// one.
    async fn delete_subscription(&self, name: &SubscriptionName, act: &Act) -> Result<bool>;

    /// The positions of one subscription, or of all.
    async fn positions(&self, of: Option<&SubscriptionName>) -> Result<Vec<Position>>;

    /// Adds positions that are missing. Those that exist stay, and none is added to a subscription
    /// that was deleted. Many positions are several transactions.
    async fn add_positions(&self, positions: &[Position]) -> Result<()>;

    /// Moves a position and adds to its counts, if it is still at `from`. Returns whether it was.
    async fn move_position(&self, to: &PositionMove) -> Result<bool>;

    /// Sends a subscription to these places, and records the act. Raises the replay number of all
    /// its positions, so that records become new tasks.
    async fn seek(
        &self,
        name: &SubscriptionName,
        to: &[(PositionKey, ReadUpTo)],
        act: &Act,
    ) -> Result<Sought>;
}
