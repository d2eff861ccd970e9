//! Batches: the tasks of concurrent callers go into SQL in one transaction, then to the bus.

use std::{
    collections::HashSet,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::{
    announce,
    error::{Error, Failure, Unavailable},
    learnt::Learnt,
    seen::{self, Asking, Owner},
};
use crate::{
    model::{RowTree, TaskRow},
    pipelines::{
        context::{Context, ToMark},
        publishing,
        shortcut::Moment,
    },
    runtime::{LastSaid, Loop},
    store::{self, Inserted, NewRow, Stored, Turn},
    telemetry::metrics::{self, Dropped, Source},
};

/// The most batches that wait to be published. Beyond that the insert loop waits, and so do new
/// callers.
pub(super) const TO_PUBLISH: usize = 8;
/// How long the insert loop waits then. If the bus accepts nothing for longer, inserts go on: the
/// watchdog publishes what is stored, some time later.
const WAIT: Duration = Duration::from_secs(5);

/// When callers pile up, a transaction takes up to this many times `discovery_batch_max` tasks:
/// that is a sixth less work per task, and one wait for the disk instead of four.
const PILED_UP: usize = 4;

/// The answer to a row, and its turn, which it has if it may be published now; `None` if the row was
/// not stored.
type Answer = Option<(Inserted, Option<Turn>)>;

/// A stored batch: its tasks on their way to the queue, and its keys on their way to the filter.
pub(super) struct Batch {
    /// New tasks to be published now, each with its turn in the outbox.
    fresh: Vec<(TaskRow, Turn)>,
    /// The moment before they were stored.
    before: Option<Moment>,
    /// For the filter.
    learnt: Learnt,
}

/// One caller's tasks on their way to SQL.
pub(super) struct Pending {
    pub(super) rows: Vec<TaskRow>,
    pub(super) answer: oneshot::Sender<Result<Vec<Inserted>, Error>>,
    pub(super) room: BufferPermit,
}

/// A caller's permits for the buffer, by number and by weight. Its tasks count as waiting until
/// this is dropped.
pub(super) struct BufferPermit {
    tasks: usize,
    _permits: [OwnedSemaphorePermit; 2],
}

impl BufferPermit {
    pub(super) fn new(permits: [OwnedSemaphorePermit; 2], tasks: usize) -> Self {
        metrics::discovery_waits(tasks);
        Self {
            tasks,
            _permits: permits,
        }
    }
}

impl Drop for BufferPermit {
    fn drop(&mut self) {
        metrics::discovery_waited(self.tasks);
    }
}

/// Stores batch after batch until the stop, and then the tasks that still wait.
pub(super) async fn insert(
    context: Context,
    receiver: &mut mpsc::UnboundedReceiver<Pending>,
    stored: mpsc::Sender<Batch>,
    cx: Loop,
) {
    let asking = Asking::default();
    let mut wait = WAIT;
    loop {
        let first = tokio::select! {
            biased;
            first = cx.idle(receiver.recv()) => first,
            () = cx.stop.cancelled() => receiver.try_recv().ok(),
        };
        let Some(first) = first else { return };
        let batch = gather(&context, first, receiver).await;
        let batch = store(&context, batch, &asking).await;
        if batch.fresh.is_empty() {
            // The filter may miss some keys, so do not wait because of it.
            if !batch.learnt.is_empty() && stored.try_send(batch).is_err() {
                tracing::debug!("the filter does not learn some keys: too many batches wait");
            }
        } else {
            let sent = stored.send_timeout(batch, wait).await;
            // After a timeout do not wait again, until a batch is taken.
            wait = if sent.is_ok() { WAIT } else { Duration::ZERO };
            if let Err(error) = sent {
                tracing::debug!("the watchdog publishes some new tasks: {error}");
            }
        }
        cx.beat();
    }
}

/// Publishes stored batches until there are no more. Batches that pile up go together.
pub(super) async fn publish(
    context: Context,
    receiver: &mut mpsc::Receiver<Batch>,
    to_mark: ToMark,
    cx: Loop,
) -> Result<(), Failure> {
    loop {
        let mut batches = Vec::new();
        let count = tokio::select! {
            biased;
            count = cx.idle(receiver.recv_many(&mut batches, TO_PUBLISH)) => count,
            // The inserter may still be storing. The watchdog publishes a last batch that is missed
            // here.
            () = cx.stop.cancelled() => match receiver.try_recv() {
                Ok(batch) => { batches.push(batch); 1 }
                Err(_) => 0,
            },
        };
        if count == 0 {
            return Ok(());
        }
        let rows: Vec<_> = batches
            .iter()
            .flat_map(|batch| &batch.fresh)
            .map(|(row, turn)| (row, *turn))
            .collect();
        if !rows.is_empty() {
            // The first batch is the oldest.
            let stored_behind = batches.first().and_then(|batch| batch.before);
            context.publish(&rows, &[], stored_behind, &to_mark).await?;
        }
        if let Some(learnt) = batches
            .into_iter()
            .map(|batch| batch.learnt)
            .reduce(Learnt::and)
        {
            context.mark(&learnt).await;
        }
        cx.beat();
    }
}

/// Adds callers to the first one: those that wait, and those that come within the delay while the
/// batch is not full.
async fn gather(
    context: &Context,
    first: Pending,
    receiver: &mut mpsc::UnboundedReceiver<Pending>,
) -> Vec<Pending> {
    let max = context.settings.discovery.batch_max;
    let delay = context.settings.discovery.batch_delay;
    let deadline = tokio::time::Instant::now() + delay;
    let mut rows = first.rows.len();
    let mut batch = vec![first];
    while rows < max * PILED_UP {
        let next = match receiver.try_recv() {
            Ok(next) => Some(next),
            Err(_) if delay.is_zero() || rows >= max => None,
            Err(_) => tokio::time::timeout_at(deadline, receiver.recv())
                .await
                .ok()
                .flatten(),
        };
        let Some(next) = next else { break };
        rows += next.rows.len();
        batch.push(next);
    }
    batch
}

/// A caller whose tasks are being stored.
struct Caller {
    answer: oneshot::Sender<Result<Vec<Inserted>, Error>>,
    /// For each task, the task that has its key, if the filter knows the key.
    seen: Vec<Option<Owner>>,
    /// The caller's other tasks, among the rows of the batch.
    rows: Range<usize>,
    room: BufferPermit,
}

impl Caller {
    /// Sends the caller one answer per task, in order. `inserted` are the answers to its own rows.
    fn tell(self, inserted: &[Inserted]) {
        let answers = seen::answers(&self.seen, inserted.iter().copied());
        drop(self.room);
        // A caller that went away was promised nothing. Its tasks are kept all the same.
        drop(self.answer.send(Ok(answers)));
    }

    fn refuse(self, error: &Arc<store::Error>) {
        drop(self.room);
        drop(
            self.answer
                .send(Err(Error::Unavailable(Unavailable::Store(Arc::clone(
                    error,
                ))))),
        );
    }
}

/// Stores a batch and sends its callers their answers.
async fn store(context: &Context, batch: Vec<Pending>, asking: &Asking) -> Batch {
    let started = Instant::now();
    let before = context.moment();
    let era = context.filter.era();
    let (callers, rows) = unseen(context, batch, asking).await;
    let answers = match insert_rows(context, &rows).await {
        Ok(stored) => {
            asking.note(count_batch(&callers, &stored.answers, started));
            for caller in callers {
                let rows = caller.rows.clone();
                caller.tell(&stored.answers[rows]);
            }
            with_turns(&stored, &rows)
        }
        // Do not let the rows of one caller fail those of the others.
        Err(error) if !error.is_transient() && callers.len() > 1 => {
            tracing::warn!(
                "could not store {} tasks together, now by caller: {error}",
                tasks_of(&callers)
            );
            store_by_caller(context, callers, &rows).await
        }
        Err(error) => {
            refuse(callers, error);
            Vec::new()
        }
    };
    let is_new = |answer: &Answer| matches!(answer, Some((Inserted::New, _)));
    let new = rows
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| is_new(answer));
    announce::new_tasks(context, new.map(|(row, _)| &row.task));
    let stored = rows
        .iter()
        .zip(&answers)
        .filter_map(|(row, answer)| answer.map(|(inserted, _)| (&row.task, inserted)));
    let learnt = Learnt::of(context, era, stored);
    let new = rows
        .into_iter()
        .zip(answers)
        .filter(|(_, answer)| is_new(answer));
    let new = new.filter_map(|(row, answer)| {
        let (_, turn) = answer?;
        Some((row.task, turn?))
    });
    let fresh = new
        .filter(|(row, turn)| {
            publishing::goes_out_now(row, *turn, &context.gates, &context.settings)
        })
        .collect();
    Batch {
        fresh,
        before,
        learnt,
    }
}

fn with_turns(stored: &Stored<Inserted>, rows: &[NewRow]) -> Vec<Answer> {
    stored
        .answers
        .iter()
        .zip(rows)
        .map(|(answer, row)| Some((*answer, stored.turn_of(row))))
        .collect()
}

/// Drops the tasks whose keys the filter knows; makes rows of the others.
async fn unseen(
    context: &Context,
    batch: Vec<Pending>,
    asking: &Asking,
) -> (Vec<Caller>, Vec<NewRow>) {
    let tasks: Vec<&TaskRow> = batch.iter().flat_map(|pending| &pending.rows).collect();
    let mut seen = asking.owners(context, &tasks).await;
    // The filter knows that the key exists, but not how its first insert was answered. The letter of
    // a task that is sent again leaves its tree in SQL, also if the task is a duplicate.
    let returns = |task: &TaskRow| matches!(task.tree.as_deref(), Some(RowTree::Returns { .. }));
    for (task, seen) in tasks.iter().zip(&mut seen) {
        if task.idempotency.is_some() || returns(task) {
            *seen = None;
        }
    }
    let mut callers = Vec::with_capacity(batch.len());
    let mut rows = Vec::new();
    let mut seen = seen.into_iter();
    for Pending {
        rows: tasks,
        answer,
        room,
    } in batch
    {
        let seen: Vec<_> = seen.by_ref().take(tasks.len()).collect();
        let first = rows.len();
        let unseen = tasks
            .into_iter()
            .zip(&seen)
            .filter(|(_, seen)| seen.is_none());
        rows.extend(
            unseen.map(|(task, _)| publishing::new_row(task, &context.gates, &context.settings)),
        );
        callers.push(Caller {
            answer,
            seen,
            rows: first..rows.len(),
            room,
        });
    }
    (callers, rows)
}

async fn insert_rows(context: &Context, rows: &[NewRow]) -> store::Result<Stored<Inserted>> {
    if rows.is_empty() {
        return Ok(Stored {
            answers: Vec::new(),
            batch: Turn::FIRST,
            behind: HashSet::new(),
            released: Vec::new(),
        });
    }
    let stored = context.store.insert(rows).await;
    match &stored {
        // Only a new task shows that there is space; duplicates need none.
        Ok(stored) if stored.answers.contains(&Inserted::New) => {
            context.gates.clear_database_full()
        }
        Err(error @ store::Error::Full(_)) => context
            .gates
            .set_database_full(error.to_string(), Instant::now()),
        _ => {}
    }
    stored
}

/// Stores each caller's rows in a transaction of their own. Returns one answer per row, in order.
async fn store_by_caller(context: &Context, callers: Vec<Caller>, rows: &[NewRow]) -> Vec<Answer> {
    let mut all = Vec::with_capacity(rows.len());
    for caller in callers {
        let started = Instant::now();
        let rows = &rows[caller.rows.clone()];
        match insert_rows(context, rows).await {
            Ok(stored) => {
                count_batch(std::slice::from_ref(&caller), &stored.answers, started);
                caller.tell(&stored.answers);
                all.extend(with_turns(&stored, rows));
            }
            Err(error) => {
                refuse(vec![caller], error);
                all.extend(rows.iter().map(|_| None));
            }
        }
    }
    all
}

/// Counts the tasks of a batch. Returns how many were duplicates.
fn count_batch(callers: &[Caller], inserted: &[Inserted], started: Instant) -> usize {
    let count = |of| inserted.iter().filter(|one| **one == of).count();
    let created = count(Inserted::New);
    let rejected = count(Inserted::KeyReused) + count(Inserted::TreeClosed);
    let taken = tasks_of(callers) - rejected;
    metrics::discovery_batch(
        Source::Api,
        taken,
        created,
        taken - created,
        started.elapsed(),
    );
    // Counted as in the queue's books.
    metrics::discovery_dropped(Source::Api, Dropped::Rejected, rejected);
    taken - created
}

/// Sends the error to callers whose rows could not be stored.
fn refuse(callers: Vec<Caller>, error: store::Error) {
    // Callers retry at once, thousands of times a second, so log an error only when it is new.
    static SAID: Mutex<LastSaid> = Mutex::new(LastSaid::nothing());
    let tasks = tasks_of(&callers);
    match SAID.lock().is_news(&error.to_string()) {
        true => tracing::warn!("could not store {tasks} tasks: {error}"),
        false => tracing::debug!("again could not store {tasks} tasks: {error}"),
    }
    metrics::discovery_dropped(Source::Api, Dropped::Unavailable, tasks);
    let error = Arc::new(error);
    callers.into_iter().for_each(|caller| caller.refuse(&error));
}

fn tasks_of(callers: &[Caller]) -> usize {
    callers.iter().map(|caller| caller.seen.len()).sum()
}
