//! Tests of bulk changes, and of their effect on tasks.

use taskd::{
    model::{
        Act, BulkAction, BulkChange, BulkProgress, BulkState, Scope, SecretHash, TaskCursor,
        TaskFilter, TaskId, TaskStatus, WorkerName,
    },
    store::{AddedBulk, MOST_BULK_CHANGES, Retried, Store},
};
use uuid::{Timestamp, Uuid};

use super::{
    Database, Dead, NOW, Unfinished, completed, count, counts, died, ids, insert_new, queue, rows,
};

fn filter() -> TaskFilter {
    TaskFilter {
        queue: Some(queue("q")),
        statuses: vec![TaskStatus::Dead, TaskStatus::Cancelled],
        key_prefix: b"\xff'".to_vec().into(),
        headers: vec![("h".into(), "\u{1F980}".into())],
        worker: WorkerName::new("w").ok(),
        until_unix_ms: Some(NOW),
        ..Default::default()
    }
}

fn bulk_change() -> BulkChange {
    BulkChange {
        id: Uuid::now_v7(),
        change: BulkAction::Retry,
        filter: filter(),
        who: "ops".into(),
        scope: "a,b*".parse::<Scope>().unwrap(),
        token: Some(SecretHash([1; 32])),
        state: BulkState::Running,
        progress: BulkProgress::default(),
        created_unix_ms: NOW,
        updated_unix_ms: NOW,
    }
}

fn act(what: &str) -> Act {
    Act::new("ops", what, "it")
}

pub(crate) async fn a_bulk_change_goes_on_where_it_stands(db: &impl Database) {
    let store = db.open().await;
    let (first, second) = (bulk_change(), bulk_change());
    // A repeated call finds that it was already added.
    let start = act("start");
    for _ in 0..2 {
        assert_eq!(
            store
                .add_bulk_change(&first, MOST_BULK_CHANGES, &start)
                .await
                .unwrap(),
            AddedBulk::Yes
        );
    }
    assert_eq!(
        store
            .add_bulk_change(&second, MOST_BULK_CHANGES, &act("start"))
            .await
            .unwrap(),
        AddedBulk::Yes
    );
    assert_eq!(
        store.bulk_change(first.id).await.unwrap().as_ref(),
        Some(&first)
    );
    assert_eq!(store.bulk_change(Uuid::now_v7()).await.unwrap(), None);
    assert_eq!(
        store.running_bulk_changes().await.unwrap(),
        [first.clone(), second.clone()],
        "the earliest first"
    );
    assert_eq!(
        store.bulk_changes(None, 10).await.unwrap(),
        [second.clone(), first.clone()],
        "the latest first"
    );
    assert_eq!(
        store.bulk_changes(Some(second.id), 10).await.unwrap(),
        std::slice::from_ref(&first)
    );
    assert_eq!(
        store.bulk_changes(None, 1).await.unwrap(),
        std::slice::from_ref(&second)
    );
    assert_eq!(store.acts(None, 10).await.unwrap().len(), 2);

    // If two leaders have the same page, only one can store it.
    let cursor = Some(TaskCursor(TaskId::new()));
    let progress = BulkProgress {
        cursor,
        looked_at: 7,
        matched: 5,
        changed: 4,
        failed: 1,
        last_error: "no".into(),
    };
    let ahead = BulkChange {
        progress,
        updated_unix_ms: NOW + 1,
        ..first.clone()
    };
    assert!(store.advance_bulk_change(&ahead, None).await.unwrap());
    let late = BulkChange {
        progress: BulkProgress {
            matched: 9,
            ..ahead.progress.clone()
        },
        ..first.clone()
    };
    assert!(!store.advance_bulk_change(&late, None).await.unwrap());
    assert_eq!(
        db.open()
            .await
            .bulk_change(first.id)
            .await
            .unwrap()
            .as_ref(),
        Some(&ahead)
    );
    let done = BulkChange {
        state: BulkState::Done,
        ..ahead.clone()
    };
    assert!(store.advance_bulk_change(&done, cursor).await.unwrap());
    assert!(
        !store.advance_bulk_change(&ahead, cursor).await.unwrap(),
        "it has ended"
    );
    assert_eq!(
        store.running_bulk_changes().await.unwrap(),
        std::slice::from_ref(&second)
    );

    // A stop ends a running bulk change, but does not affect one that has ended.
    let (stop, too_late) = (act("stop"), act("too late"));
    let progress = BulkProgress {
        last_error: "why".into(),
        ..second.progress.clone()
    };
    let stopped = BulkChange {
        state: BulkState::Stopped,
        progress,
        updated_unix_ms: NOW + 5,
        ..second.clone()
    };
    for _ in 0..2 {
        assert_eq!(
            store
                .stop_bulk_change(second.id, NOW + 5, Some("why"), &stop)
                .await
                .unwrap(),
            Some(stopped.clone())
        );
    }
    assert_eq!(
        store
            .stop_bulk_change(first.id, NOW + 5, Some("late"), &too_late)
            .await
            .unwrap(),
        Some(done)
    );
    assert_eq!(
        store
            .stop_bulk_change(Uuid::now_v7(), NOW, None, &too_late)
            .await
            .unwrap(),
        None
    );
    assert!(
        !store.advance_bulk_change(&second, None).await.unwrap(),
        "a page that comes late changes no stopped bulk change"
    );
    assert_eq!(store.running_bulk_changes().await.unwrap(), []);
    let acts = store.acts(None, 10).await.unwrap();
    assert_eq!(
        acts.iter().map(|act| &act.what[..]).collect::<Vec<_>>(),
        ["stop", "start", "start"]
    );
}

pub(crate) async fn bulk_changes_are_bounded_and_those_of_a_later_taskd_are_left_to_it(
    db: &impl Database,
) {
    let store = db.open().await;
    let created_unix_ms = NOW - 40 * 24 * 3_600_000;
    let id = Uuid::new_v7(Timestamp::from_unix_time(
        created_unix_ms.unsigned_abs() / 1000,
        0,
        0,
        0,
    ));
    let old = BulkChange {
        id,
        state: BulkState::Done,
        created_unix_ms,
        ..bulk_change()
    };
    assert_eq!(
        store
            .add_bulk_change(&old, MOST_BULK_CHANGES, &act("start"))
            .await
            .unwrap(),
        AddedBulk::Yes
    );
    assert!(store.bulk_change(old.id).await.unwrap().is_some());
    // The bulk changes of one token have a separate limit.
    let of_token = BulkChange {
        token: Some(SecretHash([7; 32])),
        ..bulk_change()
    };
    assert_eq!(
        store
            .add_bulk_change(&of_token, 1, &act("start"))
            .await
            .unwrap(),
        AddedBulk::Yes
    );
    assert_eq!(
        store
            .add_bulk_change(&of_token, 1, &act("start"))
            .await
            .unwrap(),
        AddedBulk::Yes,
        "a repeated call"
    );
    let another = BulkChange {
        id: Uuid::now_v7(),
        ..of_token.clone()
    };
    assert_eq!(
        store
            .add_bulk_change(&another, 1, &act("start"))
            .await
            .unwrap(),
        AddedBulk::NoRoomForToken
    );
    let of_another = BulkChange {
        id: Uuid::now_v7(),
        token: Some(SecretHash([8; 32])),
        ..of_token.clone()
    };
    assert_eq!(
        store
            .add_bulk_change(&of_another, 1, &act("start"))
            .await
            .unwrap(),
        AddedBulk::Yes
    );
    let mut all = Vec::new();
    for _ in 2..MOST_BULK_CHANGES {
        all.push(bulk_change());
        let added = store
            .add_bulk_change(all.last().unwrap(), MOST_BULK_CHANGES, &act("start"))
            .await
            .unwrap();
        assert_eq!(added, AddedBulk::Yes);
    }
    assert_eq!(
        store.bulk_change(old.id).await.unwrap(),
        None,
        "it ended long ago"
    );
    assert_eq!(
        store
            .add_bulk_change(&bulk_change(), MOST_BULK_CHANGES, &act("start"))
            .await
            .unwrap(),
        AddedBulk::NoRoom
    );
    let again = store
        .add_bulk_change(&all[0], MOST_BULK_CHANGES, &act("start"))
        .await
        .unwrap();
    assert_eq!(again, AddedBulk::Yes, "a repeated call has its bulk change");
    db.execute("UPDATE bulk_changes SET what = 'paint'").await;
    assert_eq!(
        (
            store.running_bulk_changes().await.unwrap(),
            store.bulk_changes(None, 10).await.unwrap()
        ),
        (vec![], vec![])
    );
    assert!(store.bulk_change(all[0].id).await.is_err());
}

pub(crate) async fn each_task_that_is_sent_again_has_its_act(db: &impl Database) {
    let store = db.open().await;
    let rows = rows("q", 4);
    insert_new(&*store, &rows).await;
    store
        .settle(&[died(&rows[0]), died(&rows[1]), completed(&rows[2], "w")])
        .await
        .unwrap();
    let named = [ids(&rows), vec![TaskId::new()]].concat();
    let mut retried = store
        .retry_with_acts(&named, NOW, "ops", "retry task")
        .await
        .unwrap();
    retried.sort_unstable_by_key(|retried| retried.id);
    let expected = |row: usize| Retried {
        id: rows[row].task.id,
        status: Unfinished,
    };
    assert_eq!(retried, [expected(0), expected(1)]);
    let acts = async || {
        let mut targets: Vec<String> = Vec::new();
        for act in store.acts(None, 10).await.unwrap() {
            assert_eq!((&act.who[..], &act.what[..]), ("ops", "retry task"));
            targets.push(act.target);
        }
        targets.sort_unstable();
        targets
    };
    let mut targets = [0, 1].map(|row| rows[row].task.id.to_string());
    targets.sort_unstable();
    assert_eq!(acts().await, targets);
    // The second time nothing is dead, so nothing is recorded.
    assert_eq!(
        store
            .retry_with_acts(&named, NOW, "ops", "retry task")
            .await
            .unwrap(),
        []
    );
    assert_eq!(acts().await, targets);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 3), count("q", super::Completed, 1)]
    );
    assert_eq!(
        store
            .listed(&[rows[0].task.id, TaskId::new()])
            .await
            .unwrap()[0]
            .epoch,
        1
    );
    assert!(
        store
            .listed(&ids(&rows))
            .await
            .unwrap()
            .iter()
            .all(|task| task.status != Dead)
    );
}
