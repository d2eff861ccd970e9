//! One task as its shard knows it, and why a worker may not get it (`lua/explain.lua`).

use redis::Value;

use super::{
    calls::LEASES_AT_FULL_MEMORY,
    error::{Error, Result},
    shards::Shards,
    types::{Inspected, OUTBOX_FULL, OUTBOX_FULL_BYTES, RecordStatus},
    wire::{bytes, items, list, number, record_status, stored_offset, text},
};
use crate::{
    model::{Failure, Offset, Priority, ShardId, TaskId, WorkerName},
    redis_pool::scripts,
};

/// The most elements of a lane that are searched for the task.
const LOOKED_AT: usize = 20_000;

/// The shard and the task in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// Redis's clock.
    pub now_unix_ms: i64,
    /// The shard's stored offset with its topic generation.
    pub stored: Option<(String, Offset)>,
    /// Entries of the shard's outbox.
    pub outbox: usize,
    pub outbox_bytes: usize,
    /// Leases of the shard.
    pub leases: usize,
    /// `None` if Redis has no record of the task.
    pub record: Option<ExplainedRecord>,
}

/// The task's record, and its place in its lane.
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainedRecord {
    pub status: RecordStatus,
    pub replicas: u32,
    pub failures: u32,
    /// Replicas that wait for their time or their backoff.
    pub waiting: u32,
    /// 0 if live.
    pub final_unix_ms: i64,
    /// The task's epoch.
    pub epoch: u32,
    pub credited: Vec<String>,
    pub held: Vec<TaskLease>,
    /// When the replicas that wait are due.
    pub due_unix_ms: Vec<i64>,
    /// The last failures, the earliest first.
    pub log: Vec<Failure>,
    /// Why the worker may not get the task.
    pub bar: Option<Ineligibility>,
    /// The only worker that may get it, and until when.
    pub reserved: Option<(String, i64)>,
    /// How many elements of its priority a claim meets before the task's. `None` if it has none, or
    /// is farther away than [`LOOKED_AT`].
    pub before: Option<u64>,
    /// How many of `before` the worker has yet to pass.
    pub before_worker: Option<u64>,
    /// The task waits behind its limit key.
    pub limit: Option<BehindLimit>,
}

/// What a task waits for behind its limit key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BehindLimit {
    /// Leases of the limit key.
    pub leased: u64,
    /// How many there may be; -1: an operator lets nothing start.
    pub at_a_time: i64,
    /// When time alone lets the next one start. May be over.
    pub next_start_unix_ms: i64,
    /// Tasks of the limit key before it. `None`: more than [`LOOKED_AT`].
    pub before: Option<u64>,
    /// An operator gave own limits to the limit key, or to all of the queue.
    pub has_own_limits: bool,
}

/// A lease of the task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskLease {
    pub worker: String,
    pub expires_unix_ms: Option<i64>,
    /// Whether taskd knows that the worker has it.
    pub is_delivered: bool,
    /// When it was claimed; `None` if it was extended, or has another length than the task's own.
    pub since_unix_ms: Option<i64>,
}

/// Why a worker may not get a task, by `bar` of `lua/lib/record.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ineligibility {
    /// The task is over.
    Final,
    /// The worker has completed it.
    Completed,
    /// The worker holds a replica.
    Holds,
    /// The worker has failed it as often as it may, or an operator took the task from it.
    Refused,
    /// The task is reserved for another worker.
    Reserved,
    /// The time of the task has not come.
    Scheduled,
    /// All replicas that are left wait for their backoff.
    Backoff,
    /// Other workers hold all replicas that are left.
    Leased,
    /// The worker gave the task back a moment ago, and others come first.
    Rests,
}

/// Why a shard gives nothing to any worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The shard's outbox is full: the bus takes no reports.
    Outbox,
    /// Redis has no memory left, and enough leases are out.
    Memory,
}

impl Explained {
    /// Returns why the shard gives nothing to any worker now. `claim.lua` gets the same limits.
    pub fn pause(&self, is_memory_full: bool) -> Option<Pause> {
        if self.outbox >= OUTBOX_FULL || self.outbox_bytes >= OUTBOX_FULL_BYTES {
            return Some(Pause::Outbox);
        }
        (is_memory_full && self.leases >= LEASES_AT_FULL_MEMORY).then_some(Pause::Memory)
    }
}

impl ExplainedRecord {
    /// The counts of the record.
    pub fn inspected(&self) -> Inspected {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Inspected {
            status: self.status,
            replicas: self.replicas,
            credited: count(self.credited.len()),
            held: count(self.held.len()),
            failures: self.failures,
            waiting: self.waiting,
            epoch: self.epoch,
        }
    }
}

impl Shards {
    /// Returns one task of the shard, as it is for this worker, or for one that never had it.
    pub async fn explain(
        &self,
        shard: &ShardId,
        id: TaskId,
        priority: Priority,
        worker: Option<&WorkerName>,
    ) -> Result<Explained> {
        let answer = self.call(&scripts::EXPLAIN, shard, 1, |call| {
            call.arg(id.as_bytes())
                .arg(worker.map_or("", WorkerName::as_str))
                .arg(priority as u8)
                .arg(LOOKED_AT);
        });
        let mut answer = items(answer.await?)?.into_iter();
        Ok(Explained {
            now_unix_ms: number(answer.next())?,
            stored: stored_offset(&text(answer.next())?),
            outbox: number(answer.next())?,
            outbox_bytes: number(answer.next())?,
            leases: number(answer.next())?,
            record: match answer.next() {
                Some(Value::Int(0)) => None,
                other => Some(record(other)?),
            },
        })
    }
}

fn record(value: Option<Value>) -> Result<ExplainedRecord> {
    let mut fields = list(value)?.into_iter();
    Ok(ExplainedRecord {
        status: record_status(fields.next())?,
        replicas: number(fields.next())?,
        failures: number(fields.next())?,
        waiting: number(fields.next())?,
        final_unix_ms: number(fields.next())?,
        epoch: number(fields.next())?,
        credited: list(fields.next())?
            .into_iter()
            .map(|name| text(Some(name)))
            .collect::<Result<_>>()?,
        held: groups(fields.next(), |[worker, deadline, undelivered, began]| {
            let time = |value| number(Some(value)).map(|at| Some(at).filter(|at| *at >= 0));
            let is_delivered = number::<u8>(Some(undelivered))? == 0;
            let expires_unix_ms = time(deadline)?;
            let since_unix_ms = time(began)?;
            Ok(TaskLease {
                worker: text(Some(worker))?,
                expires_unix_ms,
                is_delivered,
                since_unix_ms,
            })
        })?,
        due_unix_ms: list(fields.next())?
            .into_iter()
            .map(|at| number(Some(at)))
            .collect::<Result<_>>()?,
        log: groups(fields.next(), |[at, worker, reason]| {
            Ok(Failure {
                at_unix_ms: number(Some(at))?,
                worker: lossy(worker)?,
                reason: lossy(reason)?,
            })
        })?,
        bar: ineligibility(&text(fields.next())?)?,
        before: number::<i64>(fields.next())?.try_into().ok(),
        before_worker: number::<i64>(fields.next())?.try_into().ok(),
        reserved: match &list(fields.next())?[..] {
            [worker, until] => Some((text(Some(worker.clone()))?, number(Some(until.clone()))?)),
            _ => None,
        },
        limit: match &list(fields.next())?[..] {
            [leased, at_a_time, next_start, before, own] => Some(BehindLimit {
                leased: number(Some(leased.clone()))?,
                at_a_time: number(Some(at_a_time.clone()))?,
                next_start_unix_ms: number(Some(next_start.clone()))?,
                before: number::<i64>(Some(before.clone()))?.try_into().ok(),
                has_own_limits: number::<i64>(Some(own.clone()))? != 0,
            }),
            _ => None,
        },
    })
}

/// Reads a flat list of groups of values.
fn groups<const N: usize, T>(
    value: Option<Value>,
    read: impl Fn([Value; N]) -> Result<T>,
) -> Result<Vec<T>> {
    let values = list(value)?;
    let groups = values
        .chunks_exact(N)
        .filter_map(|group| <[Value; N]>::try_from(group.to_vec()).ok());
    groups.map(read).collect()
}

/// Reads a text that may have been cut inside a character.
fn lossy(value: Value) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(Some(value))?).into_owned())
}

fn ineligibility(text: &str) -> Result<Option<Ineligibility>> {
    Ok(Some(match text {
        "" => return Ok(None),
        "final" => Ineligibility::Final,
        "completed" => Ineligibility::Completed,
        "holds" => Ineligibility::Holds,
        "refused" => Ineligibility::Refused,
        "reserved" => Ineligibility::Reserved,
        "scheduled" => Ineligibility::Scheduled,
        "backoff" => Ineligibility::Backoff,
        "leased" => Ineligibility::Leased,
        "rests" => Ineligibility::Rests,
        other => return Err(Error::Answer(format!("a bar {other:?}"))),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_pauses_at_the_bounds_of_a_claim() {
        let shard = |outbox, outbox_bytes, leases| Explained {
            now_unix_ms: 0,
            stored: None,
            outbox,
            outbox_bytes,
            leases,
            record: None,
        };
        assert_eq!(
            shard(OUTBOX_FULL - 1, OUTBOX_FULL_BYTES - 1, 1000).pause(false),
            None
        );
        assert_eq!(shard(OUTBOX_FULL, 0, 0).pause(false), Some(Pause::Outbox));
        assert_eq!(
            shard(0, OUTBOX_FULL_BYTES, 0).pause(false),
            Some(Pause::Outbox)
        );
        assert_eq!(shard(0, 0, LEASES_AT_FULL_MEMORY - 1).pause(true), None);
        assert_eq!(
            shard(0, 0, LEASES_AT_FULL_MEMORY).pause(true),
            Some(Pause::Memory)
        );
    }
}
