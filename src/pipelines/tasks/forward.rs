//! The forwarder: from the shards' outboxes to the bus, then removed. Killed in between, the bus has a report twice: SQL credits once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Context;
use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use prost::Message as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    bus::{self, Bus, Record, Topic},
    config::Settings,
    model::ShardId,
    queue::{self, Event, Failing, LookFor, Queue},
    runtime::{Beat, Supervisor},
    telemetry::metrics,
    wire::pb,
};

/// Entries and bytes of reports read from a shard in one turn, about.
const ENTRIES: usize = 1000;
const READ_BYTES: usize = 4 << 20;
/// Shards that have their turn at once.
const AT_ONCE: usize = 8;
/// A record on the bus has so many bytes of reports, about.
const RECORD_BYTES: usize = 512 << 10;
/// How often a forwarder looks for what a process that died left behind.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it says that it is still at a shard, while it publishes.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// Shards in whose outboxes this process has put something.
#[derive(Default)]
pub(super) struct Reported {
    shards: Mutex<BTreeSet<ShardId>>,
    notify: Notify,
}

impl Reported {
    pub(super) fn add(&self, shards: BTreeSet<ShardId>) {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner).extend(shards);
        self.notify.notify_one();
    }

    fn take(&self) -> BTreeSet<ShardId> {
        std::mem::take(&mut *self.shards.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(super) fn start(
    queue: &Queue,
    bus: Arc<dyn Bus>,
    reported: Arc<Reported>,
    settings: &Settings,
    supervisor: &Supervisor,
) {
    let look_for = LookFor { max_age: LOOK_EVERY, grace: settings.watchdog.grace, horizon: settings.watchdog.horizon };
    let forwarder = Forwarder { queue: queue.clone(), bus, reported, look_for };
    let (beat, stop) = (Arc::new(supervisor.progress().register("tasks/forward")), supervisor.stop_token());
    supervisor.spawn("tasks/forward", move || forwarder.clone().run(Arc::clone(&beat), stop.clone()));
}

#[derive(Clone)]
struct Forwarder {
    queue: Queue,
    bus: Arc<dyn Bus>,
    reported: Arc<Reported>,
    look_for: LookFor,
}

impl Forwarder {
    /// Each round gives every shard that has something one turn: a busy one does not hold up the others.
    async fn run(self, beat: Arc<Beat>, stop: CancellationToken) -> anyhow::Result<()> {
        let (mut again, mut looked, mut failing) = (BTreeSet::new(), None::<Instant>, Failing::default());
        loop {
            let stopping = stop.is_cancelled();
            again.append(&mut self.reported.take());
            if stopping || looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                let looks = self.queue.look(self.look_for).await;
                // A shard that cannot be asked may have something.
                let left = looks.into_iter().filter(|(_, look)| look.as_ref().map_or(true, |look| look.outbox > 0));
                again.extend(left.map(|(shard, _)| shard));
            }
            let began = Instant::now();
            again.retain(|shard| !failing.leaves_out(shard));
            let turns = std::mem::take(&mut again).into_iter().map(|shard| async {
                let left = self.turn(&shard).await;
                (shard, left)
            });
            let mut turns = futures::stream::iter(turns).buffer_unordered(AT_ONCE);
            let mut failed = Ok(());
            while let Some((shard, left)) = turns.next().await {
                beat.beat();
                match left {
                    Ok(more) => {
                        failing.note(&shard, began, anyhow::Ok(()));
                        if more {
                            again.insert(shard);
                        }
                    }
                    // Redis lost the shard: the watchdog brings it back.
                    Err(error) if matches!(error.downcast_ref(), Some(queue::Error::NoGeneration)) => {}
                    // Nothing will be forwarded any more, to nobody.
                    Err(error) if matches!(error.downcast_ref(), Some(bus::Error::Lost { .. })) => return Err(error),
                    // One damaged shard does not hold up the others.
                    Err(error) if error.is::<queue::Error>() => drop(failing.note::<()>(&shard, began, Err(error))),
                    Err(error) => failed = failed.and(Err(error.context(format!("cannot forward reports of {shard}")))),
                }
            }
            drop(turns);
            failed?;
            let ended = failing.end_round("forward reports of");
            ended.map_err(|round| round.cause.context(format!("cannot {} {}", round.step, round.shard)))?;
            beat.beat();
            if !again.is_empty() {
                continue;
            }
            if stopping {
                return Ok(());
            }
            tokio::select! {
                () = self.reported.notify.notified() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
                // Once more, for what was reported meanwhile.
                () = stop.cancelled() => {}
            }
        }
    }

    /// Forwards some reports; whether there are more.
    async fn turn(&self, shard: &ShardId) -> anyhow::Result<bool> {
        let started = Instant::now();
        let entries = self.queue.outbox(shard, ENTRIES, READ_BYTES).await?;
        if entries.is_empty() {
            return Ok(false);
        }
        let partition = shard.number % self.bus.partitions(Topic::TaskResults).max(1);
        let mut records = Records { shard, reports: Vec::new(), bytes: 0, by_topic: BTreeMap::new(), partition };
        let mut count = 0;
        for entry in &entries {
            count += entry.events.iter().map(|event| records.add(event, entry.at_unix_ms)).sum::<usize>();
        }
        self.publish(shard, records).await?;
        let left = self.queue.forwarded(shard, &entries).await?;
        metrics::results_forwarded(count, started.elapsed());
        Ok(left > 0)
    }

    /// Publishes, however long the bus takes; the outbox stays this process's meanwhile, so that no other publishes the same.
    async fn publish(&self, shard: &ShardId, records: Records<'_>) -> anyhow::Result<()> {
        let publish = async {
            for (topic, records) in records.finish() {
                self.bus.publish(topic, &records).await?;
            }
            anyhow::Ok(())
        };
        let mut publish = std::pin::pin!(publish);
        loop {
            tokio::select! {
                published = &mut publish => return published,
                () = tokio::time::sleep(KEEP_EVERY) => {
                    self.queue.keep_outbox(shard).await.context("cannot keep the outbox")?;
                }
            }
        }
    }
}

/// Entries as records of the bus.
struct Records<'a> {
    shard: &'a ShardId,
    partition: u32,
    reports: Vec<Bytes>,
    bytes: usize,
    by_topic: BTreeMap<&'static str, (Topic, Vec<Record>)>,
}

impl Records<'_> {
    /// How many reports it makes.
    fn add(&mut self, event: &Event, at_unix_ms: i64) -> usize {
        let id_bytes = |id: &crate::model::TaskId| Bytes::copy_from_slice(id.as_bytes());
        match event {
            Event::Completed(report) => {
                self.report(with_time(report, at_unix_ms));
                1
            }
            Event::Died { id, attempts, reason, history } => {
                let history = history.iter().map(|failure| pb::Failure {
                    at_unix_ms: failure.at_unix_ms,
                    worker: failure.worker.clone(),
                    reason: failure.reason.clone(),
                });
                let died = pb::Died { reason: reason.clone(), attempts: *attempts, history: history.collect() };
                let what = Some(pb::report::What::Died(died));
                let report = pb::Report { task_id: id_bytes(id), what, at_unix_ms };
                self.report(report.encode_to_vec().into());
                1
            }
            Event::Expired { id, worker, attempts, dead } => {
                let expiration = pb::Expiration {
                    task_id: id_bytes(id),
                    queue: self.shard.queue.as_str().to_owned(),
                    worker: worker.clone(),
                    attempts: *attempts,
                    dead: *dead,
                    at_unix_ms,
                };
                self.record(Topic::Expirations, 0, expiration.encode_to_vec().into());
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

    fn flush(&mut self) {
        let reports = std::mem::take(&mut self.reports);
        self.bytes = 0;
        if !reports.is_empty() {
            let queue = self.shard.queue.as_str().to_owned();
            let batch = pb::EncodedReportBatch { queue, shard: self.shard.number, reports };
            self.record(Topic::TaskResults, self.partition, batch.encode_to_vec().into());
        }
    }

    fn record(&mut self, topic: Topic, partition: u32, value: Bytes) {
        let (_, records) = self.by_topic.entry(topic.as_str()).or_insert_with(|| (topic, Vec::new()));
        records.push(Record { partition, value });
    }

    /// Task results first. The bus may refuse them for long, and each retry would publish the other reports again.
    fn finish(mut self) -> impl Iterator<Item = (Topic, Vec<Record>)> {
        self.flush();
        let mut topics: Vec<_> = self.by_topic.into_values().collect();
        topics.sort_by_key(|(topic, _)| *topic != Topic::TaskResults);
        topics.into_iter()
    }
}

/// The report with its `at_unix_ms`: an encoded message may be extended by appending a field.
fn with_time(report: &Bytes, at_unix_ms: i64) -> Bytes {
    let tail = pb::Report { at_unix_ms, ..Default::default() };
    let mut whole = BytesMut::with_capacity(report.len() + tail.encoded_len());
    whole.put_slice(report);
    // A Vec or BytesMut grows: encoding into it does not fail.
    whole.put_slice(&tail.encode_to_vec());
    whole.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_results_are_published_first() {
        let shard = ShardId { queue: crate::model::QueueName::new("q").unwrap(), number: 0 };
        let mut records =
            Records { shard: &shard, partition: 0, reports: Vec::new(), bytes: 0, by_topic: BTreeMap::new() };
        let id = crate::model::TaskId::new();
        records.add(&Event::Expired { id, worker: String::new(), attempts: 1, dead: true }, 1);
        records.add(&Event::Died { id, attempts: 1, reason: String::new(), history: Vec::new() }, 1);
        let topics: Vec<_> = records.finish().map(|(topic, _)| topic).collect();
        assert_eq!(topics, [Topic::TaskResults, Topic::Expirations]);
    }

    #[test]
    fn the_time_is_added_without_decoding() {
        let done = pb::Completed { worker: "w".into(), ..Default::default() };
        let what = Some(pb::report::What::Completed(done));
        let report = pb::Report { task_id: Bytes::from_static(&[7; 16]), what, at_unix_ms: 0 };
        let whole = pb::Report::decode(with_time(&report.encode_to_vec().into(), 42)).unwrap();
        assert_eq!(whole, pb::Report { at_unix_ms: 42, ..report });
    }
}
