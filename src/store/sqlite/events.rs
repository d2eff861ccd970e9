//! The cost of events: none if they are off, and little if they are on.

use super::{SqliteStore, sql::plans::Asked};
use crate::{
    config::{EventQueues, QueueSettings, Queues, Settings},
    model::{Encoding, LeaseNumber, NewTask, TaskId, validate},
    store::{NewRow, Operators as _, Settlement, Tasks as _, Unpublished},
};

fn rows(prefix: &str) -> Vec<NewRow> {
    let row = |n: usize| {
        let task = NewTask {
            queue: "q".into(),
            key: format!("{prefix} {n}").into(),
            ..Default::default()
        };
        let task = validate::task_row(
            task,
            TaskId::new(),
            &Settings::default().task_rules("q"),
            1,
            1,
        )
        .unwrap();
        NewRow {
            task,
            unpublished: Unpublished::Fresh,
            due_unix_ms: 0,
        }
    };
    (0..100).map(row).collect()
}

fn completed(row: &NewRow) -> Settlement {
    Settlement::Completed {
        id: row.task.id,
        worker: "w".into(),
        lease: LeaseNumber {
            generation: 1,
            grant: 1,
        },
        result: "r".into(),
        encoding: Encoding::Text,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: 1,
        discovered: Vec::new(),
        joining: None,
    }
}

/// The work for inserting a hundred tasks, and for settling them. Each statement is also checked
/// for table scans.
async fn asked(store: &SqliteStore, prefix: &str) -> [Asked; 2] {
    let rows = rows(prefix);
    store.asked();
    store.insert(&rows).await.unwrap();
    let insert = store.asked();
    store
        .settle(&rows.iter().map(completed).collect::<Vec<_>>())
        .await
        .unwrap();
    [insert, store.asked()]
}

#[tokio::test]
async fn events_cost_a_row_for_each_transaction_and_nothing_where_they_are_off() {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None)
        .await
        .unwrap();
    let never = asked(&store, "never").await;
    let of = |events| QueueSettings {
        events,
        ..Default::default()
    };
    // On for all queues except this one.
    let named = [(rows("")[0].task.queue.clone(), of(false))].into();
    store.keep_events_of(EventQueues::of(&Queues {
        default: of(true),
        named,
    }));
    assert_eq!(asked(&store, "off").await, never);
    assert_eq!(store.kept_events(10).await.unwrap(), []);

    store.keep_events_of(EventQueues::of(&Queues {
        default: of(true),
        ..Default::default()
    }));
    let [insert, settle] = asked(&store, "on").await;
    let more = |on: Asked, off: Asked| {
        (
            on.commits - off.commits,
            on.statements - off.statements,
            on.rows - off.rows,
        )
    };
    assert_eq!(more(insert, never[0]), (0, 1, 1));
    assert_eq!(
        more(settle, never[1]),
        (0, 2, 1),
        "it reads what the tasks have become"
    );
    let kept = store.kept_events(10).await.unwrap();
    assert_eq!(kept.len(), 2);
    store
        .remove_events(&kept.iter().map(|row| row.number).collect::<Vec<_>>())
        .await
        .unwrap();
}
