//! Tests of sequences: of the tasks of one, only the first unfinished one leaves SQL.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use taskd::{
    model::{Change, OnDead, Sequence, Update, sequence_hash},
    store::{
        BEFORE_COUNTED, Decided, EndedChange, Inserted, SequencePlace, Stored,
        Unpublished::{Behind, Missing, Scheduled},
        Wanted,
    },
};

use super::*;

fn in_sequence(name: &str, key: &str) -> NewRow {
    with(name, key, OnDead::Next)
}

fn holding(name: &str, key: &str) -> NewRow {
    with(name, key, OnDead::Hold)
}

fn with(name: &str, key: &str, on_dead: OnDead) -> NewRow {
    fresh(TaskRow {
        sequence: Some(Sequence {
            name: name.to_owned(),
            on_dead,
        }),
        ..task("q", key)
    })
}

/// The tasks that may be published now, by id.
async fn due(store: &dyn Store) -> Vec<TaskId> {
    let mut ids: Vec<TaskId> = outbox(store).await.iter().map(|row| row.task.id).collect();
    ids.sort_unstable();
    ids
}

async fn why(store: &dyn Store, row: &NewRow) -> Option<Unpublished> {
    match store.place("g", row.task.id).await.unwrap()? {
        Place::Off { why, .. } => Some(why),
        Place::On(_) => None,
    }
}

async fn place(store: &dyn Store, row: &NewRow) -> SequencePlace {
    store.sequence_place(row.task.id).await.unwrap().unwrap()
}

async fn waiting(store: &dyn Store) -> u64 {
    let waiting = store.waiting_in_sequences().await.unwrap();
    waiting.iter().map(|(_, count)| count).sum()
}

fn released(stored: &Stored<Settled>) -> Vec<TaskId> {
    stored.released.iter().map(|row| row.task.id).collect()
}

/// Asserts that nothing waits, that no row of a sequence is left, and that fsck finds nothing.
async fn is_over<D: Database>(db: &D, store: &dyn Store) {
    assert_eq!(waiting(store).await, 0);
    assert_eq!(db.number("SELECT COUNT(*) FROM sequences").await, 0);
    assert_eq!(
        db.number("SELECT COUNT(*) FROM outbox WHERE state = 5")
            .await,
        0
    );
    assert_eq!(broken(store).await, 0);
}

async fn broken(store: &dyn Store) -> usize {
    let mut count = 0;
    let mut after = None;
    loop {
        let page = store.broken_sequences(after).await.unwrap();
        count += page.broken.len();
        after = page.next;
        if after.is_none() {
            return count;
        }
    }
}

async fn settle(store: &dyn Store, reports: &[Settlement]) -> Vec<TaskId> {
    released(&store.settle(reports).await.unwrap())
}

async fn cancel(store: &dyn Store, rows: &[&NewRow]) {
    let shards: Vec<ShardId> = rows
        .iter()
        .map(|row| ShardId {
            queue: row.task.queue.clone(),
            number: row.task.partition,
        })
        .collect();
    store.open_shards(&shards).await.unwrap();
    let ids: Vec<TaskId> = rows.iter().map(|row| row.task.id).collect();
    let wanted = store.want(&ids, &Change::Cancel, NOW, &[]).await.unwrap();
    let ends: Vec<EndedChange> = wanted
        .iter()
        .map(|wanted| match wanted {
            Wanted::Kept(kept) => EndedChange {
                id: kept.task.id,
                turn: Some(kept.turn),
                end: Decided::Cancelled {
                    epoch: kept.task.epoch,
                    generation: 1,
                },
            },
            other => panic!("{other:?}"),
        })
        .collect();
    store.end_changes(&ends, NOW + 30).await.unwrap();
}

async fn send_again(store: &dyn Store, row: &NewRow) {
    let again = store
        .retry_with_acts(&[row.task.id], NOW + 100, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(again[0].status, Unfinished);
}

/// The bytes of a text as both databases read them.
fn hex(text: &str) -> String {
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("x'{hex}'")
}

pub(crate) async fn tasks_of_a_sequence_leave_sql_one_after_the_other<D: Database>(db: &D) {
    let store = db.open().await;
    let [a1, a2, a3] = ["a1", "a2", "a3"].map(|key| in_sequence("a", key));
    let b1 = in_sequence("b", "b1");
    let plain = row("q", "plain");
    // A duplicate takes no place.
    let double = NewRow {
        task: TaskRow {
            id: TaskId::new(),
            ..a1.task.clone()
        },
        ..a1.clone()
    };
    let rows = [&a1, &a2, &double, &plain, &b1].map(Clone::clone);
    let stored = store.insert(&rows).await.unwrap();
    let duplicate = Inserted::Duplicate {
        id: a1.task.id,
        status: Unfinished,
    };
    assert_eq!(stored.answers, [New, New, duplicate, New, New]);
    assert_eq!(stored.behind, HashSet::from([a2.task.id]));
    assert_eq!(stored.turn_of(&a1), Some(stored.batch));
    assert_eq!(stored.turn_of(&a2), None);
    // A repeated call changes nothing, and later rows come after the earlier ones.
    let again = store.insert(&[a2.clone(), a3.clone()]).await.unwrap();
    assert_eq!(again.answers, [New, New]);
    assert_eq!(again.behind, HashSet::from([a2.task.id, a3.task.id]));
    let again = store.insert(&[a1.clone(), a2.clone()]).await.unwrap();
    assert_eq!(again.turn_of(&a1), Some(again.batch));
    assert_eq!(
        again.turn_of(&a2),
        None,
        "a repeat publishes nothing that waits"
    );
    // Not even if somebody marks it with the turn of a task that had its own row.
    let marked = Published {
        partition: a2.task.partition,
        offset: at(0, 1),
        tasks: vec![(a2.task.id, Turn::FIRST)],
    };
    store.mark_published("g", &[marked]).await.unwrap();
    assert_eq!(waiting(&*store).await, 2);
    let mut first = ids(&[a1.clone(), b1.clone(), plain.clone()]);
    first.sort_unstable();
    assert_eq!(due(&*store).await, first);
    assert_eq!(why(&*store, &a2).await, Some(Behind));
    let place_of = |before| SequencePlace {
        name: "a".to_owned(),
        head: a1.task.id,
        is_held: false,
        before,
    };
    assert_eq!(place(&*store, &a1).await, place_of(0));
    assert_eq!(place(&*store, &a2).await, place_of(1));
    assert_eq!(place(&*store, &a3).await, place_of(2));
    const { assert!(BEFORE_COUNTED > 2) };
    assert_eq!(store.sequence_place(plain.task.id).await.unwrap(), None);
    assert_eq!(broken(&*store).await, 0);
    let mut found = store.task(a2.task.id).await.unwrap().unwrap();
    assert_eq!(found.task.sequence, a2.task.sequence);
    found = store.task(plain.task.id).await.unwrap().unwrap();
    assert_eq!(found.task.sequence, None);

    publish(&*store, &[a1.clone(), b1.clone(), plain.clone()], at(1, 0)).await;
    assert_eq!(settle(&*store, &[completed(&b1, "w")]).await, []);
    let done = [completed(&a1, "w"), completed(&plain, "w")];
    let stored = store.settle(&done).await.unwrap();
    assert_eq!(released(&stored), [a2.task.id]);
    assert_eq!(stored.released[0].task, a2.task);
    assert!(stored.released[0].is_as_new);
    // A repeat of the report releases nothing more, and until the caller has published the task, the
    // outbox has it.
    assert_eq!(settle(&*store, &done).await, []);
    assert_eq!(due(&*store).await, [a2.task.id]);
    assert_eq!(waiting(&*store).await, 1);
    let published = Published {
        partition: a2.task.partition,
        offset: at(2, 0),
        tasks: vec![(a2.task.id, stored.released[0].turn)],
    };
    store.mark_published("g", &[published]).await.unwrap();
    assert_eq!(due(&*store).await, []);
    assert_eq!(why(&*store, &a2).await, None);
    assert_eq!(settle(&*store, &[completed(&a2, "w")]).await, [a3.task.id]);
    assert_eq!(settle(&*store, &[completed(&a3, "w")]).await, []);
    is_over(db, &*store).await;
    // Somebody who was held up stores what has ended: it does not go again.
    let late = store.insert(&[a2.clone(), a3.clone()]).await.unwrap();
    assert_eq!([late.turn_of(&a2), late.turn_of(&a3)], [None, None]);
    assert_eq!(counts(&*store).await, [count("q", Completed, 5)]);
    // A sequence begins again after it was gone.
    let a4 = in_sequence("a", "a4");
    assert!(store.insert(&[a4]).await.unwrap().behind.is_empty());
}

pub(crate) async fn a_death_lets_the_next_one_go_or_holds_it<D: Database>(db: &D) {
    let store = db.open().await;
    let [a1, a2] = ["a1", "a2"].map(|key| in_sequence("a", key));
    let [h1, h2, h3] = ["h1", "h2", "h3"].map(|key| holding("h", key));
    let rows = [&a1, &a2, &h1, &h2, &h3].map(Clone::clone);
    insert_new(&*store, &rows).await;
    publish(&*store, &[a1.clone(), h1.clone()], at(1, 0)).await;
    assert_eq!(settle(&*store, &[died(&a1), died(&h1)]).await, [a2.task.id]);
    assert_eq!(why(&*store, &h2).await, Some(Behind));
    let held = place(&*store, &h2).await;
    assert_eq!((held.head, held.is_held), (h1.task.id, true));
    assert_eq!(broken(&*store).await, 0);
    // Sent again, it is the first again.
    send_again(&*store, &h1).await;
    assert_eq!(why(&*store, &h1).await, Some(Missing));
    assert_eq!(why(&*store, &h2).await, Some(Behind));
    let again = Settlement::Died {
        id: h1.task.id,
        reason: "again".into(),
        attempts: 5,
        history: vec![],
        epoch: None,
        at_unix_ms: NOW + 200,
    };
    assert_eq!(settle(&*store, &[again]).await, []);
    // Purged, it holds nothing up.
    assert_eq!(store.purge(&[h1.task.id]).await.unwrap(), 1);
    assert_eq!(why(&*store, &h2).await, Some(Fresh));
    assert_eq!(due(&*store).await.len(), 2);
    // So does one that is removed with age.
    publish(&*store, std::slice::from_ref(&h2), at(2, 0)).await;
    assert_eq!(settle(&*store, &[died(&h2)]).await, []);
    assert_eq!(
        store.remove_finished(Duration::ZERO, 10).await.unwrap(),
        2,
        "a1 and h2"
    );
    assert_eq!(why(&*store, &h3).await, Some(Fresh));
    settle(&*store, &[completed(&h3, "w"), completed(&a2, "w")]).await;
    is_over(db, &*store).await;
}

pub(crate) async fn a_task_that_dies_while_it_waits_holds_at_its_place<D: Database>(db: &D) {
    let store = db.open().await;
    let [d1, d2, d3] = ["d1", "d2", "d3"].map(|key| holding("d", key));
    insert_new(&*store, &[&d1, &d2, &d3].map(Clone::clone)).await;
    publish(&*store, std::slice::from_ref(&d1), at(1, 0)).await;
    assert_eq!(settle(&*store, &[died(&d2)]).await, []);
    // It is dead, so it is not counted among the unfinished tasks that wait.
    assert_eq!(waiting(&*store).await, 1);
    let off_bus = store.off_bus().await.unwrap();
    assert_eq!(off_bus.get(&(queue("q"), Behind)), Some(&1));
    assert_eq!(broken(&*store).await, 0);
    assert_eq!(store.wrong_counts().await.unwrap(), []);
    assert_eq!(settle(&*store, &[completed(&d1, "w")]).await, []);
    assert_eq!(due(&*store).await, []);
    let held = place(&*store, &d3).await;
    assert_eq!(
        (held.head, held.is_held, held.before),
        (d2.task.id, true, 1)
    );
    assert_eq!(broken(&*store).await, 0);
    send_again(&*store, &d2).await;
    assert_eq!(why(&*store, &d2).await, Some(Missing));
    assert_eq!(why(&*store, &d3).await, Some(Behind));
    assert_eq!(settle(&*store, &[completed(&d2, "w")]).await, [d3.task.id]);
    assert_eq!(settle(&*store, &[completed(&d3, "w")]).await, []);
    is_over(db, &*store).await;

    // One is sent again while it waits, one is completed by a late worker, one is purged.
    let [e1, e2, e3, e4, e5] = ["e1", "e2", "e3", "e4", "e5"].map(|key| holding("e", key));
    insert_new(&*store, &[&e1, &e2, &e3, &e4, &e5].map(Clone::clone)).await;
    assert_eq!(
        settle(&*store, &[died(&e2), died(&e3), died(&e4)]).await,
        []
    );
    assert_eq!(waiting(&*store).await, 1);
    send_again(&*store, &e2).await;
    assert_eq!(why(&*store, &e2).await, Some(Behind));
    assert_eq!(waiting(&*store).await, 2);
    settle(&*store, &[completed(&e3, "late")]).await;
    let again = store
        .retry_with_acts(&[e3.task.id], NOW + 100, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(again[0].status, Completed);
    assert_eq!(store.purge(&[e4.task.id]).await.unwrap(), 1);
    assert_eq!(waiting(&*store).await, 2);
    assert_eq!(broken(&*store).await, 0);
    assert_eq!(settle(&*store, &[completed(&e1, "w")]).await, []);
    assert_eq!(due(&*store).await, [e2.task.id]);
    assert_eq!(settle(&*store, &[completed(&e2, "w")]).await, [e5.task.id]);
    assert_eq!(settle(&*store, &[completed(&e5, "w")]).await, []);
    is_over(db, &*store).await;

    // Sent again in one call: the head is completed by a late worker, and the one before it goes.
    let f1 = in_sequence("f", "f1");
    let [f2, f3] = ["f2", "f3"].map(|key| holding("f", key));
    insert_new(&*store, &[&f1, &f2, &f3].map(Clone::clone)).await;
    assert_eq!(settle(&*store, &[died(&f1)]).await, [f2.task.id]);
    let ends = [died(&f2), completed(&f2, "late")];
    assert_eq!(settle(&*store, &ends).await, []);
    let again = store
        .retry_with_acts(&[f1.task.id, f2.task.id], NOW + 100, "ops", "retry")
        .await
        .unwrap();
    let mut statuses: Vec<StoredStatus> = again.iter().map(|again| again.status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [Unfinished, Completed]);
    assert_eq!(why(&*store, &f1).await, Some(Missing));
    assert_eq!(why(&*store, &f3).await, Some(Behind));
    assert_eq!(settle(&*store, &[completed(&f1, "w")]).await, [f3.task.id]);
    assert_eq!(settle(&*store, &[completed(&f3, "w")]).await, []);
    is_over(db, &*store).await;
    assert_eq!(store.wrong_counts().await.unwrap(), []);
}

pub(crate) async fn a_task_sent_again_waits_at_its_old_place<D: Database>(db: &D) {
    let store = db.open().await;
    let rows: Vec<NewRow> = (0..6).map(|n| in_sequence("a", &n.to_string())).collect();
    insert_new(&*store, &rows).await;
    publish(&*store, &rows[..1], at(1, 0)).await;
    // The first two die, the fifth is cancelled while it waits.
    assert_eq!(settle(&*store, &[died(&rows[0])]).await, [rows[1].task.id]);
    assert_eq!(settle(&*store, &[died(&rows[1])]).await, [rows[2].task.id]);
    cancel(&*store, &[&rows[4]]).await;
    assert_eq!(waiting(&*store).await, 2);
    for sent in [4, 1, 0] {
        send_again(&*store, &rows[sent]).await;
        assert_eq!(why(&*store, &rows[sent]).await, Some(Behind), "{sent}");
    }
    assert_eq!(waiting(&*store).await, 5);
    // The third goes on; then all in the order of their inserts. Those that were sent again are not
    // as new: the watchdog publishes them.
    for (done, next) in [
        (2, Some(0)),
        (0, Some(1)),
        (1, Some(3)),
        (3, Some(4)),
        (4, Some(5)),
        (5, None),
    ] {
        let released = settle(&*store, &[completed(&rows[done], "w")]).await;
        let is_new = matches!(next, Some(3 | 5));
        assert_eq!(released.len(), usize::from(is_new), "after {done}");
        let next: Vec<TaskId> = next
            .iter()
            .map(|next: &usize| rows[*next].task.id)
            .collect();
        assert_eq!(due(&*store).await, next, "after {done}");
    }
    is_over(db, &*store).await;
}

pub(crate) async fn tasks_that_end_while_they_wait_leave_their_sequence<D: Database>(db: &D) {
    let store = db.open().await;
    let rows: Vec<NewRow> = (0..5).map(|n| in_sequence("a", &n.to_string())).collect();
    insert_new(&*store, &rows).await;
    // One by a deadline, one by a cancellation, and the head with the one after it at once.
    assert_eq!(settle(&*store, &[died(&rows[1])]).await, []);
    cancel(&*store, &[&rows[3]]).await;
    assert_eq!(waiting(&*store).await, 2);
    cancel(&*store, &[&rows[0], &rows[2]]).await;
    assert_eq!(waiting(&*store).await, 0);
    assert_eq!(due(&*store).await, [rows[4].task.id]);
    cancel(&*store, &[&rows[4]]).await;
    is_over(db, &*store).await;
}

pub(crate) async fn a_sequence_goes_on_through_discoveries_and_higher_num<D: Database>(db: &D) {
    let store = db.open().await;
    let [a1, a2, a3] = ["a1", "a2", "a3"].map(|key| in_sequence("a", key));
    insert_new(&*store, &[a1.clone(), a2.clone()]).await;
    // A discovered task goes behind those that wait, though its report ends the first.
    let report = discovering(&a1, "w", vec![a3.clone()]);
    let stored = store.settle(&[report]).await.unwrap();
    assert_eq!(released(&stored), [a2.task.id]);
    assert_eq!(stored.behind, HashSet::from([a3.task.id]));
    // A completed task that needs more workers waits before those that never went.
    let update = Update {
        replicas: Some(2),
        ..Update::default()
    };
    let wanted = store
        .want(&[a1.task.id], &Change::Update(update), NOW + 50, &[])
        .await
        .unwrap();
    assert_eq!(wanted, [Wanted::Reopened]);
    assert_eq!(why(&*store, &a1).await, Some(Behind));
    settle(&*store, &[completed(&a2, "w")]).await;
    assert_eq!(why(&*store, &a1).await, Some(Missing));
    assert_eq!(why(&*store, &a3).await, Some(Behind));
    settle(&*store, &[completed(&a1, "v")]).await;
    assert_eq!(why(&*store, &a3).await, Some(Fresh));
    // The last of a sequence discovers the next: it goes at once.
    let a4 = in_sequence("a", "a4");
    let stored = store
        .settle(&[discovering(&a3, "w", vec![a4.clone()])])
        .await
        .unwrap();
    assert_eq!(released(&stored), []);
    assert!(stored.behind.is_empty());
    assert_eq!(due(&*store).await, [a4.task.id]);
    settle(&*store, &[completed(&a4, "w")]).await;
    is_over(db, &*store).await;
}

pub(crate) async fn the_next_of_a_sequence_waits_for_its_own_time<D: Database>(db: &D) {
    let store = db.open().await;
    let a1 = in_sequence("a", "a1");
    let mut a2 = in_sequence("a", "a2");
    a2.task.not_before_unix_ms = NOW + 10_000;
    a2.unpublished = Scheduled;
    a2.due_unix_ms = NOW + 10_000;
    let parked = NewRow {
        unpublished: Parked,
        ..in_sequence("a", "a3")
    };
    insert_new(&*store, &[a1.clone(), a2.clone(), parked.clone()]).await;
    assert_eq!(due_rows(&*store, NOW + 20_000, 10).await.len(), 1);
    assert_eq!(parked_rows(&*store, "q", 10).await, []);
    assert_eq!(settle(&*store, &[completed(&a1, "w")]).await, []);
    assert_eq!(due_rows(&*store, NOW + 9_999, 10).await, []);
    assert_eq!(
        due_rows(&*store, NOW + 10_000, 10).await,
        [in_outbox(&a2, Scheduled)]
    );
    // Its queue may have room by now; if it has not, the fanout parks it.
    assert_eq!(
        settle(&*store, &[completed(&a2, "w")]).await,
        [parked.task.id]
    );
    settle(&*store, &[completed(&parked, "w")]).await;
    is_over(db, &*store).await;
}

pub(crate) async fn what_is_released_beyond_a_page_is_due_at_once<D: Database>(db: &D) {
    let store = db.open().await;
    let rows_of = |n: usize| (0..18).map(move |sequence| (n, sequence));
    let first: Vec<NewRow> = rows_of(1)
        .map(|(n, sequence)| in_sequence(&sequence.to_string(), &format!("{n}/{sequence}")))
        .collect();
    let mut second: Vec<NewRow> = rows_of(2)
        .map(|(n, sequence)| in_sequence(&sequence.to_string(), &format!("{n}/{sequence}")))
        .collect();
    for row in &mut second {
        row.task.payload = vec![b'x'; 1 << 20].into();
    }
    insert_new(&*store, &first).await;
    insert_new(&*store, &second).await;
    let done: Vec<Settlement> = first.iter().map(|row| completed(row, "w")).collect();
    let mut all = settle(&*store, &done).await;
    assert!((1..18).contains(&all.len()), "{} are released", all.len());
    // The others are not left to the caller.
    let left = due_rows(&*store, 0, 100).await;
    all.extend(left.iter().map(|row| row.task.id));
    all.sort_unstable();
    let mut expected = ids(&second);
    expected.sort_unstable();
    assert_eq!(all, expected);
}

pub(crate) async fn late_calls_do_not_let_a_waiting_task_overtake<D: Database>(db: &D) {
    let store = db.open().await;
    let [a1, a2, a3] = ["a1", "a2", "a3"].map(|key| in_sequence("a", key));
    insert_new(&*store, &[a1.clone(), a2.clone(), a3.clone()]).await;
    let late = store.due(i64::MAX, 10, &HashSet::new()).await.unwrap();
    settle(&*store, &[died(&a1)]).await;
    send_again(&*store, &a1).await;
    assert_eq!(why(&*store, &a1).await, Some(Behind));
    // A mark of its first life, and a fanout that has no room for a late record of it.
    let published = Published {
        partition: a1.task.partition,
        offset: at(1, 0),
        tasks: late.iter().map(|row| (row.task.id, row.turn)).collect(),
    };
    store.mark_published("g", &[published]).await.unwrap();
    for why in [Parked, Missing, Scheduled] {
        store.unpublish(&[a1.task.id], why).await.unwrap();
    }
    store.put_off(&[a1.task.id], 1).await.unwrap();
    assert_eq!(why(&*store, &a1).await, Some(Behind));
    let states = store.states(&[a1.task.id, a2.task.id]).await.unwrap();
    let behind: HashSet<TaskId> = states
        .iter()
        .filter(|state| state.is_behind)
        .map(|state| state.id)
        .collect();
    assert_eq!(behind, HashSet::from([a1.task.id]));
    // A rebuild publishes what is on the bus only.
    let page = store.on_bus(Stretch::ALL, 10).await.unwrap();
    assert!(page.tasks.is_empty(), "{page:?}");
    // New values reach a task that waits.
    let update = Update {
        priority: Some(Priority::High),
        ..Update::default()
    };
    store
        .want(&[a3.task.id], &Change::Update(update), NOW, &[])
        .await
        .unwrap();
    assert_eq!(why(&*store, &a3).await, Some(Behind));
    // The queue has completed a task that SQL has behind, because SQL was set back.
    let before = place(&*store, &a3).await;
    let completed_before = EndedChange {
        id: a3.task.id,
        turn: None,
        end: Decided::CompletedBefore {
            epoch: 0,
            credited: 0,
        },
    };
    store.end_changes(&[completed_before], NOW).await.unwrap();
    assert_eq!(place(&*store, &a3).await, before);
    assert_eq!(waiting(&*store).await, 2);
    for done in [&a2, &a1, &a3] {
        settle(&*store, &[completed(done, "w")]).await;
    }
    is_over(db, &*store).await;
}

pub(crate) async fn of_concurrent_settlements_each_releases_its_own_sequences<D: Database>(db: &D) {
    const SEQUENCES: usize = 12;
    const TASKS: usize = 8;
    let stores = [db.open().await, db.open().await];
    let row_of =
        |sequence: usize, n: usize| in_sequence(&sequence.to_string(), &format!("{sequence}/{n}"));
    let all: Vec<Vec<NewRow>> = (0..SEQUENCES)
        .map(|sequence| (0..TASKS).map(|n| row_of(sequence, n)).collect())
        .collect();
    // What a settler discovers is in the sequences next to those whose tasks it ends: those of one
    // settler after them, those of the other before them.
    let found_of = |mine: usize, sequence: usize, n: usize| {
        let steps = if mine == 0 { 1 } else { SEQUENCES - 1 };
        let next = (sequence + steps) % SEQUENCES;
        in_sequence(&next.to_string(), &format!("{mine}/{sequence}/{n}"))
    };
    let mut found: HashMap<(usize, TaskId), NewRow> = HashMap::new();
    for (sequence, rows) in all.iter().enumerate() {
        for (n, row) in rows.iter().enumerate() {
            for mine in 0..2 {
                found.insert((mine, row.task.id), found_of(mine, sequence, n));
            }
        }
    }
    // The first tasks of each, then the others while the first are settled.
    let first: Vec<NewRow> = all.iter().map(|rows| rows[0].clone()).collect();
    insert_new(&*stores[0], &first).await;
    let all_are_in = AtomicBool::new(false);
    let insert = async {
        for n in 1..TASKS {
            let rows: Vec<NewRow> = all.iter().map(|rows| rows[n].clone()).collect();
            insert_new(&*stores[1], &rows).await;
        }
        all_are_in.store(true, Ordering::SeqCst);
    };
    // Two settlers report whatever is due, in their own orders, some of it twice.
    let settle = |mine: usize| {
        let store = Arc::clone(&stores[mine]);
        let (all, found, all_are_in) = (&all, &found, &all_are_in);
        async move {
            let mut done: VecDeque<TaskId> = VecDeque::new();
            loop {
                let are_in = all_are_in.load(Ordering::SeqCst);
                let due = store.due(i64::MAX, 1000, &HashSet::new()).await.unwrap();
                let unfinished = store.unfinished().await.unwrap();
                if are_in && unfinished.is_empty() {
                    return done;
                }
                let rows = all.iter().flatten();
                let due: HashSet<TaskId> = due.iter().map(|row| row.task.id).collect();
                let mut reports: Vec<Settlement> = rows
                    .filter(|row| due.contains(&row.task.id))
                    .map(|row| {
                        let found = found[&(mine, row.task.id)].clone();
                        discovering(row, "w", vec![found])
                    })
                    .collect();
                let due_too = found.values().filter(|row| due.contains(&row.task.id));
                reports.extend(due_too.map(|row| completed(row, "w")));
                if mine == 1 {
                    reports.reverse();
                }
                for report in &reports {
                    if let Settlement::Completed { id, .. } = report {
                        done.push_back(*id);
                    }
                }
                store.settle(&reports).await.unwrap();
            }
        }
    };
    let ((), one, two) = tokio::join!(insert, settle(0), settle(1));
    for (n, rows) in all.iter().enumerate() {
        for done in [&one, &two] {
            // Nobody ever saw a later task of a sequence before an earlier one.
            let seen: Vec<usize> = done
                .iter()
                .filter_map(|id| rows.iter().position(|row| row.task.id == *id))
                .collect();
            assert!(seen.is_sorted(), "sequence {n}: {seen:?}");
        }
    }
    is_over(db, &*stores[0]).await;
    let completed = (2 * SEQUENCES * TASKS) as u64;
    assert_eq!(
        counts(&*stores[0]).await,
        [count("q", Completed, completed)]
    );
}

pub(crate) async fn a_broken_sequence_is_found_and_mended<D: Database>(db: &D) {
    let store = db.open().await;
    let [a1, a2, a3] = ["a1", "a2", "a3"].map(|key| in_sequence("a", key));
    let [b1, b2] = ["b1", "b2"].map(|key| in_sequence("b", key));
    let [c1, c2] = ["c1", "c2"].map(|key| in_sequence("c", key));
    let rows = [&a1, &a2, &a3, &b1, &b2, &c1, &c2].map(Clone::clone);
    insert_new(&*store, &rows).await;
    assert_eq!(broken(&*store).await, 0);
    // Somebody ends the first task of one by hand, removes the row of another, and sets a wrong
    // count.
    let end = |row: &NewRow| {
        let key = std::str::from_utf8(&row.task.key).unwrap();
        format!(
            "UPDATE tasks SET status = 3, on_bus = 0 WHERE task_key = {}",
            hex(key)
        )
    };
    db.execute(&end(&a1)).await;
    for (row, change) in [
        (&b1, "DELETE FROM sequences WHERE head = "),
        (&c1, "UPDATE sequences SET waiting_tasks = 0 WHERE head = "),
    ] {
        let id = format!(
            "(SELECT id FROM tasks WHERE task_key = {})",
            hex(std::str::from_utf8(&row.task.key).unwrap())
        );
        db.execute(&format!("{change}{id}")).await;
    }
    assert_eq!(broken(&*store).await, 3);
    for row in [&a1, &b1, &c1] {
        let sequence = row.task.sequence.as_ref().unwrap();
        let hash = sequence_hash(&row.task.queue, &sequence.name);
        assert!(store.mend_sequence(hash, &row.task.queue).await.unwrap());
        assert!(!store.mend_sequence(hash, &row.task.queue).await.unwrap());
    }
    assert_eq!(broken(&*store).await, 0);
    assert_eq!(why(&*store, &a2).await, Some(Fresh));
    assert_eq!(why(&*store, &a3).await, Some(Behind));
    assert_eq!(why(&*store, &b2).await, Some(Fresh));
    assert_eq!(why(&*store, &c2).await, Some(Behind));
    settle(&*store, &[completed(&c1, "w"), completed(&a2, "w")]).await;
    assert_eq!(why(&*store, &c2).await, Some(Fresh));
    assert_eq!(why(&*store, &a3).await, Some(Fresh));
    // Somebody deletes a task that waits: the one after it goes, and a recount finds the rest.
    let [d1, d2, d3] = ["d1", "d2", "d3"].map(|key| in_sequence("d", key));
    insert_new(&*store, &[&d1, &d2, &d3].map(Clone::clone)).await;
    let key = hex(std::str::from_utf8(&d2.task.key).unwrap());
    db.execute(&format!("DELETE FROM tasks WHERE task_key = {key}"))
        .await;
    assert_eq!(settle(&*store, &[completed(&d1, "w")]).await, [d3.task.id]);
    assert_eq!(waiting(&*store).await, 1);
    let wrong = store.wrong_counts().await.unwrap();
    let mut behind = wrong.iter().filter(|wrong| wrong.are_behind);
    let behind = behind.next().map(|wrong| (wrong.kept, wrong.counted));
    assert_eq!(behind, Some((1, 0)));
    store.correct_count(&queue("q")).await.unwrap();
    assert_eq!(store.wrong_counts().await.unwrap(), []);
    assert_eq!(waiting(&*store).await, 0);
}
