//! The queues of workflows.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use crate::{
    model::QueueName,
    store::StoredDefinition,
    workflow::{expression::with_stack, program::Program},
};

/// Of how many definitions the queues are known at most.
const KNOWN: usize = 1_000;

/// The queues of a definition. `None`: this version cannot read it.
type Queues = Option<Arc<[QueueName]>>;

/// The queues of definitions, by their hashes: a definition never changes, and reading it takes a
/// while. Clones share them.
#[derive(Clone, Default)]
pub struct WorkflowQueues(Arc<Mutex<HashMap<String, Queues>>>);

impl WorkflowQueues {
    /// The queues of the definition with this hash, if somebody has asked for them.
    pub(super) fn known(&self, hash: &str) -> Option<Queues> {
        self.0.lock().get(hash).cloned()
    }

    pub(super) async fn of(&self, stored: &StoredDefinition) -> Queues {
        if let Some(known) = self.known(&stored.hash) {
            return known;
        }
        let StoredDefinition {
            text, documents, ..
        } = stored.clone();
        let reading = tokio::task::spawn_blocking(move || {
            with_stack(|| Program::of_stored(&text, &documents))
        });
        // A thread could not be started: the next call tries again.
        let Ok(Ok(program)) = reading.await else {
            return None;
        };
        let queues = program
            .ok()
            .map(|program| program.queues.into_iter().collect());
        let queues: Queues = queues;
        let mut known = self.0.lock();
        if known.len() >= KNOWN {
            known.clear();
        }
        known.insert(stored.hash.clone(), queues.clone());
        queues
    }
}
