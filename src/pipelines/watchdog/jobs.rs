//! Jobs: changes of all tasks of a filter, page by page. Each running job gets a page in turn.
//!
//! A page is changed first, then SQL stores how far the job is. A process that is killed in between leaves a page that
//! the next leader changes again. A task that was changed does not fit the filter of the job any more, or stays as it
//! is. So each task is changed once, and the job counts fewer of them than it has changed.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{context::Context, error::Error, lead::Lead};
use crate::{
    model::{Job, JobChange, JobState, TaskId},
    runtime::{Clock, Loop},
    store::{self, ListedTask, Store, TaskSearch},
    telemetry::metrics,
};

/// The tasks that a page changes, in one transaction, and that it looks at.
const CHANGED_AT_ONCE: u32 = 250;
const LOOKED_AT_ONCE: u32 = 5_000;
/// The pause of a loop that has nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// The shortest pause behind a page, and the longest.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(super) struct Jobs {
    store: Arc<dyn Store>,
    clock: Clock,
    lead: Lead,
}

impl Jobs {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        Self { store: Arc::clone(&context.store), clock: context.clock.clone(), lead: lead.clone() }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let running = self.store.running_jobs().await?;
            cx.beat();
            if running.is_empty() {
                cx.idle(cx.pause(IDLE)).await;
                continue;
            }
            for job in running {
                if !self.lead.wait(&cx).await {
                    return Ok(());
                }
                let started = Instant::now();
                self.step(job).await?;
                metrics::watchdog_step("jobs", started.elapsed());
                cx.beat();
                // The loop works at most half of the time, so that others reach the database, however much is to do.
                if !cx.pause(started.elapsed().clamp(SHORTEST, LONGEST)).await {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Changes a page of the job. A job that can never go on holds up no other one.
    async fn step(&self, mut job: Job) -> Result<(), Error> {
        let from = job.progress.cursor;
        match self.page(&mut job).await {
            Ok(()) => {}
            Err(error) if error.is_refusal() => {
                tracing::warn!(job = %job.id, "the job {} ({} tasks) failed: {error}", job.id, job.change);
                job.set_error(&error.to_string());
                job.state = JobState::Failed;
            }
            Err(error) => return Err(error.into()),
        }
        job.updated_unix_ms = self.clock.now_unix_ms();
        // Another leader has done the same page, or somebody has stopped the job: their row stays.
        if self.store.advance_job(&job, from).await? && job.state == JobState::Done {
            let (id, change, progress) = (job.id, job.change, &job.progress);
            tracing::info!(job = %id, "the job {id} ({change} tasks) is done: {} changed", progress.changed);
        }
        Ok(())
    }

    async fn page(&self, job: &mut Job) -> store::Result<()> {
        let (filter, after) = (job.filter.clone(), job.progress.cursor);
        let search = TaskSearch { filter, limit: CHANGED_AT_ONCE, look_at: LOOKED_AT_ONCE, after };
        let page = self.store.search(&search).await?;
        let reached = |task: &&ListedTask| job.scope.includes(task.shard.queue.as_str());
        let ids: Vec<TaskId> = page.tasks.iter().filter(reached).map(|task| task.id).collect();
        let unchanged = self.change(job, &ids).await?;
        let progress = &mut job.progress;
        progress.looked_at += u64::from(page.looked_at);
        progress.matched += ids.len() as u64;
        progress.changed += (ids.len() - unchanged.len()) as u64;
        progress.failed += unchanged.len() as u64;
        if let Some((id, why)) = unchanged.last() {
            job.set_error(&format!("{id}: {why}"));
        }
        match page.next {
            Some(next) => job.progress.cursor = Some(next),
            None => job.state = JobState::Done,
        }
        Ok(())
    }

    /// Changes tasks, and records an act for each. Answers those that stay as they are, with the reason.
    async fn change(&self, job: &Job, ids: &[TaskId]) -> store::Result<Vec<(TaskId, &'static str)>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let act = format!("{} (job {})", job.change.act(), job.id);
        match job.change {
            JobChange::Retry => {
                let retried = self.store.retry_with_acts(ids, self.clock.now_unix_ms(), &job.who, &act).await?;
                let retried: HashSet<TaskId> = retried.into_iter().map(|retried| retried.id).collect();
                let stayed = ids.iter().filter(|id| !retried.contains(id));
                Ok(stayed.map(|id| (*id, "the task is neither dead nor cancelled any more")).collect())
            }
        }
    }
}
