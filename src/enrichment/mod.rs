//! Enrichment: an HTTP endpoint of the operator sees new tasks before they are stored. It may add
//! headers, change priority and payload, or reject a task.
//!
//! A task never waits for an endpoint that does not work: after a time-out or a failure it is
//! stored as it is, and while the [`Breaker`] is open the endpoint is not called.
//!
//! The sender of a task can make an answer wrong, for example with headers that leave no room for
//! those of the endpoint. So each task is judged on its own: a mistake about one task leaves the
//! verdicts about all others, and does not count as a failure of the endpoint. If an answer is too
//! large, or refuses a call with several tasks, taskd asks again about each half of them.
//!
//! taskd may ask about a task twice: it may die between the answer and the commit, and two callers
//! may insert one key at the same time. So an endpoint must be idempotent.

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
    client::{Client, NoAnswer},
    json::ReadVerdict,
};
use crate::{
    config::{Enrich, Queues, Settings},
    model::{PayloadCheck, PayloadSchema, QueueName, TaskRow},
    outbound::{Breaker, Turned, WINDOW},
    runtime::{LastSaid, LogPace, compute},
    telemetry::metrics::{self, Skipped},
};

/// The most time for all calls about the tasks of one caller. A loop that waits for them must not
/// seem to hang.
const LONGEST: Duration = Duration::from_secs(10);

/// The endpoints of all queues. Clones share them.
#[derive(Clone)]
pub struct Enrichment(Arc<Endpoints>);

struct Endpoints {
    default: Option<Arc<Endpoint>>,
    /// Queues with a section of their own; `None` for one without an endpoint.
    named: BTreeMap<QueueName, Option<Arc<Endpoint>>>,
    longest: Duration,
}

/// Checks what an answer changes about a task. Returns the schema that the new payload must fit, if
/// there are both.
pub type Check<'a> =
    &'a (dyn Fn(&TaskRow, &Change) -> Result<Option<PayloadSchema>, String> + Send + Sync);

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
        let named = named
            .iter()
            .map(|(name, queue)| (name.clone(), endpoint(queue.enrich())))
            .collect();
        Self(Arc::new(Endpoints {
            default,
            named,
            longest,
        }))
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

    /// The time for all calls of one insert, or of the reports that are read together.
    pub fn time(&self) -> Duration {
        self.0.longest
    }

    /// Returns the endpoint's verdicts about new tasks of `queue`, in order; `None` for a task that
    /// is to be stored as it is.
    ///
    /// That is so for a task whose change `check` refuses, and for one without a verdict at the
    /// deadline.
    pub async fn verdicts(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        check: Check<'_>,
        deadline: Instant,
    ) -> Vec<Option<Verdict>> {
        let Some(endpoint) = self.endpoint(queue) else {
            return vec![None; rows.len()];
        };
        let calls: Vec<BoxFuture<'_, _>> = pieces(rows, &endpoint.settings)
            .into_iter()
            .map(|piece| endpoint.verdicts(queue, piece, check, deadline).boxed())
            .collect();
        stream::iter(calls)
            .buffered(endpoint.settings.concurrency)
            .concat()
            .await
    }
}

/// Splits tasks into the calls. A task that alone is larger than the limit in bytes gets a call of
/// its own.
fn pieces<'r, 't>(rows: &'r [&'t TaskRow], settings: &Enrich) -> Vec<&'r [&'t TaskRow]> {
    let mut pieces = Vec::new();
    let mut rest = rows;
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

/// One endpoint, and the calls to it in flight.
struct Endpoint {
    settings: Enrich,
    /// A call without an answer after this time counts as failed, even if it was its caller's
    /// deadline that ended it.
    patience: Duration,
    /// The URL without its query, which may be a secret.
    name: String,
    client: OnceLock<Client>,
    slots: Semaphore,
    breaker: Breaker,
    /// The last wrong answer that was logged.
    logged: Mutex<LastSaid>,
    /// Limits the log lines about wrong answers, because senders of tasks can cause any number of
    /// different ones.
    wrong_answers: LogPace,
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
            wrong_answers: LogPace::new(10, Duration::from_secs(6)),
            patience: settings.timeout.min(longest / 2),
            settings,
        }
    }

    /// Asks about `rows`. If something is wrong about a call with several tasks, asks again about
    /// each half of them: at most twice as many calls as there are tasks, and none begins after the
    /// deadline.
    async fn verdicts(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        check: Check<'_>,
        deadline: Instant,
    ) -> Vec<Option<Verdict>> {
        match self.ask(queue, rows, deadline).await {
            Ok(Some(verdicts)) => self.judge(queue, rows, verdicts, check).await,
            Ok(None) if rows.len() > 1 => {
                let (first, second) = rows.split_at(rows.len() / 2);
                let mut verdicts = Box::pin(self.verdicts(queue, first, check, deadline)).await;
                verdicts.extend(Box::pin(self.verdicts(queue, second, check, deadline)).await);
                verdicts
            }
            Ok(None) => {
                metrics::enrichment_skipped(queue.as_str(), Skipped::Wrong, rows.len());
                vec![None; rows.len()]
            }
            Err(why) => {
                metrics::enrichment_skipped(queue.as_str(), why, rows.len());
                vec![None; rows.len()]
            }
        }
    }

    /// Drops the verdicts that are wrong. Their tasks are stored as they are.
    async fn judge(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        verdicts: Vec<ReadVerdict>,
        check: Check<'_>,
    ) -> Vec<Option<Verdict>> {
        let mut payloads = PayloadCheck::default();
        let mut checked = Vec::with_capacity(verdicts.len());
        for (place, (row, verdict)) in rows.iter().zip(verdicts).enumerate() {
            let verdict = match verdict {
                Ok(Verdict::Change(change)) => match check(row, &change) {
                    Ok(schema) => {
                        if let (Some(schema), Some((payload, encoding))) = (schema, &change.payload)
                        {
                            payloads.add(place, &schema, payload, *encoding);
                        }
                        Ok(Verdict::Change(change))
                    }
                    Err(why) => Err(format!("tasks[{place}]: {why}")),
                },
                other => other,
            };
            checked.push(verdict);
        }
        let payloads = compute(
            payloads,
            PayloadCheck::advance_quickly,
            PayloadCheck::advance,
        )
        .await;
        for (place, misfit) in payloads.misfits() {
            // Only the log says why an answer is wrong, so this is the text for it.
            checked[place] = Err(format!("tasks[{place}]: {}", misfit.logged));
        }
        let mut judged = Vec::with_capacity(checked.len());
        let mut enriched = 0;
        let mut rejected = 0;
        let mut first_mistake = None;
        for verdict in checked {
            match &verdict {
                Ok(Verdict::Change(_)) => enriched += 1,
                Ok(Verdict::Reject(_)) => rejected += 1,
                Err(why) if first_mistake.is_none() => first_mistake = Some(why.clone()),
                Err(_) => {}
            }
            judged.push(verdict.ok());
        }
        metrics::enrichment_done(queue.as_str(), enriched, rejected);
        if let Some(why) = first_mistake {
            metrics::enrichment_skipped(
                queue.as_str(),
                Skipped::Wrong,
                judged.len() - enriched - rejected,
            );
            self.log(queue, Skipped::Wrong, &why);
        }
        judged
    }

    /// Makes one call. Returns `None` if the endpoint works but something is wrong about these
    /// tasks.
    async fn ask(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
        deadline: Instant,
    ) -> Result<Option<Vec<ReadVerdict>>, Skipped> {
        let waits_until = deadline.min(Instant::now() + self.settings.timeout);
        let Ok(Ok(_slot)) = timeout_at(waits_until, self.slots.acquire()).await else {
            return Err(Skipped::Busy);
        };
        if Instant::now() >= deadline {
            return Err(Skipped::Busy);
        }
        let permit = self
            .breaker
            .permit(Instant::now().into_std())
            .ok_or(Skipped::Open)?;
        let started = Instant::now();
        let ends = deadline.min(started + self.settings.timeout);
        let outcome = timeout_at(ends, self.call(queue, rows)).await;
        metrics::enrichment_call(&self.name, started.elapsed());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            // Earlier calls used up the time of all. That says nothing about the endpoint.
            Err(_) if ends - started < self.patience => {
                self.log(queue, Skipped::Busy, "no time was left for an answer");
                return Err(Skipped::Busy);
            }
            Err(_) if ends == deadline => Err((
                Skipped::TimedOut,
                "no answer in the time for all calls".to_owned(),
            )),
            Err(_) => {
                let timeout = humantime::format_duration(self.settings.timeout);
                Err((
                    Skipped::TimedOut,
                    format!("no answer within {timeout} (enrich_timeout)"),
                ))
            }
        };
        match outcome {
            Ok(Ok(verdicts)) => {
                self.turned(permit.succeeded(), "");
                Ok(Some(verdicts))
            }
            Ok(Err(why)) => {
                self.turned(permit.succeeded(), "");
                if rows.len() == 1 {
                    self.log(queue, Skipped::Wrong, &why);
                }
                Ok(None)
            }
            Err((skipped, why)) => {
                self.turned(permit.failed(Instant::now().into_std()), &why);
                self.log(queue, skipped, &why);
                Err(skipped)
            }
        }
    }

    /// The outer error is a failure of the endpoint, the inner one says what is wrong about these
    /// tasks.
    async fn call(
        &self,
        queue: &QueueName,
        rows: &[&TaskRow],
    ) -> Result<Result<Vec<ReadVerdict>, String>, (Skipped, String)> {
        let body =
            json::request(queue, rows).map_err(|error| (Skipped::Failed, error.to_string()))?;
        let trace = rows.first().map_or("".into(), |row| row.context());
        let client = self.client.get_or_init(|| Client::new(&self.settings));
        match client.post(body, &trace).await {
            Ok(answer) => json::answer(&answer, rows.len())
                .map(Ok)
                .map_err(|why| (Skipped::Wrong, why)),
            Err(NoAnswer::Failed(why)) => Err((Skipped::Failed, why)),
            Err(NoAnswer::OfTheseTasks(why)) => Ok(Err(why)),
        }
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

    /// Logs a wrong answer, the same one at most once a minute. Other failures are in the log line
    /// of the breaker.
    fn log(&self, queue: &QueueName, skipped: Skipped, why: &str) {
        let is_news = skipped == Skipped::Wrong && self.logged.lock().is_news(why);
        if is_news
            && self
                .wrong_answers
                .admit(Instant::now().into_std())
                .is_some()
        {
            tracing::warn!(
                "a task of queue {queue} goes on without the enrichment of {}: {why}",
                self.name
            );
        } else {
            tracing::debug!(
                "tasks of queue {queue} go on without the enrichment of {}: {why}",
                self.name
            );
        }
    }
}
