//! Searches for tasks: an index yields the ids of candidates, and the rows decide about the rest of
//! the filter.
//!
//! The rows are read after the ids, so a task whose status changes in between is left out, or shown
//! with the new status. No payload is read.

use std::collections::{HashMap, HashSet};

use crate::{
    model::{
        KeyHash, Priority, QueueName, ShardId, StoredStatus, TaskCursor, TaskFilter, TaskId,
        WorkerName,
    },
    store::{
        ListedTask, Result, TaskPage, TaskSearch,
        sql::{
            backend::Backend,
            dialect::Dialect,
            rows::{columns, corrupt, number, queue_name, status, task_id, tree_of},
            runner::Runner,
            statement::{Statement, lists},
            tasks::{
                groups::{in_groups, order},
                keys,
            },
        },
    },
};

const NAME: &str = "search";

/// How many candidates to read at once if the rows have to decide. A key has at most 4 KiB, and
/// headers 16 KiB by default.
const AT_ONCE: usize = 512;
/// How many characters of a reason a list shows.
const SHOWN: usize = 4096;

pub(crate) async fn listed<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
) -> Result<Vec<ListedTask>> {
    Ok(rows(sql, ids, &TaskFilter::default())
        .await?
        .into_values()
        .collect())
}

pub(crate) async fn page<DB: Backend>(sql: &Runner<DB>, search: &TaskSearch) -> Result<TaskPage> {
    let TaskSearch {
        filter,
        limit,
        look_at,
        after,
        stays_in_queue,
    } = search;
    let (from, mut below) = filter.ids();
    if let Some(TaskCursor(after)) = after {
        below = below.min(*after);
    }
    let index = Index::of(filter, *stays_in_queue);
    let (limit, look_at) = (*limit as usize, *look_at as usize);
    let mut page = TaskPage::default();
    let mut looked_at = 0;
    while page.tasks.len() < limit && looked_at < look_at {
        let missing = limit - page.tasks.len();
        let wanted = if filter.is_residual() {
            AT_ONCE.max(missing.min(2 * AT_ONCE))
        } else {
            missing
        };
        let wanted = wanted.min(look_at - looked_at);
        let ids = index.candidates(sql, from, below, wanted).await?;
        let are_last = ids.len() < wanted;
        let mut rows = rows(sql, &ids, filter).await?;
        if let (Index::Queue(..), Some(worker)) = (&index, &filter.worker) {
            let done = done_by(sql, worker, &ids).await?;
            rows.retain(|id, _| done.contains(id));
        }
        let count = ids.len();
        for (at, id) in ids.into_iter().enumerate() {
            looked_at += 1;
            below = id;
            page.tasks.extend(rows.remove(&id));
            let is_end = are_last && at + 1 == count;
            page.next = (!is_end).then_some(TaskCursor(id));
            if page.tasks.len() == limit {
                break;
            }
        }
        if count == 0 || (are_last && page.next.is_none()) {
            page.next = None;
            break;
        }
    }
    page.looked_at = u32::try_from(looked_at).unwrap_or(u32::MAX);
    Ok(page)
}

/// The index that yields the candidates, newest first.
enum Index<'a> {
    /// The one task with the key.
    Key(KeyHash),
    Worker(&'a WorkerName),
    /// The list of a tree.
    Tree(TaskId),
    /// One range for each status.
    Queue(&'a QueueName, Vec<StoredStatus>),
    /// All tasks.
    Ids,
}

impl<'a> Index<'a> {
    fn of(filter: &'a TaskFilter, stays_in_queue: bool) -> Self {
        if let Some(tree) = filter.tree
            && filter.key.is_none()
            && (filter.queue.is_none() || !stays_in_queue)
        {
            return Self::Tree(tree);
        }
        match (&filter.queue, &filter.key, &filter.worker) {
            (Some(queue), Some(key), _) => Self::Key(KeyHash::new(queue, key)),
            (queue, _, Some(worker)) if queue.is_none() || !stays_in_queue => Self::Worker(worker),
            (Some(queue), None, _) => {
                let mut statuses = filter.stored_statuses();
                if statuses.is_empty() {
                    statuses.extend(StoredStatus::ALL);
                }
                Self::Queue(queue, statuses)
            }
            (None, _, _) => Self::Ids,
        }
    }

    /// At most `limit` ids in `from..below`, in descending order.
    async fn candidates<DB: Backend>(
        &self,
        sql: &Runner<DB>,
        from: TaskId,
        below: TaskId,
        limit: usize,
    ) -> Result<Vec<TaskId>> {
        let statement = match self {
            Self::Key(hash) => {
                let owners = keys::owners(sql, NAME, &[*hash]).await?;
                let ids = owners.into_iter().map(|(_, id, _)| id);
                return Ok(ids.filter(|id| (from..below).contains(id)).collect());
            }
            Self::Tree(tree) => {
                let listed = Statement::new(
                    "SELECT task FROM tree_tasks WHERE tree = ? AND task >= ? AND task < ?",
                )
                .bind(tree);
                return merged(
                    sql,
                    newest(listed, "task DESC", &from, &below, limit),
                    limit,
                )
                .await;
            }
            Self::Worker(worker) => {
                return merged(sql, by_worker::<DB>(worker, &from, &below, limit), limit).await;
            }
            Self::Queue(queue, statuses) => {
                let of_status = |status: &StoredStatus| {
                    let range = Statement::new("SELECT * FROM (SELECT id FROM tasks ")
                        .sql(&DB::Connection::of_status(*status))
                        .sql(" AND queue = ? AND id >= ? AND id < ?")
                        .bind(*queue);
                    newest(range, "id DESC", &from, &below, limit).sql(") AS page")
                };
                let ranges = statuses.iter().map(of_status);
                let all = ranges.reduce(|all, range| all.sql(" UNION ALL ").append(range));
                return merged(sql, all.expect("a filter has a status"), limit).await;
            }
            Self::Ids => Statement::new("SELECT id FROM tasks ")
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE id >= ? AND id < ?"),
        };
        merged(
            sql,
            newest(statement, "id DESC", &from, &below, limit),
            limit,
        )
        .await
    }
}

/// The newest tasks for which the worker has a result.
fn by_worker<'a, DB: Backend>(
    worker: &'a WorkerName,
    from: &'a TaskId,
    below: &'a TaskId,
    limit: usize,
) -> Statement<'a> {
    let results = Statement::new("SELECT task_id FROM results ")
        .sql(&DB::Connection::by_index("results_worker"))
        .sql(" WHERE worker = ? AND ")
        .bind(worker.as_str());
    let range = in_groups::<DB::Connection>("task_id", from, below)
        .sql(" AND task_id >= ? AND task_id < ?");
    newest(
        results.append(range),
        &order::<DB::Connection>("task_id", " DESC"),
        from,
        below,
        limit,
    )
}

/// Those of `ids` for which the worker has a result.
async fn done_by<DB: Backend>(
    sql: &Runner<DB>,
    worker: &WorkerName,
    ids: &[TaskId],
) -> Result<HashSet<TaskId>> {
    let mut done = HashSet::new();
    for ids in lists(ids) {
        let found = Statement::new("SELECT task_id FROM results ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE worker = ? AND ")
            .bind(worker.as_str())
            .append(DB::Connection::of_tasks(ids));
        done.extend(sql.ids(NAME, found).await?);
    }
    Ok(done)
}

fn newest<'a>(
    range: Statement<'a>,
    order: &str,
    from: &'a TaskId,
    below: &'a TaskId,
    limit: usize,
) -> Statement<'a> {
    range
        .bind(from)
        .bind(below)
        .sql(&format!(" ORDER BY {order} LIMIT ?"))
        .bind(limit as u64)
}

/// The newest ids of several sorted ranges.
async fn merged<DB: Backend>(
    sql: &Runner<DB>,
    ranges: Statement<'_>,
    limit: usize,
) -> Result<Vec<TaskId>> {
    let mut ids = sql.ids(NAME, ranges).await?;
    ids.sort_unstable_by(|a, b| b.cmp(a));
    // A task that moves from one range to another may be in both.
    ids.dedup();
    ids.truncate(limit);
    Ok(ids)
}

columns! {
    struct Columns {
        id: Vec<u8>,
        queue: String,
        shard: i64,
        task_key: Vec<u8>,
        status: i64,
        replicas: i64,
        completed: i64,
        attempts: i64,
        priority: i64,
        updated_ms: i64,
        not_before_ms: i64,
        deadline: i64,
        sequence: String,
        reason: String,
        shown_headers: String,
        epoch: i64,
        era: i64,
        in_tree: Option<Vec<u8>>,
    }
}

/// Those of `ids` that match the filter.
async fn rows<DB: Backend>(
    sql: &Runner<DB>,
    ids: &[TaskId],
    filter: &TaskFilter,
) -> Result<HashMap<TaskId, ListedTask>> {
    let headers = if filter.headers.is_empty() {
        "'[]'"
    } else {
        "headers"
    };
    let (statuses, mut rows) = (filter.stored_statuses(), HashMap::with_capacity(ids.len()));
    for ids in lists(ids) {
        let found = Statement::new(format!(
            "SELECT id, queue, shard, task_key, status, replicas, completed, attempts, priority, updated_ms, \
             not_before_ms, COALESCE(deadline_ms, 0) AS deadline, COALESCE(sequence, '') AS sequence, \
             reason, {headers} AS shown_headers, epoch, era, tree AS in_tree FROM tasks "
        ))
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id IN ")
        .list(ids);
        for columns in sql.read::<Columns>(NAME, found).await? {
            let status = status(columns.status)?;
            let has_status = statuses.is_empty() || statuses.contains(&status);
            let is_of_queue = filter
                .queue
                .as_ref()
                .is_none_or(|queue| queue.as_str() == columns.queue);
            let is_of_tree = filter.tree.is_none_or(|tree| {
                let in_tree = columns.in_tree.as_deref().unwrap_or_default();
                in_tree.starts_with(tree.as_bytes())
            });
            let has_key = columns.task_key.starts_with(&filter.key_prefix);
            let has_reason = columns.reason.starts_with(&filter.reason);
            let is_unchanged = filter
                .as_of_unix_ms
                .is_none_or(|as_of| columns.era < as_of && columns.updated_ms <= as_of);
            if has_status
                && is_of_queue
                && is_of_tree
                && has_key
                && has_reason
                && is_unchanged
                && has_headers(filter, &columns.shown_headers)?
            {
                let task = columns.into_task(status)?;
                rows.insert(task.id, task);
            }
        }
    }
    Ok(rows)
}

fn has_headers(filter: &TaskFilter, text: &str) -> Result<bool> {
    if filter.headers.is_empty() {
        return Ok(true);
    }
    let headers: Vec<(String, String)> =
        serde_json::from_str(text).map_err(|e| corrupt(format!("headers: {e}")))?;
    Ok(filter.headers.iter().all(|header| headers.contains(header)))
}

impl Columns {
    fn into_task(mut self, status: StoredStatus) -> Result<ListedTask> {
        // Cut here instead of in SQL, because SQLite's SUBSTR stops at a NUL.
        if let Some((end, _)) = self.reason.char_indices().nth(SHOWN) {
            self.reason.truncate(end);
        }
        Ok(ListedTask {
            id: task_id(&self.id)?,
            shard: ShardId {
                queue: queue_name(&self.queue)?,
                number: number(self.shard)?,
            },
            key: self.task_key.into(),
            status,
            replicas: number(self.replicas)?,
            completed: number(self.completed)?,
            attempts: number(self.attempts)?,
            priority: Priority::from_number(self.priority),
            updated_unix_ms: self.updated_ms,
            not_before_unix_ms: self.not_before_ms,
            deadline_unix_ms: self.deadline,
            sequence: self.sequence,
            reason: self.reason,
            epoch: number(self.epoch)?,
            tree: tree_of(self.in_tree.as_deref())?,
        })
    }
}
