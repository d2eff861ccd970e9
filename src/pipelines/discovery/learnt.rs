//! The keys that the filter learns from a transaction.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::seen::has_bitmap;
use crate::{
    dedup::{self, bits},
    model::{QueueName, StoredStatus, TaskRow},
    pipelines::context::Context,
    store::Inserted,
};

/// A batch is marked within this time or not at all. Later, a replica that lacks the batch may have
/// taken over, and of the batches that are marked together only the last are recorded as such.
const MARKED_WITHIN: Duration = Duration::from_secs(3);

/// Keys that SQL has, each with its task.
pub(super) struct Learnt {
    /// The era of the filter before the transaction.
    era: u64,
    /// When the transaction had ended.
    at: Instant,
    new: Vec<dedup::Stored>,
    /// Keys of older tasks, which the filter forgot or never had.
    known: Vec<dedup::Stored>,
    /// Keys of queues with a bitmap.
    numbers: BTreeMap<QueueName, Vec<u64>>,
}

impl Learnt {
    /// Collects the keys of these rows, given the answers to them.
    pub(super) fn of<'r>(
        context: &Context,
        era: u64,
        answers: impl Iterator<Item = (&'r TaskRow, Inserted)>,
    ) -> Self {
        let at = context.clock.now();
        let known = Vec::new();
        let numbers = BTreeMap::new();
        let new = Vec::new();
        let mut learnt = Self {
            era,
            at,
            new,
            known,
            numbers,
        };
        let mut open = BTreeMap::new();
        for (row, inserted) in answers.filter(|(row, _)| row.has_key()) {
            let id = match inserted {
                Inserted::New => row.id,
                // Leave out tasks with another status, which SQL has to tell, and tasks of a closed
                // queue, whose filter nobody would empty any more.
                Inserted::Duplicate {
                    id,
                    status: StoredStatus::Unfinished | StoredStatus::Completed,
                } if *open
                    .entry(&row.queue)
                    .or_insert_with(|| !context.queue.shards.shards_of(&row.queue).is_empty()) =>
                {
                    id
                }
                Inserted::Duplicate { .. }
                | Inserted::Repeated { .. }
                | Inserted::KeyReused
                | Inserted::TreeClosed => {
                    continue;
                }
            };
            if has_bitmap(&context.settings.queues, &row.queue) {
                if let Some(number) = bits::number(&row.key) {
                    learnt
                        .numbers
                        .entry(row.queue.clone())
                        .or_default()
                        .push(number);
                }
                continue;
            }
            let list = if id == row.id {
                &mut learnt.new
            } else {
                &mut learnt.known
            };
            list.push((row.queue.clone(), row.key_hash, id));
        }
        learnt
    }

    /// Joins this with what a later transaction has brought.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.era = self.era.min(other.era);
        self.at = self.at.min(other.at);
        self.new.extend(other.new);
        self.known.extend(other.known);
        for (queue, numbers) in other.numbers {
            self.numbers.entry(queue).or_default().extend(numbers);
        }
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.new.is_empty() && self.known.is_empty() && self.numbers.is_empty()
    }
}

impl Context {
    /// Marks keys in the filter, soon.
    pub(super) async fn mark(&self, learnt: &Learnt) {
        // The filter only saves SQL queries, so it must not take Redis's last memory.
        if self.gates.is_short() {
            return;
        }
        let Learnt {
            era,
            at,
            new,
            known,
            numbers,
        } = learnt;
        let limit = |queue: &QueueName| self.settings.queues.get(queue).filter_keys;
        for (queue, numbers) in numbers {
            if let Err(error) = self.filter.mark_numbers(queue, numbers, limit(queue)).await {
                tracing::debug!(
                    "could not mark {} numbers, SQL knows them: {error}",
                    numbers.len()
                );
            }
        }
        if self.clock.now() - *at > MARKED_WITHIN {
            return;
        }
        if let Err(error) = self.filter.mark(new, *era, limit).await {
            tracing::debug!("could not mark {} keys, SQL knows them: {error}", new.len());
        }
        if let Err(error) = self.filter.mark_known(known, *era, limit).await {
            tracing::debug!(
                "could not mark {} keys, SQL knows them: {error}",
                known.len()
            );
        }
    }
}
