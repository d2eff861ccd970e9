//! Counts tasks that came in and were not stored, and adds the counts to SQL once a second, so that
//! inserts need not wait for it.
//!
//! A process that is killed loses the counts of its last second, and a commit whose answer is lost
//! may count twice. The balance of stored tasks does not depend on these counts.

use std::{mem, sync::Arc, time::Duration};

use parking_lot::Mutex;

use crate::{
    model::QueueName,
    pipelines::admission::Occupancy,
    runtime::Supervisor,
    store::{self, Operators, TurnedAway, TurnedAwayCounts},
};

/// How often the counts are added to SQL.
const EVERY: Duration = Duration::from_secs(1);

/// The counts of this process that SQL does not have yet. Clones share them.
#[derive(Clone)]
pub(super) struct Tally {
    counts: Arc<Mutex<TurnedAwayCounts>>,
    occupancy: Occupancy,
}

impl Tally {
    pub(super) fn new(occupancy: Occupancy) -> Self {
        Self {
            counts: Arc::default(),
            occupancy,
        }
    }

    /// Counts a rejected task. An unknown queue gets no count of its own, because senders could
    /// make up any number of names.
    pub(super) fn rejected(&self, queue: &str) {
        let known = QueueName::new(queue)
            .ok()
            .filter(|queue| self.occupancy.knows(queue));
        self.add(known, TurnedAway::Rejected);
    }

    pub(super) fn duplicate(&self, queue: &QueueName) {
        self.add(Some(queue.clone()), TurnedAway::Duplicate);
    }

    fn add(&self, queue: Option<QueueName>, why: TurnedAway) {
        *self.counts.lock().entry((queue, why)).or_default() += 1;
    }

    /// Starts the loop that adds the counts to SQL.
    pub(super) fn keep(&self, store: Arc<dyn Operators>, supervisor: &Supervisor) {
        let of = (self.clone(), store);
        supervisor.spawn_loop(
            "discovery/turned-away",
            of,
            |(tally, store), cx| async move {
                cx.every(EVERY, || tally.store(&*store)).await?;
                tally.store(&*store).await
            },
        );
    }

    async fn store(&self, store: &dyn Operators) -> store::Result<()> {
        let counts = mem::take(&mut *self.counts.lock());
        if counts.is_empty() {
            return Ok(());
        }
        let added = store.add_turned_away(&counts).await;
        if added.is_err() {
            let mut rest = self.counts.lock();
            counts
                .into_iter()
                .for_each(|(of, count)| *rest.entry(of).or_default() += count);
        }
        added
    }
}
