//! Tests of changes of live tasks: pending changes in SQL, and how they end.

use taskd::{
    model::{Act, Change, ChangeKind, Requeue, TaskAct, Update},
    store::{ChangeEnd, Decided, EndedChange, KeptChange, KeptPages, Retried, Store, Wanted},
};

use super::*;

fn act(row: &NewRow) -> TaskAct {
    (
        row.task.id,
        Act::new("ops", "cancel task", &row.task.id.to_string()),
    )
}

async fn want(store: &dyn Store, rows: &[&NewRow]) -> Vec<Wanted> {
    let ids: Vec<TaskId> = rows.iter().map(|row| row.task.id).collect();
    store.want(&ids, &Change::Cancel, NOW, &[]).await.unwrap()
}

fn kept_of(wanted: &Wanted) -> KeptChange {
    match wanted {
        Wanted::Kept(kept) => kept.clone(),
        other => panic!("{other:?}"),
    }
}

fn pages(after: Option<(i64, TaskId)>, limit: u32) -> KeptPages {
    KeptPages {
        kind: ChangeKind::Cancel,
        upto_unix_ms: i64::MAX,
        after,
        limit,
    }
}

async fn kept(store: &dyn Store) -> Vec<TaskId> {
    store
        .kept_changes(&pages(None, 100))
        .await
        .unwrap()
        .changes
        .into_iter()
        .map(|kept| kept.task.id)
        .collect()
}

fn cancelled(kept: &KeptChange, generation: u64) -> EndedChange {
    let end = Decided::Cancelled {
        epoch: kept.task.epoch,
        generation,
    };
    EndedChange {
        id: kept.task.id,
        turn: Some(kept.turn),
        end,
    }
}

fn updated_to(kept: &KeptChange) -> Decided {
    Decided::Updated {
        replicas: kept.task.replicas,
        priority: kept.task.priority,
    }
}

fn shard_of(row: &NewRow) -> ShardId {
    ShardId {
        queue: row.task.queue.clone(),
        number: row.task.partition,
    }
}

fn ended(row: &NewRow, status: StoredStatus) -> ChangeEnd {
    let is_freed = matches!(status, Dead | StoredStatus::Cancelled);
    ChangeEnd {
        status: Some(status),
        key: is_freed.then(|| (row.task.queue.clone(), row.task.key_hash)),
    }
}

pub(crate) async fn a_wish_is_kept_until_its_task_is_cancelled<D: Database>(db: &D) {
    let store = db.open().await;
    let (fresh, parked, done) = (
        row("q", "fresh"),
        NewRow {
            unpublished: Parked,
            ..row("q", "parked")
        },
        row("q", "done"),
    );
    insert_new(&*store, &[fresh.clone(), parked.clone(), done.clone()]).await;
    store
        .open_shards(&[shard_of(&fresh), shard_of(&parked)])
        .await
        .unwrap();
    store.settle(&[completed(&done, "w")]).await.unwrap();
    let ids = [
        fresh.task.id,
        done.task.id,
        TaskId::new(),
        parked.task.id,
        fresh.task.id,
    ];
    let acts = [act(&fresh), act(&done), act(&parked)];
    let wanted = store.want(&ids, &Change::Cancel, NOW, &acts).await.unwrap();
    assert_eq!(
        (&wanted[1], &wanted[2]),
        (&Wanted::Final(Completed), &Wanted::Unknown)
    );
    assert_eq!(wanted[0], wanted[4]);
    let wishes = [kept_of(&wanted[0]), kept_of(&wanted[3])];
    let task = &wishes[0].task;
    assert_eq!(
        (task.id, &task.shard, task.replicas, task.epoch),
        (fresh.task.id, &shard_of(&fresh), 1, 0)
    );
    assert_eq!(wishes[0].kind, ChangeKind::Cancel);
    // Only tasks that may change get an act.
    let targets: HashSet<String> = store
        .acts(None, 10)
        .await
        .unwrap()
        .into_iter()
        .map(|act| act.target)
        .collect();
    assert_eq!(
        targets,
        [&fresh, &parked].map(|row| row.task.id.to_string()).into()
    );
    let page = store.kept_changes(&pages(None, 100)).await.unwrap();
    let mut found = page.changes.clone();
    found.sort_by_key(|kept| kept.task.id);
    let mut expected = wishes.to_vec();
    expected.sort_by_key(|kept| kept.task.id);
    assert_eq!((found, page.next), (expected, None));

    let ends = wishes.each_ref().map(|kept| cancelled(kept, 1));
    let ends_of = |row: &NewRow| ended(row, StoredStatus::Cancelled);
    assert_eq!(
        store.end_changes(&ends, NOW + 9).await.unwrap(),
        [ends_of(&fresh), ends_of(&parked)]
    );
    assert_eq!(kept(&*store).await, []);
    let detail = detail_of(&*store, &parked).await;
    assert_eq!(
        (detail.status, detail.unpublished, detail.updated_unix_ms),
        (StoredStatus::Cancelled, false, NOW + 9)
    );
    assert_eq!(
        counts(&*store).await,
        [
            count("q", Completed, 1),
            count("q", StoredStatus::Cancelled, 2)
        ],
    );
    assert_eq!(store.parked_queues().await.unwrap(), []);
    // A repetition changes nothing, and neither does a late completion.
    assert_eq!(
        store.end_changes(&ends, NOW + 10).await.unwrap(),
        [ends_of(&fresh), ends_of(&parked)]
    );
    let late = store
        .settle(&[completed(&fresh, "w")])
        .await
        .unwrap()
        .answers;
    assert_eq!(
        (late[0].surplus, late[0].status),
        (true, Some(StoredStatus::Cancelled))
    );
    assert_eq!(
        want(&*store, &[&fresh]).await,
        [Wanted::Final(StoredStatus::Cancelled)]
    );
    let again = store.insert(&[row("q", "fresh")]).await.unwrap().answers;
    assert_eq!(
        again,
        [Duplicate {
            id: fresh.task.id,
            status: StoredStatus::Cancelled
        }]
    );
}

pub(crate) async fn a_decision_counts_in_its_epoch_and_generation_only<D: Database>(db: &D) {
    let store = db.open().await;
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    store.open_shards(&[shard_of(&task)]).await.unwrap();
    let wish = kept_of(&want(&*store, &[&task]).await[0]);
    // Redis lost the shard after the script ran.
    assert_eq!(
        store.begin_rebuild(&[(shard_of(&task), 1)]).await.unwrap(),
        [2]
    );
    let unfinished = [ended(&task, Unfinished)];
    assert_eq!(
        store
            .end_changes(&[cancelled(&wish, 1)], NOW)
            .await
            .unwrap(),
        unfinished
    );
    assert_eq!(kept(&*store).await, [task.task.id]);
    // If the database was set back, its generation is older than that in Redis.
    assert_eq!(
        store
            .end_changes(&[cancelled(&wish, 3)], NOW)
            .await
            .unwrap(),
        [ended(&task, StoredStatus::Cancelled)]
    );

    // A cancelled task that is sent again is in its next epoch, without pending changes from the
    // previous one.
    let retried = store
        .retry_with_acts(&[task.task.id], NOW, "ops", "retry")
        .await
        .unwrap();
    assert_eq!(
        retried,
        [Retried {
            id: task.task.id,
            status: Unfinished
        }]
    );
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1)]);
    assert_eq!(
        store
            .end_changes(&[cancelled(&wish, 2)], NOW)
            .await
            .unwrap(),
        unfinished
    );
    let wish = kept_of(&want(&*store, &[&task]).await[0]);
    assert_eq!(wish.task.epoch, 1);
    assert_eq!(
        store
            .end_changes(&[cancelled(&wish, 2)], NOW)
            .await
            .unwrap(),
        [ended(&task, StoredStatus::Cancelled)]
    );
}

pub(crate) async fn a_later_wish_stays_when_the_earlier_one_ends<D: Database>(db: &D) {
    let store = db.open().await;
    let tasks = [row("q", "a"), row("q", "b"), row("q", "c")];
    insert_new(&*store, &tasks).await;
    let first = kept_of(&want(&*store, &[&tasks[0]]).await[0]);
    let second = kept_of(&want(&*store, &[&tasks[0]]).await[0]);
    assert_ne!(first.turn, second.turn);
    let over = |kept: &KeptChange| EndedChange {
        id: kept.task.id,
        turn: Some(kept.turn),
        end: Decided::Over,
    };
    assert_eq!(
        store.end_changes(&[over(&first)], NOW).await.unwrap(),
        [ended(&tasks[0], Unfinished)]
    );
    assert_eq!(kept(&*store).await, [tasks[0].task.id]);
    store.end_changes(&[over(&second)], NOW).await.unwrap();
    assert_eq!(kept(&*store).await, []);

    // Pages end at the limit, and pending changes of final tasks are removed.
    want(&*store, &[&tasks[0], &tasks[1], &tasks[2]]).await;
    let (mut after, mut found) = (None, Vec::new());
    loop {
        let page = store.kept_changes(&pages(after, 2)).await.unwrap();
        found.extend(page.changes.into_iter().map(|kept| kept.task.id));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let mut all = tasks.each_ref().map(|row| row.task.id);
    all.sort_unstable();
    assert_eq!(found, all);
    store.settle(&[completed(&tasks[0], "w")]).await.unwrap();
    store.settle(&[died(&tasks[1])]).await.unwrap();
    assert_eq!(kept(&*store).await, [tasks[2].task.id]);
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 1);
}

async fn update(store: &dyn Store, row: &NewRow, update: Update) -> Wanted {
    store
        .want(&[row.task.id], &Change::Update(update), NOW, &[])
        .await
        .unwrap()
        .remove(0)
}

fn replicas(replicas: u32) -> Update {
    Update {
        replicas: Some(replicas),
        ..Update::default()
    }
}

pub(crate) async fn new_values_are_stored_with_their_wish<D: Database>(db: &D) {
    let store = db.open().await;
    let parked = NewRow {
        unpublished: Parked,
        ..replicated("parked", 3)
    };
    insert_new(&*store, std::slice::from_ref(&parked)).await;
    let new = Update {
        priority: Some(Priority::High),
        replicas: Some(2),
    };
    let wish = kept_of(&update(&*store, &parked, new).await);
    assert_eq!(
        (wish.kind, wish.task.replicas, wish.task.priority),
        (ChangeKind::Update, 2, Priority::High)
    );
    let stored = detail_of(&*store, &parked).await.task;
    assert_eq!((stored.replicas, stored.priority), (2, Priority::High));
    assert_eq!(
        db.number("SELECT priority FROM outbox").await,
        Priority::High as i64
    );
    let state = store.states(&[parked.task.id]).await.unwrap().remove(0);
    assert_eq!((state.replicas, state.priority), (2, Priority::High));

    // Lowering NUM to the number of credits completes the task.
    store.settle(&[completed(&parked, "a")]).await.unwrap();
    let wish = kept_of(&update(&*store, &parked, replicas(1)).await);
    let updated = EndedChange {
        id: parked.task.id,
        turn: Some(wish.turn),
        end: updated_to(&wish),
    };
    assert_eq!(
        store.end_changes(&[updated], NOW).await.unwrap(),
        [ended(&parked, Completed)]
    );
    assert_eq!(counts(&*store).await, [count("q", Completed, 1)]);
    assert_eq!(store.parked_queues().await.unwrap(), []);
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 0);
}

pub(crate) async fn a_higher_num_reopens_a_completed_task<D: Database>(db: &D) {
    let store = db.open().await;
    let (one, late) = (replicated("one", 1), replicated("late", 1));
    insert_new(&*store, &[one.clone(), late.clone()]).await;
    store
        .settle(&[
            completed(&one, "a"),
            completed(&late, "a"),
            completed(&late, "b"),
        ])
        .await
        .unwrap();
    assert_eq!(
        update(&*store, &one, replicas(1)).await,
        Wanted::Final(Completed)
    );
    assert_eq!(update(&*store, &one, replicas(2)).await, Wanted::Reopened);
    // A surplus result becomes the missing credit.
    assert_eq!(update(&*store, &late, replicas(2)).await, Wanted::Reopened);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1), count("q", Completed, 1)]
    );
    let state = store.states(&[one.task.id]).await.unwrap().remove(0);
    assert_eq!(
        (
            state.status,
            state.epoch,
            state.replicas,
            &state.workers[..]
        ),
        (Unfinished, 1, 2, &["a".to_owned()][..])
    );
    assert_eq!(
        outbox(&*store)
            .await
            .iter()
            .map(|row| row.task.id)
            .collect::<Vec<_>>(),
        [one.task.id]
    );
    store.settle(&[completed(&one, "b")]).await.unwrap();
    assert_eq!(detail_of(&*store, &one).await.status, Completed);

    // Of a bulk change: the answer to its COMMIT is lost, so it comes again.
    let as_of = Some(store.begin_era(NOW + 1_000).await.unwrap());
    let (ids, more) = ([one.task.id], Change::Update(replicas(3)));
    let acts = [act(&one)];
    let wanted = store.want_as_of(&ids, &more, NOW + 2_000, &acts, as_of);
    assert_eq!(wanted.await.unwrap(), [Wanted::Reopened]);
    let wanted = store.want_as_of(&ids, &more, NOW + 2_000, &acts, as_of);
    kept_of(&wanted.await.unwrap()[0]);
    // Another call finds that the task has changed since.
    let others = [act(&one)];
    let wanted = store.want_as_of(&ids, &more, NOW + 2_000, &others, as_of);
    assert_eq!(wanted.await.unwrap(), [Wanted::Unknown]);
}

pub(crate) async fn a_completion_before_a_higher_num_reopens_once_sql_has_it<D: Database>(db: &D) {
    let store = db.open().await;
    let task = replicated("k", 1);
    insert_new(&*store, std::slice::from_ref(&task)).await;
    let wish = kept_of(&update(&*store, &task, replicas(2)).await);
    let before = EndedChange {
        id: task.task.id,
        turn: Some(wish.turn),
        end: Decided::CompletedBefore {
            epoch: 0,
            credited: 1,
        },
    };
    // The report of the completion in the queue has not arrived yet.
    store.end_changes(&[before], NOW).await.unwrap();
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 1);
    store.settle(&[completed(&task, "a")]).await.unwrap();
    store.end_changes(&[before], NOW).await.unwrap();
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 0);
    let state = store.states(&[task.task.id]).await.unwrap().remove(0);
    assert_eq!((state.status, state.epoch), (Unfinished, 1));
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1)]);
}

pub(crate) async fn a_task_that_a_lower_num_completes_behind_a_higher_one_is_off_the_bus<
    D: Database,
>(
    db: &D,
) {
    let store = db.open().await;
    let task = replicated("k", 1);
    insert_new(&*store, std::slice::from_ref(&task)).await;
    let wish = kept_of(&update(&*store, &task, replicas(2)).await);
    store.settle(&[completed(&task, "a")]).await.unwrap();
    update(&*store, &task, replicas(1)).await;
    let end = Decided::CompletedBefore {
        epoch: 0,
        credited: 1,
    };
    store
        .end_changes(
            &[EndedChange {
                id: task.task.id,
                turn: Some(wish.turn),
                end,
            }],
            NOW,
        )
        .await
        .unwrap();
    assert_eq!(detail_of(&*store, &task).await.status, Completed);
    assert_eq!(counts(&*store).await, [count("q", Completed, 1)]);
    assert_eq!(
        store.wrong_counts().await.unwrap(),
        [],
        "nothing that is on the bus, or will be, is unfinished"
    );
}

pub(crate) async fn of_two_changes_at_once_the_queue_gets_the_later<D: Database>(db: &D) {
    let store = db.open().await;
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    let first = kept_of(&update(&*store, &task, replicas(2)).await);
    let second = kept_of(&update(&*store, &task, replicas(3)).await);
    assert_eq!((first.is_second, second.is_second), (false, true));
    let updated = |kept: &KeptChange, turn: bool| EndedChange {
        id: kept.task.id,
        turn: turn.then_some(kept.turn),
        end: updated_to(kept),
    };
    let wishes = async || db.number("SELECT COUNT(*) FROM changes").await;
    // The second pending change ends before the values of the first reach the queue.
    store
        .end_changes(&[updated(&second, true)], NOW)
        .await
        .unwrap();
    assert_eq!(wishes().await, 0);
    store
        .end_changes(&[updated(&first, true)], NOW)
        .await
        .unwrap();
    let pages = KeptPages {
        kind: ChangeKind::Update,
        ..pages(None, 10)
    };
    let kept = store.kept_changes(&pages).await.unwrap().changes;
    assert_eq!((kept.len(), kept[0].task.replicas), (1, 3));
    // It stays as long as it must be kept.
    store
        .end_changes(&[updated(&kept[0], false)], NOW)
        .await
        .unwrap();
    assert_eq!(wishes().await, 1);
    store
        .end_changes(&[updated(&kept[0], true)], NOW)
        .await
        .unwrap();
    assert_eq!(wishes().await, 0);
    assert!(!kept_of(&update(&*store, &task, replicas(4)).await).is_second);
}

pub(crate) async fn of_two_reservations_the_earlier_end_stays_until_the_queue_names_one<
    D: Database,
>(
    db: &D,
) {
    let store = db.open().await;
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    let reserve = async |until_unix_ms: Option<i64>| {
        let worker = WorkerName::new("w").unwrap();
        let change = Change::Requeue(Requeue::To {
            worker,
            until_unix_ms,
        });
        kept_of(
            &store
                .want(&[task.task.id], &change, NOW, &[])
                .await
                .unwrap()[0],
        )
    };
    let due = async |upto_unix_ms: i64| {
        let pages = KeptPages {
            kind: ChangeKind::Reservation,
            upto_unix_ms,
            after: None,
            limit: 10,
        };
        store.kept_changes(&pages).await.unwrap().changes
    };
    let first = reserve(Some(NOW + 100)).await;
    assert_eq!((first.at_unix_ms, first.is_second), (NOW + 100, false));
    // The process may be killed before it calls the script, so the first end still holds.
    assert_eq!(reserve(Some(NOW + 500)).await.at_unix_ms, NOW + 100);
    // A reservation without an end is not kept in a row of its own.
    assert_eq!(reserve(None).await.kind, ChangeKind::Requeue);
    let kept = due(NOW + 100).await.remove(0);
    let end = |kept: &KeptChange, end| {
        [EndedChange {
            id: kept.task.id,
            turn: Some(kept.turn),
            end,
        }]
    };
    // The queue has accepted the second one. The end of an earlier turn changes nothing.
    store
        .end_changes(&end(&first, Decided::ReservedUntil(NOW + 900)), NOW)
        .await
        .unwrap();
    store
        .end_changes(&end(&kept, Decided::ReservedUntil(NOW + 500)), NOW)
        .await
        .unwrap();
    assert_eq!(due(NOW + 499).await, []);
    let kept = due(NOW + 500).await.remove(0);
    assert_eq!(
        (kept.at_unix_ms, reserve(Some(NOW + 50)).await.at_unix_ms),
        (NOW + 500, NOW + 50)
    );
    let kept = due(NOW + 50).await.remove(0);
    store
        .end_changes(&end(&kept, Decided::Over), NOW)
        .await
        .unwrap();
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 0);
}

pub(crate) async fn credits_on_their_way_count_once_when_a_task_is_reopened<D: Database>(db: &D) {
    let store = db.open().await;
    let task = replicated("k", 3);
    insert_new(&*store, std::slice::from_ref(&task)).await;
    // The queue has credited a, b and c, but only the report of a has arrived when NUM falls to 1
    // and rises to 4.
    store.settle(&[completed(&task, "a")]).await.unwrap();
    let wish = kept_of(&update(&*store, &task, replicas(1)).await);
    let updated = EndedChange {
        id: task.task.id,
        turn: Some(wish.turn),
        end: updated_to(&wish),
    };
    assert_eq!(
        store.end_changes(&[updated], NOW).await.unwrap(),
        [ended(&task, Completed)]
    );
    assert!(
        store
            .settle(&[completed(&task, "b")])
            .await
            .unwrap()
            .answers[0]
            .surplus
    );
    assert_eq!(update(&*store, &task, replicas(4)).await, Wanted::Reopened);
    let state = store.states(&[task.task.id]).await.unwrap().remove(0);
    assert_eq!(
        (state.status, &state.workers[..]),
        (Unfinished, &["a".to_owned(), "b".to_owned()][..])
    );
    // The reports of c arrive late and twice, and so does that of b. d is the fourth worker.
    for (worker, status, repeated) in [
        ("c", Unfinished, false),
        ("c", Unfinished, true),
        ("b", Unfinished, true),
        ("d", Completed, false),
    ] {
        let answer = store
            .settle(&[completed(&task, worker)])
            .await
            .unwrap()
            .answers
            .remove(0);
        assert_eq!(
            (answer.status, answer.repeated, answer.surplus),
            (Some(status), repeated, false),
            "{worker}"
        );
    }
    assert_eq!(detail_of(&*store, &task).await.completed, 4);
    assert_eq!(counts(&*store).await, [count("q", Completed, 1)]);
}
