//! Own limits of limit keys: what this process knows of them, and how shards learn them.
//!
//! SQL has them, and each process with limits per key keeps a copy. A shard that opens gets them in
//! the step that opens it, so that nothing starts against them; a change is pushed to the shards
//! that are open. Every process does both, so that none depends on the process that an operator
//! called.

use futures::future::join_all;
use redis::Value;

use super::{
    error::{Error, Result},
    shards::Shards,
    wire::{bytes, items, list, number, packed, text},
};
use crate::{
    model::{
        ALL_LIMIT_KEYS, ChangedLimits, LIMIT_HASH_BYTES, LimitKeyState, OwnValues, QueueName,
        ShardId, limit_hash, limit_partition,
    },
    redis_pool::{Call, scripts},
};

/// The changes of one script call.
const CHANGES_AT_ONCE: usize = 1000;
/// How many shards are told at once.
const SHARDS_AT_ONCE: usize = 16;

fn failures(shards: &[ShardId], told: Vec<Result<()>>) -> impl Iterator<Item = (ShardId, Error)> {
    let failed = shards.iter().zip(told);
    failed.filter_map(|(shard, told)| told.err().map(|error| (shard.clone(), error)))
}

/// A limit key as its shard has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitKey {
    pub hash: Vec<u8>,
    /// Empty if the shard has no task that tells it.
    pub name: String,
    pub leased: u64,
    /// Tasks that wait, those in lanes included.
    pub waiting: u64,
    /// When time alone lets the next task start. May be over.
    pub next_start_unix_ms: i64,
    /// Until when nothing starts. May be over.
    pub hold_until_unix_ms: i64,
    /// -1: nothing starts; 0: any number.
    pub at_a_time: i64,
    /// The time between two starts; 0: none.
    pub pace_ms: u64,
    pub burst: u32,
}

/// A page of limit keys of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitKeys {
    /// Where the next page begins.
    pub next: Option<u64>,
    pub keys: Vec<LimitKey>,
    pub now_unix_ms: i64,
}

/// The hash by which `lua/lib/limits.lua` names the limit key; empty for all of them.
fn hash_of(change: &ChangedLimits) -> Vec<u8> {
    let limits = &change.limits;
    match limits.limit_key.as_str() {
        ALL_LIMIT_KEYS => Vec::new(),
        key => limit_hash(&limits.queue, key).to_vec(),
    }
}

/// Own limits as the scripts store them.
fn stored(values: &OwnValues) -> (i64, i64, u32, i64) {
    let pace = values.pace.map(|pace| pace.interval_ms());
    (
        values.at_a_time.map_or(-1, i64::from),
        pace.map_or(-1, |ms| i64::try_from(ms).unwrap_or(i64::MAX)),
        values.burst.unwrap_or(0),
        values.hold_until_unix_ms.unwrap_or(0),
    )
}

/// How long own limits keep a key from starting, at most (ms).
fn longest(values: &OwnValues, now_unix_ms: i64) -> i64 {
    let (_, pace, burst, hold) = stored(values);
    let pace = pace.max(0).saturating_mul(i64::from(burst.max(1)));
    pace.max(hold - now_unix_ms)
}

impl Shards {
    /// Tells among how many partitions limit keys are distributed.
    pub fn set_limit_partitions(&self, partitions: u32) {
        self.limits().own.write().partitions = partitions;
    }

    /// The version up to which this process knows own limits.
    pub fn limits_version(&self) -> u64 {
        self.limits().own.read().version
    }

    /// Takes over changes that were read up to this version.
    pub fn learn_limits(&self, changes: &[ChangedLimits], version: u64) {
        let now = self.clock().now_unix_ms();
        self.limits().own.write().learn(changes, version, now);
    }

    /// Tells all open shards these changes, which must be all after the version `from` up to
    /// `upto`. A shard that has missed some gets all that this process knows; one that has no
    /// generation gets them when it opens.
    /// Returns the shards that were not told.
    pub async fn push_limits(
        &self,
        changes: &[ChangedLimits],
        from: u64,
        upto: u64,
    ) -> Vec<(ShardId, Error)> {
        let mut failed = Vec::new();
        for shards in self.shards().chunks(SHARDS_AT_ONCE) {
            let told = shards
                .iter()
                .map(|shard| self.push_changes(shard, changes, from, upto));
            failed.extend(failures(shards, join_all(told).await));
        }
        failed
    }

    async fn push_changes(
        &self,
        shard: &ShardId,
        changes: &[ChangedLimits],
        from: u64,
        upto: u64,
    ) -> Result<()> {
        let of_shard: Vec<_> = {
            let known = self.limits().own.read();
            let of_shard = changes.iter().filter(|change| known.is_in(change, shard));
            of_shard.cloned().collect()
        };
        if !self.push_to(shard, &of_shard, from, upto).await? {
            self.push_all(shard).await?;
        }
        Ok(())
    }

    /// Tells shards all that this process knows, because a process that did not know it may have
    /// opened them, or Redis may have lost it. Returns the shards that were not told.
    pub async fn push_all_limits(&self, shards: &[ShardId]) -> Vec<(ShardId, Error)> {
        let mut failed = Vec::new();
        for shards in shards.chunks(SHARDS_AT_ONCE) {
            let told = shards.iter().map(|shard| self.push_all(shard));
            failed.extend(failures(shards, join_all(told).await));
        }
        failed
    }

    async fn push_all(&self, shard: &ShardId) -> Result<()> {
        let (changes, version) = {
            let known = self.limits().own.read();
            (known.of_shard(shard), known.version)
        };
        self.push_to(shard, &changes, 0, version).await.map(drop)
    }

    /// Returns false if the shard has missed changes up to `from`.
    async fn push_to(
        &self,
        shard: &ShardId,
        changes: &[ChangedLimits],
        mut from: u64,
        version: u64,
    ) -> Result<bool> {
        let mut chunks = changes.chunks(CHANGES_AT_ONCE).peekable();
        while let Some(chunk) = chunks.next() {
            let upto = match chunks.peek() {
                Some(_) => chunk.last().map_or(0, |change| change.version),
                None => version,
            };
            let limits = self.reach(shard).limits_of(&shard.queue);
            let asked = self.call(&scripts::OWN_LIMITS, shard, chunk.len(), |call| {
                call.arg(from).arg(upto).arg(limits);
                for change in chunk {
                    argue(call, change);
                }
            });
            let answer = match asked.await {
                Err(Error::NoGeneration) => return Ok(true),
                answer => items(answer?)?,
            };
            let mut answer = answer.into_iter();
            let done: i64 = number(answer.next())?;
            let next: i64 = number(answer.next())?;
            if done < 0 {
                return Ok(false);
            }
            from = upto;
            if done == 0 {
                continue;
            }
            self.offered(shard);
            self.note_due(shard);
            let concerns_all = chunk
                .iter()
                .any(|change| change.limits.limit_key == ALL_LIMIT_KEYS);
            if concerns_all {
                // Promote tells all keys.
                self.limits().note_start(shard, self.clock().now_unix_ms());
            } else if next >= 0 {
                self.limits().note_start(shard, next);
            }
        }
        Ok(true)
    }

    /// Adds the own limits of a shard to the call that opens it.
    pub(super) fn argue_own_limits(&self, shard: &ShardId, call: &mut Call) {
        let known = self.limits().own.read();
        let mut changes = known.of_shard(shard);
        changes.retain(|change| !change.is_cleared);
        if changes.is_empty() {
            return;
        }
        let now = self.clock().now_unix_ms();
        let longest = changes
            .iter()
            .map(|change| longest(&change.limits.values, now))
            .max();
        call.arg(longest.unwrap_or(0).max(0));
        let of_keys = changes
            .iter()
            .filter(|change| change.limits.limit_key != ALL_LIMIT_KEYS);
        call.arg("o").arg(packed(&(known.version, of_keys.count())));
        for change in &changes {
            let field = match hash_of(change) {
                hash if hash.is_empty() => b"o*".to_vec(),
                hash => [&hash[..], b"o"].concat(),
            };
            call.arg(field).arg(packed(&stored(&change.limits.values)));
        }
    }

    /// Reads a page of the limit keys of a shard that are in this state, from `cursor` on.
    pub async fn limit_keys(
        &self,
        shard: &ShardId,
        state: LimitKeyState,
        cursor: u64,
        looked_at: usize,
    ) -> Result<LimitKeys> {
        let value = self
            .call(&scripts::LIMIT_KEYS, shard, 1, |call| {
                call.arg(cursor).arg(looked_at).arg(state.as_str());
            })
            .await?;
        read_keys(value)
    }

    /// Reads one limit key, even if its shard has nothing of it.
    pub async fn limit_key(&self, queue: &QueueName, limit_key: &str) -> Result<Option<LimitKey>> {
        let shard = self.shard_of_limit_key(queue, limit_key);
        let hash: [u8; LIMIT_HASH_BYTES] = limit_hash(queue, limit_key);
        let value = self
            .call(&scripts::LIMIT_KEYS, &shard, 1, |call| {
                call.arg("").arg(0).arg("").arg(hash.to_vec());
            })
            .await;
        match value {
            Err(Error::NoGeneration) => Ok(None),
            value => Ok(read_keys(value?)?.keys.pop()),
        }
    }

    fn shard_of_limit_key(&self, queue: &QueueName, limit_key: &str) -> ShardId {
        let partitions = self.limits().own.read().partitions.max(1);
        ShardId {
            queue: queue.clone(),
            number: limit_partition(&limit_hash(queue, limit_key), partitions),
        }
    }
}

/// Adds a change as `lua/own_limits.lua` takes it.
fn argue(call: &mut Call, change: &ChangedLimits) {
    let values = &change.limits.values;
    let (at_a_time, pace, burst, hold) = stored(values);
    let replaces_hold = values.hold_until_unix_ms.is_some();
    call.arg(hash_of(change)).arg(packed(&(
        change.version,
        u8::from(change.is_cleared),
        u8::from(replaces_hold),
        at_a_time,
        pace,
        burst,
        hold,
    )));
}

fn read_keys(value: Value) -> Result<LimitKeys> {
    let mut answer = items(value)?.into_iter();
    let next: u64 = text(answer.next())?
        .parse()
        .map_err(|_| Error::Answer("no cursor".into()))?;
    let now_unix_ms = number(answer.next())?;
    let mut keys = Vec::new();
    for key in answer {
        let mut values = list(Some(key))?.into_iter();
        let hash = bytes(values.next())?.to_vec();
        let name = String::from_utf8_lossy(&bytes(values.next())?).into_owned();
        let leased = number(values.next())?;
        let offered: u64 = number(values.next())?;
        let behind: u64 = number(values.next())?;
        keys.push(LimitKey {
            hash,
            name,
            leased,
            waiting: offered + behind,
            next_start_unix_ms: number(values.next())?,
            hold_until_unix_ms: number(values.next())?,
            at_a_time: number(values.next())?,
            pace_ms: number(values.next())?,
            burst: number(values.next())?,
        });
    }
    Ok(LimitKeys {
        next: Some(next).filter(|next| *next > 0),
        keys,
        now_unix_ms,
    })
}
