//! The queue in Redis: which tasks wait, which worker holds each of the others and until when, and
//! which workers were credited for them.
//!
//! Each step that moves a task is one atomic script of `lua/`. This module names the keys, calls the
//! scripts, and combines the calls of many callers into few exchanges with Redis.
//!
//! Each user has a type with the operations that it needs: the fanout has an [`Enqueuer`], the tasks
//! service a [`WorkerQueue`], the watchdog and the forwarder an [`Upkeep`]. All of them share the
//! [`Shards`] of the process. `shard_cache.rs` is what a process remembers of a shard, `wakes.rs`
//! wakes callers that wait for tasks, `announce` tells watchers what happens to tasks, and
//! `session_notices.rs` carries messages about sessions, `published.rs` those about topics.

mod allotments;
mod announce;
mod books;
mod calls;
mod change;
mod check;
mod claimed;
mod combiner;
mod deadline;
mod deliveries;
mod delivery;
mod enqueue;
mod error;
mod explain;
mod fence;
mod history;
mod holders;
pub mod keys;
mod known_limits;
mod limits;
mod own_limits;
mod pauses;
mod pausing;
mod published;
mod riding;
mod session;
mod session_notices;
mod shard;
mod shard_cache;
mod shards;
mod shared;
mod snapshot;
mod starts;
mod stats;
mod types;
mod upkeep;
mod wake_message;
mod wakes;
mod wire;
mod worker;

use std::ops::Deref;

use uuid::Uuid;

pub use self::{
    allotments::Allotment,
    announce::{Announcer, Full, Interest, QueueWatch, TooSlow, Watch, WatcherNews},
    books::Holding,
    change::{Arbitrated, ArbitratedTasks, Changer, NEVER},
    check::{Checked, CheckedTask, Confirmed, OrderPage, Part, ShardFind, Slice, Suspicion},
    delivery::{Delivery, Granted},
    enqueue::Enqueuer,
    error::{Error, Result},
    explain::{BehindLimit, Explained, ExplainedRecord, Ineligibility, Pause, TaskLease},
    fence::Fence,
    history::History,
    holders::LeaseHolders,
    limits::QueueLimits,
    own_limits::{LimitKey, LimitKeys},
    published::{Heard, PublishedTopics, Told},
    session::{EndedLease, LeaseEnd, Started},
    session_notices::SessionNotice,
    shard::Shard,
    shards::{Offers, Shards},
    shared::{
        SESSION_SLOTS, SharedCalled, SharedDue, SharedHold, SharedLimits, SharedNoted, SharedNotes,
        SharedOpened, SharedSession, SharedWish, WORKER_SESSIONS, shared_keys,
    },
    snapshot::ShardSnapshot,
    stats::Stats,
    types::{
        Claim, Closing, Code, Completion, Enqueue, EnqueueTask, Enqueued, Event, Expired,
        Extension, Inspected, Leased, OUTBOX_FULL, OUTBOX_FULL_BYTES, OutboxEntry, Promoted,
        RecordStatus, RejectMode, Rejection, Source,
    },
    upkeep::{CrowdMarks, FailedRound, Failing, Finals, LookFor, Swept, Uncrowded, Upkeep},
    wakes::{Batons, Listening, Waiter, Wakes},
    worker::WorkerQueue,
};
use crate::{
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
};

/// The queue as one process has it. Cheap to clone.
#[derive(Clone)]
pub struct Queue {
    pub shards: Shards,
    pub enqueuer: Enqueuer,
    pub worker: WorkerQueue,
    pub upkeep: Upkeep,
}

impl Deref for Queue {
    type Target = Shards;

    fn deref(&self) -> &Shards {
        &self.shards
    }
}

impl Queue {
    pub fn new(redis: Redis) -> Self {
        Self::of_process(redis, Uuid::new_v4().to_string())
    }

    /// `process` is a name that no other living process has. A process with the name of a dead one
    /// takes over its leases.
    pub fn of_process(redis: Redis, process: String) -> Self {
        Self::with_clock(redis, process, Clock::of_this_machine())
    }

    /// Redis's own clock decides, until a test moves `clock`.
    pub fn with_clock(redis: Redis, process: String, clock: Clock) -> Self {
        let shards = Shards::new(redis, process, clock);
        let enqueuer = Enqueuer(shards.clone());
        let worker = WorkerQueue(shards.clone());
        Self {
            enqueuer,
            worker,
            upkeep: Upkeep(shards.clone()),
            shards,
        }
    }

    /// Listens for what is put into queues. Workers' calls depend on it, and loops leave out shards
    /// of which nothing is heard.
    pub fn start_listening(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("wakes", self.shards.clone(), |of, cx| async move {
            of.listen(&cx).await
        });
        supervisor.spawn_loop("limits", self.upkeep.clone(), |of, cx| async move {
            of.promote_in_time(&cx).await
        });
        supervisor.spawn_loop("topics/told", self.shards.clone(), |of, cx| async move {
            of.tell_published(&cx).await
        });
        let of = || self.announcer().clone();
        supervisor.spawn_loop("announcements", of(), |of, cx| async move {
            of.publish(&cx).await
        });
        supervisor.spawn_loop("announcements/watched", of(), |of, cx| async move {
            of.keep_wanted(&cx).await
        });
        supervisor.spawn_loop("announcements/heard", of(), |of, cx| async move {
            of.listen(&cx).await
        });
    }
}
