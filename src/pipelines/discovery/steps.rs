//! The steps that both inputs of discovery take.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::mark_published::ToMark;
use crate::{
    model::{QueueName, Scope, TaskRow},
    pipelines::{
        admission::NoName,
        context::Context,
        publishing,
        shortcut::{Moment, Sent, Shortcut},
    },
    runtime::Supervisor,
    store::{Turn, Unpublished},
    telemetry::metrics,
};

/// When a step that stores tasks began, and the moment before.
pub(super) type Began = (Instant, Option<Moment>);

/// How long reports wait until their new tasks are published. All later reports wait for these, and
/// a bus that accepts nothing must not hold them up: the watchdog publishes what is stored.
const PUBLISH_WITHIN: Duration = Duration::from_secs(5);
/// For how long new tasks are left to the watchdog after this wait has timed out.
const LEAVE_FOR: Duration = Duration::from_secs(30);

/// Publishes tasks that reports discovered, unless that has just timed out.
#[derive(Default)]
pub(super) struct Patience {
    waited_in_vain: Mutex<Option<Instant>>,
}

impl Patience {
    /// Publishes as [`Context::publish`] does, or leaves the rows to the watchdog.
    pub(super) async fn publish(
        &self,
        context: &Context,
        rows: &[(&TaskRow, Turn)],
        released: &[(&TaskRow, Turn)],
        stored_behind: Option<Moment>,
        to_mark: &ToMark,
    ) -> Result<(), publishing::Error> {
        if rows.is_empty() && released.is_empty()
            || self
                .waited_in_vain
                .lock()
                .is_some_and(|at| at.elapsed() < LEAVE_FOR)
        {
            return Ok(());
        }
        let publish = context.publish(rows, released, stored_behind, to_mark);
        let Ok(published) = tokio::time::timeout(PUBLISH_WITHIN, publish).await else {
            *self.waited_in_vain.lock() = Some(Instant::now());
            let count = rows.len() + released.len();
            tracing::warn!(
                "could not publish {count} new tasks within {PUBLISH_WITHIN:?}, the watchdog will"
            );
            return Ok(());
        };
        published
    }
}

fn no_name(queue: &QueueName, max: usize, why: NoName) -> String {
    match why {
        NoName::All => {
            format!(
                "queue {queue} is new, and there are {max} queues already (max_queues); use one of those"
            )
        }
        NoName::OfScope => format!(
            "queue {queue} is new, and the scope of a token has {} queues already, half of max_queues; use one of those",
            (max / 2).max(1)
        ),
    }
}

impl Context {
    /// Admits tasks of a queue. The name of a new queue must fit into the limit on names, and into
    /// that of the caller's scope, if there is one.
    pub(super) fn let_in(&self, queue: &QueueName, scope: Option<&Scope>) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        self.occupancy
            .lets_in(queue, max, &self.settings.queues, scope)
            .map_err(|why| no_name(queue, max, why))
    }

    /// Admits discovered tasks of a queue.
    pub(super) fn let_in_discovered(&self, queue: &QueueName) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        self.occupancy
            .lets_in_discovered(queue, max, &self.settings.queues)
            .map_err(|why| no_name(queue, max, why))
    }

    /// The moment before tasks are stored, for [`Self::publish`].
    pub(super) fn moment(&self) -> Option<Moment> {
        self.shortcut.as_ref().map(Shortcut::moment)
    }

    /// Enqueues tasks that were stored after a moment, publishes the others, and passes them on to
    /// be marked. `released` are tasks that were stored before, and could not be published until
    /// then: those that were behind others of their sequences.
    ///
    /// Returns an error only if every later publish will fail, too. After any other error the
    /// watchdog publishes the rows.
    pub(super) async fn publish(
        &self,
        rows: &[(&TaskRow, Turn)],
        released: &[(&TaskRow, Turn)],
        stored_behind: Option<Moment>,
        to_mark: &ToMark,
    ) -> Result<(), publishing::Error> {
        let shortcut = self
            .shortcut
            .as_ref()
            .filter(|_| !self.publisher.are_late(rows))
            .zip(stored_behind);
        let rows = &[rows, released].concat()[..];
        let Sent {
            mut published,
            rest,
            again,
            crowded,
        } = match shortcut {
            Some((shortcut, stored_behind)) => shortcut.send(rows, stored_behind).await,
            None => Sent {
                rest: rows.to_vec(),
                ..Sent::default()
            },
        };
        if !crowded.is_empty()
            && let Err(error) = self.store.unpublish(&crowded, Unpublished::Crowded).await
        {
            // None of these may be marked. The watchdog publishes their batches.
            tracing::warn!(
                "could not keep {} crowded tasks in SQL, and the watchdog publishes their batches: {error}",
                crowded.len()
            );
            published.clear();
        }
        let mut done = Ok(());
        for (rows, again) in [(rest, false), (again, true)]
            .iter()
            .filter(|(rows, _)| !rows.is_empty())
        {
            let (by_bus, all) = self.publisher.publish_unmarked(rows, *again).await;
            if let Some(shortcut) = &self.shortcut {
                shortcut.went_by_bus(&by_bus);
            }
            published.extend(by_bus);
            done = done.and(all);
        }
        to_mark.add(published).await;
        match done {
            Ok(()) => metrics::outbox_published(rows.len()),
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => tracing::warn!(
                "could not publish {} new tasks, the watchdog will: {error}",
                rows.len()
            ),
        }
        Ok(())
    }

    /// Starts the loop that writes marks.
    pub(super) fn start_marking(&self, supervisor: &Supervisor) {
        let of = (self.filter.clone(), Arc::clone(&self.settings));
        supervisor.spawn_loop("discovery/marks", of, |(filter, settings), cx| async move {
            filter
                .write_marks(|queue| settings.queues.get(queue).filter_keys, cx)
                .await;
        });
    }
}
