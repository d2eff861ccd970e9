//! The subtrees of a transaction: what came out of one task of a fork, on the ways to its join.
//!
//! A subtree counts its own tasks and the subtrees within it. When nothing of it is unfinished, its
//! parts become one task of the join, and the subtree is gone. All of that happens under the lock of
//! the row of its tree, so the rows of subtrees need no order of their own.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::{letters::NewLetter, made::store_made};
use crate::{
    model::{
        DeadLetter, Encoding, Forked, Join, NewTask, Part, RowTree, StoredStatus, TaskId, TaskRow,
        TreeOnDead, TreeView,
    },
    store::{
        Error, PAGE_BYTES, Result,
        sql::{
            dialect::Dialect,
            rows::{columns, corrupt, number, task_id},
            session::Session,
            statement::{Statement, Value, lists, pieces},
        },
    },
};

const SUBTREE_COLUMNS: &str =
    "id, tree, path, fork, open_tasks, held_tasks, children, parts, part_bytes, join_task";

/// The columns that change after a subtree has begun.
const CHANGING: [&str; 5] = [
    "open_tasks",
    "held_tasks",
    "children",
    "parts",
    "part_bytes",
];

/// The place that the task of the fork has among the parts of a subtree.
const FORK: i64 = -1;

/// The changes that a transaction makes to subtrees.
#[derive(Default)]
pub(crate) struct Subtrees {
    changes: BTreeMap<TaskId, Change>,
    new: BTreeMap<TaskId, NewSubtree>,
    /// The subtree of each new part, and the task that sent it.
    parts: Vec<(TaskId, TaskId, Part)>,
}

/// What a transaction changes of a subtree.
#[derive(Default)]
struct Change {
    open: i64,
    dead: i64,
    /// Dead tasks that are removed, and hold nothing any more.
    removed_dead: i64,
    /// Corrections by `fsck`: of held tasks, and of subtrees within it.
    wrong_held: i64,
    wrong_children: i64,
}

/// A subtree that begins.
pub(crate) struct NewSubtree {
    pub(crate) tree: TaskId,
    /// The subtrees around it, outermost first.
    pub(crate) path: Vec<TaskId>,
    pub(crate) fork: TaskId,
    pub(crate) join: Join,
}

/// What the beginnings and ends of subtrees change of their tree.
#[derive(Default)]
pub(crate) struct OfTree {
    /// The tasks of joins, to be stored.
    pub(crate) made: Vec<TaskRow>,
    /// Those that are stored already, because all together are too many bytes. Without payloads.
    pub(crate) stored: Vec<TaskRow>,
    /// Letters in place of those whose payload is too large.
    pub(crate) letters: Vec<NewLetter>,
    /// The change of the number of its subtrees.
    pub(crate) subtrees: i64,
    /// Parts that came for another join.
    pub(crate) late: i64,
}

impl Subtrees {
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.new.is_empty() && self.parts.is_empty()
    }

    pub(crate) fn begin(&mut self, id: TaskId, subtree: NewSubtree) {
        self.new.insert(id, subtree);
    }

    pub(crate) fn part(&mut self, subtree: TaskId, from: TaskId, part: Part) {
        self.parts.push((subtree, from, part));
    }

    pub(crate) fn added(&mut self, subtree: TaskId) {
        self.change(subtree).open += 1;
    }

    pub(crate) fn moved(&mut self, subtree: TaskId, from: StoredStatus, to: StoredStatus) {
        let change = self.change(subtree);
        for (status, sign) in [(from, -1), (to, 1)] {
            match status {
                StoredStatus::Unfinished => change.open += sign,
                StoredStatus::Dead => change.dead += sign,
                StoredStatus::Cancelled | StoredStatus::Completed => {}
            }
        }
    }

    pub(crate) fn removed_dead(&mut self, subtree: TaskId) {
        self.change(subtree).removed_dead += 1;
    }

    /// Adds what the row of a subtree is wrong by. It ends if it is over.
    pub(crate) fn correct(&mut self, wrong: &WrongSubtree) {
        let change = self.change(wrong.id);
        change.open += wrong.open;
        change.wrong_held += wrong.held;
        change.wrong_children += wrong.children;
    }

    fn change(&mut self, subtree: TaskId) -> &mut Change {
        self.changes.entry(subtree).or_default()
    }

    /// Stores the changes, and ends the subtrees of which nothing is unfinished any more. The rows of
    /// their trees are locked. Changes of a subtree that is gone change nothing.
    pub(crate) async fn store<S: Session>(
        self,
        session: &mut S,
        trees: &BTreeMap<TaskId, &TreeView>,
        at_ms: i64,
    ) -> Result<BTreeMap<TaskId, OfTree>> {
        let Self {
            changes,
            new,
            mut parts,
        } = self;
        let mut stored: BTreeSet<TaskId> = changes.keys().copied().collect();
        stored.extend(parts.iter().map(|(subtree, ..)| *subtree));
        stored.extend(new.values().filter_map(|subtree| subtree.path.last()));
        stored.retain(|id| !new.contains_key(id));
        let stored: Vec<TaskId> = stored.into_iter().collect();
        let mut ending = Ending {
            rows: lock(session, &stored).await?,
            trees,
            at_ms,
            touched: BTreeSet::new(),
            of_trees: BTreeMap::new(),
            gone: Vec::new(),
            bytes: 0,
        };
        let begun: Vec<TaskId> = new.keys().copied().collect();
        for (id, subtree) in new {
            ending.begin(id, subtree);
        }
        ending.store_forks(session, &begun).await?;
        for (id, change) in &changes {
            ending.apply(*id, change);
        }
        parts.retain(|(subtree, _, part)| ending.has_room(*subtree, part));
        store_parts(session, parts).await?;
        ending.end_all(session).await?;
        ending.write(session).await
    }
}

/// The subtrees of a transaction while those that are over end.
struct Ending<'t> {
    rows: BTreeMap<TaskId, SubtreeRow>,
    trees: &'t BTreeMap<TaskId, &'t TreeView>,
    at_ms: i64,
    /// By depth, the innermost last.
    touched: BTreeSet<(usize, TaskId)>,
    of_trees: BTreeMap<TaskId, OfTree>,
    /// Those that ended.
    gone: Vec<TaskId>,
    /// Of the tasks of joins that are kept in memory.
    bytes: usize,
}

impl Ending<'_> {
    fn begin(&mut self, id: TaskId, new: NewSubtree) {
        self.of_trees.entry(new.tree).or_default().subtrees += 1;
        self.touched.insert((new.path.len(), id));
        if let Some(parent) = new.path.last().and_then(|id| self.rows.get_mut(id)) {
            parent.children += 1;
        }
        self.rows.insert(
            id,
            SubtreeRow {
                id,
                tree: new.tree,
                path: new.path,
                fork: new.fork,
                open: 0,
                held: 0,
                children: 0,
                parts: 0,
                part_bytes: 0,
                join: new.join,
            },
        );
    }

    fn apply(&mut self, id: TaskId, change: &Change) {
        let Some(row) = self.rows.get_mut(&id) else {
            return;
        };
        row.open += change.open;
        let on_dead = self.trees.get(&row.tree).map(|tree| tree.on_dead);
        if on_dead == Some(TreeOnDead::Hold) {
            row.held += change.dead - change.removed_dead;
        }
        row.held += change.wrong_held;
        row.children += change.wrong_children;
        self.touched.insert((row.path.len(), id));
    }

    /// Counts a part. Returns whether it is stored: there is no point in it if the payload of the
    /// join's task is too large already. One whose join is another one by now is late.
    fn has_room(&mut self, subtree: TaskId, part: &Part) -> bool {
        let Some(row) = self.rows.get_mut(&subtree) else {
            return false;
        };
        if row.join.task.queue != part.join {
            self.of_trees.entry(row.tree).or_default().late += 1;
            return false;
        }
        self.touched.insert((row.path.len(), subtree));
        row.parts += 1;
        row.part_bytes = row.part_bytes.saturating_add(part.weight());
        row.part_bytes <= row.join.max_bytes
    }

    async fn end_all<S: Session>(&mut self, session: &mut S) -> Result<()> {
        while let Some((_, id)) = self.touched.pop_last() {
            let Some(row) = self.rows.get(&id) else {
                continue;
            };
            let is_cancelling = self.trees.get(&row.tree).is_none_or(|tree| tree.cancelling);
            if !row.is_over(is_cancelling) {
                continue;
            }
            let Some(row) = self.rows.remove(&id) else {
                continue;
            };
            self.gone.push(id);
            self.of_trees.entry(row.tree).or_default().subtrees -= 1;
            let parent = row.path.last().copied();
            let is_made = row.parts > 0 && !is_cancelling && self.make(session, &row).await?;
            let Some(parent) = parent else {
                continue;
            };
            if !self.rows.contains_key(&parent) {
                self.rows.extend(lock(session, &[parent]).await?);
            }
            if let Some(above) = self.rows.get_mut(&parent) {
                above.children -= 1;
                above.open += i64::from(is_made);
                self.touched.insert((above.path.len(), parent));
            }
        }
        Ok(())
    }

    /// Makes the task of the join of a subtree that is over, or a letter. Returns whether it is a
    /// task.
    async fn make<S: Session>(&mut self, session: &mut S, row: &SubtreeRow) -> Result<bool> {
        let made = match row.part_bytes > row.join.max_bytes {
            true => Err(row.part_bytes),
            false => {
                let (forked, parts) = read_parts(session, row).await?;
                row.join.row(row.id, &forked, &parts, self.at_ms)
            }
        };
        let of_tree = self.of_trees.entry(row.tree).or_default();
        match made {
            Ok(Some(mut task)) => {
                if let Some(tree) = self.trees.get(&row.tree) {
                    task.deadline_unix_ms = tree.deadline_unix_ms.unwrap_or(0);
                }
                task.tree = Some(Box::new(RowTree::Discovered {
                    tree: row.tree,
                    subtree: row.path.last().copied(),
                }));
                self.bytes = self.bytes.saturating_add(task.payload.len());
                if self.bytes <= PAGE_BYTES {
                    of_tree.made.push(task);
                } else {
                    // Due at once, because the caller does not publish it.
                    for (task, _) in store_made(session, vec![task], 0).await? {
                        let payload = Bytes::new();
                        of_tree.stored.push(TaskRow { payload, ..task });
                    }
                }
                Ok(true)
            }
            Ok(None) => Err(corrupt(format!("the join_task of subtree {}", row.id))),
            Err(bytes) => {
                of_tree.letters.push(row.letter(bytes, self.at_ms));
                Ok(false)
            }
        }
    }

    /// Stores the tasks of the forks of these new subtrees, for their joins, while they are there.
    /// Their payloads stay in SQL: there may be many.
    async fn store_forks<S: Session>(&self, session: &mut S, begun: &[TaskId]) -> Result<()> {
        let rows: Vec<&SubtreeRow> = begun.iter().filter_map(|id| self.rows.get(id)).collect();
        write_rows(session, &rows).await?;
        for begun in lists(begun) {
            let copy = Statement::new(
                "INSERT INTO parts (subtree, task, place, stage, port, part_key, encoding, payload) \
                 SELECT subtrees.id, tasks.id, -1, '', '', tasks.task_key, tasks.payload_encoding, tasks.payload \
                 FROM subtrees CROSS JOIN tasks ON tasks.id = subtrees.fork WHERE subtrees.id IN ",
            )
            .list(begun)
            .sql(&S::keep_first("place"));
            session.execute(copy).await?;
        }
        Ok(())
    }

    async fn write<S: Session>(mut self, session: &mut S) -> Result<BTreeMap<TaskId, OfTree>> {
        let rows: Vec<&SubtreeRow> = self.rows.values().collect();
        write_rows(session, &rows).await?;
        self.gone.sort_unstable();
        remove(session, &self.gone).await?;
        Ok(self.of_trees)
    }
}

async fn write_rows<S: Session>(session: &mut S, rows: &[&SubtreeRow]) -> Result<()> {
    for piece in pieces(rows, |_| 0) {
        let values = piece.iter().map(|row| row.values());
        let write = Statement::new(format!("INSERT INTO subtrees ({SUBTREE_COLUMNS})"))
            .values(values)
            .sql(&S::replace("id", &CHANGING));
        session.execute(write).await?;
    }
    Ok(())
}

/// Removes subtrees with their parts.
async fn remove<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<()> {
    for ids in lists(ids) {
        for table in ["parts WHERE subtree IN ", "subtrees WHERE id IN "] {
            let delete = Statement::new(format!("DELETE FROM {table}")).list(ids);
            session.execute(delete).await?;
        }
    }
    Ok(())
}

/// Removes what is left of the subtrees of a tree that has ended.
pub(crate) async fn remove_of<S: Session>(session: &mut S, tree: TaskId) -> Result<()> {
    let left = Statement::new("SELECT id FROM subtrees ")
        .sql(&S::by_index("subtrees_tree"))
        .sql(" WHERE tree = ?")
        .bind(&tree);
    let left = session.ids(left).await?;
    remove(session, &left).await
}

async fn store_parts<S: Session>(
    session: &mut S,
    mut parts: Vec<(TaskId, TaskId, Part)>,
) -> Result<()> {
    parts.sort_unstable_by_key(|(subtree, from, part)| (*subtree, *from, part.index));
    for piece in pieces(&parts, |(.., part)| part.weight()) {
        let values = piece.iter().map(|(subtree, from, part)| -> [Value<'_>; 8] {
            [
                subtree.into(),
                from.into(),
                part.index.into(),
                part.stage.as_str().into(),
                part.port.as_str().into(),
                (&part.key[..]).into(),
                part.encoding.into(),
                (&part.payload[..]).into(),
            ]
        });
        let insert = Statement::new(
            "INSERT INTO parts (subtree, task, place, stage, port, part_key, encoding, payload)",
        )
        .values(values)
        .sql(&S::keep_first("place"));
        session.execute(insert).await?;
    }
    Ok(())
}

/// The task of the fork and the parts of a subtree, which are in the order of the join: by stage, task
/// and place.
async fn read_parts<S: Session>(
    session: &mut S,
    subtree: &SubtreeRow,
) -> Result<(Forked, Vec<Part>)> {
    let read = Statement::new(
        "SELECT place, stage, port, part_key, encoding, payload FROM parts WHERE subtree = ? \
         ORDER BY task, place",
    )
    .bind(&subtree.id);
    let mut forked = Forked::default();
    let mut parts = Vec::new();
    for (place, stage, port, key, encoding, payload) in session
        .fetch::<(i64, String, String, Vec<u8>, i64, Vec<u8>)>(read)
        .await?
    {
        let encoding = Encoding::from_number(encoding);
        if place == FORK {
            forked = Forked {
                key: key.into(),
                payload: payload.into(),
                encoding,
            };
            continue;
        }
        parts.push(Part {
            index: number(place)?,
            stage,
            port,
            key: key.into(),
            payload: payload.into(),
            encoding,
            ..Part::default()
        });
    }
    parts.sort_by_key(|part| subtree.join.place_of(&part.stage));
    Ok((forked, parts))
}

/// Reads these subtrees. Those that are gone are left out.
async fn lock<S: Session>(session: &mut S, ids: &[TaskId]) -> Result<BTreeMap<TaskId, SubtreeRow>> {
    let mut rows = BTreeMap::new();
    for ids in lists(ids) {
        // With a lock only so that the rows are the latest.
        let found = Statement::new(format!("SELECT {SUBTREE_COLUMNS} FROM subtrees "))
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        for columns in session.fetch::<SubtreeColumns>(found).await? {
            let row = SubtreeRow::try_from(columns)?;
            rows.insert(row.id, row);
        }
    }
    Ok(rows)
}

/// The subtrees around each of these, outermost first, and each itself last. Locks nothing. Those that
/// are gone are left out.
pub(crate) async fn paths<S: Session>(
    session: &mut S,
    ids: &[TaskId],
) -> Result<BTreeMap<TaskId, Vec<TaskId>>> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    let mut paths = BTreeMap::new();
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id, path FROM subtrees ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids);
        for (id, path) in session.fetch::<(Vec<u8>, Vec<u8>)>(found).await? {
            let id = task_id(&id)?;
            let mut path = path_of(&path)?;
            path.push(id);
            paths.insert(id, path);
        }
    }
    Ok(paths)
}

columns! {
    /// A row of a subtree, or what was counted of its tasks.
    pub(crate) struct ComparedColumns {
        is_counted: i64,
        id: Vec<u8>,
        path: Vec<u8>,
        open: i64,
        held: i64,
        children: i64,
    }
}

/// A subtree whose row differs from its tasks, and by how much. If all are 0, its row is right and
/// the subtree is over, but was not removed.
pub(crate) struct WrongSubtree {
    id: TaskId,
    open: i64,
    held: i64,
    children: i64,
}

/// Reads the rows of the subtrees of a tree together with the counts of their tasks, so that both are of
/// the same moment.
pub(crate) fn compared<D: Dialect>(tree: &TaskId) -> Statement<'_> {
    Statement::new(
        "SELECT 0 AS is_counted, id, path, open_tasks AS open, held_tasks AS held, children FROM subtrees ",
    )
    .sql(&D::by_index("subtrees_tree"))
    .sql(" WHERE tree = ?")
    .bind(tree)
    .sql(
        " UNION ALL SELECT 1, SUBSTR(tasks.tree, 17), SUBSTR(tasks.tree, 33), \
         CAST(SUM(CASE WHEN tasks.status = 0 THEN 1 ELSE 0 END) AS SIGNED), \
         CAST(SUM(CASE WHEN tasks.status = 2 THEN 1 ELSE 0 END) AS SIGNED), 0 \
         FROM tree_tasks CROSS JOIN tasks ON tasks.id = tree_tasks.task \
         WHERE tree_tasks.tree = ? AND LENGTH(tasks.tree) > 16 \
         GROUP BY SUBSTR(tasks.tree, 17), SUBSTR(tasks.tree, 33)",
    )
    .bind(tree)
}

/// The subtrees among these rows that are wrong. Dead tasks hold only in some trees.
pub(crate) fn wrong(rows: Vec<ComparedColumns>, holds: bool) -> Result<Vec<WrongSubtree>> {
    let mut counted: BTreeMap<TaskId, (i64, i64)> = BTreeMap::new();
    let mut children: BTreeMap<TaskId, i64> = BTreeMap::new();
    let mut kept = Vec::new();
    for row in rows {
        let id = task_id(&row.id)?;
        if row.is_counted != 0 {
            counted.insert(id, (row.open, row.held));
            continue;
        }
        if let Some(parent) = path_of(&row.path)?.last() {
            *children.entry(*parent).or_default() += 1;
        }
        kept.push((id, row));
    }
    let mut wrong = Vec::new();
    for (id, row) in kept {
        let (open, dead) = counted.get(&id).copied().unwrap_or_default();
        let held = if holds { dead } else { 0 };
        let children = children.get(&id).copied().unwrap_or_default();
        // One with held tasks may stay until its tree, which is being cancelled, ends.
        let is_over = open == 0 && children == 0 && held == 0;
        let one = WrongSubtree {
            id,
            open: open - row.open,
            held: held - row.held,
            children: children - row.children,
        };
        if is_over || (one.open, one.held, one.children) != (0, 0, 0) {
            wrong.push(one);
        }
    }
    Ok(wrong)
}

columns! {
    struct SubtreeColumns {
        id: Vec<u8>,
        tree: Vec<u8>,
        path: Vec<u8>,
        fork: Vec<u8>,
        open_tasks: i64,
        held_tasks: i64,
        children: i64,
        parts: i64,
        part_bytes: i64,
        join_task: String,
    }
}

/// A row of `subtrees`.
struct SubtreeRow {
    id: TaskId,
    tree: TaskId,
    path: Vec<TaskId>,
    fork: TaskId,
    open: i64,
    held: i64,
    /// The subtrees within it.
    children: i64,
    parts: u32,
    part_bytes: usize,
    join: Join,
}

impl SubtreeRow {
    /// Whether nothing of it is unfinished. Dead tasks do not hold it while its tree is being
    /// cancelled.
    fn is_over(&self, is_cancelling: bool) -> bool {
        self.open <= 0 && self.children <= 0 && (self.held <= 0 || is_cancelling)
    }

    fn values(&self) -> [Value<'_>; 10] {
        let path: Vec<u8> = self.path.iter().flat_map(|id| *id.as_bytes()).collect();
        let join = serde_json::to_string(&self.join).expect("texts and numbers are always JSON");
        [
            (&self.id).into(),
            (&self.tree).into(),
            path.into(),
            (&self.fork).into(),
            // A wrong count affects only its own subtree, until `fsck` corrects it.
            self.open.max(0).into(),
            self.held.max(0).into(),
            self.children.max(0).into(),
            self.parts.into(),
            i64::try_from(self.part_bytes).unwrap_or(i64::MAX).into(),
            join.into(),
        ]
    }

    /// The letter in place of the join's task, whose payload would be too large.
    fn letter(&self, bytes: usize, at_ms: i64) -> NewLetter {
        let queue = &self.join.task.queue;
        NewLetter::from(&DeadLetter {
            reason: format!(
                "the fork's task and the {} parts of the join have {bytes} bytes as a payload; at most {}",
                self.parts, self.join.max_bytes
            ),
            at_unix_ms: at_ms,
            queue: queue.clone(),
            task: Some(NewTask {
                id: Some(self.id),
                queue: queue.clone(),
                ..NewTask::default()
            }),
            parent_id: Some(self.fork),
            tree: Some(self.tree),
            incomplete: true,
            ..DeadLetter::default()
        })
    }
}

fn path_of(bytes: &[u8]) -> Result<Vec<TaskId>> {
    bytes.chunks(16).map(task_id).collect()
}

impl TryFrom<SubtreeColumns> for SubtreeRow {
    type Error = Error;

    fn try_from(columns: SubtreeColumns) -> Result<Self> {
        let join = serde_json::from_str(&columns.join_task)
            .map_err(|error| corrupt(format!("the join_task of a subtree: {error}")))?;
        Ok(Self {
            id: task_id(&columns.id)?,
            tree: task_id(&columns.tree)?,
            path: path_of(&columns.path)?,
            fork: task_id(&columns.fork)?,
            open: columns.open_tasks,
            held: columns.held_tasks,
            children: columns.children,
            parts: number(columns.parts)?,
            part_bytes: number(columns.part_bytes)?,
            join,
        })
    }
}
