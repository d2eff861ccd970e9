//! How many trees of topologies with a bound are open.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::Stages;
use crate::{
    model::{Topology, TopologyName},
    store::{self, Store},
};

/// The age up to which a count is used by who finds a topology full.
const FRESH: Duration = Duration::from_millis(50);

/// The open trees of each topology with a bound: as last read from SQL, plus what this process has
/// begun since. Clones share them.
///
/// Trees of other processes count up to half a second later, so a bound may be exceeded by what they
/// begin meanwhile.
#[derive(Clone, Default)]
pub struct OpenTrees {
    known: Arc<Mutex<HashMap<TopologyName, OpenCount>>>,
    /// When SQL was read last. Held during a read.
    read: Arc<tokio::sync::Mutex<Option<Instant>>>,
}

/// The open trees of a topology.
#[derive(Clone, Copy, Default)]
struct OpenCount {
    /// As SQL had them.
    read: u64,
    /// Stored since the read began, perhaps also counted by it.
    stored: u64,
    /// Reserved for trees that are being stored.
    reserved: u64,
}

impl OpenCount {
    fn all(self) -> u64 {
        self.read + self.stored + self.reserved
    }
}

impl OpenTrees {
    /// Counts the open trees of the topologies that have a bound.
    pub(super) async fn follow(&self, stages: &Stages, store: &dyn Store) -> store::Result<()> {
        let mut read = self.read.lock().await;
        self.count(stages, store, &mut read).await
    }

    /// Counts them again, unless that was done a moment ago.
    pub async fn refresh(&self, stages: &Stages, store: &dyn Store) -> store::Result<()> {
        let mut read = self.read.lock().await;
        if read.is_some_and(|at| at.elapsed() < FRESH) {
            return Ok(());
        }
        self.count(stages, store, &mut read).await
    }

    async fn count(
        &self,
        stages: &Stages,
        store: &dyn Store,
        read: &mut Option<Instant>,
    ) -> store::Result<()> {
        let mut queues = Vec::new();
        for topology in stages.bounded() {
            queues.extend(topology.start_queues().cloned());
        }
        // Trees that are stored after this are not taken off, so that each counts at least once.
        let before: HashMap<TopologyName, u64> = {
            let known = self.known.lock();
            let stored = known.iter();
            stored
                .map(|(name, count)| (name.clone(), count.stored))
                .collect()
        };
        let mut open: HashMap<TopologyName, u64> = HashMap::new();
        if !queues.is_empty() {
            for (queue, count) in store.open_trees_of(&queues).await? {
                if let Some((topology, _)) = stages.of(queue.as_str()) {
                    *open.entry(topology.name.clone()).or_default() += count;
                }
            }
        }
        let names: HashSet<&TopologyName> = stages.bounded().map(|one| &one.name).collect();
        let mut known = self.known.lock();
        known.retain(|name, count| count.reserved > 0 || names.contains(name));
        for name in names {
            let count = known.entry(name.clone()).or_default();
            count.read = open.get(name).copied().unwrap_or_default();
            let counted = before.get(name).copied().unwrap_or_default();
            count.stored = count.stored.saturating_sub(counted);
        }
        *read = Some(Instant::now());
        Ok(())
    }

    /// The open trees of a topology, as this process knows them.
    pub fn of(&self, topology: &TopologyName) -> u64 {
        let known = self.known.lock();
        known.get(topology).map_or(0, |count| count.all())
    }

    /// Reserves up to `wanted` trees of a topology within its bound.
    pub fn reserve(&self, topology: &Topology, wanted: u64) -> OpenPermit {
        let mut known = self.known.lock();
        let count = known.entry(topology.name.clone()).or_default();
        let room = u64::from(topology.max_open).saturating_sub(count.all());
        let left = wanted.min(room);
        count.reserved += left;
        OpenPermit {
            of: self.clone(),
            topology: topology.name.clone(),
            left,
        }
    }
}

/// Trees of a topology that may begin. When dropped, it returns those that did not.
pub struct OpenPermit {
    of: OpenTrees,
    topology: TopologyName,
    left: u64,
}

impl OpenPermit {
    /// How many trees may still begin.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Counts a tree that is stored.
    pub fn keep(&mut self) {
        if self.left == 0 {
            return;
        }
        self.left -= 1;
        if let Some(count) = self.of.known.lock().get_mut(&self.topology) {
            count.reserved = count.reserved.saturating_sub(1);
            count.stored += 1;
        }
    }
}

impl Drop for OpenPermit {
    fn drop(&mut self) {
        if self.left == 0 {
            return;
        }
        if let Some(count) = self.of.known.lock().get_mut(&self.topology) {
            count.reserved = count.reserved.saturating_sub(self.left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_holds_for_what_is_stored_and_being_stored() {
        let text = "name = \"t\"\nmax_open = 10\n[stage.a]\nstart = true\n";
        let topology = Topology::read(text).unwrap();
        let open = OpenTrees::default();
        let mut first = open.reserve(&topology, 7);
        let second = open.reserve(&topology, 7);
        assert_eq!((first.left(), second.left()), (7, 3));
        assert_eq!(open.reserve(&topology, 1).left(), 0);
        first.keep();
        drop(first);
        assert_eq!(open.of(&topology.name), 4, "six were not stored");
        drop(second);
        assert_eq!(open.of(&topology.name), 1);
        assert_eq!(open.reserve(&topology, 20).left(), 9);
    }
}
