//! The one reader of what all processes know about queues: which shards are open, what they have, which are full. Its
//! cost goes with the queues that have something, not with the names that ever were.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::Outbox;
use crate::{
    queue::Shards,
    runtime::Supervisor,
    store::{self, StoredShard},
};

/// How old what a process knows is at most, about: names, shards, unfinished tasks.
const EVERY: Duration = Duration::from_millis(500);
/// The same for full queues.
const PARKED_EVERY: Duration = Duration::from_secs(1);
/// The same for the age of what waits.
const OLDEST_EVERY: Duration = Duration::from_secs(2);
/// All open shards are read anew, in case that changes were missed: of a database that was set back, or by a taskd that
/// does not number them.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// The reader of one process, and how far it has read.
pub struct QueueSync {
    outbox: Outbox,
    queue: Shards,
    /// The last change of a shard that was read, and when all were.
    shards: Option<(u64, Instant)>,
    parked: Option<Instant>,
    oldest: Option<Instant>,
}

impl QueueSync {
    /// Reads for the first time.
    pub async fn start(outbox: Outbox, queue: Shards) -> store::Result<Self> {
        let mut sync = Self { outbox, queue, shards: None, parked: None, oldest: None };
        sync.read().await?;
        Ok(sync)
    }

    /// Goes on reading until the stop.
    pub fn keep_on(self, supervisor: &Supervisor) {
        let (beat, stop) = (Arc::new(supervisor.progress().register("queues")), supervisor.stop_token());
        let sync = Arc::new(tokio::sync::Mutex::new(self));
        supervisor.spawn("queues", move || {
            let (sync, beat, stop) = (Arc::clone(&sync), Arc::clone(&beat), stop.clone());
            async move {
                let mut sync = sync.lock().await;
                while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
                    sync.read().await?;
                    beat.beat();
                }
                Ok(())
            }
        });
    }

    async fn read(&mut self) -> store::Result<()> {
        self.read_shards().await?;
        let Outbox { store, gates, clock, .. } = &self.outbox;
        let unfinished = store.unfinished().await?.into_iter().collect();
        gates.set_names(unfinished, self.queue.shards().into_iter().map(|shard| shard.queue));
        if is_due(self.parked, PARKED_EVERY) {
            gates.follow(&store.parked_queues().await?);
            self.parked = Some(Instant::now());
        }
        if is_due(self.oldest, OLDEST_EVERY) {
            gates.set_oldest(store.oldest_waiting(clock.now_unix_ms()).await?.into_iter().collect());
            self.oldest = Some(Instant::now());
        }
        Ok(())
    }

    async fn read_shards(&mut self) -> store::Result<()> {
        let known = self.shards.filter(|(_, at)| at.elapsed() < WHOLE_EVERY);
        let shards = self.outbox.store.shards(known.map(|(version, _)| version)).await?;
        for StoredShard { id, is_open, .. } in &shards {
            match is_open {
                true => self.queue.add_shard(id),
                false => self.queue.remove_shard(id),
            }
        }
        if known.is_none() {
            // One that was opened since is back with the next change.
            let open: HashSet<_> = shards.iter().map(|shard| &shard.id).collect();
            self.queue.shards().iter().filter(|id| !open.contains(id)).for_each(|id| self.queue.remove_shard(id));
        }
        let last = shards.iter().map(|shard| shard.version).max();
        self.shards = match known {
            // Perhaps lower than before, if the database was set back.
            None => Some((last.unwrap_or(0), Instant::now())),
            Some((version, at)) => Some((last.unwrap_or(version), at)),
        };
        Ok(())
    }
}

fn is_due(at: Option<Instant>, every: Duration) -> bool {
    at.is_none_or(|at| at.elapsed() >= every)
}
