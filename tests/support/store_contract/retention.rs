//! Tests of tasks that finished long ago.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use taskd::{
    model::{Change, KeyHash, Requeue, StoredStatus, TaskId, WorkerName},
    store::{
        CompletedPage,
        Inserted::{Duplicate, New},
        NewRow, Settled, Settlement, Store,
        Unpublished::{Fresh, Missing},
    },
};

use super::{
    Completed, Database, Dead, NOW, Unfinished, at, completed, count, counts, died, discovering,
    first_turn, ids, in_outbox, insert_new, mark, outbox, publish, published, replicated,
    result_of, row, rows,
};

/// Tasks of [`NOW`] are older than this by the database's clock.
pub(crate) const AGE: Duration = Duration::from_secs(24 * 3600);

/// Removes everything that finished long ago, page by page.
async fn remove_finished(store: &dyn Store) -> u64 {
    let mut count = 0;
    loop {
        match store.remove_finished(AGE, 300).await.unwrap() {
            0 => return count,
            some => count += some,
        }
    }
}

pub(crate) async fn what_finished_long_ago_is_removed_and_stays_a_duplicate(db: &impl Database) {
    let store = db.open().await;
    let now = taskd::model::now_unix_ms();
    let [done, dead, cancelled, recent, open] =
        ["done", "dead", "cancelled", "recent", "open"].map(|key| row("q", key));
    let half = replicated("half", 2);
    let all = [&done, &dead, &cancelled, &recent, &open, &half].map(Clone::clone);
    insert_new(&*store, &all).await;
    publish(&*store, &all, at(1, 0)).await;
    let recently = Settlement::Died {
        id: recent.task.id,
        reason: "no luck".into(),
        attempts: 5,
        history: vec![],
        epoch: None,
        at_unix_ms: now,
    };
    // A reservation that ends far in the future is kept when its task ends.
    let reserve = Requeue::To {
        worker: WorkerName::new("w").unwrap(),
        until_unix_ms: Some(i64::MAX),
    };
    store
        .want(
            &[done.task.id, open.task.id],
            &Change::Requeue(reserve),
            NOW,
            &[],
        )
        .await
        .unwrap();
    store
        .settle(&[
            completed(&done, "w"),
            died(&dead),
            recently,
            completed(&half, "w"),
        ])
        .await
        .unwrap();
    db.execute("UPDATE tasks SET status = 3, on_bus = 0 WHERE task_key = x'63616e63656c6c6564'")
        .await;
    assert_eq!(store.remove_finished(Duration::MAX, 10).await.unwrap(), 0);
    let before = counts(&*store).await;

    assert_eq!(store.remove_finished(AGE, 10).await.unwrap(), 3);
    assert_eq!(store.remove_finished(AGE, 10).await.unwrap(), 0);
    assert_eq!(
        db.number("SELECT COUNT(*) FROM changes").await,
        1,
        "of the task that is open"
    );
    for gone in [&done, &dead, &cancelled] {
        assert_eq!(store.task(gone.task.id).await.unwrap(), None);
        assert_eq!(store.results(gone.task.id).await.unwrap(), []);
    }
    for kept in [&recent, &open, &half] {
        assert!(store.task(kept.task.id).await.unwrap().is_some());
    }
    assert_eq!(
        store.results(half.task.id).await.unwrap(),
        [result_of("w", false)]
    );
    let mut states = store.states(&ids(&all)).await.unwrap();
    states.sort_by_key(|state| state.id);
    assert_eq!(
        states.iter().map(|state| state.id).collect::<Vec<_>>(),
        ids(&all[3..])
    );
    assert_eq!(published(&*store).await.len(), 2);
    assert_eq!(
        counts(&*store).await,
        before,
        "what ever finished is counted on"
    );

    // Insert twice: the second time the keys are known to be old. The key of the dead task is free,
    // because its letter is gone.
    let owners =
        |owners: Vec<(KeyHash, TaskId, StoredStatus)>| owners.into_iter().map(|(_, id, _)| id);
    let [hash_of_done, hash_of_dead] = [&done, &dead].map(|row| row.task.key_hash);
    let known = store
        .key_owners(&[hash_of_done, hash_of_dead])
        .await
        .unwrap();
    assert_eq!(owners(known).collect::<Vec<_>>(), [done.task.id]);
    let mut dead_again = None;
    for _ in 0..2 {
        let again = ["done", "new", "dead", "cancelled", "recent", "done"].map(|key| row("q", key));
        let answers = store.insert(&again).await.unwrap().answers;
        let duplicate = |row: &NewRow, status| Duplicate {
            id: row.task.id,
            status,
        };
        let done = duplicate(&done, Completed);
        let [cancelled, recent] = [
            duplicate(&cancelled, StoredStatus::Cancelled),
            duplicate(&recent, Dead),
        ];
        let dead = match &dead_again {
            None => New,
            Some(id) => Duplicate {
                id: *id,
                status: Unfinished,
            },
        };
        assert_eq!(
            [&answers[..1], &answers[2..]].concat(),
            [done, dead, cancelled, recent, done]
        );
        dead_again.get_or_insert(again[2].task.id);
        for again in [&again[0], &again[3]] {
            assert_eq!(store.task(again.task.id).await.unwrap(), None);
        }
    }
    let again = row("q", "new");
    let [
        Duplicate {
            status: Unfinished, ..
        },
    ] = store.insert(&[again]).await.unwrap().answers[..]
    else {
        panic!("it is there")
    };
    assert_eq!(outbox(&*store).await.len(), 2);
    assert_eq!(
        counts(&*store).await[0],
        count("q", Unfinished, before[0].count + 2)
    );
    // A second death and removal frees the key again.
    let id = dead_again.expect("it was inserted again");
    let died = Settlement::Died {
        id,
        reason: String::new(),
        attempts: 1,
        history: vec![],
        epoch: None,
        at_unix_ms: NOW,
    };
    store.settle(&[died]).await.unwrap();
    assert_eq!(remove_finished(&*store).await, 1);
    assert_eq!(
        store.insert(&[row("q", "dead")]).await.unwrap().answers,
        [New]
    );
}

pub(crate) async fn the_earliest_finished_are_removed_first(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 6);
    insert_new(&*store, &batch).await;
    // They finish in a different order from that of their inserts, some completed and some dead.
    let order = [3, 0, 5, 1, 4, 2];
    let report = |(moment, row): (usize, &usize)| {
        let (id, at_unix_ms) = (batch[*row].task.id, NOW + moment as i64);
        match moment % 2 {
            0 => Settlement::Died {
                id,
                reason: String::new(),
                attempts: 1,
                history: vec![],
                epoch: None,
                at_unix_ms,
            },
            _ => match completed(&batch[*row], "w") {
                Settlement::Completed {
                    id,
                    worker,
                    lease,
                    result,
                    encoding,
                    attempt,
                    discovered,
                    joining,
                    ..
                } => {
                    let leased_unix_ms = 0;
                    Settlement::Completed {
                        id,
                        worker,
                        lease,
                        result,
                        encoding,
                        attempt,
                        leased_unix_ms,
                        discovered,
                        joining,
                        at_unix_ms,
                    }
                }
                died => died,
            },
        }
    };
    store
        .settle(&order.iter().enumerate().map(report).collect::<Vec<_>>())
        .await
        .unwrap();

    for removed in [2, 4, 6] {
        assert_eq!(store.remove_finished(AGE, 2).await.unwrap(), 2);
        let mut left: Vec<TaskId> = order[removed..]
            .iter()
            .map(|row| batch[*row].task.id)
            .collect();
        left.sort();
        let mut states: Vec<TaskId> = store
            .states(&ids(&batch))
            .await
            .unwrap()
            .iter()
            .map(|state| state.id)
            .collect();
        states.sort();
        assert_eq!(states, left);
    }
}

pub(crate) async fn the_completed_tasks_of_one_queue_are_removed_page_by_page(db: &impl Database) {
    let store = db.open().await;
    let mut all = rows("q", 12);
    let other = row("other", "k");
    all.push(other.clone());
    insert_new(&*store, &all).await;
    publish(&*store, &all, at(1, 0)).await;
    let [recent, dead, open] = [2, 5, 11].map(|place| all[place].clone());
    let mut reports = vec![died(&dead)];
    for row in &all {
        let mut report = completed(row, "w");
        if row.task.id == recent.task.id
            && let Settlement::Completed { at_unix_ms, .. } = &mut report
        {
            *at_unix_ms = taskd::model::now_unix_ms();
        }
        if ![dead.task.id, open.task.id].contains(&row.task.id) {
            reports.push(report);
        }
    }
    store.settle(&reports).await.unwrap();
    let before = counts(&*store).await;

    let mut page = CompletedPage {
        queue: super::queue("q"),
        age: AGE,
        after: TaskId::FIRST,
        below: TaskId::LAST,
        limit: 4,
    };
    let mut removed = Vec::new();
    loop {
        let done = store.remove_completed(&page).await.unwrap();
        removed.push(done.removed);
        match done.last {
            Some(last) => page.after = last,
            None => break,
        }
    }
    assert_eq!(removed, [3, 4, 2], "a page has four completed tasks");
    let mut left: Vec<TaskId> = Vec::new();
    for state in store.states(&ids(&all)).await.unwrap() {
        left.push(state.id);
    }
    left.sort();
    let mut expected = [&recent, &dead, &open, &other].map(|row| row.task.id);
    expected.sort();
    assert_eq!(left, expected);
    assert_eq!(counts(&*store).await, before);
    // The keys are duplicates, as after any removal.
    let again = row("q", &all[0].task.key);
    let duplicate = Duplicate {
        id: all[0].task.id,
        status: Completed,
    };
    assert_eq!(store.insert(&[again]).await.unwrap().answers, [duplicate]);
    // Nothing of the page is looked at that lies beyond its end.
    let nothing = CompletedPage {
        after: TaskId::FIRST,
        age: Duration::ZERO,
        below: all[0].task.id,
        ..page
    };
    let done = store.remove_completed(&nothing).await.unwrap();
    assert_eq!((done.removed, done.last), (0, None));
}

pub(crate) async fn a_report_of_a_removed_task_changes_nothing(db: &impl Database) {
    let store = db.open().await;
    let parent = replicated("parent", 1);
    let child = row("q", "child");
    insert_new(&*store, std::slice::from_ref(&parent)).await;
    let report = discovering(&parent, "w", vec![child.clone()]);
    store.settle(std::slice::from_ref(&report)).await.unwrap();
    assert_eq!(remove_finished(&*store).await, 1);

    // The report is delivered again, with a surplus one that discovers a new task, and a death.
    let surplus = discovering(&parent, "late", vec![row("q", "other child")]);
    let unknown = Settled {
        unknown: true,
        ..Settled::default()
    };
    let answers = store
        .settle(&[report, surplus, died(&parent)])
        .await
        .unwrap()
        .answers;
    assert_eq!(answers, [unknown.clone(), unknown.clone(), unknown]);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1), count("q", Completed, 1)]
    );
    assert_eq!(outbox(&*store).await, [in_outbox(&child, Fresh)]);
    assert_eq!(store.results(parent.task.id).await.unwrap(), []);

    // Other late operations do not bring it back, either.
    store.unpublish(&[parent.task.id], Missing).await.unwrap();
    mark(&*store, first_turn(&[parent.task.id]), at(9, 9)).await;
    assert_eq!(outbox(&*store).await, [in_outbox(&child, Fresh)]);
    assert_eq!(published(&*store).await, []);
}

pub(crate) async fn a_repeated_insert_of_a_removed_task_is_no_duplicate_of_itself(
    db: &impl Database,
) {
    let store = db.open().await;
    let batch = rows("q", 3);
    insert_new(&*store, &batch).await;
    store.settle(&[completed(&batch[1], "w")]).await.unwrap();
    assert_eq!(remove_finished(&*store).await, 1);
    for _ in 0..2 {
        insert_new(&*store, &batch).await;
        assert_eq!(store.task(batch[1].task.id).await.unwrap(), None);
    }
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 2), count("q", Completed, 1)]
    );
}

pub(crate) async fn discoveries_of_removed_keys_are_duplicates(db: &impl Database) {
    let store = db.open().await;
    let [old, dead, parent] = ["old", "dead", "parent"].map(|key| row("q", key));
    insert_new(&*store, &[old.clone(), dead.clone(), parent.clone()]).await;
    store
        .settle(&[completed(&old, "w"), died(&dead)])
        .await
        .unwrap();
    assert_eq!(remove_finished(&*store).await, 2);

    let children = vec![row("q", "old"), row("q", "new"), row("q", "dead")];
    let answers = store
        .settle(&[discovering(&parent, "w", children)])
        .await
        .unwrap()
        .answers;
    assert_eq!(
        answers[0].discovered,
        [
            Duplicate {
                id: old.task.id,
                status: Completed
            },
            New,
            New
        ]
    );
}

pub(crate) async fn many_old_keys_among_new_ones_are_told_apart(db: &impl Database) {
    let store = db.open().await;
    let old = rows("q", 600);
    insert_new(&*store, &old).await;
    store
        .settle(
            &old.iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    assert_eq!(remove_finished(&*store).await, 600);

    // Few old keys, then many, then few, to cover each way of querying for them.
    for (round, share) in [50, 2, 2, 50, 50].into_iter().enumerate() {
        let key = |i: usize| {
            if i.is_multiple_of(share) {
                format!("key {i}")
            } else {
                format!("{round}: {i}")
            }
        };
        let batch: Vec<NewRow> = (0..600).map(|i| row("q", key(i))).collect();
        let expected = |i: usize| match i % share {
            0 => Duplicate {
                id: old[i].task.id,
                status: Completed,
            },
            _ => New,
        };
        assert_eq!(
            store.insert(&batch).await.unwrap().answers,
            (0..600).map(expected).collect::<Vec<_>>()
        );
    }
}

pub(crate) async fn no_key_is_new_again_while_its_task_is_removed(db: &impl Database) {
    const KEYS: usize = 400;
    let stores = [db.open().await, db.open().await, db.open().await];
    let old = rows("q", KEYS);
    insert_new(&*stores[0], &old).await;
    stores[0]
        .settle(
            &old.iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();

    // Two remove tasks in small pages while two others keep inserting the same keys.
    let remover = |n: usize| {
        let store = Arc::clone(&stores[n]);
        tokio::spawn(async move {
            let mut removed = 0;
            loop {
                match store.remove_finished(AGE, 7).await.unwrap() {
                    // Retry once, because the other remover may have taken this page.
                    0 if store.remove_finished(AGE, 7).await.unwrap() == 0 => return removed,
                    some => removed += some,
                }
            }
        })
    };
    let removers = [0, 1].map(remover);
    let inserter = |n: usize| {
        let (store, old) = (Arc::clone(&stores[n]), old.clone());
        tokio::spawn(async move {
            for round in 0..12 {
                let from = round * 37 % KEYS;
                let some: Vec<&NewRow> = old.iter().cycle().skip(from).take(60).collect();
                let again: Vec<NewRow> = some.iter().map(|old| row("q", &old.task.key)).collect();
                let expected = some.iter().map(|old| Duplicate {
                    id: old.task.id,
                    status: Completed,
                });
                assert_eq!(
                    store.insert(&again).await.unwrap().answers,
                    expected.collect::<Vec<_>>()
                );
            }
        })
    };
    join_all([0, 2].map(inserter))
        .await
        .into_iter()
        .for_each(|done| done.unwrap());
    for remover in removers {
        remover.await.unwrap();
    }
    remove_finished(&*stores[0]).await;
    assert_eq!(stores[0].states(&ids(&old)).await.unwrap(), []);
    assert_eq!(
        counts(&*stores[0]).await,
        [count("q", Completed, KEYS as u64)]
    );
    assert_eq!(outbox(&*stores[0]).await, []);
}
