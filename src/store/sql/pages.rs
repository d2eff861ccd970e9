//! Pages of the outbox, and what it tells about queues.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    backend::Backend,
    outbox::{self, Listed},
    pools::Pools,
    rows::{queue_name, task_id},
    statement::{Statement, lists},
};
use crate::model::{QueueName, TaskId, TaskRow};
use crate::store::{BroughtForward, OutboxRow, PAGE_BYTES, Result, Unpublished};

/// Behind the last of all ids: no task has it.
const LAST_ID: TaskId = TaskId(uuid::Uuid::max());

/// A page of the outbox. Removes its rows whose task is final or does not exist any more.
pub(super) async fn page<'a, DB: Backend>(
    pools: &Pools<DB>,
    operation: &'static str,
    list: impl Fn(usize) -> Statement<'a> + Send,
    limit: usize,
    without: &HashSet<TaskId>,
) -> Result<Vec<OutboxRow>> {
    loop {
        let listed: Vec<outbox::ListedColumns> = pools.read(operation, list(limit + without.len())).await?;
        let listed = listed.into_iter().map(Listed::try_from).collect::<Result<Vec<_>>>()?;
        let page = first_of(listed, limit, without);
        let mut tasks = unfinished_of(pools, operation, &page).await?;
        let (mut rows, mut over) = (Vec::with_capacity(page.len()), Vec::new());
        for row in page {
            match tasks.remove(&row.task) {
                Some(task) => rows.push(row.with(task)),
                None => over.push((row.task, row.turn)),
            }
        }
        if !over.is_empty() {
            let over = &over;
            pools
                .run("remove_over", |mut tx| async move {
                    outbox::remove_over(&mut *tx, over).await?;
                    tx.commit(()).await
                })
                .await?;
        }
        if !rows.is_empty() || over.is_empty() {
            return Ok(rows);
        }
    }
}

/// The unfinished tasks of a page.
async fn unfinished_of<DB: Backend>(
    pools: &Pools<DB>,
    operation: &'static str,
    page: &[Listed],
) -> Result<HashMap<TaskId, TaskRow>> {
    let ids: Vec<TaskId> = page.iter().map(|row| row.task).collect();
    let mut tasks = HashMap::with_capacity(ids.len());
    for ids in lists(&ids) {
        for columns in pools.read::<outbox::UnfinishedColumns>(operation, outbox::tasks(ids)).await? {
            if !columns.is_final() {
                let task: TaskRow = columns.task.try_into()?;
                tasks.insert(task.id, task);
            }
        }
    }
    Ok(tasks)
}

/// The rows up to the one with which the page weighs [`PAGE_BYTES`].
fn first_of(listed: Vec<Listed>, limit: usize, without: &HashSet<TaskId>) -> Vec<Listed> {
    let mut bytes = 0;
    let wanted = listed.into_iter().filter(|row| !without.contains(&row.task)).take(limit);
    let fits = |row: &Listed| {
        let has_room = bytes < PAGE_BYTES;
        bytes += row.bytes;
        has_room
    };
    wanted.take_while(fits).collect()
}

pub(super) async fn bring_forward<DB: Backend>(
    pools: &Pools<DB>,
    later_than_ms: i64,
    to_ms: i64,
    after: Option<(i64, TaskId)>,
    limit: usize,
) -> Result<BroughtForward> {
    const NAME: &str = "bring_forward";
    let (due, task) = after.unwrap_or((later_than_ms, LAST_ID));
    let page = pools.read(NAME, outbox::later::<DB::Connection>(due, &task, limit)).await?;
    let page = page.into_iter().map(outbox::later_row).collect::<Result<Vec<_>>>()?;
    let next = (page.len() == limit).then(|| page.last().map(|row| (row.due_unix_ms, row.task))).flatten();
    let fresh = page.iter().filter(|row| row.unpublished == Unpublished::Fresh).map(|row| row.task);
    let fresh: Vec<TaskId> = fresh.collect();
    if fresh.is_empty() {
        return Ok(BroughtForward { rows: 0, next });
    }
    let fresh = &fresh;
    let rows = pools
        .run(NAME, |mut tx| async move {
            let done = outbox::bring_forward(&mut *tx, fresh, later_than_ms, to_ms).await?;
            tx.commit(done).await
        })
        .await?;
    Ok(BroughtForward { rows, next })
}

pub(super) async fn oldest_waiting<DB: Backend>(pools: &Pools<DB>, now_ms: i64) -> Result<Vec<(QueueName, i64)>> {
    const NAME: &str = "oldest_waiting";
    let mut oldest: BTreeMap<QueueName, TaskId> = BTreeMap::new();
    let mut waits = |queue: QueueName, id: TaskId| {
        oldest.entry(queue).and_modify(|oldest| *oldest = id.min(*oldest)).or_insert(id);
    };
    for (queue, id) in pools.read::<(String, Vec<u8>)>(NAME, outbox::oldest_due::<DB::Connection>(now_ms)).await? {
        waits(queue_name(&queue)?, task_id(&id)?);
    }
    for queue in parked_queues(pools).await? {
        let parked = outbox::oldest_parked::<DB::Connection>(&queue);
        for id in pools.read::<(Option<Vec<u8>>,)>(NAME, parked).await?.into_iter().filter_map(|(id,)| id) {
            waits(queue.clone(), task_id(&id)?);
        }
    }
    Ok(oldest.into_iter().map(|(queue, id)| (queue, id.created_unix_ms())).collect())
}

pub(super) async fn parked_queues<DB: Backend>(pools: &Pools<DB>) -> Result<Vec<QueueName>> {
    let mut queues: Vec<QueueName> = Vec::new();
    // From one queue to the next: a queue may have millions of rows.
    loop {
        let next = outbox::next_parked_queue::<DB::Connection>(queues.last());
        match &pools.read::<(Option<String>,)>("parked_queues", next).await?[..] {
            [(Some(queue),)] => queues.push(queue_name(queue)?),
            _ => return Ok(queues),
        }
    }
}
