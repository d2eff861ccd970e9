//! Bulk changes: changes of all tasks that match a filter, page by page. All running bulk changes
//! take turns, one page each.
//!
//! A page is changed first, then SQL stores the progress of the bulk change. If the process is
//! killed in between, the next leader changes the page again. A task that was changed does not
//! match the filter any more, or stays as it is. So each task is changed once, but the bulk change
//! may count fewer tasks than it has changed. Only a requeue is made twice: it also ends the leases
//! that were given since.
//!
//! A page of a requeue gets another turn for the tasks whose shards do not answer, and for those
//! that come into the page in the meantime.

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
        Act, BulkAction, BulkChange, BulkState, Change, Changed, SecretHash, TaskAct, TaskCursor,
        TaskId, Update,
    },
    pipelines::{
        changing::{self, Changing},
        context::Context,
    },
    runtime::{Clock, Loop},
    store::{ListedTask, Store, TaskSearch},
    telemetry::metrics,
};

/// How many tasks a page changes in one transaction, and how many it reads.
const CHANGED_AT_ONCE: u32 = 250;
const LOOKED_AT_ONCE: u32 = 5_000;
/// The pause of a loop that has nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// The shortest pause after a page, and the longest.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(10);

/// How long a page of a requeue waits for its last tasks. After that they stay as they are.
const REQUEUED_WITHIN: Duration = Duration::from_secs(60);

/// The tasks that a page changed, and those that it did not.
#[derive(Clone, Default)]
struct Outcome {
    changed: u64,
    /// Those that stayed as they are, and why.
    unchanged: Vec<(TaskId, &'static str)>,
}

/// A page of a requeue that gets another turn.
#[derive(Clone)]
struct Rest {
    /// The cursor after which the page begins.
    behind: Option<TaskCursor>,
    /// Tasks that have had their turn. When some of them end, the page has space for others.
    seen: HashSet<TaskId>,
    outcome: Outcome,
    since: Instant,
}

/// When each token expires; `None` if it never does.
type Expiries = HashMap<SecretHash, Option<i64>>;

/// The tokens that were read last, and their version.
type TokensRead = Option<(u64, Arc<Expiries>)>;

#[derive(Clone)]
pub(super) struct BulkChanges {
    store: Arc<dyn Store>,
    changing: Changing,
    clock: Clock,
    lead: Lead,
    /// The pages that get another turn. A process that takes over requeues the whole page once
    /// more.
    rests: Arc<Mutex<HashMap<Uuid, Rest>>>,
    tokens: Arc<Mutex<TokensRead>>,
}

impl BulkChanges {
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
            let running = self.store.running_bulk_changes().await?;
            cx.beat();
            self.rests
                .lock()
                .retain(|id, _| running.iter().any(|bulk| bulk.id == *id));
            if running.is_empty() {
                cx.idle(cx.pause(IDLE)).await;
                continue;
            }
            let mut failed = Ok(());
            let mut stopped = HashSet::new();
            for bulk in &running {
                if !self.lead.wait(&cx).await {
                    return Ok(());
                }
                // Checked before each page, so that a bulk change changes nothing more once its
                // token is revoked.
                self.stop_without_right(&running, &mut stopped).await?;
                if stopped.contains(&bulk.id) {
                    continue;
                }
                let started = Instant::now();
                // If the page of a bulk change fails, the others go on, and this one gets another
                // turn.
                let stepped = self.step(bulk.clone()).await;
                failed = failed.and(stepped);
                metrics::watchdog_step("bulk", started.elapsed());
                cx.beat();
                // Work at most half of the time, so that others can use the database however much
                // there is to do.
                if !cx.pause(started.elapsed().clamp(SHORTEST, LONGEST)).await {
                    return Ok(());
                }
            }
            failed?;
        }
        Ok(())
    }

    /// Stops the bulk changes whose token is no longer valid.
    async fn stop_without_right(
        &self,
        running: &[BulkChange],
        stopped: &mut HashSet<Uuid>,
    ) -> Result<(), Error> {
        if running.iter().all(|bulk| bulk.token.is_none()) {
            return Ok(());
        }
        // Read the version first, so that a change after it is read again.
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
        for bulk in running {
            let Some(token) = &bulk.token else { continue };
            let why = match tokens.get(token) {
                None => "its token was revoked",
                Some(Some(expires_unix_ms)) if *expires_unix_ms <= now => "its token has expired",
                Some(_) => continue,
            };
            if stopped.insert(bulk.id) {
                let act = Act::at_time(
                    now,
                    "taskd",
                    "stop bulk change",
                    &format!("{}: {why}", bulk.id),
                );
                self.store
                    .stop_bulk_change(bulk.id, now, Some(why), &act)
                    .await?;
                tracing::warn!(bulk = %bulk.id, "the bulk change {} ({}) stops: {why}", bulk.id, bulk.change.of_tasks());
            }
        }
        Ok(())
    }

    /// Changes a page of the bulk change. If that can never continue, it does not hold up others.
    async fn step(&self, mut bulk: BulkChange) -> Result<(), Error> {
        let from = bulk.progress.cursor;
        match self.page(&mut bulk).await {
            Ok(()) => {}
            Err(error) if is_refusal(&error) => {
                tracing::warn!(bulk = %bulk.id, "the bulk change {} ({}) failed: {error}", bulk.id, bulk.change.of_tasks());
                bulk.set_error(&error.to_string());
                bulk.state = BulkState::Failed;
            }
            Err(error) => return Err(error),
        }
        bulk.updated_unix_ms = self.clock.now_unix_ms();
        // If another leader has done the same page, or somebody has stopped the bulk change, their
        // row stays.
        if self.store.advance_bulk_change(&bulk, from).await? && bulk.state == BulkState::Done {
            let id = bulk.id;
            let words = bulk.change.of_tasks();
            let progress = &bulk.progress;
            tracing::info!(bulk = %id, "the bulk change {id} ({words}) is done: {} changed", progress.changed);
        }
        Ok(())
    }

    async fn page(&self, bulk: &mut BulkChange) -> Result<(), Error> {
        let filter = bulk.filter.clone();
        let after = bulk.progress.cursor;
        let stays_in_queue = !bulk.scope.is_everything();
        let search = TaskSearch {
            filter,
            limit: CHANGED_AT_ONCE,
            look_at: LOOKED_AT_ONCE,
            after,
            stays_in_queue,
        };
        let page = self.store.search(&search).await?;
        let reached = |task: &&ListedTask| bulk.scope.includes(task.shard.queue.as_str());
        let matched: Vec<&ListedTask> = page.tasks.iter().filter(reached).collect();
        let is_new = |task: &&&ListedTask| !has_values(&bulk.change, task);
        let ids: Vec<TaskId> = matched.iter().filter(is_new).map(|task| task.id).collect();
        let Outcome { changed, unchanged } = self.change(bulk, &ids).await?;
        let progress = &mut bulk.progress;
        progress.looked_at += u64::from(page.looked_at);
        progress.matched += (matched.len() - ids.len()) as u64 + changed + unchanged.len() as u64;
        progress.changed += changed;
        progress.failed += unchanged.len() as u64;
        if let Some((id, why)) = unchanged.last() {
            bulk.set_error(&format!("{id}: {why}"));
        }
        match page.next {
            Some(next) => bulk.progress.cursor = Some(next),
            None => bulk.state = BulkState::Done,
        }
        Ok(())
    }

    /// Changes tasks, and records an act for each.
    async fn change(&self, bulk: &BulkChange, ids: &[TaskId]) -> Result<Outcome, Error> {
        if ids.is_empty() && !matches!(bulk.change, BulkAction::Requeue(_)) {
            return Ok(Outcome::default());
        }
        let as_of = bulk.filter.as_of_unix_ms;
        let Some(change) = bulk.change.live() else {
            let retried = self
                .store
                .retry_as_of(
                    ids,
                    self.clock.now_unix_ms(),
                    &bulk.who,
                    &act_of(bulk),
                    as_of,
                )
                .await?;
            let retried: HashSet<TaskId> = retried.into_iter().map(|retried| retried.id).collect();
            let stayed = |id| {
                (!retried.contains(&id))
                    .then_some("the task is neither dead nor cancelled any more, or has changed since it was counted")
            };
            return Ok(Outcome::of(ids.iter().map(|id| (*id, stayed(*id)))));
        };
        if matches!(bulk.change, BulkAction::Requeue(_)) {
            return self.requeue(bulk, &change, ids).await;
        }
        let changed = self
            .changing
            .change_as_of(
                ids,
                &change,
                &acts(bulk, ids, self.clock.now_unix_ms()),
                as_of,
            )
            .await?;
        Ok(Outcome::of(
            ids.iter()
                .zip(changed)
                .map(|(id, changed)| (*id, reason(changed))),
        ))
    }

    /// Requeues tasks, and records an act for each. SQL stores no pending change for a requeue, so
    /// after an error the page gets another turn.
    async fn requeue(
        &self,
        bulk: &BulkChange,
        change: &Change,
        ids: &[TaskId],
    ) -> Result<Outcome, Error> {
        let behind = bulk.progress.cursor;
        let rest = self
            .rests
            .lock()
            .get(&bulk.id)
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
                    .change_as_of(
                        &due,
                        change,
                        &acts(bulk, &due, self.clock.now_unix_ms()),
                        bulk.filter.as_of_unix_ms,
                    )
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
            rests.remove(&bulk.id);
            return Ok(rest.outcome);
        }
        rests.insert(bulk.id, rest);
        Err(Error::NotRequeued)
    }
}

impl Outcome {
    /// Collects tasks, each with the reason if it stays as it is.
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
fn acts(bulk: &BulkChange, ids: &[TaskId], now_unix_ms: i64) -> Vec<TaskAct> {
    let act = act_of(bulk);
    ids.iter()
        .map(|id| {
            (
                *id,
                Act::at_time(now_unix_ms, &bulk.who, &act, &id.to_string()),
            )
        })
        .collect()
}

/// The text of an act, of which SQL keeps up to 64 characters. The bulk change has the rest.
fn act_of(bulk: &BulkChange) -> String {
    format!("{} task (bulk change {})", bulk.change.verb(), bulk.id)
}

/// Returns whether SQL already has the new values of this task: it had them before, or got them
/// from a page that was changed but not counted. Then the queue has them, too, or the change is
/// pending in SQL.
fn has_values(change: &BulkAction, task: &ListedTask) -> bool {
    let BulkAction::Update(Update { priority, replicas }) = change else {
        return false;
    };
    priority.is_none_or(|new| new == task.priority)
        && replicas.is_none_or(|new| new == task.replicas)
}

/// Returns why a task was not changed; `None` if it was, or if the change is pending until its
/// shard answers.
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
        Changed::Unknown => {
            Some("there is no such task any more, or it has changed since it was counted")
        }
    }
}

/// Returns whether the same page would fail again.
fn is_refusal(error: &Error) -> bool {
    match error {
        Error::Store(error) | Error::Change(changing::Error::Store(error)) => error.is_refusal(),
        _ => false,
    }
}
