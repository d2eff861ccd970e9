//! Tests the promises of `taskd::bus::Logs` on each backend.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use taskd::{
    bus::{Log, LogEnd, LogMessage, LogRecord, Logs, Retention},
    model::Offset,
};

use super::bus_contract::{Backend, within};

/// The name of the topic that these tests make.
pub const NAME: &str = "of-users";

/// Generates the tests of the suite, as `bus_contract!` does.
macro_rules! logs_contract {
    ($backend:path) => {
        logs_contract! { $backend:
            a_log_is_read_from_any_offset
            a_log_keeps_keys_attributes_and_ids
            a_log_says_where_a_time_begins
            a_log_is_trimmed_by_number
            a_log_is_trimmed_by_age
            a_trimmed_log_is_read_from_what_is_left
            a_deleted_log_begins_again
            reports_are_logs_with_one_partition
        }
    };
    ($backend:path: $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let backend = $backend().await;
                $crate::support::logs_contract::$test(&backend).await;
                $crate::support::bus_contract::Backend::remove(&backend).await;
            }
        )*
    };
}
pub(crate) use logs_contract;

const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

fn of_users(partitions: u32) -> Log {
    Log {
        name: NAME.into(),
        partitions,
        keep: keep(FOR_EVER, 1_000_000),
        is_report: false,
        is_attached: false,
    }
}

fn keep(age: Duration, records: u64) -> Retention {
    Retention {
        age,
        records,
        bytes: 64 << 20,
    }
}

fn record(partition: u32, value: &str) -> LogRecord {
    LogRecord {
        partition,
        value: value.to_owned().into(),
        ..LogRecord::default()
    }
}

async fn logs(backend: &dyn Backend) -> Arc<dyn Logs> {
    backend.open().await.logs()
}

async fn append(logs: &dyn Logs, log: &Log, records: &[LogRecord]) -> Vec<Offset> {
    within("append", logs.append(log, records))
        .await
        .expect("append")
}

/// Appends `<name>0`, `<name>1`, … to partition 0.
async fn append_many(logs: &dyn Logs, log: &Log, name: &str, count: usize) -> Vec<Offset> {
    let records: Vec<_> = (0..count)
        .map(|n| record(0, &format!("{name}{n}")))
        .collect();
    append(logs, log, &records).await
}

async fn page(
    logs: &dyn Logs,
    log: &Log,
    partition: u32,
    after: Option<Offset>,
    max: usize,
) -> Vec<LogMessage> {
    within("read", logs.read(log, partition, after, max))
        .await
        .expect("read")
}

/// Reads a partition from its beginning until it has `count` records.
pub async fn read(logs: &dyn Logs, log: &Log, partition: u32, count: usize) -> Vec<LogMessage> {
    let mut messages: Vec<LogMessage> = Vec::new();
    within("the records", async {
        while messages.len() < count {
            let after = messages.last().map(|message| message.offset);
            messages.extend(page(logs, log, partition, after, 100).await);
        }
    })
    .await;
    messages
}

fn values(messages: &[LogMessage]) -> Vec<&str> {
    messages
        .iter()
        .map(|message| std::str::from_utf8(&message.record.value).expect("text"))
        .collect()
}

async fn trim(logs: &dyn Logs, log: &Log, keep: Retention) -> u64 {
    within("trim", logs.trim(log, keep)).await.expect("trim")
}

pub async fn a_log_is_read_from_any_offset(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = of_users(2);
    assert_eq!(within("make", logs.make(&log)).await.expect("make"), 2);
    let ends = async || within("ends", logs.ends(&log)).await.expect("ends");
    assert_eq!(ends().await, [None, None]);
    assert!(page(&*logs, &log, 0, None, 10).await.is_empty());

    let records: Vec<_> = (0..100)
        .map(|n| record(n % 2, &format!("r{n}")))
        .chain([record(0, "")])
        .collect();
    let offsets = append(&*logs, &log, &records).await;
    let in_order: Vec<Offset> = offsets.iter().copied().step_by(2).collect();
    assert!(in_order.is_sorted_by(|a, b| a < b), "{in_order:?}");
    assert_eq!(ends().await, [Some(offsets[100]), Some(offsets[99])]);
    let first = within("first", logs.first(&log)).await.expect("first");
    assert_eq!(first, [Some(offsets[0]), Some(offsets[1])]);

    let all = read(&*logs, &log, 0, 51).await;
    let read_offsets: Vec<Offset> = all.iter().map(|message| message.offset).collect();
    assert_eq!(read_offsets, in_order);
    assert_eq!(
        (values(&all)[0], values(&all)[49], values(&all)[50]),
        ("r0", "r98", "")
    );
    let some = page(&*logs, &log, 0, Some(in_order[9]), 3).await;
    assert_eq!(values(&some), ["r20", "r22", "r24"]);
    assert!(
        page(&*logs, &log, 0, Some(offsets[100]), 3)
            .await
            .is_empty()
    );
    // Nobody takes anything from others by reading.
    assert_eq!(read(&*logs, &log, 0, 51).await.len(), 51);

    let refused = within("append", logs.append(&log, &[record(2, "nowhere")])).await;
    assert!(refused.is_err());
}

pub async fn a_log_keeps_keys_attributes_and_ids(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = of_users(1);
    let whole = LogRecord {
        partition: 0,
        value: vec![0, 159, 146, 150].into(),
        key: vec![0, 255].into(),
        attributes: [("lang", "en"), ("tag", "b"), ("tag", "a"), ("empty", "")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        id: "once".to_owned(),
    };
    let records = [whole, record(0, "bare")];
    append(&*logs, &log, &records).await;
    let read = read(&*logs, &log, 0, 2).await;
    let published = read[0].published_unix_ms;
    assert!(published > 1_700_000_000_000, "{published}");
    assert_eq!(
        read.into_iter().map(|m| m.record).collect::<Vec<_>>(),
        records
    );
}

pub async fn a_log_says_where_a_time_begins(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = of_users(1);
    let old = append_many(&*logs, &log, "old", 2).await;
    let published = read(&*logs, &log, 0, 2).await[1].published_unix_ms;
    // The clock of the server has to reach the next millisecond.
    let mut new = append_many(&*logs, &log, "new", 1).await;
    within("a later millisecond", async {
        while read(&*logs, &log, 0, 3)
            .await
            .last()
            .expect("one")
            .published_unix_ms
            <= published
        {
            new.extend(append_many(&*logs, &log, "new", 1).await);
        }
    })
    .await;
    let all = read(&*logs, &log, 0, 2 + new.len()).await;
    let late = all
        .iter()
        .find(|message| message.published_unix_ms > published)
        .expect("one");
    let at = async |ms| within("at", logs.at_time(&log, ms)).await.expect("at")[0];
    let after = at(late.published_unix_ms).await;
    assert!(
        after >= Some(old[1]) && after < Some(late.offset),
        "{after:?}"
    );
    assert_eq!(page(&*logs, &log, 0, after, 1).await[0].offset, late.offset);
    let before = at(1_000_000).await;
    assert_eq!(page(&*logs, &log, 0, before, 1).await[0].offset, old[0]);
    let never = at(late.published_unix_ms + 3_600_000).await;
    assert!(page(&*logs, &log, 0, never, 1).await.is_empty());
    let end = within("ends", logs.ends(&log)).await.expect("ends")[0];
    assert_eq!(never, end, "no place is after the end");
    let counted = within("end", logs.counted_end(&log, 0)).await.expect("end");
    assert_eq!((counted.last, counted.count), (end, all.len() as u64));
    let nothing = Log {
        name: "nothing".into(),
        ..log.clone()
    };
    let at_none = within("at", logs.at_time(&nothing, published)).await;
    assert_eq!(at_none.expect("at"), [None], "it has no records");
}

pub async fn a_log_is_trimmed_by_number(backend: &dyn Backend) {
    let logs = logs(backend).await;
    for log in [Log::DEAD_LETTERS, of_users(1)] {
        append_many(&*logs, &log, "r", 10).await;
        assert_eq!(trim(&*logs, &log, keep(FOR_EVER, 10)).await, 0);
        assert_eq!(trim(&*logs, &log, keep(FOR_EVER, 3)).await, 7);
        assert_eq!(values(&read(&*logs, &log, 0, 3).await), ["r7", "r8", "r9"]);
    }
}

pub async fn a_log_is_trimmed_by_age(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = Log::EXPIRATIONS;
    let published = Instant::now();
    append_many(&*logs, &log, "old", 5).await;
    assert_eq!(trim(&*logs, &log, keep(FOR_EVER, 100)).await, 0);
    // Wait until these records are older than the age; newer ones follow later.
    let age = Duration::from_millis(1500);
    let mut trimmed = 0;
    within("the old ones grow old", async {
        while trimmed < 5 {
            trimmed += trim(&*logs, &log, keep(age, 100)).await;
        }
    })
    .await;
    assert!(published.elapsed() >= age, "they went before their time");
    append_many(&*logs, &log, "new", 2).await;
    assert_eq!(trim(&*logs, &log, keep(FOR_EVER, 100)).await, 0);
    let new = read(&*logs, &log, 0, 2).await;
    assert_eq!(values(&new), ["new0", "new1"]);
    assert_eq!(new[0].number, 5, "those that have left are counted");
}

pub async fn a_trimmed_log_is_read_from_what_is_left(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = of_users(1);
    let offsets = append_many(&*logs, &log, "r", 10).await;
    trim(&*logs, &log, keep(FOR_EVER, 2)).await;
    let first = within("first", logs.first(&log)).await.expect("first");
    assert_eq!(first, [Some(offsets[8])]);
    let left = page(&*logs, &log, 0, Some(offsets[3]), 10).await;
    assert_eq!(values(&left), ["r8", "r9"]);
    let numbers: Vec<u64> = left.iter().map(|one| one.number).collect();
    assert_eq!(numbers, [8, 9]);
    let ends = within("ends", logs.counted_ends(&log)).await.expect("ends");
    let end = LogEnd {
        last: Some(offsets[9]),
        count: 10,
    };
    assert_eq!(ends, [end]);
    let nothing = Log {
        name: "nothing".into(),
        ..log
    };
    let ends = within("ends", logs.counted_ends(&nothing)).await;
    assert_eq!(ends.expect("ends"), [LogEnd::default()]);
}

pub async fn a_deleted_log_begins_again(backend: &dyn Backend) {
    let logs = logs(backend).await;
    let log = of_users(1);
    append_many(&*logs, &log, "old", 3).await;
    within("delete", logs.delete(&log)).await.expect("delete");
    // A broker may know the old topic for a moment.
    within("the log is there again", async {
        while logs.append(&log, &[record(0, "new")]).await.is_err() {}
    })
    .await;
    let last = |messages: &[LogMessage]| values(messages).last().map(|last| (*last).to_owned());
    let read = read(&*logs, &log, 0, 1).await;
    assert_eq!(
        (values(&read)[0], last(&read)),
        ("new", Some("new".to_owned()))
    );
    within("delete", logs.delete(&log)).await.expect("delete");
    within("delete", logs.delete(&log))
        .await
        .expect("it is gone already");
}

pub async fn reports_are_logs_with_one_partition(backend: &dyn Backend) {
    let logs = logs(backend).await;
    for log in Log::REPORTS {
        assert_eq!(within("make", logs.make(&log)).await.expect("make"), 1);
        let refused = within("append", logs.append(&log, &[record(1, "nowhere")])).await;
        assert!(refused.is_err());
        append(&*logs, &log, &[record(0, "report")]).await;
        assert_eq!(values(&read(&*logs, &log, 0, 1).await), ["report"]);
    }
}
