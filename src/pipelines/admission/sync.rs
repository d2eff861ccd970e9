//! Reads from SQL, for this process, what all processes must know about queues: open shards,
//! pauses, topologies, unfinished tasks, full queues.
//!
//! The cost grows with the queues that have something, not with all names that ever existed.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::{Gates, Occupancy};
use crate::{
    queue::Shards,
    runtime::{Clock, Supervisor},
    store::{self, Store, StoredShard},
};

/// The age up to which shards, names and unfinished tasks are used.
const EVERY: Duration = Duration::from_millis(500);
/// The age up to which full queues are used.
const PARKED_EVERY: Duration = Duration::from_secs(1);
/// How often to read the oldest waiting tasks.
const OLDEST_EVERY: Duration = Duration::from_secs(2);
/// How often to read all open shards and all pauses. Reading only changes may miss some: of a
/// database that was set back, or of an older taskd that does not number them.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// The reader of one process, and how far it has read.
pub struct QueueSync {
    store: Arc<dyn Store>,
    queue: Shards,
    gates: Gates,
    occupancy: Occupancy,
    clock: Clock,
    shards: Option<ShardsRead>,
    pauses: Option<PausesRead>,
    parked: Option<Instant>,
    oldest: Option<Instant>,
}

#[derive(Clone, Copy)]
struct PausesRead {
    version: u64,
    /// The number of pause changes by this process before the read.
    changes: u64,
    at: Instant,
}

#[derive(Clone, Copy)]
struct ShardsRead {
    /// The last change that was read.
    version: u64,
    /// When all open shards were read.
    whole: Instant,
}

impl QueueSync {
    /// Reads for the first time. Returns a reader that keeps `gates` and `occupancy` up to date.
    pub async fn start(
        store: Arc<dyn Store>,
        queue: Shards,
        gates: Gates,
        occupancy: Occupancy,
        clock: Clock,
    ) -> store::Result<Self> {
        let mut sync = Self {
            store,
            queue,
            gates,
            occupancy,
            clock,
            shards: Default::default(),
            pauses: Default::default(),
            parked: Default::default(),
            oldest: Default::default(),
        };
        sync.read().await?;
        Ok(sync)
    }

    /// Keeps reading until the process stops.
    pub fn keep_on(self, supervisor: &Supervisor) {
        supervisor.spawn_loop(
            "queues",
            Arc::new(Mutex::new(self)),
            |sync, cx| async move {
                cx.every(EVERY, || async { sync.lock().await.read().await })
                    .await
            },
        );
    }

    async fn read(&mut self) -> store::Result<()> {
        self.read_shards().await?;
        self.read_pauses().await?;
        self.occupancy.topologies().follow(&*self.store).await?;
        let stages = self.occupancy.topologies().stages();
        self.occupancy
            .open_trees()
            .follow(&stages, &*self.store)
            .await?;
        let unfinished = self.store.unfinished().await?.into_iter().collect();
        self.occupancy.set_names(
            unfinished,
            self.queue.shards().into_iter().map(|shard| shard.queue),
        );
        if self.is_due(self.parked, PARKED_EVERY) {
            self.gates.follow(&self.store.parked_queues().await?);
            self.parked = Some(self.clock.now());
        }
        if self.is_due(self.oldest, OLDEST_EVERY) {
            let oldest = self.store.oldest_waiting(self.clock.now_unix_ms()).await?;
            self.occupancy.set_oldest(oldest.into_iter().collect());
            self.oldest = Some(self.clock.now());
        }
        Ok(())
    }

    async fn read_pauses(&mut self) -> store::Result<()> {
        // Read the number of changes and the version first, so that what happens after them is read
        // again.
        let now = self.clock.now();
        let changes = self.queue.pause_changes();
        let version = self.store.pauses_version().await?;
        let is_read = |read: PausesRead| read.version == version && read.changes == changes;
        if self
            .pauses
            .is_some_and(|read| is_read(read) && now - read.at < WHOLE_EVERY)
        {
            return Ok(());
        }
        let paused = self.store.paused_queues().await?;
        self.queue.pause_only(
            paused.into_iter().map(|paused| paused.queue).collect(),
            changes,
        );
        self.pauses = Some(PausesRead {
            version,
            changes,
            at: now,
        });
        Ok(())
    }

    async fn read_shards(&mut self) -> store::Result<()> {
        let now = self.clock.now();
        let known = self.shards.filter(|read| now - read.whole < WHOLE_EVERY);
        let shards = self.store.shards(known.map(|read| read.version)).await?;
        for StoredShard { id, is_open, .. } in &shards {
            match is_open {
                true => self.queue.add_shard(id),
                false => self.queue.remove_shard(id),
            }
        }
        // A process that does not know all own limits may have opened them. With each whole read all
        // of them, to be safe. One without own limits costs no call.
        let open = shards.iter().filter(|shard| shard.is_open);
        self.queue
            .note_unsure_of_limits(open.map(|shard| shard.id.clone()));
        if known.is_none() {
            // This also removes a shard that was opened during the read. The next read of changes
            // adds it.
            let open: HashSet<_> = shards.iter().map(|shard| &shard.id).collect();
            self.queue
                .shards()
                .iter()
                .filter(|id| !open.contains(id))
                .for_each(|id| self.queue.remove_shard(id));
        }
        let last = shards.iter().map(|shard| shard.version).max();
        self.shards = Some(match known {
            // The version may be lower than before, if the database was set back.
            None => ShardsRead {
                version: last.unwrap_or(0),
                whole: now,
            },
            Some(read) => ShardsRead {
                version: last.unwrap_or(read.version),
                ..read
            },
        });
        Ok(())
    }

    fn is_due(&self, at: Option<Instant>, every: Duration) -> bool {
        at.is_none_or(|at| self.clock.now() - at >= every)
    }
}
