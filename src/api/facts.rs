//! What SQL, the bus and Redis say about one task, and where the task is according to them.

use super::{error::Error, reader::Reader};
use crate::{
    bus::Topic,
    model::{
        KeyHash, Offset, QueueName, ShardId, TaskId, TaskPlace, TreeView, WorkerName, limit_hash,
    },
    pipelines::admission::Shortage,
    queue::{self, Explained, ExplainedRecord, RecordStatus, Stats},
    store::{Place, SequencePlace, TaskDetail, Unpublished},
};

/// What is known about a task, for one worker or none.
pub(super) struct Facts {
    pub(super) detail: TaskDetail,
    /// `None` if the task is finished.
    pub(super) place_in_sql: Option<Place>,
    /// The workers with a credit, according to SQL.
    pub(super) credited: Vec<String>,
    /// True if SQL has a result of this worker.
    pub(super) has_completed: bool,
    /// Only asked for if the task is on the bus according to SQL, and Redis has no record of it.
    pub(super) on_bus: Option<OnBus>,
    /// `None` if its shard has no generation, or the task is finished.
    pub(super) shard: Option<Explained>,
    /// For a parked task: a shard of its queue that is full.
    pub(super) full: Option<(ShardId, Stats)>,
    /// Of a task that waits for its limit key: how many tasks of the key wait in SQL. More than
    /// [`CROWDED_COUNTED`] count as one more than that.
    pub(super) crowded: u64,
    /// Of a task that waits behind others: where it stands.
    pub(super) sequence: Option<SequencePlace>,
    pub(super) shortage: Option<Shortage>,
    /// True if an operator has paused the queue.
    pub(super) is_paused: bool,
    pub(super) tree: Option<TreeView>,
    pub(super) now_unix_ms: i64,
}

/// How many tasks of a limit key are counted in SQL.
pub(super) const CROWDED_COUNTED: u64 = 1000;

/// A published task of which Redis has no record.
pub(super) struct OnBus {
    /// True if the fanout has yet to read it. Otherwise the readers have passed it, or the bus has
    /// lost it.
    is_ahead: bool,
    /// Roughly how many records of `pipeline` have not been processed.
    pub(super) backlog: u64,
    /// When it was published; `None` if the bus does not say.
    pub(super) since_unix_ms: Option<i64>,
}

impl Reader {
    /// Returns the task that has, or had, this key.
    pub(super) async fn owner(&self, queue: QueueName, key: &[u8]) -> Result<TaskId, Error> {
        let owners = self.store.key_owners(&[KeyHash::new(&queue, key)]).await?;
        let owner = owners.first().map(|(_, id, _)| *id);
        owner.ok_or_else(|| Error::NoSuchKey {
            queue,
            key: String::from_utf8_lossy(key).into_owned(),
        })
    }

    /// Asks in the order in which a task moves, so that one that moves on meanwhile is found at its
    /// next place.
    pub(super) async fn facts(
        &self,
        id: TaskId,
        worker: Option<&WorkerName>,
    ) -> Result<Option<Facts>, Error> {
        let place_in_sql = self.store.place(self.bus.generation(), id).await?;
        let Some(detail) = self.store.brief_task(id).await? else {
            return Ok(None);
        };
        let credited = self
            .store
            .states(&[id])
            .await?
            .into_iter()
            .flat_map(|state| state.workers)
            .collect();
        let completions = match worker {
            Some(worker) => self.store.states_for(worker, &[id]).await?,
            None => Vec::new(),
        };
        let is_paused = self.queue.is_paused(&detail.task.queue);
        let tree = match detail.tree {
            Some(tree) => self.store.trees_by_id(&[tree]).await?.pop(),
            None => None,
        };
        let mut facts = Facts {
            is_paused,
            tree,
            detail,
            place_in_sql,
            credited,
            has_completed: completions
                .iter()
                .any(|state| state.completed_under.is_some()),
            on_bus: None,
            shard: None,
            full: None,
            crowded: 0,
            sequence: None,
            shortage: self.gates.shortage(),
            now_unix_ms: self.clock.now_unix_ms(),
        };
        if facts.detail.status.is_final() {
            return Ok(Some(facts));
        }
        facts.shard = self.explained(&facts.detail, worker).await?;
        match (place_in_sql, facts.record()) {
            (Some(Place::On(offset)), None) => {
                let committed = self.bus.committed(Topic::Pipeline).await?;
                let ends = self.bus.ends(Topic::Pipeline).await?;
                let backlog = self.bus.backlog(Topic::Pipeline).await?;
                // Asked again after the bus: if the fanout had passed the task by then, it has a
                // record now.
                facts.shard = self.explained(&facts.detail, worker).await?;
                let at = |offsets: &[Option<Offset>]| {
                    offsets.get(facts.detail.task.partition as usize).copied()
                };
                let passed = at(&committed)
                    .flatten()
                    .max(facts.stored(self.bus.generation()));
                let is_ahead = offset.is_some_and(|offset| {
                    passed < Some(offset) && at(&ends).flatten() >= Some(offset)
                });
                let since_unix_ms = offset.and_then(|offset| self.bus.published_at(offset));
                facts.on_bus = Some(OnBus {
                    is_ahead,
                    backlog,
                    since_unix_ms,
                });
            }
            (
                Some(Place::Off {
                    why: Unpublished::Parked,
                    ..
                }),
                None,
            ) => {
                facts.full = self.full_shard(&facts.detail.task.queue).await?;
            }
            (
                Some(Place::Off {
                    why: Unpublished::Behind,
                    ..
                }),
                None,
            ) => {
                facts.sequence = self.store.sequence_place(id).await?;
            }
            _ => {}
        }
        if facts.is_crowded() || facts.record().is_some_and(|record| record.limit.is_some()) {
            let task = &facts.detail.task;
            let key = limit_hash(&task.queue, &task.limit_key);
            let count = self
                .store
                .count_crowded(&task.queue, &key, CROWDED_COUNTED + 1);
            facts.crowded = count.await?;
        }
        if let Some(shard) = &facts.shard {
            facts.now_unix_ms = shard.now_unix_ms;
        }
        Ok(Some(facts))
    }

    pub(super) async fn explained(
        &self,
        detail: &TaskDetail,
        worker: Option<&WorkerName>,
    ) -> Result<Option<Explained>, Error> {
        let task = &detail.task;
        let shard = ShardId {
            queue: task.queue.clone(),
            number: task.partition,
        };
        match self
            .queue
            .explain(&shard, task.id, task.priority, worker)
            .await
        {
            Ok(mut explained) => {
                explained.record = explained
                    .record
                    .filter(|record| !record.inspected().is_past(detail.epoch));
                Ok(Some(explained))
            }
            // Nothing has been enqueued there yet, or the watchdog is rebuilding the shard.
            Err(queue::Error::NoGeneration) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn full_shard(&self, queue: &QueueName) -> Result<Option<(ShardId, Stats)>, Error> {
        let settings = self.settings.queues.get(queue);
        for shard in self.queue.shards_of(queue) {
            match self.queue.stats(&shard.id).await {
                Ok(stats) if !stats.has_room(settings) => {
                    return Ok(Some((shard.id.clone(), stats)));
                }
                Ok(_) | Err(queue::Error::NoGeneration) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

impl Facts {
    pub(super) fn record(&self) -> Option<&ExplainedRecord> {
        self.shard.as_ref()?.record.as_ref()
    }

    /// Whether it waits in SQL because enough tasks of its limit key are in Redis.
    pub(super) fn is_crowded(&self) -> bool {
        let is_crowded = matches!(
            self.place_in_sql,
            Some(Place::Off {
                why: Unpublished::Crowded,
                ..
            })
        );
        is_crowded && self.record().is_none() && !self.detail.status.is_final()
    }

    /// The last offset that the shard has stored, if it is one of this generation of the topic.
    fn stored(&self, generation: &str) -> Option<Offset> {
        let (topic, offset) = self.shard.as_ref()?.stored.as_ref()?;
        (topic == generation).then_some(*offset)
    }

    pub(super) fn place(&self) -> TaskPlace {
        if self.detail.status.is_final() {
            return TaskPlace::Finished;
        }
        match (self.record(), self.place_in_sql) {
            // A record in Redis takes precedence over SQL, which is updated later.
            (Some(record), _) if record.status != RecordStatus::Live => TaskPlace::Reported,
            (Some(record), _) if !record.held.is_empty() => TaskPlace::Leased,
            (Some(record), _)
                if record.waiting as usize + record.credited.len() >= record.replicas as usize =>
            {
                TaskPlace::Delayed
            }
            (Some(_), _) => TaskPlace::Waiting,
            (
                None,
                Some(Place::Off {
                    why: Unpublished::Fresh | Unpublished::Missing,
                    ..
                }),
            ) => TaskPlace::Outbox,
            (
                None,
                Some(Place::Off {
                    why: Unpublished::Parked | Unpublished::Crowded,
                    ..
                }),
            ) => TaskPlace::Parked,
            (
                None,
                Some(Place::Off {
                    why: Unpublished::Scheduled,
                    ..
                }),
            ) => TaskPlace::Scheduled,
            (
                None,
                Some(Place::Off {
                    why: Unpublished::Behind,
                    ..
                }),
            ) => TaskPlace::Behind,
            (None, Some(Place::On(_)))
                if self.on_bus.as_ref().is_some_and(|on_bus| on_bus.is_ahead) =>
            {
                TaskPlace::Bus
            }
            (None, _) => TaskPlace::Lost,
        }
    }
}
