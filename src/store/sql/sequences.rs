//! Reads and checks sequences: see [`super::tasks::sequences`].

use async_trait::async_trait;

use super::{
    SqlStore,
    backend::Backend,
    dialect::Dialect,
    queue_counts::{self, CountColumns},
    rows::{queue_name, task_id},
    statement::Statement,
    tasks::{
        counts::Counts,
        sequences::{self, sequence_hash},
        step::Step as _,
    },
};
use crate::{
    model::{QueueName, SequenceHash, StoredStatus, TaskId},
    store::{
        BEFORE_COUNTED, BrokenSequence, Result, SequenceCursor, SequencePage, SequencePlace,
        Sequences,
    },
};

/// How many rows a page of the check reads.
const CHECKED_AT_ONCE: u64 = 2000;

const NO_HEAD: &str = "its first task is finished or gone, and others wait behind it";
const NO_ROW: &str = "its task waits behind others, and nothing says which one goes first";
const WRONG_COUNT: &str = "its row says wrongly whether tasks wait";

#[async_trait]
impl<DB: Backend> Sequences for SqlStore<DB> {
    async fn sequence_place(&self, id: TaskId) -> Result<Option<SequencePlace>> {
        const NAME: &str = "sequence_place";
        let task = Statement::new(
            "SELECT queue, COALESCE(sequence, '') FROM tasks WHERE status = 0 AND id = ?",
        )
        .bind(&id);
        let task: Option<(String, String)> = self.sql.read(NAME, task).await?.into_iter().next();
        let Some((queue, name)) = task.filter(|(_, name)| !name.is_empty()) else {
            return Ok(None);
        };
        let hash = crate::model::sequence_hash(&queue_name(&queue)?, &name);
        let head = Statement::new(
            "SELECT head, COALESCE(status, -1) FROM sequences LEFT JOIN tasks ON id = head WHERE hash = ?",
        )
        .bind(&hash[..]);
        let head: Option<(Vec<u8>, i64)> = self.sql.read(NAME, head).await?.into_iter().next();
        let place =
            Statement::new("SELECT place FROM outbox WHERE state = 5 AND task_id = ?").bind(&id);
        let place: Option<(i64,)> = self.sql.read(NAME, place).await?.into_iter().next();
        let Some((head, status)) = head else {
            return Ok(None);
        };
        let head = task_id(&head)?;
        let before = match place {
            None if head == id => 0,
            None => return Ok(None),
            Some((place,)) => {
                let before = Statement::new("SELECT COUNT(*) FROM (SELECT task_id FROM outbox ")
                    .sql(&DB::Connection::by_index("outbox_behind"))
                    .sql(" WHERE state = 5 AND sequence_hash = ? AND place <= ? AND (place < ? OR task_id < ?)")
                    .sql(" LIMIT ?) AS counted")
                    .bind(&hash[..])
                    .bind(place)
                    .bind(place)
                    .bind(&id)
                    .bind(BEFORE_COUNTED - 1);
                let before: Vec<(i64,)> = self.sql.read(NAME, before).await?;
                1 + before
                    .first()
                    .map_or(0, |(count,)| count.max(&0).unsigned_abs())
            }
        };
        Ok(Some(SequencePlace {
            name,
            head,
            is_held: status == StoredStatus::Dead as i64,
            before,
        }))
    }

    async fn waiting_in_sequences(&self) -> Result<Vec<(QueueName, u64)>> {
        let behind = queue_counts::behind::<DB::Connection>();
        let behind: Vec<CountColumns> = self.sql.read("waiting_in_sequences", behind).await?;
        let mut waiting = Vec::with_capacity(behind.len());
        for (queue, _, count) in behind {
            if count > 0 {
                waiting.push((queue_name(&queue)?, count.unsigned_abs()));
            }
        }
        Ok(waiting)
    }

    async fn broken_sequences(&self, after: Option<SequenceCursor>) -> Result<SequencePage> {
        match after {
            None => self.broken_rows(&[]).await,
            Some(SequenceCursor::After(hash)) => self.broken_rows(&hash).await,
            Some(SequenceCursor::AfterTask(id)) => self.without_rows(id).await,
        }
    }

    async fn mend_sequence(&self, hash: SequenceHash, queue: &QueueName) -> Result<bool> {
        self.sql
            .run(
                "mend_sequence",
                (hash, queue.clone()),
                |session, (hash, queue)| {
                    Box::pin(async move {
                        let mut counts = Counts::default();
                        let was_wrong = sequences::mend(session, hash, queue, &mut counts).await?;
                        counts.store(session).await?;
                        Ok(was_wrong)
                    })
                },
            )
            .await
    }
}

impl<DB: Backend> SqlStore<DB> {
    /// Checks the rows of `sequences` after this hash.
    async fn broken_rows(&self, after: &[u8]) -> Result<SequencePage> {
        let rows = Statement::new(
            "SELECT page.hash, page.queue, head, waiting_tasks, COALESCE(status, -1), COALESCE(on_dead, 0), ",
        )
        .sql("COALESCE((SELECT place FROM outbox ")
        .sql(&DB::Connection::by_index("outbox_behind"))
        .sql(" WHERE state = 5 AND sequence_hash = page.hash ORDER BY place, task_id LIMIT 1), -1)")
        .sql(" FROM (SELECT hash, queue, head, waiting_tasks FROM sequences ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE hash > ? ORDER BY hash LIMIT ?) AS page LEFT JOIN tasks ON id = head")
        .bind(after)
        .bind(CHECKED_AT_ONCE);
        type Columns = (Vec<u8>, String, Vec<u8>, i64, i64, i64, i64);
        let rows: Vec<Columns> = self.sql.read("broken_sequences", rows).await?;
        let mut page = SequencePage::default();
        let is_last = (rows.len() as u64) < CHECKED_AT_ONCE;
        let mut last = SequenceHash::default();
        for (hash, queue, head, waiting, status, holds, first_place) in rows {
            let hash = sequence_hash(&hash)?;
            last = last.max(hash);
            let goes_on = status == StoredStatus::Unfinished as i64
                || status == StoredStatus::Dead as i64 && holds != 0;
            let says = if !goes_on {
                NO_HEAD
            } else if (waiting > 0) != (first_place >= 0) {
                WRONG_COUNT
            } else {
                continue;
            };
            page.broken.push(BrokenSequence {
                hash,
                queue: queue_name(&queue)?,
                task: task_id(&head)?,
                says,
            });
        }
        page.next = Some(if is_last {
            SequenceCursor::AfterTask(TaskId::FIRST)
        } else {
            SequenceCursor::After(last)
        });
        Ok(page)
    }

    /// Checks the waiting tasks after this one: each must have another task before it.
    async fn without_rows(&self, after: TaskId) -> Result<SequencePage> {
        let rows = Statement::new(
            "SELECT page.task_id, page.queue, page.sequence_hash, page.state, COALESCE(head, page.task_id) FROM \
             (SELECT task_id, queue, sequence_hash, state FROM outbox ",
        )
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE task_id > ? ORDER BY task_id LIMIT ?) AS page")
        .sql(" LEFT JOIN sequences ON hash = page.sequence_hash")
        .bind(&after)
        .bind(CHECKED_AT_ONCE);
        type Columns = (Vec<u8>, String, Vec<u8>, i64, Vec<u8>);
        let rows: Vec<Columns> = self.sql.read("broken_sequences", rows).await?;
        let mut page = SequencePage::default();
        let is_last = (rows.len() as u64) < CHECKED_AT_ONCE;
        let mut last = after;
        for (id, queue, hash, state, head) in rows {
            last = last.max(task_id(&id)?);
            if state != 5 || id != head {
                continue;
            }
            page.broken.push(BrokenSequence {
                hash: sequence_hash(&hash)?,
                queue: queue_name(&queue)?,
                task: task_id(&id)?,
                says: NO_ROW,
            });
        }
        page.next = (!is_last).then_some(SequenceCursor::AfterTask(last));
        Ok(page)
    }
}
