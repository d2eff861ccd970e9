//! Sequences, as readers and the check see them. What inserts and ends of tasks do to them is a part
//! of those transactions.

use async_trait::async_trait;

use super::Result;
use crate::model::{QueueName, SequenceHash, TaskId};

/// The most tasks that [`Sequences::sequence_place`] counts.
pub const BEFORE_COUNTED: u64 = 10_000;

/// Where an unfinished task stands in its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencePlace {
    pub name: String,
    /// The task that goes first, perhaps this one.
    pub head: TaskId,
    /// The head is dead and holds up the others.
    pub is_held: bool,
    /// How many tasks come before it; [`BEFORE_COUNTED`] or more count as that.
    pub before: u64,
}

/// A sequence that would stand still, or whose row says something wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenSequence {
    pub hash: SequenceHash,
    pub queue: QueueName,
    /// A task of it.
    pub task: TaskId,
    pub says: &'static str,
}

/// A page of sequences that were checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequencePage {
    pub broken: Vec<BrokenSequence>,
    /// Where the next page begins, or `None` if this is the last one.
    pub next: Option<SequenceCursor>,
}

/// A place in the check of all sequences: first their rows are checked, then the tasks that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceCursor {
    After(SequenceHash),
    AfterTask(TaskId),
}

/// What is known of sequences.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Sequences: Send + Sync {
    /// The place of a task in its sequence. `None` if it is in none, or if the sequence does not
    /// wait for it.
    async fn sequence_place(&self, id: TaskId) -> Result<Option<SequencePlace>>;

    /// How many unfinished tasks of each queue wait behind others of their sequences. Leaves out
    /// queues without any.
    async fn waiting_in_sequences(&self) -> Result<Vec<(QueueName, u64)>>;

    /// Checks a page of all sequences. What changes meanwhile may be found by mistake:
    /// [`Self::mend_sequence`] looks again.
    async fn broken_sequences(&self, after: Option<SequenceCursor>) -> Result<SequencePage>;

    /// Gives a sequence the head that it must have, and the right number of waiting tasks. Returns
    /// whether anything was wrong.
    async fn mend_sequence(&self, hash: SequenceHash, queue: &QueueName) -> Result<bool>;
}
