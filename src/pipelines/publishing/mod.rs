//! Publishes tasks from SQL to the bus: discovery does so after an insert, and the watchdog for
//! rows that were left.

mod letters;
mod reporting;
mod rows;
mod traced;

use std::{collections::BTreeMap, sync::Arc};

use self::traced::Publishes;
pub use self::{
    letters::DeadLetters,
    reporting::Reporting,
    rows::{goes_out_now, new_row},
};

use crate::{
    bus::{self, Bus, Record, Topic},
    config::Settings,
    model::{Offset, TaskId, TaskRow, millis},
    runtime::{Clock, LoopError},
    store::{self, Outbox, Published, Turn},
    telemetry::traces,
    wire,
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
}

impl Error {
    /// Returns whether the bus has to be opened again: see [`bus::Error::is_lost`].
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Bus(error) if error.is_lost())
    }

    /// Returns whether a row is at fault, and not the bus or the database.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Store(error) => error.is_refusal(),
            Self::Bus(error) => matches!(error, bus::Error::TooLarge { .. }),
        }
    }
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        self.is_lost()
    }
}

/// About how many bytes of records to publish at once.
const PUBLISH_BYTES: usize = 8 << 20;

/// The last offset that was published, per partition.
pub type Last = BTreeMap<u32, Offset>;

/// The outcome of [`Publisher::publish_around_refused`].
#[derive(Debug, Default)]
pub struct Outcome {
    /// The last offset per partition.
    pub last: Last,
    /// Rows that the bus will never take, each with the reason.
    pub too_large: Vec<(TaskId, String)>,
    /// Rows that SQL refuses to mark as published. They stay in the outbox or in their batch.
    pub stay: Vec<TaskId>,
}

/// Publishes stored tasks and marks them as published.
#[derive(Clone)]
pub struct Publisher {
    store: Arc<dyn Outbox>,
    bus: Arc<dyn Bus>,
    clock: Clock,
    settings: Arc<Settings>,
}

impl Publisher {
    pub fn new(
        store: Arc<dyn Outbox>,
        bus: Arc<dyn Bus>,
        clock: Clock,
        settings: Arc<Settings>,
    ) -> Self {
        Self {
            store,
            bus,
            clock,
            settings,
        }
    }

    /// Returns whether a watchdog may have published some of the rows: they were due some time ago,
    /// or the clock has jumped. Workers may have done these tasks by now, and Redis may have
    /// forgotten them.
    pub fn are_late(&self, rows: &[(&TaskRow, Turn)]) -> bool {
        let now = self.clock.now_unix_ms();
        let late = millis(self.settings.watchdog.republish_after);
        let was_due = |row| rows::publish_at(row, &self.settings).max(row.created_unix_ms);
        rows.iter()
            .any(|(row, _)| !(-late..=late).contains(&now.saturating_sub(was_due(row))))
    }

    /// Publishes rows to `pipeline`, then marks them all at once. Returns the last offset per
    /// partition.
    ///
    /// If the process is killed in between, the rows are published again. The queue ignores a task
    /// that it knows, and `again` makes the fanout ask SQL about the others.
    pub async fn publish(&self, rows: &[(&TaskRow, Turn)], again: bool) -> Result<Last, Error> {
        let (published, all) = self.publish_unmarked(rows, again).await;
        // Marks what was published even if a part failed: then only the rest of the rows waits.
        let marked = self.mark(published).await;
        all?;
        marked
    }

    /// Publishes tasks to `pipeline` once more, flagged `again`, without marking them. Returns the
    /// last offset per partition.
    pub async fn publish_again(&self, tasks: &[TaskRow]) -> Result<Last, Error> {
        let rows: Vec<(&TaskRow, Turn)> = tasks.iter().map(|task| (task, Turn::FIRST)).collect();
        let (published, all) = self.publish_unmarked(&rows, true).await;
        all?;
        Ok(published
            .into_iter()
            .map(|some| (some.partition, some.offset))
            .collect())
    }

    /// Publishes rows to `pipeline`. Flags a part as `again` if it is late by the time it is
    /// published. Returns what the caller has to mark, even if a part failed.
    pub async fn publish_unmarked(
        &self,
        rows: &[(&TaskRow, Turn)],
        again: bool,
    ) -> (Vec<Published>, Result<(), Error>) {
        let mut published = BTreeMap::new();
        let all = self.publish_all(rows, again, &mut published).await;
        (published.into_values().collect(), all)
    }

    /// Publishes rows in parts that the bus takes, and adds each part to `published`.
    async fn publish_all(
        &self,
        rows: &[(&TaskRow, Turn)],
        again: bool,
        published: &mut BTreeMap<u32, Published>,
    ) -> Result<(), Error> {
        let mut rest = rows;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = rest.iter().take_while(|(row, _)| {
                bytes += row.weight();
                bytes <= PUBLISH_BYTES
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            // Check again for each part, because the parts before it may have waited for the bus.
            self.publish_some(now, again || self.are_late(now), published)
                .await?;
            rest = later;
        }
        Ok(())
    }

    async fn mark(&self, published: Vec<Published>) -> Result<Last, Error> {
        if !published.is_empty() {
            self.store
                .mark_published(self.bus.generation(), &published)
                .await?;
        }
        Ok(published
            .into_iter()
            .map(|some| (some.partition, some.offset))
            .collect())
    }

    /// Publishes like [`Self::publish`], but a refused row does not hold up the others.
    pub async fn publish_around_refused(
        &self,
        rows: &[(&TaskRow, Turn)],
        again: bool,
    ) -> Result<Outcome, Error> {
        match self.publish(rows, again).await {
            Err(error) if error.is_refusal() => {}
            other => {
                return other.map(|last| Outcome {
                    last,
                    ..Outcome::default()
                });
            }
        }
        let mut outcome = Outcome::default();
        for row in rows {
            let id = row.0.id;
            // The first attempt may have published a part of the batch, so all of it is flagged
            // `again`.
            match self.publish(std::slice::from_ref(row), true).await {
                Err(Error::Bus(error @ bus::Error::TooLarge { .. })) => {
                    outcome.too_large.push((id, error.to_string()))
                }
                Err(error) if error.is_refusal() => {
                    let trace_id = traces::trace_of(&row.0.traceparent);
                    tracing::error!(%id, trace_id, "task {id} stays in the outbox, not marked as published: {error}");
                    outcome.stay.push(id);
                }
                other => outcome.last.extend(other?),
            }
        }
        Ok(outcome)
    }

    async fn publish_some(
        &self,
        rows: &[(&TaskRow, Turn)],
        again: bool,
        published: &mut BTreeMap<u32, Published>,
    ) -> Result<(), Error> {
        let now = self.clock.now_unix_ms();
        let partitions = self.bus.partitions(Topic::Pipeline).max(1);
        if rows.iter().any(|(row, _)| row.partition >= partitions) {
            // Another process may know of more partitions, and may have published the task to its
            // real one. In a second partition it would be delivered twice. There really are fewer
            // only if the bus was created again.
            self.bus.check_partitions().await?;
        }
        let traced = Publishes::begin(rows);
        let record = |(place, (row, _)): (usize, &(&TaskRow, Turn))| {
            let value = wire::pipeline_record(row, traced.context(place), again, now);
            Record {
                partition: row.partition % partitions,
                value,
            }
        };
        let records: Vec<_> = rows.iter().enumerate().map(record).collect();
        let offsets = self
            .bus
            .publish_traced(Topic::Pipeline, &records, &traced.headers())
            .await;
        traced.end(rows, &offsets);
        let offsets = offsets?;
        // One offset per partition is enough, the last: every task is at or before it.
        for (((row, turn), record), offset) in rows.iter().zip(&records).zip(offsets) {
            let entry = published
                .entry(record.partition)
                .or_insert_with(|| Published {
                    partition: record.partition,
                    offset,
                    tasks: Vec::new(),
                });
            entry.offset = entry.offset.max(offset);
            entry.tasks.push((row.id, *turn));
        }
        Ok(())
    }
}
