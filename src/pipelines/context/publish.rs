//! Brings tasks that were just stored into the queue.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Context, ToMark};
use crate::{
    model::TaskRow,
    pipelines::{
        publishing,
        shortcut::{Moment, Sent, Shortcut},
    },
    store::{Turn, Unpublished},
    telemetry::metrics,
};

/// How long to wait until new tasks are published. All that comes later waits, too, and a bus that
/// accepts nothing must not hold it up: the watchdog publishes what is stored.
const PUBLISH_WITHIN: Duration = Duration::from_secs(5);
/// For how long new tasks are left to the watchdog after this wait has timed out.
const LEAVE_FOR: Duration = Duration::from_secs(30);

/// Publishes new tasks on the way of other work, unless that has just timed out.
#[derive(Default)]
pub struct Patience {
    waited_in_vain: Mutex<Option<Instant>>,
}

impl Patience {
    /// Publishes as [`Context::publish`] does, or leaves the rows to the watchdog.
    pub async fn publish(
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

impl Context {
    /// The moment before tasks are stored, for [`Self::publish`].
    pub fn moment(&self) -> Option<Moment> {
        self.shortcut.as_ref().map(Shortcut::moment)
    }

    /// Enqueues tasks that were stored after a moment, publishes the others, and passes them on to
    /// be marked. `released` are tasks that were stored before, and could not be published until
    /// then: those that were behind others of their sequences.
    ///
    /// Returns an error only if every later publish will fail, too. After any other error the
    /// watchdog publishes the rows.
    pub async fn publish(
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
}
