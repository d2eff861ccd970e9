//! The forwarder: from the shards' outboxes to the bus, then removed.
//!
//! Crash window: killed between publish and removal, the bus has a report twice. SQL credits it once. The removal of a
//! few reports lags up to 20 ms: it goes with the next read.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{StreamExt, future::join_all};
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
/// The shards that have a turn together, at most, and the turns at once.
const TOGETHER: usize = 64;
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

/// Shards with something in their outboxes, and how many bytes, about.
type Due = BTreeMap<ShardId, usize>;

/// The shards in whose outboxes this process has put something.
#[derive(Default)]
pub(super) struct Reported {
    shards: Mutex<Due>,
    notify: Notify,
}

impl Reported {
    pub(super) fn add(&self, shards: impl IntoIterator<Item = (ShardId, usize)>) {
        let mut due = self.shards.lock();
        for (shard, bytes) in shards {
            let sum = due.entry(shard).or_default();
            *sum = sum.saturating_add(bytes);
        }
        self.notify.notify_one();
    }

    fn take(&self) -> Due {
        std::mem::take(&mut *self.shards.lock())
    }
}

/// Shards whose reports go to the same partition of the bus, as many as have a turn together.
struct Group {
    partition: u32,
    shards: Vec<ShardId>,
}

/// What a shard's outbox had.
struct Read {
    shard: ShardId,
    entries: Vec<OutboxEntry>,
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
    /// Many shards with a few reports have a turn together.
    ///
    /// Rounds are a tick apart while each forwards everything. So reports that come one by one share a record of the
    /// bus, a transaction and their fsyncs.
    async fn run(self, cx: Loop) -> Result<(), Error> {
        let (mut due, mut looked, mut failing) = (Due::new(), None::<Instant>, Failing::default());
        loop {
            let stopping = cx.stop.is_cancelled();
            for (shard, bytes) in self.reported.take() {
                due.entry(shard).or_insert(bytes);
            }
            for shard in self.published.lock().keys() {
                due.entry(shard.clone()).or_insert(0);
            }
            if stopping || looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                for shard in self.look().await {
                    due.entry(shard).or_insert(READ_BYTES);
                }
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
    async fn look(&self) -> impl Iterator<Item = ShardId> {
        let looks = self.queue.look(self.look_for).await.into_iter();
        // A shard that does not answer may have something.
        let due = looks.filter(|(_, look)| look.as_ref().map_or(true, |look| look.outbox > 0));
        due.map(|(shard, _)| shard)
    }

    /// Gives each shard one turn; answers the shards that have more.
    async fn round(&self, mut due: Due, failing: &mut Failing<queue::Error>, cx: &Loop) -> Result<Due, Error> {
        let began = Instant::now();
        due.retain(|shard, _| !failing.leaves_out(shard));
        let partitions = self.bus.partitions(Topic::TaskResults);
        let turns = groups(due, partitions).into_iter().map(|group| self.turn(group, cx));
        let mut turns = futures::stream::iter(turns).buffer_unordered(AT_ONCE);
        let (mut more, mut failed) = (Due::new(), Ok(()));
        while let Some(outcomes) = turns.next().await {
            cx.beat();
            for (shard, left) in outcomes {
                match left {
                    Ok(has_more) => {
                        failing.note(&shard, began, Ok(()));
                        if has_more {
                            more.insert(shard, READ_BYTES);
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
        }
        failed?;
        failing.end_round("forward reports of")?;
        Ok(more)
    }

    /// Forwards some reports of each shard; whether it has more.
    async fn turn(&self, Group { partition, shards }: Group, cx: &Loop) -> Vec<(ShardId, Result<bool, Error>)> {
        let started = Instant::now();
        let published = |shard: ShardId| {
            let published = self.published.lock().remove(&shard).unwrap_or_default();
            (shard, published)
        };
        let asked: Vec<_> = shards.into_iter().map(published).collect();
        let found = self.queue.outboxes_behind(&asked, ENTRIES, READ_BYTES).await;
        let (mut outcomes, mut reads) = (Vec::with_capacity(asked.len()), Vec::new());
        for ((shard, published), found) in asked.into_iter().zip(found) {
            match found {
                Ok(entries) if entries.is_empty() => outcomes.push((shard, Ok(false))),
                Ok(entries) => reads.push(Read { shard, entries }),
                Err(error) => {
                    if !published.is_empty() && !matches!(error, queue::Error::NoGeneration) {
                        self.published.lock().insert(shard.clone(), published);
                    }
                    outcomes.push((shard, Err(error.into())));
                }
            }
        }
        match self.publish(&reads, partition, started).await {
            Ok(()) => outcomes.extend(join_all(reads.into_iter().map(|read| self.conclude(read, cx))).await),
            // The reports of the others may fit.
            Err(bus::Error::TooLarge { .. }) if reads.len() > 1 => {
                for read in reads {
                    outcomes.push(match self.publish(std::slice::from_ref(&read), partition, started).await {
                        Ok(()) => self.conclude(read, cx).await,
                        Err(error) => (read.shard.clone(), Err(Error::Bus(read.shard, error))),
                    });
                }
            }
            // The round fails, and the next one finds all of them.
            Err(error) => {
                let first = reads.swap_remove(0).shard;
                outcomes.push((first.clone(), Err(Error::Bus(first, error))));
            }
        }
        outcomes
    }

    /// Removes what is on the bus from the outbox, or leaves it to the next read; whether the outbox has more.
    async fn conclude(&self, Read { shard, mut entries }: Read, cx: &Loop) -> (ShardId, Result<bool, Error>) {
        let are_few = entries.len() < FEW_ENTRIES && entries.iter().map(|entry| entry.bytes).sum::<usize>() < FEW_BYTES;
        if are_few && !cx.stop.is_cancelled() {
            entries.iter_mut().for_each(|entry| (entry.events, entry.failures) = Default::default());
            self.published.lock().insert(shard.clone(), entries);
            return (shard, Ok(false));
        }
        let left = self.queue.forwarded(&shard, &entries).await;
        (shard, left.map(|left| left > 0).map_err(Error::from))
    }

    /// Publishes, however long the bus takes. Meanwhile the process keeps the outboxes, so that no other publishes the
    /// same.
    async fn publish(&self, reads: &[Read], partition: u32, started: Instant) -> bus::Result<()> {
        let of = match reads {
            [] => return Ok(()),
            [alone] => Some(&alone.shard),
            _ => None,
        };
        let mut records = Records::new(of, partition, self.queue.history().is_on());
        let mut count = 0;
        for Read { shard, entries } in reads {
            for entry in entries {
                count += entry.events.iter().map(|event| records.add(shard, event, entry.at_unix_ms)).sum::<usize>();
                entry.failures.iter().for_each(|failure| records.failure(failure, entry.at_unix_ms));
            }
        }
        let publish = async {
            for (topic, records) in records.finish() {
                self.bus.publish(topic, &records).await?;
            }
            Ok(())
        };
        let mut publish = std::pin::pin!(publish);
        let published = loop {
            tokio::select! {
                published = &mut publish => break published,
                () = tokio::time::sleep(KEEP_EVERY) => {
                    // Otherwise another process publishes the same, and it counts once.
                    let kept = join_all(reads.iter().map(|read| self.queue.keep_outbox(&read.shard))).await;
                    kept.into_iter().filter_map(Result::err).for_each(|error| tracing::debug!("could not keep an outbox: {error}"));
                }
            }
        };
        if published.is_ok() {
            metrics::results_forwarded(count, started.elapsed());
        }
        published
    }
}

/// The groups of shards that have their turns together. One of many bytes has its turn alone.
fn groups(due: Due, partitions: u32) -> Vec<Group> {
    let mut by_partition: BTreeMap<u32, Vec<(ShardId, usize)>> = BTreeMap::new();
    for (shard, bytes) in due {
        by_partition.entry(shard.number % partitions.max(1)).or_default().push((shard, bytes));
    }
    let mut groups = Vec::new();
    for (partition, shards) in by_partition {
        let (mut group, mut sum) = (Vec::new(), 0);
        for (shard, bytes) in shards {
            if group.len() == TOGETHER || !group.is_empty() && sum + bytes > READ_BYTES {
                groups.push(Group { partition, shards: std::mem::take(&mut group) });
                sum = 0;
            }
            sum += bytes;
            group.push(shard);
        }
        groups.push(Group { partition, shards: group });
    }
    groups
}

/// Entries as records of the bus.
struct Records<'a> {
    /// The shard of all of them; `None`: they are of several.
    of: Option<&'a ShardId>,
    partition: u32,
    reports: Vec<Bytes>,
    failures: Vec<Bytes>,
    bytes: usize,
    by_topic: BTreeMap<&'static str, (Topic, Vec<Record>)>,
    /// Failed attempts go into the histories of their tasks.
    keeps_history: bool,
}

impl<'a> Records<'a> {
    fn new(of: Option<&'a ShardId>, partition: u32, keeps_history: bool) -> Self {
        let (reports, failures, by_topic) = Default::default();
        Self { of, partition, reports, failures, bytes: 0, by_topic, keeps_history }
    }

    /// Adds an event; answers the number of its reports.
    fn add(&mut self, shard: &ShardId, event: &Event, at_unix_ms: i64) -> usize {
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
                    queue: shard.queue.as_str().to_owned(),
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
            self.record(Topic::TaskResults, self.partition, wire::report_batch(self.of, reports, failures));
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
        let mut records = Records::new(Some(&shard), 0, false);
        let id = crate::model::TaskId::new();
        let lease = Some(crate::model::LeaseNumber { generation: 1, grant: 1 });
        let (worker, leased_unix_ms) = (String::new(), 0);
        records.add(&shard, &Event::Expired { id, worker, attempts: 1, dead: true, lease, leased_unix_ms }, 1);
        records.add(&shard, &Event::Died { id, attempts: 1, reason: String::new(), history: Vec::new(), epoch: 0 }, 1);
        let topics: Vec<_> = records.finish().map(|(topic, _)| topic).collect();
        assert_eq!(topics, [Topic::TaskResults, Topic::Expirations]);
    }

    #[test]
    fn shards_with_few_reports_have_a_turn_together() {
        let shard = |name: &str, number| ShardId { queue: crate::model::QueueName::new(name).unwrap(), number };
        let sizes = |due: Vec<(ShardId, usize)>| -> Vec<(u32, usize)> {
            let groups = groups(due.into_iter().collect(), 2);
            groups.into_iter().map(|group| (group.partition, group.shards.len())).collect()
        };
        assert_eq!(sizes(vec![]), []);
        let small = |count| (0..count).map(|n| (shard(&format!("q{n}"), 0), 100)).collect();
        assert_eq!(sizes(small(TOGETHER + 1)), [(0, TOGETHER), (0, 1)]);
        let other = vec![(shard("a", 0), 1), (shard("a", 1), 1), (shard("a", 2), 1), (shard("a", 3), 1)];
        assert_eq!(sizes(other), [(0, 2), (1, 2)], "by the partition of their reports");
        let large = vec![(shard("a", 0), 1), (shard("b", 0), READ_BYTES), (shard("c", 0), 1), (shard("d", 0), 1)];
        assert_eq!(sizes(large), [(0, 1), (0, 1), (0, 2)]);
    }
}
