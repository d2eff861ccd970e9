//! The insert side: concurrent callers' tasks go into SQL together.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Error, Parts};
use crate::{
    bus::Topic,
    model::{InsertAnswer, InsertStatus, NewTask, StoredStatus, TaskId, TaskRow, validate},
    runtime::{Beat, Supervisor},
    store::Inserted,
    telemetry::metrics::{self, Dropped, Source},
};

/// Batches that are stored and wait to be published; beyond that the next batch waits, and so do its callers.
const BATCHES_TO_PUBLISH: usize = 8;

/// What waits to be stored may weigh so much, beside the bound on its number; one caller's tasks may be heavier when they are alone.
const BUFFER_KIB: u32 = 64 << 10;

/// One caller's tasks, on their way to SQL.
struct Pending {
    rows: Vec<TaskRow>,
    answer: oneshot::Sender<Result<Vec<Inserted>, Error>>,
    /// Their room in the buffer, by number and by weight.
    _room: [OwnedSemaphorePermit; 2],
}

/// How callers reach the insert side. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    parts: Parts,
    sender: mpsc::UnboundedSender<Pending>,
    room: Arc<Semaphore>,
    room_kib: Arc<Semaphore>,
}

pub(super) fn start(parts: &Parts, supervisor: &Supervisor) -> Handle {
    // The semaphores bound what stands in the channel.
    let (sender, receiver) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(parts.settings.discovery.buffer));
    let (stored, to_publish) = mpsc::channel(BATCHES_TO_PUBLISH);

    let (receiver, to_publish) = (Arc::new(Mutex::new(receiver)), Arc::new(Mutex::new(to_publish)));
    let (beat, stop) = (Arc::new(supervisor.progress().register("discovery/insert")), supervisor.stop_token());
    let inserting = parts.clone();
    supervisor.spawn("discovery/insert", move || {
        insert(inserting.clone(), Arc::clone(&receiver), stored.clone(), Arc::clone(&beat), stop.clone())
    });
    let (beat, stop) = (Arc::new(supervisor.progress().register("discovery/publish")), supervisor.stop_token());
    let publishing = parts.clone();
    supervisor.spawn("discovery/publish", move || {
        publish(publishing.clone(), Arc::clone(&to_publish), Arc::clone(&beat), stop.clone())
    });
    Handle { parts: parts.clone(), sender, room, room_kib: Arc::new(Semaphore::new(BUFFER_KIB as usize)) }
}

impl Handle {
    /// Stores what is new and answers per task, in order. Waits at most for the batches before it. An error when nothing was stored;
    /// when only the rest could not be, that is answered `TRY_LATER`.
    pub async fn insert(&self, tasks: Vec<NewTask>) -> Result<Vec<InsertAnswer>, Error> {
        let mut answers = Vec::with_capacity(tasks.len());
        let mut rest = tasks.into_iter().peekable();
        while rest.peek().is_some() {
            let some: Vec<_> = rest.by_ref().take(self.parts.settings.discovery.batch_max).collect();
            let unstored = some.len() + rest.len();
            match self.insert_batch(some).await {
                Ok(some) => answers.extend(some),
                Err(error) if answers.iter().all(is_rejected) => return Err(error),
                // What was stored has its answers: only the rest is to be sent again.
                Err(error) => {
                    answers.resize(answers.len() + unstored, InsertAnswer::try_later(error.to_string()));
                    return Ok(answers);
                }
            }
        }
        Ok(answers)
    }

    async fn insert_batch(&self, tasks: Vec<NewTask>) -> Result<Vec<InsertAnswer>, Error> {
        let settings = &self.parts.settings;
        let partitions = self.parts.outbox.bus.partitions(Topic::Pipeline);
        let now = self.parts.outbox.clock.now_unix_ms();
        let mut answers = vec![InsertAnswer::rejected(String::new()); tasks.len()];
        let (mut rows, mut places) = (Vec::with_capacity(tasks.len()), Vec::with_capacity(tasks.len()));
        for (place, task) in tasks.into_iter().enumerate() {
            let rules = settings.task_rules(&task.queue);
            match validate::task_row(task, TaskId::at(now, place), &rules, partitions, now) {
                Ok(row) => match self.parts.let_in(&row.queue) {
                    Ok(()) => {
                        rows.push(row);
                        places.push(place);
                    }
                    Err(error) => {
                        metrics::discovery_dropped(Source::Api, Dropped::MaxQueues, 1);
                        answers[place] = InsertAnswer::rejected(error);
                    }
                },
                Err(error) => {
                    metrics::discovery_dropped(Source::Api, Dropped::Rejected, 1);
                    answers[place] = InsertAnswer::rejected(error);
                }
            }
        }
        if rows.is_empty() {
            return Ok(answers);
        }
        for (place, inserted) in places.into_iter().zip(self.store(rows).await?) {
            let (id, inserted) = inserted;
            answers[place] = answer(id, inserted);
        }
        Ok(answers)
    }

    async fn store(&self, rows: Vec<TaskRow>) -> Result<Vec<(TaskId, Inserted)>, Error> {
        self.admit(&rows)?;
        let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        let weight = rows.iter().map(TaskRow::weight).sum::<usize>() >> 10;
        let kib = u32::try_from(weight).unwrap_or(u32::MAX).clamp(1, BUFFER_KIB);
        let (room, room_kib) = (Arc::clone(&self.room), Arc::clone(&self.room_kib));
        let (Ok(room), Ok(room_kib)) = (room.try_acquire_many_owned(count), room_kib.try_acquire_many_owned(kib))
        else {
            metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
            return Err(Error::Busy("too many tasks wait to be stored".into()));
        };
        self.show_depth();
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        let (answer, answered) = oneshot::channel();
        let stopping = || Error::Unavailable("the process is stopping".into());
        self.sender.send(Pending { rows, answer, _room: [room, room_kib] }).map_err(|_| stopping())?;
        let inserted = answered.await.unwrap_or_else(|_| Err(stopping()));
        self.show_depth();
        let inserted = inserted?;
        Ok(ids.into_iter().zip(inserted).collect())
    }

    fn show_depth(&self) {
        metrics::discovery_depth(self.parts.settings.discovery.buffer - self.room.available_permits());
    }

    /// A queue that has all it may have is told so before anything is stored.
    fn admit(&self, rows: &[TaskRow]) -> Result<(), Error> {
        if let Some(shortage) = self.parts.outbox.gates.shortage() {
            metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
            return Err(Error::Busy(shortage.why));
        }
        let mut by_queue = BTreeMap::new();
        rows.iter().for_each(|row| *by_queue.entry(&row.queue).or_insert(0) += 1);
        for (queue, count) in by_queue {
            if !self.parts.outbox.gates.admit(queue, count, &self.parts.settings.queues) {
                metrics::discovery_dropped(Source::Api, Dropped::Busy, rows.len());
                let max = self.parts.settings.queues.get(queue).max_unfinished;
                return Err(Error::Busy(format!("queue {queue} has {max} unfinished tasks, its max_unfinished")));
            }
        }
        Ok(())
    }
}

fn is_rejected(answer: &InsertAnswer) -> bool {
    answer.status == InsertStatus::Rejected
}

fn answer(id: TaskId, inserted: Inserted) -> InsertAnswer {
    match inserted {
        Inserted::New => InsertAnswer { status: InsertStatus::Created, id: Some(id), error: String::new() },
        Inserted::Duplicate { id, status } => {
            let error = match status {
                StoredStatus::Dead => "the task with this key is DEAD",
                StoredStatus::Cancelled => "the task with this key is CANCELLED",
                StoredStatus::Unfinished | StoredStatus::Completed => "",
            };
            InsertAnswer { status: InsertStatus::Duplicate, id: Some(id), error: error.to_owned() }
        }
    }
}

/// Stores batch after batch until the stop, and then what is left.
async fn insert(
    parts: Parts,
    receiver: Arc<Mutex<mpsc::UnboundedReceiver<Pending>>>,
    stored: mpsc::Sender<Vec<TaskRow>>,
    beat: Arc<Beat>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut receiver = receiver.lock().await;
    loop {
        let first = tokio::select! {
            biased;
            first = beat.idle(receiver.recv()) => first,
            () = stop.cancelled() => receiver.try_recv().ok(),
        };
        let Some(first) = first else { return Ok(()) };
        let batch = gather(&parts, first, &mut receiver).await;
        let new = store(&parts, batch).await;
        if !new.is_empty() && stored.send(new).await.is_err() {
            tracing::debug!("nobody publishes any more: the watchdog will");
        }
        beat.beat();
    }
}

/// More callers: those who are there, and those who come within the delay.
async fn gather(parts: &Parts, first: Pending, receiver: &mut mpsc::UnboundedReceiver<Pending>) -> Vec<Pending> {
    let (max, delay) = (parts.settings.discovery.batch_max, parts.settings.discovery.batch_delay);
    let deadline = tokio::time::Instant::now() + delay;
    let mut rows = first.rows.len();
    let mut batch = vec![first];
    while rows < max {
        let next = match receiver.try_recv() {
            Ok(next) => Some(next),
            Err(_) if delay.is_zero() => None,
            Err(_) => tokio::time::timeout_at(deadline, receiver.recv()).await.ok().flatten(),
        };
        let Some(next) = next else { break };
        rows += next.rows.len();
        batch.push(next);
    }
    batch
}

/// Stores a batch and answers its callers; the new tasks that are to be published now.
async fn store(parts: &Parts, batch: Vec<Pending>) -> Vec<TaskRow> {
    let started = Instant::now();
    let rows: Vec<TaskRow> = batch.iter().flat_map(|pending| pending.rows.iter().cloned()).collect();
    let result = insert_rows(parts, &rows).await;
    let mut new = Vec::new();
    match result {
        Ok(inserted) => {
            let created = inserted.iter().filter(|one| **one == Inserted::New).count();
            metrics::discovery_batch(Source::Api, rows.len(), created, rows.len() - created, started.elapsed());
            let mut answers = inserted.iter().copied();
            for pending in batch {
                let mine = answers.by_ref().take(pending.rows.len()).collect();
                // A caller that went away has not been promised anything; its tasks are kept all the same.
                drop(pending.answer.send(Ok(mine)));
            }
            let fresh = rows.into_iter().zip(inserted).filter(|(_, one)| *one == Inserted::New).map(|(row, _)| row);
            new.extend(fresh.filter(|row| parts.outbox.goes_out_now(row, &parts.settings)));
        }
        // One caller's rows are no reason to turn the others away.
        Err(error) if !error.is_transient() && batch.len() > 1 => {
            tracing::warn!("could not store {} tasks together, now by caller: {error}", rows.len());
            for pending in batch {
                new.extend(Box::pin(store(parts, vec![pending])).await);
            }
        }
        Err(error) => {
            tracing::warn!("could not store {} tasks: {error}", rows.len());
            for pending in batch {
                drop(pending.answer.send(Err(Error::Unavailable(error.to_string()))));
            }
        }
    }
    new
}

async fn insert_rows(parts: &Parts, rows: &[TaskRow]) -> Result<Vec<Inserted>, crate::store::Error> {
    let keys: Vec<_> = rows.iter().map(|row| (row.queue.clone(), row.key_hash)).collect();
    let seen = parts.filter.seen(&keys).await.unwrap_or_else(|error| {
        tracing::debug!("the filter does not answer, SQL decides: {error}");
        vec![None; rows.len()]
    });
    let unseen: Vec<_> =
        rows.iter().zip(&seen).filter(|(_, seen)| seen.is_none()).map(|(row, _)| row.clone()).collect();
    let unseen: Vec<_> = unseen.into_iter().map(|row| parts.outbox.new_row(row, &parts.settings)).collect();
    let mut inserted =
        if unseen.is_empty() { Vec::new() } else { parts.outbox.store.insert(&unseen).await? }.into_iter();
    let decided = seen.into_iter().filter_map(|seen| match seen {
        Some(id) => Some(Inserted::Duplicate { id, status: StoredStatus::Unfinished }),
        None => inserted.next(),
    });
    Ok(decided.collect())
}

/// Publishes stored batches until there are no more; several together when they pile up.
async fn publish(
    parts: Parts,
    receiver: Arc<Mutex<mpsc::Receiver<Vec<TaskRow>>>>,
    beat: Arc<Beat>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut receiver = receiver.lock().await;
    loop {
        let mut batches = Vec::new();
        let count = tokio::select! {
            biased;
            count = beat.idle(receiver.recv_many(&mut batches, BATCHES_TO_PUBLISH)) => count,
            // The inserter may still store what it had; a last batch that is missed here is in the outbox.
            () = stop.cancelled() => match receiver.try_recv() {
                Ok(batch) => { batches.push(batch); 1 }
                Err(_) => 0,
            },
        };
        if count == 0 {
            return Ok(());
        }
        let rows = batches.concat();
        parts.publish(&rows).await?;
        parts.mark(&rows).await;
        beat.beat();
    }
}
