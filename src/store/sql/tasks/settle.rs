//! Settles reports: locks their tasks, decides in order, and stores the changes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use crate::{
    config::EventQueues,
    model::{
        DeadLetter, Encoding, Join, Joining, LeaseNumber, RowTree, StoredStatus, TaskId, TaskRow,
        Way, began, subtree_id,
    },
    store::{
        NewRow, OutboxRow, PAGE_BYTES, Result, Settled, SettledTask, Settlement, Stored, Turn,
        Unpublished,
        sql::{
            outbox::entries::{self, UnfinishedColumns},
            session::Session,
            statement::{Statement, Value, lists, pieces},
            tasks::{
                insert::{self, OldKeys},
                letters::{self, NewLetter},
                progress::{self, Progress},
                sequences::Released,
                step::InTree,
                steps::Steps,
                subtrees::{self, NewSubtree},
                trees::{self, Ends, TreeFacts},
            },
        },
    },
};

/// A result to store.
struct NewResult<'a> {
    task: &'a TaskId,
    /// [`crate::store::sql::Dialect::NUMBER`]
    number: i64,
    worker: &'a str,
    lease: LeaseNumber,
    result: &'a [u8],
    encoding: Encoding,
    attempt: u32,
    leased_ms: i64,
    at_ms: i64,
    surplus: bool,
}

impl Settlement {
    fn id(&self) -> &TaskId {
        match self {
            Self::Completed { id, .. } | Self::Died { id, .. } => id,
        }
    }

    fn at_unix_ms(&self) -> i64 {
        match self {
            Self::Completed { at_unix_ms, .. } | Self::Died { at_unix_ms, .. } => *at_unix_ms,
        }
    }

    fn discovered(&self) -> &[NewRow] {
        match self {
            Self::Completed { discovered, .. } => discovered,
            Self::Died { .. } => &[],
        }
    }

    fn joining(&self) -> Option<&Joining<Join>> {
        match self {
            Self::Completed { joining, .. } => joining.as_deref(),
            Self::Died { .. } => None,
        }
    }

    /// Whether subtrees begin with it.
    fn begins(&self) -> bool {
        self.joining()
            .is_some_and(|joining| !joining.joins.is_empty())
    }
}

/// A transaction that settles reports. Collects the changes until they are stored.
struct Settling<'a> {
    /// The tasks of the reports, locked.
    tasks: BTreeMap<TaskId, Progress>,
    results: Vec<NewResult<'a>>,
    letters: Vec<NewLetter>,
    /// The sequences, the trees, the events and the counts.
    steps: Steps,
    /// How many surplus reports came from tasks of trees.
    late: usize,
}

/// The outcome of a settlement, and what it did to trees.
pub(crate) struct SettledInTrees {
    pub(crate) stored: Stored<Settled>,
    pub(crate) ends: Ends,
    pub(crate) late: usize,
}

/// Settles reports in one transaction. Their discovered tasks become this batch.
pub(crate) async fn settle<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    batch: Turn,
    old_keys: &OldKeys,
    events: &Arc<EventQueues>,
) -> Result<SettledInTrees> {
    let ids = reports.iter().map(|report| *report.id()).collect();
    let mut settling = Settling {
        tasks: progress::lock(session, ids).await?,
        results: Vec::new(),
        letters: Vec::new(),
        steps: Steps::new(events),
        late: 0,
    };
    let mut settled = Vec::with_capacity(reports.len());
    for report in reports {
        settled.push(settling.decide(report));
    }
    let Settling {
        tasks,
        mut results,
        letters,
        mut steps,
        late,
    } = settling;
    store_results(session, &mut results).await?;
    let off_bus = progress::store(session, &tasks, &mut steps).await?;
    letters::add(session, &letters).await?;
    let places = places_of_discoveries(session, reports, &settled, &tasks, &mut steps).await?;
    let discovered = Discovered {
        reports,
        places: &places,
        batch,
    };
    let behind = store_discovered(session, &discovered, &mut settled, &mut steps, old_keys).await?;
    // A task that is on the bus or in a batch has no row in the outbox.
    entries::remove_ended(session, &off_bus).await?;
    let mut released = released_rows(session, &steps.take_released()).await?;
    let at_ms = reports.iter().map(Settlement::at_unix_ms).max();
    let ends = steps.store_and_publish(session, at_ms).await?;
    for (task, turn) in &ends.made {
        let Some(turn) = turn else {
            continue;
        };
        released.push(OutboxRow {
            task: task.clone(),
            is_as_new: true,
            unpublished: Unpublished::Fresh,
            turn: *turn,
        });
    }
    Ok(SettledInTrees {
        stored: Stored {
            answers: settled,
            batch,
            behind,
            released,
        },
        ends,
        late,
    })
}

/// The rows of the released tasks that the caller can publish at once, up to [`PAGE_BYTES`].
async fn released_rows<S: Session>(
    session: &mut S,
    released: &[Released],
) -> Result<Vec<OutboxRow>> {
    let mut bytes = 0;
    let mut turns: HashMap<TaskId, Turn> = HashMap::new();
    let mut left_out = Vec::new();
    for one in released {
        bytes += one.bytes;
        if one.unpublished != Unpublished::Fresh {
            continue;
        }
        if bytes <= PAGE_BYTES {
            turns.insert(one.task, one.turn);
        } else {
            left_out.push(one.task);
        }
    }
    // Nobody but the watchdog publishes these: they need not wait for the caller.
    entries::bring_forward(session, &left_out, 0, 0).await?;
    let ids: Vec<TaskId> = turns.keys().copied().collect();
    let mut rows = Vec::with_capacity(ids.len());
    for ids in lists(&ids) {
        for columns in session
            .fetch::<UnfinishedColumns>(entries::tasks(ids))
            .await?
        {
            if columns.is_final() {
                continue;
            }
            let is_as_new = columns.is_as_new();
            let task: TaskRow = columns.task.try_into()?;
            rows.push(OutboxRow {
                is_as_new,
                unpublished: Unpublished::Fresh,
                turn: turns[&task.id],
                task,
            });
        }
    }
    rows.sort_unstable_by_key(|row| row.task.id);
    Ok(rows)
}

impl<'a> Settling<'a> {
    /// Decides what a report changes.
    fn decide(&mut self, report: &'a Settlement) -> Settled {
        let Some(task) = self.tasks.get_mut(report.id()) else {
            return Settled {
                unknown: true,
                ..Settled::default()
            };
        };
        let (repeated, surplus) = match report {
            Settlement::Completed {
                id,
                worker,
                lease,
                result,
                encoding,
                attempt,
                leased_unix_ms,
                at_unix_ms,
                ..
            } => {
                let repeated = !task.workers.insert(worker.clone());
                let surplus = !repeated && task.status.is_final();
                if !repeated {
                    self.results.push(NewResult {
                        task: id,
                        number: task.number,
                        worker,
                        lease: *lease,
                        result,
                        encoding: *encoding,
                        attempt: *attempt,
                        leased_ms: began(*leased_unix_ms, *at_unix_ms).unwrap_or(0),
                        at_ms: *at_unix_ms,
                        surplus,
                    });
                }
                if surplus {
                    task.surplus();
                }
                if !repeated && !surplus {
                    task.credit(*attempt, *at_unix_ms);
                    if task.status.is_final() {
                        self.steps.completed_by(*id, &task.queue, worker, *attempt);
                    }
                }
                if surplus && let Some(in_tree) = task.belongs.tree {
                    self.steps.trees().late(in_tree.tree, 1, *at_unix_ms);
                    self.late += 1;
                }
                (repeated, surplus)
            }
            // The task has been sent again since then.
            Settlement::Died {
                epoch: Some(epoch), ..
            } if *epoch < task.epoch => {
                return Settled {
                    unknown: true,
                    ..Settled::default()
                };
            }
            Settlement::Died {
                id,
                reason,
                attempts,
                history,
                at_unix_ms,
                ..
            } => {
                let repeated = task.status == StoredStatus::Dead;
                if !task.status.is_final() {
                    task.die(reason, *attempts, *at_unix_ms);
                    let letter = DeadLetter {
                        task_id: Some(*id),
                        queue: task.queue.as_str().to_owned(),
                        at_unix_ms: *at_unix_ms,
                        history: history.clone(),
                        ..Default::default()
                    };
                    // The death of a step is an error of its execution, which decides what follows.
                    if task.belongs.execution.is_none() {
                        self.letters.push(NewLetter::from(&letter));
                    }
                }
                (repeated, false)
            }
        };
        let about = SettledTask {
            queue: task.queue.clone(),
            priority: task.priority,
            is_step: task.belongs.execution.is_some(),
        };
        Settled {
            repeated,
            surplus,
            status: Some(task.status),
            key: task.freed_key(),
            task: Some(about),
            ..Settled::default()
        }
    }
}

async fn store_results<S: Session>(session: &mut S, results: &mut [NewResult<'_>]) -> Result<()> {
    // Sorted by primary key, so that neighbouring rows share the pages that a statement changes.
    results.sort_unstable_by_key(|result| (result.number, result.task, result.worker));
    for piece in pieces(results, |result| result.result.len()) {
        let insert = Statement::new(S::INSERT).sql(
            " INTO results (task_id, worker, lease_generation, lease_grant, attempt, leased_ms, completed_ms, surplus, \
             result_encoding, result",
        );
        let insert = match S::NUMBER {
            Some(_) => insert
                .sql(", task, ")
                .sql(&S::group("task_id"))
                .sql(")")
                .values(piece.iter().map(numbered::<S>)),
            None => insert.sql(")").values(piece.iter().map(result_values)),
        };
        session.execute(insert).await?;
    }
    Ok(())
}

fn result_values<'a>(result: &NewResult<'a>) -> [Value<'a>; 10] {
    let NewResult {
        task,
        worker,
        lease,
        result: bytes,
        encoding,
        attempt,
        leased_ms,
        at_ms,
        surplus,
        ..
    } = *result;
    [
        task.into(),
        worker.into(),
        lease.generation.into(),
        lease.grant.into(),
        attempt.into(),
        leased_ms.into(),
        at_ms.into(),
        surplus.into(),
        encoding.into(),
        bytes.into(),
    ]
}

/// The values of a result, followed by the number and the group of its task.
fn numbered<'a, S: Session>(result: &NewResult<'a>) -> [Value<'a>; 12] {
    let [a, b, c, d, e, f, g, h, i, j] = result_values(result);
    [
        a,
        b,
        c,
        d,
        e,
        f,
        g,
        h,
        i,
        j,
        result.number.into(),
        S::group_of(result.task),
    ]
}

/// Where the discovered tasks of a report are stored.
enum DiscoveryPlace {
    /// In no tree.
    Plain,
    InTree(Levels, TreeFacts),
    /// Nowhere: the report is a repetition, or the tree of its task takes nothing more.
    Nowhere,
}

/// Where the task of a report is in its tree.
struct Levels {
    tree: TaskId,
    /// The subtrees that it is in, outermost first. Empty if they are gone.
    path: Vec<TaskId>,
    /// Those that its report begins, in the order of the report.
    begun: Vec<TaskId>,
}

impl Levels {
    /// The subtree at the end of a way from the task. `None`: none, only the tree.
    fn subtree(&self, way: Way) -> Option<TaskId> {
        match way {
            Way::Out(levels) => {
                let left = self.path.len().checked_sub(usize::try_from(levels).ok()?)?;
                self.path[..left].last().copied()
            }
            Way::Into(place) => self.begun.get(usize::try_from(place).ok()?).copied(),
        }
    }
}

/// The discovered tasks of a settlement.
struct Discovered<'a> {
    reports: &'a [Settlement],
    /// One per report.
    places: &'a [DiscoveryPlace],
    batch: Turn,
}

/// Decides where the discovered tasks of each report are stored, and begins the subtrees of joins.
/// Those of surplus reports are in no tree: their workers got no credit, and the trees may have ended.
/// A tree that is being cancelled drops them, too, or they would go on with what somebody wanted to
/// end.
async fn places_of_discoveries<S: Session>(
    session: &mut S,
    reports: &[Settlement],
    settled: &[Settled],
    tasks: &BTreeMap<TaskId, Progress>,
    steps: &mut Steps,
) -> Result<Vec<DiscoveryPlace>> {
    let is_taken = |settled: &Settled| !settled.repeated && !settled.unknown;
    let tree_of = |report: &Settlement, settled: &Settled| {
        let brings = !report.discovered().is_empty() || report.joining().is_some();
        if !is_taken(settled) || !brings {
            return None;
        }
        tasks.get(report.id())?.belongs.tree
    };
    let mut ids = Vec::new();
    let mut subtrees = Vec::new();
    for (report, settled) in reports.iter().zip(settled) {
        if let Some(InTree { tree, subtree }) = tree_of(report, settled) {
            ids.push(tree);
            subtrees.extend(subtree);
        }
    }
    let facts = if ids.is_empty() {
        BTreeMap::new()
    } else {
        trees::facts(session, &ids).await?
    };
    let paths = if subtrees.is_empty() {
        BTreeMap::new()
    } else {
        subtrees::paths(session, &subtrees).await?
    };
    let mut places = Vec::with_capacity(reports.len());
    for (report, settled) in reports.iter().zip(settled) {
        let in_tree = tree_of(report, settled);
        let known = in_tree.and_then(|in_tree| Some((in_tree, *facts.get(&in_tree.tree)?)));
        places.push(match known {
            _ if !is_taken(settled) => DiscoveryPlace::Nowhere,
            Some((_, facts)) if facts.is_cancelling => DiscoveryPlace::Nowhere,
            Some((in_tree, facts)) if !settled.surplus => {
                let path = in_tree.subtree.and_then(|subtree| paths.get(&subtree));
                let path = path.cloned().unwrap_or_default();
                DiscoveryPlace::InTree(join(report, in_tree.tree, path, steps), facts)
            }
            None if !settled.surplus && report.begins() => adopt(report, settled, tasks, steps),
            _ => DiscoveryPlace::Plain,
        });
    }
    Ok(places)
}

/// Begins the subtrees of a report, and adds its parts to those that they belong to.
fn join(report: &Settlement, tree: TaskId, path: Vec<TaskId>, steps: &mut Steps) -> Levels {
    let mut levels = Levels {
        tree,
        path,
        begun: Vec::new(),
    };
    let Some(joining) = report.joining() else {
        return levels;
    };
    let (task, at_ms) = (*report.id(), report.at_unix_ms());
    let trees = steps.trees();
    for join in &joining.joins {
        let id = subtree_id(task, &join.task.queue, at_ms);
        let subtree = NewSubtree {
            tree,
            path: levels.path.clone(),
            fork: task,
            join: join.clone(),
        };
        trees.begin_subtree(id, subtree, at_ms);
        levels.begun.push(id);
    }
    let mut late = 0;
    for part in &joining.parts {
        match levels.subtree(part.way) {
            Some(subtree) => trees.part(tree, subtree, task, part.clone(), at_ms),
            None => late += 1,
        }
    }
    if late > 0 {
        trees.late(tree, late, at_ms);
    }
    levels
}

/// Begins a tree with the task of a report, which was in none, because a join waits for what comes out
/// of it.
fn adopt(
    report: &Settlement,
    settled: &Settled,
    tasks: &BTreeMap<TaskId, Progress>,
    steps: &mut Steps,
) -> DiscoveryPlace {
    let id = *report.id();
    let Some(task) = tasks.get(&id) else {
        return DiscoveryPlace::Nowhere;
    };
    let is_over = settled.status.is_some_and(StoredStatus::is_final);
    steps
        .trees()
        .adopt(id, &task.queue, is_over, report.at_unix_ms());
    let facts = TreeFacts {
        deadline_ms: 0,
        is_cancelling: false,
        is_ended: false,
    };
    DiscoveryPlace::InTree(join(report, id, Vec::new(), steps), facts)
}

/// A discovered task in a tree: it has no deadline that is later than that of the tree.
fn in_tree(row: &NewRow, levels: &Levels, facts: TreeFacts) -> NewRow {
    let mut row = row.clone();
    let own = row.task.deadline_unix_ms;
    if facts.deadline_ms > 0 && (own == 0 || own > facts.deadline_ms) {
        row.task.deadline_unix_ms = facts.deadline_ms;
    }
    row.task.tree = Some(Box::new(RowTree::Discovered {
        tree: levels.tree,
        subtree: levels.subtree(way_of(&row)),
    }));
    row
}

fn way_of(row: &NewRow) -> Way {
    match row.task.tree.as_deref() {
        Some(RowTree::Sent(way)) => *way,
        _ => Way::default(),
    }
}

/// A discovered task that is stored outside of trees, although its topology has levels.
fn outside(row: &NewRow) -> NewRow {
    let mut row = row.clone();
    row.task.tree = None;
    row
}

/// Stores the discovered tasks of all reports as one batch. If two have the same key, the first one
/// is stored.
async fn store_discovered<S: Session>(
    session: &mut S,
    discovered: &Discovered<'_>,
    settled: &mut [Settled],
    steps: &mut Steps,
    old_keys: &OldKeys,
) -> Result<HashSet<TaskId>> {
    let Discovered {
        reports,
        places,
        batch,
    } = *discovered;
    // Only tasks of trees and of topologies with joins are copied.
    let mut copies: Vec<NewRow> = Vec::new();
    let has_ways = |report: &Settlement| {
        report
            .discovered()
            .iter()
            .any(|row| row.task.tree.is_some())
    };
    for (report, place) in reports.iter().zip(places) {
        let rows = report.discovered().iter();
        match place {
            DiscoveryPlace::InTree(levels, facts) => {
                copies.extend(rows.map(|row| in_tree(row, levels, *facts)));
            }
            DiscoveryPlace::Plain if has_ways(report) => copies.extend(rows.map(outside)),
            DiscoveryPlace::Plain | DiscoveryPlace::Nowhere => {}
        }
    }
    let mut copies = copies.iter();
    let mut rows: Vec<&NewRow> = Vec::new();
    for (report, place) in reports.iter().zip(places) {
        let of_report = report.discovered();
        match place {
            DiscoveryPlace::Nowhere => {}
            DiscoveryPlace::Plain if !has_ways(report) => rows.extend(of_report),
            DiscoveryPlace::Plain | DiscoveryPlace::InTree(..) => {
                rows.extend(copies.by_ref().take(of_report.len()));
            }
        }
    }
    let at_ms = reports.iter().map(Settlement::at_unix_ms).max();
    let (answers, behind) = insert::insert(session, &rows, batch, steps, old_keys, at_ms).await?;
    let mut answers = answers.into_iter();
    for ((report, settled), place) in reports.iter().zip(settled).zip(places) {
        match place {
            DiscoveryPlace::Nowhere => continue,
            DiscoveryPlace::Plain => {}
            DiscoveryPlace::InTree(_, facts) => settled.tree_deadline_unix_ms = facts.deadline_ms,
        }
        settled.discovered = answers.by_ref().take(report.discovered().len()).collect();
    }
    Ok(behind)
}
