//! The Redis that holds the tasks of a database.

use async_trait::async_trait;

use super::Result;

/// The holder, as the processes of its Redis describe it.
#[async_trait]
pub trait Holders {
    /// Answers what [`Self::replace_holder`] wrote last; empty before.
    async fn holder(&self) -> Result<String>;

    /// Writes another holder, of at most 255 bytes, in the place of `seen`. False if it is not
    /// `seen` any more.
    async fn replace_holder(&self, seen: &str, holder: &str) -> Result<bool>;
}
