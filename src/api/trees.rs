//! Trees: lists and reads them, waits for their ends, cancels them, and sends their dead tasks
//! again.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use futures::{StreamExt as _, future::BoxFuture, stream};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{
    access::{Denied, is_scoped, reaches_all_of, reaches_tree, who},
    error::Error,
    handle::{Api, span},
    query::{LISTED, bounded},
    reader::{Reader, view},
    waits::Wait,
};
use crate::{
    model::{
        Act, BulkAction, BulkChange, Caller, ECHO, InsertAnswer, InsertStatus, NewTask, QueueName,
        StoredStatus, TaskCursor, TaskFilter, TaskId, TaskStatus, TaskTree, TreeFile, TreeList,
        TreeOnDead, TreePages, TreeQueue, TreeState, TreeView, TreeWait, WatchEnd, shorten,
    },
    store::TreeCount,
};

/// How many of the tasks that a tree waits for are shown.
const SHOWN: u32 = 10;
/// How many of them are asked about at the same time.
const EXPLAINED_AT_ONCE: usize = 4;

/// A watch of a tree: as it is at first, then each change, to its end.
pub struct WatchingTree {
    receiver: watch::Receiver<TreeView>,
    /// The tree as it was told last, or as it is told first.
    tree: TreeView,
    is_begun: bool,
    is_over: bool,
    stop: CancellationToken,
    revoked: BoxFuture<'static, Denied>,
    _wait: Wait,
}

/// What a watch of a tree says next.
pub enum NextOfTree {
    Tree(Box<TreeView>),
    /// Nothing has changed for a while.
    Beat,
    /// The watch ends early.
    End(WatchEnd),
    /// Retention has removed the tree.
    Removed,
}

impl WatchingTree {
    /// The time without a change after which the watch says that it is still there.
    const BEAT: Duration = Duration::from_secs(15);

    /// The tree, if it had ended already when the watch began.
    pub fn ended_as(&self) -> Option<&TreeView> {
        let is_first = !self.is_begun && self.tree.state != TreeState::Open;
        is_first.then_some(&self.tree)
    }

    /// The next state of the tree. `None` after the one in which it has ended.
    pub async fn next(&mut self) -> Option<NextOfTree> {
        if self.is_over {
            return None;
        }
        if !self.is_begun {
            self.is_begun = true;
            return Some(self.tell());
        }
        loop {
            let changed = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Some(self.end(WatchEnd::Stopping)),
                _ = &mut self.revoked => return Some(self.end(WatchEnd::Unauthenticated)),
                changed = tokio::time::timeout(Self::BEAT, self.receiver.changed()) => changed,
            };
            match changed {
                Err(_elapsed) => return Some(NextOfTree::Beat),
                Ok(Err(_closed)) => {
                    self.is_over = true;
                    return Some(NextOfTree::Removed);
                }
                Ok(Ok(())) => {
                    let tree = self.receiver.borrow_and_update().clone();
                    // What was read at the beginning comes once more.
                    if tree != self.tree {
                        self.tree = tree;
                        return Some(self.tell());
                    }
                }
            }
        }
    }

    fn tell(&mut self) -> NextOfTree {
        self.is_over = self.tree.state != TreeState::Open;
        NextOfTree::Tree(Box::new(self.tree.clone()))
    }

    fn end(&mut self, end: WatchEnd) -> NextOfTree {
        self.is_over = true;
        NextOfTree::End(end)
    }
}

impl Api {
    /// Returns a page of trees, the newest first.
    pub async fn trees(
        &self,
        caller: &Caller,
        pages: Result<TreePages, String>,
    ) -> Result<TreeList, Error> {
        let mut pages = pages.map_err(Error::Invalid)?;
        pages.limit = bounded(pages.limit, LISTED)?;
        reaches_all_of(caller, pages.queue.as_ref())?;
        let store = self.query()?.store();
        let trees = store
            .trees(&pages)
            .instrument(span("trees", caller))
            .await?;
        let is_full = trees.len() == pages.limit as usize;
        let last = trees.last().map(|tree| TaskCursor(tree.id));
        Ok(TreeList {
            next: last.filter(|_| is_full),
            trees,
        })
    }

    /// One tree. With `wait`: when it has ended, or after this time.
    pub async fn tree(
        &self,
        caller: &Caller,
        id: &str,
        wait: Option<Duration>,
    ) -> Result<TreeFile, Error> {
        let id = tree_id(id)?;
        let read = async {
            let mut tree = self.reached_tree(caller, id).await?;
            if let Some(wait) = wait
                && tree.state == TreeState::Open
            {
                tree = self.wait_for_tree(caller, tree, wait).await?;
            }
            self.query()?.tree_file(caller, tree).await
        };
        read.instrument(span("tree", caller)).await
    }

    /// The numbers of a tree, without its tasks.
    pub async fn tree_numbers(&self, caller: &Caller, id: &str) -> Result<TreeView, Error> {
        let id = tree_id(id)?;
        let read = self.reached_tree(caller, id);
        read.instrument(span("tree", caller)).await
    }

    /// Watches a tree.
    pub async fn watch_tree(&self, caller: &Caller, id: &str) -> Result<WatchingTree, Error> {
        let id = tree_id(id)?;
        let begin = async {
            let known = self.reached_tree(caller, id).await?;
            let wait = self.waits.call(&caller.access)?;
            let receiver = self.query()?.tree_watches.watch(id, known);
            // Read after the watch has begun, so that nothing is missed in between.
            let tree = self.reached_tree(caller, id).await?;
            Ok::<_, Error>(WatchingTree {
                receiver,
                tree,
                is_begun: false,
                is_over: false,
                stop: self.stop.clone(),
                revoked: self.authentication.revoked(&caller.access),
                _wait: wait,
            })
        };
        begin.instrument(span("watch_tree", caller)).await
    }

    /// Cancels a tree: marks it, so that nothing is added to it any more, and starts a bulk change
    /// that cancels its tasks. Calling it again starts another bulk change, which does no harm.
    pub async fn cancel_tree(&self, caller: &Caller, id: &str) -> Result<BulkChange, Error> {
        // The token may have been revoked while the request was read.
        self.authentication.still_valid(caller)?;
        let id = tree_id(id)?;
        let cancel = async {
            let tree = self.reached_tree(caller, id).await?;
            if tree.state != TreeState::Open {
                return Err(ended(&tree));
            }
            let query = self.query()?;
            // The tasks out of reach would stay, in a tree that drops what they discover.
            if is_scoped(caller) {
                reaches_tree(caller, &query.store().queues_of_tree(id).await?)?;
            }
            let mark = Act::at_time(
                query.now_unix_ms(),
                who(caller),
                "cancel tree",
                &id.to_string(),
            );
            let filter = TaskFilter {
                tree: Some(id),
                statuses: TaskStatus::UNFINISHED.to_vec(),
                ..TaskFilter::default()
            };
            // The tree is marked in the same transaction, and takes nothing more. So all its tasks are
            // meant, whenever they were inserted.
            let new = self.new_bulk_change(caller, BulkAction::Cancel, filter)?;
            let store = query.store();
            let added = store
                .cancel_tree(id, &new.bulk, new.most_of_token, &new.act, &mark)
                .await?;
            new.started(added)
        };
        cancel.instrument(span("cancel_tree", caller)).await
    }

    /// Sends the dead tasks of a tree again, by a bulk change.
    pub async fn retry_tree(&self, caller: &Caller, id: &str) -> Result<BulkChange, Error> {
        self.authentication.still_valid(caller)?;
        let id = tree_id(id)?;
        let retry = async {
            self.reached_tree(caller, id).await?;
            let filter = TaskFilter {
                tree: Some(id),
                statuses: vec![TaskStatus::Dead],
                ..TaskFilter::default()
            };
            self.start_bulk_change(caller, BulkAction::Retry, filter)
                .await
        };
        retry.instrument(span("retry_tree", caller)).await
    }

    /// Reads a tree. Only a caller that reaches the queue of its root may know that it exists.
    async fn reached_tree(&self, caller: &Caller, id: TaskId) -> Result<TreeView, Error> {
        let tree = self.query()?.store().trees_by_id(&[id]).await?.pop();
        tree.filter(|tree| caller.access.reaches(tree.queue.as_str()))
            .ok_or(Error::NoSuchTree(id))
    }

    /// Waits until a tree has ended. Returns it as it is if the time is over, or this process stops.
    async fn wait_for_tree(
        &self,
        caller: &Caller,
        tree: TreeView,
        wait: Duration,
    ) -> Result<TreeView, Error> {
        let query = self.query()?;
        let _wait = self.waits.call(&caller.access)?;
        let until = Instant::now() + wait.min(query.settings.limits.max_wait);
        let id = tree.id;
        let epoch = tree.epoch;
        let mut receiver = query.tree_watches.watch(id, tree.clone());
        // The tree, or `None` if the time is over.
        let ended = async {
            // Others may have been told of the end of an earlier epoch.
            let ends =
                receiver.wait_for(|tree| tree.state != TreeState::Open && tree.epoch >= epoch);
            match timeout_at(until, ends).await {
                Ok(Ok(ended)) => Ok(Some(ended.clone())),
                Ok(Err(_removed)) => Err(Error::NoSuchTree(id)),
                Err(_elapsed) => Ok(None),
            }
        };
        let ended = tokio::select! {
            biased;
            () = self.stop.cancelled() => return Ok(tree),
            ended = ended => ended?,
            denied = self.authentication.revoked(&caller.access) => return Err(denied.into()),
        };
        match ended {
            Some(ended) => Ok(ended),
            None => self.reached_tree(caller, id).await,
        }
    }

    /// Refuses the tasks of an insert that join trees which the caller does not reach. Passes on the
    /// deadlines of the others. SQL refuses those of trees that are not open, unless they are
    /// duplicates: a repeated insert has stored its task before.
    pub(super) async fn refuse_trees(
        &self,
        caller: &Caller,
        tasks: &mut [Result<NewTask, InsertAnswer>],
    ) -> Result<(), Error> {
        let joined = |task: &Result<NewTask, InsertAnswer>| match task {
            Ok(NewTask {
                tree: Some(tree), ..
            }) => match **tree {
                TaskTree::Joins { tree, .. } => Some(tree),
                TaskTree::Root(_) | TaskTree::Returns { .. } => None,
            },
            _ => None,
        };
        let mut ids: Vec<TaskId> = tasks.iter().filter_map(joined).collect();
        if ids.is_empty() {
            return Ok(());
        }
        ids.sort_unstable();
        ids.dedup();
        let read = self.query()?.store().trees_by_id(&ids).await?;
        let trees: BTreeMap<TaskId, TreeView> =
            read.into_iter().map(|tree| (tree.id, tree)).collect();
        for task in tasks {
            let Some(id) = joined(task) else {
                continue;
            };
            let reached = trees
                .get(&id)
                .filter(|tree| caller.access.reaches(tree.queue.as_str()));
            let Some(tree) = reached else {
                let why = Error::NoSuchTree(id).to_string();
                *task = Err(InsertAnswer::rejected(why));
                continue;
            };
            if let Ok(NewTask {
                tree: joins @ Some(_),
                ..
            }) = task
            {
                *joins = Some(Box::new(TaskTree::Joins {
                    tree: id,
                    deadline_unix_ms: tree.deadline_unix_ms.unwrap_or(0),
                }));
            }
        }
        Ok(())
    }

    /// Names the trees of inserted tasks in their answers. `asked` says for each task which tree it
    /// has asked for.
    pub(super) async fn name_trees(
        &self,
        asked: &[Option<AskedTree>],
        answers: &mut [InsertAnswer],
    ) -> Result<(), Error> {
        let mut unknown = Vec::new();
        for (asked, answer) in asked.iter().zip(answers.iter_mut()) {
            let (Some(asked), Some(id)) = (asked, answer.id) else {
                continue;
            };
            match (answer.status, asked) {
                (InsertStatus::Created, AskedTree::New) => answer.tree = Some(id),
                (InsertStatus::Created, AskedTree::Joins(tree)) => answer.tree = Some(*tree),
                // A duplicate has the tree that had it first, and so has a repeated insert.
                _ => unknown.push(id),
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        let trees = self.query()?.store().trees_of(&unknown).await?;
        let trees: BTreeMap<TaskId, TaskId> = trees.into_iter().collect();
        for (asked, answer) in asked.iter().zip(answers.iter_mut()) {
            if asked.is_some() && answer.tree.is_none() {
                answer.tree = answer.id.and_then(|id| trees.get(&id).copied());
            }
        }
        Ok(())
    }
}

/// The tree that a task of an insert asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum AskedTree {
    New,
    Joins(TaskId),
    /// An insert with an idempotency key may be a repetition, so its answer does not say which tree
    /// the first one got.
    Unknown,
}

impl AskedTree {
    /// Whether any of these tasks asks for a tree.
    pub(super) fn is_asked_for(tasks: &[Result<NewTask, InsertAnswer>]) -> bool {
        let mut tasks = tasks.iter().flatten();
        tasks.any(|task| task.tree.is_some())
    }

    /// Which trees tasks ask for.
    pub(super) fn of_all(tasks: &[Result<NewTask, InsertAnswer>]) -> Vec<Option<Self>> {
        let of = |task: &Result<NewTask, InsertAnswer>| task.as_ref().ok().and_then(Self::of);
        tasks.iter().map(of).collect()
    }

    fn of(task: &NewTask) -> Option<Self> {
        let tree = task.tree.as_deref()?;
        Some(match tree {
            _ if !task.idempotency_key.is_empty() => Self::Unknown,
            TaskTree::Root(_) => Self::New,
            TaskTree::Joins { tree, .. } | TaskTree::Returns { tree, .. } => Self::Joins(*tree),
        })
    }
}

impl Reader {
    /// A tree with its tasks. Leaves out queues that the caller does not reach.
    async fn tree_file(&self, caller: &Caller, tree: TreeView) -> Result<TreeFile, Error> {
        let (counts, at_least) = self.store().tree_counts(tree.id).await?;
        let mut queues = by_queue(counts);
        queues.retain(|queue| caller.access.reaches(queue.queue.as_str()));
        let mut waits_for = Vec::new();
        if tree.state == TreeState::Open {
            let holds = tree.on_dead == TreeOnDead::Hold;
            let ids = self.store().tree_waits_for(tree.id, holds, SHOWN).await?;
            let mut tasks = self.store().listed(&ids).await?;
            tasks.sort_unstable_by_key(|task| task.id);
            tasks.retain(|task| caller.access.reaches(task.shard.queue.as_str()));
            let now = self.now_unix_ms();
            let known = self.known_records(&tasks).await;
            let ids: Vec<TaskId> = tasks.iter().map(|task| task.id).collect();
            let mut reasons = self.reasons(&ids).await;
            for task in tasks {
                let record = known.records.get(&task.id).copied();
                let (says, next) = reasons.remove(&task.id).unwrap_or_default();
                let task = view(task, record, now);
                waits_for.push(TreeWait { task, says, next });
            }
        }
        Ok(TreeFile {
            tree,
            queues,
            at_least,
            waits_for,
        })
    }
}

impl Reader {
    /// Says of tasks that a tree waits for where they are, and what happens next. Leaves out tasks
    /// about which a server does not answer now.
    async fn reasons(&self, tasks: &[TaskId]) -> HashMap<TaskId, (String, String)> {
        let explain = async |id: TaskId| (id, self.explain(id, None, None).await);
        let mut explained = stream::iter(tasks.iter().copied())
            .map(explain)
            .buffered(EXPLAINED_AT_ONCE);
        let mut reasons = HashMap::new();
        while let Some((id, explained)) = explained.next().await {
            let explained = match explained {
                Ok(Some(explained)) => explained,
                // Retention has removed it.
                Ok(None) => continue,
                Err(error) => {
                    tracing::debug!("cannot explain what a tree waits for: {error}");
                    break;
                }
            };
            let next = if explained.task.status == TaskStatus::Dead {
                "somebody sends it again or purges it; until then it holds the tree".to_owned()
            } else {
                explained.next
            };
            reasons.insert(id, (explained.says, next));
        }
        reasons
    }
}

fn by_queue(counts: Vec<TreeCount>) -> Vec<TreeQueue> {
    let mut queues: BTreeMap<QueueName, TreeQueue> = BTreeMap::new();
    for TreeCount {
        queue,
        status,
        count,
    } in counts
    {
        let of_queue = queues.entry(queue.clone()).or_insert_with(|| TreeQueue {
            queue,
            unfinished: 0,
            completed: 0,
            dead: 0,
            cancelled: 0,
        });
        match status {
            StoredStatus::Unfinished => of_queue.unfinished += count,
            StoredStatus::Completed => of_queue.completed += count,
            StoredStatus::Dead => of_queue.dead += count,
            StoredStatus::Cancelled => of_queue.cancelled += count,
        }
    }
    queues.into_values().collect()
}

fn ended(tree: &TreeView) -> Error {
    Error::TreeEnded {
        id: tree.id,
        state: tree.state,
    }
}

fn tree_id(text: &str) -> Result<TaskId, Error> {
    text.parse().map_err(|_| {
        Error::Invalid(format!(
            "{:?} is not the id of a tree; ids are UUIDs, as an insert answers them",
            shorten(text, ECHO)
        ))
    })
}
