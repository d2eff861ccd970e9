//! The task that a settled report was about.

use crate::model::{Priority, QueueName};

/// A task that a report was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledTask {
    pub queue: QueueName,
    pub priority: Priority,
}
