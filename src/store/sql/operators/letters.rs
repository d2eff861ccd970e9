//! Dead letters as their readers see them.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use async_trait::async_trait;

use crate::store::sql::{
    SqlStore,
    backend::Backend,
    dialect::Dialect,
    rows::{TASK_COLUMNS, TaskColumns, columns, corrupt, number, task_id},
    statement::{Statement, lists},
    tasks::letters,
};
use crate::{
    model::{
        DeadLetter, LetterCursor, LetterId, LetterKind, LetterPage, LetterPages, NewTask,
        StoredLetter, TaskRow,
    },
    store::{Letters, Result},
    wire,
};

#[async_trait]
impl<DB: Backend> Letters for SqlStore<DB> {
    async fn keep_letters(&self, letters: &[DeadLetter]) -> Result<()> {
        let letters: Vec<letters::NewLetter> = letters.iter().map(Into::into).collect();
        let keep = self.sql.run("keep_letters", letters, |session, letters| {
            Box::pin(letters::add(session, letters))
        });
        keep.await
    }

    async fn letters(&self, pages: &LetterPages) -> Result<LetterPage> {
        let rows: Vec<BriefColumns> = self
            .sql
            .read("letters", listed::<DB::Connection>(pages))
            .await?;
        let is_full = rows.len() == pages.limit as usize;
        let mut letters = rows
            .into_iter()
            .map(BriefColumns::into_letter)
            .collect::<Result<Vec<_>>>()?;
        let last = letters.last().map(|last| LetterCursor {
            at_unix_ms: last.letter.at_unix_ms,
            id: last.id,
        });
        letters.retain(|letter| letter.letter.reason.starts_with(&pages.filter.reason));
        Ok(LetterPage {
            letters,
            next: last.filter(|_| is_full),
        })
    }

    async fn letter(&self, id: LetterId) -> Result<Option<StoredLetter>> {
        const NAME: &str = "letter";
        let found =
            Statement::new("SELECT kind, at_ms, summary, content FROM letters WHERE id = ?")
                .bind(&id);
        let found: Vec<(i64, i64, Vec<u8>, Vec<u8>)> = self.sql.read(NAME, found).await?;
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
        let task: Vec<DeadTaskColumns> = self.sql.read(NAME, task).await?;
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

    async fn letter_kinds(&self, ids: &[LetterId]) -> Result<Vec<(LetterId, LetterKind)>> {
        let mut kinds = Vec::with_capacity(ids.len());
        for ids in lists(ids) {
            let found = Statement::new("SELECT id, kind FROM letters WHERE id IN ").list(ids);
            for (id, stored) in self
                .sql
                .read::<(Vec<u8>, i64)>("letter_kinds", found)
                .await?
            {
                kinds.push((task_id(&id)?, kind(stored)?));
            }
        }
        Ok(kinds)
    }

    async fn purge(&self, ids: &[LetterId]) -> Result<u64> {
        // The second number is that of an earlier attempt, whose COMMIT may have had no answer.
        let purge = self.sql.run(
            "purge",
            (ids.to_vec(), AtomicU64::new(0)),
            |session, (ids, before)| {
                Box::pin(async move {
                    let removed = letters::purge(session, ids).await?;
                    Ok(before.fetch_max(removed, Ordering::Relaxed).max(removed))
                })
            },
        );
        purge.await
    }

    async fn remove_old_letters(&self, age: Duration, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_old_letters";
        let ids = self
            .sql
            .ids(NAME, letters::old::<DB::Connection>(age, limit))
            .await?;
        if ids.is_empty() {
            return Ok(0);
        }
        self.sql
            .run(NAME, ids, |session, ids| {
                Box::pin(letters::purge(session, ids))
            })
            .await
    }
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
