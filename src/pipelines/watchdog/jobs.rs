//! Jobs: changes of all tasks of a filter, page by page. Each running job gets a page in turn.
//!
//! A page is changed first, then SQL stores how far the job is. A process that is killed in between
//! leaves a page that the next leader changes again. A task that was changed does not fit the
//! filter of the job any more, or stays as it is. So each task is changed once, and the job counts
//! fewer of them than it has changed. A requeue is made twice: it ends the leases that were given
//! since.
//!
//! A page of a requeue has its turn again for the tasks whose shards do not answer, and for those
//! that come into the page meanwhile.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uuid::Uuid;

use super::{error::Error, lead::Lead};
use crate::{
    model::{
        Act, Change, Changed, Job, JobChange, JobState, SecretHash, TaskAct, TaskCursor, TaskId,
        Update,
    },
    pipelines::{
        changing::{self, Changing},
        context::Context,
    },
    runtime::{Clock, Loop},
    store::{ListedTask, Store, TaskSearch},
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

/// How long a page of a requeue waits for its last tasks. Then they stay as they are.
const REQUEUED_WITHIN: Duration = Duration::from_secs(60);

/// The tasks that a page changed, and those that it did not.
#[derive(Clone, Default)]
struct Outcome {
    changed: u64,
    /// Those that stayed as they are, and why.
    unchanged: Vec<(TaskId, &'static str)>,
}

/// A page of a requeue that has its turn again.
#[derive(Clone)]
struct Rest {
    /// The page.
    behind: Option<TaskCursor>,
    /// Tasks whose turn is over. Those that end meanwhile make room in the page for others.
    seen: HashSet<TaskId>,
    outcome: Outcome,
    since: Instant,
}

/// When each token expires; `None`: never.
type Expiries = HashMap<SecretHash, Option<i64>>;

/// The tokens that were read last, and their version.
type TokensRead = Option<(u64, Arc<Expiries>)>;

#[derive(Clone)]
pub(super) struct Jobs {
    store: Arc<dyn Store>,
    changing: Changing,
    clock: Clock,
    lead: Lead,
    /// Of pages that have their turn again. A process that takes over requeues the whole page once
    /// more.
    rests: Arc<Mutex<HashMap<Uuid, Rest>>>,
    tokens: Arc<Mutex<TokensRead>>,
}

impl Jobs {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let store = Arc::clone(&context.store);
        let changing = context.changing();
        let clock = context.clock.clone();
        Self {
            store,
            changing,
            clock,
            lead: lead.clone(),
            rests: Arc::default(),
            tokens: Arc::default(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let running = self.store.running_jobs().await?;
            cx.beat();
            self.rests
                .lock()
                .retain(|id, _| running.iter().any(|job| job.id == *id));
            if running.is_empty() {
                cx.idle(cx.pause(IDLE)).await;
                continue;
            }
            let mut failed = Ok(());
            let mut stopped = HashSet::new();
            for job in &running {
                if !self.lead.wait(&cx).await {
                    return Ok(());
                }
                // Before each page, so that a job changes nothing more once its token is revoked.
                self.stop_without_right(&running, &mut stopped).await?;
                if stopped.contains(&job.id) {
                    continue;
                }
                let started = Instant::now();
                // A job whose page fails now holds up no other one: it has its turn again.
                let stepped = self.step(job.clone()).await;
                failed = failed.and(stepped);
                metrics::watchdog_step("jobs", started.elapsed());
                cx.beat();
                // The loop works at most half of the time, so that others reach the database,
                // however much is to do.
                if !cx.pause(started.elapsed().clamp(SHORTEST, LONGEST)).await {
                    return Ok(());
                }
            }
            failed?;
        }
        Ok(())
    }

    /// Stops the jobs whose token is no longer valid.
    async fn stop_without_right(
        &self,
        running: &[Job],
        stopped: &mut HashSet<Uuid>,
    ) -> Result<(), Error> {
        if running.iter().all(|job| job.token.is_none()) {
            return Ok(());
        }
        // The version first: a change after it is read again.
        let version = self.store.tokens_version().await?;
        let known = self.tokens.lock().clone();
        let tokens = match known {
            Some((read, tokens)) if read == version => tokens,
            _ => {
                let tokens = self.store.tokens().await?;
                let tokens = tokens
                    .into_iter()
                    .map(|(hash, token)| (hash, token.expires_unix_ms))
                    .collect();
                let tokens: Arc<Expiries> = Arc::new(tokens);
                *self.tokens.lock() = Some((version, Arc::clone(&tokens)));
                tokens
            }
        };
        let now = self.clock.now_unix_ms();
        for job in running {
            let Some(token) = &job.token else { continue };
            let why = match tokens.get(token) {
                None => "its token was revoked",
                Some(Some(expires_unix_ms)) if *expires_unix_ms <= now => "its token has expired",
                Some(_) => continue,
            };
            if stopped.insert(job.id) {
                let act = Act::at_time(now, "taskd", "stop job", &format!("{}: {why}", job.id));
                self.store.stop_job(job.id, now, Some(why), &act).await?;
                tracing::warn!(job = %job.id, "the job {} ({}) stops: {why}", job.id, job.change.of_tasks());
            }
        }
        Ok(())
    }

    /// Changes a page of the job. A job that can never go on holds up no other one.
    async fn step(&self, mut job: Job) -> Result<(), Error> {
        let from = job.progress.cursor;
        match self.page(&mut job).await {
            Ok(()) => {}
            Err(error) if is_refusal(&error) => {
                tracing::warn!(job = %job.id, "the job {} ({}) failed: {error}", job.id, job.change.of_tasks());
                job.set_error(&error.to_string());
                job.state = JobState::Failed;
            }
            Err(error) => return Err(error),
        }
        job.updated_unix_ms = self.clock.now_unix_ms();
        // Another leader has done the same page, or somebody has stopped the job: their row stays.
        if self.store.advance_job(&job, from).await? && job.state == JobState::Done {
            let id = job.id;
            let words = job.change.of_tasks();
            let progress = &job.progress;
            tracing::info!(job = %id, "the job {id} ({words}) is done: {} changed", progress.changed);
        }
        Ok(())
    }

    async fn page(&self, job: &mut Job) -> Result<(), Error> {
        let filter = job.filter.clone();
        let after = job.progress.cursor;
        let stays_in_queue = !job.scope.is_everything();
        let search = TaskSearch {
            filter,
            limit: CHANGED_AT_ONCE,
            look_at: LOOKED_AT_ONCE,
            after,
            stays_in_queue,
        };
        let page = self.store.search(&search).await?;
        let reached = |task: &&ListedTask| job.scope.includes(task.shard.queue.as_str());
        let matched: Vec<&ListedTask> = page.tasks.iter().filter(reached).collect();
        let is_new = |task: &&&ListedTask| !has_values(&job.change, task);
        let ids: Vec<TaskId> = matched.iter().filter(is_new).map(|task| task.id).collect();
        let Outcome { changed, unchanged } = self.change(job, &ids).await?;
        let progress = &mut job.progress;
        progress.looked_at += u64::from(page.looked_at);
        progress.matched += (matched.len() - ids.len()) as u64 + changed + unchanged.len() as u64;
        progress.changed += changed;
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

    /// Changes tasks, and records an act for each.
    async fn change(&self, job: &Job, ids: &[TaskId]) -> Result<Outcome, Error> {
        if ids.is_empty() && !matches!(job.change, JobChange::Requeue(_)) {
            return Ok(Outcome::default());
        }
        let Some(change) = job.change.live() else {
            let retried = self
                .store
                .retry_with_acts(ids, self.clock.now_unix_ms(), &job.who, &act_of(job))
                .await?;
            let retried: HashSet<TaskId> = retried.into_iter().map(|retried| retried.id).collect();
            let stayed = |id| {
                (!retried.contains(&id))
                    .then_some("the task is neither dead nor cancelled any more")
            };
            return Ok(Outcome::of(ids.iter().map(|id| (*id, stayed(*id)))));
        };
        if matches!(job.change, JobChange::Requeue(_)) {
            return self.requeue(job, &change, ids).await;
        }
        let changed = self
            .changing
            .change(ids, &change, &acts(job, ids, self.clock.now_unix_ms()))
            .await?;
        Ok(Outcome::of(
            ids.iter()
                .zip(changed)
                .map(|(id, changed)| (*id, reason(changed))),
        ))
    }

    /// Requeues tasks, and records an act for each. SQL keeps no wish to requeue, so an error says
    /// that the page has its turn again.
    async fn requeue(&self, job: &Job, change: &Change, ids: &[TaskId]) -> Result<Outcome, Error> {
        let behind = job.progress.cursor;
        let rest = self
            .rests
            .lock()
            .get(&job.id)
            .filter(|rest| rest.behind == behind)
            .cloned();
        let mut rest = rest.unwrap_or_else(|| Rest::new(behind));
        let due: Vec<TaskId> = ids
            .iter()
            .filter(|id| !rest.seen.contains(id))
            .copied()
            .collect();
        let changed = match due.is_empty() {
            true => Vec::new(),
            false => {
                self.changing
                    .change(&due, change, &acts(job, &due, self.clock.now_unix_ms()))
                    .await?
            }
        };
        let is_late = rest.since.elapsed() >= REQUEUED_WITHIN;
        let mut has_its_turn_again = false;
        for (id, changed) in due.into_iter().zip(changed) {
            let stays = match changed {
                Changed::Later if is_late => Some("its shard did not answer for a minute"),
                Changed::Later => {
                    has_its_turn_again = true;
                    continue;
                }
                changed => reason(changed),
            };
            rest.seen.insert(id);
            rest.outcome.note(id, stays);
        }
        let mut rests = self.rests.lock();
        if !has_its_turn_again {
            rests.remove(&job.id);
            return Ok(rest.outcome);
        }
        rests.insert(job.id, rest);
        Err(Error::NotRequeued)
    }
}

impl Outcome {
    /// Of tasks, each with the reason why it stays as it is.
    fn of(tasks: impl Iterator<Item = (TaskId, Option<&'static str>)>) -> Self {
        let mut outcome = Self::default();
        tasks.for_each(|(id, stays)| outcome.note(id, stays));
        outcome
    }

    fn note(&mut self, id: TaskId, stays: Option<&'static str>) {
        match stays {
            Some(why) => self.unchanged.push((id, why)),
            None => self.changed += 1,
        }
    }
}

impl Rest {
    fn new(behind: Option<TaskCursor>) -> Self {
        Self {
            behind,
            seen: HashSet::new(),
            outcome: Outcome::default(),
            since: Instant::now(),
        }
    }
}

/// An act for each task.
fn acts(job: &Job, ids: &[TaskId], now_unix_ms: i64) -> Vec<TaskAct> {
    let act = act_of(job);
    ids.iter()
        .map(|id| {
            (
                *id,
                Act::at_time(now_unix_ms, &job.who, &act, &id.to_string()),
            )
        })
        .collect()
}

/// The words of an act, which SQL keeps up to 64 characters long. The job has the rest.
fn act_of(job: &Job) -> String {
    format!("{} task (job {})", job.change.verb(), job.id)
}

/// True if SQL has the values that the job gives: from before, or since a page that was changed and
/// not counted. The queue has them, too, or SQL keeps the wish.
fn has_values(change: &JobChange, task: &ListedTask) -> bool {
    let JobChange::Update(Update { priority, replicas }) = change else {
        return false;
    };
    priority.is_none_or(|new| new == task.priority)
        && replicas.is_none_or(|new| new == task.replicas)
}

/// Why a task was not changed; `None`: it is, or SQL keeps the wish until its shard answers.
fn reason(changed: Changed) -> Option<&'static str> {
    match changed {
        Changed::Done | Changed::Later => None,
        Changed::AlreadyCompleted => Some("its workers have completed it"),
        Changed::Dead => Some("the task had failed for good before"),
        Changed::Cancelled => Some("the task was cancelled before"),
        Changed::NotQueued => Some("the task is not in its queue, and no worker holds it"),
        Changed::NotDue => Some("its time has not come, and no worker holds it"),
        Changed::CompletedByWorker => Some("the worker that it should wait for has completed it"),
        Changed::TooManyReplicas => Some("its queue takes no task with so many replicas"),
        Changed::Unknown => Some("there is no such task any more"),
    }
}

/// True if the same page fails again.
fn is_refusal(error: &Error) -> bool {
    match error {
        Error::Store(error) | Error::Change(changing::Error::Store(error)) => error.is_refusal(),
        _ => false,
    }
}
