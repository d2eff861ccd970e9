//! The paused queues, as this process knows them: no worker gets anything of them.

use std::collections::BTreeSet;

use parking_lot::RwLock;

use crate::model::QueueName;

/// The names of the paused queues.
#[derive(Default)]
pub(super) struct Pauses(pub(super) RwLock<BTreeSet<QueueName>>);
