//! Tests of the events that SQL keeps for topic `events`.

use taskd::{
    config::{EventQueues, QueueSettings, Queues},
    model::{Change, EventRecord, TaskStatus, Update},
    store::{Decided, EndedChange, Wanted},
    wire,
};

use super::*;

/// Events for queue q only.
fn of_q() -> EventQueues {
    let on = QueueSettings {
        events: true,
        ..Default::default()
    };
    EventQueues::of(&Queues {
        named: [(queue("q"), on)].into(),
        ..Default::default()
    })
}

async fn open<D: Database>(db: &D) -> Arc<dyn Store> {
    let store = db.open().await;
    store.keep_events_of(of_q());
    store
}

/// Takes all kept events, with their numbers.
async fn take(store: &dyn Store) -> Vec<(u64, EventRecord)> {
    let kept = store.kept_events(1_000).await.unwrap();
    assert!(kept.is_sorted_by_key(|row| row.number));
    let read = kept.iter().flat_map(|row| {
        let records = wire::read_kept_events(row.events.clone())
            .unwrap()
            .into_iter()
            .enumerate();
        records.map(|(place, record)| {
            let (_, numbered) =
                wire::numbered_event(&record, EventRecord::number(row.number, place)).unwrap();
            wire::read_event_record(&numbered).unwrap()
        })
    });
    let read = read.collect();
    let numbers: Vec<i64> = kept.iter().map(|row| row.number).collect();
    store.remove_events(&numbers).await.unwrap();
    assert_eq!(store.kept_events(1).await.unwrap(), []);
    read
}

fn event(row: &NewRow, status: TaskStatus, at_unix_ms: i64) -> EventRecord {
    let task = &row.task;
    EventRecord {
        key: task.key.clone(),
        status,
        at_unix_ms,
        ..EventRecord::new(task.id, task.queue.clone())
    }
}

/// Takes all kept events, without their numbers, sorted by key.
async fn taken(store: &dyn Store) -> Vec<EventRecord> {
    let mut events: Vec<EventRecord> = take(store)
        .await
        .into_iter()
        .map(|(_, event)| event)
        .collect();
    events.sort_by(|a, b| a.key.cmp(&b.key));
    events
}

pub(crate) async fn a_change_has_one_event_and_a_call_that_changes_nothing_has_none<D: Database>(
    db: &D,
) {
    let store = open(db).await;
    let later = NewRow {
        unpublished: Scheduled,
        ..fresh(TaskRow {
            not_before_unix_ms: NOW + 9,
            ..task("q", "c")
        })
    };
    let new = [
        row("q", "a"),
        row("q", "b"),
        later.clone(),
        row("other", "a"),
    ];
    insert_new(&*store, &new).await;
    insert_new(&*store, &new).await;
    let of_new = [
        event(&new[0], TaskStatus::Pending, NOW),
        event(&new[1], TaskStatus::Pending, NOW),
        event(&later, TaskStatus::Delayed, NOW),
    ];
    assert_eq!(taken(&*store).await, of_new);
    assert_eq!(
        store.insert(&[row("q", "a")]).await.unwrap().answers.len(),
        1
    );

    let found = [row("q", "found"), row("q", "b"), row("other", "found")];
    let reports = [
        discovering(&new[0], "w", found.to_vec()),
        died(&new[1]),
        completed(&new[3], "w"),
    ];
    let of_ends = [
        EventRecord {
            worker: "w".into(),
            attempt: 2,
            attempts: 1,
            ..event(&new[0], TaskStatus::Completed, NOW + 10)
        },
        EventRecord {
            attempts: 5,
            reason: "no luck".into(),
            ..event(&new[1], TaskStatus::Dead, NOW + 20)
        },
        event(&found[0], TaskStatus::Pending, NOW),
    ];
    for expected in [&of_ends[..], &[]] {
        store.settle(&reports).await.unwrap();
        assert_eq!(taken(&*store).await, expected);
    }
    // A credit that does not complete the task has no event, and neither has a surplus completion.
    let three = replicated("three", 2);
    insert_new(&*store, std::slice::from_ref(&three)).await;
    take(&*store).await;
    store
        .settle(&[completed(&three, "a"), completed(&new[0], "late")])
        .await
        .unwrap();
    assert_eq!(taken(&*store).await, []);
    store
        .settle(&[completed(&three, "b"), completed(&three, "c")])
        .await
        .unwrap();
    let completed = event(&three, TaskStatus::Completed, NOW + 10);
    let completed = EventRecord {
        worker: "b".into(),
        attempt: 2,
        attempts: 1,
        ..completed
    };
    assert_eq!(taken(&*store).await, [completed]);
    // Switch events off again, in this process.
    store.keep_events_of(EventQueues::default());
    insert_new(&*store, &[row("q", "more")]).await;
    assert_eq!(take(&*store).await, []);
}

pub(crate) async fn what_operators_do_has_events_too<D: Database>(db: &D) {
    let store = open(db).await;
    let rows = [
        row("q", "a"),
        row("q", "b"),
        replicated("c", 3),
        row("q", "d"),
    ];
    insert_new(&*store, &rows).await;
    let [cancelled, dead, lowered, raised] = &rows;
    for row in &rows {
        let shard = ShardId {
            queue: queue("q"),
            number: row.task.partition,
        };
        store.open_shards(&[shard]).await.unwrap();
    }
    store
        .settle(&[died(dead), completed(lowered, "w"), completed(raised, "w")])
        .await
        .unwrap();
    take(&*store).await;

    let kept = |wanted: Vec<Wanted>| match &wanted[..] {
        [Wanted::Kept(kept)] => kept.clone(),
        other => panic!("{other:?}"),
    };
    let wish = kept(
        store
            .want(&[cancelled.task.id], &Change::Cancel, NOW, &[])
            .await
            .unwrap(),
    );
    assert_eq!(take(&*store).await, [], "a wish is no end");
    let end = Decided::Cancelled {
        epoch: 0,
        generation: 1,
    };
    let end = EndedChange {
        id: wish.task.id,
        turn: Some(wish.turn),
        end,
    };
    for expected in [
        &[event(cancelled, TaskStatus::Cancelled, NOW + 30)][..],
        &[],
    ] {
        store
            .end_changes(std::slice::from_ref(&end), NOW + 30)
            .await
            .unwrap();
        assert_eq!(taken(&*store).await, expected);
    }
    // Both are sent again, in the next epoch.
    store
        .retry_with_acts(&[dead.task.id, cancelled.task.id], NOW + 40, "ops", "retry")
        .await
        .unwrap();
    let again = |row| EventRecord {
        epoch: 1,
        ..event(row, TaskStatus::Pending, NOW + 40)
    };
    assert_eq!(taken(&*store).await, [again(cancelled), again(dead)]);
    // A lower NUM completes a task, and a higher one reopens it.
    let num = |replicas| {
        Change::Update(Update {
            replicas: Some(replicas),
            ..Default::default()
        })
    };
    let wish = kept(
        store
            .want(&[lowered.task.id], &num(1), NOW + 50, &[])
            .await
            .unwrap(),
    );
    let end = Decided::Updated {
        replicas: 1,
        priority: wish.task.priority,
    };
    let end = EndedChange {
        id: wish.task.id,
        turn: Some(wish.turn),
        end,
    };
    store.end_changes(&[end], NOW + 50).await.unwrap();
    let completed = EventRecord {
        attempts: 1,
        ..event(lowered, TaskStatus::Completed, NOW + 50)
    };
    assert_eq!(taken(&*store).await, [completed]);
    assert_eq!(
        store
            .want(&[raised.task.id], &num(2), NOW + 60, &[])
            .await
            .unwrap(),
        [Wanted::Reopened]
    );
    let reopened = EventRecord {
        epoch: 1,
        ..event(raised, TaskStatus::Pending, NOW + 60)
    };
    assert_eq!(taken(&*store).await, [reopened]);
}

pub(crate) async fn events_stay_until_they_are_removed_in_the_order_of_their_tasks<D: Database>(
    db: &D,
) {
    let store = open(db).await;
    let rows = rows("q", 2_500);
    let workers = rows.chunks(50).map(|rows| {
        let (store, rows) = (Arc::clone(&store), rows.to_vec());
        async move {
            insert_new(&*store, &rows).await;
            let reports: Vec<Settlement> = rows.iter().map(|row| completed(row, "w")).collect();
            store.settle(&reports).await.unwrap();
            store
                .retry_with_acts(&[rows[0].task.id], NOW, "ops", "retry")
                .await
                .unwrap();
        }
    });
    join_all(workers).await;
    insert_new(
        &*store,
        &(0..1_500)
            .map(|n| row("q", format!("at once {n}")))
            .collect::<Vec<_>>(),
    )
    .await;
    store.close().await;
    // A restarted process finds the events.
    let store = open(db).await;
    let first = store.kept_events(3).await.unwrap();
    assert_eq!(
        (first.len(), store.kept_events(3).await.unwrap()),
        (3, first)
    );
    let (mut last, mut statuses): (BTreeMap<TaskId, u64>, BTreeMap<TaskId, Vec<TaskStatus>>) =
        Default::default();
    let events = take(&*store).await;
    assert_eq!(events.len(), 2 * rows.len() + 1_500);
    for (number, event) in events {
        let before = last.insert(event.id, number);
        assert!(
            before.is_none_or(|before| before < number),
            "{number} of {before:?}"
        );
        statuses.entry(event.id).or_default().push(event.status);
    }
    for row in &rows {
        assert_eq!(
            statuses[&row.task.id],
            [TaskStatus::Pending, TaskStatus::Completed]
        );
    }
    // Numbers are never reused.
    insert_new(&*store, &[row("q", "one more")]).await;
    let (number, event) = take(&*store).await.remove(0);
    assert!(
        number > *last.values().max().unwrap(),
        "{number} of {event:?}"
    );
}
