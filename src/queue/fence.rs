//! The mark that tasks on the shortcut are checked against: [ADR
//! 48](../../docs/adr/0048-new-tasks-skip-the-bus.md).

/// A mark of a shard. It moves when a task comes that may have come before, when a task ends that
/// never came, and when the shard is opened again. A number after it counts how often the shard has
/// forgotten tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fence(pub(super) String);

impl Fence {
    /// The mark without the number, which says nothing about tasks that were never in the queue.
    pub(super) fn of_new_tasks(&self) -> &str {
        self.0.rsplit_once('/').map_or("", |(fence, _)| fence)
    }
}
