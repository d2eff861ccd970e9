//! The queue as the watchdog and the forwarder use it: ends leases and delays, reads what is to be
//! forwarded, opens and closes shards.

mod failing;

use std::{ops::Deref, time::Duration};

pub use self::failing::{FailedRound, Failing};
use super::{
    change::Changer,
    enqueue::AT_ONCE as KEYS_AT_ONCE,
    error::{Error, Result},
    keys,
    shards::Shards,
    snapshot::ShardSnapshot,
    types::{Closing, Event, Expired, OUTBOX_FULL, OUTBOX_FULL_BYTES, OutboxEntry, Promoted},
    wake_message::WakeMessage,
    wire::{
        bytes, items, ms, number, numbers, outbox_entry, packed_ms, seed, stream_id, task_ids,
        unsigned,
    },
};
use crate::{
    model::{LimitHash, LimitHold, Offset, ShardId, TaskId},
    redis_pool::{Batch, Call, scripts},
};

/// How long a forwarder owns a shard's outbox. Entries that are still there afterwards mean that it
/// died, or that the bus is down.
const FORWARDING: Duration = Duration::from_secs(3);

/// About how many snapshots per second Redis has to take. With more shards than that, older
/// snapshots are accepted.
const LOOKS_A_SECOND: usize = 1000;

/// The parameters of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct LookFor {
    /// A snapshot of this process that is younger is reused, unless something may have become due
    /// in the shard since.
    pub max_age: Duration,
    /// The age from which a final record is to be checked against SQL and forgotten.
    pub grace: Duration,
    /// How far ahead of its time a scheduled task may arrive in the shard.
    pub horizon: Duration,
}

/// The first and the last id of an outbox's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxExtent {
    /// `None`: it is empty.
    pub first: Option<Offset>,
    /// The last id that was ever assigned, even if that entry is gone.
    pub last: Offset,
}

/// The watchdog's and the forwarder's side of the queue.
#[derive(Clone)]
pub struct Upkeep(pub(super) Shards);

impl Deref for Upkeep {
    type Target = Shards;

    fn deref(&self) -> &Shards {
        &self.0
    }
}

/// What SQL has of the limit keys of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrowdMarks {
    /// Tasks of these wait in SQL.
    pub crowded: Vec<LimitHash>,
    /// None of these does.
    pub empty: Vec<LimitHash>,
}

/// The limit keys of a shard that take tasks from SQL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uncrowded {
    /// How many tasks of each to bring.
    pub each: usize,
    pub keys: Vec<LimitHash>,
    /// How many limit keys of the shard count as having tasks in SQL.
    pub marks: u64,
}

/// The answer of `lua/sweep.lua`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Elements that were removed, or moved to the head of their lane.
    pub moved: u64,
    /// Pointers that were dropped.
    pub pointers: u64,
}

/// The answer of `lua/finals.lua`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finals {
    /// Outdated entries that were removed from the list: their tasks were sent again after that
    /// end.
    pub past_ends: u64,
    pub ids: Vec<TaskId>,
}

impl Upkeep {
    /// The side of the queue that changes live work.
    pub fn changer(&self) -> Changer {
        Changer(self.0.clone())
    }

    /// Returns the shards that are not empty, that have changed, or that no loop has checked for a
    /// long time.
    pub fn awake_shards(&self) -> Vec<ShardId> {
        self.awake().iter().map(|cache| cache.id.clone()).collect()
    }

    /// Takes snapshots of the awake shards. Leaves out those that are empty or have no generation.
    pub async fn look(&self, look_for: LookFor) -> Vec<(ShardId, Result<ShardSnapshot>)> {
        let at = self.clock().now();
        let mut looks = Vec::new();
        let mut unseen = Vec::new();
        let awake = self.awake();
        let max_age = look_for.max_age
            * u32::try_from(awake.len().div_ceil(LOOKS_A_SECOND)).unwrap_or(u32::MAX);
        for shard in awake {
            match shard.snapshot(max_age) {
                Some(seen) => looks.push((shard.id.clone(), Ok(seen))),
                None => unseen.push((shard.activity(), shard)),
            }
        }
        let shards = unseen.iter().map(|(_, shard)| &shard.id).collect();
        let answers = self.call_each(&scripts::LOOK, shards, |call, shard| {
            let limits = self.reach(shard).limits_of(&shard.queue);
            call.arg(ms(look_for.grace)).arg(ms(look_for.horizon));
            call.arg(limits);
        });
        for (answer, (before, shard)) in answers.await.into_iter().zip(&unseen) {
            let look = answer.and_then(ShardSnapshot::read);
            if let Ok(look) = look {
                shard.store_snapshot(look, *before, at);
                if let Some(version) = look.own_limits {
                    self.note_shown_limits(&shard.id, version);
                }
            }
            looks.push((shard.id.clone(), look));
        }
        looks.retain(|(_, look)| match look {
            Ok(look) => !look.is_idle,
            Err(error) => !matches!(error, Error::NoGeneration),
        });
        looks
    }

    pub async fn expire(
        &self,
        shard: &ShardId,
        most: usize,
        backoff: &[Duration],
    ) -> Result<Expired> {
        let value = self
            .call(&scripts::EXPIRE, shard, 1, |call| {
                call.arg(seed())
                    .arg(self.wake_channel())
                    .arg(shard.queue.as_str())
                    .arg(packed_ms(backoff));
                call.arg(most).arg(OUTBOX_FULL).arg(OUTBOX_FULL_BYTES);
            })
            .await?;
        self.offered(shard);
        self.note_ended(shard);
        let n = numbers(value, 5)?;
        let next_unix_ms = (n[4] >= 0).then_some(n[4]);
        let expired = unsigned(n[0]);
        let dead = unsigned(n[1]);
        let undelivered = unsigned(n[2]);
        Ok(Expired {
            expired,
            dead,
            undelivered,
            more: n[3] != 0,
            next_unix_ms,
        })
    }

    /// Offers the tasks and retries whose delay is over. A scheduled task arrives in the shard at
    /// most `horizon` ahead of its time, unless a clock was set back.
    pub async fn promote(
        &self,
        shard: &ShardId,
        most: usize,
        horizon: Duration,
    ) -> Result<Promoted> {
        let call = |wake: &WakeMessage| {
            let reach = self.reach(shard);
            let mut call = reach.call(&scripts::PROMOTE).of_items(1);
            call.arg(self.wake_channel())
                .arg(wake.to_string())
                .arg(most)
                .arg(ms(horizon))
                .arg(reach.limits_of(&shard.queue));
            call
        };
        let read = |answer| {
            let mut n = items(answer)?.into_iter();
            let promoted = number(n.next())?;
            let more: u8 = number(n.next())?;
            let next: i64 = number(n.next())?;
            let now = n.next().map(|now| number(Some(now))).transpose()?;
            Ok(Promoted {
                promoted,
                more: more != 0,
                next_unix_ms: (next >= 0).then_some(next),
                now_unix_ms: now,
            })
        };
        let count = |done: &Promoted| usize::try_from(done.promoted).unwrap_or(usize::MAX);
        let promoted = self.offer(shard, true, call, read, count).await;
        self.note_due(shard);
        promoted
    }

    /// Returns the limit keys of which tasks wait in SQL and few wait in the shard, `most` at most.
    /// A shard that is half full by these limits takes fewer tasks of each.
    ///
    /// Also records which limit keys have tasks in SQL, and which have none any more.
    pub async fn uncrowded(
        &self,
        shard: &ShardId,
        high_water_bytes: u64,
        live_tasks_max: u64,
        most: usize,
        marks: &CrowdMarks,
    ) -> Result<Uncrowded> {
        let value = self
            .call(&scripts::CROWDED, shard, 1, |call| {
                call.arg(high_water_bytes)
                    .arg(live_tasks_max)
                    .arg(most)
                    .arg(marks.crowded.concat())
                    .arg(marks.empty.concat());
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        let each = number(answer.next())?;
        let mut keys = Vec::new();
        for key in items(answer.next().unwrap_or(redis::Value::Nil))? {
            let key = bytes(Some(key))?;
            let key = LimitHash::try_from(&key[..])
                .map_err(|_| Error::Answer(format!("a limit key of {} bytes", key.len())))?;
            keys.push(key);
        }
        let marks = number(answer.next())?;
        Ok(Uncrowded { each, keys, marks })
    }

    /// Reads holds of limit keys that are to outlive Redis, and forgets those up to the call
    /// `stored`, which are in SQL. Returns the last call of what was read.
    pub async fn long_holds(
        &self,
        shard: &ShardId,
        stored: u64,
        most: usize,
    ) -> Result<(u64, Vec<LimitHold>)> {
        let value = self
            .call(&scripts::HOLDS, shard, 1, |call| {
                call.arg(stored).arg(most);
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        let last = number(answer.next())?;
        let holds = LimitHold::read_all(&bytes(answer.next())?);
        Ok((
            last,
            holds.ok_or_else(|| Error::Answer("half a hold".into()))?,
        ))
    }

    /// Drops spent elements and old pointers.
    pub async fn sweep(&self, shard: &ShardId, most: usize) -> Result<Swept> {
        let value = self
            .call(&scripts::SWEEP, shard, 1, |call| {
                call.arg(most);
            })
            .await?;
        let n = numbers(value, 2)?;
        let swept = Swept {
            moved: unsigned(n[0]),
            pointers: unsigned(n[1]),
        };
        if swept.moved > 0 {
            self.note_due(shard);
        }
        Ok(swept)
    }

    /// Reads the first `most` entries of the list of final records. Returns those older than
    /// `grace`, the earliest first.
    pub async fn finals(&self, shard: &ShardId, grace: Duration, most: usize) -> Result<Finals> {
        let value = self
            .call(&scripts::FINALS, shard, 1, |call| {
                call.arg(ms(grace)).arg(most);
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        Ok(Finals {
            past_ends: number(answer.next())?,
            ids: task_ids(answer.next())?,
        })
    }

    /// Forgets the final records that are settled (`true`). Expects them in the order of
    /// [`Self::finals`], with the same `grace`. Returns how many were forgotten.
    pub async fn forget(
        &self,
        shard: &ShardId,
        grace: Duration,
        settled: &[(TaskId, bool)],
    ) -> Result<u64> {
        let value = self
            .call(&scripts::FORGET, shard, settled.len(), |call| {
                call.arg(
                    settled
                        .iter()
                        .map(|(_, is_settled)| if *is_settled { '1' } else { '0' })
                        .collect::<String>(),
                );
                call.arg(ms(grace)).arg(
                    settled
                        .iter()
                        .flat_map(|(id, _)| *id.as_bytes())
                        .collect::<Vec<u8>>(),
                );
            })
            .await?;
        self.note_due(shard);
        number(Some(value))
    }

    /// The first entries of the shard's outbox, at most `most` and about `bytes`; none while
    /// another process forwards them.
    pub async fn outbox(
        &self,
        shard: &ShardId,
        most: usize,
        bytes: usize,
    ) -> Result<Vec<OutboxEntry>> {
        let value = self
            .ask_outbox(shard, most, bytes, false)
            .run(&mut self.conn())
            .await?;
        self.entries(shard, value)
    }

    /// Reads entries of an outbox, and notifies watchers of the expired leases among them, because
    /// the script that expires leases does not return which ones they are.
    fn entries(&self, shard: &ShardId, value: redis::Value) -> Result<Vec<OutboxEntry>> {
        let entries: Vec<_> = items(value)?
            .into_iter()
            .map(outbox_entry)
            .collect::<Result<_>>()?;
        if entries.is_empty()
            && let Some(shard) = self.shard(shard)
        {
            shard.cache.note_forwarded();
        }
        for entry in &entries {
            let expired = entry.events.iter().filter_map(|event| match event {
                Event::Expired {
                    id, dead: false, ..
                } => Some((*id, None)),
                _ => None,
            });
            self.announcer()
                .announce(&shard.queue, entry.at_unix_ms, expired);
        }
        Ok(entries)
    }

    /// Removes entries that are on the bus now, then reads as [`Self::outbox`] does, in one
    /// exchange.
    pub async fn outbox_behind(
        &self,
        shard: &ShardId,
        forwarded: &[OutboxEntry],
        most: usize,
        bytes: usize,
    ) -> Result<Vec<OutboxEntry>> {
        if forwarded.is_empty() {
            return self.outbox(shard, most, bytes).await;
        }
        let mut batch = Batch::default();
        batch.script(self.ask_forwarded(shard, forwarded));
        // Repeated if Redis did not have the script before it, because this one has then read
        // entries that are already forwarded.
        batch.repeatable(self.ask_outbox(shard, most, bytes, false));
        let mut answers = batch.run_all(&mut self.conn()).await?;
        self.note_work(shard);
        self.entries(shard, answers.swap_remove(1))
    }

    /// Does what [`Self::outbox_behind`] does, for several shards in one exchange. Returns for each
    /// shard all entries of its outbox, or `None` if they are more than `most` or about `bytes`.
    /// Does not work in a cluster.
    pub async fn outboxes_behind(
        &self,
        shards: &[(ShardId, Vec<OutboxEntry>)],
        most: usize,
        bytes: usize,
    ) -> Vec<Result<Option<Vec<OutboxEntry>>>> {
        let mut batch = Batch::default();
        for (shard, forwarded) in shards {
            if !forwarded.is_empty() {
                batch.script(self.ask_forwarded(shard, forwarded));
            }
            batch.repeatable(self.ask_outbox(shard, most, bytes, true));
        }
        let mut answers = match batch.run(&mut self.conn()).await {
            Ok(answers) => answers.into_iter(),
            Err(error) => return vec![Err(error.into()); shards.len()],
        };
        let mut next = || answers.next().unwrap_or(Ok(redis::Value::Nil));
        let read = |(shard, forwarded): &(ShardId, Vec<OutboxEntry>)| {
            let removed = if forwarded.is_empty() {
                Ok(redis::Value::Nil)
            } else {
                next()
            };
            let found = next();
            if removed? != redis::Value::Nil {
                self.note_work(shard);
            }
            match found? {
                redis::Value::Int(_too_many) => Ok(None),
                entries => self.entries(shard, entries).map(Some),
            }
        };
        shards.iter().map(read).collect()
    }

    /// Where the shard's outbox begins and ends.
    pub async fn outbox_extent(&self, shard: &ShardId) -> Result<OutboxExtent> {
        let mut answer =
            items(self.call(&scripts::OUTBOX_EXTENT, shard, 1, |_| {}).await?)?.into_iter();
        let last = stream_id(answer.next())?;
        let first = answer.next().filter(|id| *id != redis::Value::Nil);
        Ok(OutboxExtent {
            first: first.map(|id| stream_id(Some(id))).transpose()?,
            last,
        })
    }

    fn ask_outbox(&self, shard: &ShardId, most: usize, bytes: usize, all_or_none: bool) -> Call {
        let mut call = self.reach(shard).call(&scripts::OUTBOX).of_items(most);
        call.arg(self.process())
            .arg(FORWARDING.as_millis() as u64)
            .arg(most)
            .arg(bytes)
            .arg(u8::from(all_or_none));
        call
    }

    /// Extends this process's ownership of the outbox, because it is still publishing.
    pub async fn keep_outbox(&self, shard: &ShardId) -> Result<()> {
        self.ask_outbox(shard, 0, 0, false)
            .run(&mut self.conn())
            .await?;
        Ok(())
    }

    /// Removes entries that are on the bus now. Returns how many are left.
    pub async fn forwarded(&self, shard: &ShardId, entries: &[OutboxEntry]) -> Result<usize> {
        let value = self
            .ask_forwarded(shard, entries)
            .run(&mut self.conn())
            .await?;
        self.note_work(shard);
        number(Some(value))
    }

    fn ask_forwarded(&self, shard: &ShardId, entries: &[OutboxEntry]) -> Call {
        let bytes: usize = entries.iter().map(|entry| entry.bytes).sum();
        let mut call = self
            .reach(shard)
            .call(&scripts::FORWARDED)
            .of_items(entries.len());
        call.arg(self.wake_channel())
            .arg(shard.queue.as_str())
            .arg(OUTBOX_FULL)
            .arg(OUTBOX_FULL_BYTES);
        call.arg(self.process()).arg(bytes);
        for entry in entries {
            call.arg(&entry.id);
        }
        call
    }

    // --- open and closed

    /// The generation of each shard in Redis, in order; `None`: never opened, or lost.
    pub async fn generations(&self, shards: &[ShardId]) -> Result<Vec<Option<u64>>> {
        let mut generations = Vec::with_capacity(shards.len());
        for shards in shards.chunks(KEYS_AT_ONCE) {
            let keys: Vec<_> = shards
                .iter()
                .map(|shard| keys::generation(self.prefix(), shard))
                .collect();
            let some: Vec<Option<u64>> = redis::cmd("MGET")
                .arg(keys)
                .query_async(&mut self.conn())
                .await?;
            generations.extend(some);
        }
        Ok(generations)
    }

    /// Opens a shard in this generation, unless it has this one or a later one already. In the same
    /// step its state is emptied, except for the outbox, and records of `pipeline` up to `offset`
    /// count as enqueued.
    pub async fn open_shard(
        &self,
        shard: &ShardId,
        generation: u64,
        topic_generation: &str,
        offset: Option<Offset>,
    ) -> Result<()> {
        self.open_held(shard, generation, topic_generation, offset, &[])
            .await
    }

    /// Opens a shard that Redis has lost, as [`Self::open_shard`] does. Those of these holds that
    /// are of its limit keys count from the first step on.
    pub async fn open_held(
        &self,
        shard: &ShardId,
        generation: u64,
        topic_generation: &str,
        offset: Option<Offset>,
        holds: &[LimitHold],
    ) -> Result<()> {
        self.open(shard, generation, topic_generation, offset, holds)
            .await
    }

    /// Removes all keys of a shard in which nothing has happened for `idle`.
    pub async fn close_shard(&self, shard: &ShardId, idle: Duration) -> Result<Closing> {
        let value = self
            .call(&scripts::CLOSE, shard, 1, |call| {
                call.arg(ms(idle));
            })
            .await?;
        Ok(match numbers(value, 2)?[..] {
            [-1, generation] => Closing::Closed(unsigned(generation)),
            [-2, _] => Closing::InUse,
            [left, _] => Closing::In(Duration::from_millis(unsigned(left))),
            _ => return Err(Error::Answer("not two numbers".into())),
        })
    }
}
