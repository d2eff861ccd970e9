//! The topologies that a process knows.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;
use tokio::sync::Mutex;

use crate::{
    model::{QueueName, Topology},
    store::{self, Store, StoredTopology},
};

/// How often to read all of them even if their version is the same: a database that was set back may
/// show an old version again.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// The topologies, as SQL had them half a second ago. Clones share them.
#[derive(Clone, Default)]
pub struct KnownTopologies {
    known: Arc<RwLock<Arc<Stages>>>,
    /// When SQL was read last, and the version then. Held during a read.
    read: Arc<Mutex<Option<(u64, Instant)>>>,
}

/// The stages of all topologies, by their queues.
#[derive(Default)]
pub struct Stages {
    by_queue: HashMap<QueueName, (Arc<Topology>, usize)>,
    all: Vec<Arc<Topology>>,
}

impl Stages {
    pub fn is_empty(&self) -> bool {
        self.by_queue.is_empty()
    }

    /// The topology that has this queue as a stage, and the place of the stage.
    pub fn of(&self, queue: &str) -> Option<(&Topology, usize)> {
        let (topology, stage) = self.by_queue.get(queue)?;
        Some((topology, *stage))
    }

    pub fn all(&self) -> &[Arc<Topology>] {
        &self.all
    }

    /// The topologies with a bound on their open trees.
    pub fn bounded(&self) -> impl Iterator<Item = &Arc<Topology>> {
        self.all.iter().filter(|topology| topology.max_open > 0)
    }
}

impl KnownTopologies {
    pub fn stages(&self) -> Arc<Stages> {
        Arc::clone(&self.known.read())
    }

    /// Reads them again if they have changed.
    pub async fn follow(&self, store: &dyn Store) -> store::Result<()> {
        let mut read = self.read.lock().await;
        // The version first, so that a change after it is noticed the next time.
        let version = store.topologies_version().await?;
        let is_read = |(known, at): (u64, Instant)| known == version && at.elapsed() < WHOLE_EVERY;
        if read.is_some_and(is_read) {
            return Ok(());
        }
        // Most databases have none.
        let stored = match version {
            0 => Vec::new(),
            _ => store.topologies().await?,
        };
        *self.known.write() = Arc::new(stages_of(&stored));
        *read = Some((version, Instant::now()));
        Ok(())
    }
}

fn stages_of(stored: &[StoredTopology]) -> Stages {
    let mut by_queue = HashMap::new();
    let mut all = Vec::new();
    for StoredTopology { name, text, .. } in stored {
        match Topology::read(text) {
            Ok(topology) => {
                let topology = Arc::new(topology);
                for (place, stage) in topology.stages.iter().enumerate() {
                    by_queue.insert(stage.queue.clone(), (Arc::clone(&topology), place));
                }
                all.push(topology);
            }
            Err(mistakes) => {
                let first = mistakes
                    .first()
                    .map(ToString::to_string)
                    .unwrap_or_default();
                tracing::warn!("topology {name} was applied by another version of taskd: {first}");
            }
        }
    }
    Stages { by_queue, all }
}
