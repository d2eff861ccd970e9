//! The mark that tasks on the shortcut pass: [ADR
//! 48](../../docs/adr/0048-new-tasks-skip-the-bus.md).

/// A mark of a shard that moves when a task comes that may have come before, when a task ends that
/// never came, and when the shard begins anew; and the number of times that tasks of it were
/// forgotten.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fence(pub(super) String);

impl Fence {
    /// Without the number, which says nothing of tasks that were never in the queue.
    pub(super) fn of_new_tasks(&self) -> &str {
        self.0.rsplit_once('/').map_or("", |(fence, _)| fence)
    }
}
