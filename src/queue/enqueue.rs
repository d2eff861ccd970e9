//! The fanout's side of the queue: opens shards, and enqueues tasks.

use std::{fmt::Write as _, ops::Deref};

use redis::Value;

use super::{
    error::{Error, Result},
    fence::Fence,
    shards::Shards,
    types::{Enqueue, EnqueueTask, Enqueued, Source},
    wake_message::WakeMessage,
    wire::{items, number, packed_strings, text},
};
use crate::{
    model::{LimitHold, Offset, ShardId, TaskStatus},
    redis_pool::{Call, scripts},
    wire::{is_limited, without_deadline},
};

/// The most shards in one call.
pub(super) const AT_ONCE: usize = 1000;

/// The fanout's side of the queue.
#[derive(Clone)]
pub struct Enqueuer(pub(super) Shards);

impl Deref for Enqueuer {
    type Target = Shards;

    fn deref(&self) -> &Shards {
        &self.0
    }
}

impl Enqueuer {
    /// Opens shards, each in its generation, all concurrently.
    pub async fn open_shards(
        &self,
        shards: &[(ShardId, u64)],
        topic_generation: &str,
    ) -> Result<()> {
        for shards in shards.chunks(AT_ONCE) {
            let opening = shards.iter().map(|(shard, generation)| {
                self.open(shard, *generation, topic_generation, None, &[])
            });
            futures::future::try_join_all(opening).await?;
        }
        Ok(())
    }

    /// Enqueues the tasks. If a caller waits for them, its claim goes in the same exchange
    /// ([`super::riding`]).
    pub async fn enqueue(&self, shard: &ShardId, batch: &Enqueue<'_>) -> Result<Enqueued> {
        let since = self.announcer().now_unix_ms();
        let is_due = batch.tasks.iter().any(|task| task.not_before_unix_ms > 0);
        let is_limited = batch.tasks.iter().any(|task| is_limited(&task.body));
        if let (true, Some(shard)) = (is_limited, self.shard(shard)) {
            shard.cache.note_limited();
        }
        let noting = is_limited.then(|| (self.0.clone(), shard.clone()));
        let read = move |answer| {
            let (enqueued, next_start) = Enqueued::read(answer)?;
            if let (Some((shards, shard)), Some(wait_ms)) = (noting, next_start) {
                let at = shards.clock().now_unix_ms() + wait_ms;
                shards.limits().note_start(&shard, at);
            }
            Ok(enqueued)
        };
        let call = |wake: &WakeMessage| {
            self.enqueuing(
                shard,
                batch,
                is_limited,
                &WakeMessage {
                    is_due,
                    ..wake.clone()
                },
            )
        };
        let enqueued = self
            .offer(shard, !batch.tasks.is_empty(), call, read, Enqueued::added)
            .await;
        if is_due {
            self.note_due(shard);
        }
        let enqueued = enqueued?;
        if let Enqueued::Done {
            dealt_with, added, ..
        } = &enqueued
        {
            self.announce_enqueued(
                shard,
                batch.tasks.get(..*dealt_with).unwrap_or_default(),
                *added,
                since,
            );
        }
        Ok(enqueued)
    }

    fn enqueuing(
        &self,
        shard: &ShardId,
        batch: &Enqueue<'_>,
        is_limited: bool,
        wake: &WakeMessage,
    ) -> Call {
        let reach = self.reach(shard);
        let script = if batch.tasks.is_empty() {
            &scripts::PASS
        } else if is_limited {
            &scripts::ENQUEUE_LIMITED
        } else {
            &scripts::ENQUEUE
        };
        let mut call = reach.call(script).of_items(batch.tasks.len());
        call.arg(self.wake_channel()).arg(wake.to_string());
        let (epoch, again) = match batch.source {
            Source::Partition {
                topic_generation,
                epoch,
                predecessor,
                upto,
                again,
            } => {
                call.arg(topic_generation);
                call.arg(
                    predecessor
                        .map(|offset| offset.to_string())
                        .unwrap_or_default(),
                )
                .arg(upto.to_string());
                (epoch, again)
            }
            Source::Store(fence) => {
                call.arg("").arg(fence.of_new_tasks()).arg("");
                (0, false)
            }
            Source::Waiting(fence) => {
                call.arg("").arg(&fence.0).arg("");
                (0, true)
            }
        };
        call.arg(batch.high_water_tasks)
            .arg(batch.high_water_bytes)
            .arg(epoch)
            .arg(batch.live_tasks_max);
        argue(&mut call, batch.tasks, again);
        if is_limited {
            call.arg(reach.limits_of(&shard.queue));
        }
        call
    }

    /// Announces tasks that are queued now, or that wait for their time. If some were known, the
    /// answer does not say which, so their status is unknown.
    fn announce_enqueued(&self, shard: &ShardId, tasks: &[EnqueueTask], added: usize, since: i64) {
        let enqueued = tasks.iter().map(|task| {
            let status = if task.not_before_unix_ms > since {
                TaskStatus::Delayed
            } else {
                TaskStatus::Queued
            };
            (task.id, (added == tasks.len()).then_some(status))
        });
        self.announcer().announce(&shard.queue, since, enqueued);
    }

    /// Forgets how far the shard has read `pipeline`, because the bus assigns its offsets a second
    /// time. Only the owner of the partition may call this.
    pub async fn rewind(&self, shard: &ShardId, epoch: u64) -> Result<()> {
        self.call(&scripts::REWIND, shard, 1, |call| {
            call.arg(epoch);
        })
        .await?;
        Ok(())
    }
}

impl Enqueued {
    /// Reads the answer of `lua/enqueue.lua`.
    ///
    /// Also answers in how many ms time alone lets a limit key of the tasks go on.
    fn read(answer: Value) -> Result<(Self, Option<i64>)> {
        let mut answer = items(answer)?.into_iter();
        let mut next_start = None;
        let enqueued = match text(answer.next())?.as_str() {
            "ok" => {
                let dealt_with = number(answer.next())?;
                let added = number(answer.next())?;
                let _known: u64 = number(answer.next())?;
                if let Some(wait) = answer.next() {
                    next_start = Some(number(Some(wait))?).filter(|wait: &i64| *wait >= 0);
                }
                let mut crowded = Vec::new();
                if let Some(places) = answer.next() {
                    for place in items(places)? {
                        let place: usize = number(Some(place))?;
                        match place.checked_sub(1).filter(|place| *place < dealt_with) {
                            Some(place) => crowded.push(place),
                            None => return Err(Error::Answer(format!("crowded at {place}"))),
                        }
                    }
                }
                Self::Done {
                    dealt_with,
                    added,
                    crowded,
                }
            }
            "fenced" => Self::Fenced(number(answer.next())?),
            "moved" => Self::Moved(Fence(text(answer.next())?)),
            _ => Self::Behind(text(answer.next())?.parse().ok()),
        };
        Ok((enqueued, next_start))
    }

    fn added(&self) -> usize {
        if let Self::Done { added, .. } = self {
            *added
        } else {
            0
        }
    }
}

/// Adds the tasks as `lua/enqueue.lua` takes them: first what Redis stores unchanged for all of
/// them, then what only few tasks have.
fn argue(call: &mut Call, tasks: &[EnqueueTask], again: bool) {
    let mut offsets = String::new();
    for task in tasks {
        let space = if offsets.is_empty() { "" } else { " " };
        // Writing to a `String` cannot fail.
        write!(offsets, "{space}{}", task.offset).ok();
    }
    let most_replicas = tasks.first().map_or(1, |task| task.replicas.max(1));
    call.arg(offsets)
        .arg(most_replicas)
        .arg(u8::from(again))
        .arg(tasks.len());
    for task in tasks {
        call.arg(task.id.as_bytes());
        // A task that was sent again has no deadline, but its body may be an earlier one that has.
        match task.epoch {
            0 => call.arg(&task.body[..]),
            _ => call.arg(&without_deadline(&task.body)[..]),
        };
    }
    for (place, task) in tasks.iter().enumerate() {
        let is_alike =
            task.replicas == most_replicas && task.not_before_unix_ms == 0 && task.epoch == 0;
        if !is_alike || !task.credited.is_empty() {
            call.arg(place + 1)
                .arg(task.replicas)
                .arg(task.not_before_unix_ms)
                .arg(packed_strings(&task.credited));
            call.arg(task.epoch);
        }
    }
}

impl Shards {
    /// Opens a shard in this generation, unless it has this one or a later one already. In the same
    /// step its state is emptied, except for the outbox, and records of `pipeline` up to `offset`
    /// count as enqueued.
    pub(super) async fn open(
        &self,
        shard: &ShardId,
        generation: u64,
        topic_generation: &str,
        offset: Option<Offset>,
        holds: &[LimitHold],
    ) -> Result<()> {
        let stored = offset
            .map(|offset| format!("{topic_generation}/{offset}"))
            .unwrap_or_default();
        self.call(&scripts::OPEN, shard, 1, |call| {
            call.arg(generation).arg(stored);
            self.argue_own_limits(shard, holds, call);
        })
        .await?;
        Ok(())
    }
}
