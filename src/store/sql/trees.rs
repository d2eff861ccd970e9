//! Reads of trees, and what operators and the watchdog do to them. What counts trees is
//! [`super::tasks::trees`].

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{
    SqlStore,
    access::tokens,
    backend::Backend,
    dialect::Dialect,
    operators::bulk,
    rows::{columns, number, queue_name, status, task_id, tree_of},
    runner::Runner,
    session::Session,
    statement::{Statement, lists},
    tasks::{
        retention,
        steps::Steps,
        subtrees,
        trees::{self, Ends, Making, NewEnd, TREE_COLUMNS, TreeColumns, TreeRow, note_ends},
    },
};
use crate::{
    config::EventQueues,
    model::{Act, BulkChange, QueueName, TaskId, TreeOnDead, TreePages, TreeState, TreeView},
    store::{AddedBulk, ComparedTrees, Result, TREE_LOOKED_AT, TreeCount, Trees, WrongTree},
};

#[async_trait]
impl<DB: Backend> Trees for SqlStore<DB> {
    async fn trees(&self, pages: &TreePages) -> Result<Vec<TreeView>> {
        views(
            self.sql
                .read("trees", page::<DB::Connection>(pages))
                .await?,
        )
    }

    async fn trees_by_id(&self, ids: &[TaskId]) -> Result<Vec<TreeView>> {
        let mut found = Vec::with_capacity(ids.len());
        for ids in lists(ids) {
            let by_id = Statement::new(format!("SELECT {TREE_COLUMNS} FROM trees "))
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE id IN ")
                .list(ids);
            found.extend(views(self.sql.read("trees", by_id).await?)?);
        }
        Ok(found)
    }

    async fn trees_of(&self, tasks: &[TaskId]) -> Result<Vec<(TaskId, TaskId)>> {
        let mut trees = Vec::new();
        for tasks in lists(tasks) {
            let found = Statement::new("SELECT id, tree FROM tasks ")
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE LENGTH(tree) > 0 AND id IN ")
                .list(tasks);
            for (id, tree) in self
                .sql
                .read::<(Vec<u8>, Vec<u8>)>("trees_of", found)
                .await?
            {
                if let Some(tree) = tree_of(Some(&tree))? {
                    trees.push((task_id(&id)?, tree));
                }
            }
        }
        Ok(trees)
    }

    async fn tree_counts(&self, tree: TaskId) -> Result<(Vec<TreeCount>, bool)> {
        counts(&self.sql, tree).await
    }

    async fn tree_waits_for(&self, tree: TaskId, holds: bool, limit: u32) -> Result<Vec<TaskId>> {
        // The list has the oldest task first, so a page ends early only if they are unfinished.
        let statuses = if holds { "(0, 2)" } else { "(0)" };
        let waits = Statement::new("SELECT id FROM ")
            .append(members(&tree, u64::from(TREE_LOOKED_AT)))
            .sql(&format!(" WHERE status IN {statuses}"))
            .sql(" ORDER BY id LIMIT ?")
            .bind(limit);
        self.sql.ids("tree_waits_for", waits).await
    }

    async fn queues_of_tree(&self, tree: TaskId) -> Result<Vec<QueueName>> {
        let queues = Statement::new("SELECT DISTINCT tasks.queue FROM tree_tasks ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(
                " CROSS JOIN tasks ON tasks.id = tree_tasks.task \
                 WHERE tree_tasks.tree = ? AND tasks.status = 0",
            )
            .bind(&tree);
        let rows: Vec<(String,)> = self.sql.read("queues_of_tree", queues).await?;
        rows.iter().map(|(queue,)| queue_name(queue)).collect()
    }

    async fn cancel_tree(
        &self,
        tree: TaskId,
        bulk: &BulkChange,
        most_of_token: u32,
        start: &Act,
        mark: &Act,
    ) -> Result<AddedBulk> {
        let input = Cancel {
            tree,
            bulk: bulk.clone(),
            most_of_token,
            start: start.clone(),
            mark: mark.clone(),
            events: self.event_queues(),
        };
        let (added, ended) = self
            .sql
            .run_in_era("cancel_tree", input, |session, input| {
                Box::pin(cancel(session, input))
            })
            .await?;
        note_ends(&ended);
        Ok(added)
    }

    async fn open_trees(&self) -> Result<u64> {
        let open = Statement::new("SELECT COUNT(*) FROM trees ")
            .sql(&DB::Connection::by_index("trees_state"))
            .sql(" WHERE state = 0");
        let counts: Vec<(i64,)> = self.sql.read("open_trees", open).await?;
        counts.first().map_or(Ok(0), |(count,)| number(*count))
    }

    async fn open_trees_of(&self, queues: &[QueueName]) -> Result<Vec<(QueueName, u64)>> {
        let mut open = Vec::new();
        for queues in lists(queues) {
            let count = Statement::new("SELECT queue, COUNT(*) FROM trees ")
                .sql(&DB::Connection::by_index("trees_queue_state"))
                .sql(" WHERE state = 0 AND queue IN ")
                .list(queues)
                .sql(" GROUP BY queue");
            for (queue, count) in self
                .sql
                .read::<(String, i64)>("open_trees_of", count)
                .await?
            {
                open.push((queue_name(&queue)?, number(count)?));
            }
        }
        Ok(open)
    }

    async fn remove_ended_trees(&self, age: Duration, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_ended_trees";
        let old = self
            .sql
            .ids(NAME, old::<DB::Connection>(age, limit))
            .await?;
        if old.is_empty() {
            return Ok(0);
        }
        self.sql
            .run(NAME, (old, age), |session, (old, age)| {
                Box::pin(remove(session, old, *age))
            })
            .await
    }

    async fn wrong_trees(&self, after: Option<TaskId>, limit: u32) -> Result<ComparedTrees> {
        compare(&self.sql, after.unwrap_or(TaskId::FIRST), limit).await
    }

    async fn correct_tree(&self, tree: TaskId) -> Result<()> {
        let input = (tree, self.event_queues());
        let ended = self
            .sql
            .run_in_era("correct_tree", input, |session, (tree, events)| {
                Box::pin(correct(session, *tree, events))
            })
            .await?;
        note_ends(&ended);
        Ok(())
    }
}

fn views(rows: Vec<TreeColumns>) -> Result<Vec<TreeView>> {
    let mut views = Vec::with_capacity(rows.len());
    for columns in rows {
        views.push(TreeRow::try_from(columns)?.view);
    }
    Ok(views)
}

/// The trees of a page, newest first.
fn page<D: Dialect>(pages: &TreePages) -> Statement<'_> {
    let index = match (&pages.queue, pages.state) {
        (Some(_), None) => D::by_index("trees_queue"),
        (Some(_), Some(_)) => D::by_index("trees_queue_state"),
        (None, Some(_)) => D::by_index("trees_state"),
        (None, None) => D::BY_PRIMARY_KEY.to_owned(),
    };
    let since = pages.since_unix_ms.map_or(TaskId::FIRST, TaskId::first_of);
    let before = pages.after.map_or(TaskId::LAST, |cursor| cursor.0);
    let mut page = Statement::new(format!("SELECT {TREE_COLUMNS} FROM trees {index}"))
        .sql(" WHERE id >= ? AND id < ?")
        .bind(since.as_bytes().to_vec())
        .bind(before.as_bytes().to_vec());
    if let Some(queue) = &pages.queue {
        page = page.sql(" AND queue = ?").bind(queue);
    }
    if let Some(state) = pages.state {
        page = page.sql(" AND state = ?").bind(state as u32);
    }
    page.sql(" ORDER BY id DESC LIMIT ?").bind(pages.limit)
}

/// The first tasks of a tree with their rows, as a table for a FROM.
fn members(tree: &TaskId, limit: u64) -> Statement<'_> {
    Statement::new(
        "(SELECT task FROM tree_tasks WHERE tree = ? ORDER BY task LIMIT ?) AS members \
         CROSS JOIN tasks ON tasks.id = members.task",
    )
    .bind(tree)
    .bind(limit)
}

async fn counts<DB: Backend>(sql: &Runner<DB>, tree: TaskId) -> Result<(Vec<TreeCount>, bool)> {
    let looked_at = u64::from(TREE_LOOKED_AT);
    let count = Statement::new("SELECT tasks.queue, tasks.status, COUNT(*) FROM ")
        .append(members(&tree, looked_at))
        .sql(" GROUP BY tasks.queue, tasks.status ORDER BY tasks.queue, tasks.status");
    let mut counts = Vec::new();
    for (queue, stored, count) in sql.read::<(String, i64, i64)>("tree_counts", count).await? {
        counts.push(TreeCount {
            queue: queue_name(&queue)?,
            status: status(stored)?,
            count: number(count)?,
        });
    }
    let more =
        Statement::new("SELECT task FROM tree_tasks WHERE tree = ? ORDER BY task LIMIT 1 OFFSET ?")
            .bind(&tree)
            .bind(looked_at);
    let is_more = !sql.ids("tree_counts", more).await?.is_empty();
    Ok((counts, is_more))
}

/// The cancel of a tree.
struct Cancel {
    tree: TaskId,
    bulk: BulkChange,
    most_of_token: u32,
    start: Act,
    mark: Act,
    events: Arc<EventQueues>,
}

/// Marks a tree, and adds the bulk change in the same transaction. Without the bulk change, the tree
/// would drop what its tasks discover and end as if that had never been.
async fn cancel<S: Session>(session: &mut S, cancel: &Cancel) -> Result<(AddedBulk, Ends)> {
    let added = bulk::add(session, &cancel.bulk, cancel.most_of_token, &cancel.start).await?;
    if added != AddedBulk::Yes {
        return Ok((added, Ends::default()));
    }
    let mut rows = trees::lock(session, &[cancel.tree]).await?;
    let Some(row) = rows.get_mut(&cancel.tree) else {
        return Ok((added, Ends::default()));
    };
    if row.view.state != TreeState::Open || row.view.cancelling {
        return Ok((added, Ends::default()));
    }
    tokens::keep(session, &cancel.mark).await?;
    row.view.cancelling = true;
    // Only dead tasks may have kept it open.
    let now_ms = trees::now_ms(session).await?;
    let end = row.end_if_over(now_ms).map(|end| row.ended(end));
    if end.is_some() {
        row.remove_subtrees(session).await?;
    }
    trees::write(session, &[row]).await?;
    let ended = store_end(session, end, &cancel.events).await?;
    Ok((added, ended))
}

/// Stores the end of a tree that ended without a change of its tasks.
async fn store_end<S: Session>(
    session: &mut S,
    end: Option<NewEnd>,
    events: &Arc<EventQueues>,
) -> Result<Ends> {
    let Some(end) = end else {
        return Ok(Ends::default());
    };
    let making = Making {
        ends: vec![end],
        ..Making::default()
    };
    let ended = making.store(session, None).await?;
    let mut steps = Steps::new(events);
    steps.ended(&ended);
    steps.store(session).await?;
    Ok(ended)
}

/// The condition that all tasks of a tree were removed. Until then one of them may be sent again.
const HAS_NO_TASKS: &str =
    " AND NOT EXISTS (SELECT 1 FROM tree_tasks WHERE tree_tasks.tree = trees.id)";

/// The trees without tasks that ended earliest, at least `age` ago by the database's clock.
fn old<'a, S: Session>(age: Duration, limit: u32) -> Statement<'a> {
    let of_state = |state: TreeState| {
        Statement::new("SELECT * FROM (SELECT id, ended_ms FROM trees ")
            .sql(&S::by_index("trees_ended"))
            .sql(" WHERE state = ? AND ended_ms <= ")
            .bind(state as u32)
            .append(retention::before::<S>(age))
            .sql(HAS_NO_TASKS)
            .sql(" ORDER BY ended_ms LIMIT ?)")
            .bind(limit)
    };
    Statement::new("SELECT id FROM (")
        .append(of_state(TreeState::Done))
        .sql(" AS done UNION ALL ")
        .append(of_state(TreeState::Failed))
        .sql(" AS failed) AS ended ORDER BY ended_ms LIMIT ?")
        .bind(limit)
}

/// Removes those of these trees that are still as old.
async fn remove<S: Session>(session: &mut S, ids: &[TaskId], age: Duration) -> Result<u64> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let mut removed = 0;
    for ids in lists(&ids) {
        let still = Statement::new("SELECT id FROM trees ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE state <> 0 AND ended_ms <= ")
            .append(retention::before::<S>(age))
            .sql(HAS_NO_TASKS)
            .sql(" AND id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        let gone = session.ids(still).await?;
        for gone in lists(&gone) {
            removed += session
                .execute(Statement::new("DELETE FROM trees WHERE id IN ").list(gone))
                .await?;
        }
    }
    Ok(removed)
}

columns! {
    /// What the row of a tree has, and what was counted.
    struct ComparedColumns {
        id: Vec<u8>,
        queue: String,
        state: i64,
        on_dead: i64,
        cancelling: i64,
        open_tasks: i64,
        held_tasks: i64,
        joins: i64,
        counted_open: i64,
        counted_dead: i64,
    }
}

/// How many tasks a statement of a comparison counts, unless one tree has more.
const COMPARED_AT_ONCE: u64 = 100_000;

/// What a comparison counts for each tree, as columns.
const COUNTED: &str = "CAST(COALESCE(SUM(CASE WHEN tasks.status = 0 THEN 1 ELSE 0 END), 0) AS SIGNED) AS counted_open, \
     CAST(COALESCE(SUM(CASE WHEN tasks.status = 2 THEN 1 ELSE 0 END), 0) AS SIGNED) AS counted_dead";

impl ComparedColumns {
    fn holds(&self) -> bool {
        self.on_dead == TreeOnDead::Hold as i64
    }

    fn counted_held(&self) -> i64 {
        if self.holds() { self.counted_dead } else { 0 }
    }
}

/// Reads the rows of trees together with the counts of their tasks, by one statement, so that both are
/// of the same moment. The condition of the rows and [`BY_TREE`] follow.
fn counted<'a, D: Dialect>() -> Statement<'a> {
    Statement::new(format!(
        "SELECT page.id AS id, page.queue AS queue, page.state AS state, page.on_dead AS on_dead, \
         page.cancelling AS cancelling, page.open_tasks AS open_tasks, page.held_tasks AS held_tasks, \
         page.joins AS joins, \
         {COUNTED} FROM (SELECT id, queue, state, on_dead, cancelling, open_tasks, held_tasks, joins FROM trees "
    ))
    .sql(D::BY_PRIMARY_KEY)
}

const BY_TREE: &str = ") AS page \
     LEFT JOIN tree_tasks ON tree_tasks.tree = page.id LEFT JOIN tasks ON tasks.id = tree_tasks.task \
     GROUP BY page.id, page.queue, page.state, page.on_dead, page.cancelling, page.open_tasks, page.held_tasks, \
     page.joins ORDER BY page.id";

async fn compare<DB: Backend>(
    sql: &Runner<DB>,
    after: TaskId,
    limit: u32,
) -> Result<ComparedTrees> {
    let next = Statement::new("SELECT id, tasks FROM trees ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE id > ? ORDER BY id LIMIT ?")
        .bind(&after)
        .bind(limit);
    let next: Vec<(Vec<u8>, i64)> = sql.read("wrong_trees", next).await?;
    let mut tasks = 0_u64;
    let mut last = None;
    let mut is_last_page = next.len() < limit as usize;
    for (id, of_tree) in &next {
        tasks = tasks.saturating_add(of_tree.max(&0).unsigned_abs());
        if last.is_some() && tasks > COMPARED_AT_ONCE {
            is_last_page = false;
            break;
        }
        last = Some(task_id(id)?);
    }
    let Some(last) = last else {
        return Ok(ComparedTrees::default());
    };
    let page = counted::<DB::Connection>()
        .sql(" WHERE id > ? AND id <= ?")
        .bind(&after)
        .bind(&last)
        .sql(BY_TREE);
    let rows: Vec<ComparedColumns> = sql.read("wrong_trees", page).await?;
    let mut compared = ComparedTrees {
        wrong: Vec::new(),
        last: (!is_last_page).then_some(last),
    };
    for row in rows {
        let counted_held = row.counted_held();
        let is_held = counted_held > 0 && row.cancelling == 0;
        let is_over = row.state == TreeState::Open as i64 && row.counted_open == 0 && !is_held;
        let is_right = (row.open_tasks, row.held_tasks) == (row.counted_open, counted_held);
        let subtrees = match row.joins {
            0 => 0,
            _ => {
                let tree = task_id(&row.id)?;
                let compared = subtrees::compared::<DB::Connection>(&tree);
                let compared = sql.read("wrong_trees", compared).await?;
                subtrees::wrong(compared, row.holds())?.len()
            }
        };
        if !is_right || is_over || subtrees > 0 {
            compared.wrong.push(WrongTree {
                id: task_id(&row.id)?,
                queue: queue_name(&row.queue)?,
                open: row.open_tasks.max(0).unsigned_abs(),
                held: row.held_tasks.max(0).unsigned_abs(),
                counted_open: number(row.counted_open)?,
                counted_held: number(counted_held)?,
                subtrees,
                is_over,
            });
        }
    }
    Ok(compared)
}

/// Counts the tasks of a tree, and adds what its row is wrong by under the lock of the row.
///
/// The tasks are counted without the lock, which all who work on the tree wait for. Each of their
/// transactions changes tasks and row alike, so the row stays wrong by as much until it is locked.
async fn correct<S: Session>(
    session: &mut S,
    tree: TaskId,
    events: &Arc<EventQueues>,
) -> Result<Ends> {
    let count = counted::<S>().sql(" WHERE id = ?").bind(&tree).sql(BY_TREE);
    let counted: Vec<ComparedColumns> = session.fetch(count).await?;
    let Some(counted) = counted.first() else {
        return Ok(Ends::default());
    };
    let mut corrected = Ends::default();
    if counted.joins > 0 {
        let compared = session.fetch(subtrees::compared::<S>(&tree)).await?;
        let wrong = subtrees::wrong(compared, counted.holds())?;
        if !wrong.is_empty() {
            let mut steps = Steps::new(events);
            steps.trees().correct_subtrees(tree, &wrong);
            corrected = steps.store(session).await?;
        }
    }
    let mut rows = trees::lock(session, &[tree]).await?;
    let Some(row) = rows.get_mut(&tree) else {
        return Ok(corrected);
    };
    let wrong_by = |counted: i64, kept: i64| counted.saturating_sub(kept);
    let view = &mut row.view;
    trees::add(
        &mut view.open,
        wrong_by(counted.counted_open, counted.open_tasks),
    );
    trees::add(
        &mut view.held,
        wrong_by(counted.counted_held(), counted.held_tasks),
    );
    if row.view.state != TreeState::Open && row.view.waits_for() > 0 {
        row.view.state = TreeState::Open;
        row.view.epoch += 1;
        row.view.ended_unix_ms = None;
    }
    let now_ms = trees::now_ms(session).await?;
    let end = row.end_if_over(now_ms).map(|end| row.ended(end));
    if end.is_some() {
        row.remove_subtrees(session).await?;
    }
    trees::write(session, &[row]).await?;
    let ended = store_end(session, end, events).await?;
    corrected.trees.extend(ended.trees);
    corrected.made.extend(ended.made);
    Ok(corrected)
}
