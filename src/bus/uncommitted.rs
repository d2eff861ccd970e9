//! Processed messages that wait for their commit.

use bytes::Bytes;
use tokio::time::Instant;

use super::{Message, Result, Subscription};
use crate::runtime::tick_after;

/// Messages whose effects are done, without their values. They wait for the next
/// [tick](crate::runtime::tick), so that those which come one by one share a commit.
///
/// Until then they come again after a crash, as without this: the effects may be repeated.
#[derive(Default)]
pub struct Uncommitted {
    messages: Vec<Message>,
    due: Option<Instant>,
}

impl Uncommitted {
    pub fn add(&mut self, messages: Vec<Message>) {
        self.due.get_or_insert_with(|| tick_after(Instant::now()));
        self.messages
            .extend(messages.into_iter().map(|message| Message {
                value: Bytes::new(),
                ..message
            }));
    }

    /// Leaves out the other messages.
    pub fn retain(&mut self, keep: impl FnMut(&Message) -> bool) {
        self.messages.retain(keep);
    }

    /// Waits for the tick of the first message; for ever if there is none.
    pub async fn wait_until_due(&self) {
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// Commits if the tick is over, or if there are `most` messages.
    pub async fn commit_if_due(
        &mut self,
        subscription: &mut dyn Subscription,
        most: usize,
    ) -> Result<()> {
        if self.messages.len() < most && self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        self.commit(subscription).await
    }

    pub async fn commit(&mut self, subscription: &mut dyn Subscription) -> Result<()> {
        self.due = None;
        subscription
            .commit(&std::mem::take(&mut self.messages))
            .await
    }
}
