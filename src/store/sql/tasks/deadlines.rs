//! The deadlines of tasks, stored as rows of `changes` of a separate kind.
//!
//! `tasks` has the deadline, too, but no index on it, because that would have an entry for each
//! task without a deadline. If a task ends in time, its row stays until the deadline or until the
//! task is removed, so that ending a task costs nothing extra.

use crate::{
    model::{ChangeKind, ChangingTask, Priority, ShardId},
    store::{
        DueDeadlines, Overdue, Result,
        sql::{
            rows::{columns, corrupt, number, queue_name, task_id},
            session::Session,
            statement::{Statement, lists},
        },
    },
};

const KIND: i64 = ChangeKind::Deadline as i64;
/// How long to wait before reading an unreadable row again. It will stay unreadable, and must not
/// delay the others.
const UNREAD_MS: i64 = 24 * 3_600_000;

columns! {
    struct Columns {
        task_id: Vec<u8>,
        queue: Option<String>,
        shard: Option<i64>,
        replicas: Option<i64>,
        priority: Option<i64>,
        epoch: Option<i64>,
        status: Option<i64>,
        deadline_ms: Option<i64>,
    }
}

impl Columns {
    /// The overdue task, or `None` if there is no task left to end.
    fn into_overdue(self) -> Result<Option<Overdue>> {
        let (Some(queue), Some(0), Some(0), Some(deadline_unix_ms)) =
            (self.queue, self.status, self.epoch, self.deadline_ms)
        else {
            return Ok(None);
        };
        let number_of =
            |column: Option<i64>| column.ok_or_else(|| corrupt("a task without a number"));
        let task = ChangingTask {
            id: task_id(&self.task_id)?,
            shard: ShardId {
                queue: queue_name(&queue)?,
                number: number(number_of(self.shard)?)?,
            },
            replicas: number(number_of(self.replicas)?)?,
            priority: Priority::from_number(number_of(self.priority)?),
            epoch: 0,
        };
        Ok(Some(Overdue {
            task,
            deadline_unix_ms,
        }))
    }
}

pub(crate) async fn due<S: Session>(
    session: &mut S,
    now_ms: i64,
    again_ms: i64,
    limit: u32,
) -> Result<DueDeadlines> {
    let page =
        Statement::new("SELECT task_id, queue, shard, replicas, priority, epoch, status, deadline_ms FROM changes ")
            .sql(&S::by_index("changes_at"))
            .sql(" LEFT JOIN tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" ON id = task_id WHERE kind = ? AND at_ms <= ? ORDER BY at_ms, task_id LIMIT ?")
            .bind(KIND)
            .bind(now_ms)
            .bind(limit);
    let page: Vec<Columns> = session.fetch(page).await?;
    let is_full = page.len() == limit as usize;
    let (mut overdue, mut again, mut over, mut unread) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for columns in page {
        let id = columns.task_id.clone();
        match columns.into_overdue() {
            Ok(Some(one)) => {
                overdue.push(one);
                again.push(id);
            }
            Ok(None) => over.push(id),
            Err(error) => {
                let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
                tracing::error!(
                    "the deadline of task {hex} cannot be read, and waits for a day: {error}"
                );
                unread.push(id);
            }
        }
    }
    over.sort_unstable();
    for ids in lists(&over) {
        let remove =
            Statement::new("DELETE FROM changes WHERE kind = ? AND task_id IN ").bind(KIND);
        session.execute(remove.list(ids)).await?;
    }
    move_to(session, again, again_ms).await?;
    move_to(session, unread, now_ms.saturating_add(UNREAD_MS)).await?;
    Ok(DueDeadlines { overdue, is_full })
}

async fn move_to<S: Session>(session: &mut S, mut ids: Vec<Vec<u8>>, at_ms: i64) -> Result<()> {
    ids.sort_unstable();
    for ids in lists(&ids) {
        let again = Statement::new("UPDATE changes SET at_ms = ? WHERE kind = ? AND task_id IN ");
        session
            .execute(again.bind(at_ms).bind(KIND).list(ids))
            .await?;
    }
    Ok(())
}
