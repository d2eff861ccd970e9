//! For the watchdog, the forwarder and readers: what ran out of time, what is to be reported, how a shard stands.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;

use super::{
    Error, Expired, Inspected, Look, OutboxEntry, Promoted, Queue, Result, Stats, scripts, seed,
    shard::Notes,
    wire::{inspected, items, look, number, numbers, outbox_entry, packed_ms, task_id, text, unsigned},
};
use crate::model::{Offset, ShardId, TaskId};

/// How long a forwarder has a shard's outbox to itself. Entries that stand there longer: it has died, or the bus is away.
const FORWARDING: Duration = Duration::from_secs(3);

/// Entries and bytes in a shard's outbox at which claims and expiries pause.
pub const OUTBOX_FULL: usize = 10_000;
pub const OUTBOX_FULL_BYTES: usize = 64 << 20;

/// Shards that are asked at once.
const AT_ONCE: usize = 64;

/// What a look goes by.
#[derive(Clone, Copy, Debug)]
pub struct LookFor {
    /// A look of this process that is younger will do, where nothing has happened since.
    pub max_age: Duration,
    /// Age at which a final record is to be settled.
    pub grace: Duration,
    /// Of scheduled tasks.
    pub horizon: Duration,
}

impl Queue {
    /// Lists what there is to do in the shards that have a generation and in which something stands.
    pub async fn look(&self, look_for: LookFor) -> Vec<(ShardId, Result<Look>)> {
        let looks = self.awake().into_iter().map(|shard| async move {
            let look = self.look_at(&shard, look_for).await;
            (shard.id.clone(), look)
        });
        let looks = futures::stream::iter(looks).buffer_unordered(AT_ONCE);
        let is_there = |look: &Result<Look>| match look {
            Ok(look) => !look.is_idle,
            Err(error) => !matches!(error, Error::NoGeneration),
        };
        looks.filter(|(_, look)| futures::future::ready(is_there(look))).collect().await
    }

    async fn look_at(&self, shard: &Arc<Notes>, look_for: LookFor) -> Result<Look> {
        if let Some((mut seen, age)) = shard.seen(look_for.max_age) {
            // Time has passed since: what was due later may be due now.
            match seen.next.map(|next| next.checked_sub(age)) {
                Some(None) => {}
                Some(left) => {
                    seen.next = left;
                    return Ok(seen);
                }
                None => return Ok(seen),
            }
        }
        let touched = shard.touched();
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let value = self
            .call(&scripts::LOOK, &shard.id, 1, |call| {
                call.arg(ms(look_for.grace)).arg(ms(look_for.horizon));
            })
            .await?;
        let look = look(value)?;
        shard.saw(look, touched);
        Ok(look)
    }

    pub async fn expire(&self, shard: &ShardId, most: usize, backoff: &[Duration]) -> Result<Expired> {
        let value = self
            .call(&scripts::EXPIRE, shard, 1, |call| {
                call.arg(seed()).arg(self.wake_channel()).arg(shard.queue.as_str()).arg(packed_ms(backoff));
                call.arg(most).arg(OUTBOX_FULL).arg(OUTBOX_FULL_BYTES);
            })
            .await?;
        self.touch(shard);
        let n = numbers(value, 5)?;
        let next_unix_ms = (n[4] >= 0).then_some(n[4]);
        let (expired, dead, undelivered) = (unsigned(n[0]), unsigned(n[1]), unsigned(n[2]));
        Ok(Expired { expired, dead, undelivered, more: n[3] != 0, next_unix_ms })
    }

    /// Offers what is due. Nothing is scheduled farther away than `horizon`, unless a clock was set back.
    pub async fn promote(&self, shard: &ShardId, most: usize, horizon: Duration) -> Result<Promoted> {
        let horizon_ms = u64::try_from(horizon.as_millis()).unwrap_or(u64::MAX);
        let value = self
            .call(&scripts::PROMOTE, shard, 1, |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str()).arg(most).arg(horizon_ms);
            })
            .await?;
        self.touch(shard);
        let n = numbers(value, 3)?;
        Ok(Promoted { promoted: unsigned(n[0]), more: n[1] != 0, next_unix_ms: (n[2] >= 0).then_some(n[2]) })
    }

    /// Drops what is spent; answers how many elements left or moved.
    pub async fn sweep(&self, shard: &ShardId, most: usize) -> Result<u64> {
        let value = self
            .call(&scripts::SWEEP, shard, 1, |call| {
                call.arg(most);
            })
            .await?;
        number(Some(value))
    }

    pub async fn stats(&self, shard: &ShardId) -> Result<Stats> {
        let n = numbers(self.call(&scripts::STATS, shard, 1, |_| {}).await?, 9)?;
        Ok(Stats {
            open: unsigned(n[0]),
            leases: unsigned(n[1]),
            delayed: unsigned(n[2]),
            live: unsigned(n[3]),
            waiting_bytes: unsigned(n[4]),
            outbox: unsigned(n[5]),
            finals: unsigned(n[6]),
            oldest_created_unix_ms: (n[7] >= 0).then_some(n[7]),
            ahead: unsigned(n[8]),
        })
    }

    /// The shard's stored offset with its topic generation, and each task's record.
    pub async fn inspect(
        &self,
        shard: &ShardId,
        ids: &[TaskId],
    ) -> Result<(Option<(String, Offset)>, Vec<Option<Inspected>>)> {
        let value = self
            .call(&scripts::INSPECT, shard, ids.len(), |call| {
                for id in ids {
                    call.arg(id.as_bytes());
                }
            })
            .await?;
        let mut answer = items(value)?.into_iter();
        let stored = text(answer.next())?;
        let offset = stored.rsplit_once('/').and_then(|(topic, at)| Some((topic.to_owned(), at.parse().ok()?)));
        let records = answer.map(inspected).collect::<Result<Vec<_>>>()?;
        if records.len() != ids.len() {
            return Err(Error::Answer(format!("{} records for {} ids", records.len(), ids.len())));
        }
        Ok((offset, records))
    }

    /// Final records older than `grace`, the earliest first.
    pub async fn finals(&self, shard: &ShardId, grace: Duration, most: usize) -> Result<Vec<TaskId>> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let value = self
            .call(&scripts::FINALS, shard, 1, |call| {
                call.arg(grace_ms).arg(most);
            })
            .await?;
        items(value)?.into_iter().map(|id| task_id(Some(id))).collect()
    }

    /// Forgets those that are settled (`true`), in the order of [`Queue::finals`].
    pub async fn forget(&self, shard: &ShardId, settled: &[(TaskId, bool)]) -> Result<u64> {
        let value = self
            .call(&scripts::FORGET, shard, settled.len(), |call| {
                for (id, is_settled) in settled {
                    call.arg(id.as_bytes()).arg(u8::from(*is_settled));
                }
            })
            .await?;
        self.touch(shard);
        number(Some(value))
    }

    /// The first entries of the shard's outbox, at most so many and so many bytes, about; none while another process forwards them.
    pub async fn outbox(&self, shard: &ShardId, most: usize, bytes: usize) -> Result<Vec<OutboxEntry>> {
        let value = self
            .call(&scripts::OUTBOX, shard, most, |call| {
                call.arg(&self.0.process).arg(FORWARDING.as_millis() as u64).arg(most).arg(bytes);
            })
            .await?;
        items(value)?.into_iter().map(outbox_entry).collect()
    }

    /// Keeps the outbox to this process while it publishes.
    pub async fn keep_outbox(&self, shard: &ShardId) -> Result<()> {
        self.outbox(shard, 0, 0).await.map(drop)
    }

    /// Removes entries that stand on the bus now; answers how many are left.
    pub async fn forwarded(&self, shard: &ShardId, entries: &[OutboxEntry]) -> Result<usize> {
        let bytes: usize = entries.iter().map(|entry| entry.bytes).sum();
        let value = self
            .call(&scripts::FORWARDED, shard, entries.len(), |call| {
                call.arg(self.wake_channel()).arg(shard.queue.as_str()).arg(OUTBOX_FULL).arg(OUTBOX_FULL_BYTES);
                call.arg(&self.0.process).arg(bytes);
                for entry in entries {
                    call.arg(&entry.id);
                }
            })
            .await?;
        self.touch(shard);
        number(Some(value))
    }
}
