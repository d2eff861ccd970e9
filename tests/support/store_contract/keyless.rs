//! Tests of tasks that take no key: each is known by its id.

use std::time::Duration;

use taskd::{
    model::{
        Act, KeyHash, Offset, Position, PositionKey, PositionMove, ReadCounts, ReadUpTo,
        StoredStatus, SubscriptionName, TaskCursor, TaskFilter, TaskId, TaskRow, TopicName,
    },
    store::{
        CompletedPage,
        Inserted::{Duplicate, New, Repeated},
        KeptSubscription, NewRow, Retried, Store, TaskSearch,
        Unpublished::{Fresh, Missing},
    },
};

use super::{
    Completed, Database, Dead, NOW, Unfinished, at, completed, count, counts, detail,
    detail_completed, detail_of, died, fresh, in_outbox, insert_new, outbox, publish, row, settled,
    task,
};

fn keyless(part: &str) -> NewRow {
    let id = TaskId::derived_from(&[b"test", part.as_bytes()], NOW);
    fresh(TaskRow {
        id,
        key: Default::default(),
        key_hash: KeyHash::without_key(id),
        ..task("q", part)
    })
}

fn again(row: &NewRow) -> taskd::store::Inserted {
    Repeated { id: row.task.id }
}

async fn ids_in_list(store: &dyn Store) -> Vec<TaskId> {
    let search = TaskSearch {
        filter: TaskFilter {
            queue: Some(super::queue("q")),
            ..TaskFilter::default()
        },
        limit: 100,
        look_at: 1000,
        after: None::<TaskCursor>,
        stays_in_queue: true,
    };
    let page = store.search(&search).await.unwrap();
    let mut ids: Vec<TaskId> = page.tasks.iter().map(|task| task.id).collect();
    ids.sort_unstable();
    ids
}

pub(crate) async fn a_task_without_a_key_is_stored_once(db: &impl Database) {
    let store = db.open().await;
    // They have the same queue and payload, and are different tasks.
    let [a, b, c] = ["a", "b", "c"].map(keyless);
    let with_key = row("q", "k");
    let first = [&a, &with_key, &b, &a].map(Clone::clone);
    assert_eq!(
        store.insert(&first).await.unwrap().answers,
        [New, New, New, again(&a)]
    );
    let second = [&c, &b, &with_key].map(Clone::clone);
    assert_eq!(
        store.insert(&second).await.unwrap().answers,
        [New, again(&b), New]
    );
    let only_old = [&a, &b, &c].map(Clone::clone);
    assert_eq!(
        store.insert(&only_old).await.unwrap().answers,
        [again(&a), again(&b), again(&c)]
    );
    let duplicate = Duplicate {
        id: with_key.task.id,
        status: Unfinished,
    };
    assert_eq!(
        store.insert(&[row("q", "k")]).await.unwrap().answers,
        [duplicate]
    );

    assert_eq!(counts(&*store).await, [count("q", Unfinished, 4)]);
    let mut expected = [&a, &with_key, &b, &c]
        .map(|row| in_outbox(row, Fresh))
        .to_vec();
    expected.sort_by_key(|row| row.task.id);
    let mut stored = outbox(&*store).await;
    stored.sort_by_key(|row| row.task.id);
    assert_eq!(stored, expected, "each is published once");
    assert_eq!(detail_of(&*store, &a).await, detail(&a));
    let mut ids = [&a, &with_key, &b, &c].map(|row| row.task.id);
    ids.sort_unstable();
    assert_eq!(ids_in_list(&*store).await, ids);
    let hashes = [&a, &keyless("nobody's")].map(|row| row.task.key_hash);
    assert_eq!(
        store.key_owners(&hashes).await.unwrap(),
        [(a.task.key_hash, a.task.id, Unfinished)]
    );
    // A process that starts now knows them, too.
    assert_eq!(
        db.open().await.insert(&only_old).await.unwrap().answers,
        [again(&a), again(&b), again(&c)]
    );

    // The id of the task of an old record would make the range of its batch long.
    let mut of_old = keyless("old");
    of_old.task.id = TaskId::derived_from(&[b"old"], NOW - 61_000);
    of_old.task.key_hash = KeyHash::without_key(of_old.task.id);
    // A record with an id has a key, and its task an id of the same form.
    let mut with_key = row("q", "of an old record");
    with_key.task.id = TaskId::derived_from(&[b"old, too"], NOW - 61_000);
    insert_new(&*store, &[of_old, with_key]).await;
    assert_eq!(db.number("SELECT COUNT(*) FROM outbox").await, 2);
}

pub(crate) async fn a_task_without_a_key_ends_like_any_other(db: &impl Database) {
    let store = db.open().await;
    let [done, dead, lost] = ["done", "dead", "lost"].map(keyless);
    let all = [&done, &dead, &lost].map(Clone::clone);
    insert_new(&*store, &all).await;
    publish(&*store, &all, at(1, 0)).await;
    let report = [completed(&done, "w"), died(&dead)];
    assert_eq!(
        store.settle(&report).await.unwrap().answers,
        [settled(Completed), settled(Dead)],
        "no filter has a key to forget"
    );
    assert_eq!(detail_of(&*store, &done).await, detail_completed(&done));
    assert_eq!(
        store.insert(&all).await.unwrap().answers,
        [again(&done), again(&dead), again(&lost)]
    );

    let retried = Retried {
        id: dead.task.id,
        status: StoredStatus::Unfinished,
    };
    let act = "retry";
    assert_eq!(
        store
            .retry_with_acts(&[dead.task.id], NOW, "somebody", act)
            .await
            .unwrap(),
        [retried]
    );
    let came_back: Vec<_> = outbox(&*store)
        .await
        .iter()
        .map(|row| (row.task.id, row.unpublished))
        .collect();
    assert_eq!(came_back, [(dead.task.id, Missing)]);

    // It stays for an hour: the position of its record may not have moved yet.
    let id = done.task.id.0.simple();
    let now = taskd::model::now_unix_ms();
    for (ended_ms, removed) in [(now - 3_500_000, 0), (now - 3_600_000, 1)] {
        db.execute(&format!(
            "UPDATE tasks SET updated_ms = {ended_ms} WHERE id = x'{id}'"
        ))
        .await;
        if removed == 0 {
            // The page is full, and ends the pass nevertheless: the next ones would be as this one.
            let page = CompletedPage {
                queue: super::queue("q"),
                age: Duration::ZERO,
                after: TaskId::FIRST,
                below: TaskId::LAST,
                limit: 1,
            };
            let done = store.remove_completed(&page).await.unwrap();
            assert_eq!((done.removed, done.last), (0, None));
        }
        let found = store.remove_finished(Duration::ZERO, 10).await.unwrap();
        assert_eq!(found, removed);
    }
    // Nothing remains of a removed one, so its id is new again.
    assert_eq!(db.number("SELECT COUNT(*) FROM seen").await, 0);
    assert_eq!(store.key_owners(&[done.task.key_hash]).await.unwrap(), []);
    insert_new(&*store, std::slice::from_ref(&done)).await;

    a_task_stays_until_its_record_was_passed(db, &*store).await;

    // So is that of one that a database set back does not have.
    let id = lost.task.id.0.simple();
    db.execute(&format!("DELETE FROM tasks WHERE id = x'{id}'"))
        .await;
    insert_new(&*store, std::slice::from_ref(&lost)).await;
}

/// Records 5, 6 and 7 of a partition have become tasks, and these have ended long ago.
async fn a_task_stays_until_its_record_was_passed(db: &impl Database, store: &dyn Store) {
    let name = SubscriptionName::new("s").unwrap();
    let key = PositionKey {
        subscription: name.clone(),
        topic: TopicName::new("t").unwrap(),
        partition: 0,
    };
    let at_offset = |major| ReadUpTo {
        after: Some(Offset { major, minor: 0 }),
        count: Some(0),
        replay: 0,
    };
    let subscription = super::subscriptions::subscription("s", "t");
    let begins = [Position {
        key: key.clone(),
        up_to: at_offset(4),
        counts: ReadCounts::default(),
    }];
    let put = Act::new("ops", "put subscription", "s");
    let kept = store.keep_subscription(&subscription, Some(&begins), None, &put);
    assert_eq!(kept.await.unwrap(), KeptSubscription::Yes);
    let ended_ms = taskd::model::now_unix_ms() - 7_200_000;
    for offset in 5..8 {
        let mut of_record = keyless(&format!("of record {offset}"));
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        of_record.task.headers = vec![
            header("taskd-subscription", "s"),
            header("taskd-replay", "0"),
            header("taskd-topic", "t"),
            header("taskd-partition", "0"),
            header("taskd-offset", &format!("{offset}-0")),
        ];
        insert_new(store, std::slice::from_ref(&of_record)).await;
        let report = [completed(&of_record, "w")];
        store.settle(&report).await.unwrap();
        let id = of_record.task.id.0.simple();
        db.execute(&format!(
            "UPDATE tasks SET updated_ms = {} WHERE id = x'{id}'",
            ended_ms + offset
        ))
        .await;
    }
    let mut later = row("q", "ended after them");
    later.task.id = keyless("ended after them").task.id;
    insert_new(store, std::slice::from_ref(&later)).await;
    store.settle(&[completed(&later, "w")]).await.unwrap();

    // Pages of tasks that stay do not hold up the others.
    let mut removed = 0;
    for _ in 0..4 {
        removed += store.remove_finished(Duration::ZERO, 2).await.unwrap();
    }
    assert_eq!(removed, 1, "none of the records was passed");
    let passed = PositionMove {
        key,
        from: at_offset(4),
        to: at_offset(5),
        counts: ReadCounts::default(),
    };
    assert!(store.move_position(&passed).await.unwrap());
    assert_eq!(store.remove_finished(Duration::ZERO, 9).await.unwrap(), 1);
    assert_eq!(store.remove_finished(Duration::ZERO, 9).await.unwrap(), 0);
    // The records are read once more, and become other tasks.
    let seek = Act::new("ops", "seek", "s");
    store.seek(&name, &[], &seek).await.unwrap();
    assert_eq!(store.remove_finished(Duration::ZERO, 9).await.unwrap(), 2);
    let delete = Act::new("ops", "delete subscription", "s");
    assert!(store.delete_subscription(&name, &delete).await.unwrap());
}
