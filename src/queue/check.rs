//! Checks of a shard against itself, slice by slice (`lua/check.lua`, `check_order.lua`,
//! `check_task.lua`, `recount.lua`).

use redis::Value;

use super::{
    error::{Error, Result},
    shards::Shards,
    wire::{bytes, items, list, number, text},
};
use crate::{
    model::{FindKind, ShardId, TaskId},
    redis_pool::scripts,
};

/// The most elements that a call passes in the lanes and in the list of final records: some 20 ms.
const PASSED: usize = 1_000_000;

/// A part of a shard that is checked slice by slice.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    Records,
    Leases,
    Delayed,
    Bodies,
    /// The entries of limit keys.
    Limits,
    /// The pointers of a lane, from 1 to 6.
    Pointers(usize),
}

impl Part {
    fn name(self) -> String {
        match self {
            Self::Records => "records".into(),
            Self::Leases => "leases".into(),
            Self::Delayed => "delayed".into(),
            Self::Bodies => "bodies".into(),
            Self::Limits => "limits".into(),
            Self::Pointers(lane) => lane.to_string(),
        }
    }
}

/// A difference within a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardFind {
    pub kind: FindKind,
    pub task: Option<TaskId>,
    pub says: String,
}

/// The state of a task whose record, if it has one, can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// Live, with a replica to claim; its newest offer.
    Open(u64),
    Live,
    Final,
}

/// The findings of a slice.
#[derive(Debug)]
pub struct Slice {
    pub finds: Vec<ShardFind>,
    /// Only for records and bodies.
    pub tasks: Vec<CheckedTask>,
    /// `None` after the last slice. The same cursor again if the slice has more to repair than one
    /// call may.
    pub next: Option<String>,
}

/// A task of a slice.
#[derive(Debug)]
pub struct CheckedTask {
    pub id: TaskId,
    pub state: Checked,
    /// How many entries in `:finals` earlier ends of the task left there.
    pub past_ends: u64,
}

/// The findings among tasks that were checked again.
#[derive(Debug)]
pub struct Confirmed {
    /// How many of the tasks were handled, counted from the first. The others are to be asked for
    /// again.
    pub dealt_with: usize,
    /// How many of these tasks the call could not decide, because the shard is too large.
    pub untold: u64,
    /// About how many elements of lanes and of the list of final records the call passed.
    pub passed: u64,
    pub finds: Vec<ShardFind>,
}

/// Why a task is checked again, by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Suspicion {
    /// SQL shows it final, or behind others of its sequence.
    Ended,
    /// The list of final records had it.
    Listed,
    /// No lane had its newest offer.
    Missing,
    /// A lane had it twice.
    Twice,
    /// The list of final records did not have it.
    Unlisted,
}

impl Suspicion {
    fn letter(self) -> char {
        match self {
            Self::Ended => 'e',
            Self::Listed => 'l',
            Self::Missing => 'm',
            Self::Twice => 't',
            Self::Unlisted => 'u',
        }
    }
}

/// A page of a lane, or of the list of final records.
#[derive(Debug)]
pub struct OrderPage {
    /// Tasks with their offers.
    pub listed: Vec<(TaskId, u64)>,
    pub next: Option<u64>,
}

impl Shards {
    /// Checks a slice, and repairs what it finds if `mends`.
    pub async fn check(
        &self,
        shard: &ShardId,
        part: Part,
        cursor: &str,
        most: usize,
        mends: bool,
    ) -> Result<Slice> {
        let answer = self.call(&scripts::CHECK, shard, most, |call| {
            call.arg(part.name())
                .arg(cursor)
                .arg(most)
                .arg(u8::from(mends))
                .arg(PASSED);
        });
        let mut answer = items(answer.await?)?.into_iter();
        let next = text(answer.next())?;
        let finds = finds(answer.next())?;
        let mut tasks = Vec::new();
        let mut fields = list(answer.next())?.into_iter();
        while let Some(id) = fields.next() {
            let Some(id) = task(&bytes(Some(id))?) else {
                continue;
            };
            let state = text(fields.next())?;
            let offer = number(fields.next())?;
            let past_ends = number(fields.next())?;
            let state = match state.as_str() {
                "o" => Checked::Open(offer),
                "l" => Checked::Live,
                _ => Checked::Final,
            };
            tasks.push(CheckedTask {
                id,
                state,
                past_ends,
            });
        }
        let again = number::<u8>(answer.next())? == 1;
        Ok(Slice {
            finds,
            tasks,
            next: (again || next != "0").then_some(next),
        })
    }

    /// Returns a page of a lane, from 1 to 6, or of the list of final records, 0.
    pub async fn check_order(
        &self,
        shard: &ShardId,
        lane: usize,
        from: u64,
        most: usize,
    ) -> Result<OrderPage> {
        let answer = self.call(&scripts::CHECK_ORDER, shard, most, |call| {
            call.arg(lane).arg(from).arg(most);
        });
        let mut answer = items(answer.await?)?.into_iter();
        let next = number::<i64>(answer.next())?;
        let mut listed = Vec::new();
        let mut fields = list(answer.next())?.into_iter();
        while let (Some(id), Some(offer)) = (fields.next(), fields.next()) {
            listed.extend(task(&bytes(Some(id))?).zip(Some(number(Some(offer))?)));
        }
        Ok(OrderPage {
            listed,
            next: u64::try_from(next).ok(),
        })
    }

    /// Checks tasks again, each by itself, and repairs what it finds if `mends`. Handles at least
    /// one.
    pub async fn check_tasks(
        &self,
        shard: &ShardId,
        tasks: &[(TaskId, Suspicion)],
        mends: bool,
    ) -> Result<Confirmed> {
        let why: String = tasks
            .iter()
            .map(|(_, suspicion)| suspicion.letter())
            .collect();
        let answer = self.call(&scripts::CHECK_TASK, shard, tasks.len(), |call| {
            call.arg(u8::from(mends)).arg(PASSED).arg(why);
            for (id, _) in tasks {
                call.arg(id.as_bytes());
            }
        });
        let mut answer = items(answer.await?)?.into_iter();
        Ok(Confirmed {
            dealt_with: number(answer.next())?,
            untold: number(answer.next())?,
            passed: number(answer.next())?,
            finds: finds(answer.next())?,
        })
    }

    /// Counts a shard again, if it has at most this many records. Returns `None` if it has more, or
    /// damaged ones.
    pub async fn recount(
        &self,
        shard: &ShardId,
        most: usize,
        mends: bool,
    ) -> Result<Option<Vec<ShardFind>>> {
        let answer = self.call(&scripts::RECOUNT, shard, 1, |call| {
            call.arg(u8::from(mends)).arg(most);
        });
        let mut answer = items(answer.await?)?.into_iter();
        if number::<u8>(answer.next())? == 0 {
            return Ok(None);
        }
        let mut wrong = Vec::new();
        let mut fields = list(answer.next())?.into_iter();
        while let Some(name) = fields.next() {
            let name = text(Some(name))?;
            let is = text(fields.next())?;
            let right = text(fields.next())?;
            let says = format!("the counter {name} is {is}, and should be {right}");
            wrong.push(ShardFind {
                kind: FindKind::WrongCounter,
                task: None,
                says,
            });
        }
        Ok(Some(wrong))
    }

    /// Returns everything that the shard holds, decoded for people; at most this many entries of
    /// each key.
    pub async fn dump(&self, shard: &ShardId, most: usize) -> Result<serde_json::Value> {
        let answer = self.call(&scripts::DUMP, shard, 1, |call| {
            call.arg(most);
        });
        let packed = bytes(Some(answer.await?))?;
        rmp_serde::from_slice(&packed)
            .map_err(|error| Error::Answer(format!("a dump that cannot be read: {error}")))
    }
}

/// Returns `None` for the key of an entry that belongs to no task.
fn task(id: &[u8]) -> Option<TaskId> {
    TaskId::from_slice(id)
}

fn finds(value: Option<Value>) -> Result<Vec<ShardFind>> {
    let mut finds = Vec::new();
    let mut fields = list(value)?.into_iter();
    while let Some(kind) = fields.next() {
        let kind = text(Some(kind))?;
        let known = FindKind::ALL
            .iter()
            .copied()
            .find(|known| known.as_str() == kind);
        let kind = known.ok_or_else(|| Error::Answer(format!("a find of the kind {kind:?}")))?;
        let task = task(&bytes(fields.next())?);
        // A damaged entry may have any bytes.
        let says = String::from_utf8_lossy(&bytes(fields.next())?).into_owned();
        finds.push(ShardFind { kind, task, says });
    }
    Ok(finds)
}
