//! The states of executions that were stepped lately, so that their logs are not read again.

use std::collections::{BTreeMap, HashMap};

use super::job::Live;
use crate::model::ExecutionId;

/// How many states are kept at most, and about how many bytes of them.
const MOST: usize = 1_000;
const MOST_BYTES: usize = 256 << 20;

/// The states that are kept. The one that was used least lately goes first.
#[derive(Default)]
pub(super) struct Hot {
    states: HashMap<ExecutionId, Kept>,
    /// The executions in the order of their last use.
    by_use: BTreeMap<u64, ExecutionId>,
    uses: u64,
    bytes: usize,
}

struct Kept {
    live: Live,
    used: u64,
    bytes: usize,
}

impl Hot {
    pub(super) fn take(&mut self, id: ExecutionId) -> Option<Live> {
        let Kept { live, used, bytes } = self.states.remove(&id)?;
        self.by_use.remove(&used);
        self.bytes -= bytes;
        Some(live)
    }

    /// Keeps a state. There must be none of this execution.
    pub(super) fn put(&mut self, id: ExecutionId, live: Live) {
        let bytes = live.state.bytes();
        self.uses += 1;
        let used = self.uses;
        self.by_use.insert(used, id);
        self.states.insert(id, Kept { live, used, bytes });
        self.bytes += bytes;
        while (self.states.len() > MOST || self.bytes > MOST_BYTES)
            && let Some((_, oldest)) = self.by_use.first_key_value()
        {
            let oldest = *oldest;
            self.take(oldest);
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
