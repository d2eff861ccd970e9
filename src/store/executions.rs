//! Executions of workflows: definitions, the log of each execution, and what comes to it from
//! outside.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Inserted, NewRow, Result, Stored};
use crate::model::{
    Act, ExecutionId, ExecutionPages, ExecutionStatus, StoredStatus, TaskId, WorkflowVersion,
};

/// A deployed definition. It never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredDefinition {
    pub workflow: WorkflowVersion,
    /// The hash in hex that executions are pinned to.
    pub hash: String,
    /// As it was deployed, in YAML or JSON.
    pub text: String,
    /// JSON: the documents that it refers to, by their URIs.
    pub documents: String,
    pub deployed_by: String,
    pub deployed_unix_ms: i64,
}

/// A definition in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDefinition {
    pub workflow: WorkflowVersion,
    pub hash: String,
    pub deployed_by: String,
    pub deployed_unix_ms: i64,
}

/// The outcome of deploying a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptDefinition {
    New,
    /// It was deployed before.
    Same,
    /// This version has another hash.
    Other,
}

/// The outcome of deleting a definition, or an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    Yes,
    /// An execution of the definition, or the execution itself, has not ended.
    Running,
    Unknown,
}

/// An execution to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewExecution {
    pub id: ExecutionId,
    /// The id that the caller gave: of all starts with it, one creates an execution.
    pub given: Option<String>,
    pub workflow: WorkflowVersion,
    /// Of its definition.
    pub hash: String,
    /// JSON.
    pub input: Bytes,
    pub traceparent: String,
    pub created_unix_ms: i64,
}

/// The outcome of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartedExecution {
    New,
    /// An earlier start with the given id created this execution.
    Before(ExecutionId),
    /// The given id belongs to an execution of this workflow.
    OtherWorkflow(WorkflowVersion),
    /// There is no definition with this hash (any more).
    NoDefinition,
}

/// An execution without its input and its summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExecution {
    pub id: ExecutionId,
    pub given: Option<String>,
    pub workflow: WorkflowVersion,
    pub hash: String,
    pub status: ExecutionStatus,
    /// The number of entries of its log.
    pub seq: u64,
    pub traceparent: String,
    pub created_unix_ms: i64,
    /// The time of the last append.
    pub updated_unix_ms: i64,
    /// 0: it has not ended.
    pub ended_unix_ms: i64,
}

/// An execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredExecution {
    pub listed: ListedExecution,
    /// JSON. Empty after the first append, because the log has it then.
    pub input: Bytes,
    /// See [`Append::summary`].
    pub summary: Bytes,
}

/// An entry of a log. The store does not read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEntry {
    /// Counts from 1.
    pub seq: u64,
    pub entry: Bytes,
}

/// What came to an execution. Each stays in its inbox until an append consumes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Happening {
    /// It was created.
    Start,
    /// A step ended with this status, which is final.
    StepEnded { task: TaskId, status: StoredStatus },
    /// An operator cancels it.
    Cancel,
    /// The end of a step may have been missed.
    LookAgain,
    /// The last append left something to do.
    GoOn,
}

/// A row of an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboxRow {
    pub execution: ExecutionId,
    pub happening: Happening,
    pub at_unix_ms: i64,
}

/// A page of the rows of all inboxes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InboxPage {
    /// Earliest first.
    pub rows: Vec<InboxRow>,
    /// The last row that was read, if there may be more.
    pub last: Option<InboxRow>,
}

/// A timer that is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timer {
    pub due_unix_ms: i64,
    pub execution: ExecutionId,
    /// Unique in the execution.
    pub number: u64,
}

/// What one execution does next.
#[derive(Clone, Debug)]
pub struct Append {
    pub execution: ExecutionId,
    /// The number of entries of the log before these. If it has more, somebody else has appended.
    pub seq: u64,
    pub entries: Vec<Bytes>,
    /// Timers: the number, and when it is due.
    pub armed: Vec<(u64, i64)>,
    /// Timers that fired or are not needed any more. One that is unknown is ignored.
    pub disarmed: Vec<u64>,
    /// The tasks of steps, without keys.
    pub steps: Vec<NewRow>,
    /// Tasks of steps that are to be cancelled, if they have not ended.
    pub cancelled: Vec<TaskId>,
    /// Rows of the inbox that are done with.
    pub consumed: Vec<Happening>,
    /// Something is left to do: the inbox gets [`Happening::GoOn`].
    pub goes_on: bool,
    pub status: ExecutionStatus,
    /// What readers are shown next to the status, such as the output or the error; the store does not
    /// read it. `None`: stays as it is.
    pub summary: Option<Bytes>,
    pub at_unix_ms: i64,
}

/// The outcome of an append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Appended {
    /// All of it is stored, with these answers for its steps, in order.
    Yes { steps: Vec<Inserted> },
    /// Somebody else has appended, or the execution has ended or is gone. Nothing of it is stored.
    Lost,
}

/// An execution that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenExecution {
    /// It has a row in its inbox.
    Due(ExecutionId),
    /// Only a step or a timer can bring it on.
    Quiet {
        id: ExecutionId,
        status: ExecutionStatus,
        has_timer: bool,
        /// The number of entries of its log.
        seq: u64,
        /// See [`Append::summary`].
        summary: Bytes,
    },
}

impl OpenExecution {
    pub fn id(&self) -> ExecutionId {
        match self {
            Self::Due(id) | Self::Quiet { id, .. } => *id,
        }
    }
}

/// How many executions and timers there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutionCounts {
    /// Executions that have not ended.
    pub open: u64,
    pub timers: u64,
}

/// Stores definitions of workflows, and their executions.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Executions: Send + Sync {
    /// Stores a definition, and records the act if it is new.
    async fn keep_definition(
        &self,
        definition: &StoredDefinition,
        act: &Act,
    ) -> Result<KeptDefinition>;

    async fn definition(&self, workflow: &WorkflowVersion) -> Result<Option<StoredDefinition>>;

    /// The definitions after this one, by namespace, name and version as texts: those of a namespace,
    /// and of a name in it, or all.
    async fn definitions(
        &self,
        of: (Option<&str>, Option<&str>),
        after: Option<&WorkflowVersion>,
        limit: u32,
    ) -> Result<Vec<ListedDefinition>>;

    /// Deletes a definition unless an execution of it is open, and records the act.
    async fn delete_definition(&self, workflow: &WorkflowVersion, act: &Act) -> Result<Deleted>;

    /// Creates an execution, with [`Happening::Start`] in its inbox. Its definition cannot be deleted
    /// before it has ended.
    async fn start_execution(&self, execution: &NewExecution) -> Result<StartedExecution>;

    /// Stores what executions do next: for each, all of it or nothing. Of several appends of one
    /// execution, only the first can be stored.
    ///
    /// The tasks of all steps form a batch, as those of [`insert`](super::Tasks::insert) do. When the
    /// status of such a task becomes final, its execution gets [`Happening::StepEnded`] in the same
    /// transaction, which is gone again if the task is sent again before it is consumed. Steps leave
    /// no dead letters, and stay until the ends of their tasks are consumed.
    async fn append(&self, appends: &[Append]) -> Result<Stored<Appended>>;

    /// The rows of all inboxes after this one, earliest first, except those of the executions in
    /// `without`. Removes those of executions that have ended or are gone.
    async fn inbox(
        &self,
        after: Option<&InboxRow>,
        without: &[ExecutionId],
        limit: u32,
    ) -> Result<InboxPage>;

    /// The timers that are due, after this one, earliest first.
    async fn due_timers(
        &self,
        now_unix_ms: i64,
        after: Option<&Timer>,
        limit: u32,
    ) -> Result<Vec<Timer>>;

    /// Those of `ids` that exist, in any order.
    async fn executions_by_id(&self, ids: &[ExecutionId]) -> Result<Vec<ListedExecution>>;

    async fn execution(&self, id: ExecutionId) -> Result<Option<StoredExecution>>;

    /// The execution that was started with this id.
    async fn execution_given(&self, given: &str) -> Result<Option<ExecutionId>>;

    /// A page of executions, newest first.
    async fn executions(&self, pages: &ExecutionPages) -> Result<Vec<ListedExecution>>;

    /// Entries of a log after the one with this number: at most `limit`, and at most
    /// [`PAGE_BYTES`](super::PAGE_BYTES) unless one is larger. None if there are no more.
    async fn entries(&self, id: ExecutionId, after: u64, limit: u32) -> Result<Vec<StoredEntry>>;

    /// Adds [`Happening::Cancel`] to the inbox of an open execution, before all that is there, and records
    /// the act. Returns the status of the execution, or `None` if there is none.
    async fn cancel_execution(&self, id: ExecutionId, act: &Act)
    -> Result<Option<ExecutionStatus>>;

    /// Removes an execution that has ended, with all it owns, and records the act. A long log is
    /// removed in several transactions, from its beginning.
    async fn delete_execution(&self, id: ExecutionId, act: &Act) -> Result<Deleted>;

    /// Removes at most `limit` executions that ended at least `age` ago by the database's clock,
    /// earliest first, as [`Self::delete_execution`] does. Returns how many.
    async fn remove_ended_executions(&self, age: Duration, limit: u32) -> Result<u64>;

    /// Counts what is open.
    async fn execution_counts(&self) -> Result<ExecutionCounts>;

    /// The next open executions after this one, by id.
    async fn open_executions(
        &self,
        after: Option<ExecutionId>,
        limit: u32,
    ) -> Result<Vec<OpenExecution>>;

    /// Adds [`Happening::LookAgain`] to the inboxes of those of these executions that are open.
    async fn wake_executions(&self, ids: &[ExecutionId]) -> Result<()>;
}
