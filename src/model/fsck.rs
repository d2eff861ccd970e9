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

            /// The step by which a repair mends it.
            pub fn mend(self) -> &'static str {
                match self {
                    $(Self::$kind => $mend,)*
                }
            }
        }
    };
}

kinds! {
    /// A worker holds a replica, and no lease ends that.
    HeldWithoutLease = "held_without_lease": "gives it a lease that begins now",
    /// A lease on a replica that nobody holds.
    LeaseWithoutHolder = "lease_without_holder": "removes the lease",
    /// A replica in backoff, or a task before its time, that nothing will offer.
    WaitsWithoutDelay = "waits_without_delay": "offers the replica now, or publishes a task before its time again",
    /// An entry of `delayed` that nothing waits for.
    DelayWithoutTask = "delay_without_task": "removes the entry",
    /// A live record without a body.
    LostPayload = "lost_payload": "removes the task from Redis and publishes it again from SQL",
    /// The body of a final task, or a field of `bodies` that belongs to no task.
    BodyWithoutTask = "body_without_task": "removes the body",
    UnreadableRecord = "unreadable_record": "removes the task from Redis and publishes it again from SQL",
    /// A replica can be claimed, and no lane has an element of the newest offer.
    OpenWithoutElement = "open_without_element": "adds an element to its lane",
    ElementTwice = "element_twice": "spends the earlier one",
    /// A final record that the list of final records lacks.
    FinalNotListed = "final_not_listed": "adds it to the list",
    LiveAmongFinals = "live_among_finals": "takes it off the list",
    PointerOutOfRange = "pointer_out_of_range": "removes the pointer, which is only a cursor",
    /// A counter of a shard.
    WrongCounter = "wrong_counter": "writes the right number",
    /// SQL shows the task final, and Redis offers it.
    EndedAndLive = "ended_and_live": "removes the task from Redis",
    /// SQL shows the task published, the offset has passed, and Redis has neither its record nor
    /// its body.
    LostTask = "lost_task": "publishes it again",
    /// An unfinished task that is neither on the bus nor in the outbox.
    StrandedTask = "stranded_task": "publishes it",
    /// A count of unfinished tasks in SQL.
    WrongQueueCount = "wrong_queue_count": "writes the right number",
}

impl Serialize for FindKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

// A difference.
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
    // By which step a repair mends it.
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

/// A request to check a part of what there is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fsck {
    /// Empty: all queues.
    pub queue: String,
    /// Mend what is found.
    pub repair: bool,
    /// Where the answer before ended; empty: at the beginning.
    pub cursor: String,
}

/// The differences that a part of the check found.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct FsckPage {
    pub finds: Vec<Find>,
    // They are mended like the others.
    /// Finds beyond those, which an answer has no room for.
    pub more: u64,
    // The shard is too large, or too much is wrong.
    /// Suspected tasks that this part could not look at again.
    pub unchecked: u64,
    /// Shards that Redis cannot serve. Some of their tasks, or all, are not checked.
    #[serde(serialize_with = "unchecked_shards")]
    #[schemars(with = "Vec<UncheckedShard<'_>>")]
    pub unchecked_shards: BTreeMap<ShardId, String>,
    // The shards that this part checked to their end, and the published tasks that it compared
    // with Redis.
    pub shards: u64,
    pub tasks: u64,
    // Where the next part begins; absent: this was the last one.
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
