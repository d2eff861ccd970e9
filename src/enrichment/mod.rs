//! Enrichment: an HTTP endpoint of the operator sees new tasks before they are stored. It may add headers, change
//! priority and payload, or reject a task.
//!
//! A task never waits for an endpoint that does not work: after a time-out, a failure or a wrong answer it goes on
//! without, and while the [`Breaker`] is open nobody asks. An answer that is wrong about one task counts for none.
//!
//! taskd may ask about a task twice: it may end between the answer and the commit, and two callers may insert one key
//! at the same time. So an endpoint must be idempotent.

mod breaker;
mod client;
#[cfg(test)]
mod fuzz;
mod json;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};

pub use self::json::{Change, Verdict};
use self::{
    breaker::{Breaker, Turned, WINDOW},
    client::Client,
};
use crate::{
    config::{Enrich, Queues, Settings},
    model::{QueueName, TaskRow},
    runtime::LastSaid,
    telemetry::metrics::{self, Skipped},
};

/// The time for all calls about the tasks of one caller. A loop that waits for it must not seem to hang.
const LONGEST: Duration = Duration::from_secs(10);

/// The endpoints of all queues. Clones share them.
#[derive(Clone)]
pub struct Enrichment(Arc<Endpoints>);

struct Endpoints {
    default: Option<Arc<Endpoint>>,
    /// Queues with a section of their own; `None`: without an endpoint.
    named: BTreeMap<QueueName, Option<Arc<Endpoint>>>,
    longest: Duration,
}

/// A check of an answer about a task.
pub type Check<'a> = &'a (dyn Fn(&TaskRow, &Change) -> Result<(), String> + Send + Sync);

impl Enrichment {
    pub fn new(settings: &Settings) -> Self {
        let Queues { default, named } = &settings.queues;
        let longest = LONGEST.min(settings.stall_after / 2);
        let mut all: Vec<Arc<Endpoint>> = Vec::new();
        // Queues with the same settings share an endpoint, and its breaker.
        let mut endpoint = |enrich: Option<Enrich>| {
            let enrich = enrich?;
            if let Some(known) = all.iter().find(|known| known.settings == enrich) {
                return Some(Arc::clone(known));
            }
            all.push(Arc::new(Endpoint::new(enrich, longest)));
            all.last().cloned()
        };
        let default = endpoint(default.enrich());
        let named = named.iter().map(|(name, queue)| (name.clone(), endpoint(queue.enrich()))).collect();
        Self(Arc::new(Endpoints { default, named, longest }))
    }

    /// True if no queue has an endpoint.
    pub fn is_off(&self) -> bool {
        self.0.default.is_none() && self.0.named.values().all(Option::is_none)
    }

    /// True if new tasks of `queue` go to an endpoint.
    pub fn is_for(&self, queue: &QueueName) -> bool {
        self.endpoint(queue).is_some()
    }

    fn endpoint(&self, queue: &QueueName) -> Option<&Arc<Endpoint>> {
        self.0.named.get(queue).unwrap_or(&self.0.default).as_ref()
    }

    /// The time for all calls of an insert, or of the reports that are read at once.
    pub fn time(&self) -> Duration {
        self.0.longest
    }

    /// The endpoint's verdicts about new tasks of `queue`, in order. `None`: the task goes on without.
    ///
    /// An answer that `check` refuses is wrong. Tasks without a verdict at the deadline go on without.
    pub async fn verdicts(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        check: Check<'_>,
        deadline: Instant,
    ) -> Vec<Option<Verdict>> {
        let Some(endpoint) = self.endpoint(queue) else { return vec![None; rows.len()] };
        let calls: Vec<BoxFuture<'_, _>> = pieces(rows, &endpoint.settings)
            .into_iter()
            .map(|piece| endpoint.verdicts(queue, piece, check, deadline).boxed())
            .collect();
        stream::iter(calls).buffered(endpoint.settings.concurrency).concat().await
    }
}

fn count(queue: &QueueName, verdicts: &[Verdict]) {
    let rejected = verdicts.iter().filter(|one| matches!(one, Verdict::Reject(_))).count();
    metrics::enrichment_done(queue.as_str(), verdicts.len() - rejected, rejected);
}

/// The tasks of each call. A task beyond the bytes goes alone.
fn pieces<'r, 't>(rows: &'r [&'t TaskRow], settings: &Enrich) -> Vec<&'r [&'t TaskRow]> {
    let (mut pieces, mut rest) = (Vec::new(), rows);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take(settings.batch_tasks).take_while(|row| {
            bytes += row.weight();
            bytes <= settings.batch_bytes
        });
        let (piece, behind) = rest.split_at(fits.count().max(1));
        pieces.push(piece);
        rest = behind;
    }
    pieces
}

/// One endpoint, with the calls that it has in hand.
struct Endpoint {
    settings: Enrich,
    /// A call that gets no answer for so long fails, also if its caller's time ends then.
    patience: Duration,
    /// The URL without its query, which may be a secret.
    name: String,
    client: OnceLock<Client>,
    slots: Semaphore,
    breaker: Breaker,
    /// The last wrong answer in the log.
    logged: Mutex<LastSaid>,
}

impl Endpoint {
    fn new(settings: Enrich, longest: Duration) -> Self {
        let mut url = settings.url.clone();
        url.set_query(None);
        url.set_fragment(None);
        metrics::enrichment_begins(url.as_str());
        Self {
            name: url.into(),
            client: OnceLock::new(),
            slots: Semaphore::new(settings.concurrency),
            breaker: Breaker::new(settings.failures, settings.pause),
            logged: Mutex::new(LastSaid::nothing()),
            patience: settings.timeout.min(longest / 2),
            settings,
        }
    }

    async fn verdicts(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        check: Check<'_>,
        deadline: Instant,
    ) -> Vec<Option<Verdict>> {
        match self.ask(queue, rows, check, deadline).await {
            Ok(verdicts) => {
                count(queue, &verdicts);
                verdicts.into_iter().map(Some).collect()
            }
            Err(why) => {
                metrics::enrichment_skipped(queue.as_str(), why, rows.len());
                vec![None; rows.len()]
            }
        }
    }

    async fn ask(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        check: Check<'_>,
        deadline: Instant,
    ) -> Result<Vec<Verdict>, Skipped> {
        let waits_until = deadline.min(Instant::now() + self.settings.timeout);
        let Ok(Ok(_slot)) = timeout_at(waits_until, self.slots.acquire()).await else { return Err(Skipped::Busy) };
        if Instant::now() >= deadline {
            return Err(Skipped::Busy);
        }
        let permit = self.breaker.permit(Instant::now().into_std()).ok_or(Skipped::Open)?;
        let started = Instant::now();
        let ends = deadline.min(started + self.settings.timeout);
        let outcome = timeout_at(ends, self.call(queue, rows)).await;
        metrics::enrichment_call(&self.name, started.elapsed());
        let outcome = match outcome {
            Ok(Ok(verdicts)) => checked(rows, verdicts, check).map_err(|why| (Skipped::Wrong, why)),
            Ok(Err(error)) => Err(error),
            // The calls before it took the time of all. That says nothing about the endpoint.
            Err(_) if ends - started < self.patience => {
                self.log(queue, Skipped::Busy, "no time was left for an answer");
                return Err(Skipped::Busy);
            }
            Err(_) if ends == deadline => Err((Skipped::TimedOut, "no answer in the time for all calls".to_owned())),
            Err(_) => {
                let timeout = humantime::format_duration(self.settings.timeout);
                Err((Skipped::TimedOut, format!("no answer within {timeout} (enrich_timeout)")))
            }
        };
        match outcome {
            Ok(verdicts) => {
                self.turned(permit.succeeded(), "");
                Ok(verdicts)
            }
            Err((skipped, why)) => {
                self.turned(permit.failed(Instant::now().into_std()), &why);
                self.log(queue, skipped, &why);
                Err(skipped)
            }
        }
    }

    async fn call(&self, queue: &QueueName, rows: &[&TaskRow]) -> Result<Vec<Verdict>, (Skipped, String)> {
        let failed = |why: String| (Skipped::Failed, why);
        let body = json::request(queue, rows).map_err(|error| failed(error.to_string()))?;
        let trace = rows.first().map_or("".into(), |row| row.context());
        let client = self.client.get_or_init(|| Client::new(&self.settings));
        let answer = client.post(body, &trace).await.map_err(failed)?;
        json::answer(&answer, rows.len()).map_err(|why| (Skipped::Wrong, why))
    }

    fn turned(&self, turned: Option<Turned>, why: &str) {
        match turned {
            None => return,
            Some(Turned::Opened) => tracing::warn!(
                "too many calls fail ({} in a row, or half of the last {}): for now new tasks go on without the \
                 enrichment of {}: {why}",
                self.settings.failures,
                self.settings.failures.saturating_mul(WINDOW),
                self.name
            ),
            Some(Turned::Closed) => tracing::info!("the enrichment of {} works again", self.name),
        }
        metrics::enrichment_turned(&self.name, turned == Some(Turned::Opened));
    }

    /// Logs a wrong answer, the same one once a minute. Other failures are in the line of the breaker.
    fn log(&self, queue: &QueueName, skipped: Skipped, why: &str) {
        if skipped == Skipped::Wrong && self.logged.lock().is_news(why) {
            tracing::warn!("queue {queue} goes on without the enrichment of {}: {why}", self.name);
        } else {
            tracing::debug!("queue {queue} goes on without the enrichment of {}: {why}", self.name);
        }
    }
}

fn checked(rows: &[&TaskRow], verdicts: Vec<Verdict>, check: Check<'_>) -> Result<Vec<Verdict>, String> {
    for (place, (row, verdict)) in rows.iter().zip(&verdicts).enumerate() {
        if let Verdict::Change(change) = verdict {
            check(row, change).map_err(|why| format!("tasks[{place}]: {why}"))?;
        }
    }
    Ok(verdicts)
}
