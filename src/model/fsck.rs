//! The differences that fsck finds between SQL, the bus and Redis, and within Redis.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{QueueName, ShardId, TaskId};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal: $mend:literal,)*) => {
        /// The kind of a difference.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum FindKind {
            $($(#[$doc])* $kind,)*
        }

        impl FindKind {
            pub const ALL: &'static [Self] = &[$(Self::$kind),*];

            /// The name of the kind in answers, metrics and logs.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }

            /// How a repair fixes it.
            pub fn mend(self) -> &'static str {
                match self {
                    $(Self::$kind => $mend,)*
                }
            }
        }
    };
}

kinds! {
    /// A worker holds a replica without a lease, so that nothing will ever end that.
    HeldWithoutLease = "held_without_lease": "gives it a lease that begins now",
    /// A lease on a replica that nobody holds.
    LeaseWithoutHolder = "lease_without_holder": "removes the lease",
    /// A replica in backoff, or a task that is not due, that nothing will ever offer.
    WaitsWithoutDelay = "waits_without_delay": "offers the replica now, or publishes a task before its time again",
    /// An entry of `delayed` that nothing waits for.
    DelayWithoutTask = "delay_without_task": "removes the entry",
    /// A live record without a body.
    LostPayload = "lost_payload": "removes the task from Redis and publishes it again from SQL",
    /// The body of a final task, or an entry of `bodies` that belongs to no task.
    BodyWithoutTask = "body_without_task": "removes the body",
    UnreadableRecord = "unreadable_record": "removes the task from Redis and publishes it again from SQL",
    /// A replica can be claimed, but no lane has an element with the newest offer.
    OpenWithoutElement = "open_without_element": "adds an element to its lane",
    ElementTwice = "element_twice": "spends the earlier one",
    /// A final record that is missing in the list of final records.
    FinalNotListed = "final_not_listed": "adds it to the list",
    LiveAmongFinals = "live_among_finals": "takes it off the list",
    PointerOutOfRange = "pointer_out_of_range": "removes the pointer, which is only a cursor",
    /// A limit key counts a lease that is not there.
    LimitWithoutLease = "limit_without_lease": "counts it no more",
    /// A limit key counts an offered task of which no replica can be claimed.
    LimitWithoutOffer = "limit_without_offer": "counts it no more",
    /// Tasks wait behind a limit key that may start them, and nothing wakes it.
    LimitAsleep = "limit_asleep": "releases what may start",
    /// A shard has a wrong counter.
    WrongCounter = "wrong_counter": "writes the right number",
    /// The task is final in SQL, or waits there behind others of its sequence, but Redis offers it.
    EndedAndLive = "ended_and_live": "removes the task from Redis",
    /// SQL has the task as published and its offset has been read, but Redis has neither its record
    /// nor its body.
    LostTask = "lost_task": "publishes it again",
    /// An unfinished task that is neither on the bus nor in the outbox.
    StrandedTask = "stranded_task": "publishes it",
    /// A sequence whose first task is finished or gone, although others wait.
    BrokenSequence = "broken_sequence": "lets the first task that waits go on, and counts the others",
    /// The row of a tree differs from its tasks, or the tree waits for nothing and is open.
    WrongTree = "wrong_tree": "counts its tasks again, and ends it if it waits for nothing",
    /// An open execution of a workflow for which no step, timer or row of its inbox is left.
    StrandedExecution = "stranded_execution": "looks at its steps again",
    /// SQL has a wrong count of unfinished tasks.
    WrongQueueCount = "wrong_queue_count": "writes the right number",
}

impl Serialize for FindKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

// A finding: a difference, and whether it was repaired.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[schemars(rename = "FsckFind")]
pub struct Find {
    #[schemars(with = "String")]
    pub kind: FindKind,
    #[schemars(with = "QueueName")]
    pub queue: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskId>,
    pub says: String,
    // How a repair fixes it.
    repair: &'static str,
    pub mended: bool,
}

impl Find {
    pub fn new(
        kind: FindKind,
        queue: String,
        shard: Option<u32>,
        task: Option<TaskId>,
        says: String,
        mended: bool,
    ) -> Self {
        Self {
            kind,
            queue,
            shard,
            task,
            says,
            repair: kind.mend(),
            mended,
        }
    }
}

/// A request to check some of the data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fsck {
    /// Empty for all queues.
    pub queue: String,
    /// Repair the findings.
    pub repair: bool,
    /// Where the previous answer ended, or empty for the beginning.
    pub cursor: String,
}

/// The differences that one part of the check found.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct FsckPage {
    pub finds: Vec<Find>,
    // These are repaired like the others.
    /// The number of further findings, which do not fit into the answer.
    pub more: u64,
    // Happens if the shard is too large, or if too much is wrong.
    /// Suspected tasks that this part could not check a second time.
    pub unchecked: u64,
    /// Shards that Redis cannot serve. Some or all of their tasks are unchecked.
    #[serde(serialize_with = "unchecked_shards")]
    #[schemars(with = "Vec<UncheckedShard<'_>>")]
    pub unchecked_shards: BTreeMap<ShardId, String>,
    // The number of shards that this part checked completely, and of published tasks that it
    // compared with Redis.
    pub shards: u64,
    pub tasks: u64,
    // Where the next part begins. Absent if this was the last part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

#[derive(JsonSchema, Serialize)]
struct UncheckedShard<'a> {
    queue: &'a QueueName,
    shard: u32,
    /// The reason.
    says: &'a str,
}

fn unchecked_shards<S: Serializer>(
    shards: &BTreeMap<ShardId, String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(shards.iter().map(|(shard, says)| UncheckedShard {
        queue: &shard.queue,
        shard: shard.number,
        says,
    }))
}
