//! Own limits of limit keys: what this process knows of them, and how shards learn them.
//!
//! SQL has them, and each process with limits per key keeps a copy. A shard that opens gets them in
//! the step that opens it, so that nothing starts against them; a change is pushed to the shards
//! that are open. Every process does both, so that none depends on the process that an operator
//! called.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use futures::future::join_all;
use redis::Value;
use serde::Serialize;
use tokio::time::timeout;

use super::{
    error::{Error, Result},
    shards::Shards,
    wire::{bytes, items, list, number, packed, text},
};
use crate::{
    model::{
        ALL_LIMIT_KEYS, ChangedLimits, LIMIT_HASH_BYTES, LimitHold, LimitKeyState, OwnValues,
        QueueName, ShardId, limit_hash, limit_partition,
    },
    redis_pool::{Call, scripts},
};

/// The changes of one script call.
const CHANGES_AT_ONCE: usize = 1000;
/// How many shards are told at once. Many, because one that does not answer keeps the others
/// waiting for [`TOLD_WITHIN`], and changes that come meanwhile.
const SHARDS_AT_ONCE: usize = 1000;
/// How long a shard may keep the others waiting. Then it is told in the next round.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// How long a change waits for the shards to know it. By then the processes that live know it, too.
const AWAITED: Duration = Duration::from_secs(1);

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
    /// -1: nothing starts.
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

/// The entry of an idle limit key that a worker holds, as `lua/lib/limits.lua` stores it. Its next
/// start, -1, is for the script to say.
fn held_entry(hold: &LimitHold) -> impl Serialize {
    let leased = "";
    let offered = "";
    let next = -1;
    let waiting = 0;
    let turn = 0;
    let asked = 0;
    let asked_until = 0;
    // An empty line ends before it begins.
    let (first, last) = (0, -1);
    (
        leased,
        offered,
        next,
        hold.until_unix_ms,
        waiting,
        turn,
        first,
        last,
        first,
        last,
        first,
        last,
        asked,
        asked_until,
    )
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

    /// Forgets all own limits, because SQL was set back.
    pub fn forget_limits(&self) {
        self.limits().own.write().forget();
    }

    /// Waits until somebody asks for own limits to be read at once.
    pub async fn limits_asked(&self) {
        self.limits().ask_own.notified().await;
    }

    /// Has own limits read at once, and waits until all open shards know this version, but not
    /// long: one that does not answer is told later.
    pub async fn await_limits(&self, version: u64) {
        let limits = self.limits();
        let mut told = limits.told_own.subscribe();
        limits.ask_own.notify_one();
        timeout(AWAITED, told.wait_for(|told| *told >= version))
            .await
            .map(drop)
            .ok();
    }

    /// Notes shards that may not know all own limits: a process that did not know them may have
    /// opened them, or Redis may have lost them.
    pub fn note_unsure_of_limits(&self, shards: impl IntoIterator<Item = ShardId>) {
        let limits = self.limits();
        // Nobody would tell them.
        if !limits.is_any() {
            return;
        }
        let is_any = {
            let mut own = limits.own.write();
            own.note_unsure(shards);
            own.is_any_unsure()
        };
        if is_any {
            limits.ask_own.notify_one();
        }
    }

    /// Notes the version that a shard shows.
    pub(super) fn note_shown_limits(&self, shard: &ShardId, version: u64) {
        let limits = self.limits();
        if limits.own.write().has_forgotten(shard, version) {
            limits.ask_own.notify_one();
        }
    }

    /// Takes the shards that know a later version than this process did when it told them, each
    /// with that version. SQL has reached it, or was set back.
    pub fn shards_ahead(&self) -> HashMap<ShardId, u64> {
        self.limits().own.write().take_ahead()
    }

    /// Lets a shard that knows this version forget the own limits that this process does not know,
    /// and all versions. It has to be told all of them after that.
    pub async fn keep_only_known_limits(&self, shard: &ShardId, version: u64) -> Result<()> {
        let mut known = self.limits().own.read().of_shard(shard);
        known.retain(|change| !change.is_cleared);
        let asked = self.call(&scripts::OWN_LIMITS, shard, 1 + known.len(), |call| {
            call.arg("only").arg(version).arg("");
            for change in &known {
                call.arg(hash_of(change));
            }
        });
        match asked.await {
            Err(Error::NoGeneration) => Ok(()),
            answer => {
                answer?;
                self.limits().own.write().note_told(shard, 0);
                self.offered(shard);
                self.limits().note_start(shard, self.clock().now_unix_ms());
                Ok(())
            }
        }
    }

    /// Tells all open shards these changes, which must be all after the version `from` up to
    /// `upto`. A shard that has missed some, or may have, gets all that this process knows. One
    /// that cannot be told now is told in the next call. Returns why that is, of one such shard.
    pub async fn push_limits(
        &self,
        changes: &[ChangedLimits],
        from: u64,
        upto: u64,
    ) -> Option<Error> {
        let unsure = self.limits().own.write().take_unsure();
        let (of_all, of_changes): (Vec<_>, Vec<_>) = self
            .shards()
            .into_iter()
            .partition(|shard| unsure.contains(shard));
        let mut failed = HashSet::new();
        let mut failure = None;
        let mut tell = async |shards: &[ShardId], is_sure: bool| {
            for shards in shards.chunks(SHARDS_AT_ONCE) {
                let told = shards.iter().map(|shard| async move {
                    let tell = async {
                        match is_sure {
                            true => self.push_changes(shard, changes, from, upto).await,
                            false => self.push_all(shard).await,
                        }
                    };
                    match timeout(TOLD_WITHIN, tell).await {
                        Ok(told) => told,
                        Err(_) => Err(Error::Silent),
                    }
                });
                for (shard, told) in shards.iter().zip(join_all(told).await) {
                    if let Err(error) = told {
                        failed.insert(shard.clone());
                        failure = Some(error);
                    }
                }
            }
        };
        // What did not answer before keeps no other from its limits.
        tell(&of_changes, true).await;
        tell(&of_all, false).await;
        let limits = self.limits();
        match failed.is_empty() {
            true => drop(limits.told_own.send_replace(upto)),
            false => limits.own.write().note_unsure(failed),
        }
        failure
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

    async fn push_all(&self, shard: &ShardId) -> Result<()> {
        let (changes, version) = {
            let known = self.limits().own.read();
            (known.of_shard(shard), known.version)
        };
        self.push_to(shard, &changes, 0, version).await.map(drop)
    }

    /// Returns false if the shard has missed changes up to `from`. One without a generation is an
    /// error: it gets own limits when it opens, but perhaps from a process that does not know them
    /// all.
    async fn push_to(
        &self,
        shard: &ShardId,
        changes: &[ChangedLimits],
        mut from: u64,
        version: u64,
    ) -> Result<bool> {
        let limits = self.reach(shard).limits_of(&shard.queue);
        let mut chunks: Vec<&[ChangedLimits]> = changes.chunks(CHANGES_AT_ONCE).collect();
        // Ask each shard once, because SQL may have been set back and have none any more.
        if chunks.is_empty() && !limits.is_empty() && !self.limits().own.read().has_asked(shard) {
            chunks.push(&[]);
        }
        let mut chunks = chunks.into_iter().peekable();
        while let Some(chunk) = chunks.next() {
            let upto = match chunks.peek() {
                Some(_) => chunk.last().map_or(0, |change| change.version),
                None => version,
            };
            let asked = self.call(&scripts::OWN_LIMITS, shard, chunk.len(), |call| {
                call.arg(from).arg(upto).arg(&limits[..]);
                for change in chunk {
                    argue(call, change);
                }
            });
            let mut answer = items(asked.await?)?.into_iter();
            let done: i64 = number(answer.next())?;
            let next: i64 = number(answer.next())?;
            let known: u64 = number(answer.next())?;
            let mut own = self.limits().own.write();
            own.note(shard, known, version);
            if done < 0 {
                return Ok(false);
            }
            own.note_told(
                shard,
                if chunk.is_empty() {
                    known
                } else {
                    known.max(upto)
                },
            );
            drop(own);
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
                let at = self.clock().now_unix_ms() + next;
                self.limits().note_start(shard, at);
            }
        }
        Ok(true)
    }

    /// Adds the own limits of a shard, and those of these holds that are of its limit keys, to the
    /// call that opens it.
    pub(super) fn argue_own_limits(&self, shard: &ShardId, holds: &[LimitHold], call: &mut Call) {
        let known = self.limits().own.read();
        let mut changes = known.of_shard(shard);
        changes.retain(|change| !change.is_cleared);
        let partitions = known.partitions.max(1);
        let now = self.clock().now_unix_ms();
        let holds = holds.iter().filter(|hold| {
            hold.until_unix_ms > now && limit_partition(&hold.hash, partitions) == shard.number
        });
        if !changes.is_empty() {
            let of_keys = changes
                .iter()
                .filter(|change| change.limits.limit_key != ALL_LIMIT_KEYS);
            call.arg("o").arg(packed(&(known.version, of_keys.count())));
        }
        for change in &changes {
            let field = match hash_of(change) {
                hash if hash.is_empty() => b"o*".to_vec(),
                hash => [&hash[..], b"o"].concat(),
            };
            call.arg(field).arg(packed(&stored(&change.limits.values)));
        }
        for hold in holds {
            call.arg(&hold.hash[..]).arg(packed(&held_entry(hold)));
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
