//! Random input for what taskd reads from the bus, from SQL, from files and from its users' hands:
//! no reader panics, and what one accepts is the same after it is written and read again.
//! `src/ingress/fuzz.rs` does it for requests, `lua_state/random.rs` for the records in Redis.

use std::{collections::HashMap, str::FromStr};

use bytes::Bytes;
use proptest::{collection::vec, prelude::*, sample::Index};
use taskd::{
    model::{
        AttemptState, Completed, DeadLetter, Died, FailedAttempt, Failure, LeaseNumber, LeaseToken,
        LetterCursor, LetterKind, NewTask, Offset, QueueName, Roles, Scope, ShardId, TaskId,
        WorkerName,
    },
    wire::{self, time},
};

/// Random bytes, or samples of which some bytes were changed, cut off or repeated.
fn hostile(samples: Vec<Bytes>) -> impl Strategy<Value = Bytes> {
    let change = (any::<Index>(), any::<u8>());
    let damaged = (
        prop::sample::select(samples),
        vec(change, 0..5),
        any::<Index>(),
        0..3_u8,
    );
    let damaged = damaged.prop_map(|(sample, changes, at, kind)| {
        let mut bytes = sample.to_vec();
        for (at, byte) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        let at = at.index(bytes.len() + 1);
        match kind {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_within(at..),
            _ => {}
        }
        bytes
    });
    prop_oneof![1 => vec(any::<u8>(), 0..100), 4 => damaged].prop_map(Bytes::from)
}

fn task() -> NewTask {
    NewTask {
        queue: "q".into(),
        key: "key".into(),
        payload: "payload".into(),
        headers: HashMap::from([("h".into(), "v".into())]),
        replicas: Some(3),
        ..Default::default()
    }
}

/// Records of the topics, each with all that it may have.
fn records() -> Vec<Bytes> {
    let id = TaskId::new();
    let failure = Failure {
        at_unix_ms: 1,
        worker: "w".into(),
        reason: "r".into(),
    };
    let died = Died {
        reason: "r".into(),
        attempts: 3,
        history: vec![failure.clone()],
        epoch: 1,
    };
    let completed = Completed {
        worker: "w".into(),
        result: "{}".into(),
        result_encoding: taskd::model::Encoding::Json,
        discovered: vec![Ok(task())],
        joining: None,
        attempt: 1,
        lease: LeaseNumber {
            generation: 1,
            grant: 2,
        },
        traceparent: String::new(),
        leased_unix_ms: 4,
    };
    let reports = vec![
        wire::with_time(&wire::completed_report(id, completed, 1 << 20).unwrap(), 5),
        wire::died_report(id, died, 7),
    ];
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    let letter = DeadLetter {
        reason: "r".into(),
        at_unix_ms: 3,
        task_id: Some(id),
        queue: "q".into(),
        attempts: 2,
        task: Some(task()),
        history: vec![failure],
        ..Default::default()
    };
    let attempt = FailedAttempt {
        id,
        worker: "w".into(),
        state: AttemptState::Rejected,
        leased_unix_ms: 4,
        at_unix_ms: 5,
        attempt: 1,
        lease: LeaseNumber {
            generation: 1,
            grant: 2,
        },
        reason: "r".into(),
    };
    vec![
        wire::report_batch(Some(&shard), reports, vec![wire::failed_attempt(attempt)]),
        wire::dead_letter(&letter),
    ]
}

/// Checks that a value which was read from a text is written as a text that reads the same.
fn comes_back<T: FromStr + ToString + PartialEq + std::fmt::Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let again = value.to_string().parse::<T>().ok();
        assert_eq!(again, Some(value), "{text:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn records_of_any_kind_are_read_or_refused(bytes in hostile(records())) {
        // A record of some hundred bytes is one of some hundred parts at most.
        if let Ok(reports) = wire::read_reports(&bytes) {
            prop_assert!(reports.reports.len() + reports.failures.len() <= bytes.len());
            for (index, report) in reports.reports.iter().enumerate() {
                let one = wire::read_reports(&wire::one_report(&bytes, index)).unwrap();
                prop_assert_eq!(&one.reports, std::slice::from_ref(report));
            }
        }
        if let Ok(letter) = wire::read_dead_letter(&bytes) {
            prop_assert_eq!(wire::read_dead_letter(&wire::dead_letter(&letter)).unwrap(), letter);
        }
        drop(wire::read_pipeline_record(&bytes));
        drop(wire::read_body(TaskId::new(), &bytes));
        drop(wire::framed_reports(bytes));
    }

    #[test]
    fn texts_of_any_kind_are_read_or_refused(text in text()) {
        comes_back::<LeaseToken>(&text);
        comes_back::<TaskId>(&text);
        comes_back::<LetterCursor>(&text);
        comes_back::<Offset>(&text);
        comes_back::<Scope>(&text);
        comes_back::<Roles>(&text);
        drop(text.parse::<LetterKind>());
        if let Ok(name) = QueueName::new(&text) {
            prop_assert!(name.as_str() == text && text.len() <= 64);
        }
        if let Ok(name) = WorkerName::new(&text) {
            prop_assert!(name.as_str() == text && text.len() <= 128);
        }
        if let Some(at) = time::from_rfc_3339(&text) {
            prop_assert_eq!(time::from_rfc_3339(&taskd::model::to_rfc_3339(at)), Some(at));
        }
    }
}

/// Texts near those that are read.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[a-c.:_-]{0,8}:[0-9]{0,12}:[0-9]{0,21}:[0-9]{0,21}:[0-9]{0,21}",
        "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}.{0,2}",
        "[0-9a-f]{32}",
        "[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9](\\.[0-9]{1,12})?(Z|[+-][0-2][0-9]:[0-5][0-9])",
        "(insert|work|read|admin|,| ){0,5}",
        "[a-z.*,]{0,20}",
        "[0-9]{0,21}-[0-9]{0,21}",
    ]
}
