//! Publishes the events that SQL has stored to topic `events`.
//!
//! The transaction that stores, ends or sends again a task of a queue with `events = true` also
//! stores an event. This loop publishes events in the order of their numbers, then removes them. A
//! later event of a task has a larger number, is never in SQL before the earlier one, and is
//! published after it, so they are in order in the topic. Crash windows:
//!
//! - Before the transaction's commit: there is neither the change nor its event.
//! - After the commit, before the publish: the event is in SQL, and the next leader publishes it.
//! - After the publish, before the removal: it is published again, with the same number.
//!
//! Two leaders at once publish some events twice. Each begins with the first event in SQL, so a
//! later event of a task still comes after the first record of an earlier one.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{error::Error, lead::Lead};
use crate::{
    bus::{self, Log, LogRecord, Logs},
    config::EventQueues,
    model::{EventRecord, TaskId},
    pipelines::context::Context,
    runtime::Loop,
    store::{KeptEvents, Operators},
    telemetry::metrics,
    wire,
};

/// How many rows of at most 64 KiB are published at once.
const AT_ONCE: u32 = 32;
/// The pause after a full page, and after any other.
const BUSY: Duration = Duration::from_millis(1);
const IDLE: Duration = Duration::from_millis(100);
/// The pause if no queue has events by this process's settings. Another process may have other
/// settings.
const OFF: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(super) struct Events {
    store: Arc<dyn Operators>,
    logs: Arc<dyn Logs>,
    idle: Duration,
    lead: Lead,
}

/// An event with its number, encoded.
struct Numbered {
    task: TaskId,
    number: u64,
    /// The event as SQL has it, without the number.
    kept: Bytes,
    record: Bytes,
}

impl Events {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context {
            store,
            bus,
            settings,
            ..
        } = context.clone();
        let idle = if EventQueues::of(&settings.queues).are_some_on() {
            IDLE
        } else {
            OFF
        };
        Self {
            store,
            logs: bus.logs(),
            idle,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let kept = self.store.kept_events(AT_ONCE).await?;
            if !kept.is_empty() {
                let published = self.publish(&kept, &|| cx.beat()).await;
                // If a topic refuses events, that is no reason for another process to take over the
                // watchdog's work.
                cx.beat();
                metrics::events_published(
                    published.inspect_err(|_| metrics::events_publish_failed())?,
                );
                let numbers: Vec<i64> = kept.iter().map(|kept| kept.number).collect();
                self.store.remove_events(&numbers).await?;
            }
            metrics::watchdog_step("events", started.elapsed());
            cx.beat();
            let wait = if kept.len() == AT_ONCE as usize {
                BUSY
            } else {
                self.idle
            };
            cx.idle(cx.pause(wait)).await;
        }
        Ok(())
    }

    /// Publishes these events. Returns how many there were.
    async fn publish(&self, kept: &[KeptEvents], beat: &(dyn Fn() + Sync)) -> bus::Result<usize> {
        let mut count = 0;
        for events in layers(kept.iter().flat_map(numbered)) {
            publish_layer(&*self.logs, &events, beat).await?;
            count += events.len();
        }
        Ok(count)
    }
}

/// Publishes events of different tasks. If one is too large, splits them in halves to publish the
/// others.
async fn publish_layer(
    logs: &dyn Logs,
    events: &[Numbered],
    beat: &(dyn Fn() + Sync),
) -> bus::Result<()> {
    // The last part is the next one to publish.
    let mut parts = vec![events];
    while let Some(part) = parts.pop() {
        match (publish_all(logs, part).await, part) {
            (Err(bus::Error::TooLarge { .. }), [event]) => publish_shorter(logs, event).await?,
            (Err(bus::Error::TooLarge { .. }), part) => {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
            }
            (other, _) => other?,
        }
        beat();
    }
    Ok(())
}

async fn publish_all(logs: &dyn Logs, events: &[Numbered]) -> bus::Result<()> {
    let partitions = logs.make(&Log::EVENTS).await?;
    let record = |event: &Numbered| LogRecord {
        partition: partition(event.task, partitions),
        value: event.record.clone(),
        key: event.task.to_string().into(),
        ..LogRecord::default()
    };
    let records: Vec<LogRecord> = events.iter().map(record).collect();
    logs.append(&Log::EVENTS, &records).await?;
    Ok(())
}

/// Publishes an event without the fields that may be large, so that it does not hold up the others.
async fn publish_shorter(logs: &dyn Logs, event: &Numbered) -> bus::Result<()> {
    let shorter =
        wire::short_event(&event.kept).and_then(|short| wire::numbered_event(&short, event.number));
    let record = shorter.map_or_else(|_| event.record.clone(), |(_, record)| record);
    let task = event.task;
    let number = event.number;
    let kept = event.kept.clone();
    match publish_all(
        logs,
        &[Numbered {
            task,
            number,
            kept,
            record,
        }],
    )
    .await
    {
        Err(bus::Error::TooLarge { .. }) => {
            let topic = Log::EVENTS.name;
            tracing::error!(id = %task, "topic {topic} takes no record of this size: an event is lost");
            Ok(())
        }
        other => other,
    }
}

/// Splits the events into layers with at most one event of each task, earlier events in earlier
/// layers.
///
/// After a publish that failed, any part of it may be on the bus. A later event must not be there
/// without the earlier one.
fn layers(events: impl Iterator<Item = Numbered>) -> Vec<Vec<Numbered>> {
    let mut layers: Vec<Vec<Numbered>> = Vec::new();
    let mut of_task: HashMap<TaskId, usize> = HashMap::new();
    for event in events {
        let layer = of_task
            .entry(event.task)
            .and_modify(|layer| *layer += 1)
            .or_default();
        if *layer == layers.len() {
            layers.push(Vec::new());
        }
        layers[*layer].push(event);
    }
    layers
}

/// The partition of a task's events, chosen by the end of its id, which is random.
fn partition(task: TaskId, partitions: u32) -> u32 {
    let [.., a, b, c, d] = *task.as_bytes();
    u32::from_be_bytes([a, b, c, d]) % partitions.max(1)
}

/// The events of a row. Leaves out one that cannot be read, because it would hold up all others.
fn numbered(kept: &KeptEvents) -> Vec<Numbered> {
    let row = kept.number;
    let unread =
        |why: String| tracing::error!("an event of row {row} cannot be read, and is lost: {why}");
    let records = wire::read_kept_events(kept.events.clone())
        .map_err(unread)
        .unwrap_or_default();
    let numbered = |(place, kept): (usize, Bytes)| {
        let number = EventRecord::number(row, place);
        let (task, record) = wire::numbered_event(&kept, number).map_err(unread).ok()?;
        Some(Numbered {
            task,
            number,
            kept,
            record,
        })
    };
    records
        .into_iter()
        .enumerate()
        .filter_map(numbered)
        .collect()
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use parking_lot::Mutex;

    use super::*;
    use crate::{
        bus::{LogEnd, LogMessage, Retention},
        model::{Offset, QueueName},
    };

    /// Logs that reject large records. Keeps what it accepted, and counts the calls.
    #[derive(Default)]
    struct Picky(Mutex<(Vec<Bytes>, usize)>);

    const LARGEST: usize = 1000;

    #[async_trait]
    impl Logs for Picky {
        async fn exists(&self, _log: &Log) -> bus::Result<bool> {
            Ok(true)
        }

        async fn make(&self, _log: &Log) -> bus::Result<u32> {
            Ok(1)
        }

        async fn append(&self, log: &Log, records: &[LogRecord]) -> bus::Result<Vec<Offset>> {
            let mut taken = self.0.lock();
            taken.1 += 1;
            if records.iter().any(|record| record.value.len() > LARGEST) {
                return Err(bus::Error::TooLarge {
                    topic: log.name.clone(),
                    cause: "too large".into(),
                });
            }
            taken
                .0
                .extend(records.iter().map(|record| record.value.clone()));
            Ok(Vec::new())
        }

        async fn delete(&self, _log: &Log) -> bus::Result<()> {
            unreachable!("nobody deletes it")
        }

        async fn read(
            &self,
            _log: &Log,
            _partition: u32,
            _after: Option<Offset>,
            _max: usize,
        ) -> bus::Result<Vec<LogMessage>> {
            unreachable!("nobody reads")
        }

        async fn first(&self, _log: &Log) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!("nobody reads")
        }

        async fn ends(&self, _log: &Log) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!("nobody reads")
        }

        async fn counted_ends(&self, _log: &Log) -> bus::Result<Vec<LogEnd>> {
            unreachable!("nobody reads")
        }

        async fn at_time(&self, _log: &Log, _unix_ms: i64) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!("nobody reads")
        }

        async fn trim(&self, _log: &Log, _keep: Retention) -> bus::Result<u64> {
            unreachable!("nobody trims")
        }
    }

    #[tokio::test]
    async fn around_an_event_that_is_too_large_the_others_go_together_and_in_order() {
        const EVENTS: usize = 1000;
        let event = |n: usize| {
            let key = if n == 700 {
                vec![b'k'; 2 * LARGEST]
            } else {
                n.to_string().into_bytes()
            };
            EventRecord {
                key: key.into(),
                ..EventRecord::new(TaskId::new(), QueueName::new("q").unwrap())
            }
        };
        let events =
            wire::kept_events((0..EVENTS).map(|n| wire::event_record(&event(n))).collect());
        let events = numbered(&KeptEvents {
            number: 1,
            at_unix_ms: 0,
            events,
        });
        let logs = Picky::default();
        let beats = Mutex::new(0);
        publish_layer(&logs, &events, &|| *beats.lock() += 1)
            .await
            .unwrap();
        let (taken, calls) = logs.0.into_inner();
        let taken: Vec<(u64, EventRecord)> = taken
            .iter()
            .map(|record| wire::read_event_record(record).unwrap())
            .collect();
        let numbers: Vec<u64> = taken.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (1000..2000).collect::<Vec<_>>());
        assert_eq!(
            (&taken[700].1.key[..], &taken[701].1.key[..]),
            (&b""[..], &b"701"[..])
        );
        assert!(calls < 25, "{calls} calls");
        assert_eq!(
            beats.into_inner(),
            calls - 1,
            "one is for the shorter event"
        );
    }

    #[test]
    fn an_event_that_cannot_be_read_holds_up_no_other() {
        let event = |id| wire::event_record(&EventRecord::new(id, QueueName::new("q").unwrap()));
        let a = TaskId::new();
        let b = TaskId::new();
        let events = wire::kept_events(vec![event(a), Bytes::from_static(&[0xff]), event(b)]);
        let read = numbered(&KeptEvents {
            number: 7,
            at_unix_ms: 0,
            events,
        });
        let read: Vec<_> = read
            .into_iter()
            .map(|event| (event.task, event.number))
            .collect();
        assert_eq!(read, [(a, 7000), (b, 7002)]);
        assert!(
            numbered(&KeptEvents {
                number: 7,
                at_unix_ms: 0,
                events: "x".into()
            })
            .is_empty()
        );
    }

    #[test]
    fn a_later_event_of_a_task_is_in_a_later_layer() {
        let a = TaskId::new();
        let b = TaskId::new();
        let event = |(number, task): (usize, TaskId)| {
            let number = number as u64;
            let kept = Bytes::new();
            let record = Bytes::new();
            Numbered {
                task,
                number,
                kept,
                record,
            }
        };
        let layers = layers([a, a, b, a, b].into_iter().enumerate().map(event));
        let numbers: Vec<Vec<u64>> = layers
            .iter()
            .map(|layer| layer.iter().map(|event| event.number).collect())
            .collect();
        assert_eq!(numbers, [vec![0, 2], vec![1, 4], vec![3]]);
    }

    #[test]
    fn all_events_of_a_task_have_one_partition_and_tasks_are_spread() {
        let mut tasks = [0; 3];
        for _ in 0..300 {
            let id = TaskId::new();
            assert_eq!((partition(id, 3), partition(id, 1)), (partition(id, 3), 0));
            tasks[partition(id, 3) as usize] += 1;
        }
        assert!(tasks.iter().all(|count| *count > 30), "{tasks:?}");
    }
}
