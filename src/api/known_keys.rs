//! The keys of tasks that watchers of this process were told of last.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::model::TaskId;

/// Half of the keys that a process remembers for watchers, and half of their bytes.
const MOST_KEYS: usize = 10_000;
const MOST_KEY_BYTES: usize = 2 << 20;

/// Keys of tasks that watchers of this process were told of last: the events of a task come one
/// after the other, and to all watchers of its queue.
#[derive(Clone, Default)]
pub struct KnownKeys(Arc<Mutex<Keys>>);

#[derive(Default)]
struct Keys {
    latest: HashMap<TaskId, Bytes>,
    /// The bytes of the keys in `latest`.
    bytes: usize,
    before: HashMap<TaskId, Bytes>,
}

impl KnownKeys {
    pub(super) fn get(&self, ids: &[TaskId]) -> HashMap<TaskId, Bytes> {
        let keys = self.0.lock();
        let known = ids.iter().filter_map(|id| {
            let key = keys.latest.get(id).or_else(|| keys.before.get(id))?;
            Some((*id, key.clone()))
        });
        known.collect()
    }

    pub(super) fn add(&self, id: TaskId, key: &Bytes) {
        let mut keys = self.0.lock();
        if keys.latest.len() >= MOST_KEYS || keys.bytes >= MOST_KEY_BYTES {
            keys.before = std::mem::take(&mut keys.latest);
            keys.bytes = 0;
        }
        keys.bytes += key.len();
        // A slice would keep all that was read with it.
        keys.latest.insert(id, Bytes::copy_from_slice(key));
    }
}
