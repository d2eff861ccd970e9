//! What is asked of the queue, and what it answers.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::shard::Notes;
use super::{Error, Result};
use crate::model::{LeaseToken, Offset, Priority, ShardId, TaskId, WorkerName};

/// A task to enqueue, as it stood on `pipeline`.
#[derive(Clone, Debug)]
pub struct EnqueueTask {
    pub offset: Offset,
    pub id: TaskId,
    pub replicas: u32,
    /// 0: at once.
    pub not_before_unix_ms: i64,
    /// Of `wire::body_blob`.
    pub body: Bytes,
    /// Workers that SQL has credited already.
    pub credited: Vec<String>,
}

/// Tasks of one shard, in the order of the partition.
#[derive(Clone, Debug)]
pub struct Enqueue<'a> {
    pub topic_generation: &'a str,
    /// The epoch that the owner of the partition took.
    pub epoch: u64,
    /// The record of this queue that was enqueued before these, if this reader knows it.
    pub predecessor: Option<Offset>,
    /// How far the partition was read for this queue when all of these are dealt with.
    pub upto: Offset,
    pub tasks: &'a [EnqueueTask],
    pub high_water_tasks: u64,
    pub high_water_bytes: u64,
    /// Live tasks of the shard at which it is full, whatever they wait for.
    pub live_tasks_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// So many of the tasks were dealt with, in order; the queue is full for the next one, if there is one.
    Done { dealt_with: usize, added: usize },
    /// Redis fell back behind the predecessor: read the partition again from behind this.
    Behind(Option<Offset>),
    /// The partition has another owner, who came with this epoch. Nothing was changed.
    Fenced(u64),
}

/// What a worker asks of one shard.
#[derive(Clone, Debug)]
pub struct Claim {
    pub worker: WorkerName,
    pub max_tasks: usize,
    pub max_bytes: usize,
    /// The caller has nothing yet: one task is granted whatever it weighs.
    pub is_first: bool,
    /// Instead of the tasks' own.
    pub lease: Option<Duration>,
    /// Only tasks of this priority; `None`: by the shard's own turn.
    pub priority: Option<Priority>,
}

/// One lease.
#[derive(Clone, Debug)]
pub struct Leased {
    pub id: TaskId,
    pub token: LeaseToken,
    /// Of `wire::body_blob`.
    pub body: Bytes,
    pub expires_unix_ms: i64,
}

/// Leases of a shard that reached nobody.
pub(super) type Undelivered = (ShardId, Vec<HandBack>);

/// The answer to a claim.
#[derive(Debug)]
pub struct Granted {
    pub tasks: Vec<Leased>,
    /// The scan ended at its bound: ask again before waiting.
    pub more: bool,
    pub delivery: Delivery,
}

impl Granted {
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.tasks.iter().map(|task| task.body.len()).sum()
    }

    /// The tasks, taken as delivered.
    pub fn deliver(self) -> Vec<Leased> {
        self.delivery.delivered();
        self.tasks
    }
}

/// Leases on their way to their worker. Dropped before [`Delivery::delivered`], it gives them back at no cost: nobody has seen them.
/// A process that dies in between costs nothing either: the lease runs out, and its grant is known as undelivered.
#[derive(Debug)]
pub struct Delivery {
    pub(super) worker: WorkerName,
    pub(super) leases: Vec<(TaskId, LeaseToken)>,
    pub(super) shard: ShardId,
    pub(super) notes: Arc<Notes>,
    pub(super) release: mpsc::UnboundedSender<Undelivered>,
}

impl Delivery {
    /// The worker has them: their failures count from now on.
    pub fn delivered(mut self) {
        if let Some((_, token)) = self.leases.first() {
            self.notes.note_delivered(token.grant);
        }
        self.leases.clear();
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let worker = &self.worker;
        let back = self.leases.drain(..).map(|(id, token)| {
            let how = How::Release;
            HandBack { id, token, worker: worker.clone(), how, reason: String::new() }
        });
        // The receiver is gone only when the process ends; the leases run out then.
        drop(self.release.send((self.shard.clone(), back.collect())));
    }
}

/// A completion of one task.
#[derive(Clone, Debug)]
pub struct Completion {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    /// An encoded `pb::Report`; the time is added when it is forwarded.
    pub report: Bytes,
}

/// How a lease is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// One failure; again after the backoff, or after this.
    Retry(Option<Duration>),
    /// As many failures as one replica may have.
    Never,
    /// No failure: the worker never got it. Offered again at once.
    Release,
}

/// A lease that is given back.
#[derive(Clone, Debug)]
pub struct HandBack {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    pub how: How,
    pub reason: String,
}

#[derive(Clone, Debug)]
pub struct Extension {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    pub by: Duration,
}

/// The scripts' answer to one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Ok,
    /// OK, and it had been before: nothing was changed.
    Repeat,
    LeaseLost,
    AlreadyCompleted,
    UnknownTask,
    Cancelled,
}

impl Code {
    pub(super) fn from_number(number: i64) -> Result<Self> {
        Ok(match number {
            1 => Self::Ok,
            2 => Self::Repeat,
            3 => Self::LeaseLost,
            4 => Self::AlreadyCompleted,
            5 => Self::UnknownTask,
            6 => Self::Cancelled,
            other => return Err(Error::Answer(format!("code {other}"))),
        })
    }
}

/// What the watchdog's step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expired {
    pub expired: u64,
    pub dead: u64,
    /// Leases whose grant never reached its worker: given back at no cost.
    pub undelivered: u64,
    pub more: bool,
    pub next_unix_ms: Option<i64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promoted {
    pub promoted: u64,
    pub more: bool,
    pub next_unix_ms: Option<i64>,
}

/// How a shard stands; see `lua/stats.lua`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tasks with something left to hand out.
    pub open: u64,
    pub leases: u64,
    pub delayed: u64,
    pub live: u64,
    pub waiting_bytes: u64,
    pub outbox: u64,
    pub finals: u64,
    pub oldest_created_unix_ms: Option<i64>,
    pub ahead: u64,
}

/// What there is to do in a shard; see `lua/look.lua`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Nothing stands here at all.
    pub is_idle: bool,
    pub expires: bool,
    pub promotes: bool,
    /// Until the next lease or delay ends.
    pub next: Option<Duration>,
    /// Elements beyond the tasks that have something left.
    pub spent: u64,
    /// Workers whose pointers are kept.
    pub pointers: u64,
    pub outbox: u64,
    pub settles: bool,
    pub live: u64,
}

/// A record as `lua/inspect.lua` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inspected {
    pub status: RecordStatus,
    pub replicas: u32,
    pub credited: u32,
    pub held: u32,
    pub failures: u32,
    pub waiting: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordStatus {
    Live,
    Completed,
    Dead,
    Cancelled,
}

/// An entry of a shard's outbox: what one call of a script reported.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxEntry {
    /// The stream's id.
    pub id: String,
    pub at_unix_ms: i64,
    pub events: Vec<Event>,
    /// As the scripts count them.
    pub bytes: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// An encoded `pb::Report` without its time.
    Completed(Bytes),
    Expired {
        id: TaskId,
        worker: String,
        attempts: u32,
        dead: bool,
    },
    Died {
        id: TaskId,
        attempts: u32,
        reason: String,
        /// The last failures, the earliest first.
        history: Vec<Failure>,
    },
}

/// One failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub at_unix_ms: i64,
    pub worker: String,
    pub reason: String,
}

/// The outcome of an attempt to close a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// It has no keys any more; it was in this life.
    Closed(u64),
    /// Something is there.
    InUse,
    /// Nothing is there. It may be closed after this time, if nothing happens.
    In(Duration),
}
