//! Dead letters, and what becomes of them.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::model::{DeadLetter, LetterId, LetterKind, LetterPage, LetterPages, StoredLetter};

/// The part of the store that keeps dead letters.
#[async_trait]
pub trait Letters: Send + Sync {
    /// Keeps letters about records, and about tasks that are not stored. One that is kept already
    /// stays as it is.
    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()>;

    /// A page of letters without payloads and values, the newest first. It looks at `limit`
    /// letters, and leaves out those with another reason.
    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage>;

    /// A letter with all that it has.
    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>>;

    /// The letters among `ids`, in any order.
    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>>;

    /// Removes letters, and dead tasks with them: their keys stay. Answers how many letters.
    async fn purge(&self, ids: &[LetterId]) -> Result<u64>;

    /// Removes at most `limit` letters that are at least `age` old, except those of dead tasks.
    /// Answers how many.
    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64>;
}
