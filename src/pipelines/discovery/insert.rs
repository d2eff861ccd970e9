//! The insert side: callers hand in tasks and wait for their answers.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{Mutex, Semaphore, mpsc, oneshot};

use super::{
    batch::{self, Pending},
    enrich,
    error::{Error, Failure, Unavailable},
    schema,
    traced::Inserts,
    trees,
    turned_away::Tally,
};
use crate::{
    enrichment::Enrichment,
    model::{
        DeadLetter, InsertAnswer, InsertStatus, MAX_IDEMPOTENCY_KEY_BYTES, MAX_RECORD_BYTES,
        NewTask, QueueName, RowTree, Scope, StoredStatus, TaskId, TaskRow, TaskStatus, Topology,
        TopologyName,
        validate::{self, MAX_KEY_BYTES, MAX_TRACEPARENT_BYTES},
    },
    pipelines::{
        admission::{OccupancyPermit, OpenPermit, Stages},
        context::{Context, ToMark},
        publishing::Error as LettersError,
    },
    runtime::Supervisor,
    store::Inserted,
    telemetry::metrics::{self, Dropped, Source},
};

/// The bound on the weight of the tasks that wait to be stored, next to the bound on their number.
/// A single caller may exceed it.
const BUFFER_KIB: u32 = 64 << 10;

/// The insert side, for callers. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    context: Context,
    enrichment: Enrichment,
    sender: mpsc::UnboundedSender<Pending>,
    room: Arc<Semaphore>,
    room_kib: Arc<Semaphore>,
    tally: Tally,
}

pub(super) fn start(
    context: Context,
    enrichment: Enrichment,
    to_mark: ToMark,
    tally: Tally,
    supervisor: &Supervisor,
) -> Handle {
    // The semaphores bound the channel.
    let (sender, receiver) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(context.settings.discovery.buffer));
    let (stored, to_publish) = mpsc::channel(batch::TO_PUBLISH);

    let inserting = (context.clone(), Arc::new(Mutex::new(receiver)), stored);
    supervisor.spawn_loop(
        "discovery/insert",
        inserting,
        |(context, receiver, stored), cx| async move {
            batch::insert(context, &mut *receiver.lock().await, stored, cx).await;
        },
    );
    let publishing = (context.clone(), Arc::new(Mutex::new(to_publish)), to_mark);
    supervisor.spawn_loop(
        "discovery/publish",
        publishing,
        |(context, to_publish, to_mark), cx| async move {
            batch::publish(context, &mut *to_publish.lock().await, to_mark, cx).await
        },
    );
    Handle {
        context,
        enrichment,
        sender,
        room,
        room_kib: Arc::new(Semaphore::new(BUFFER_KIB as usize)),
        tally,
    }
}

impl Handle {
    pub fn stages(&self) -> Arc<Stages> {
        self.context.occupancy.topologies().stages()
    }

    /// Stores new tasks. Returns one answer per task, in order. Waits at most for the batches
    /// before it.
    ///
    /// Returns an error if no task was stored. If only the rest could not be stored, its tasks are
    /// answered `TRY_LATER`.
    pub async fn insert(&self, tasks: Vec<NewTask>) -> Result<Vec<InsertAnswer>, Error> {
        self.insert_all(tasks, &[], Refused::AsTheQueueSays).await
    }

    /// Admits the queue name of a caller that is restricted to a scope, before [`Self::insert`].
    /// Leaves an invalid name to `insert`.
    pub fn let_in(&self, queue: &str, scope: &Scope) -> Result<(), String> {
        let Ok(name) = QueueName::new(queue) else {
            return Ok(());
        };
        let let_in = self.context.let_in(&name, Some(scope));
        if let_in.is_err() {
            metrics::discovery_dropped(Source::Api, Dropped::MaxQueues, 1);
            self.tally.rejected(queue);
        }
        let_in
    }

    /// Inserts tasks of dead letters. A task that is refused again keeps its letter, and gets no
    /// other.
    pub async fn insert_again(&self, tasks: Vec<NewTask>) -> Result<Vec<InsertAnswer>, Error> {
        self.insert_all(tasks, &[], Refused::Dropped).await
    }

    /// Inserts the tasks of records, with their ids. A task that was stored before stays as it is,
    /// and is answered as a duplicate of itself or as new. Each refused task becomes a letter.
    pub(super) async fn insert_records(
        &self,
        ids: &[TaskId],
        tasks: Vec<NewTask>,
    ) -> Result<Vec<InsertAnswer>, Error> {
        self.insert_all(tasks, ids, Refused::Kept).await
    }

    /// Keeps the task of a record that SQL refuses as a letter.
    pub(super) async fn bury(&self, task: NewTask, why: &str) -> Result<(), LettersError> {
        let letter = DeadLetter {
            reason: why.to_owned(),
            at_unix_ms: self.context.clock.now_unix_ms(),
            queue: task.queue.clone(),
            task: Some(task),
            ..DeadLetter::default()
        };
        self.context.letters.send_once(vec![letter]).await
    }

    /// `ids` are those of the tasks; if there are none, the tasks get new ones.
    async fn insert_all(
        &self,
        tasks: Vec<NewTask>,
        mut ids: &[TaskId],
        refused: Refused,
    ) -> Result<Vec<InsertAnswer>, Error> {
        let mut answers = Vec::with_capacity(tasks.len());
        let mut enrich_left = self.enrichment.time();
        let mut rest = tasks.into_iter().peekable();
        while rest.peek().is_some() {
            let some: Vec<_> = rest
                .by_ref()
                .take(self.context.settings.discovery.batch_max)
                .collect();
            let unstored = some.len() + rest.len();
            let (ids_of_some, ids_of_rest) = ids.split_at(some.len().min(ids.len()));
            ids = ids_of_rest;
            match self
                .insert_batch(some, ids_of_some, refused, &mut enrich_left)
                .await
            {
                Ok(some) => answers.extend(some),
                Err(error) if answers.iter().all(is_rejected) => return Err(error),
                // Stored tasks keep their answers: the caller sends only the rest again.
                Err(error) => {
                    answers.resize(
                        answers.len() + unstored,
                        InsertAnswer::try_later(error.to_string()),
                    );
                    return Ok(answers);
                }
            }
        }
        Ok(answers)
    }

    async fn insert_batch(
        &self,
        tasks: Vec<NewTask>,
        ids: &[TaskId],
        refused: Refused,
        enrich_left: &mut Duration,
    ) -> Result<Vec<InsertAnswer>, Error> {
        let now = self.context.clock.now_unix_ms();
        let (sorted, traced) = self.sort(tasks, ids, refused, now).await;
        match self.store_sorted(sorted, refused, now, enrich_left).await {
            Ok(answers) => {
                traced.end(&answers);
                Ok(answers)
            }
            Err(error) => {
                traced.fail(&error);
                Err(error)
            }
        }
    }

    /// Stores the valid tasks that their endpoints do not reject, and keeps the refused ones as
    /// dead letters. Returns the answers to all.
    async fn store_sorted(
        &self,
        mut sorted: Sorted,
        keeps: Refused,
        now: i64,
        enrich_left: &mut Duration,
    ) -> Result<Vec<InsertAnswer>, Error> {
        let mut opening = None;
        if sorted.rows.iter().any(is_root) {
            // Few inserts open trees, and the others stay small.
            opening = Some(Box::pin(self.bound_trees(&mut sorted)).await?);
        }
        let Sorted {
            mut answers,
            mut rows,
            mut places,
            mut refused,
        } = sorted;
        if rows.is_empty() {
            self.keep(refused, &mut answers).await;
            return Ok(answers);
        }
        let mut room = self.admit(&rows)?;
        if !self.enrichment.is_off() {
            let rejected = Box::pin(self.enrich(&mut rows, enrich_left)).await?;
            let letters = rejected.iter().map(|(at, error)| {
                answers[places[*at]] = InsertAnswer::rejected(error.clone());
                self.tally.rejected(rows[*at].queue.as_str());
                (places[*at], refusal(NewTask::from(&rows[*at]), error, now))
            });
            let is_kept = |letter: &DeadLetter| self.keeps(keeps, &letter.queue);
            refused.extend(letters.filter(|(_, letter)| is_kept(letter)));
            retain(&mut rows, |at| !rejected.contains_key(&at));
            retain(&mut places, |at| !rejected.contains_key(&at));
        }
        let stored = if rows.is_empty() {
            Vec::new()
        } else {
            self.store(rows).await?
        };
        for (place, (id, queue, inserted)) in places.into_iter().zip(stored) {
            if let Inserted::New = inserted {
                room.keep(&queue);
                if let Some(opening) = &mut opening {
                    opening.keep(id);
                }
            }
            answers[place] = answer(id, inserted);
        }
        // Return the unused capacity now: sending the letters may take long.
        drop((room, opening));
        self.keep(refused, &mut answers).await;
        Ok(answers)
    }

    /// Enriches the rows. Returns those that their endpoints reject, by index, each with the
    /// reason.
    async fn enrich(
        &self,
        rows: &mut [TaskRow],
        left: &mut Duration,
    ) -> Result<HashMap<usize, String>, Error> {
        let mut each: Vec<&mut TaskRow> = rows.iter_mut().collect();
        let mut rejected = enrich::enrich(&self.context, &self.enrichment, &mut each, left)
            .await
            .map_err(unavailable)?;
        // An endpoint sees each key once.
        let keys = rejected
            .iter()
            .map(|(at, why)| (rows[*at].key_hash, why.clone()));
        let keys: HashMap<_, String> = keys.collect();
        for (at, row) in rows.iter().enumerate() {
            if let Some(why) = keys.get(&row.key_hash) {
                rejected.entry(at).or_insert_with(|| why.clone());
            }
        }
        metrics::discovery_dropped(Source::Api, Dropped::Rejected, rejected.len());
        Ok(rejected)
    }

    /// Makes rows of the valid tasks, and answers for the others.
    async fn sort(
        &self,
        tasks: Vec<NewTask>,
        ids: &[TaskId],
        keeps: Refused,
        now: i64,
    ) -> (Sorted, Inserts) {
        let settings = &self.context.settings;
        let partitions = self.context.partitions();
        let mut answers = vec![InsertAnswer::rejected(String::new()); tasks.len()];
        let mut rows = Vec::with_capacity(tasks.len());
        let mut places = Vec::with_capacity(tasks.len());
        let mut refused = Vec::new();
        let mut misfits = schema::misfits(settings, &tasks).await;
        let mut traced = Inserts::default();
        for (place, mut task) in tasks.into_iter().enumerate() {
            let rules = settings.task_rules(&task.queue);
            let checked = validate::check(&task, &rules, now);
            match checked.and_then(|checked| {
                misfits
                    .remove(&place)
                    .map_or(Ok(checked), |misfit| Err(misfit.says))
            }) {
                Ok(checked) => match self.context.let_in(checked.queue(), None) {
                    Ok(()) => {
                        let given = task.id.or_else(|| ids.get(place).copied());
                        let id = given.unwrap_or_else(|| TaskId::at(now, place));
                        let tree = match task.tree.as_deref() {
                            Some(tree) => {
                                trees::row_tree(&self.context, tree.clone(), id, now).map(Some)
                            }
                            None => Ok(None),
                        };
                        match tree {
                            Ok(tree) => {
                                task.tree = None;
                                traced.begin(place, id, checked.queue(), &mut task);
                                let mut row = checked.row(task, id, partitions);
                                trees::join(&mut row, tree);
                                rows.push(row);
                                places.push(place);
                            }
                            // There may be room for the queue of its `then` task later.
                            Err(error) if !ids.is_empty() => {
                                answers[place] = InsertAnswer::try_later(error);
                            }
                            Err(error) => {
                                metrics::discovery_dropped(Source::Api, Dropped::Rejected, 1);
                                self.tally.rejected(&task.queue);
                                if self.keeps(keeps, &task.queue) {
                                    refused.push((place, refusal(task, &error, now)));
                                }
                                answers[place] = InsertAnswer::rejected(error);
                            }
                        }
                    }
                    // There may be room for the queue later.
                    Err(error) if !ids.is_empty() => {
                        answers[place] = InsertAnswer::try_later(error)
                    }
                    Err(error) => {
                        metrics::discovery_dropped(Source::Api, Dropped::MaxQueues, 1);
                        self.tally.rejected(&task.queue);
                        answers[place] = InsertAnswer::rejected(error);
                    }
                },
                Err(error) => {
                    metrics::discovery_dropped(Source::Api, Dropped::Rejected, 1);
                    self.tally.rejected(&task.queue);
                    if self.keeps(keeps, &task.queue) {
                        refused.push((place, refusal(task, &error, now)));
                    }
                    answers[place] = InsertAnswer::rejected(error);
                }
            }
        }
        (
            Sorted {
                answers,
                rows,
                places,
                refused,
            },
            traced,
        )
    }

    /// Whether a refused task of this queue becomes a letter.
    fn keeps(&self, refused: Refused, queue: &str) -> bool {
        match refused {
            Refused::AsTheQueueSays => self.context.settings.keeps_refused(queue),
            Refused::Kept => true,
            Refused::Dropped => false,
        }
    }

    /// Keeps refused tasks as dead letters. If that fails, their answers ask the caller to send
    /// them again.
    async fn keep(&self, refused: Vec<(usize, DeadLetter)>, answers: &mut [InsertAnswer]) {
        if refused.is_empty() {
            return;
        }
        let (places, letters): (Vec<usize>, Vec<DeadLetter>) = refused.into_iter().unzip();
        // Boxed, so that the future of every insert need not have space for letters, which are
        // rare.
        if let Err(error) = Box::pin(self.context.letters.send_once(letters)).await {
            let why = format!(
                "the task is wrong, and taskd cannot keep it as a dead letter now: {error}"
            );
            places
                .into_iter()
                .for_each(|place| answers[place] = InsertAnswer::try_later(why.clone()));
        }
    }

    async fn store(&self, rows: Vec<TaskRow>) -> Result<Vec<(TaskId, QueueName, Inserted)>, Error> {
        let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let weight = rows.iter().map(TaskRow::weight).sum::<usize>() >> 10;
        let kib = u32::try_from(weight)
            .unwrap_or(u32::MAX)
            .clamp(1, BUFFER_KIB);
        let room = Arc::clone(&self.room);
        let room_kib = Arc::clone(&self.room_kib);
        let (Ok(room), Ok(room_kib)) = (
            room.try_acquire_many_owned(count),
            room_kib.try_acquire_many_owned(kib),
        ) else {
            metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
            return Err(Error::Busy("too many tasks wait to be stored".into()));
        };
        let room = batch::BufferPermit::new([room, room_kib], rows.len());
        let tasks: Vec<_> = rows
            .iter()
            .map(|row| (row.id, row.queue.clone(), row.has_key()))
            .collect();
        let (answer, answered) = oneshot::channel();
        let stopping = Error::Unavailable(Unavailable::Stopping);
        self.sender
            .send(Pending { rows, answer, room })
            .map_err(|_| stopping.clone())?;
        let inserted = answered.await.unwrap_or(Err(stopping))?;
        for ((id, queue, has_key), inserted) in tasks.iter().zip(&inserted) {
            match inserted {
                Inserted::New => {}
                // Whoever inserts tasks without keys counts them where they come from.
                _ if !has_key => {}
                // A record that was read again.
                Inserted::Duplicate { id: owner, .. } if owner == id => {}
                Inserted::Duplicate { .. } | Inserted::Repeated { .. } => {
                    self.tally.duplicate(queue)
                }
                Inserted::KeyReused | Inserted::TreeClosed => self.tally.rejected(queue.as_str()),
            }
        }
        Ok(tasks
            .into_iter()
            .zip(inserted)
            .map(|((id, queue, _), inserted)| (id, queue, inserted))
            .collect())
    }

    /// Refuses the rows beyond the open trees that their topologies may have. Fails if that leaves
    /// none of the tasks.
    async fn bound_trees(&self, sorted: &mut Sorted) -> Result<Box<Opening>, Error> {
        let stages = self.stages();
        let mut opening = Box::<Opening>::default();
        let mut wanted: BTreeMap<TopologyName, (&Topology, u64)> = BTreeMap::new();
        for row in &sorted.rows {
            if let Some(topology) = opens_tree(&stages, row) {
                let name = topology.name.clone();
                wanted.entry(name).or_insert((topology, 0)).1 += 1;
            }
        }
        let open = self.context.occupancy.open_trees();
        let mut refused = HashSet::new();
        let mut why = String::new();
        for (name, (topology, count)) in wanted {
            let mut permit = open.reserve(topology, count);
            if permit.left() < count {
                drop(permit);
                let refreshed = open.refresh(&stages, &*self.context.store).await;
                refreshed.map_err(|error| Unavailable::Store(Arc::new(error)))?;
                permit = open.reserve(topology, count);
            }
            let of_topology = sorted.rows.iter().enumerate().filter(|(_, row)| {
                opens_tree(&stages, row).is_some_and(|topology| topology.name == name)
            });
            let mut left = permit.left();
            for (at, row) in of_topology {
                if left == 0 {
                    let max = topology.max_open;
                    why = format!("topology {name} has {max} open trees, its max_open");
                    refused.insert(at);
                    sorted.answers[sorted.places[at]] = InsertAnswer::try_later(why.clone());
                } else {
                    left -= 1;
                    opening.topologies.insert(row.id, name.clone());
                }
            }
            opening.permits.insert(name, permit);
        }
        if refused.is_empty() {
            return Ok(opening);
        }
        metrics::discovery_dropped(Source::Api, Dropped::Busy, refused.len());
        if refused.len() == sorted.answers.len() {
            return Err(Error::Busy(why));
        }
        retain(&mut sorted.rows, |at| !refused.contains(&at));
        retain(&mut sorted.places, |at| !refused.contains(&at));
        Ok(opening)
    }

    /// Reserves capacity for the rows, before any is stored. Refuses all if one queue is full.
    fn admit(&self, rows: &[TaskRow]) -> Result<OccupancyPermit, Error> {
        if let Some(shortage) = self.context.gates.shortage() {
            metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
            return Err(Error::Busy(shortage.why));
        }
        let mut by_queue = BTreeMap::new();
        rows.iter()
            .for_each(|row| *by_queue.entry(row.queue.clone()).or_insert(0) += 1);
        self.context
            .occupancy
            .admit(by_queue, &self.context.settings.queues)
            .map_err(|queue| {
                metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
                let max = self.context.settings.queues.get(&queue).max_unfinished;
                Error::Busy(format!(
                    "queue {queue} has {max} unfinished tasks, its max_unfinished"
                ))
            })
    }
}

/// Trees of topologies with a bound that are about to begin.
#[derive(Default)]
struct Opening {
    permits: BTreeMap<TopologyName, OpenPermit>,
    /// The topology of each root.
    topologies: HashMap<TaskId, TopologyName>,
}

impl Opening {
    /// Counts the tree of this task, if it is the root of one.
    fn keep(&mut self, task: TaskId) {
        let name = self.topologies.remove(&task);
        if let Some(permit) = name.and_then(|name| self.permits.get_mut(&name)) {
            permit.keep();
        }
    }
}

fn is_root(row: &TaskRow) -> bool {
    matches!(row.tree.as_deref(), Some(RowTree::Root(_)))
}

/// The topology with a bound in which this row opens a tree.
fn opens_tree<'s>(stages: &'s Stages, row: &TaskRow) -> Option<&'s Topology> {
    if !is_root(row) {
        return None;
    }
    let (topology, stage) = stages.of(row.queue.as_str())?;
    (topology.max_open > 0 && topology.stages[stage].is_start).then_some(topology)
}

/// What becomes of refused tasks.
#[derive(Clone, Copy)]
enum Refused {
    /// They become dead letters if their queue keeps them.
    AsTheQueueSays,
    /// They become dead letters.
    Kept,
    Dropped,
}

/// The tasks of a batch, checked.
struct Sorted {
    /// One per task. Those of valid tasks are filled in later.
    answers: Vec<InsertAnswer>,
    rows: Vec<TaskRow>,
    /// The index of each row's task.
    places: Vec<usize>,
    refused: Vec<(usize, DeadLetter)>,
}

/// Keeps the entries at the indices for which `stays` returns true.
fn retain<T>(list: &mut Vec<T>, stays: impl Fn(usize) -> bool) {
    let mut at = 0..;
    list.retain(|_| at.next().is_some_and(&stays));
}

/// The error of an insert if it could not be found out which of its tasks are new.
fn unavailable(failure: Failure) -> Error {
    match failure {
        Failure::Store(error) => Error::Unavailable(Unavailable::Store(Arc::new(error))),
        other => Error::Busy(other.to_string()),
    }
}

/// Returns the dead letter of a refused task. Leaves out the payload and the headers if the task is
/// larger than any stored task may be.
fn refusal(mut task: NewTask, reason: &str, at_unix_ms: i64) -> DeadLetter {
    let mut reason = reason.to_owned();
    let mut incomplete = false;
    // These are short in every valid task, and a page of letters contains all of them.
    let short = [
        (&mut task.queue, 64),
        (&mut task.traceparent, MAX_TRACEPARENT_BYTES),
        (&mut task.idempotency_key, MAX_IDEMPOTENCY_KEY_BYTES),
    ];
    for (text, most) in short {
        if let Some((end, _)) = text.char_indices().nth(most) {
            text.truncate(end);
            incomplete = true;
        }
    }
    if task.key.len() > MAX_KEY_BYTES {
        task.key.truncate(MAX_KEY_BYTES);
        reason.push_str(" (its key is cut)");
        incomplete = true;
    }
    if is_too_large(&task) {
        task.payload = Default::default();
        task.headers = Default::default();
        reason.push_str(" (without payload and headers: too large to keep)");
        incomplete = true;
    }
    DeadLetter {
        reason,
        at_unix_ms,
        queue: task.queue.clone(),
        task: Some(task),
        incomplete,
        ..Default::default()
    }
}

/// Whether a task is too large even for its letter, which has no payload then.
pub(super) fn is_too_large(task: &NewTask) -> bool {
    let headers = task.headers.iter();
    let headers: usize = headers.map(|(name, value)| name.len() + value.len()).sum();
    task.key.len() + task.payload.len() + headers > MAX_RECORD_BYTES
}

fn is_rejected(answer: &InsertAnswer) -> bool {
    answer.status == InsertStatus::Rejected
}

fn created(id: TaskId) -> InsertAnswer {
    InsertAnswer {
        status: InsertStatus::Created,
        id: Some(id),
        error: String::new(),
        task_status: None,
        tree: None,
    }
}

fn answer(id: TaskId, inserted: Inserted) -> InsertAnswer {
    match inserted {
        Inserted::New => created(id),
        Inserted::Duplicate { id, status } => {
            let error = match status {
                StoredStatus::Dead => "the task with this key is DEAD",
                StoredStatus::Cancelled => "the task with this key is CANCELLED",
                StoredStatus::Unfinished | StoredStatus::Completed => "",
            };
            let task_status = match status {
                StoredStatus::Unfinished => None,
                StoredStatus::Completed => Some(TaskStatus::Completed),
                StoredStatus::Dead => Some(TaskStatus::Dead),
                StoredStatus::Cancelled => Some(TaskStatus::Cancelled),
            };
            InsertAnswer {
                status: InsertStatus::Duplicate,
                id: Some(id),
                error: error.to_owned(),
                task_status,
                tree: None,
            }
        }
        Inserted::Repeated { id } => created(id),
        Inserted::TreeClosed => InsertAnswer::rejected(
            "the tree has ended or is being cancelled: it takes nothing more".into(),
        ),
        Inserted::KeyReused => InsertAnswer::rejected(
            "the idempotency_key was used with another task, whose key or payload is not this one's".into(),
        ),
    }
}
