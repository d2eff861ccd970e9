//! Discovery: from the insert API and from `task-results` to new tasks in SQL and on the bus.
//!
//! filter → one SQL transaction (new tasks, their outbox rows, results, statuses) → publish → mark published → mark the filter → commit
//! the input. Each effect may be repeated; an insert's caller is answered after the SQL commit. Crash windows:
//!
//! - before the commit: nothing happened; the caller was told nothing, or the report comes again.
//! - after the commit, before the publish or its mark: the outbox row stays, the watchdog publishes it (again).
//! - before the filter's mark: SQL says "duplicate" instead of the filter.
//! - before the input's commit: the report comes again and is known (`Settled::repeated`). Its letters to
//!   `dead-letters` are sent again.

mod fallback;
mod insert;
mod results;
mod room;

use std::sync::Arc;

pub use fallback::check as check_filter;
pub use insert::Handle;

use crate::{
    config::Settings,
    dedup::Filter,
    model::{self, QueueName},
    pipelines::outbox::{self, Outbox},
    runtime::Supervisor,
    store::Turn,
};

/// Why an insert was not answered per task. Nothing of it is promised.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// HTTP 429, gRPC RESOURCE_EXHAUSTED.
    #[error("{0}; try again later")]
    Busy(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot store tasks now: {0}")]
    Unavailable(String),
}

/// What both inputs need.
#[derive(Clone)]
struct Parts {
    outbox: Outbox,
    filter: Filter,
    settings: Arc<Settings>,
}

impl Parts {
    /// A task of a queue that nobody knows needs room among the names.
    fn let_in(&self, queue: &QueueName) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        match self.outbox.gates.lets_in(queue, max, &self.settings.queues) {
            true => Ok(()),
            false => {
                Err(format!("queue {queue} is new, and there are {max} queues already (max_queues); use one of those"))
            }
        }
    }

    /// Publishes stored tasks. What fails stays in the outbox; an error only when everything will fail from now on.
    async fn publish(&self, rows: &[model::TaskRow]) -> Result<(), outbox::Error> {
        let stored: Vec<_> = rows.iter().map(|row| (row, Turn::FIRST)).collect();
        // So late, or since the clock stepped, that the watchdog may have published them before: perhaps they are done
        // and forgotten by now.
        let late = i64::try_from(self.settings.watchdog.republish_after.as_millis()).unwrap_or(i64::MAX);
        let now = self.outbox.clock.now_unix_ms();
        let again = rows.iter().any(|row| !(-late..=late).contains(&now.saturating_sub(row.created_unix_ms)));
        match self.outbox.publish(&stored, again).await {
            Ok(_) => crate::telemetry::metrics::outbox_published(rows.len()),
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => tracing::warn!("could not publish {} new tasks, the watchdog will: {error}", rows.len()),
        }
        Ok(())
    }

    async fn mark(&self, rows: &[model::TaskRow]) {
        // The filter only saves SQL queries: it must not take the last memory.
        if self.outbox.gates.is_short() {
            return;
        }
        let keys: Vec<_> = rows.iter().map(|row| (row.queue.clone(), row.key_hash, row.id)).collect();
        if let Err(error) = self.filter.mark(&keys, |queue| self.settings.queues.get(queue).filter_keys).await {
            tracing::debug!("could not mark {} keys, SQL knows them: {error}", keys.len());
        }
    }
}

/// Starts the pipeline; the handle is its insert side.
pub fn start(outbox: Outbox, filter: Filter, settings: &Arc<Settings>, supervisor: &Supervisor) -> Handle {
    let parts = Parts { outbox, filter, settings: Arc::clone(settings) };
    fallback::start(&parts, supervisor);
    results::start(&parts, supervisor);
    insert::start(&parts, supervisor)
}
