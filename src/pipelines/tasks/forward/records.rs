//! Turns reports, and whatever else an outbox contains, into records of the bus.

use bytes::Bytes;

use crate::{
    bus::{LogRecord, Record},
    model::{AttemptState, Died, Expiration, FailedAttempt, ShardId},
    queue::Event,
    wire,
};

/// How many reports go into one record.
#[derive(Clone, Copy)]
pub(super) enum Packed {
    /// As many as fit into [`RECORD_BYTES`]. A larger report gets a record of its own.
    Densely,
    /// As many as fit into [`LOOSE_BYTES`], for a topic that accepts no larger record.
    Loosely,
}

/// About how many bytes of reports go into one record.
const RECORD_BYTES: usize = 512 << 10;
/// The same after a record was too large. Each such record is published alone, so it should still
/// hold many small reports.
const LOOSE_BYTES: usize = 64 << 10;

/// Collects entries into records of the bus.
pub(super) struct Records<'a> {
    /// The shard of all entries; `None` if they are of several shards.
    of: Option<&'a ShardId>,
    partition: u32,
    /// A record has no more bytes than this, unless it holds only one report.
    full: usize,
    reports: Vec<Bytes>,
    failures: Vec<Bytes>,
    bytes: usize,
    results: Vec<Record>,
    expirations: Vec<LogRecord>,
    /// Whether failed attempts are kept in the histories of their tasks.
    keeps_history: bool,
}

impl<'a> Records<'a> {
    pub(super) fn new(
        of: Option<&'a ShardId>,
        partition: u32,
        packed: Packed,
        keeps_history: bool,
    ) -> Self {
        let full = match packed {
            Packed::Densely => RECORD_BYTES,
            Packed::Loosely => LOOSE_BYTES,
        };
        Self {
            of,
            partition,
            full,
            reports: Default::default(),
            failures: Default::default(),
            bytes: 0,
            results: Vec::new(),
            expirations: Vec::new(),
            keeps_history,
        }
    }

    /// Adds an event. Returns the number of reports in it.
    pub(super) fn add(&mut self, shard: &ShardId, event: &Event, at_unix_ms: i64) -> usize {
        match event {
            Event::Completed(report) => {
                self.report(wire::with_time(report, at_unix_ms));
                1
            }
            Event::Died {
                id,
                attempts,
                reason,
                history,
                epoch,
            } => {
                let reason = reason.clone();
                let history = history.clone();
                let died = Died {
                    reason,
                    attempts: *attempts,
                    history,
                    epoch: *epoch,
                };
                self.report(wire::died_report(*id, died, at_unix_ms));
                1
            }
            Event::Expired {
                id,
                worker,
                attempts,
                dead,
                lease,
                leased_unix_ms,
            } => {
                let failure = FailedAttempt {
                    id: *id,
                    worker: worker.clone(),
                    state: AttemptState::Expired,
                    leased_unix_ms: *leased_unix_ms,
                    at_unix_ms: 0,
                    attempt: *attempts,
                    lease: *lease,
                    reason: "lease expired".into(),
                };
                self.failure(&wire::failed_attempt(failure), at_unix_ms);
                let expiration = Expiration {
                    id: *id,
                    queue: shard.queue.as_str().to_owned(),
                    worker: worker.clone(),
                    attempts: *attempts,
                    dead: *dead,
                    at_unix_ms,
                };
                self.expirations.push(LogRecord {
                    value: wire::expiration(expiration),
                    ..LogRecord::default()
                });
                0
            }
        }
    }

    fn report(&mut self, report: Bytes) {
        self.make_room(report.len());
        self.reports.push(report);
    }

    /// Adds a failed attempt. It goes into the same record as the reports, so that it costs no
    /// record of its own.
    pub(super) fn failure(&mut self, failure: &Bytes, at_unix_ms: i64) {
        if !self.keeps_history {
            return;
        }
        let failure = wire::failure_with_time(failure, at_unix_ms);
        self.make_room(failure.len());
        self.failures.push(failure);
    }

    /// Starts another record if this one has no space for this many more bytes.
    fn make_room(&mut self, bytes: usize) {
        if self.bytes + bytes > self.full {
            self.flush();
        }
        self.bytes += bytes;
    }

    fn flush(&mut self) {
        let reports = std::mem::take(&mut self.reports);
        let failures = std::mem::take(&mut self.failures);
        self.bytes = 0;
        if !(reports.is_empty() && failures.is_empty()) {
            self.results.push(Record {
                partition: self.partition,
                value: wire::report_batch(self.of, reports, failures),
            });
        }
    }

    /// Returns the records of `task-results` and of `expirations`.
    pub(super) fn finish(mut self) -> (Vec<Record>, Vec<LogRecord>) {
        self.flush();
        (self.results, self.expirations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiration_is_not_among_the_task_results() {
        let shard = ShardId {
            queue: crate::model::QueueName::new("q").unwrap(),
            number: 0,
        };
        let mut records = Records::new(Some(&shard), 0, Packed::Densely, false);
        let id = crate::model::TaskId::new();
        let lease = crate::model::LeaseNumber {
            generation: 1,
            grant: 1,
        };
        let worker = String::new();
        let leased_unix_ms = 0;
        records.add(
            &shard,
            &Event::Expired {
                id,
                worker,
                attempts: 1,
                dead: true,
                lease,
                leased_unix_ms,
            },
            1,
        );
        records.add(
            &shard,
            &Event::Died {
                id,
                attempts: 1,
                reason: String::new(),
                history: Vec::new(),
                epoch: 0,
            },
            1,
        );
        let (results, expirations) = records.finish();
        assert_eq!([results.len(), expirations.len()], [1, 1]);
    }

    #[test]
    fn two_reports_that_do_not_fit_together_have_a_record_each() {
        let shard = ShardId {
            queue: crate::model::QueueName::new("q").unwrap(),
            number: 0,
        };
        let large = Bytes::from(vec![0; 60 << 10]);
        let mut records = Records::new(Some(&shard), 0, Packed::Loosely, true);
        for _ in 0..2 {
            records.report(large.clone());
            records.failure(&large, 1);
        }
        let (results, _) = records.finish();
        let sizes: Vec<_> = results.iter().map(|record| record.value.len()).collect();
        assert!(
            sizes.len() == 4 && sizes.iter().all(|size| *size < 70 << 10),
            "{sizes:?}"
        );
    }
}
