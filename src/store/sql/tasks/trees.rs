//! The trees of a transaction: how many of their tasks are unfinished, and what follows when none
//! is.
//!
//! The changes of a transaction are summed for each tree, so a task that ends and discovers two
//! others is one change of +1. The rows of the trees are locked in order of their ids, after all
//! tasks of the transaction, their letters, their sequences and their outbox rows, and before the
//! counts of queues. After that the transaction inserts only tasks of ends, which nobody else can
//! wait for: docs/adr/0068-trees.md.

use std::collections::BTreeMap;

use super::{
    letters,
    made::store_made,
    members::{add_members, remove_members},
    step::{InTree, StatusChange},
    subtrees::{self, NewSubtree, Subtrees, WrongSubtree},
};
use crate::{
    model::{
        FeedRef, Part, QueueName, RowTree, StoredStatus, SubscriptionName, TaskId, TaskRow,
        ThenTask, TreeEnd, TreeOnDead, TreeSettings, TreeState, TreeView,
    },
    store::{
        Error, Result, Turn,
        sql::{
            rows::{columns, corrupt, number, queue_name, task_id, tree_of},
            session::Session,
            statement::{Statement, Value, lists, pieces},
        },
    },
    telemetry::metrics,
};

/// The columns of [`TreeColumns`].
pub(crate) const TREE_COLUMNS: &str = "id, queue, state, epoch, open_tasks, held_tasks, tasks, dead, cancelled, letters, late, \
     joins, cancelling, on_dead, deadline_ms, then_task, opened_ms, ended_ms, feed, reference";

/// The columns that change after a tree has begun.
const CHANGING: [&str; 13] = [
    "state",
    "epoch",
    "open_tasks",
    "held_tasks",
    "tasks",
    "dead",
    "cancelled",
    "letters",
    "late",
    "joins",
    "cancelling",
    "deadline_ms",
    "ended_ms",
];

/// How long the task of an end is left to the caller of a settlement, which publishes it.
const LEFT_TO_THE_CALLER_MS: i64 = 1000;

/// The changes that a transaction makes to trees.
#[derive(Default)]
pub(crate) struct Trees {
    changes: BTreeMap<TaskId, TreeChange>,
    subtrees: Subtrees,
    new: BTreeMap<TaskId, NewTree>,
    /// The tree of each new task, and the task.
    joined: Vec<(TaskId, TaskId)>,
    /// The tree of each removed task, and the task.
    left: Vec<(TaskId, TaskId)>,
    /// Stored tasks that become roots.
    adopted: Vec<TaskId>,
}

/// A tree that begins.
struct NewTree {
    queue: QueueName,
    settings: TreeSettings,
    opened_ms: i64,
}

/// What a transaction changes of a tree.
#[derive(Default)]
struct TreeChange {
    tasks: i64,
    open: i64,
    dead: i64,
    cancelled: i64,
    letters: i64,
    late: i64,
    /// Subtrees that begin and end.
    subtrees: i64,
    /// Dead tasks that are removed, and hold nothing any more.
    removed_dead: i64,
    /// A final task became unfinished again, or the task of a letter joins.
    is_back: bool,
    /// A letter is gone.
    letter_gone: bool,
    /// Tasks of the tree discovered others.
    discovers: bool,
    /// Inserts added tasks.
    joins: bool,
    /// The time of the latest change; 0: unknown.
    at_ms: i64,
}

/// What ended in the trees of a transaction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ends {
    pub(crate) trees: Vec<TreeEnd>,
    /// The tasks of the ends of trees and of subtrees, with their turns in the outbox; `None`: it is
    /// left to the watchdog.
    pub(crate) made: Vec<(TaskRow, Option<Turn>)>,
}

/// What a transaction has to know of a tree before it stores tasks there.
#[derive(Clone, Copy)]
pub(crate) struct TreeFacts {
    /// 0: it has none.
    pub(crate) deadline_ms: i64,
    /// Nothing is added any more.
    pub(crate) is_cancelling: bool,
    pub(crate) is_ended: bool,
}

impl TreeFacts {
    /// Whether the tree takes no tasks of inserts.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_cancelling || self.is_ended
    }
}

impl Trees {
    /// Records a change. Does nothing if the task is in no tree.
    pub(crate) fn hear(&mut self, change: &StatusChange<'_>) {
        match change {
            StatusChange::Added(task) => self.added(task),
            StatusChange::Moved {
                from,
                to,
                tree: Some((in_tree, at_ms)),
                ..
            } => self.moved(*in_tree, *from, *to, *at_ms),
            StatusChange::Removed {
                id,
                status,
                tree: Some(in_tree),
            } => self.removed(*in_tree, *id, *status),
            StatusChange::Moved { tree: None, .. } | StatusChange::Removed { tree: None, .. } => {}
        }
    }

    fn change(&mut self, tree: TaskId, at_ms: i64) -> &mut TreeChange {
        let change = self.changes.entry(tree).or_default();
        change.at_ms = change.at_ms.max(at_ms);
        change
    }

    fn added(&mut self, task: &TaskRow) {
        let Some(joins) = task.tree.as_deref() else {
            return;
        };
        let tree = joins.id(task.id);
        self.joined.push((tree, task.id));
        if let RowTree::Root(settings) = joins {
            self.new.insert(
                tree,
                NewTree {
                    queue: task.queue.clone(),
                    settings: settings.clone(),
                    opened_ms: task.created_unix_ms,
                },
            );
            return;
        }
        let change = self.change(tree, task.created_unix_ms);
        change.tasks += 1;
        change.open += 1;
        match joins {
            RowTree::Discovered { .. } => change.discovers = true,
            RowTree::Returns { .. } => change.is_back = true,
            RowTree::Joins(_) => change.joins = true,
            RowTree::Root(_) | RowTree::Sent(_) => {}
        }
        if let Some(subtree) = joins.subtree() {
            self.subtrees.added(subtree);
        }
    }

    fn moved(&mut self, in_tree: InTree, from: StoredStatus, to: StoredStatus, at_ms: i64) {
        let InTree { tree, subtree } = in_tree;
        if let Some(subtree) = subtree {
            self.subtrees.moved(subtree, from, to);
        }
        let change = self.change(tree, at_ms);
        for (status, sign) in [(from, -1), (to, 1)] {
            match status {
                StoredStatus::Unfinished => change.open += sign,
                StoredStatus::Dead => change.dead += sign,
                StoredStatus::Cancelled => change.cancelled += sign,
                // What is neither unfinished nor dead nor cancelled is completed.
                StoredStatus::Completed => {}
            }
        }
        change.is_back |= from.is_final() && to != from;
    }

    fn removed(&mut self, in_tree: InTree, id: TaskId, status: StoredStatus) {
        let InTree { tree, subtree } = in_tree;
        self.left.push((tree, id));
        if status == StoredStatus::Dead {
            self.change(tree, 0).removed_dead += 1;
            if let Some(subtree) = subtree {
                self.subtrees.removed_dead(subtree);
            }
        }
    }

    /// Records surplus reports and outputs that came too late for what they belong to in this tree.
    pub(crate) fn late(&mut self, tree: TaskId, count: usize, at_ms: i64) {
        self.change(tree, at_ms).late += i64::try_from(count).unwrap_or(i64::MAX);
    }

    /// Makes a stored task that is in no tree the root of one, because a subtree begins with it.
    pub(crate) fn adopt(&mut self, root: TaskId, queue: &QueueName, is_over: bool, at_ms: i64) {
        self.joined.push((root, root));
        self.adopted.push(root);
        self.new.insert(
            root,
            NewTree {
                queue: queue.clone(),
                settings: TreeSettings::default(),
                opened_ms: at_ms,
            },
        );
        self.change(root, at_ms).open -= i64::from(is_over);
    }

    /// Records that a subtree of this tree begins.
    pub(crate) fn begin_subtree(&mut self, id: TaskId, subtree: NewSubtree, at_ms: i64) {
        self.change(subtree.tree, at_ms);
        self.subtrees.begin(id, subtree);
    }

    /// Corrects subtrees of this tree.
    pub(crate) fn correct_subtrees(&mut self, tree: TaskId, wrong: &[WrongSubtree]) {
        self.change(tree, 0);
        for one in wrong {
            self.subtrees.correct(one);
        }
    }

    /// Records an output of a task of this tree into the join of a subtree.
    pub(crate) fn part(
        &mut self,
        tree: TaskId,
        subtree: TaskId,
        from: TaskId,
        part: Part,
        at_ms: i64,
    ) {
        self.change(tree, at_ms);
        self.subtrees.part(subtree, from, part);
    }

    /// Records new letters of tasks that were discovered in this tree.
    pub(crate) fn letters(&mut self, tree: TaskId, count: usize, at_ms: i64) {
        self.change(tree, at_ms).letters += i64::try_from(count).unwrap_or(i64::MAX);
    }

    /// Records that a letter is gone because its task was sent again. The task may be a duplicate,
    /// so a tree that has ended only ends again if it ends in another way without the letter.
    pub(crate) fn letter_gone(&mut self, tree: TaskId, at_ms: i64) {
        let change = self.change(tree, at_ms);
        change.letters -= 1;
        change.letter_gone = true;
    }

    /// Stores the changes, and the tasks of the trees and subtrees that end. Returns what ended.
    ///
    /// `published_at_ms` is the time of a caller that publishes these tasks itself. The caller has to
    /// tell the other steps of them.
    pub(crate) async fn store<S: Session>(
        self,
        session: &mut S,
        published_at_ms: Option<i64>,
    ) -> Result<Ends> {
        let Self {
            mut changes,
            subtrees,
            new,
            mut joined,
            mut left,
            adopted,
        } = self;
        begin(session, &new).await?;
        for adopted in &adopted {
            let adopt = Statement::new("UPDATE tasks SET tree = ? WHERE id = ?")
                .bind(adopted)
                .bind(adopted);
            session.execute(adopt).await?;
        }
        joined.sort_unstable();
        add_members(session, &joined).await?;
        left.sort_unstable();
        remove_members(session, &left).await?;
        if changes.is_empty() {
            return Ok(Ends::default());
        }
        let ids: Vec<TaskId> = changes.keys().copied().collect();
        let mut rows = lock(session, &ids).await?;
        let mut making = Making::default();
        if !subtrees.is_empty() {
            let at_ms = changes.values().map(|change| change.at_ms).max();
            let at_ms = match at_ms.unwrap_or(0) {
                0 => now_ms(session).await?,
                at_ms => at_ms,
            };
            let trees = rows.iter().map(|(id, row)| (*id, &row.view)).collect();
            for (tree, of_tree) in subtrees.store(session, &trees, at_ms).await? {
                let change = changes.entry(tree).or_default();
                let made = of_tree.made.len() + of_tree.stored.len();
                let made = i64::try_from(made).unwrap_or(i64::MAX);
                change.tasks += made;
                change.open += made;
                change.letters += i64::try_from(of_tree.letters.len()).unwrap_or(i64::MAX);
                change.subtrees += of_tree.subtrees;
                change.late += of_tree.late;
                letters::add(session, &of_tree.letters).await?;
                making.joins.extend(of_tree.made);
                making.stored.extend(of_tree.stored);
            }
        }
        let mut changed = Vec::new();
        for row in rows.values_mut() {
            let Some(change) = changes.get(&row.view.id) else {
                continue;
            };
            let is_ended = row.view.state != TreeState::Open;
            let is_closed = row.view.cancelling && (change.discovers || change.joins)
                || is_ended && change.joins;
            if is_closed && !change.is_back {
                // That came after the transaction had read the facts. The next attempt sees it.
                return Err(Error::Transient(
                    format!("tree {} takes nothing more", row.view.id).into(),
                ));
            }
            let before = row.view.clone();
            if let Some(end) = row.apply(session, change).await? {
                making.ends.push(row.ended(end));
            }
            // A dead task that held nothing may have been removed.
            if row.view != before {
                changed.push(&*row);
            }
        }
        write(session, &changed).await?;
        making.store(session, published_at_ms).await
    }
}

/// INSERT suffix for a new tree whose id another one has: a task without a key that was removed,
/// and is inserted again with its id. It joins that tree, which is open again.
///
/// MySQL assigns the columns from left to right.
fn join_namesake<S: Session>() -> String {
    format!(
        "{} epoch = epoch + CASE WHEN state = 0 THEN 0 ELSE 1 END, state = 0, open_tasks = open_tasks + 1, \
         tasks = tasks + 1, cancelling = 0, deadline_ms = {}, ended_ms = 0",
        S::on_conflict("id"),
        S::new_value("deadline_ms")
    )
}

/// Stores the rows of new trees, each with its root as the only task.
async fn begin<S: Session>(session: &mut S, new: &BTreeMap<TaskId, NewTree>) -> Result<()> {
    let new: Vec<_> = new.iter().collect();
    for piece in pieces(&new, |_| 0) {
        let rows = piece.iter().map(|(id, tree)| -> [Value<'_>; 20] {
            let [feed, reference] = feed_columns(tree.settings.feed.as_ref());
            [
                (*id).into(),
                (&tree.queue).into(),
                (TreeState::Open as u32).into(),
                0_u32.into(), // epoch
                1_u32.into(), // open_tasks
                0_u32.into(), // held_tasks
                1_u32.into(), // tasks
                0_u32.into(), // dead
                0_u32.into(), // cancelled
                0_u32.into(), // letters
                0_u32.into(), // late
                0_u32.into(), // joins
                false.into(), // cancelling
                (tree.settings.on_dead as u32).into(),
                tree.settings.deadline_unix_ms.into(),
                then_text(tree.settings.then.as_ref()).into(),
                tree.opened_ms.into(),
                0_i64.into(), // ended_ms
                feed.into(),
                reference.into(),
            ]
        });
        let begin = Statement::new(format!("INSERT INTO trees ({TREE_COLUMNS})")).values(rows);
        session.execute(begin.sql(&join_namesake::<S>())).await?;
    }
    Ok(())
}

/// Reads these trees and locks them.
pub(crate) async fn lock<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, TreeRow>> {
    let mut rows = BTreeMap::new();
    for ids in lists(ids) {
        let found = Statement::new(format!("SELECT {TREE_COLUMNS} FROM trees "))
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        for columns in session.fetch::<TreeColumns>(found).await? {
            let row = TreeRow::try_from(columns)?;
            rows.insert(row.view.id, row);
        }
    }
    Ok(rows)
}

/// Writes what changes of these trees, which are locked.
pub(crate) async fn write<S: Session>(session: &mut S, rows: &[&TreeRow]) -> Result<()> {
    for piece in pieces(rows, |_| 0) {
        let values = piece.iter().map(|row| -> [Value<'_>; 20] {
            let TreeRow { view, then, feed } = row;
            let [feed, reference] = feed_columns(feed.as_ref());
            [
                (&view.id).into(),
                (&view.queue).into(),
                (view.state as u32).into(),
                view.epoch.into(),
                view.open.into(),
                view.held.into(),
                view.tasks.into(),
                view.dead.into(),
                view.cancelled.into(),
                view.letters.into(),
                view.late.into(),
                view.joins.into(),
                view.cancelling.into(),
                (view.on_dead as u32).into(),
                view.deadline_unix_ms.unwrap_or(0).into(),
                then_text(then.as_ref()).into(),
                view.opened_unix_ms.into(),
                view.ended_unix_ms.unwrap_or(0).into(),
                feed.into(),
                reference.into(),
            ]
        });
        let write = Statement::new(format!("INSERT INTO trees ({TREE_COLUMNS})")).values(values);
        session
            .execute(write.sql(&S::replace("id", &CHANGING)))
            .await?;
    }
    Ok(())
}

/// What ends in a transaction, before its tasks are stored.
#[derive(Default)]
pub(crate) struct Making {
    pub(crate) ends: Vec<NewEnd>,
    /// The tasks of joins.
    pub(crate) joins: Vec<TaskRow>,
    /// Those that are stored already.
    pub(crate) stored: Vec<TaskRow>,
}

impl Making {
    /// Stores the tasks of these ends, with rows in the outbox.
    pub(crate) async fn store<S: Session>(
        self,
        session: &mut S,
        published_at_ms: Option<i64>,
    ) -> Result<Ends> {
        add_feed_acks(session, &self.ends).await?;
        let due_ms = published_at_ms.map_or(0, |at| at.saturating_add(LEFT_TO_THE_CALLER_MS));
        let mut tasks = self.joins;
        let mut ends = Ends::default();
        for NewEnd { end, then, .. } in self.ends {
            if let Some(then) = then {
                let task = then
                    .row(&end)
                    .ok_or_else(|| corrupt(format!("the then_task of tree {}", end.tree)))?;
                tasks.push(task);
            }
            ends.trees.push(end);
        }
        let made = store_made(session, tasks, due_ms).await?;
        ends.made
            .extend(made.into_iter().map(|(task, turn)| (task, Some(turn))));
        ends.made
            .extend(self.stored.into_iter().map(|task| (task, None)));
        Ok(ends)
    }
}

/// Adds the records of feeds that these trees came from to what is to be acknowledged.
async fn add_feed_acks<S: Session>(session: &mut S, ends: &[NewEnd]) -> Result<()> {
    let of_feeds = ends.iter().filter_map(|ended| {
        let feed = ended.feed.as_ref()?;
        Some((feed, ended.end.ended_unix_ms))
    });
    let mut acks: Vec<_> = of_feeds.collect();
    if acks.is_empty() {
        return Ok(());
    }
    acks.sort_unstable_by_key(|(of, _)| (of.feed.as_str(), of.reference.as_str()));
    for piece in pieces(&acks, |_| 0) {
        let rows = piece.iter().map(|(of, at_ms)| -> [Value<'_>; 3] {
            [
                of.feed.as_str().into(),
                of.reference.as_str().into(),
                at_ms.into(),
            ]
        });
        let add = Statement::new("INSERT INTO feed_acks (feed, reference, at_ms)").values(rows);
        session.execute(add.sql(&S::keep_first("feed"))).await?;
    }
    Ok(())
}

/// The deadlines of these trees, and whether they take tasks. Locks nothing.
pub(crate) async fn facts<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, TreeFacts>> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    let mut facts = BTreeMap::new();
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id, deadline_ms, cancelling, state FROM trees ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        for (id, deadline_ms, cancelling, state) in
            session.fetch::<(Vec<u8>, i64, i64, i64)>(found).await?
        {
            facts.insert(
                task_id(&id)?,
                TreeFacts {
                    deadline_ms,
                    is_cancelling: cancelling != 0,
                    is_ended: state != TreeState::Open as i64,
                },
            );
        }
    }
    Ok(facts)
}

/// The trees of those of these tasks that are in one and unfinished.
pub(crate) async fn of_unfinished<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, TaskId>> {
    let mut trees = BTreeMap::new();
    for ids in lists(ids) {
        let found = Statement::new("SELECT id, tree FROM tasks ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE LENGTH(tree) > 0 AND status = 0 AND id IN ")
            .list(ids);
        for (id, tree) in session.fetch::<(Vec<u8>, Vec<u8>)>(found).await? {
            if let Some(tree) = tree_of(Some(&tree))? {
                trees.insert(task_id(&id)?, tree);
            }
        }
    }
    Ok(trees)
}

/// The columns `feed` and `reference`.
fn feed_columns(of: Option<&FeedRef>) -> [&str; 2] {
    match of {
        Some(of) => [of.feed.as_str(), &of.reference],
        None => ["", ""],
    }
}

fn then_text(then: Option<&ThenTask>) -> String {
    then.map(|then| serde_json::to_string(then).expect("texts and numbers are always JSON"))
        .unwrap_or_default()
}

columns! {
    pub(crate) struct TreeColumns {
        id: Vec<u8>,
        queue: String,
        state: i64,
        epoch: i64,
        open_tasks: i64,
        held_tasks: i64,
        tasks: i64,
        dead: i64,
        cancelled: i64,
        letters: i64,
        late: i64,
        joins: i64,
        cancelling: i64,
        on_dead: i64,
        deadline_ms: i64,
        then_task: String,
        opened_ms: i64,
        ended_ms: i64,
        feed: String,
        reference: String,
    }
}

/// A row of `trees`.
#[derive(Clone, Debug)]
pub(crate) struct TreeRow {
    pub(crate) view: TreeView,
    pub(crate) then: Option<ThenTask>,
    /// The record of a feed that hears of the end.
    pub(crate) feed: Option<FeedRef>,
}

/// An end to store, with what follows from it.
pub(crate) struct NewEnd {
    end: TreeEnd,
    then: Option<ThenTask>,
    feed: Option<FeedRef>,
}

impl TryFrom<TreeColumns> for TreeRow {
    type Error = Error;

    fn try_from(columns: TreeColumns) -> Result<Self> {
        // A wrong count affects only its own tree, until `fsck` corrects it.
        let count = |number: i64| number.max(0).unsigned_abs();
        let some = |time_ms: i64| (time_ms > 0).then_some(time_ms);
        let then = match columns.then_task.as_str() {
            "" => None,
            text => {
                let then: ThenTask = serde_json::from_str(text)
                    .map_err(|error| corrupt(format!("the then_task of a tree: {error}")))?;
                Some(then)
            }
        };
        let mut view = TreeView {
            id: task_id(&columns.id)?,
            queue: queue_name(&columns.queue)?,
            state: TreeState::from_number(columns.state)
                .ok_or_else(|| corrupt(format!("the state {} of a tree", columns.state)))?,
            epoch: number(columns.epoch)?,
            tasks: count(columns.tasks),
            open: count(columns.open_tasks),
            held: count(columns.held_tasks),
            completed: 0,
            dead: count(columns.dead),
            cancelled: count(columns.cancelled),
            letters: count(columns.letters),
            late: count(columns.late),
            joins: count(columns.joins),
            cancelling: columns.cancelling != 0,
            on_dead: TreeOnDead::from_number(columns.on_dead)
                .ok_or_else(|| corrupt(format!("the on_dead {} of a tree", columns.on_dead)))?,
            then: then.as_ref().map(|then| then.queue.clone()),
            deadline_unix_ms: some(columns.deadline_ms),
            opened_unix_ms: columns.opened_ms,
            ended_unix_ms: some(columns.ended_ms),
        };
        count_completed(&mut view);
        let feed = match columns.feed.as_str() {
            "" => None,
            feed => Some(FeedRef {
                feed: SubscriptionName::new(feed).map_err(|error| corrupt(error.to_string()))?,
                reference: columns.reference,
            }),
        };
        Ok(Self { view, then, feed })
    }
}

/// What is neither unfinished nor dead nor cancelled is completed.
fn count_completed(view: &mut TreeView) {
    let others = view.open + view.dead + view.cancelled;
    view.completed = view.tasks.saturating_sub(others);
}

impl TreeRow {
    /// This end, with what follows from it.
    pub(crate) fn ended(&self, end: TreeEnd) -> NewEnd {
        NewEnd {
            end,
            then: self.then.clone(),
            feed: self.feed.clone(),
        }
    }

    /// Adds a change. Returns the end of the tree if nothing keeps it open any more.
    async fn apply<S: Session>(
        &mut self,
        session: &mut S,
        change: &TreeChange,
    ) -> Result<Option<TreeEnd>> {
        let at_ms = match change.at_ms {
            0 => now_ms(session).await?,
            at_ms => at_ms,
        };
        let view = &mut self.view;
        add(&mut view.tasks, change.tasks);
        add(&mut view.open, change.open);
        add(&mut view.dead, change.dead);
        add(&mut view.cancelled, change.cancelled);
        add(&mut view.letters, change.letters);
        add(&mut view.late, change.late);
        add(&mut view.joins, change.subtrees);
        if view.on_dead == TreeOnDead::Hold {
            add(&mut view.held, change.dead - change.removed_dead);
        }
        count_completed(view);
        let ends_otherwise = change.letter_gone && view.end(at_ms).state != view.state;
        if view.state != TreeState::Open && (change.is_back || change.open > 0 || ends_otherwise) {
            view.state = TreeState::Open;
            view.epoch += 1;
            view.ended_unix_ms = None;
        }
        if change.is_back {
            view.cancelling = false;
            // Otherwise what the task discovers would be dead at once.
            view.deadline_unix_ms = view.deadline_unix_ms.filter(|deadline| *deadline > at_ms);
        }
        let end = self.end_if_over(at_ms);
        if end.is_some() {
            self.remove_subtrees(session).await?;
        }
        Ok(end)
    }

    /// Removes what is left of the subtrees of a tree that has ended: those that dead tasks held when it
    /// was cancelled.
    pub(crate) async fn remove_subtrees<S: Session>(&mut self, session: &mut S) -> Result<()> {
        if self.view.joins > 0 {
            subtrees::remove_of(session, self.view.id).await?;
            self.view.joins = 0;
        }
        Ok(())
    }

    /// Ends the tree if it is open, and nothing keeps it open.
    pub(crate) fn end_if_over(&mut self, at_ms: i64) -> Option<TreeEnd> {
        let view = &mut self.view;
        if view.state != TreeState::Open || view.waits_for() > 0 {
            return None;
        }
        let end = view.end(at_ms.max(view.opened_unix_ms));
        view.state = end.state;
        view.ended_unix_ms = Some(end.ended_unix_ms);
        Some(end)
    }
}

/// Adds to a count, which never becomes negative.
pub(crate) fn add(count: &mut u64, change: i64) {
    *count = count.saturating_add_signed(change);
}

/// Counts the trees that ended in a transaction, after its commit.
pub(crate) fn note_ends(ends: &Ends) {
    ends.trees.iter().for_each(metrics::tree_ended);
}

/// The present time by the database's clock.
pub(crate) async fn now_ms<S: Session>(session: &mut S) -> Result<i64> {
    let now = Statement::new(format!("SELECT {}", S::NOW_MS));
    let now: Vec<(i64,)> = session.fetch(now).await?;
    Ok(now.first().map_or(0, |(now,)| *now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_transaction_are_summed_for_each_tree() {
        let queue = QueueName::new("q").unwrap();
        let tree = TaskId::new();
        let mut trees = Trees::default();
        let mut moved = |from, to| {
            trees.hear(&StatusChange::Moved {
                id: TaskId::new(),
                queue: &queue,
                from,
                to,
                tree: Some((
                    InTree {
                        tree,
                        subtree: None,
                    },
                    7,
                )),
                step_of: None,
            });
        };
        moved(StoredStatus::Unfinished, StoredStatus::Completed);
        moved(StoredStatus::Unfinished, StoredStatus::Dead);
        moved(StoredStatus::Unfinished, StoredStatus::Unfinished);
        let change = &trees.changes[&tree];
        assert_eq!((change.open, change.dead, change.at_ms), (-2, 1, 7));
        assert!(!change.is_back, "an unfinished task stays unfinished");
        trees.hear(&StatusChange::Moved {
            id: TaskId::new(),
            queue: &queue,
            from: StoredStatus::Dead,
            to: StoredStatus::Unfinished,
            tree: Some((
                InTree {
                    tree,
                    subtree: None,
                },
                5,
            )),
            step_of: None,
        });
        let change = &trees.changes[&tree];
        assert_eq!((change.open, change.dead, change.at_ms), (-1, 0, 7));
        assert!(change.is_back);
        trees.hear(&StatusChange::Moved {
            id: TaskId::new(),
            queue: &queue,
            from: StoredStatus::Unfinished,
            to: StoredStatus::Completed,
            tree: None,
            step_of: None,
        });
        assert_eq!(trees.changes.len(), 1, "a plain task changes no tree");
    }
}
