//! Processed messages that are waiting to be committed.

use bytes::Bytes;
use tokio::time::Instant;

use super::{Message, Reader, Result};
use crate::runtime::tick_after;

/// Processed messages, without their values. They wait for the next [tick](crate::runtime::tick),
/// so that messages that arrive one by one share a commit.
///
/// If the process crashes before the commit, they are delivered again. That is safe, because their
/// effects may be repeated.
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

    /// Drops the messages for which `keep` returns false.
    pub fn retain(&mut self, keep: impl FnMut(&Message) -> bool) {
        self.messages.retain(keep);
    }

    /// Waits for the tick after the first message, or forever if there are no messages.
    pub async fn wait_until_due(&self) {
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// Commits if the tick has passed, or if there are at least `most` messages.
    pub async fn commit_if_due(&mut self, reader: &mut dyn Reader, most: usize) -> Result<()> {
        if self.messages.len() < most && self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        self.commit(reader).await
    }

    pub async fn commit(&mut self, reader: &mut dyn Reader) -> Result<()> {
        self.due = None;
        reader.commit(&std::mem::take(&mut self.messages)).await
    }
}
