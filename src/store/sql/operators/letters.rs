//! Dead letters, as read by operators.

use std::{
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
        StoredLetter, TaskRow,
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
            },
        },
    },
    wire,
};

pub(crate) async fn keep_letters<DB: Backend>(
    sql: &Runner<DB>,
    letters: &[DeadLetter],
) -> Result<()> {
    let letters: Vec<NewLetter> = letters.iter().map(Into::into).collect();
    sql.run("keep_letters", letters, |session, letters| {
        Box::pin(add(session, letters))
    })
    .await
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
    let purge = sql.run(
        "purge",
        (ids.to_vec(), AtomicU64::new(0), events),
        |session, (ids, before, events)| {
            Box::pin(async move {
                let removed = purge_in(session, ids, events).await?;
                Ok(before.fetch_max(removed, Ordering::Relaxed).max(removed))
            })
        },
    );
    purge.await
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
    sql.run(NAME, (ids, events), |session, (ids, events)| {
        Box::pin(purge_in(session, ids, events))
    })
    .await
}

/// Removes letters. A dead task is removed with its letter, but its key stays. Returns how many
/// were removed.
async fn purge_in<S: Session>(
    session: &mut S,
    ids: &[LetterId],
    events: &Arc<EventQueues>,
) -> Result<u64> {
    let mut steps = Steps::new(events);
    let mut removed = retention::remove(session, ids, Which::Dead, &mut steps).await?;
    for ids in lists(ids) {
        let others = "DELETE FROM letters WHERE kind <> 1 AND id IN ";
        removed += session.execute(Statement::new(others).list(ids)).await?;
    }
    steps.store(session).await?;
    Ok(removed)
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
