//! The forwarder: from the shards' outboxes to the bus, then removed. Killed in between, the bus has a report twice: SQL credits once.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    bus::{self, Bus, Record, Topic},
    model::ShardId,
    pb,
    queue::{self, Event, OutboxEntry, Queue},
    supervise::{Beat, Supervisor},
    telemetry::metrics,
};

/// Entries read at once, at most. Each may hold some 16 MiB of reports: the first read is small, the next goes by what it found.
const ENTRIES: usize = 64;
const FIRST_ENTRIES: usize = 8;
/// Bytes of reports read at once, about.
const READ_BYTES: usize = 16 << 20;
/// A record on the bus has so many bytes of reports, about.
const RECORD_BYTES: usize = 512 << 10;
/// What a process that died left behind is looked for so often.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) fn start(queue: &Queue, bus: Arc<dyn Bus>, reported: Arc<Notify>, supervisor: &Supervisor) {
    let (queue, stop) = (queue.clone(), supervisor.stop_token());
    let beat = Arc::new(supervisor.progress().register("tasks/forward"));
    supervisor.spawn("tasks/forward", move || {
        forward(queue.clone(), Arc::clone(&bus), Arc::clone(&reported), Arc::clone(&beat), stop.clone())
    });
}

async fn forward(
    queue: Queue,
    bus: Arc<dyn Bus>,
    reported: Arc<Notify>,
    beat: Arc<Beat>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    loop {
        let stopping = stop.is_cancelled();
        let mut failed = Ok(());
        for shard in queue.shards() {
            match forward_shard(&queue, &*bus, &shard).await {
                Ok(()) => {}
                // Redis lost the shard: the watchdog brings it back.
                Err(error) if matches!(error.downcast_ref(), Some(queue::Error::NoGeneration)) => {}
                // Nothing will be forwarded any more, to nobody.
                Err(error) if matches!(error.downcast_ref(), Some(bus::Error::Lost { .. })) => return Err(error),
                // One damaged shard does not hold up those behind it.
                Err(error) => failed = failed.and(Err(error.context(format!("cannot forward reports of {shard}")))),
            }
        }
        failed?;
        beat.beat();
        if stopping {
            return Ok(());
        }
        tokio::select! {
            () = reported.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
            // Once more, for what was reported meanwhile.
            () = stop.cancelled() => {}
        }
    }
}

async fn forward_shard(queue: &Queue, bus: &dyn Bus, shard: &ShardId) -> anyhow::Result<()> {
    let mut most = FIRST_ENTRIES;
    loop {
        let started = Instant::now();
        let entries = queue.outbox(shard, most).await?;
        if entries.is_empty() {
            return Ok(());
        }
        most = next_read(entries.len(), entries.iter().map(weight).sum());
        let partition = shard.number % bus.partitions(Topic::TaskResults).max(1);
        let mut records = Records { shard, reports: Vec::new(), bytes: 0, by_topic: BTreeMap::new(), partition };
        let mut count = 0;
        for entry in &entries {
            count += records.add(entry);
        }
        for (topic, records) in records.finish() {
            bus.publish(topic, &records).await?;
        }
        let ids: Vec<_> = entries.into_iter().map(|entry| entry.id).collect();
        let left = queue.forwarded(shard, &ids).await?;
        metrics::results_forwarded(count, started.elapsed());
        if left == 0 {
            return Ok(());
        }
    }
}

/// How many entries to read after some that had so many bytes: as many as would have had `READ_BYTES`.
fn next_read(entries: usize, bytes: usize) -> usize {
    (entries * READ_BYTES / bytes.max(1)).clamp(1, ENTRIES)
}

/// Of the reports; the rest is small.
fn weight(entry: &OutboxEntry) -> usize {
    match &entry.event {
        Event::Completed(reports) => reports.iter().map(Bytes::len).sum(),
        Event::Died { .. } | Event::Expired { .. } => 0,
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
    /// How many reports the entry had.
    fn add(&mut self, entry: &OutboxEntry) -> usize {
        match &entry.event {
            Event::Completed(reports) => {
                reports.iter().for_each(|report| self.report(with_time(report, entry.at_unix_ms)));
                reports.len()
            }
            Event::Died { id, attempts, reason } => {
                let task_id = Bytes::copy_from_slice(id.as_bytes());
                let died = pb::Died { reason: reason.clone(), attempts: *attempts };
                let what = Some(pb::report::What::Died(died));
                let report = pb::Report { task_id: task_id.clone(), what, at_unix_ms: entry.at_unix_ms };
                self.report(report.encode_to_vec().into());
                let letter = pb::DeadLetter {
                    reason: reason.clone(),
                    at_unix_ms: entry.at_unix_ms,
                    task_id,
                    queue: self.shard.queue.as_str().to_owned(),
                    attempts: *attempts,
                    ..Default::default()
                };
                self.record(Topic::DeadLetters, 0, letter.encode_to_vec().into());
                1
            }
            Event::Expired { id, worker, attempts, dead } => {
                let expiration = pb::Expiration {
                    task_id: Bytes::copy_from_slice(id.as_bytes()),
                    queue: self.shard.queue.as_str().to_owned(),
                    worker: worker.clone(),
                    attempts: *attempts,
                    dead: *dead,
                    at_unix_ms: entry.at_unix_ms,
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
    fn large_entries_are_read_in_smaller_numbers() {
        assert_eq!(next_read(8, 8 << 10), 64);
        assert_eq!(next_read(64, 64 << 20), 16);
        assert_eq!(next_read(8, 128 << 20), 1);
        assert_eq!(next_read(1, 24 << 20), 1);
        assert_eq!(next_read(3, 0), 64);
    }

    #[test]
    fn task_results_are_published_first() {
        let shard = ShardId { queue: crate::model::QueueName::new("q").unwrap(), number: 0 };
        let mut records =
            Records { shard: &shard, partition: 0, reports: Vec::new(), bytes: 0, by_topic: BTreeMap::new() };
        let event = Event::Died { id: crate::model::TaskId::new(), attempts: 1, reason: String::new() };
        records.add(&OutboxEntry { id: "1-0".into(), at_unix_ms: 1, event });
        let topics: Vec<_> = records.finish().map(|(topic, _)| topic).collect();
        assert_eq!(topics, [Topic::TaskResults, Topic::DeadLetters]);
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
