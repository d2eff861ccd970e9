//! Discovery: from the insert API and from `task-results` to new tasks in SQL and on the bus.
//!
//! filter → one SQL transaction (new tasks, their outbox rows, results, statuses) → publish → mark published → mark the
//! filter → commit the input. Each effect may be repeated. An insert's caller is answered after the SQL commit. Crash
//! windows:
//!
//! - before the SQL commit: nothing happened. The caller has no answer, or the report comes again.
//! - after the SQL commit, before the publish or its mark: the watchdog publishes the outbox row (again).
//! - before the filter's mark: SQL answers "duplicate" instead of the filter.
//! - before the input's commit: the report comes again and is known (`Settled::repeated`). Its letters to
//!   `dead-letters` are sent again.

mod batch;
mod fallback;
mod insert;
mod results;
mod room;

use std::sync::Arc;

pub use fallback::check as check_filter;
pub use insert::Handle;
use redis::RedisError;

use crate::{
    bus::{self, Bus},
    config::Settings,
    dedup::Filter,
    model::{QueueName, TaskRow},
    pipelines::{
        admission::{Gates, Occupancy},
        publishing::{self, DeadLetters, Publisher},
    },
    runtime::{Clock, LoopError, Supervisor},
    store::{self, Store, Turn},
    telemetry::metrics,
};

/// Why an insert was not answered per task. Nothing of it is promised.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// HTTP 429, gRPC RESOURCE_EXHAUSTED.
    #[error("{0}; try again later")]
    Busy(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot store tasks now: {0}")]
    Unavailable(Unavailable),
}

/// Why no task can be stored now.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    #[error("the process is stopping")]
    Stopping,
    /// All callers of a batch share the error.
    #[error(transparent)]
    Store(Arc<store::Error>),
}

/// Why a loop of discovery ended.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
    #[error(transparent)]
    Publish(#[from] publishing::Error),
    #[error(transparent)]
    Filter(#[from] RedisError),
}

impl LoopError for Failure {
    fn ends_round(&self) -> bool {
        match self {
            Self::Bus(error) => error.ends_round(),
            Self::Publish(error) => error.ends_round(),
            Self::Store(_) | Self::Filter(_) => false,
        }
    }
}

/// Everything that discovery uses.
#[derive(Clone)]
pub struct Context {
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub filter: Filter,
    pub publisher: Publisher,
    pub letters: DeadLetters,
    pub gates: Gates,
    pub occupancy: Occupancy,
    pub clock: Clock,
    pub settings: Arc<Settings>,
}

impl Context {
    /// Lets in tasks of a queue. A new queue needs room among the names.
    fn let_in(&self, queue: &QueueName) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        match self.occupancy.lets_in(queue, max, &self.settings.queues) {
            true => Ok(()),
            false => {
                Err(format!("queue {queue} is new, and there are {max} queues already (max_queues); use one of those"))
            }
        }
    }

    /// Publishes stored tasks. Answers an error only when every later publish will fail too; after any other error the
    /// rows stay in the outbox.
    async fn publish(&self, rows: &[&TaskRow]) -> Result<(), publishing::Error> {
        let stored: Vec<_> = rows.iter().map(|row| (*row, Turn::FIRST)).collect();
        // After this time, or a step of the clock, the watchdog may have published the rows. Perhaps their tasks are
        // done and forgotten by now.
        let late = i64::try_from(self.settings.watchdog.republish_after.as_millis()).unwrap_or(i64::MAX);
        let now = self.clock.now_unix_ms();
        let again = rows.iter().any(|row| !(-late..=late).contains(&now.saturating_sub(row.created_unix_ms)));
        match self.publisher.publish(&stored, again).await {
            Ok(_) => metrics::outbox_published(rows.len()),
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => tracing::warn!("could not publish {} new tasks, the watchdog will: {error}", rows.len()),
        }
        Ok(())
    }

    /// Marks stored tasks in the filter.
    async fn mark(&self, rows: &[&TaskRow]) {
        // The filter only saves SQL queries, so it must not take Redis's last memory.
        if self.gates.is_short() {
            return;
        }
        let keys: Vec<_> = rows.iter().map(|row| (row.queue.clone(), row.key_hash, row.id)).collect();
        if let Err(error) = self.filter.mark(&keys, |queue| self.settings.queues.get(queue).filter_keys).await {
            tracing::debug!("could not mark {} keys, SQL knows them: {error}", keys.len());
        }
    }
}

/// Starts the pipeline. The handle is its insert side.
pub fn start(context: Context, supervisor: &Supervisor) -> Handle {
    fallback::start(&context, supervisor);
    results::start(&context, supervisor);
    insert::start(context, supervisor)
}
