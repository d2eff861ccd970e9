//! Published tasks of SQL compared with Redis: for fsck, and for the watchdog's reconciler.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Instant,
};

use super::error::Error;
use crate::{
    bus::{Bus, Topic},
    model::{Offset, ShardId, TaskId},
    queue::{self, Failing, Shards},
    store::{Outbox, PublishedTask, Stretch, Walked},
};

/// The most tasks of one shard in one call.
const AT_ONCE: usize = 1000;

/// The servers that are compared. Cheap to clone.
#[derive(Clone)]
pub struct Published {
    store: Arc<dyn Outbox>,
    queue: Shards,
    bus: Arc<dyn Bus>,
}

type WithoutRecord = (Option<(String, Offset)>, Vec<usize>);

/// A page of published tasks.
#[derive(Debug)]
pub struct PublishedPage {
    /// How many were on the bus.
    pub tasks: u64,
    /// The tasks of which Redis has no record, and will get none.
    pub missing: Vec<(ShardId, TaskId)>,
    pub next: Option<Walked>,
}

/// The shards that fail during a comparison, and whose tasks it leaves out.
pub enum Failed<'a> {
    /// Those of a loop, which tries them again later.
    OfLoop(&'a mut Failing<Error>),
    /// Those of one check that Redis cannot serve, with the reasons. Any other error ends the
    /// check.
    OfCheck(&'a mut BTreeMap<ShardId, String>),
}

impl Failed<'_> {
    fn leaves_out(&self, shard: &ShardId) -> bool {
        match self {
            Self::OfLoop(failing) => failing.leaves_out(shard),
            Self::OfCheck(unchecked) => unchecked.contains_key(shard),
        }
    }

    /// Records the outcome of a shard's turn that began at `began`. Returns `None` if the shard has
    /// failed.
    pub fn note<T>(
        &mut self,
        shard: &ShardId,
        began: Instant,
        outcome: Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        match (self, outcome) {
            (Self::OfLoop(failing), outcome) => Ok(failing.note(shard, began, outcome)),
            (Self::OfCheck(unchecked), Err(Error::Queue(error))) if error.is_of_shard() => {
                unchecked.insert(shard.clone(), error.to_string());
                Ok(None)
            }
            (Self::OfCheck(_), outcome) => outcome.map(Some),
        }
    }
}

impl Published {
    pub fn new(store: Arc<dyn Outbox>, queue: Shards, bus: Arc<dyn Bus>) -> Self {
        Self { store, queue, bus }
    }

    /// Compares a page of a stretch with Redis.
    ///
    /// Redis has nearly all tasks of a page. Only for the others are SQL and the bus asked.
    pub async fn page(
        &self,
        stretch: Stretch<'_>,
        limit: u32,
        failed: &mut Failed<'_>,
    ) -> Result<PublishedPage, Error> {
        let page = self.store.on_bus(stretch, limit).await?;
        let tasks = page.tasks.values().map(|ids| ids.len() as u64).sum();
        let unknown = self.unknown(page.tasks, failed).await?;
        let missing = match unknown.is_empty() {
            true => Vec::new(),
            false => {
                let unknown = self
                    .store
                    .published_among(self.bus.generation(), &unknown)
                    .await?;
                self.compare(unknown, failed).await?
            }
        };
        Ok(PublishedPage {
            tasks,
            missing,
            next: page.next,
        })
    }

    /// Returns the tasks of which Redis has no record, and those of shards that this process does
    /// not know.
    async fn unknown(
        &self,
        shards: BTreeMap<ShardId, Vec<TaskId>>,
        failed: &mut Failed<'_>,
    ) -> Result<Vec<TaskId>, Error> {
        let mut unknown = Vec::new();
        for (shard, ids) in shards {
            if !self.queue.knows(&shard) {
                unknown.extend(ids);
                continue;
            }
            if failed.leaves_out(&shard) {
                continue;
            }
            let began = Instant::now();
            let of_shard = async {
                let mut found = Vec::new();
                for ids in ids.chunks(AT_ONCE) {
                    let (_, places) = self.without_record(&shard, ids).await?;
                    found.extend(places.into_iter().map(|place| ids[place]));
                }
                Ok(found)
            };
            let found: Option<Vec<TaskId>> = failed.note(&shard, began, of_shard.await)?;
            unknown.extend(found.unwrap_or_default());
        }
        Ok(unknown)
    }

    /// Returns the offset that the shard has stored, and the indices of the ids of which it has no
    /// record. A lost shard has neither.
    async fn without_record(
        &self,
        shard: &ShardId,
        ids: &[TaskId],
    ) -> Result<WithoutRecord, Error> {
        match self.queue.missing(shard, ids).await {
            // A lost shard is brought back as a whole.
            Err(queue::Error::NoGeneration) => Ok((None, Vec::new())),
            other => Ok(other?),
        }
    }

    /// Returns the tasks of the page that are missing.
    async fn compare(
        &self,
        page: Vec<PublishedTask>,
        failed: &mut Failed<'_>,
    ) -> Result<Vec<(ShardId, TaskId)>, Error> {
        // Read before the records: a task that the fanout had dealt with by then has one, or is in
        // the outbox.
        let committed = self.bus.committed(Topic::Pipeline).await?;
        // Read after the page: a published task is before the end, unless the bus has lost it.
        let ends = self.bus.ends(Topic::Pipeline).await?;
        let mut shards: BTreeMap<ShardId, Vec<PublishedTask>> = BTreeMap::new();
        for task in page {
            shards.entry(task.shard.clone()).or_default().push(task);
        }
        let mut missing = Vec::new();
        if shards
            .keys()
            .any(|shard| shard.number as usize >= ends.len())
        {
            // Fails if the partition is newer than this process's connection to the bus. Otherwise
            // the topic was recreated with fewer partitions, and nobody reads the tasks of the
            // others.
            self.bus.check_partitions().await?;
        }
        // Another process may have opened a shard that this one does not know yet. Then its records
        // are not read here.
        let open: HashSet<ShardId> = match shards.keys().all(|shard| self.queue.knows(shard)) {
            true => HashSet::new(),
            false => self
                .store
                .shards(None)
                .await?
                .into_iter()
                .map(|shard| shard.id)
                .collect(),
        };
        for (shard, tasks) in shards {
            if open.contains(&shard) && !self.queue.knows(&shard) {
                continue;
            }
            if failed.leaves_out(&shard) {
                continue;
            }
            let began = Instant::now();
            let at =
                |offsets: &[Option<Offset>]| offsets.get(shard.number as usize).copied().flatten();
            let of_shard = async {
                let mut missing = Vec::new();
                for tasks in tasks.chunks(AT_ONCE) {
                    missing.extend(
                        self.missing(&shard, tasks, at(&committed), at(&ends))
                            .await?,
                    );
                }
                Ok(missing)
            };
            let found: Option<Vec<TaskId>> = failed.note(&shard, began, of_shard.await)?;
            missing.extend(
                found
                    .unwrap_or_default()
                    .into_iter()
                    .map(|id| (shard.clone(), id)),
            );
        }
        Ok(missing)
    }

    /// Returns the ids of missing tasks among `tasks`: the queue has no record of them, and none
    /// will come.
    ///
    /// None will come if the queue or the fanout has read past the task (Redis was set back), or if
    /// the task is beyond the partition's `end` (the bus was set back). A task that is still on its
    /// way is not missing.
    async fn missing(
        &self,
        shard: &ShardId,
        tasks: &[PublishedTask],
        committed: Option<Offset>,
        end: Option<Offset>,
    ) -> Result<Vec<TaskId>, Error> {
        let ids: Vec<_> = tasks.iter().map(|task| task.id).collect();
        let (stored, unknown) = match self.queue.knows(shard) {
            true => self.without_record(shard, &ids).await?,
            false => (None, (0..ids.len()).collect()),
        };
        let generation = self.bus.generation();
        let stored = stored
            .filter(|(topic, _)| topic == generation)
            .map(|(_, offset)| offset);
        let unknown = unknown.into_iter().map(|place| &tasks[place]);
        let missing = unknown.filter(|task| match task.offset {
            Some(published) => stored.max(committed) >= Some(published) || end < Some(published),
            // Published in another generation of the topic, which nobody reads any more.
            None => true,
        });
        Ok(missing.map(|task| task.id).collect())
    }

    /// Returns the tasks that are still unfinished, published and without record, in shards that
    /// are not being rebuilt.
    ///
    /// The tasks of a shard that is being rebuilt are on their way, and SQL does not say how far
    /// they are.
    pub async fn still_missing(
        &self,
        missing: Vec<(ShardId, TaskId)>,
        failed: &mut Failed<'_>,
    ) -> Result<Vec<(ShardId, TaskId)>, Error> {
        if missing.is_empty() {
            return Ok(missing);
        }
        let rebuilding = self.store.rebuilding().await?;
        let ids: Vec<TaskId> = missing
            .iter()
            .filter(|(shard, _)| !rebuilding.shards.contains_key(shard))
            .map(|(_, id)| *id)
            .collect();
        let mut still = Vec::new();
        for ids in ids.chunks(AT_ONCE) {
            // Read their offsets again, because the tasks may have been republished since.
            let tasks = self
                .store
                .published_among(self.bus.generation(), ids)
                .await?;
            still.extend(self.compare(tasks, failed).await?);
        }
        Ok(still)
    }
}
