//! Events that SQL keeps until topic `events` has them.

use async_trait::async_trait;
use bytes::Bytes;

use super::Result;
use crate::config::EventQueues;

/// The part of the store that keeps events.
///
/// In queues that [`Self::keep_events_of`] names, the transaction that stores a task, ends it or
/// sends it again keeps an event of that. So each such change has one event, and a call that
/// changes nothing has none.
#[async_trait]
pub trait Events: Send + Sync {
    /// Keeps events of these queues from now on, in transactions of this process. At first of none.
    fn keep_events_of(&self, queues: EventQueues);

    /// The first kept events, in the order of their numbers, at most `limit` rows of them.
    ///
    /// A later change of a task has a later number than an earlier one, and is not here without it.
    /// Of different tasks an earlier number may come later.
    async fn kept_events(&self, limit: u32) -> Result<Vec<KeptEvents>>;

    /// Removes those with these numbers.
    async fn remove_events(&self, numbers: &[i64]) -> Result<()>;
}

/// Events of a transaction, or of a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptEvents {
    pub number: i64,
    /// When the first of them happened.
    pub at_unix_ms: i64,
    /// As `wire` reads them.
    pub events: Bytes,
}
