//! Tests of recounting, and of finding tasks that would never be published.

use taskd::{
    model::{Offset, TaskId},
    store::{Published, Store, Unpublished, WrongCount},
};

use super::{Database, completed, ids, insert_new, queue, rows};

async fn wrong(store: &dyn Store) -> Vec<(String, i64, i64)> {
    let wrong = store.wrong_counts().await.unwrap().into_iter();
    wrong
        .map(
            |WrongCount {
                 queue,
                 kept,
                 counted,
                 are_behind: _,
             }| (queue.as_str().to_owned(), kept, counted),
        )
        .collect()
}

pub(crate) async fn a_wrong_count_is_found_and_corrected(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(wrong(&*store).await, []);
    // Tasks on the bus, in a batch, parked, missing, and final.
    let (q, r) = (rows("q", 20), rows("r", 5));
    let stored = store.insert(&q).await.unwrap();
    insert_new(&*store, &r).await;
    let tasks = ids(&q[..10])
        .into_iter()
        .map(|id| (id, stored.batch))
        .collect();
    let offset = Offset { major: 1, minor: 0 };
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset,
                tasks,
            }],
        )
        .await
        .unwrap();
    store
        .unpublish(&ids(&q[..3]), Unpublished::Parked)
        .await
        .unwrap();
    store
        .unpublish(&ids(&q[12..14]), Unpublished::Missing)
        .await
        .unwrap();
    store
        .settle(&[
            completed(&q[0], "w"),
            completed(&q[5], "w"),
            completed(&r[0], "w"),
        ])
        .await
        .unwrap();
    assert_eq!(wrong(&*store).await, []);

    for (by, kept) in [(7, 25), (-18, 0)] {
        db.execute(&format!(
            "UPDATE queue_counts SET count = count + {by} WHERE queue = 'q' AND status = 0"
        ))
        .await;
        assert_eq!(wrong(&*store).await, [("q".to_owned(), kept, 18)]);
        store.correct_count(&queue("r")).await.unwrap();
        assert_eq!(wrong(&*store).await, [("q".to_owned(), kept, 18)]);
        store.correct_count(&queue("q")).await.unwrap();
        assert_eq!(wrong(&*store).await, []);
    }
    // A missing row is added.
    db.execute("DELETE FROM queue_counts WHERE queue = 'q' AND status = 0")
        .await;
    assert_eq!(wrong(&*store).await, [("q".to_owned(), 0, 18)]);
    store.correct_count(&queue("q")).await.unwrap();
    assert_eq!(wrong(&*store).await, []);
    let unfinished = store.unfinished().await.unwrap();
    assert_eq!(
        unfinished
            .into_iter()
            .map(|(_, count)| count)
            .collect::<Vec<_>>(),
        [18, 4]
    );
    // An unknown queue gets no count.
    store.correct_count(&queue("none")).await.unwrap();
    assert_eq!(
        (
            wrong(&*store).await,
            store.unfinished().await.unwrap().len()
        ),
        (vec![], 2)
    );
}

pub(crate) async fn published_tasks_are_found_by_id(db: &impl Database) {
    let store = db.open().await;
    let some = rows("q", 12);
    let stored = store.insert(&some).await.unwrap();
    // Of one batch, six tasks are published together, then two more at a later offset, and then one
    // in another generation.
    let publish = async |rows: std::ops::Range<usize>, generation: &str, major| {
        let tasks = ids(&some[rows])
            .into_iter()
            .map(|id| (id, stored.batch))
            .collect();
        let published = Published {
            partition: 0,
            offset: Offset { major, minor: 0 },
            tasks,
        };
        store
            .mark_published(generation, &[published])
            .await
            .unwrap();
    };
    publish(0..6, "g", 1).await;
    publish(6..8, "g", 2).await;
    publish(8..9, "before", 3).await;
    store.settle(&[completed(&some[0], "w")]).await.unwrap();
    store
        .unpublish(&ids(&some[1..2]), Unpublished::Missing)
        .await
        .unwrap();
    let mut found: Vec<TaskId> = store
        .published_among("g", &ids(&some))
        .await
        .unwrap()
        .into_iter()
        .map(|task| task.id)
        .collect();
    found.sort_unstable();
    assert_eq!(found, ids(&some[2..9]));
    let two = store
        .published_among("g", &[some[0].task.id, some[3].task.id, some[8].task.id])
        .await
        .unwrap();
    let mut two: Vec<_> = two
        .into_iter()
        .map(|task| (task.id, task.offset.map(|offset| offset.major)))
        .collect();
    two.sort_unstable();
    let mut expected = vec![(some[3].task.id, Some(1)), (some[8].task.id, None)];
    expected.sort_unstable();
    assert_eq!(two, expected);
    assert_eq!(store.published_among("g", &[]).await.unwrap(), []);
}

pub(crate) async fn a_stranded_task_is_found(db: &impl Database) {
    let store = db.open().await;
    let some = rows("q", 10);
    insert_new(&*store, &some).await;
    store
        .unpublish(&ids(&some[..2]), Unpublished::Parked)
        .await
        .unwrap();
    store.settle(&[completed(&some[9], "w")]).await.unwrap();
    assert_eq!(store.stranded(None).await.unwrap(), (Vec::new(), None));
    // Every unfinished task is taken off the bus, while only the parked ones are in the outbox.
    db.execute("UPDATE tasks SET on_bus = 0").await;
    let mut found = store.stranded(None).await.unwrap().0;
    found.sort_unstable();
    let mut want: Vec<_> = ids(&some[2..9])
        .into_iter()
        .map(|id| (queue("q"), id))
        .collect();
    want.sort_unstable();
    assert_eq!(found, want);
    assert_eq!(wrong(&*store).await, [("q".to_owned(), 9, 2)]);
    let stranded: Vec<_> = found.into_iter().map(|(_, id)| id).collect();
    store
        .unpublish(&stranded, Unpublished::Missing)
        .await
        .unwrap();
    assert_eq!(
        (store.stranded(None).await.unwrap(), wrong(&*store).await),
        ((Vec::new(), None), Vec::new())
    );
}
