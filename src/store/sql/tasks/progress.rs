//! The columns of a task that reports change: read under a lock, changed in memory, then written.

use std::collections::{BTreeMap, HashSet};

use crate::{
    model::{KeyHash, Priority, QueueName, StoredStatus, TaskId},
    store::{
        Result,
        sql::{
            rows::{columns, key_hash, number, queue_name, status, task_id, worker_name},
            session::Session,
            statement::{Statement, Value, lists, pieces},
            tasks::{
                belongs::{BELONGS_COLUMNS, Belongs, BelongsColumns},
                steps::Steps,
            },
        },
    },
};

/// The state of a task that reports change.
pub(crate) struct Progress {
    /// [`crate::store::sql::Dialect::NUMBER`]
    pub(crate) number: i64,
    pub(crate) queue: QueueName,
    pub(crate) key_hash: KeyHash,
    replicas: u32,
    pub(crate) priority: Priority,
    stored: StoredStatus,
    pub(crate) status: StoredStatus,
    completed: u32,
    attempts: u32,
    pub(crate) epoch: u32,
    reason: String,
    updated_ms: i64,
    /// The task may have a row in the outbox.
    off_bus: bool,
    changed: bool,
    pub(crate) belongs: Belongs,
    /// The workers that have a result, credited or surplus.
    pub(crate) workers: HashSet<String>,
}

/// The columns that reports change. The one that differs most often comes first in comparisons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Change<'a> {
    updated_ms: i64,
    status: StoredStatus,
    completed: u32,
    attempts: u32,
    reason: &'a str,
}

/// From this many tasks with equal changes on, these share a statement. That is cheaper than a
/// statement with separate values for each task, and the reports of one worker's call have equal
/// times.
const ALIKE: usize = 4;

/// Reads these tasks and locks them.
pub(crate) async fn lock<S: Session>(
    session: &mut S,
    mut ids: Vec<TaskId>,
) -> Result<BTreeMap<TaskId, Progress>> {
    ids.sort_unstable();
    ids.dedup();
    let mut tasks = BTreeMap::new();
    for ids in lists(&ids) {
        let found = Statement::new(format!(
            "SELECT id, {} AS number, key_hash, queue, replicas, priority, status, completed, attempts, epoch, reason, \
             updated_ms, on_bus, {BELONGS_COLUMNS} FROM tasks ",
            S::NUMBER.unwrap_or("0")
        ))
        .sql(S::BY_PRIMARY_KEY)
        .sql(" WHERE id IN ")
        .list(ids)
        .sql(" ORDER BY id")
        .sql(S::FOR_UPDATE);
        for columns in session.fetch::<ProgressColumns>(found).await? {
            tasks.insert(task_id(&columns.id)?, columns.into_progress()?);
        }
    }
    // A task has results once it is credited or final. Every transaction that adds one holds the
    // task's lock, so this sees all of them.
    let may_have = |task: &Progress| task.completed > 0 || task.status.is_final();
    let reported: Vec<TaskId> = tasks
        .iter()
        .filter(|(_, task)| may_have(task))
        .map(|(id, _)| *id)
        .collect();
    for ids in lists(&reported) {
        let workers =
            Statement::new("SELECT task_id, worker FROM results WHERE ").append(S::of_tasks(ids));
        for (id, worker) in session.fetch::<(Vec<u8>, Vec<u8>)>(workers).await? {
            if let Some(task) = tasks.get_mut(&task_id(&id)?) {
                task.workers.insert(worker_name(worker)?);
            }
        }
    }
    Ok(tasks)
}

columns! {
    struct ProgressColumns {
        #[flatten]
        belongs: BelongsColumns,
        id: Vec<u8>,
        number: i64,
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
}

impl ProgressColumns {
    fn into_progress(self) -> Result<Progress> {
        let status = status(self.status)?;
        let queue = queue_name(&self.queue)?;
        let belongs = self.belongs.of(&queue)?;
        Ok(Progress {
            number: self.number,
            queue,
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
            belongs,
            workers: HashSet::new(),
        })
    }
}

impl Progress {
    pub(crate) fn credit(&mut self, attempt: u32, at_ms: i64) {
        self.completed += 1;
        // The attempt that succeeded does not count as a failure.
        self.attempts = self.attempts.max(attempt.saturating_sub(1));
        if self.completed >= self.replicas {
            self.status = StoredStatus::Completed;
        }
        self.touch(at_ms);
    }

    pub(crate) fn die(&mut self, reason: &str, attempts: u32, at_ms: i64) {
        self.status = StoredStatus::Dead;
        self.reason = reason.to_owned();
        self.attempts = attempts;
        self.touch(at_ms);
    }

    /// Records that a filter may match the task that did not match it before, because it has one
    /// more result.
    pub(crate) fn surplus(&mut self) {
        self.changed = true;
    }

    fn change(&self) -> Change<'_> {
        let Self {
            status,
            completed,
            attempts,
            reason,
            updated_ms,
            ..
        } = self;
        let (status, completed, attempts, updated_ms) =
            (*status, *completed, *attempts, *updated_ms);
        Change {
            status,
            completed,
            attempts,
            reason,
            updated_ms,
        }
    }

    fn touch(&mut self, at_ms: i64) {
        self.updated_ms = self.updated_ms.max(at_ms);
        self.changed = true;
    }

    /// The key of the task, if it has one and will never be completed.
    pub(crate) fn freed_key(&self) -> Option<(QueueName, KeyHash)> {
        let freed = matches!(self.status, StoredStatus::Dead | StoredStatus::Cancelled);
        let has_key = self.key_hash.task_without_key().is_none();
        (freed && has_key).then(|| (self.queue.clone(), self.key_hash))
    }
}

/// Stores the changes. Returns the tasks that have ended and may have a row in the outbox, which the
/// caller removes.
pub(crate) async fn store<S: Session>(
    session: &mut S,
    tasks: &BTreeMap<TaskId, Progress>,
    steps: &mut Steps,
) -> Result<Vec<TaskId>> {
    let changed: Vec<_> = tasks.iter().filter(|(_, task)| task.changed).collect();
    let mut alike: BTreeMap<Change<'_>, Vec<Value<'_>>> = BTreeMap::new();
    for (id, task) in &changed {
        let finder = S::NUMBER.map_or_else(|| (*id).into(), |_| task.number.into());
        alike.entry(task.change()).or_default().push(finder);
    }
    let mut others = Vec::new();
    let era = session.era();
    for (change, finders) in alike {
        if finders.len() < ALIKE {
            others.extend(finders.into_iter().map(|finder| (finder, change)));
            continue;
        }
        for finders in lists(&finders) {
            session
                .execute(update_alike::<S>(change, finders, era))
                .await?;
        }
    }
    for piece in pieces(&others, |(_, change)| change.reason.len()) {
        session.execute(update::<S>(piece, era)).await?;
    }
    let ended: Vec<_> = changed
        .into_iter()
        .filter(|(_, task)| task.status != task.stored)
        .collect();
    for (id, task) in &ended {
        steps.moved(
            **id,
            &task.queue,
            task.stored,
            task.status,
            &task.belongs,
            task.updated_ms,
        );
    }
    Ok(ended
        .into_iter()
        .filter(|(_, task)| task.off_bus)
        .map(|(id, _)| *id)
        .collect())
}

/// Updates tasks that all get the same values.
fn update_alike<'a, S: Session>(
    change: Change<'a>,
    finders: &'a [Value<'a>],
    era: Option<i64>,
) -> Statement<'a> {
    let Change {
        status,
        completed,
        attempts,
        reason,
        updated_ms,
    } = change;
    let set = " tasks SET status = ?, completed = ?, attempts = ?, reason = ?, updated_ms = ?";
    let update = Statement::new(S::UPDATE)
        .sql(set)
        .bind(status)
        .bind(completed)
        .bind(attempts)
        .bind(reason)
        .bind(updated_ms)
        .sql(", era = ")
        .sql(S::ERA)
        .bind_era(era);
    let leave = if status.is_final() {
        ", on_bus = 0 WHERE "
    } else {
        " WHERE "
    };
    update
        .sql(leave)
        .sql(S::NUMBER.unwrap_or("id"))
        .sql(" IN ")
        .list(finders)
}

/// Updates tasks, each with its own values.
fn update<'a, S: Session>(tasks: &[(Value<'a>, Change<'a>)], era: Option<i64>) -> Statement<'a> {
    let row = format!(
        "SELECT {} AS finder, ? AS new_status, ? AS new_completed, ? AS new_attempts, ? AS new_reason, \
         ? AS new_updated",
        S::FINDER
    );
    let rows = tasks.iter().map(|(finder, change)| -> [Value<'a>; 6] {
        [
            finder.clone(),
            change.status.into(),
            change.completed.into(),
            change.attempts.into(),
            change.reason.into(),
            change.updated_ms.into(),
        ]
    });
    let set = format!(
        "status = new_status, completed = new_completed, attempts = new_attempts, reason = new_reason, \
         updated_ms = new_updated, on_bus = CASE WHEN new_status = 0 THEN on_bus ELSE 0 END, era = {}",
        S::ERA
    );
    let [before, behind] = S::update_tasks(&set);
    // A database with a placeholder for the era has it before the rows.
    Statement::new(before)
        .bind_era(era)
        .rows(&row, " UNION ALL ", rows)
        .sql(&behind)
}
