//! Tests of the counts in the books.

use std::collections::BTreeMap;

use taskd::{
    model::{Offset, QueueName},
    store::{Published, Store, TurnedAway, Unpublished},
};

use super::{Database, completed, fresh, ids, insert_new, queue, rows, task};

async fn off_bus(store: &dyn Store) -> BTreeMap<(QueueName, Unpublished), u64> {
    store.off_bus().await.unwrap()
}

pub(crate) async fn what_waits_off_the_bus_is_counted(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(off_bus(&*store).await, BTreeMap::new());
    let (mut some, others) = (rows("q", 30), rows("r", 5));
    let mut far = fresh(task("q", "far"));
    (far.unpublished, far.due_unix_ms) = (Unpublished::Scheduled, i64::MAX - 1);
    some.push(far);
    // Insert two batches; the first one has tasks of both queues.
    let both: Vec<_> = some.iter().chain(&others).cloned().collect();
    let stored = store.insert(&both).await.unwrap();
    insert_new(&*store, &rows("s", 2)).await;
    let of = |name: &str, why, count| ((queue(name), why), count);
    let mut want = BTreeMap::from([
        of("q", Unpublished::Fresh, 30),
        of("q", Unpublished::Scheduled, 1),
        of("r", Unpublished::Fresh, 5),
        of("s", Unpublished::Fresh, 2),
    ]);
    assert_eq!(off_bus(&*store).await, want);

    // The first batch is published, some of it comes back, and one of those tasks ends.
    let (offset, tasks) = (
        Offset { major: 1, minor: 0 },
        ids(&both).into_iter().map(|id| (id, stored.batch)),
    );
    let fresh_ones = tasks.filter(|(id, _)| *id != some[30].task.id).collect();
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset,
                tasks: fresh_ones,
            }],
        )
        .await
        .unwrap();
    store
        .unpublish(&ids(&some[..3]), Unpublished::Parked)
        .await
        .unwrap();
    store
        .unpublish(&ids(&others[..2]), Unpublished::Missing)
        .await
        .unwrap();
    store.settle(&[completed(&some[0], "w")]).await.unwrap();
    want = BTreeMap::from([
        of("q", Unpublished::Parked, 2),
        of("q", Unpublished::Scheduled, 1),
        of("r", Unpublished::Missing, 2),
        of("s", Unpublished::Fresh, 2),
    ]);
    assert_eq!(off_bus(&*store).await, want);
}

pub(crate) async fn what_is_turned_away_adds_up(db: &impl Database) {
    let stores = [db.open().await, db.open().await];
    let (q, r) = (Some(queue("q")), Some(queue("r")));
    let counts = |list: &[(&Option<QueueName>, TurnedAway, u64)]| -> BTreeMap<_, _> {
        list.iter()
            .map(|(queue, why, count)| (((*queue).clone(), *why), *count))
            .collect()
    };
    let (duplicate, rejected) = (TurnedAway::Duplicate, TurnedAway::Rejected);
    stores[0]
        .add_turned_away(&counts(&[
            (&q, duplicate, 2),
            (&r, rejected, 1),
            (&None, rejected, 5),
        ]))
        .await
        .unwrap();
    let three = BTreeMap::from([((q.clone(), duplicate), 3)]);
    let more = (0..20).map(|n| stores[n % 2].add_turned_away(&three));
    futures::future::try_join_all(more).await.unwrap();
    let want = counts(&[(&q, duplicate, 62), (&None, rejected, 5)]);
    assert_eq!(stores[1].turned_away(&[queue("q")]).await.unwrap(), want);
    assert_eq!(
        stores[1].turned_away(&[]).await.unwrap(),
        counts(&[(&None, rejected, 5)])
    );
}
