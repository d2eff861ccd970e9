//! Settling: lock the tasks of the reports, decide in order, write the changes.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use super::{
    counts::Counts,
    insert::{self, OldKeys},
    letters::{self, NewLetter},
    outbox,
    rows::{from_row, key_hash, number, queue_name, status, task_id, worker_name},
    session::Session,
    statement::{Statement, Value, lists, pieces},
};
use crate::config::EventQueues;
use crate::model::{DeadLetter, Encoding, KeyHash, LeaseNumber, Priority, QueueName, StoredStatus, TaskId, began};
use crate::store::{NewRow, Result, Settled, SettledTask, Settlement, Turn};

/// The part of a task that reports change.
struct Progress {
    queue: QueueName,
    key_hash: KeyHash,
    replicas: u32,
    priority: Priority,
    stored: StoredStatus,
    status: StoredStatus,
    completed: u32,
    attempts: u32,
    epoch: u32,
    reason: String,
    updated_ms: i64,
    /// It may have a row in the outbox.
    off_bus: bool,
    changed: bool,
    /// The workers with a result, credited or surplus.
    workers: HashSet<String>,
}

/// The columns of a task that reports change. The one that differs most is compared first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Change<'a> {
    updated_ms: i64,
    status: StoredStatus,
    completed: u32,
    attempts: u32,
    reason: &'a str,
}

/// The number of tasks that change alike from which they share a statement. It is cheaper than one that changes each
/// in its own way, and reports of one call of a worker come with one time.
const ALIKE: usize = 4;

/// A result to store.
struct NewResult<'a> {
    task: &'a TaskId,
    worker: &'a str,
    lease: LeaseNumber,
    result: &'a [u8],
    encoding: Encoding,
    attempt: u32,
    leased_ms: i64,
    at_ms: i64,
    surplus: bool,
}

impl Settlement {
    fn id(&self) -> &TaskId {
        match self {
            Self::Completed { id, .. } | Self::Died { id, .. } => id,
        }
    }

    fn discovered(&self) -> &[NewRow] {
        match self {
            Self::Completed { discovered, .. } => discovered,
            Self::Died { .. } => &[],
        }
    }
}

pub(super) async fn settle<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    old_keys: &OldKeys,
    events: &Arc<EventQueues>,
) -> Result<Vec<Settled>> {
    let mut tasks = lock_tasks(session, reports).await?;
    let (mut results, mut letters) = (Vec::new(), Vec::new());
    let decide = |report| decide(report, &mut tasks, &mut results, &mut letters);
    let mut settled: Vec<Settled> = reports.iter().map(decide).collect();

    let mut counts = Counts::with_events(events);
    note_workers(&results, &tasks, &mut counts);
    // In the order of the primary key, so that neighbours share the pages that a statement touches.
    results.sort_unstable_by_key(|result| (result.task, result.worker));
    store_results(session, &results).await?;
    store_progress(session, &tasks, &mut counts).await?;
    letters::add(session, &letters).await?;
    store_discovered(session, reports, batch, &mut settled, &mut counts, old_keys).await?;
    counts.store(session).await?;
    Ok(settled)
}

/// Notes the workers that the events of their tasks name.
fn note_workers(results: &[NewResult<'_>], tasks: &BTreeMap<TaskId, Progress>, counts: &mut Counts) {
    for result in results.iter().filter(|result| !result.surplus) {
        let is_end =
            |task: &&Progress| task.status == StoredStatus::Completed && counts.events.are_kept_of(&task.queue);
        if tasks.get(result.task).filter(is_end).is_some() {
            counts.events.credited(*result.task, result.worker, result.attempt);
        }
    }
}

/// Reads the tasks of `reports` and locks them.
async fn lock_tasks<S: Session>(session: &mut S, reports: &[Settlement]) -> Result<BTreeMap<TaskId, Progress>> {
    let mut ids: Vec<TaskId> = reports.iter().map(|report| *report.id()).collect();
    ids.sort_unstable();
    ids.dedup();
    let mut tasks = BTreeMap::new();
    for ids in lists(&ids) {
        let found = Statement::new(
            "SELECT id, key_hash, queue, replicas, priority, status, completed, attempts, epoch, reason, updated_ms, \
             on_bus FROM tasks WHERE id IN ",
        )
        .list(ids)
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        for columns in session.fetch::<ProgressColumns>(found).await? {
            tasks.insert(task_id(&columns.id)?, columns.into_progress()?);
        }
    }
    // A task has results once it is credited or final. Every transaction that adds one holds the task's lock, so this
    // sees all of them.
    let may_have = |task: &Progress| task.completed > 0 || task.status.is_final();
    let reported: Vec<TaskId> = tasks.iter().filter(|(_, task)| may_have(task)).map(|(id, _)| *id).collect();
    for ids in lists(&reported) {
        let workers = Statement::new("SELECT task_id, worker FROM results WHERE task_id IN ").list(ids);
        for (id, worker) in session.fetch::<(Vec<u8>, Vec<u8>)>(workers).await? {
            if let Some(task) = tasks.get_mut(&task_id(&id)?) {
                task.workers.insert(worker_name(worker)?);
            }
        }
    }
    Ok(tasks)
}

struct ProgressColumns {
    id: Vec<u8>,
    key_hash: Vec<u8>,
    queue: String,
    replicas: i64,
    priority: i64,
    status: i64,
    completed: i64,
    attempts: i64,
    epoch: i64,
    reason: String,
    updated_ms: i64,
    on_bus: i64,
}
from_row!(ProgressColumns {
    id,
    key_hash,
    queue,
    replicas,
    priority,
    status,
    completed,
    attempts,
    epoch,
    reason,
    updated_ms,
    on_bus
});

impl ProgressColumns {
    fn into_progress(self) -> Result<Progress> {
        let status = status(self.status)?;
        Ok(Progress {
            queue: queue_name(&self.queue)?,
            key_hash: key_hash(&self.key_hash)?,
            replicas: number(self.replicas)?,
            priority: Priority::from_number(self.priority),
            stored: status,
            status,
            completed: number(self.completed)?,
            attempts: number(self.attempts)?,
            epoch: number(self.epoch)?,
            reason: self.reason,
            updated_ms: self.updated_ms,
            off_bus: self.on_bus == 0,
            changed: false,
            workers: HashSet::new(),
        })
    }
}

/// Decides what a report changes in its task.
fn decide<'a>(
    report: &'a Settlement,
    tasks: &mut BTreeMap<TaskId, Progress>,
    results: &mut Vec<NewResult<'a>>,
    letters: &mut Vec<NewLetter>,
) -> Settled {
    let Some(task) = tasks.get_mut(report.id()) else {
        return Settled { unknown: true, ..Settled::default() };
    };
    let (repeated, surplus) = match report {
        Settlement::Completed { id, worker, lease, result, encoding, attempt, leased_unix_ms, at_unix_ms, .. } => {
            let repeated = !task.workers.insert(worker.clone());
            let surplus = !repeated && task.status.is_final();
            if !repeated {
                let (lease, encoding, attempt, at_ms) = (*lease, *encoding, *attempt, *at_unix_ms);
                let leased_ms = began(*leased_unix_ms, at_ms).unwrap_or(0);
                let (task, worker) = (id, &worker[..]);
                results.push(NewResult { task, worker, lease, result, encoding, attempt, leased_ms, at_ms, surplus });
            }
            if !repeated && !surplus {
                task.credit(*attempt, *at_unix_ms);
            }
            (repeated, surplus)
        }
        // The task was sent again since.
        Settlement::Died { epoch: Some(epoch), .. } if *epoch < task.epoch => {
            return Settled { unknown: true, ..Settled::default() };
        }
        Settlement::Died { id, reason, attempts, history, at_unix_ms, .. } => {
            let repeated = task.status == StoredStatus::Dead;
            if !task.status.is_final() {
                task.die(reason, *attempts, *at_unix_ms);
                let letter = DeadLetter {
                    task_id: Some(*id),
                    queue: task.queue.as_str().to_owned(),
                    at_unix_ms: *at_unix_ms,
                    history: history.clone(),
                    ..Default::default()
                };
                letters.push(NewLetter::from(&letter));
            }
            (repeated, false)
        }
    };
    let about = SettledTask { queue: task.queue.clone(), priority: task.priority };
    let (status, key) = (Some(task.status), task.freed_key());
    Settled { repeated, surplus, status, key, task: Some(about), ..Settled::default() }
}

impl Progress {
    fn credit(&mut self, attempt: u32, at_ms: i64) {
        self.completed += 1;
        // The attempt that succeeded is no failure.
        self.attempts = self.attempts.max(attempt.saturating_sub(1));
        if self.completed >= self.replicas {
            self.status = StoredStatus::Completed;
        }
        self.touch(at_ms);
    }

    fn die(&mut self, reason: &str, attempts: u32, at_ms: i64) {
        self.status = StoredStatus::Dead;
        self.reason = reason.to_owned();
        self.attempts = attempts;
        self.touch(at_ms);
    }

    fn change(&self) -> Change<'_> {
        let Self { status, completed, attempts, reason, updated_ms, .. } = self;
        let (status, completed, attempts, updated_ms) = (*status, *completed, *attempts, *updated_ms);
        Change { status, completed, attempts, reason, updated_ms }
    }

    fn touch(&mut self, at_ms: i64) {
        self.updated_ms = self.updated_ms.max(at_ms);
        self.changed = true;
    }

    /// The key of a task that will never be completed.
    fn freed_key(&self) -> Option<(QueueName, KeyHash)> {
        let freed = matches!(self.status, StoredStatus::Dead | StoredStatus::Cancelled);
        freed.then(|| (self.queue.clone(), self.key_hash))
    }
}

async fn store_results<S: Session>(session: &mut S, results: &[NewResult<'_>]) -> Result<()> {
    for piece in pieces(results, |result| result.result.len()) {
        let rows = piece.iter().map(|r| {
            let at_ms = r.at_ms.into();
            [
                r.task.into(),
                r.worker.into(),
                r.lease.generation.into(),
                r.lease.grant.into(),
                r.attempt.into(),
                r.leased_ms.into(),
                at_ms,
                r.surplus.into(),
                r.encoding.into(),
                r.result.into(),
            ]
        });
        const RESULTS: &str = " INTO results (task_id, worker, lease_generation, lease_grant, attempt, \
             leased_ms, completed_ms, surplus, result_encoding, result)";
        session.execute(Statement::new(S::INSERT).sql(RESULTS).values(rows)).await?;
    }
    Ok(())
}

async fn store_progress<S: Session>(
    session: &mut S,
    tasks: &BTreeMap<TaskId, Progress>,
    counts: &mut Counts,
) -> Result<()> {
    let changed: Vec<_> = tasks.iter().filter(|(_, task)| task.changed).collect();
    let mut alike: BTreeMap<Change<'_>, Vec<&TaskId>> = BTreeMap::new();
    for (id, task) in &changed {
        alike.entry(task.change()).or_default().push(id);
    }
    let mut others = Vec::new();
    for (change, ids) in alike {
        if ids.len() < ALIKE {
            others.extend(ids.into_iter().map(|id| (id, change)));
            continue;
        }
        for ids in lists(&ids) {
            session.execute(update_alike::<S>(change, ids)).await?;
        }
    }
    for piece in pieces(&others, |(_, change)| change.reason.len()) {
        session.execute(update::<S>(piece)).await?;
    }
    let ended: Vec<_> = changed.into_iter().filter(|(_, task)| task.status != task.stored).collect();
    for (id, task) in &ended {
        counts.moved(**id, &task.queue, task.stored, task.status);
    }
    // A task on the bus or in a batch has no row there.
    let ended: Vec<TaskId> = ended.into_iter().filter(|(_, task)| task.off_bus).map(|(id, _)| *id).collect();
    outbox::remove(session, &ended).await
}

/// Changes tasks that come to look the same.
fn update_alike<'a, S: Session>(change: Change<'a>, ids: &'a [&'a TaskId]) -> Statement<'a> {
    let Change { status, completed, attempts, reason, updated_ms } = change;
    let set = " tasks SET status = ?, completed = ?, attempts = ?, reason = ?, updated_ms = ?";
    let update =
        Statement::new(S::UPDATE).sql(set).bind(status).bind(completed).bind(attempts).bind(reason).bind(updated_ms);
    let leave = if status.is_final() { ", on_bus = 0 WHERE id IN " } else { " WHERE id IN " };
    update.sql(leave).list(ids)
}

/// Changes tasks, each in its own way.
fn update<'a, S: Session>(tasks: &[(&'a TaskId, Change<'a>)]) -> Statement<'a> {
    let row = format!(
        "SELECT {} AS task_id, ? AS new_status, ? AS new_completed, ? AS new_attempts, ? AS new_reason, \
         ? AS new_updated",
        S::ID
    );
    let rows = tasks.iter().map(|(id, change)| -> [Value<'a>; 6] {
        [
            (*id).into(),
            change.status.into(),
            change.completed.into(),
            change.attempts.into(),
            change.reason.into(),
            change.updated_ms.into(),
        ]
    });
    let set = "status = new_status, completed = new_completed, attempts = new_attempts, reason = new_reason, \
               updated_ms = new_updated, on_bus = CASE WHEN new_status = 0 THEN on_bus ELSE 0 END";
    let [before, behind] = S::update_tasks(set);
    Statement::new(before).rows(&row, " UNION ALL ", rows).sql(&behind)
}

/// Stores the discovered tasks of all reports as one batch. Of two with the same key the first wins.
async fn store_discovered<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    settled: &mut [Settled],
    counts: &mut Counts,
    old_keys: &OldKeys,
) -> Result<()> {
    let taken = |settled: &Settled| !settled.repeated && !settled.unknown;
    let pairs = reports.iter().zip(settled.iter());
    let rows: Vec<&NewRow> =
        pairs.filter(|(_, settled)| taken(settled)).flat_map(|(report, _)| report.discovered()).collect();
    let mut answers = insert::insert(session, &rows, batch, counts, old_keys).await?.into_iter();
    for (report, settled) in reports.iter().zip(settled).filter(|(_, settled)| taken(settled)) {
        settled.discovered = answers.by_ref().take(report.discovered().len()).collect();
    }
    Ok(())
}
