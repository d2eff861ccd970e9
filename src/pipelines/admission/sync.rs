//! Reads from SQL, for this process, what all processes must know about queues: open shards,
//! pauses, own limits, unfinished tasks, full queues.
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
    model::{ChangedLimits, ShardId},
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
/// The changes of own limits that are read at once.
const LIMITS_AT_ONCE: u32 = 1000;

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
    /// Whether a queue has limit keys.
    has_limits: bool,
    /// Own limits that some open shard may not know yet, and the version before them.
    untold: Vec<ChangedLimits>,
    told: u64,
    /// Shards that were opened, perhaps by a process that did not know all own limits.
    opened: HashSet<ShardId>,
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
        has_limits: bool,
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
            has_limits,
            untold: Vec::new(),
            told: 0,
            opened: HashSet::new(),
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
        if self.has_limits {
            self.read_limits().await?;
        }
        self.read_shards().await?;
        self.read_pauses().await?;
        if self.has_limits {
            self.tell_limits().await;
        }
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

    /// Reads the own limits that have changed.
    async fn read_limits(&mut self) -> store::Result<()> {
        // All changes up to this version are committed.
        let version = self.store.limits_version().await?;
        let mut known = self.queue.limits_version();
        while known < version {
            let changes = self.store.changed_limits(known, LIMITS_AT_ONCE).await?;
            let is_last = changes.len() < LIMITS_AT_ONCE as usize;
            let last = changes.last().map_or(0, |change| change.version);
            known = if is_last { last.max(version) } else { last };
            self.queue.learn_limits(&changes, known);
            self.untold.extend(changes);
        }
        Ok(())
    }

    /// Tells the shards in Redis the own limits that they may not know. What fails is told again in
    /// the next round.
    async fn tell_limits(&mut self) {
        let version = self.queue.limits_version();
        let mut failure = None;
        let opened: Vec<ShardId> = self.opened.drain().collect();
        for (shard, error) in self.queue.push_all_limits(&opened).await {
            self.opened.insert(shard);
            failure = Some(error);
        }
        let failed = self
            .queue
            .push_limits(&self.untold, self.told, version)
            .await;
        for (shard, error) in failed {
            // One shard that does not answer keeps no other from its limits.
            self.opened.insert(shard);
            failure = Some(error);
        }
        self.untold.clear();
        self.told = version;
        if let Some(error) = failure {
            tracing::debug!("cannot tell shards their own limits, trying again: {error}");
        }
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
        // With each whole read all of them, because Redis may have lost its last second, and with it
        // limits that a shard was told. One without own limits costs no call.
        if self.has_limits {
            let open = shards.iter().filter(|shard| shard.is_open);
            self.opened.extend(open.map(|shard| shard.id.clone()));
        }
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
