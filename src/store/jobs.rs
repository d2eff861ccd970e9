//! Jobs, and what they do to tasks.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{Result, Retried};
use crate::model::{Act, Job, TaskCursor, TaskId};

/// The most jobs that run at a time.
pub const MOST_JOBS: u32 = 100;

/// How long a job can be read, from its start. A job that runs stays.
pub const JOBS_STAY: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whether a job was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedJob {
    Yes,
    /// [`MOST_JOBS`] run.
    NoRoom,
    /// The token of the job has as many as it may have.
    NoRoomForToken,
}

/// The part of the store that keeps jobs. Every method is one transaction, and may be repeated as
/// those of `Store`.
#[async_trait]
pub trait Jobs: Send + Sync {
    /// Adds a job, unless [`MOST_JOBS`] run, or `most_of_token` of its token. Records its act, and
    /// removes jobs that ended and began [`JOBS_STAY`] ago.
    async fn add_job(&self, job: &Job, most_of_token: u32, act: &Act) -> Result<AddedJob>;

    async fn job(&self, id: Uuid) -> Result<Option<Job>>;

    /// Jobs before `before`, the latest first. Leaves out those that a later taskd has added.
    async fn jobs(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Job>>;

    /// The running jobs, the earliest first. Leaves out those of a later taskd, which go on when
    /// one leads.
    async fn running_jobs(&self) -> Result<Vec<Job>>;

    /// Stores progress and state of a job that runs and stands at `from`. Answers whether it did.
    ///
    /// Of two that have changed the same page one stores its counts.
    async fn advance_job(&self, job: &Job, from: Option<TaskCursor>) -> Result<bool>;

    /// Stops a running job, and records the act. The reason, if there is one, becomes its last
    /// error. Answers the job after that; `None`: there is no such job.
    async fn stop_job(
        &self,
        id: Uuid,
        at_unix_ms: i64,
        why: Option<&str>,
        act: &Act,
    ) -> Result<Option<Job>>;

    /// Sends dead and cancelled tasks again, removes their letters, and records an act for each.
    /// Answers those among `ids` that were one.
    ///
    /// The task is unfinished in its next epoch, has no failures, keeps its credits, and is in the
    /// outbox as `Missing`. Completions that came after its end become credits; with NUM of them it
    /// is Completed.
    async fn retry_with_acts(
        &self,
        ids: &[TaskId],
        now_unix_ms: i64,
        who: &str,
        what: &str,
    ) -> Result<Vec<Retried>>;
}
