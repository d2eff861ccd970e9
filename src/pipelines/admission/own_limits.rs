//! Reads own limits of limit keys from SQL, and tells them to the shards in Redis.
//!
//! Every process does so twice a second, and at once after a change that it made, so that none
//! depends on the process that an operator called. Nothing else is read here: a slow read of
//! something else would keep a change waiting.

use std::{sync::Arc, time::Duration};

use tokio::sync::Mutex;

use crate::{
    model::ChangedLimits,
    queue::Shards,
    runtime::{Loop, Supervisor},
    store::{self, Store},
};

const EVERY: Duration = Duration::from_millis(500);
/// The least pause after a failure.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// The changes that are read at once.
const AT_ONCE: u32 = 1000;

/// The reader of one process, and how far it has read.
pub struct LimitSync {
    store: Arc<dyn Store>,
    queue: Shards,
    /// Changes that some open shard may not know yet, and the version before them.
    untold: Vec<ChangedLimits>,
    told: u64,
}

impl LimitSync {
    /// Reads all own limits and tells them to the open shards, which `queue` must know.
    pub async fn start(store: Arc<dyn Store>, queue: Shards) -> store::Result<Self> {
        let mut sync = Self {
            store,
            queue,
            untold: Vec::new(),
            told: 0,
        };
        sync.queue.note_unsure_of_limits(sync.queue.shards());
        sync.follow().await?;
        Ok(sync)
    }

    /// Keeps reading until the process stops.
    pub fn keep_on(self, supervisor: &Supervisor) {
        let of = Arc::new(Mutex::new(self));
        supervisor.spawn_loop("limits/own", of, |sync, cx| async move {
            sync.lock().await.keep_following(&cx).await;
        });
    }

    async fn keep_following(&mut self, cx: &Loop) {
        while !cx.stop.is_cancelled() {
            let queue = self.queue.clone();
            tokio::select! {
                _ = cx.pause(EVERY) => {}
                () = queue.limits_asked() => {}
            }
            // No longer pause, however often it fails: a change counts within a second of when the
            // database is back. The loops beside this one say what is wrong.
            if let Err(error) = self.follow().await {
                tracing::debug!("cannot read own limits of limit keys, trying again: {error}");
                cx.pause(AGAIN_AFTER).await;
            }
            cx.beat();
        }
    }

    async fn follow(&mut self) -> store::Result<()> {
        self.read().await?;
        self.tell().await;
        self.follow_back().await
    }

    /// Reads what has changed.
    async fn read(&mut self) -> store::Result<()> {
        // All changes up to this version are committed.
        let version = self.store.limits_version().await?;
        let mut known = self.queue.limits_version();
        if known > version {
            self.read_anew();
            known = 0;
        }
        while known < version {
            let changes = self.store.changed_limits(known, AT_ONCE).await?;
            let is_last = changes.len() < AT_ONCE as usize;
            let last = changes.last().map_or(0, |change| change.version);
            known = if is_last { last.max(version) } else { last };
            self.queue.learn_limits(&changes, known);
            self.untold.extend(changes);
        }
        Ok(())
    }

    /// Begins anew, because SQL was set back: it may have other limits under the same versions.
    fn read_anew(&mut self) {
        tracing::warn!("own limits of limit keys were set back in SQL; the queue follows");
        self.queue.forget_limits();
        self.untold.clear();
        self.told = 0;
        self.queue.note_unsure_of_limits(self.queue.shards());
    }

    /// Tells the shards what they may not know.
    async fn tell(&mut self) {
        let version = self.queue.limits_version();
        let failure = self
            .queue
            .push_limits(&self.untold, self.told, version)
            .await;
        self.untold.clear();
        self.told = version;
        if let Some(error) = failure {
            tracing::debug!("cannot tell shards their own limits, trying again: {error}");
        }
    }

    /// Lets shards that know later own limits than SQL forget what SQL does not have.
    async fn follow_back(&mut self) -> store::Result<()> {
        let ahead = self.queue.shards_ahead();
        if ahead.is_empty() {
            return Ok(());
        }
        // No shard learns a version before SQL has it.
        let version = self.store.limits_version().await?;
        let known = self.queue.limits_version();
        for (shard, of_shard) in ahead {
            if of_shard <= version {
                continue;
            }
            tracing::warn!(
                %shard,
                "SQL was set back to an earlier version of own limits; the shard follows"
            );
            // Limits that this process has not read yet stay away until it has.
            if known >= version {
                let followed = self.queue.keep_only_known_limits(&shard, of_shard).await;
                if let Err(error) = followed {
                    tracing::debug!("cannot let {shard} follow SQL, trying again: {error}");
                }
            }
            self.queue.note_unsure_of_limits([shard]);
        }
        Ok(())
    }
}
