//! The forwarder: from the shards' outboxes to the bus, then removed.
//!
//! Crash window: killed between publish and removal, the bus has a report twice. SQL credits it once. The removal of a
//! few reports lags up to 20 ms: it goes with the next read.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    bus::{self, Bus, Record, Topic},
    config::Settings,
    model::{AttemptState, Died, Expiration, FailedAttempt, Failure, ShardId},
    queue::{self, Event, FailedRound, Failing, LookFor, OutboxEntry, Upkeep},
    runtime::{Loop, LoopError, Policy, Supervisor, tick},
    telemetry::metrics,
    wire,
};

/// The entries and bytes of reports read from a shard in one turn, about.
const ENTRIES: usize = 1000;
const READ_BYTES: usize = 4 << 20;
/// The shards that have their turn at once.
const AT_ONCE: usize = 8;
/// The bytes of reports in one record of the bus, about.
const RECORD_BYTES: usize = 512 << 10;
/// Fewer entries and bytes than these are removed by the next read. With more, claims may have paused, and wait for the
/// removal.
const FEW_ENTRIES: usize = 100;
const FEW_BYTES: usize = 64 << 10;
/// How often the forwarder looks for the entries of a process that died.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the forwarder renews its hold on an outbox while it publishes.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The shards in whose outboxes this process has put something.
#[derive(Default)]
pub(super) struct Reported {
    shards: Mutex<BTreeSet<ShardId>>,
    notify: Notify,
}

impl Reported {
    pub(super) fn add(&self, shards: BTreeSet<ShardId>) {
        self.shards.lock().extend(shards);
        self.notify.notify_one();
    }

    fn take(&self) -> BTreeSet<ShardId> {
        std::mem::take(&mut *self.shards.lock())
    }
}

/// The reason why reports stay in their outbox.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The shard is at fault.
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error("cannot forward reports of {0}: {1}")]
    Bus(ShardId, #[source] bus::Error),
    /// No shard's turn went well.
    #[error("cannot {step} {shard}: {cause}")]
    AllShards {
        step: &'static str,
        shard: ShardId,
        #[source]
        cause: queue::Error,
    },
}

impl LoopError for Error {
    fn ends_round(&self) -> bool {
        matches!(self, Self::Bus(_, error) if error.ends_round())
    }
}

impl From<FailedRound<queue::Error>> for Error {
    fn from(FailedRound { step, shard, cause }: FailedRound<queue::Error>) -> Self {
        Self::AllShards { step, shard, cause }
    }
}

pub(super) fn start(
    queue: Upkeep,
    bus: Arc<dyn Bus>,
    reported: Arc<Reported>,
    settings: &Settings,
    supervisor: &Supervisor,
) {
    let look_for = LookFor { max_age: LOOK_EVERY, grace: settings.watchdog.grace, horizon: settings.watchdog.horizon };
    let forwarder = Forwarder { queue, bus, reported, look_for, published: Arc::default() };
    supervisor.spawn_loop("tasks/forward", Policy::Restart, move |cx| forwarder.clone().run(cx));
}

#[derive(Clone)]
struct Forwarder {
    queue: Upkeep,
    bus: Arc<dyn Bus>,
    reported: Arc<Reported>,
    look_for: LookFor,
    /// The entries that are on the bus and still in their outboxes, without their events.
    published: Arc<Mutex<BTreeMap<ShardId, Vec<OutboxEntry>>>>,
}

impl Forwarder {
    /// Forwards in rounds. A round gives one turn to every shard that has something, so no busy shard holds up others.
    ///
    /// Rounds are a tick apart while each forwards everything. So reports that come one by one share a record of the
    /// bus, a transaction and their fsyncs.
    async fn run(self, cx: Loop) -> Result<(), Error> {
        let (mut due, mut looked, mut failing) = (BTreeSet::new(), None::<Instant>, Failing::default());
        loop {
            let stopping = cx.stop.is_cancelled();
            due.append(&mut self.reported.take());
            due.extend(self.published.lock().keys().cloned());
            if stopping || looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                due.append(&mut self.look().await);
            }
            due = self.round(due, &mut failing, &cx).await?;
            cx.beat();
            if !due.is_empty() {
                continue;
            }
            if stopping {
                return Ok(());
            }
            let is_behind = !self.published.lock().is_empty();
            let reported = async {
                if !is_behind {
                    self.reported.notify.notified().await;
                }
                tick().await;
            };
            tokio::select! {
                () = reported => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                // The next round forwards the reports that came before the stop.
                () = cx.stop.cancelled() => {}
            }
        }
    }

    /// The shards that have something in their outbox, whoever put it there.
    async fn look(&self) -> BTreeSet<ShardId> {
        let looks = self.queue.look(self.look_for).await.into_iter();
        // A shard that does not answer may have something.
        let due = looks.filter(|(_, look)| look.as_ref().map_or(true, |look| look.outbox > 0));
        due.map(|(shard, _)| shard).collect()
    }

    /// Gives each shard one turn; answers the shards that have more.
    async fn round(
        &self,
        mut due: BTreeSet<ShardId>,
        failing: &mut Failing<queue::Error>,
        cx: &Loop,
    ) -> Result<BTreeSet<ShardId>, Error> {
        let began = Instant::now();
        due.retain(|shard| !failing.leaves_out(shard));
        let turns = due.into_iter().map(|shard| async {
            let left = self.turn(&shard, cx).await;
            (shard, left)
        });
        let mut turns = futures::stream::iter(turns).buffer_unordered(AT_ONCE);
        let (mut more, mut failed) = (BTreeSet::new(), Ok(()));
        while let Some((shard, left)) = turns.next().await {
            cx.beat();
            match left {
                Ok(has_more) => {
                    failing.note(&shard, began, Ok(()));
                    if has_more {
                        more.insert(shard);
                    }
                }
                // Redis lost the shard: the watchdog brings it back.
                Err(Error::Queue(queue::Error::NoGeneration)) => {}
                // No process will ever forward anything over this bus.
                Err(error @ Error::Bus(_, bus::Error::Lost { .. })) => return Err(error),
                // One damaged shard does not hold up the others.
                Err(Error::Queue(error)) => drop(failing.note::<()>(&shard, began, Err(error))),
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        failed?;
        failing.end_round("forward reports of")?;
        Ok(more)
    }

    /// Forwards some reports; whether there are more.
    async fn turn(&self, shard: &ShardId, cx: &Loop) -> Result<bool, Error> {
        let started = Instant::now();
        let published = self.published.lock().remove(shard).unwrap_or_default();
        let mut entries = match self.queue.outbox_behind(shard, &published, ENTRIES, READ_BYTES).await {
            Ok(entries) => entries,
            Err(error) => {
                if !published.is_empty() && !matches!(error, queue::Error::NoGeneration) {
                    self.published.lock().insert(shard.clone(), published);
                }
                return Err(error.into());
            }
        };
        if entries.is_empty() {
            return Ok(false);
        }
        let partition = shard.number % self.bus.partitions(Topic::TaskResults).max(1);
        let mut records = Records::new(shard, partition, self.queue.history().is_on());
        let mut count = 0;
        for entry in &entries {
            count += entry.events.iter().map(|event| records.add(event, entry.at_unix_ms)).sum::<usize>();
            entry.failures.iter().for_each(|failure| records.failure(failure, entry.at_unix_ms));
        }
        self.publish(shard, records).await?;
        metrics::results_forwarded(count, started.elapsed());
        let are_few = entries.len() < FEW_ENTRIES && entries.iter().map(|entry| entry.bytes).sum::<usize>() < FEW_BYTES;
        if are_few && !cx.stop.is_cancelled() {
            entries.iter_mut().for_each(|entry| (entry.events, entry.failures) = Default::default());
            self.published.lock().insert(shard.clone(), entries);
            return Ok(false);
        }
        Ok(self.queue.forwarded(shard, &entries).await? > 0)
    }

    /// Publishes, however long the bus takes. Meanwhile the process keeps the outbox, so that no other publishes the
    /// same.
    async fn publish(&self, shard: &ShardId, records: Records<'_>) -> Result<(), Error> {
        let publish = async {
            for (topic, records) in records.finish() {
                self.bus.publish(topic, &records).await?;
            }
            Ok(())
        };
        let mut publish = std::pin::pin!(publish);
        loop {
            tokio::select! {
                published = &mut publish => return published.map_err(|error| Error::Bus(shard.clone(), error)),
                () = tokio::time::sleep(KEEP_EVERY) => self.queue.keep_outbox(shard).await?,
            }
        }
    }
}

/// Entries as records of the bus.
struct Records<'a> {
    shard: &'a ShardId,
    partition: u32,
    reports: Vec<Bytes>,
    failures: Vec<Bytes>,
    bytes: usize,
    by_topic: BTreeMap<&'static str, (Topic, Vec<Record>)>,
    /// Failed attempts go into the histories of their tasks.
    keeps_history: bool,
}

impl<'a> Records<'a> {
    fn new(shard: &'a ShardId, partition: u32, keeps_history: bool) -> Self {
        let (reports, failures, by_topic) = Default::default();
        Self { shard, partition, reports, failures, bytes: 0, by_topic, keeps_history }
    }

    /// Adds an event; answers the number of its reports.
    fn add(&mut self, event: &Event, at_unix_ms: i64) -> usize {
        match event {
            Event::Completed(report) => {
                self.report(wire::with_time(report, at_unix_ms));
                1
            }
            Event::Died { id, attempts, reason, history, epoch } => {
                let history = history.iter().map(|failure| Failure {
                    at_unix_ms: failure.at_unix_ms,
                    worker: failure.worker.clone(),
                    reason: failure.reason.clone(),
                });
                let (reason, history) = (reason.clone(), history.collect());
                let died = Died { reason, attempts: *attempts, history, epoch: *epoch };
                self.report(wire::died_report(*id, died, at_unix_ms));
                1
            }
            Event::Expired { id, worker, attempts, dead, lease, leased_unix_ms } => {
                if let Some(lease) = *lease {
                    let failure = FailedAttempt {
                        id: *id,
                        worker: worker.clone(),
                        state: AttemptState::Expired,
                        leased_unix_ms: *leased_unix_ms,
                        at_unix_ms: 0,
                        attempt: *attempts,
                        lease,
                        reason: "lease expired".into(),
                    };
                    self.failure(&wire::failed_attempt(failure), at_unix_ms);
                }
                let expiration = Expiration {
                    id: *id,
                    queue: self.shard.queue.as_str().to_owned(),
                    worker: worker.clone(),
                    attempts: *attempts,
                    dead: *dead,
                    at_unix_ms,
                };
                self.record(Topic::Expirations, 0, wire::expiration(expiration));
                0
            }
        }
    }

    fn report(&mut self, report: Bytes) {
        self.bytes += report.len();
        self.reports.push(report);
        if self.bytes >= RECORD_BYTES {
            self.flush();
        }
    }

    /// Adds a failed attempt. The record of the reports carries it, so it costs none of its own beside them.
    fn failure(&mut self, failure: &Bytes, at_unix_ms: i64) {
        if !self.keeps_history {
            return;
        }
        let failure = wire::failure_with_time(failure, at_unix_ms);
        self.bytes += failure.len();
        self.failures.push(failure);
        if self.bytes >= RECORD_BYTES {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let (reports, failures) = (std::mem::take(&mut self.reports), std::mem::take(&mut self.failures));
        self.bytes = 0;
        if !(reports.is_empty() && failures.is_empty()) {
            self.record(Topic::TaskResults, self.partition, wire::report_batch(self.shard, reports, failures));
        }
    }

    fn record(&mut self, topic: Topic, partition: u32, value: Bytes) {
        let (_, records) = self.by_topic.entry(topic.as_str()).or_insert_with(|| (topic, Vec::new()));
        records.push(Record { partition, value });
    }

    /// The records by topic, task results first: the bus may refuse them for long, and each retry would publish the
    /// other reports again.
    fn finish(mut self) -> impl Iterator<Item = (Topic, Vec<Record>)> {
        self.flush();
        let mut topics: Vec<_> = self.by_topic.into_values().collect();
        topics.sort_by_key(|(topic, _)| *topic != Topic::TaskResults);
        topics.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_results_are_published_first() {
        let shard = ShardId { queue: crate::model::QueueName::new("q").unwrap(), number: 0 };
        let mut records = Records::new(&shard, 0, false);
        let id = crate::model::TaskId::new();
        let lease = Some(crate::model::LeaseNumber { generation: 1, grant: 1 });
        let (worker, leased_unix_ms) = (String::new(), 0);
        records.add(&Event::Expired { id, worker, attempts: 1, dead: true, lease, leased_unix_ms }, 1);
        records.add(&Event::Died { id, attempts: 1, reason: String::new(), history: Vec::new(), epoch: 0 }, 1);
        let topics: Vec<_> = records.finish().map(|(topic, _)| topic).collect();
        assert_eq!(topics, [Topic::TaskResults, Topic::Expirations]);
    }
}
