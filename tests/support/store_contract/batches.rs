//! Tests of batches: the fresh tasks of one insert, which are published together.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use taskd::{
    model::{Encoding, LeaseNumber, Offset, StoredStatus, TaskId, TaskRow},
    store::{
        NewRow, Published, Settlement, Store, Stored, Stretch, Turn,
        Unpublished::{Fresh, Missing, Parked, Scheduled},
    },
};

use super::{
    Database, NOW, at, completed, detail, detail_of, died, due_rows, first_turn, fresh, ids,
    in_outbox, outbox, parked_rows, published, published_at, published_in, queue, row, rows, task,
    walked_to,
};

/// Inserts new rows and returns their batch.
async fn insert(store: &dyn Store, rows: &[NewRow]) -> Turn {
    let stored: Stored<_> = store.insert(rows).await.unwrap();
    assert!(stored.batch.is_batch());
    assert_eq!(
        stored.turn_of(&rows[0]),
        Some(if rows[0].unpublished == Fresh {
            stored.batch
        } else {
            Turn::FIRST
        })
    );
    stored.batch
}

async fn mark(store: &dyn Store, generation: &str, rows: &[NewRow], turn: Turn, offset: Offset) {
    let mut partitions: BTreeMap<u32, Published> = BTreeMap::new();
    for row in rows {
        let partition = row.task.partition;
        let published = Published {
            partition,
            offset,
            tasks: Vec::new(),
        };
        partitions
            .entry(partition)
            .or_insert(published)
            .tasks
            .push((row.task.id, turn));
    }
    let published: Vec<_> = partitions.into_values().collect();
    store.mark_published(generation, &published).await.unwrap();
}

fn all_at(rows: &[NewRow], offset: Offset) -> Vec<taskd::store::PublishedTask> {
    rows.iter()
        .map(|row| published_at(row, Some(offset)))
        .collect()
}

pub(crate) async fn a_batch_is_marked_as_a_whole(db: &impl Database) {
    let store = db.open().await;
    let mut all = rows("q", 9);
    all.push(NewRow {
        unpublished: Parked,
        ..row("q", "parked")
    });
    all.push(NewRow {
        unpublished: Scheduled,
        ..row("q", "scheduled")
    });
    let (fresh, others) = all.split_at(9);
    let batch = insert(&*store, &all).await;
    assert!(detail_of(&*store, &fresh[0]).await.unpublished);
    assert_eq!(published(&*store).await, []);
    assert_eq!(db.number("SELECT COUNT(*) FROM outbox").await, 2);

    store.settle(&[completed(&fresh[0], "w")]).await.unwrap();
    for _ in 0..2 {
        // Mark twice, as after a lost answer.
        mark(&*store, "g", fresh, batch, at(7, 1)).await;
        assert_eq!(published(&*store).await, all_at(&fresh[1..], at(7, 1)));
        assert_eq!(
            db.number("SELECT COUNT(*) FROM tasks WHERE pub_generation <> ''")
                .await,
            0,
            "no task is touched"
        );
        assert_eq!(outbox(&*store).await, [in_outbox(&others[1], Scheduled)]);
        assert!(!detail_of(&*store, &fresh[1]).await.unpublished);
    }
    // In another generation of the topic, the offsets are unknown.
    let elsewhere: Vec<_> = fresh[1..]
        .iter()
        .map(|row| published_at(row, None))
        .collect();
    assert_eq!(
        published_in(&*store, "h", Stretch::ALL, 100).await.0,
        elsewhere
    );
    let sixth = walked_to(&elsewhere[5]);
    let behind = Stretch {
        after: Some(&sixth),
        ..Stretch::ALL
    };
    assert_eq!(
        published_in(&*store, "g", behind, 1).await.0,
        all_at(&fresh[7..8], at(7, 1))
    );
}

pub(crate) async fn each_partition_of_a_batch_has_its_place(db: &impl Database) {
    let store = db.open().await;
    let batch: Vec<NewRow> = (0..6)
        .map(|i| {
            fresh(TaskRow {
                partition: i % 3,
                ..task("q", format!("{i}"))
            })
        })
        .collect();
    let turn = insert(&*store, &batch).await;
    let offset = |partition: u32| at(u64::MAX >> 2, u64::from(partition) + 5);
    let of = |partition: u32| {
        let tasks = batch
            .iter()
            .filter(|row| row.task.partition == partition)
            .map(|row| (row.task.id, turn))
            .collect();
        Published {
            partition,
            offset: offset(partition),
            tasks,
        }
    };
    store
        .mark_published("g", &[of(0), of(1), of(2)])
        .await
        .unwrap();
    let expected: Vec<_> = batch
        .iter()
        .map(|row| published_at(row, Some(offset(row.task.partition))))
        .collect();
    assert_eq!(published(&*store).await, expected);
}

pub(crate) async fn what_is_left_of_a_batch_stays_due(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 6);
    let turn = insert(&*store, &batch).await;
    mark(&*store, "g", &batch[..2], turn, at(1, 0)).await;
    store.settle(&[died(&batch[2])]).await.unwrap();
    let left: Vec<_> = batch[3..].iter().map(|row| in_outbox(row, Fresh)).collect();
    assert_eq!(due_rows(&*store, NOW + 5_000, 10).await, left);
    assert_eq!(due_rows(&*store, NOW + 5_000, 2).await, left[..2]);
    assert_eq!(due_rows(&*store, NOW + 4_999, 2).await, []);
    let refused: HashSet<TaskId> = ids(&batch[3..5]).into_iter().collect();
    assert_eq!(
        store.due(NOW + 5_000, 1, &refused).await.unwrap()[0].task,
        batch[5].task
    );
    assert_eq!(published(&*store).await, all_at(&batch[..2], at(1, 0)));

    mark(&*store, "g", &batch[3..], turn, at(2, 0)).await;
    assert_eq!(db.number("SELECT COUNT(*) FROM batches").await, 1);
    assert_eq!(outbox(&*store).await, []);
    assert_eq!(
        db.number("SELECT COUNT(*) FROM batches").await,
        0,
        "nobody waits in it any more"
    );
    let expected = [all_at(&batch[..2], at(1, 0)), all_at(&batch[3..], at(2, 0))].concat();
    assert_eq!(published(&*store).await, expected);
}

pub(crate) async fn what_is_put_off_is_due_later(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 4);
    insert(&*store, &batch).await;
    store.settle(&[died(&batch[3])]).await.unwrap();
    store.put_off(&ids(&batch[1..]), NOW + 9_000).await.unwrap();
    let all: Vec<_> = batch[..3].iter().map(|row| in_outbox(row, Fresh)).collect();
    assert_eq!(due_rows(&*store, NOW + 8_999, 10).await, all[..1]);
    assert_eq!(due_rows(&*store, NOW + 9_000, 10).await, all);
    // Put one of them off again, now that it is in the outbox itself.
    store.put_off(&ids(&batch[2..]), NOW + 9_001).await.unwrap();
    assert_eq!(due_rows(&*store, NOW + 9_000, 10).await, all[..2]);
    assert_eq!(due_rows(&*store, NOW + 9_001, 10).await, all);
    // After the clock steps back, they do not wait until the old time.
    store.bring_forward(NOW, NOW, None, 10).await.unwrap();
    assert_eq!(due_rows(&*store, NOW, 10).await.len(), 3);
}

pub(crate) async fn a_late_mark_of_a_batch_leaves_a_task_that_came_back(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 4);
    let turn = insert(&*store, &batch).await;
    // The fanout was faster than the publisher's mark, and found the queue full.
    store.unpublish(&ids(&batch[..1]), Parked).await.unwrap();
    mark(&*store, "g", &batch, turn, at(1, 0)).await;
    assert_eq!(
        parked_rows(&*store, "q", 10).await,
        [in_outbox(&batch[0], Parked)]
    );
    assert_eq!(published(&*store).await, all_at(&batch[1..], at(1, 0)));
    assert!(detail_of(&*store, &batch[0]).await.unpublished);

    // It is published, at a later offset; and another task is missing.
    let parked = store
        .parked(&queue("q"), 10, &HashSet::new())
        .await
        .unwrap();
    mark(&*store, "g", &batch[..1], parked[0].turn, at(3, 0)).await;
    let expected = [all_at(&batch[..1], at(3, 0)), all_at(&batch[1..], at(1, 0))].concat();
    assert_eq!(published(&*store).await, expected);
    store.unpublish(&ids(&batch[1..2]), Missing).await.unwrap();
    assert_eq!(outbox(&*store).await, [in_outbox(&batch[1], Missing)]);
    // The same mark is repeated.
    mark(&*store, "g", &batch, turn, at(1, 0)).await;
    assert_eq!(outbox(&*store).await, [in_outbox(&batch[1], Missing)]);
    assert_eq!(
        published(&*store).await,
        [&expected[..1], &expected[2..]].concat()
    );
}

pub(crate) async fn of_two_publishers_of_a_batch_the_later_place_holds(db: &impl Database) {
    let store = db.open().await;
    for (round, offsets) in [[1, 2], [2, 1]].into_iter().enumerate() {
        let name = format!("q{round}");
        let batch = rows(&name, 3);
        let turn = insert(&*store, &batch).await;
        for major in offsets {
            mark(&*store, "g", &batch, turn, at(major, 0)).await;
        }
        let of_queue: Vec<_> = published(&*store)
            .await
            .into_iter()
            .filter(|task| task.shard.queue == queue(&name))
            .collect();
        assert_eq!(of_queue, all_at(&batch, at(2, 0)));
        assert_eq!(outbox(&*store).await, []);
    }
}

pub(crate) async fn many_small_batches_come_in_one_page(db: &impl Database) {
    let store = db.open().await;
    let mut all = Vec::new();
    for i in 0..150 {
        let due_unix_ms = NOW + i64::from(i);
        let some = (0..1 + i % 3).map(|n| NewRow {
            due_unix_ms,
            ..row("q", format!("{i} {n}"))
        });
        let some: Vec<NewRow> = some.collect();
        insert(&*store, &some).await;
        all.extend(some);
    }
    let expected: Vec<_> = all.iter().map(|row| in_outbox(row, Fresh)).collect();
    assert_eq!(outbox(&*store).await, expected);
    assert_eq!(due_rows(&*store, NOW + 149, 100).await, expected[..100]);
    assert_eq!(due_rows(&*store, NOW + 2, 100).await, expected[..6]);

    // Batches with only completed tasks must not hide other rows.
    let reports: Vec<_> = all[..200].iter().map(|row| completed(row, "w")).collect();
    store.settle(&reports).await.unwrap();
    assert_eq!(due_rows(&*store, NOW + 149, 10).await, expected[200..210]);
}

pub(crate) async fn batches_that_no_task_needs_are_removed(db: &impl Database) {
    let store = db.open().await;
    let batches: Vec<Vec<NewRow>> = (0..5).map(|i| rows(&format!("q{i}"), 3)).collect();
    let mut turns = Vec::new();
    for batch in &batches {
        turns.push(insert(&*store, batch).await);
    }
    // The last batch is not published.
    for (batch, turn) in batches.iter().zip(&turns).take(4) {
        mark(&*store, "g", batch, *turn, at(1, 0)).await;
    }
    let pages = async || {
        let (mut after, mut pages) = (None, 0);
        loop {
            after = store.remove_batches(after, 2).await.unwrap();
            pages += 1;
            if after.is_none() {
                return pages;
            }
        }
    };
    assert_eq!(pages().await, 3);
    assert_eq!(db.number("SELECT COUNT(*) FROM batches").await, 5);

    // The first batch is completed; of the second, one task is dead and the rest is back in the
    // outbox; of the third, one task is still on the bus; those of the fourth have their own
    // offsets, which may be earlier ones.
    store
        .settle(
            &batches[0]
                .iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    store.settle(&[died(&batches[1][0])]).await.unwrap();
    store
        .unpublish(&ids(&batches[1][1..]), Parked)
        .await
        .unwrap();
    store
        .settle(
            &batches[2][1..]
                .iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    mark(&*store, "g", &batches[3], Turn::FIRST, at(2, 0)).await;
    let before = published(&*store).await;
    pages().await;
    assert_eq!(db.number("SELECT COUNT(*) FROM batches").await, 3);
    assert_eq!(published(&*store).await, before);
    assert_eq!(
        before,
        [
            all_at(&batches[2][..1], at(1, 0)),
            all_at(&batches[3], at(2, 0))
        ]
        .concat()
    );
    // Late marks of tasks that are gone.
    mark(&*store, "g", &batches[0], turns[0], at(9, 0)).await;
    assert_eq!(published(&*store).await, before);
}

/// The expected state of a task.
#[derive(Clone)]
struct Known {
    row: NewRow,
    is_final: bool,
    /// The turn in which it waits to be published, and whether it is parked.
    waits: Option<(Turn, bool)>,
    place: Option<Offset>,
}

/// A deterministic pseudo-random generator.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// Random marks of batches and of single tasks, some of them late or repeated, mixed with all other
/// operations. The result must always be as if each task had its own row in the outbox.
pub(crate) async fn batches_agree_with_a_row_for_each_task(db: &impl Database) {
    let store = db.open().await;
    let (mut dice, mut known, mut past) =
        (Dice(7), Vec::<Known>::new(), Vec::<(usize, Turn)>::new());
    for step in 0..150 {
        match dice.below(10) {
            0..2 => {
                let some: Vec<_> = (0..1 + dice.below(8))
                    .map(|n| row("q", format!("{step} {n}")))
                    .collect();
                let batch = insert(&*store, &some).await;
                for row in some {
                    past.push((known.len(), batch));
                    known.push(Known {
                        row,
                        is_final: false,
                        waits: Some((batch, false)),
                        place: None,
                    });
                }
            }
            _ if known.is_empty() => {}
            2 => {
                let task = dice.below(known.len());
                let Known {
                    row,
                    is_final,
                    waits,
                    ..
                } = &mut known[task];
                store.settle(&[completed(row, "w")]).await.unwrap();
                (*is_final, *waits) = (true, None);
            }
            3 => {
                let task = dice.below(known.len());
                let why = [Missing, Parked][dice.below(2)];
                store
                    .unpublish(&[known[task].row.task.id], why)
                    .await
                    .unwrap();
                let turn = turn_in_outbox(&*store, known[task].row.task.id).await;
                if !known[task].is_final {
                    let turn = turn.unwrap();
                    known[task].waits = Some((turn, why == Parked));
                    past.push((task, turn));
                }
            }
            // Marks all or some of the tasks that ever waited in a turn.
            kind => {
                let (_, turn) = past[dice.below(past.len())];
                let tasks: Vec<usize> = past
                    .iter()
                    .filter(|(_, of)| *of == turn)
                    .map(|(task, _)| *task)
                    .collect();
                let tasks = if kind < 6 {
                    &tasks[..1 + dice.below(tasks.len())]
                } else {
                    &tasks[..]
                };
                let offset = at(dice.below(50) as u64, 0);
                let rows: Vec<NewRow> = tasks.iter().map(|task| known[*task].row.clone()).collect();
                mark(&*store, "g", &rows, turn, offset).await;
                for task in tasks {
                    let task = &mut known[*task];
                    if !task.is_final {
                        task.place = task.place.max(Some(offset));
                        task.waits = task.waits.filter(|(waits, _)| *waits != turn);
                    }
                }
            }
        }
        let waiting = |parked: bool| -> BTreeSet<TaskId> {
            let waits =
                |task: &&Known| task.waits.is_some_and(|(_, is_parked)| is_parked == parked);
            known
                .iter()
                .filter(waits)
                .map(|task| task.row.task.id)
                .collect()
        };
        let stored = |rows: Vec<taskd::store::OutboxRow>| {
            rows.iter().map(|row| row.task.id).collect::<BTreeSet<_>>()
        };
        assert_eq!(stored(outbox(&*store).await), waiting(false), "step {step}");
        assert_eq!(
            stored(parked_rows(&*store, "q", 10_000).await),
            waiting(true),
            "step {step}"
        );
        let on_bus = known
            .iter()
            .filter(|task| !task.is_final && task.waits.is_none());
        let on_bus: Vec<_> = on_bus
            .map(|task| published_at(&task.row, task.place))
            .collect();
        assert_eq!(published(&*store).await, on_bus, "step {step}");
    }
    assert!(
        known.iter().any(|task| task.is_final) && known.iter().any(|task| task.waits.is_some())
    );
    assert_eq!(
        detail_of(&*store, &known[0].row).await.status == StoredStatus::Completed,
        known[0].is_final
    );
}

async fn turn_in_outbox(store: &dyn Store, id: TaskId) -> Option<Turn> {
    let mut rows = store.due(i64::MAX, 10_000, &HashSet::new()).await.unwrap();
    rows.extend(
        store
            .parked(&queue("q"), 10_000, &HashSet::new())
            .await
            .unwrap(),
    );
    rows.into_iter()
        .find(|row| row.task.id == id)
        .map(|row| row.turn)
}
