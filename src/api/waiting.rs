//! Inserts that wait until their tasks end, or the trees of these.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, stream};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};
use tracing::Instrument as _;

use super::{
    access::Denied,
    error::Error,
    handle::{Api, span},
    reader::Reader,
    watching::Statuses,
};
use crate::{
    model::{
        AwaitedTask, Caller, InsertAnswer, NewTask, QueueName, Role, TaskId, TaskResult,
        TaskStatus, TreeState, TreeView, WaitFor,
    },
    queue::{Interest, Watch, WatcherNews},
};

/// The most tasks of an insert that waits.
const MOST: usize = 1000;
/// The most bytes of results in an answer.
const MOST_BYTES: usize = 32 << 20;
/// How many tasks have their results read at the same time.
const AT_ONCE: usize = 16;

type Results = HashMap<TaskId, Vec<TaskResult>>;

impl Api {
    /// Inserts as [`Self::insert`] does, calls `stored`, and waits until the tasks are final or
    /// their trees have ended, but no longer than `wait`. The answers contain up to `max_bytes` of results, and at most 32 MiB.
    /// `room` reserves memory for these; if it cannot, the answers have none.
    pub async fn insert_and_wait<R>(
        &self,
        caller: &Caller,
        tasks: Vec<Result<NewTask, String>>,
        (wait, wait_for): (Duration, WaitFor),
        max_bytes: usize,
        stored: impl FnOnce(),
        room: impl FnOnce(usize) -> Option<R>,
    ) -> Result<(Vec<AwaitedTask>, Option<R>), Error> {
        may_read(caller)?;
        if tasks.len() > MOST {
            return Err(Error::Invalid(format!(
                "{} tasks in an insert that waits; at most {MOST}",
                tasks.len()
            )));
        }
        let query = self.query()?;
        let deadline = Instant::now() + wait.min(query.settings.limits.max_wait);
        let counted = self.waits.of_tasks(&caller.access, tasks.len())?;
        let queues: Vec<Option<QueueName>> = tasks.iter().map(queue_of).collect();
        // Lets the other processes know of the interest while SQL stores the tasks, but not in
        // queues that the insert may not be allowed to make.
        let is_known = |queue: &&QueueName| {
            caller.access.reaches(queue.as_str()) && !query.queue.shards_of(queue).is_empty()
        };
        let early = queues.iter().flatten().filter(is_known);
        let early: BTreeMap<QueueName, Vec<TaskId>> =
            early.map(|queue| (queue.clone(), Vec::new())).collect();
        let early = query.watch_ends(early)?;
        let answers = self.insert(caller, tasks).await?;
        // The caller will be told what was stored, even if all else fails from here on.
        stored();
        let mut trees = match wait_for {
            WaitFor::Task => AwaitedTrees::default(),
            WaitFor::Tree => query.awaited_trees(caller, &answers).await,
        };
        let mut of: BTreeMap<QueueName, Vec<TaskId>> = BTreeMap::new();
        let mut seen = HashSet::new();
        let mut ids = Vec::new();
        let mut in_trees = Vec::new();
        for (queue, answer) in queues.into_iter().zip(&answers) {
            // Two tasks of an insert may have the same key.
            let (Some(queue), Some(id)) = (queue, answer.id) else {
                continue;
            };
            if !seen.insert(id) {
                continue;
            }
            if trees.has(answer) {
                in_trees.push(id);
            } else {
                ids.push(id);
                of.entry(queue).or_default().push(id);
            }
        }
        // Makes room for the next watch. The queues stay watched for a while.
        drop(early);
        let watch = query.watch_ends(of).ok();
        let revoked = self.authentication.revoked(&caller.access);
        let stop = async {
            tokio::select! {
                () = self.stop.cancelled() => {}
                _ = revoked => {}
            }
        };
        let wait = async {
            let stop = stop.shared();
            let ends = query.ends(watch.as_ref(), &ids, deadline, stop.clone());
            let (mut statuses, ()) = tokio::join!(ends, trees.ended(deadline, stop));
            query.read_open(&in_trees, &mut statuses).await;
            statuses
        };
        let mut statuses = wait.instrument(span("wait", caller)).await;
        drop((watch, counted));
        if self.authentication.still_valid(caller).is_err() {
            statuses.clear();
            trees = AwaitedTrees::default();
        }
        Ok(query
            .awaited(answers, &statuses, &trees, max_bytes, room)
            .await)
    }
}

/// The trees that an insert waits for.
#[derive(Default)]
struct AwaitedTrees {
    states: HashMap<TaskId, TreeState>,
    /// Those that were open at first, as they were then.
    open: Vec<(TreeView, watch::Receiver<TreeView>)>,
}

impl AwaitedTrees {
    /// Whether the insert waits for the tree of this answer.
    fn has(&self, answer: &InsertAnswer) -> bool {
        answer
            .tree
            .is_some_and(|tree| self.states.contains_key(&tree))
    }

    fn state(&self, answer: &InsertAnswer) -> Option<TreeState> {
        self.states.get(&answer.tree?).copied()
    }

    /// Waits until all have ended, or for the deadline or the stop.
    async fn ended(&mut self, deadline: Instant, stop: impl Future<Output = ()>) {
        let wait = async {
            for (first, receiver) in &mut self.open {
                let ends = receiver.wait_for(|tree| has_ended(tree, first));
                if let Err(_removed) = ends.await {
                    self.states.remove(&first.id);
                }
            }
        };
        tokio::select! {
            biased;
            _ = timeout_at(deadline, wait) => {}
            () = stop => {}
        }
        for (first, receiver) in &self.open {
            let tree = receiver.borrow();
            if has_ended(&tree, first)
                && let Some(state) = self.states.get_mut(&first.id)
            {
                *state = tree.state;
            }
        }
    }
}

/// Whether a tree has ended since it was read first. Other callers may have been told of the end of
/// an earlier epoch.
fn has_ended(tree: &TreeView, first: &TreeView) -> bool {
    tree.state != TreeState::Open && tree.epoch >= first.epoch
}

/// The answer contains results, which only readers may see.
pub(super) fn may_read(caller: &Caller) -> Result<(), Denied> {
    let token = caller
        .access
        .token()
        .filter(|token| !token.roles.include(Role::Read));
    token.map_or(Ok(()), |token| {
        Err(Denied::Role {
            token: token.name.clone(),
            has: token.roles,
            needs: Role::Read,
        })
    })
}

fn queue_of(task: &Result<NewTask, String>) -> Option<QueueName> {
    task.as_ref()
        .ok()
        .and_then(|task| QueueName::new(&task.queue).ok())
}

impl Reader {
    fn watch_ends(&self, of: BTreeMap<QueueName, Vec<TaskId>>) -> Result<Watch, Error> {
        Ok(self
            .queue
            .announcer()
            .watch(of.into_iter().collect(), Interest::Ends)?)
    }

    /// Begins to watch the trees of inserted tasks, as far as the caller reaches their roots. Their
    /// tasks are waited for instead if the trees cannot be read.
    async fn awaited_trees(&self, caller: &Caller, answers: &[InsertAnswer]) -> AwaitedTrees {
        let mut ids: Vec<TaskId> = answers.iter().filter_map(|answer| answer.tree).collect();
        ids.sort_unstable();
        ids.dedup();
        let read = match self.store().trees_by_id(&ids).await {
            Ok(read) => read,
            Err(error) => {
                tracing::debug!(
                    "an insert that waits cannot read {} trees: {error}",
                    ids.len()
                );
                Vec::new()
            }
        };
        let mut trees = AwaitedTrees::default();
        for tree in read {
            if !caller.access.reaches(tree.queue.as_str()) {
                continue;
            }
            trees.states.insert(tree.id, tree.state);
            if tree.state == TreeState::Open {
                let receiver = self.tree_watches.watch(tree.id, tree.clone());
                trees.open.push((tree, receiver));
            }
        }
        trees
    }

    /// Returns the statuses of tasks when all of them are final, or at the deadline, or at the
    /// stop. Without a watch, returns them at once.
    async fn ends(
        &self,
        watch: Option<&Watch>,
        ids: &[TaskId],
        deadline: Instant,
        stop: impl Future<Output = ()>,
    ) -> HashMap<TaskId, TaskStatus> {
        let mut statuses = HashMap::new();
        let is_read = self.read_open(ids, &mut statuses).await;
        let Some(watch) = watch else { return statuses };
        // A task that SQL does not have has been removed.
        let ids: Vec<TaskId> = ids
            .iter()
            .copied()
            .filter(|id| !is_read || statuses.contains_key(id))
            .collect();
        let wait = async {
            while ids.iter().any(|id| !is_final(&statuses, id)) {
                let (told, is_incomplete) = watch.told().await;
                for told in told {
                    let (WatcherNews::Hint(event) | WatcherNews::Truth(event)) = told;
                    if !is_final(&statuses, &event.id) {
                        statuses.insert(event.id, event.status);
                    }
                }
                if is_incomplete {
                    watch.ask(&ids);
                }
            }
        };
        let is_over = tokio::select! {
            ended = timeout_at(deadline, wait) => ended.is_ok(),
            () = stop => false,
        };
        if !is_over {
            self.read_open(&ids, &mut statuses).await;
        }
        statuses
    }

    /// Reads the statuses of the tasks that are not known to be final. Returns false if it could
    /// not read all; the others stay as they are.
    async fn read_open(&self, ids: &[TaskId], statuses: &mut HashMap<TaskId, TaskStatus>) -> bool {
        let open: Vec<TaskId> = ids
            .iter()
            .filter(|id| !is_final(statuses, id))
            .copied()
            .collect();
        if open.is_empty() {
            return true;
        }
        match self.statuses(&open).await {
            Ok(Statuses { looks, failed }) => {
                statuses.extend(
                    looks
                        .into_iter()
                        .map(|look| (look.event.id, look.event.status)),
                );
                failed.is_none()
            }
            Err(error) => {
                tracing::debug!(
                    "an insert that waits cannot read {} tasks: {error}",
                    open.len()
                );
                false
            }
        }
    }

    /// Adds the results of completed tasks to the answers, if they can be read now. If a task has
    /// several answers, the first one gets them.
    async fn awaited<R>(
        &self,
        answers: Vec<InsertAnswer>,
        statuses: &HashMap<TaskId, TaskStatus>,
        trees: &AwaitedTrees,
        max_bytes: usize,
        room: impl FnOnce(usize) -> Option<R>,
    ) -> (Vec<AwaitedTask>, Option<R>) {
        let mut seen = HashSet::new();
        let completed = answers.iter().filter_map(|answer| answer.id);
        let completed = completed
            .filter(|id| statuses.get(id) == Some(&TaskStatus::Completed) && seen.insert(*id));
        let completed: Vec<TaskId> = completed.collect();
        let (mut results, room) = match self.results_within(completed, max_bytes, room).await {
            Ok(read) => read,
            Err(error) => {
                tracing::debug!("an insert that waits cannot read results: {error}");
                (Results::new(), None)
            }
        };
        let awaited = |mut answer: InsertAnswer| {
            let before = answer.task_status.take();
            let status = answer.id.and_then(|id| statuses.get(&id).copied());
            let status = status.or(before);
            let results = answer
                .id
                .and_then(|id| results.remove(&id))
                .unwrap_or_default();
            AwaitedTask {
                tree_state: trees.state(&answer),
                answer,
                status,
                results,
            }
        };
        (answers.into_iter().map(awaited).collect(), room)
    }

    /// Reads the results of tasks, in order, as long as they fit into `max_bytes` together. Reads
    /// none if there is no room.
    async fn results_within<R>(
        &self,
        completed: Vec<TaskId>,
        max_bytes: usize,
        room: impl FnOnce(usize) -> Option<R>,
    ) -> Result<(Results, Option<R>), Error> {
        let size = async |id| Ok::<_, Error>((id, self.results_bytes(id).await?));
        let sizes: Vec<(TaskId, usize)> = stream::iter(completed)
            .map(size)
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        let mut ids = Vec::new();
        let mut bytes = 0;
        for (id, size) in sizes {
            if bytes + size > max_bytes.min(MOST_BYTES) {
                break;
            }
            bytes += size;
            ids.push(id);
        }
        let Some(room) = room(bytes) else {
            return Ok((Results::new(), None));
        };
        let read = async |id| Ok::<_, Error>((id, self.results(id).await?.unwrap_or_default()));
        let results: Results = stream::iter(ids)
            .map(read)
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await?;
        Ok((results, Some(room)))
    }
}

fn is_final(statuses: &HashMap<TaskId, TaskStatus>, id: &TaskId) -> bool {
    statuses.get(id).is_some_and(|status| status.is_final())
}
