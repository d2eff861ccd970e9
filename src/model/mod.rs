//! Tasks, calls and reports as plain types that no wire protocol shapes. No I/O.

mod access;
mod backoff;
mod books;
mod bulk;
mod call;
mod causes;
mod changes;
mod depth_history;
mod events;
mod executions;
mod explain;
mod fsck;
mod history;
mod idempotency;
mod joins;
pub mod json;
mod letters;
mod limit_keys;
mod limit_report;
mod limits;
mod matching;
mod names;
mod presence;
mod records;
mod schema;
mod search;
mod sequences;
mod session;
mod shared;
mod shares;
mod status;
mod subscriptions;
mod task_tree;
mod text;
mod times;
mod token;
mod topics;
mod topology;
mod trace;
mod tree_settings;
mod trees;
mod unix_time;
pub mod validate;
mod ways;
mod workflows;

pub use access::{Access, AccessToken, Act, Role, Roles, Scope, Secret, SecretHash};
pub use backoff::{BACKOFF_BYTES, Backoff, BackoffKind, NewBackoff};
pub use books::{Books, BooksState, BusBacklog, QueueBooks, UnfinishedTasks};
pub use bulk::{
    BulkAction, BulkChange, BulkProgress, BulkState, ChangeTasks, ChosenTasks, TaskCount,
    TasksChanged,
};
pub use call::{
    Batch, Caller, Client, Completion, Extension, GetTasks, InsertAnswer, InsertStatus, Item,
    ItemAnswer, ItemStatus, Key, LeasedTask, NewJoin, NewTask, NotStored, OneQueue, Protocol,
    QueueView, RecordedDuration, RecordedValues, Rejection, TaskBody, TaskResult, TaskStatus,
    TaskView, UnreadableTask,
};
pub use causes::in_short;
pub use changes::{
    Change, ChangeKind, Changed, ChangingTask, OwnedTask, PausedQueue, Requeue, RequeueTasks,
    TaskAct, Update,
};
pub use depth_history::{DepthEntries, DepthEntry, DepthSpan, History, HistoryPoint, QueueDepths};
pub use events::{
    AwaitedTask, EventId, EventRecord, MOST_KEPT_TOGETHER, TaskEvent, WaitFor, WatchEnd, Watched,
};
pub use executions::{ExecutionId, ExecutionPages, ExecutionStatus, WorkflowVersion};
pub use explain::{
    ExplainTask, Explanation, LeaseView, RecordExplanation, RecordFate, RecordOfSubscription,
    TaskPlace, WorkerReason, WorkerView,
};
pub use fsck::{Find, FindKind, Fsck, FsckPage};
pub use history::{Attempt, AttemptState, FailedAttempt, TaskFile, began};
pub use idempotency::{Idempotency, MAX_IDEMPOTENCY_KEY_BYTES};
pub use joins::{Forked, Join, Joining, Part, subtree_id};
pub use letters::{
    ChangeLetters, ChosenLetters, DeadLetter, LetterCursor, LetterFilter, LetterKind, LetterPage,
    LetterPages, LetterReason, LetterReasons, LettersChanged, StoredLetter,
};
pub use limit_keys::{
    LimitKeyPage, LimitKeyPages, LimitKeyState, LimitKeyView, LimitsCleared, MOST_AT_A_TIME,
    OwnLimitsView, SetLimits, check_limit_key,
};
pub use limit_report::{LimitReport, MAX_LIMIT_REPORT};
pub use limits::{
    ALL_LIMIT_KEYS, AtATime, ChangedLimits, KeyLimits, LIMIT_HASH_BYTES, LimitBy, LimitFrom,
    LimitHash, LimitHold, MAX_LIMIT_KEY_BYTES, MaybePace, OwnLimits, OwnValues, Pace, limit_hash,
    limit_partition,
};
pub use matching::{MOST_MATCH_TERMS, Matching};
pub use names::{
    HTTP_QUEUE, InvalidName, QueueName, ShardId, SubscriptionName, TopicName, TopologyName,
    WorkerName,
};
pub use presence::{HeardWorker, Presence, SeenProcess, SeenWorker, SeenWorkers, WorkerCounts};
pub use records::{
    Completed, Died, DiscoveredTask, Expiration, Failure, PipelineTask, Report, What,
};
pub use schema::{Misfit, PayloadCheck, PayloadSchema};
pub use search::{TaskCursor, TaskFilter, TaskList, TaskPages};
pub use sequences::{
    MAX_SEQUENCE_BYTES, OnDead, SEQUENCE_HASH_BYTES, Sequence, SequenceHash, sequence_of_key,
};
pub use session::{
    FrameAnswer, Items, OpenSession, SessionClosing, SessionOpened, TaskdFrame, WorkerFrame,
};
pub use shared::{Pending, ReportTasks, SessionCall, SessionClosed, TasksReported, WantTasks};
pub use shares::{NoShare, Share, Shares};
pub use status::StoredStatus;
pub use subscriptions::{
    MOST_SUBSCRIPTIONS, Position, PositionKey, PositionMove, PositionView, PutSubscription,
    ReadCounts, ReadUpTo, SUBSCRIPTION_HEADERS, SeekTo, SequenceBy, Subscription, SubscriptionView,
    TopicPattern, derived_task_id, record_task_id,
};
pub use task_tree::TaskTree;
pub use text::{ECHO, escape_hidden, is_hidden, nearest, printable, shorten};
pub use times::deadline_passed;
pub use token::{InvalidToken, LeaseNumber, LeaseToken};
pub use topics::{
    MAX_ATTRIBUTES, MAX_ATTRIBUTES_BYTES, MOST_PUBLISHED, MOST_TOPIC_PARTITIONS, MOST_TOPICS,
    NewRecord, OWN_QUEUE, OwnTopic, PartitionOffsets, PublishStatus, Published, PutTopic, ReadFrom,
    ReadTopic, TEXT_MARK, Topic, TopicPage, TopicRecord, TopicSettings, TopicView, topic_of_users,
};
pub use topology::{
    Counted, EdgeView, Expected, FanOut, FeedAck, FeedCounts, FeedSettings, FeedSource, FeedView,
    MAX_TOPOLOGY_BYTES, MOST_TOPOLOGIES, Mistake, MoveTo, PendingAct, PendingRule, RedisList,
    RedisStream, Scripted, ScriptedAnswer, Stage, StageView, Topology, TopologyTest, TopologyView,
    feed_task_id,
};
pub use trace::{InvalidContext, LeaseTrace, SpanId, TraceContext, TraceId, is_traceparent};
pub use tree_settings::{FeedRef, NewTree, ThenTask, TreeOnDead, TreeSettings, TreeState};
pub use trees::{TreeEnd, TreeFile, TreeList, TreePages, TreeQueue, TreeView, TreeWait};
pub use unix_time::{Rfc3339, millis, now_unix_ms, to_rfc_3339};
use unix_time::{rfc_3339, some_rfc_3339};
pub use validate::TaskRules;
pub use ways::{MOST_LEVELS, Way};
pub use workflows::{
    ExecutionList, ExecutionSummary, ExecutionView, ExecutionWait, MAX_GIVEN_ID_BYTES, SummaryWait,
    WorkflowList, WorkflowView,
};

use std::{borrow::Cow, fmt, str::FromStr};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use uuid::{Timestamp, Uuid};

/// The maximum size of a task or a report, in bytes. Kafka records, MariaDB packets and MEDIUMBLOB
/// columns are limited to 16 MiB, including everything that is stored around the task.
pub const MAX_RECORD_BYTES: usize = 8 << 20;

/// The highest value of `max_replicas`.
pub const MAX_REPLICAS: u32 = 10_000;

/// A task's id: a UUIDv7, so that later ids sort later and land at the end of SQL's index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(pub Uuid);

/// The number of bits that directly follow the timestamp in a UUIDv7.
const PLACE_BITS: u8 = 12;

/// The id of a letter. For a dead task it is the task's id, for any other letter a hash of its
/// subject.
pub type LetterId = TaskId;

impl TaskId {
    /// Sorts before all tasks. [`Self::LAST`] sorts after them.
    pub const FIRST: Self = Self(Uuid::nil());
    pub const LAST: Self = Self(Uuid::max());

    /// A new id, by this machine's clock.
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// A new id with this timestamp. `place` orders the ids of one millisecond.
    pub fn at(unix_ms: i64, place: usize) -> Self {
        let ms = unix_ms.max(0).unsigned_abs();
        let nanos = u32::try_from(ms % 1000).unwrap_or(0) * 1_000_000;
        let place = place as u128 & ((1 << PLACE_BITS) - 1);
        Self(Uuid::new_v7(Timestamp::from_unix_time(
            ms / 1000,
            nanos,
            place,
            PLACE_BITS,
        )))
    }

    /// The smallest id with this timestamp.
    pub fn first_of(unix_ms: i64) -> Self {
        Self(
            uuid::Builder::from_unix_timestamp_millis(unix_ms.max(0).unsigned_abs(), &[0; 10])
                .into_uuid(),
        )
    }

    /// The id of the task that `worker` discovered, at position `index` in its report on `parent`.
    ///
    /// A redelivered report yields the same ids, so it creates no task twice. The id has the form
    /// of a UUIDv7: a timestamp, followed by bits of a hash instead of random ones.
    pub fn derived(parent: TaskId, worker: &str, index: u32, at_unix_ms: i64) -> Self {
        let hash = Sha256::new()
            .chain_update(parent.0.as_bytes())
            .chain_update(index.to_be_bytes())
            .chain_update(worker.as_bytes())
            .finalize();
        Self::of_hash(&hash.into(), at_unix_ms)
    }

    /// The id of a task that follows from `parts`: the same parts and time always yield it. It has
    /// the form of [`Self::derived`].
    pub fn derived_from(parts: &[&[u8]], at_unix_ms: i64) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            // The length keeps apart parts that are equal when they are joined.
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Self::of_hash(&hash.finalize().into(), at_unix_ms)
    }

    /// An id with this timestamp, and bits of a hash instead of random ones.
    fn of_hash(hash: &[u8; 32], at_unix_ms: i64) -> Self {
        let mut random = [0; 10];
        random.copy_from_slice(&hash[..10]);
        Self(
            uuid::Builder::from_unix_timestamp_millis(at_unix_ms.max(0).unsigned_abs(), &random)
                .into_uuid(),
        )
    }

    /// The task's creation time, as encoded in its id.
    pub fn created_unix_ms(&self) -> i64 {
        let [a, b, c, d, e, f, ..] = *self.as_bytes();
        i64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }

    /// Reads an id from the 16 bytes that Redis, SQL and the bus store.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        Uuid::from_slice(bytes).ok().map(Self)
    }

    /// The 16 bytes that [`Self::from_slice`] reads.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl Default for TaskId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TaskId {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// The priority of a task. SQL and Redis store the discriminants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Priority {
    High = 1,
    #[default]
    Medium = 2,
    Low = 3,
}

impl Priority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 3] = [Self::High, Self::Medium, Self::Low];

    /// The name in JSON and in TOML.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
        }
    }

    /// Converts a number stored in SQL or Redis. An unknown number counts as medium.
    pub fn from_number(number: i64) -> Self {
        match number {
            1 => Self::High,
            3 => Self::Low,
            _ => Self::Medium,
        }
    }
}

/// The encoding of a payload or a result. SQL stores the discriminants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// The sender did not specify it.
    #[default]
    Unknown = 0,
    Bytes = 1,
    Text = 2,
    Json = 3,
}

impl Encoding {
    /// Converts a number from SQL or protobuf. An unknown number becomes [`Self::Unknown`].
    pub fn from_number(number: i64) -> Self {
        match number {
            1 => Self::Bytes,
            2 => Self::Text,
            3 => Self::Json,
            _ => Self::Unknown,
        }
    }
}

/// The hash of a sequence of a queue.
pub fn sequence_hash(queue: &QueueName, name: &str) -> SequenceHash {
    let mut first = [0; SEQUENCE_HASH_BYTES];
    first.copy_from_slice(&KeyHash::new(queue, name.as_bytes()).0[..SEQUENCE_HASH_BYTES]);
    first
}

/// What a task to store has to do with trees.
#[derive(Clone, Debug, PartialEq)]
pub enum RowTree {
    /// It is the root of this tree.
    Root(TreeSettings),
    /// It joins a tree.
    Joins(TaskId),
    /// A task of a topology discovered it. SQL decides what tree and subtree that is.
    Sent(Way),
    /// A task of this tree discovered it, and it is in this subtree.
    Discovered {
        tree: TaskId,
        subtree: Option<TaskId>,
    },
    /// It was discovered in this tree, became this letter, and is sent again.
    Returns { tree: TaskId, letter: LetterId },
}

impl RowTree {
    /// The tree of a task with this id.
    pub fn id(&self, task: TaskId) -> TaskId {
        match self {
            Self::Root(_) | Self::Sent(_) => task,
            Self::Joins(tree) | Self::Discovered { tree, .. } | Self::Returns { tree, .. } => *tree,
        }
    }

    pub fn subtree(&self) -> Option<TaskId> {
        match self {
            Self::Discovered { subtree, .. } => *subtree,
            _ => None,
        }
    }
}

/// A task as SQL stores it: validated, with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskRow {
    pub id: TaskId,
    pub queue: QueueName,
    /// The partition of topic `pipeline`, which is also the number of the queue's shard.
    pub partition: u32,
    /// Empty if the task takes no key.
    pub key: Bytes,
    /// SHA-256 of queue and key, or [`KeyHash::without_key`]. SQL keeps it unique.
    pub key_hash: KeyHash,
    pub payload: Bytes,
    pub payload_encoding: Encoding,
    pub replicas: u32,
    pub priority: Priority,
    pub max_attempts: u32,
    pub lease_ms: u32,
    /// The earliest time at which it may be claimed; 0: at once.
    pub not_before_unix_ms: i64,
    pub headers: Vec<(String, String)>,
    /// If empty, [`TraceContext::of_id`] derives it from the id.
    pub traceparent: String,
    pub created_unix_ms: i64,
    /// `None`: the backoff of its queue applies.
    pub backoff: Option<Backoff>,
    /// When the task must have its NUM completions; 0: it has no deadline.
    pub deadline_unix_ms: i64,
    /// What it shares its limits with; empty: it has no limits.
    pub limit_key: String,
    /// The tasks of its queue that it goes one after the other with.
    pub sequence: Option<Sequence>,
    /// Set only on a task that comes from an insert.
    pub idempotency: Option<Box<Idempotency>>,
    /// What it has to do with trees; `None`: nothing. Set only on a task that is about to be stored.
    pub tree: Option<Box<RowTree>>,
    /// The execution that it is a step of. Set only on a task that is about to be stored.
    pub execution: Option<ExecutionId>,
}

impl TaskRow {
    /// The task's `traceparent`; derived from its id if none was given.
    pub fn context(&self) -> Cow<'_, str> {
        match self.traceparent.as_str() {
            "" => TraceContext::of_id(self.id.as_bytes()).to_string().into(),
            given => given.into(),
        }
    }

    /// Whether the task has a key. One without a key is known by its id alone: no filter and no
    /// table of keys has it.
    pub fn has_key(&self) -> bool {
        self.key_hash.task_without_key().is_none()
    }

    /// The approximate size of the row in a buffer, in bytes.
    pub fn weight(&self) -> usize {
        let headers = self
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        weight(self.key.len(), self.payload.len(), headers)
    }
}

/// The approximate size of a task in a buffer, in bytes.
fn weight(key: usize, payload: usize, headers: usize) -> usize {
    key + payload + headers + 256
}

/// SHA-256 of a queue and a key. What stands for it if a task takes no key: its id and zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// Hashes queue and key.
    pub fn new(queue: &QueueName, key: &[u8]) -> Self {
        Self::of(queue.as_str(), key)
    }

    /// Hashes the name of a queue or of a topic and a key, separated by a NUL byte, which no name
    /// contains.
    fn of(name: &str, key: &[u8]) -> Self {
        Self(
            Sha256::new()
                .chain_update(name)
                .chain_update([0])
                .chain_update(key)
                .finalize()
                .into(),
        )
    }

    /// The hash of a task that takes no key: its id and 16 zero bytes. Later ones sort later.
    pub fn without_key(id: TaskId) -> Self {
        let mut hash = [0; 32];
        hash[..16].copy_from_slice(id.as_bytes());
        Self(hash)
    }

    /// The task of a hash from [`Self::without_key`]. No SHA-256 ends in 16 zero bytes.
    pub fn task_without_key(&self) -> Option<TaskId> {
        let (id, rest) = self.0.split_at(16);
        let has_no_key = rest.iter().all(|byte| *byte == 0);
        has_no_key.then(|| TaskId::from_slice(id)).flatten()
    }

    /// The partition of the key. Equal keys always go to the same one.
    pub fn partition(&self, partitions: u32) -> u32 {
        let first = u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]);
        first % partitions.max(1)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// A position in a partition of the bus: (milliseconds, sequence) for Redis Streams, (offset, 0)
/// for Kafka. Offsets compare as pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Offset {
    pub major: u64,
    pub minor: u64,
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.major, self.minor)
    }
}

impl FromStr for Offset {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (major, minor) = text.split_once('-').unwrap_or((text, "0"));
        Ok(Self {
            major: major.parse()?,
            minor: minor.parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_one_time_sort_by_their_places() {
        let at = 1_700_000_000_123;
        let ids: Vec<TaskId> = (0..1000).map(|place| TaskId::at(at, place)).collect();
        assert!(ids.is_sorted() && TaskId::at(at, 0) != ids[0]);
        assert!(ids[999] < TaskId::at(at + 1, 0));
        assert_eq!(ids[0].created_unix_ms(), at);
        assert_eq!(
            ids[0].0.get_timestamp().unwrap().to_unix(),
            (1_700_000_000, 123_000_000)
        );
    }

    #[test]
    fn an_id_follows_from_its_parts_and_its_time() {
        let at = 1_700_000_000_123;
        let id = TaskId::derived_from(&[b"a", b"bc"], at);
        assert_eq!(id, TaskId::derived_from(&[b"a", b"bc"], at));
        assert_eq!(id.created_unix_ms(), at);
        for other in [
            TaskId::derived_from(&[b"ab", b"c"], at),
            TaskId::derived_from(&[b"abc"], at),
            TaskId::derived_from(&[b"a", b"bc"], at + 1),
        ] {
            assert_ne!(id, other);
        }
        let hash = KeyHash::without_key(id);
        assert_eq!(hash.task_without_key(), Some(id));
        let queue = QueueName::new("q").unwrap();
        assert_eq!(KeyHash::new(&queue, b"k").task_without_key(), None);
    }
}
