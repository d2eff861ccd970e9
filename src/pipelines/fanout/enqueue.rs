//! Enqueues groups of records into their shards.

use std::collections::BTreeSet;

use futures::{StreamExt, future::join_all, stream};

use super::{
    error::Error,
    groups::{Group, Groups},
    owned::Owned,
    reader::{AT_ONCE, Fanout},
};
use crate::{
    bus::Message,
    model::{Offset, ShardId},
    queue::{self, Enqueue, Enqueued, Source},
    store::Unpublished,
    telemetry::{
        metrics::{self, FanoutBatch},
        traces,
    },
    wire,
};

/// The outcome of one group.
pub(super) enum Enqueuing {
    Done {
        added: usize,
        repeated: usize,
        parked: usize,
    },
    /// Redis was set back to before the last record that was enqueued.
    Behind,
    /// The shard has no generation: it is closed, or lost.
    Gone,
}

/// The outcome of many groups.
pub(super) struct Outcome {
    /// Partitions with a shard that was set back.
    pub(super) behind: BTreeSet<u32>,
    pub(super) gone: Groups,
    /// Shards whose call failed.
    pub(super) refused: Vec<(ShardId, queue::Error)>,
    /// At least one shard took its group.
    pub(super) has_done: bool,
    /// The first error that concerns more than one shard.
    pub(super) failed: Result<(), Error>,
}

impl Default for Outcome {
    fn default() -> Self {
        Self {
            behind: Default::default(),
            gone: Default::default(),
            refused: Default::default(),
            has_done: Default::default(),
            failed: Ok(()),
        }
    }
}

impl Outcome {
    pub(super) fn add(&mut self, other: Self) {
        self.behind.extend(other.behind);
        self.gone.extend(other.gone);
        self.refused.extend(other.refused);
        self.has_done |= other.has_done;
        self.fail(other.failed);
    }

    fn fail(&mut self, failed: Result<(), Error>) {
        if self.failed.is_ok() {
            self.failed = failed;
        }
    }
}

impl Fanout {
    /// Enqueues the groups, many concurrently. A shard that fails does not hold up the others.
    pub(super) async fn enqueue_all(
        &self,
        groups: Groups,
        owned: &mut Owned,
        done: &mut FanoutBatch,
    ) -> Outcome {
        let calls = groups.into_iter().map(|(shard, group)| {
            let epoch = owned.epoch(shard.number);
            let predecessor = owned.last.get(&shard).copied();
            async move {
                let enqueued = self.enqueue(&shard, &group, epoch, predecessor).await;
                (shard, group, enqueued)
            }
        });
        let answers: Vec<_> = stream::iter(calls)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut outcome = Outcome::default();
        for (shard, group, enqueued) in answers {
            match enqueued {
                Ok(Enqueuing::Done {
                    added,
                    repeated,
                    parked,
                }) => {
                    done.enqueued += added;
                    done.repeated += repeated;
                    done.parked += parked;
                    owned.last.insert(shard, group.upto);
                    outcome.has_done = true;
                }
                Ok(Enqueuing::Behind) => drop(outcome.behind.insert(shard.number)),
                Ok(Enqueuing::Gone) => drop(outcome.gone.insert(shard, group)),
                Err(Error::Enqueue { shard, cause }) if is_of_shard(&cause) => {
                    outcome.refused.push((shard, cause))
                }
                Err(error) => outcome.fail(Err(error)),
            }
        }
        outcome
    }

    /// Enqueues held records of one shard.
    pub(super) async fn enqueue_again(
        &self,
        shard: &ShardId,
        messages: &[Message],
        epoch: u64,
        predecessor: Option<Offset>,
    ) -> Result<Enqueuing, Error> {
        let mut done = FanoutBatch::default();
        let group = self
            .groups(messages, &mut done)
            .await?
            .remove(shard)
            .unwrap_or_default();
        let enqueued = self.enqueue(shard, &group, epoch, predecessor).await?;
        if let Enqueuing::Done {
            added,
            repeated,
            parked,
        } = enqueued
        {
            metrics::fanout_done(FanoutBatch {
                enqueued: added,
                repeated,
                parked,
                ..done
            });
        }
        Ok(enqueued)
    }

    async fn enqueue(
        &self,
        shard: &ShardId,
        group: &Group,
        epoch: u64,
        predecessor: Option<Offset>,
    ) -> Result<Enqueuing, Error> {
        let settings = self.0.settings.queues.get(&shard.queue);
        let since = traces::now();
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
            true => Ok(Enqueued::Done {
                dealt_with: 0,
                added: 0,
                crowded: Vec::new(),
            }),
            false => self.0.queue.enqueuer.enqueue(shard, &batch).await,
        };
        let (dealt_with, added, crowded) = match answer {
            Ok(Enqueued::Done {
                dealt_with,
                added,
                crowded,
            }) => (dealt_with, added, crowded),
            // `Moved` is only returned for tasks that were never on the bus.
            Ok(Enqueued::Behind(_) | Enqueued::Moved(_)) => return Ok(Enqueuing::Behind),
            Ok(Enqueued::Fenced(by)) => return Err(self.fenced(shard.number, epoch, by).await),
            Err(queue::Error::NoGeneration) => return Ok(Enqueuing::Gone),
            Err(cause) => {
                return Err(Error::Enqueue {
                    shard: shard.clone(),
                    cause,
                });
            }
        };
        let repeated = dealt_with - added - crowded.len();
        if repeated > 0 && self.has_read_beyond(shard).await? {
            return Err(self.begin_anew(shard.number, epoch).await);
        }
        group
            .traced
            .end(shard, &group.tasks, dealt_with, added, since);
        let rest = &group.tasks[dealt_with..];
        if !crowded.is_empty() {
            let crowded = crowded.iter().map(|place| &group.tasks[*place]);
            let keys = crowded
                .clone()
                .filter_map(|task| wire::limit_hash_in(&task.body));
            self.0.gates.note_crowded(keys);
            let ids: Vec<_> = crowded.map(|task| task.id).collect();
            self.0.store.unpublish(&ids, Unpublished::Crowded).await?;
        }
        if !rest.is_empty() {
            if !is_short {
                self.0.gates.close(&shard.queue);
            }
            let ids: Vec<_> = rest.iter().map(|task| task.id).collect();
            self.0.store.unpublish(&ids, Unpublished::Parked).await?;
        }
        let parked = crowded.len() + rest.len();
        if parked > 0 {
            batch.tasks = &[];
            match self.0.queue.enqueuer.enqueue(shard, &batch).await {
                Ok(Enqueued::Done { .. }) => {}
                Ok(Enqueued::Behind(_) | Enqueued::Moved(_)) => return Ok(Enqueuing::Behind),
                Ok(Enqueued::Fenced(by)) => return Err(self.fenced(shard.number, epoch, by).await),
                Err(cause) => {
                    return Err(Error::Enqueue {
                        shard: shard.clone(),
                        cause,
                    });
                }
            }
        }
        Ok(Enqueuing::Done {
            added,
            repeated,
            parked,
        })
    }

    /// Opens the shards that this process does not know, or that have no keys. Removes the groups
    /// whose shard Redis does not open, and returns the reasons.
    ///
    /// One transaction and one exchange with Redis open all of them. SQL records a shard before
    /// Redis has it, so that a shard that Redis lost is not taken for a new one. After a crash in
    /// between, the shard looks lost.
    pub(super) async fn open(
        &self,
        groups: &mut Groups,
        owned: &mut Owned,
    ) -> Result<Vec<(ShardId, queue::Error)>, Error> {
        let queue = &self.0.queue.enqueuer;
        let generation = self.0.bus.generation();
        let shards: Vec<ShardId> = groups.keys().cloned().collect();
        let openings = self.0.store.open_shards(&shards).await?;
        let opened = shards
            .iter()
            .zip(openings)
            .filter(|(_, opening)| opening.is_new);
        let opened: Vec<_> = opened
            .map(|(shard, opening)| (shard.clone(), opening.generation))
            .collect();
        let calls = opened
            .iter()
            .map(|shard| queue.open_shards(std::slice::from_ref(shard), generation));
        let mut refused = Vec::new();
        for ((shard, _), answer) in opened.iter().zip(join_all(calls).await) {
            match answer {
                Err(cause) if is_of_shard(&cause) => refused.push((shard.clone(), cause)),
                answer => answer?,
            }
        }
        refused
            .iter()
            .for_each(|(shard, _)| drop(groups.remove(shard)));
        // Nothing was enqueued in this generation of the shard.
        owned
            .last
            .retain(|shard, _| !opened.iter().any(|(opened, _)| opened == shard));
        shards.iter().for_each(|shard| queue.add_shard(shard));
        Ok(refused)
    }
}

/// Returns whether this shard alone may be the cause: it is damaged, or its master is away.
///
/// A write that was not copied to replicas is not: it was made, and the same call, repeated, waits
/// for the copy.
pub(super) fn is_of_shard(error: &queue::Error) -> bool {
    matches!(error, queue::Error::Redis(_) | queue::Error::Answer(_)) && !error.is_out_of_memory()
}
