//! From SQL to the bus: the step that discovery (right after the insert) and the watchdog (for what stayed) share, and what both know
//! about queues that are full.

mod gates;
mod letters;
mod sync;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

pub use self::{
    gates::{Gates, Shortage},
    sync::QueueSync,
};
use prost::Message;

use crate::{
    bus::{self, Bus, Record, Topic},
    config::Settings,
    model::{Offset, TaskId, TaskRow},
    runtime::Clock,
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

/// The outcome of [`Outbox::publish_others`].
#[derive(Debug, Default)]
pub struct Others {
    /// The last offset per partition.
    pub last: Last,
    /// Rows that the bus will never take, and why.
    pub too_large: Vec<(TaskId, String)>,
    /// Rows that SQL refuses to mark: they stay where they are.
    pub stay: Vec<TaskId>,
}

#[derive(Clone)]
pub struct Outbox {
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub gates: Gates,
    pub clock: Clock,
}

impl Outbox {
    pub fn new(store: Arc<dyn Store>, bus: Arc<dyn Bus>, clock: Clock) -> Self {
        Self { store, bus, gates: Gates::default(), clock }
    }

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

    /// The same, but a row that is refused does not hold up the others.
    pub async fn publish_others(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<Others, Error> {
        match self.publish(rows, again).await {
            Err(error) if error.is_refusal() => {}
            other => return other.map(|last| Others { last, ..Others::default() }),
        }
        let mut others = Others::default();
        for row in rows {
            let id = row.0.id;
            // Some of the batch may stand on the bus: again.
            match self.publish_some(std::slice::from_ref(row), true).await {
                Err(Error::Bus(error @ bus::Error::TooLarge { .. })) => others.too_large.push((id, error.to_string())),
                Err(error) if error.is_refusal() => {
                    tracing::error!(%id, "task {id} cannot be marked as published, and stays in the outbox: {error}");
                    others.stay.push(id);
                }
                other => others.last.extend(other?),
            }
        }
        Ok(others)
    }

    async fn publish_some(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<Last, Error> {
        let now = self.clock.now_unix_ms();
        let partitions = self.bus.partitions(Topic::Pipeline).max(1);
        if rows.iter().any(|(row, _)| row.partition >= partitions) {
            // From a process that knows more partitions. A task that stood in two would be handed out twice. Where there really are
            // fewer, on a bus that began anew, it goes to one of them.
            self.bus.check_partitions().await?;
        }
        let records: Vec<_> = rows
            .iter()
            .map(|(row, _)| {
                let value = crate::wire::pipeline_record(row, again, now).encode_to_vec().into();
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
}

/// What is due beyond the horizon stays in SQL.
fn publish_at(task: &TaskRow, settings: &Settings) -> i64 {
    task.not_before_unix_ms - ms(settings.watchdog.horizon)
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
