//! Pages of tasks to publish, and facts about queues that follow from them.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::{
    model::{LIMIT_HASH_BYTES, LimitHash, QueueName, TaskId, TaskRow},
    store::{
        BroughtForward, DUE_LOOKED_AT, OutboxRow, PAGE_BYTES, Result, Turn, Unpublished,
        sql::{
            backend::Backend,
            outbox::{
                batches::{self, Batch},
                entries::{self, Listed},
            },
            pages,
            rows::{corrupt, number, queue_name, task_id},
            runner::Runner,
            statement::lists,
        },
    },
};

/// The kind of a page.
#[derive(Clone, Copy)]
pub(crate) enum Of<'a> {
    /// Everything that is due at this time.
    Due(i64),
    /// The parked rows of a queue.
    Parked(&'a QueueName),
    /// The crowded rows of a limit key.
    Crowded(&'a QueueName, &'a LimitHash),
}

impl Of<'_> {
    fn operation(self) -> &'static str {
        match self {
            Self::Due(_) => "due",
            Self::Parked(_) => "parked",
            Self::Crowded(..) => "crowded",
        }
    }
}

/// More than the number of tasks can ever be.
const ALL: usize = i64::MAX as usize;

pub(crate) async fn bring_forward<DB: Backend>(
    sql: &Runner<DB>,
    later_than_unix_ms: i64,
    to_unix_ms: i64,
    after: Option<(i64, TaskId)>,
    limit: usize,
) -> Result<BroughtForward> {
    const NAME: &str = "bring_forward";
    let batched = if after.is_none() {
        bring_batches_forward(sql, later_than_unix_ms, to_unix_ms).await?
    } else {
        0
    };
    let (due, task) = after.unwrap_or((later_than_unix_ms, TaskId::LAST));
    let page = sql
        .read(NAME, entries::later::<DB::Connection>(due, &task, limit))
        .await?;
    let page = page
        .into_iter()
        .map(entries::later_row)
        .collect::<Result<Vec<_>>>()?;
    let next = pages::next(&page, limit, |last| Ok((last.due_unix_ms, last.task)))?;
    let fresh = page
        .iter()
        .filter(|row| row.unpublished == Unpublished::Fresh)
        .map(|row| row.task);
    let fresh: Vec<TaskId> = fresh.collect();
    if fresh.is_empty() {
        return Ok(BroughtForward {
            rows: batched,
            next,
        });
    }
    let rows = sql
        .run(
            NAME,
            (fresh, later_than_unix_ms, to_unix_ms),
            |session, (fresh, later_than_ms, to_ms)| {
                Box::pin(entries::bring_forward(
                    session,
                    fresh,
                    *later_than_ms,
                    *to_ms,
                ))
            },
        )
        .await?;
    Ok(BroughtForward {
        rows: rows + batched,
        next,
    })
}

pub(crate) async fn oldest_waiting<DB: Backend>(
    sql: &Runner<DB>,
    now_unix_ms: i64,
) -> Result<Vec<(QueueName, i64)>> {
    const NAME: &str = "oldest_waiting";
    let mut oldest: BTreeMap<QueueName, TaskId> = BTreeMap::new();
    let mut waits = |queue: QueueName, id: TaskId| {
        oldest
            .entry(queue)
            .and_modify(|oldest| *oldest = id.min(*oldest))
            .or_insert(id);
    };
    for (queue, id) in sql
        .read::<(String, Vec<u8>)>(NAME, entries::oldest_due::<DB::Connection>(now_unix_ms))
        .await?
    {
        waits(queue_name(&queue)?, task_id(&id)?);
    }
    let due =
        batches::unpublished(sql, NAME, i64::MIN..=now_unix_ms, DUE_LOOKED_AT as usize).await?;
    let in_batches: Vec<(String, Vec<u8>)> =
        batches::waiting_in(sql, NAME, "queue, id", &due).await?;
    for (queue, id) in in_batches {
        waits(queue_name(&queue)?, task_id(&id)?);
    }
    for queue in parked_queues(sql).await? {
        let parked = entries::oldest_parked::<DB::Connection>(&queue);
        for id in sql
            .read::<(Option<Vec<u8>>,)>(NAME, parked)
            .await?
            .into_iter()
            .filter_map(|(id,)| id)
        {
            waits(queue.clone(), task_id(&id)?);
        }
    }
    Ok(oldest
        .into_iter()
        .map(|(queue, id)| (queue, id.created_unix_ms()))
        .collect())
}

pub(crate) async fn parked_queues<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<QueueName>> {
    let mut queues: Vec<QueueName> = Vec::new();
    // Goes from one queue to the next, because a queue may have millions of rows.
    loop {
        let next = entries::next_parked_queue::<DB::Connection>(queues.last());
        match &sql.read::<(Option<String>,)>("parked_queues", next).await?[..] {
            [(Some(queue),)] => queues.push(queue_name(queue)?),
            _ => return Ok(queues),
        }
    }
}

pub(crate) async fn crowded_queues<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<QueueName>> {
    let mut queues: Vec<QueueName> = Vec::new();
    loop {
        let next = entries::next_crowded_queue::<DB::Connection>(queues.last());
        match &sql
            .read::<(Option<String>,)>("crowded_queues", next)
            .await?[..]
        {
            [(Some(queue),)] => queues.push(queue_name(queue)?),
            _ => return Ok(queues),
        }
    }
}

pub(crate) async fn crowded_keys<DB: Backend>(
    sql: &Runner<DB>,
    queue: &QueueName,
    after: Option<&LimitHash>,
    limit: usize,
) -> Result<Vec<LimitHash>> {
    let mut keys: Vec<LimitHash> = Vec::new();
    // Goes from one limit key to the next, because one may have millions of rows.
    while keys.len() < limit {
        let next = entries::next_crowded_key::<DB::Connection>(queue, keys.last().or(after));
        let next: Vec<(Option<Vec<u8>>,)> = sql.read("crowded_keys", next).await?;
        let Some((Some(key),)) = next.into_iter().next() else {
            break;
        };
        let key = LimitHash::try_from(key).map_err(|key| {
            corrupt(format!(
                "a limit key of {} bytes instead of {LIMIT_HASH_BYTES}",
                key.len()
            ))
        })?;
        keys.push(key);
    }
    Ok(keys)
}

pub(crate) async fn count_crowded<DB: Backend>(
    sql: &Runner<DB>,
    queue: &QueueName,
    key: &LimitHash,
    most: u64,
) -> Result<u64> {
    let count = entries::count_crowded::<DB::Connection>(queue, key, most);
    let counts: Vec<(i64,)> = sql.read("count_crowded", count).await?;
    counts.first().map_or(Ok(0), |(count,)| number(*count))
}

pub(crate) async fn remove_batches<DB: Backend>(
    sql: &Runner<DB>,
    after: Option<Turn>,
    limit: u32,
) -> Result<Option<Turn>> {
    const NAME: &str = "remove_batches";
    let page = batches::published(sql, NAME, after, limit).await?;
    let needed = batches::needed(sql, NAME, &page).await?;
    let settled: Vec<Turn> = page
        .iter()
        .map(|batch| batch.number)
        .filter(|number| !needed.contains(number))
        .collect();
    remove_empty(sql, &settled).await?;
    pages::next(&page, limit as usize, |last| Ok(last.number))
}

/// Reads a page. Removes those of its outbox rows whose task is final or no longer exists.
pub(crate) async fn page<DB: Backend>(
    sql: &Runner<DB>,
    of: Of<'_>,
    limit: usize,
    without: &HashSet<TaskId>,
) -> Result<Vec<OutboxRow>> {
    let operation = of.operation();
    loop {
        let listed = list(sql, of, limit + without.len()).await?;
        let page = first_of(listed, limit, without);
        let mut tasks = unfinished_of(sql, operation, &page).await?;
        let (mut rows, mut over) = (Vec::with_capacity(page.len()), Vec::new());
        for row in page {
            match tasks.remove(&row.task) {
                Some(task) => rows.push(row.with(task)),
                None => over.push((row.task, row.turn)),
            }
        }
        let removed = !over.is_empty();
        if removed {
            sql.run("remove_over", over, |session, over| {
                Box::pin(entries::remove_over(session, over))
            })
            .await?;
        }
        if !rows.is_empty() || !removed {
            return Ok(rows);
        }
    }
}

/// The first rows, without their tasks.
async fn list<DB: Backend>(sql: &Runner<DB>, of: Of<'_>, limit: usize) -> Result<Vec<Listed>> {
    let rows = match of {
        Of::Due(now_ms) => entries::due::<DB::Connection>(now_ms, limit),
        Of::Parked(queue) => entries::parked::<DB::Connection>(queue, limit),
        Of::Crowded(queue, key) => entries::crowded::<DB::Connection>(queue, key, limit),
    };
    let rows: Vec<entries::ListedColumns> = sql.read(of.operation(), rows).await?;
    let mut listed = rows
        .into_iter()
        .map(Listed::try_from)
        .collect::<Result<Vec<_>>>()?;
    if let Of::Due(now_ms) = of {
        listed.extend(due_in_batches(sql, now_ms, limit).await?);
        listed.sort_unstable_by_key(|row| (row.due_ms, row.task));
        listed.truncate(limit);
    }
    Ok(listed)
}

/// The first tasks that wait in due batches, and possibly some more. Removes batches in which no
/// task waits.
async fn due_in_batches<DB: Backend>(
    sql: &Runner<DB>,
    now_ms: i64,
    limit: usize,
) -> Result<Vec<Listed>> {
    const NAME: &str = "due";
    const COLUMNS: &str = "insertion, id, LENGTH(task_key) + LENGTH(headers) + LENGTH(payload)";
    let mut wanted = limit;
    loop {
        let due = batches::unpublished(sql, NAME, i64::MIN..=now_ms, wanted).await?;
        let are_all = due.iter().map(|batch| batch.tasks).sum::<u64>() < wanted as u64;
        let waiting: Vec<(i64, Vec<u8>, i64)> =
            batches::waiting_in(sql, NAME, COLUMNS, &due).await?;
        let by_number: HashMap<Turn, &Batch> =
            due.iter().map(|batch| (batch.number, batch)).collect();
        let mut listed = Vec::with_capacity(waiting.len());
        for (batch, id, bytes) in waiting {
            let batch = by_number.get(&Turn(batch)).expect("asked for");
            listed.push(Listed::of_batch(batch, task_id(&id)?, number(bytes)?));
        }
        let still: HashSet<Turn> = listed.iter().map(|row| row.turn).collect();
        let empty: Vec<Turn> = due
            .iter()
            .map(|batch| batch.number)
            .filter(|number| !still.contains(number))
            .collect();
        remove_empty(sql, &empty).await?;
        if listed.len() >= limit || are_all {
            return Ok(listed);
        }
        // Most tasks of these batches no longer wait, so read more batches to fill the page.
        wanted = wanted.saturating_mul(2);
    }
}

async fn remove_empty<DB: Backend>(sql: &Runner<DB>, batches: &[Turn]) -> Result<()> {
    if batches.is_empty() {
        return Ok(());
    }
    sql.run("remove_batches", batches.to_vec(), |session, batches| {
        Box::pin(batches::remove(session, batches))
    })
    .await
}

/// The unfinished tasks of a page, each with whether it is as new.
async fn unfinished_of<DB: Backend>(
    sql: &Runner<DB>,
    operation: &'static str,
    page: &[Listed],
) -> Result<HashMap<TaskId, (TaskRow, bool)>> {
    let ids: Vec<TaskId> = page.iter().map(|row| row.task).collect();
    let mut tasks = HashMap::with_capacity(ids.len());
    for ids in lists(&ids) {
        for columns in sql
            .read::<entries::UnfinishedColumns>(operation, entries::tasks(ids))
            .await?
        {
            if !columns.is_final() {
                let is_as_new = columns.is_as_new();
                let task: TaskRow = columns.task.try_into()?;
                tasks.insert(task.id, (task, is_as_new));
            }
        }
    }
    Ok(tasks)
}

/// The rows up to the one at which the page reaches [`PAGE_BYTES`].
fn first_of(listed: Vec<Listed>, limit: usize, without: &HashSet<TaskId>) -> Vec<Listed> {
    let mut bytes = 0;
    let wanted = listed
        .into_iter()
        .filter(|row| !without.contains(&row.task))
        .take(limit);
    let fits = |row: &Listed| {
        let has_room = bytes < PAGE_BYTES;
        bytes += row.bytes;
        has_room
    };
    wanted.take_while(fits).collect()
}

/// Makes all batches due that are due later. Returns how many tasks they have.
async fn bring_batches_forward<DB: Backend>(
    sql: &Runner<DB>,
    later_than_ms: i64,
    to_ms: i64,
) -> Result<u64> {
    const NAME: &str = "bring_forward";
    let later = later_than_ms.saturating_add(1)..=i64::MAX;
    let batches = batches::unpublished(sql, NAME, later, ALL).await?;
    if batches.is_empty() {
        return Ok(0);
    }
    let numbers: Vec<Turn> = batches.iter().map(|batch| batch.number).collect();
    sql.run(NAME, (numbers, to_ms), |session, (numbers, to_ms)| {
        Box::pin(batches::bring_forward(session, numbers, *to_ms))
    })
    .await?;
    Ok(batches.iter().map(|batch| batch.tasks).sum())
}
