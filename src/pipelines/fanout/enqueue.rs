//! Groups into their shards.

use std::{collections::BTreeSet, time::SystemTime};

use futures::{StreamExt, stream};

use super::{
    error::Error,
    groups::{Group, Groups},
    owned::Owned,
    reader::{AT_ONCE, Fanout},
};
use crate::{
    model::{Offset, ShardId},
    queue::{self, Enqueue, Enqueued, Source},
    store::Unpublished,
    telemetry::metrics::FanoutBatch,
};

/// The outcome of one group.
enum Enqueuing {
    Done {
        added: usize,
        repeated: usize,
        parked: usize,
    },
    /// Redis fell back behind the last record that was enqueued.
    Behind,
    /// The shard has no generation: it is closed, or lost.
    Gone,
}

/// The outcome of many groups.
pub(super) struct Outcome {
    /// Partitions with a shard that fell back.
    pub(super) behind: BTreeSet<u32>,
    pub(super) gone: Groups,
    /// The first error.
    pub(super) failed: Result<(), Error>,
}

impl Default for Outcome {
    fn default() -> Self {
        Self { behind: BTreeSet::new(), gone: Groups::new(), failed: Ok(()) }
    }
}

impl Outcome {
    pub(super) fn add(&mut self, other: Self) {
        self.behind.extend(other.behind);
        self.gone.extend(other.gone);
        self.fail(other.failed);
    }

    fn fail(&mut self, failed: Result<(), Error>) {
        if self.failed.is_ok() {
            self.failed = failed;
        }
    }
}

impl Fanout {
    /// Enqueues the groups, many at once. A shard that fails does not hold up the others.
    pub(super) async fn enqueue_all(&self, groups: Groups, owned: &mut Owned, done: &mut FanoutBatch) -> Outcome {
        let calls = groups.into_iter().map(|(shard, group)| {
            let (epoch, predecessor) = (owned.epoch(shard.number), owned.last.get(&shard).copied());
            async move {
                let enqueued = self.enqueue(&shard, &group, epoch, predecessor).await;
                (shard, group, enqueued)
            }
        });
        let answers: Vec<_> = stream::iter(calls).buffer_unordered(AT_ONCE).collect().await;
        let mut outcome = Outcome::default();
        for (shard, group, enqueued) in answers {
            match enqueued {
                Ok(Enqueuing::Done { added, repeated, parked }) => {
                    done.enqueued += added;
                    done.repeated += repeated;
                    done.parked += parked;
                    owned.last.insert(shard, group.upto);
                }
                Ok(Enqueuing::Behind) => drop(outcome.behind.insert(shard.number)),
                Ok(Enqueuing::Gone) => drop(outcome.gone.insert(shard, group)),
                Err(error) => outcome.fail(Err(error)),
            }
        }
        outcome
    }

    async fn enqueue(
        &self,
        shard: &ShardId,
        group: &Group,
        epoch: u64,
        predecessor: Option<Offset>,
    ) -> Result<Enqueuing, Error> {
        let (settings, since) = (self.0.settings.queues.get(&shard.queue), SystemTime::now());
        let source = Source::Partition {
            topic_generation: self.0.bus.generation(),
            epoch,
            predecessor,
            upto: group.upto,
            again: group.again,
        };
        let mut batch = Enqueue {
            source,
            tasks: &group.tasks,
            high_water_tasks: settings.high_water_tasks,
            high_water_bytes: settings.high_water_bytes,
            live_tasks_max: settings.live_tasks_max(),
        };
        // While Redis has little memory left, the whole group is parked in SQL.
        let is_short = self.0.gates.is_short() && !group.tasks.is_empty();
        let answer = match is_short {
            true => Ok(Enqueued::Done { dealt_with: 0, added: 0 }),
            false => self.0.queue.enqueuer.enqueue(shard, &batch).await,
        };
        let (dealt_with, added) = match answer {
            Ok(Enqueued::Done { dealt_with, added }) => (dealt_with, added),
            // Redis says the latter only of tasks that were never on the bus.
            Ok(Enqueued::Behind(_) | Enqueued::Moved(_)) => return Ok(Enqueuing::Behind),
            Ok(Enqueued::Fenced(by)) => return Err(self.fenced(shard.number, epoch, by).await),
            Err(queue::Error::NoGeneration) => return Ok(Enqueuing::Gone),
            Err(cause) => return Err(Error::Enqueue { shard: shard.clone(), cause }),
        };
        if dealt_with > added && self.has_read_beyond(shard).await? {
            return Err(self.begin_anew(shard.number, epoch).await);
        }
        group.traced.end(shard, &group.tasks, dealt_with, added, since);
        let rest = &group.tasks[dealt_with..];
        if !rest.is_empty() {
            if !is_short {
                self.0.gates.close(&shard.queue);
            }
            let ids: Vec<_> = rest.iter().map(|task| task.id).collect();
            self.0.store.unpublish(&ids, Unpublished::Parked).await?;
            batch.tasks = &[];
            match self.0.queue.enqueuer.enqueue(shard, &batch).await? {
                Enqueued::Done { .. } => {}
                Enqueued::Behind(_) | Enqueued::Moved(_) => return Ok(Enqueuing::Behind),
                Enqueued::Fenced(by) => return Err(self.fenced(shard.number, epoch, by).await),
            }
        }
        Ok(Enqueuing::Done { added, repeated: dealt_with - added, parked: rest.len() })
    }

    /// Opens shards that this process does not know, or that have no keys.
    ///
    /// One transaction and one exchange with Redis open all of them. SQL remembers a shard before Redis does, so that
    /// a shard that Redis lost is not taken for a new one. After a crash in between, the shard looks lost.
    pub(super) async fn open(&self, shards: impl Iterator<Item = &ShardId>, owned: &mut Owned) -> Result<(), Error> {
        let queue = &self.0.queue.enqueuer;
        let shards: Vec<ShardId> = shards.cloned().collect();
        let openings = self.0.store.open_shards(&shards).await?;
        let opened = shards.iter().zip(openings).filter(|(_, opening)| opening.is_new);
        let opened: Vec<_> = opened.map(|(shard, opening)| (shard.clone(), opening.generation)).collect();
        queue.open_shards(&opened, self.0.bus.generation()).await?;
        // Nothing was enqueued in this generation of the shard.
        owned.last.retain(|shard, _| !opened.iter().any(|(opened, _)| opened == shard));
        shards.iter().for_each(|shard| queue.add_shard(shard));
        Ok(())
    }
}
