//! Requests to the queue, and its answers.

use std::{
    ops::{Deref, Range},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;

use super::{
    error::{Error, Result},
    fence::Fence,
};
use crate::model::{
    Failure, LeaseNumber, LeaseToken, LimitReport, Offset, Priority, TaskId, WorkerName,
};

/// Entries and bytes in a shard's outbox at which claims and expiries pause.
pub const OUTBOX_FULL: usize = 10_000;
pub const OUTBOX_FULL_BYTES: usize = 64 << 20;

/// A task to enqueue, as `pipeline` contains it.
#[derive(Clone, Debug)]
pub struct EnqueueTask {
    /// Its offset on the bus.
    pub offset: Offset,
    pub id: TaskId,
    pub replicas: u32,
    /// 0 for at once.
    pub not_before_unix_ms: i64,
    /// As `wire::body_blob` encodes it.
    pub body: Bytes,
    /// Workers that SQL has credited already.
    pub credited: Vec<String>,
    /// How often the task was sent again.
    pub epoch: u32,
}

/// Tasks of one shard, in their order.
#[derive(Clone, Debug)]
pub struct Enqueue<'a> {
    pub source: Source<'a>,
    pub tasks: &'a [EnqueueTask],
    pub high_water_tasks: u64,
    pub high_water_bytes: u64,
    /// How many live tasks, whatever they wait for, make the shard full.
    pub live_tasks_max: u64,
}

/// Where tasks to enqueue come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A partition of `pipeline`.
    Partition {
        topic_generation: &'a str,
        /// The epoch that the owner of the partition took.
        epoch: u64,
        /// The offset of the last record of this queue before these, if this reader knows it.
        predecessor: Option<Offset>,
        /// How far the partition has been read for this queue when all of these tasks are handled.
        upto: Offset,
        /// One of these tasks may have come before.
        again: bool,
    },
    /// SQL, where they were stored after the moment at which the shard had this fence. None was
    /// ever on the bus.
    Store(&'a Fence),
    /// SQL, where they waited because the queue was full or they were crowded. They were read, unfinished, after the
    /// moment at which the shard had this fence. The queue may have any of them.
    Waiting(&'a Fence),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Enqueued {
    /// The first `dealt_with` tasks were handled. If there are more, the queue is full for the next
    /// one.
    Done {
        dealt_with: usize,
        added: usize,
        /// The places of those that are crowded: enough of their limit keys are in the shard. The
        /// caller puts them into SQL before the offset passes them; if there are any, the call has
        /// stored none.
        crowded: Vec<usize>,
    },
    /// Tasks from SQL came with another fence than the shard's, which is this one. Nothing was
    /// changed.
    Moved(Fence),
    /// Redis was set back to before the predecessor: read the partition again, beginning after this
    /// offset.
    Behind(Option<Offset>),
    /// The partition has another owner, with this epoch. Nothing was changed.
    Fenced(u64),
}

/// A request of a worker to one shard.
#[derive(Clone, Debug)]
pub struct Claim {
    pub worker: WorkerName,
    pub max_tasks: usize,
    pub max_bytes: usize,
    /// The caller has nothing yet: it gets one task even if that exceeds `max_bytes`.
    pub is_first: bool,
    /// The length of the leases, instead of the tasks' own.
    pub lease: Option<Duration>,
    /// Only tasks of this priority; `None` to let the shard choose by its own turn.
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
    /// The length of the lease.
    pub lease: Duration,
}

/// A completion of one task.
#[derive(Clone, Debug)]
pub struct Completion {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    /// An encoded `pb::Report`; the time is added when it is forwarded.
    pub report: Bytes,
    pub limit: LimitReport,
}

/// Completions of one caller that go in one call.
#[derive(Clone)]
pub(super) struct Together {
    all: Arc<[Completion]>,
    part: Range<usize>,
}

impl Together {
    /// Splits the completions into parts, each with its weight. A large report weighs as much as
    /// several, so that an outbox entry stays below some 16 MiB.
    pub(super) fn parts(all: &Arc<[Completion]>, max_weight: usize) -> Vec<(Self, usize)> {
        let mut parts = Vec::new();
        let mut start = 0;
        let mut weight = 0;
        let part = |part, weight| {
            (
                Self {
                    all: Arc::clone(all),
                    part,
                },
                weight,
            )
        };
        for (place, completion) in all.iter().enumerate() {
            let own = 1 + completion.report.len() / (16 << 10);
            if place > start && weight + own > max_weight {
                parts.push(part(start..place, weight));
                start = place;
                weight = 0;
            }
            weight += own;
        }
        if start < all.len() {
            parts.push(part(start..all.len(), weight));
        }
        parts
    }
}

impl Deref for Together {
    type Target = [Completion];

    fn deref(&self) -> &[Completion] {
        &self.all[self.part.clone()]
    }
}

/// How many failures a rejection counts, and when the task is offered again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectMode {
    /// One failure; again after the backoff, or after this time.
    Retry(Option<Duration>),
    /// As many failures as one replica may have.
    Never,
    /// No failure: the lease was not delivered. Offered again at once.
    Release,
    /// No failure: the task is offered again after this time.
    PutOff(Duration),
    /// No failure: the worker has not started. Others may have the task at once, and this worker
    /// after this time.
    Rest(Duration),
}

impl RejectMode {
    /// Returns whether it counts no failure.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Release | Self::PutOff(_) | Self::Rest(_))
    }

    /// Returns whether the script offers the task again at once. A backoff of zero has the same
    /// effect, but is not known here.
    pub(super) fn is_at_once(self) -> bool {
        match self {
            Self::Retry(delay) => delay.is_some_and(|delay| delay.as_millis() == 0),
            Self::Never => false,
            Self::PutOff(delay) => delay.as_millis() == 0,
            Self::Release | Self::Rest(_) => true,
        }
    }
}

/// A lease that ends without a result.
#[derive(Clone, Debug)]
pub struct Rejection {
    pub id: TaskId,
    pub token: LeaseToken,
    pub worker: WorkerName,
    pub mode: RejectMode,
    pub reason: String,
    pub limit: LimitReport,
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
    /// The same as before: nothing was changed.
    Repeat,
    LeaseLost,
    AlreadyCompleted,
    UnknownTask,
    Cancelled,
    /// The report is about a limit key, and the task has none. Nothing was changed.
    NotLimited,
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
            7 => Self::NotLimited,
            other => return Err(Error::Answer(format!("code {other}"))),
        })
    }
}

/// The effects of one call of `lua/expire.lua`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expired {
    pub expired: u64,
    pub dead: u64,
    /// Leases whose grant never reached its worker: released at no cost.
    pub undelivered: u64,
    pub more: bool,
    pub next_unix_ms: Option<i64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promoted {
    pub promoted: u64,
    pub more: bool,
    pub next_unix_ms: Option<i64>,
    /// Redis's time; only a shard with limit keys tells it.
    pub now_unix_ms: Option<i64>,
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
    /// The task's epoch.
    pub epoch: u32,
}

impl Inspected {
    /// Returns whether the record shows how the task ended before it was sent again.
    pub fn is_past(&self, epoch: u32) -> bool {
        self.status != RecordStatus::Live && self.epoch < epoch
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordStatus {
    Live,
    Completed,
    Dead,
    Cancelled,
}

/// An entry of a shard's outbox: the reports of one call of a script.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxEntry {
    /// The stream's id.
    pub id: String,
    pub at_unix_ms: i64,
    pub events: Vec<Event>,
    /// Attempts that were rejected, encoded, without their time.
    pub failures: Vec<Bytes>,
    /// The size as the scripts count it.
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
        lease: LeaseNumber,
        /// When the lease was given; 0 if unknown.
        leased_unix_ms: i64,
    },
    Died {
        id: TaskId,
        attempts: u32,
        reason: String,
        /// The last failures, the earliest first.
        history: Vec<Failure>,
        /// The task's epoch.
        epoch: u32,
    },
}

/// The outcome of an attempt to close a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The shard has no keys any more. This was its last generation.
    Closed(u64),
    /// The shard has tasks, leases, records or reports.
    InUse,
    /// The shard is empty, and may be closed after this time if nothing happens.
    In(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{QueueName, ShardId};

    #[test]
    fn completions_go_together_up_to_a_weight() {
        let shard = ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        };
        let token = LeaseToken {
            shard,
            generation: 1,
            grant: 1,
            attempt: 1,
            leased_unix_ms: 0,
            trace: None,
        };
        let worker = WorkerName::new("w").unwrap();
        let of = |bytes: &usize| {
            let id = TaskId::new();
            let token = token.clone();
            let worker = worker.clone();
            let report = vec![0; *bytes].into();
            Completion {
                id,
                token,
                worker,
                report,
                limit: LimitReport::default(),
            }
        };
        let parts = |sizes: &[usize]| -> Vec<(usize, usize)> {
            let all: Arc<[Completion]> = sizes.iter().map(of).collect();
            let parts = Together::parts(&all, 10);
            let ids: Vec<TaskId> = parts
                .iter()
                .flat_map(|(part, _)| part.iter().map(|one| one.id))
                .collect();
            assert_eq!(
                ids,
                all.iter().map(|one| one.id).collect::<Vec<_>>(),
                "each once, in their order"
            );
            parts
                .into_iter()
                .map(|(part, weight)| (part.len(), weight))
                .collect()
        };
        assert_eq!(parts(&[]), []);
        assert_eq!(parts(&[0; 10]), [(10, 10)]);
        assert_eq!(parts(&[0; 11]), [(10, 10), (1, 1)]);
        assert_eq!(parts(&[0, 128 << 10, 0, 0]), [(2, 10), (2, 2)]);
        assert_eq!(
            parts(&[0, 1 << 20, 0]),
            [(1, 1), (1, 65), (1, 1)],
            "one goes, whatever it weighs"
        );
    }
}
