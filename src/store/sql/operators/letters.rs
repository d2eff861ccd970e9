//! Dead letters, as read by operators.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    config::EventQueues,
    model::{
        DeadLetter, LetterCursor, LetterId, LetterKind, LetterPage, LetterPages, NewTask,
        StoredLetter, TaskId, TaskRow,
    },
    store::{
        Result,
        sql::{
            backend::Backend,
            dialect::Dialect,
            pages,
            rows::{TASK_COLUMNS, TaskColumns, columns, corrupt, number, task_id},
            runner::Runner,
            session::Session,
            statement::{Statement, lists},
            tasks::{
                letters::{NewLetter, add},
                retention::{self, Which},
                steps::Steps,
                trees::{self, Ends, Trees, note_ends},
            },
        },
    },
    wire,
};

pub(crate) async fn keep_letters<DB: Backend>(
    sql: &Runner<DB>,
    letters: &[DeadLetter],
) -> Result<()> {
    let input: Vec<DeadLetter> = letters.to_vec();
    sql.run_in_era("keep_letters", input, |session, letters| {
        Box::pin(keep(session, letters))
    })
    .await
}

/// Keeps letters. Those of tasks that were discovered in trees name the tree, and count there,
/// unless the tree takes nothing of the report: its task has ended, or the tree is being cancelled.
async fn keep<S: Session>(session: &mut S, letters: &[DeadLetter]) -> Result<()> {
    let mut letters = letters.to_vec();
    let mut parents: Vec<TaskId> = letters
        .iter()
        .filter(|letter| letter.kind() == LetterKind::Discovered)
        .filter_map(|letter| letter.parent_id)
        .collect();
    parents.sort_unstable();
    parents.dedup();
    let of_parents = trees::of_unfinished(session, &parents).await?;
    if !of_parents.is_empty() {
        count_in_trees(session, &mut letters, &of_parents).await?;
    }
    let new: Vec<NewLetter> = letters.iter().map(Into::into).collect();
    add(session, &new).await
}

/// Names the trees of these letters, and counts those that are not there yet. A report that is read
/// again brings its letters again.
async fn count_in_trees<S: Session>(
    session: &mut S,
    letters: &mut [DeadLetter],
    of_parents: &BTreeMap<TaskId, TaskId>,
) -> Result<()> {
    let mut ids: Vec<TaskId> = of_parents.values().copied().collect();
    ids.sort_unstable();
    ids.dedup();
    // Locked before the letters are looked up, so that nobody adds one of them in between.
    let rows = trees::lock(session, &ids).await?;
    let mut in_trees: BTreeMap<LetterId, (TaskId, i64)> = BTreeMap::new();
    for letter in letters {
        if letter.kind() != LetterKind::Discovered {
            continue;
        }
        let tree = letter.parent_id.and_then(|parent| of_parents.get(&parent));
        letter.tree = tree
            .filter(|tree| rows.get(tree).is_some_and(|row| !row.view.cancelling))
            .copied();
        if let Some(tree) = letter.tree {
            in_trees.insert(letter.id(), (tree, letter.at_unix_ms));
        }
    }
    let known: Vec<LetterId> = in_trees.keys().copied().collect();
    for known in lists(&known) {
        let there = Statement::new("SELECT id FROM letters ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(known)
            .sql(S::FOR_SHARE);
        for id in session.ids(there).await? {
            in_trees.remove(&id);
        }
    }
    let mut changes = Trees::default();
    for (tree, at_ms) in in_trees.values() {
        changes.letters(*tree, 1, *at_ms);
    }
    // A letter ends no tree: the parent is unfinished.
    changes.store(session, None).await?;
    Ok(())
}

pub(crate) async fn letters<DB: Backend>(
    sql: &Runner<DB>,
    asked: &LetterPages,
) -> Result<LetterPage> {
    let rows: Vec<BriefColumns> = sql.read("letters", listed::<DB::Connection>(asked)).await?;
    let mut letters = rows
        .into_iter()
        .map(BriefColumns::into_letter)
        .collect::<Result<Vec<_>>>()?;
    let next = pages::next(&letters, asked.limit as usize, |last| {
        Ok(LetterCursor {
            at_unix_ms: last.letter.at_unix_ms,
            id: last.id,
        })
    })?;
    letters.retain(|letter| letter.letter.reason.starts_with(&asked.filter.reason));
    Ok(LetterPage { letters, next })
}

pub(crate) async fn letter<DB: Backend>(
    sql: &Runner<DB>,
    id: LetterId,
) -> Result<Option<StoredLetter>> {
    const NAME: &str = "letter";
    let found =
        Statement::new("SELECT kind, at_ms, summary, content FROM letters WHERE id = ?").bind(&id);
    let found: Vec<(i64, i64, Vec<u8>, Vec<u8>)> = sql.read(NAME, found).await?;
    let Some((stored, at_unix_ms, summary, content)) = found.into_iter().next() else {
        return Ok(None);
    };
    let kind = kind(stored)?;
    if kind != LetterKind::Task {
        return Ok(Some(StoredLetter {
            id,
            kind,
            letter: read(content)?,
        }));
    }
    let task = Statement::new(format!(
        "SELECT {TASK_COLUMNS}, attempts, reason FROM tasks WHERE id = ?"
    ))
    .bind(&id);
    let task: Vec<DeadTaskColumns> = sql.read(NAME, task).await?;
    let Some(DeadTaskColumns {
        task,
        attempts,
        reason,
    }) = task.into_iter().next()
    else {
        return Ok(None);
    };
    let (row, attempts) = (TaskRow::try_from(task)?, number(attempts)?);
    let queue = row.queue.as_str().to_owned();
    let task = Some(NewTask::from(&row));
    let letter = DeadLetter {
        task_id: Some(id),
        queue,
        attempts,
        reason,
        at_unix_ms,
        task,
        ..read(summary)?
    };
    Ok(Some(StoredLetter { id, kind, letter }))
}

pub(crate) async fn letter_kinds<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[LetterId],
) -> Result<Vec<(LetterId, LetterKind)>> {
    let mut kinds = Vec::with_capacity(ids.len());
    for ids in lists(ids) {
        let found = Statement::new("SELECT id, kind FROM letters WHERE id IN ").list(ids);
        for (id, stored) in sql.read::<(Vec<u8>, i64)>("letter_kinds", found).await? {
            kinds.push((task_id(&id)?, kind(stored)?));
        }
    }
    Ok(kinds)
}

pub(crate) async fn purge<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[LetterId],
    events: Arc<EventQueues>,
) -> Result<u64> {
    // The number keeps the result of an earlier attempt whose COMMIT may have taken effect although
    // its response was lost.
    let purge = sql.run_in_era(
        "purge",
        (ids.to_vec(), AtomicU64::new(0), events),
        |session, (ids, before, events)| {
            Box::pin(async move {
                let (removed, ended) = purge_in(session, ids, events).await?;
                let removed = before.fetch_max(removed, Ordering::Relaxed).max(removed);
                Ok((removed, ended))
            })
        },
    );
    let (removed, ended) = purge.await?;
    note_ends(&ended);
    Ok(removed)
}

pub(crate) async fn remove_old_letters<DB: Backend>(
    sql: &Runner<DB>,
    age: Duration,
    limit: u32,
    events: Arc<EventQueues>,
) -> Result<u64> {
    const NAME: &str = "remove_old_letters";
    let ids = sql.ids(NAME, old::<DB::Connection>(age, limit)).await?;
    if ids.is_empty() {
        return Ok(0);
    }
    let purge = sql.run_in_era(NAME, (ids, events), |session, (ids, events)| {
        Box::pin(purge_in(session, ids, events))
    });
    let (removed, ended) = purge.await?;
    note_ends(&ended);
    Ok(removed)
}

/// Removes letters. A dead task is removed with its letter, but its key stays. Returns how many
/// were removed.
async fn purge_in<S: Session>(
    session: &mut S,
    ids: &[LetterId],
    events: &Arc<EventQueues>,
) -> Result<(u64, Ends)> {
    let mut steps = Steps::new(events);
    let mut removed = retention::remove(session, ids, Which::Dead, &mut steps).await?;
    for ids in lists(ids) {
        let others = "DELETE FROM letters WHERE kind <> 1 AND id IN ";
        removed += session.execute(Statement::new(others).list(ids)).await?;
    }
    let ended = steps.store(session).await?;
    Ok((removed, ended))
}

/// The oldest letters that do not refer to stored tasks and are at least `age` old by the
/// database's clock.
fn old<'a, S: Session>(age: Duration, limit: u32) -> Statement<'a> {
    let of_kind = |kind: LetterKind| {
        Statement::new("SELECT * FROM (SELECT id FROM letters ")
            .sql(&S::by_index("letters_kind"))
            .sql(" WHERE kind = ? AND at_ms <= ")
            .bind(kind)
            .append(retention::before::<S>(age))
            .sql(" ORDER BY at_ms LIMIT ?) AS page")
            .bind(limit)
    };
    let others = LetterKind::ALL
        .into_iter()
        .filter(|kind| *kind != LetterKind::Task)
        .map(of_kind);
    let all = others
        .reduce(|all, kind| all.sql(" UNION ALL ").append(kind))
        .expect("there are other kinds");
    all.sql(" LIMIT ?").bind(limit)
}

columns! {
    struct BriefColumns {
        letter_id: Vec<u8>,
        kind: i64,
        at_ms: i64,
        summary: Vec<u8>,
        task_key: Option<Vec<u8>>,
        task_queue: Option<String>,
        task_attempts: Option<i64>,
        task_reason: Option<String>,
    }
}

fn kind(number: i64) -> Result<LetterKind> {
    LetterKind::from_number(number).ok_or_else(|| corrupt(format!("a letter of kind {number}")))
}

fn read(bytes: Vec<u8>) -> Result<DeadLetter> {
    wire::read_dead_letter(&bytes.into()).map_err(|error| corrupt(format!("a letter: {error}")))
}

impl BriefColumns {
    fn into_letter(self) -> Result<StoredLetter> {
        let (id, kind, mut letter) = (
            task_id(&self.letter_id)?,
            kind(self.kind)?,
            read(self.summary)?,
        );
        letter.at_unix_ms = self.at_ms;
        if let (Some(key), Some(queue)) = (self.task_key, self.task_queue) {
            letter.task_id = Some(id);
            letter.queue.clone_from(&queue);
            letter.reason = self.task_reason.unwrap_or_default();
            letter.attempts = number(self.task_attempts.unwrap_or_default())?;
            letter.task = Some(NewTask {
                queue,
                key: key.into(),
                ..Default::default()
            });
        }
        Ok(StoredLetter { id, kind, letter })
    }
}

/// The letters of a page, the newest first.
fn listed<'a, D: Dialect>(pages: &'a LetterPages) -> Statement<'a> {
    let filter = &pages.filter;
    let index = match (&filter.queue, filter.kind) {
        (None, None) => "letters_at",
        (Some(_), None) => "letters_queue",
        (None, Some(_)) => "letters_kind",
        (Some(_), Some(_)) => "letters_queue_kind",
    };
    let mut statement = Statement::new(
        "SELECT letters.id AS letter_id, kind, at_ms, summary, task_key, tasks.queue AS task_queue, \
         attempts AS task_attempts, reason AS task_reason FROM letters ",
    )
    .sql(&D::by_index(index))
    .sql(" LEFT JOIN tasks ")
    .sql(D::BY_PRIMARY_KEY)
    .sql(" ON tasks.id = letters.id AND kind = 1 WHERE at_ms >= ? AND at_ms < ?")
    .bind(filter.since_unix_ms.unwrap_or(i64::MIN))
    .bind(filter.until_unix_ms.unwrap_or(i64::MAX));
    if let Some(queue) = &filter.queue {
        statement = statement.sql(" AND letters.queue = ?").bind(queue);
    }
    if let Some(kind) = filter.kind {
        statement = statement.sql(" AND kind = ?").bind(kind);
    }
    if let Some(LetterCursor { at_unix_ms, id }) = &pages.after {
        statement = statement.sql(" AND at_ms <= ? AND (at_ms < ? OR letters.id < ?)");
        statement = statement.bind(*at_unix_ms).bind(*at_unix_ms).bind(id);
    }
    statement
        .sql(" ORDER BY at_ms DESC, letters.id DESC LIMIT ?")
        .bind(pages.limit)
}

columns! {
    struct DeadTaskColumns {
        #[flatten]
        task: TaskColumns,
        attempts: i64,
        reason: String,
    }
}
