//! From SQL to the bus: the step that discovery (right after the insert) and the watchdog (for what stayed) share, and what both know
//! about queues that are full.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use prost::Message;

use crate::{
    bus::{self, Bus, Record, Topic},
    config::{Queues, Settings},
    model::{self, MAX_RECORD_BYTES, Offset, QueueName, TaskId, TaskRow},
    pb,
    store::{self, NewRow, Published, Store, Turn, Unpublished},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
}

impl Error {
    /// The bus has to be opened anew: see [`bus::Error::Lost`].
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Bus(error) if error.is_lost())
    }

    /// A row is at fault, not the bus or the database.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Store(error) => error.is_refusal(),
            Self::Bus(error) => matches!(error, bus::Error::TooLarge { .. }),
        }
    }
}

/// Bytes of records that are published at once, about.
const PUBLISH_BYTES: usize = 8 << 20;

/// The last offset that was published, per partition.
pub type Last = BTreeMap<u32, Offset>;

#[derive(Clone)]
pub struct Outbox {
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub gates: Gates,
}

impl Outbox {
    /// Publishes rows of the outbox to `pipeline`, then marks them. Killed in between, they are published again: the queue ignores what it knows,
    /// and `again` makes the fanout ask SQL about the rest. Answers the last offset per partition.
    pub async fn publish(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<Last, Error> {
        let (mut rest, mut last) = (rows, Last::new());
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = rest.iter().take_while(|(row, _)| {
                bytes += row.weight();
                bytes <= PUBLISH_BYTES
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            last.extend(self.publish_some(now, again).await?);
            rest = later;
        }
        Ok(last)
    }

    /// The same, but a row that is refused does not hold up the others. Answers which are, too.
    pub async fn publish_others(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<(Last, Vec<TaskId>), Error> {
        match self.publish(rows, again).await {
            Err(error) if error.is_refusal() => {}
            other => return other.map(|last| (last, Vec::new())),
        }
        let (mut last, mut refused) = (Last::new(), Vec::new());
        for row in rows {
            // Some of the batch may stand on the bus: again.
            match self.publish_some(std::slice::from_ref(row), true).await {
                Err(error) if error.is_refusal() => {
                    let id = row.0.id;
                    tracing::error!(%id, "task {id} cannot be published, and stays in the outbox: {error}");
                    refused.push(id);
                }
                other => last.extend(other?),
            }
        }
        Ok((last, refused))
    }

    async fn publish_some(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<Last, Error> {
        let now = model::now_unix_ms();
        let partitions = self.bus.partitions(Topic::Pipeline).max(1);
        if rows.iter().any(|(row, _)| row.partition >= partitions) {
            // From a process that knows more partitions. A task that stood in two would be handed out twice. Where there really are
            // fewer, on a bus that began anew, it goes to one of them.
            self.bus.check_partitions().await?;
        }
        let records: Vec<_> = rows
            .iter()
            .map(|(row, _)| {
                let value = model::pipeline_record(row, again, now).encode_to_vec().into();
                Record { partition: row.partition % partitions, value }
            })
            .collect();
        let offsets = self.bus.publish(Topic::Pipeline, &records).await?;
        // One offset per partition, the last: a task stands at or before it.
        let mut published: BTreeMap<u32, Published> = BTreeMap::new();
        for (((row, turn), record), offset) in rows.iter().zip(&records).zip(offsets) {
            let entry = published.entry(record.partition).or_insert_with(|| Published {
                partition: record.partition,
                offset,
                tasks: Vec::new(),
            });
            entry.offset = entry.offset.max(offset);
            entry.tasks.push((row.id, *turn));
        }
        let published: Vec<_> = published.into_values().collect();
        self.store.mark_published(self.bus.generation(), &published).await?;
        Ok(published.into_iter().map(|some| (some.partition, some.offset)).collect())
    }

    /// A row as it goes into the store: with the reason why it is not on the bus yet.
    pub fn new_row(&self, task: TaskRow, settings: &Settings) -> NewRow {
        let publish_at = publish_at(&task, settings);
        let (unpublished, due_unix_ms) = if publish_at > task.created_unix_ms {
            (Unpublished::Scheduled, publish_at)
        } else if self.gates.is_closed(&task.queue) {
            (Unpublished::Parked, 0)
        } else {
            (Unpublished::Fresh, task.created_unix_ms + ms(settings.watchdog.republish_after))
        };
        NewRow { task, unpublished, due_unix_ms }
    }

    /// Whether who stored the row publishes it too. What is left out here, or differs from what was stored, the watchdog finds.
    pub fn goes_out_now(&self, task: &TaskRow, settings: &Settings) -> bool {
        publish_at(task, settings) <= task.created_unix_ms && !self.gates.is_closed(&task.queue)
    }

    /// Sends what could not be decoded to `dead-letters`, so that the ones behind it flow on.
    pub async fn bury(&self, topic: Topic, poison: &[(bus::Message, String)]) -> Result<(), Error> {
        if poison.is_empty() {
            return Ok(());
        }
        let records: Vec<_> = poison
            .iter()
            .map(|(message, reason)| {
                // A letter that is larger than the bus takes would be one more piece of poison.
                let value = message.value.slice(..message.value.len().min(MAX_RECORD_BYTES));
                tracing::warn!(%topic, partition = message.partition, offset = %message.offset, "poison: {reason}");
                let letter = pb::DeadLetter {
                    reason: reason.clone(),
                    at_unix_ms: model::now_unix_ms(),
                    topic: topic.as_str().to_owned(),
                    partition: message.partition,
                    offset: message.offset.to_string(),
                    value,
                    ..Default::default()
                };
                Record { partition: 0, value: letter.encode_to_vec().into() }
            })
            .collect();
        self.bus.publish(Topic::DeadLetters, &records).await?;
        Ok(())
    }
}

/// What is due beyond the horizon stays in SQL.
fn publish_at(task: &TaskRow, settings: &Settings) -> i64 {
    task.not_before_unix_ms - ms(settings.watchdog.horizon)
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Which queues are full. A closed gate parks new tasks in SQL; the watchdog opens it when none is parked any more, so that parked ones
/// are not overtaken for ever. Only a hint: what passes an open gate and finds its queue full is parked by the fanout.
#[derive(Clone, Default)]
pub struct Gates(Arc<RwLock<Known>>);

/// Redis has little memory left. All gates are closed: new tasks stay in SQL, and inserts are refused.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The reason, for callers that are refused.
    pub why: String,
    /// Redis has no memory left.
    pub is_full: bool,
}

#[derive(Default)]
struct Known {
    shortage: Option<Shortage>,
    closed: HashSet<QueueName>,
    unfinished: HashMap<QueueName, u64>,
}

impl Gates {
    pub fn close(&self, queue: &QueueName) {
        if !self.closed().contains(queue) {
            tracing::info!(%queue, "queue {queue} is full: new tasks stay in SQL until there is room");
            self.0.write().unwrap_or_else(PoisonError::into_inner).closed.insert(queue.clone());
        }
    }

    pub fn open(&self, queue: &QueueName) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).closed.remove(queue);
    }

    /// Another process may have parked tasks, or released the last.
    pub fn follow(&self, parked: &[QueueName]) {
        parked.iter().for_each(|queue| self.close(queue));
        self.0.write().unwrap_or_else(PoisonError::into_inner).closed.retain(|queue| parked.contains(queue));
    }

    pub fn is_closed(&self, queue: &QueueName) -> bool {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.shortage.is_some() || known.closed.contains(queue)
    }

    pub fn set_shortage(&self, shortage: Option<Shortage>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).shortage = shortage;
    }

    pub fn shortage(&self) -> Option<Shortage> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).shortage.clone()
    }

    /// Whether Redis has little memory left.
    pub fn is_short(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).shortage.is_some()
    }

    pub fn closed(&self) -> Vec<QueueName> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).closed.iter().cloned().collect()
    }

    /// What SQL counted last.
    pub fn set_unfinished(&self, counts: HashMap<QueueName, u64>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).unfinished = counts;
    }

    /// Takes room for `count` new tasks; false when the queue has its `max_unfinished`.
    pub fn admit(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        if *unfinished >= queues.get(queue).max_unfinished {
            return false;
        }
        *unfinished += count;
        true
    }
}
