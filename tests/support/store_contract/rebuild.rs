//! Tests of shards that Redis lost: their tasks are published again, and one row per shard records
//! this.

use std::collections::BTreeMap;

use futures::future::join_all;
use taskd::{
    model::{Offset, QueueName, ShardId, TaskId, TaskRow},
    store::{
        NewRow, Place, RebuildPage, Rebuilding, Rebuilt, Store, Stretch,
        Unpublished::{Fresh, Missing, Parked},
        Walked,
    },
};

use super::{
    Database, NOW, Unfinished, at, completed, count, counts, detail_of, fresh, ids, in_outbox,
    insert_new, outbox, parked_rows, publish, published, published_at, published_in, queue, task,
};

fn shard(name: &str, number: u32) -> ShardId {
    ShardId {
        queue: queue(name),
        number,
    }
}

fn row_in(name: &str, partition: u32, key: impl AsRef<[u8]>) -> NewRow {
    fresh(TaskRow {
        partition,
        ..task(name, key)
    })
}

/// Opens the shards for the first time, and begins to rebuild them.
async fn begin(store: &dyn Store, shards: &[ShardId]) -> Rebuilding {
    store.open_shards(shards).await.unwrap();
    let lost: Vec<(ShardId, u64)> = shards.iter().map(|shard| (shard.clone(), 1)).collect();
    assert_eq!(
        store.begin_rebuild(&lost).await.unwrap(),
        vec![2; shards.len()]
    );
    store.rebuilding().await.unwrap()
}

async fn end(store: &dyn Store, shard: &ShardId, generation: u64, offset: Option<Offset>) {
    let rebuilt = Rebuilt {
        shard: shard.clone(),
        generation,
        offset,
    };
    store.end_rebuild("g", &[rebuilt]).await.unwrap();
}

/// All pages, with at most `limit` tasks each.
async fn pages(store: &dyn Store, of: &Rebuilding, limit: u32) -> Vec<RebuildPage> {
    let (mut pages, mut after) = (Vec::new(), None);
    loop {
        let page = store.rebuild_page(of, after.as_ref(), limit).await.unwrap();
        after = page.next.clone();
        pages.push(page);
        if after.is_none() {
            return pages;
        }
    }
}

fn tasks_of(pages: &[RebuildPage]) -> Vec<TaskRow> {
    pages.iter().flat_map(|page| page.tasks.clone()).collect()
}

fn tasks(rows: &[&NewRow]) -> Vec<TaskRow> {
    rows.iter().map(|row| row.task.clone()).collect()
}

pub(crate) async fn the_generation_of_a_lost_shard_is_raised_once(db: &impl Database) {
    let store = db.open().await;
    let [first, second, third] = [0, 1, 2].map(|number| shard("q", number));
    store
        .open_shards(&[first.clone(), second.clone(), third.clone()])
        .await
        .unwrap();
    assert_eq!(store.rebuilding().await.unwrap(), Rebuilding::default());
    let version = store.shards(None).await.unwrap()[0].version;

    let lost = [(first.clone(), 1), (second.clone(), 1)];
    for _ in 0..2 {
        assert_eq!(store.begin_rebuild(&lost).await.unwrap(), [2, 2]);
    }
    let changed: Vec<ShardId> = store
        .shards(Some(version))
        .await
        .unwrap()
        .into_iter()
        .map(|changed| changed.id)
        .collect();
    assert_eq!(changed, [first.clone(), second.clone()]);
    assert_eq!(
        store.begin_rebuild(&[(first.clone(), 2)]).await.unwrap(),
        [3]
    );
    assert_eq!(
        store.begin_rebuild(&[(first.clone(), 1)]).await.unwrap(),
        [3],
        "somebody was further"
    );
    let racing = join_all((0..8).map(|_| store.begin_rebuild(&lost[1..]))).await;
    assert!(
        racing
            .into_iter()
            .all(|generations| generations.unwrap() == [2])
    );
    let racing =
        (0..8).map(|_| async { store.begin_rebuild(&[(third.clone(), 1)]).await.unwrap() });
    assert!(
        join_all(racing)
            .await
            .into_iter()
            .all(|generations| generations == [2])
    );
    let expected = [(first.clone(), 3), (second.clone(), 2), (third, 2)].into();
    assert_eq!(
        store.rebuilding().await.unwrap(),
        Rebuilding {
            shards: expected,
            queues: vec![(queue("q"), 0)],
            upto: None
        }
    );

    // A process that finds it empty closes it. Another one considers it lost, and rebuilds it.
    assert!(store.close_shard(&second, 2).await.unwrap());
    assert!(
        !store
            .rebuilding()
            .await
            .unwrap()
            .shards
            .contains_key(&second)
    );
    assert_eq!(
        store.begin_rebuild(&[(second.clone(), 2)]).await.unwrap(),
        [3]
    );
    assert_eq!(store.rebuilding().await.unwrap().shards[&second], 3);
    assert!(
        store
            .shards(None)
            .await
            .unwrap()
            .iter()
            .any(|open| (&open.id, open.generation) == (&second, 3))
    );
    assert!(store.begin_rebuild(&[]).await.unwrap().is_empty());
}

pub(crate) async fn shards_are_rebuilt_page_by_page(db: &impl Database) {
    let store = db.open().await;
    let mut rows: Vec<NewRow> = (0..7)
        .map(|n| row_in("q", u32::from(n == 3), format!("{n}")))
        .collect();
    rows[2].task.replicas = 2;
    let elsewhere = [row_in("other", 0, "a"), row_in("third", 0, "b")];
    insert_new(&*store, &rows).await;
    insert_new(&*store, &elsewhere).await;
    publish(&*store, &rows, at(1, 0)).await;
    store
        .settle(&[completed(&rows[1], "w"), completed(&rows[2], "w")])
        .await
        .unwrap();
    store.unpublish(&ids(&rows[4..5]), Parked).await.unwrap();
    let places = published(&*store).await;

    // Include the batch that is not marked as published: it may have been published before the end.
    let rebuilding = begin(&*store, &[shard("q", 0), shard("other", 0)]).await;
    assert_eq!(rebuilding.upto, Some(elsewhere[1].task.id));
    // The smaller queue comes first.
    let expected = tasks(&[&elsewhere[0], &rows[0], &rows[2], &rows[5], &rows[6]]);
    for (limit, count) in [(1, 8), (2, 4), (3, 3), (7, 2), (8, 1)] {
        let pages = pages(&*store, &rebuilding, limit).await;
        // The walk passes seven tasks; one is in another shard, and one is in the outbox. A full
        // page may have a next page.
        assert_eq!(pages.len(), count, "{limit}");
        assert_eq!(tasks_of(&pages), expected, "{limit}");
        assert_eq!(pages.iter().map(|page| page.credited).sum::<u64>(), 1);
    }

    // A task that is stored now is published after the end, so it is not part of the walk.
    let late = [row_in("q", 0, "late")];
    insert_new(&*store, &late).await;
    assert_eq!(tasks_of(&pages(&*store, &rebuilding, 2).await), expected);
    // A task that became final or came into the outbox meanwhile is not part of it, either.
    store.settle(&[completed(&rows[0], "w")]).await.unwrap();
    store.unpublish(&ids(&rows[5..6]), Missing).await.unwrap();
    let expected = tasks(&[&elsewhere[0], &rows[2], &rows[6]]);
    assert_eq!(tasks_of(&pages(&*store, &rebuilding, 2).await), expected);

    // The walk has not changed anything.
    let left: Vec<_> = places
        .into_iter()
        .filter(|task| ![rows[0].task.id, rows[5].task.id].contains(&task.id))
        .collect();
    assert_eq!(published(&*store).await, left);
    assert_eq!(
        parked_rows(&*store, "q", 10).await,
        [in_outbox(&rows[4], Parked)]
    );
    assert!(detail_of(&*store, &elsewhere[0]).await.unpublished);
    let waiting = [
        in_outbox(&rows[5], Missing),
        in_outbox(&elsewhere[0], Fresh),
        in_outbox(&elsewhere[1], Fresh),
    ];
    assert_eq!(
        outbox(&*store).await,
        [&waiting[..], &[in_outbox(&late[0], Fresh)]].concat()
    );
}

pub(crate) async fn walks_go_by_queue_and_id_through_all_shards(db: &impl Database) {
    let store = db.open().await;
    let row_of = |n: usize| {
        let mut row = row_in(["q", "r", "s"][n % 3], (n % 2) as u32, n.to_string());
        row.task.id = TaskId::at(NOW + (n * 7 % 40) as i64 * 100, n);
        row
    };
    let mut rows: Vec<NewRow> = (0..40).map(row_of).collect();
    for insert in rows.chunks(13) {
        insert_new(&*store, insert).await;
    }
    publish(&*store, &rows, at(1, 0)).await;
    rows.sort_unstable_by_key(|row| (row.task.queue.clone(), row.task.id));
    let all: Vec<_> = rows
        .iter()
        .map(|row| published_at(row, Some(at(1, 0))))
        .collect();
    let lost = [shard("q", 0), shard("s", 1)];
    let mut of_lost: Vec<&NewRow> = rows
        .iter()
        .filter(|row| lost.contains(&published_at(row, None).shard))
        .collect();
    // Queue `s` comes first, because it has one task fewer than `q`.
    of_lost.sort_by_key(|row| row.task.queue != queue("s"));
    let rebuilding = begin(&*store, &lost).await;
    assert_eq!(rebuilding.upto, rows.iter().map(|row| row.task.id).max());
    let walk = async |queue: Option<&QueueName>, limit: u32| {
        let (mut walked, mut after) = (Vec::new(), None::<Walked>);
        loop {
            let stretch = Stretch {
                queue,
                after: after.as_ref(),
                ..Stretch::ALL
            };
            let (tasks, next) = published_in(&*store, "g", stretch, limit).await;
            walked.extend(tasks);
            after = next;
            if after.is_none() {
                return walked;
            }
        }
    };
    for limit in [1, 3, 40] {
        assert_eq!(walk(None, limit).await, all);
        let of_r: Vec<_> = all
            .iter()
            .filter(|task| task.shard.queue == queue("r"))
            .cloned()
            .collect();
        assert_eq!(walk(Some(&queue("r")), limit).await, of_r);
        assert_eq!(
            tasks_of(&pages(&*store, &rebuilding, limit).await),
            tasks(&of_lost)
        );
    }
    // A wrong count does not stop a walk.
    db.execute("UPDATE queue_counts SET count = -3 WHERE queue = 'q'")
        .await;
    assert_eq!(walk(None, 3).await, all);
    let [r, s] = ["r", "s"].map(|name| count(name, Unfinished, 13));
    assert_eq!(counts(&*store).await, [r, s]);
    let unfinished: BTreeMap<QueueName, u64> =
        store.unfinished().await.unwrap().into_iter().collect();
    assert_eq!(
        unfinished,
        [(queue("q"), 0), (queue("r"), 13), (queue("s"), 13)].into()
    );
    let rebuilding = store.rebuilding().await.unwrap();
    assert_eq!(rebuilding.queues, [(queue("q"), 0), (queue("s"), 13)]);
    of_lost.sort_by_key(|row| row.task.queue != queue("q"));
    assert_eq!(
        tasks_of(&pages(&*store, &rebuilding, 3).await),
        tasks(&of_lost)
    );
    // A walk may continue after a queue that has no tasks any more, or before one that is new.
    let gone = Walked {
        queue: queue("qq"),
        id: TaskId::new(),
    };
    let (page, _) = published_in(
        &*store,
        "g",
        Stretch {
            after: Some(&gone),
            ..Stretch::ALL
        },
        40,
    )
    .await;
    assert!(
        page.iter().all(|task| task.shard.queue > gone.queue),
        "{page:?}"
    );
    assert_eq!(page.len(), 26);
}

pub(crate) async fn a_walk_comes_to_more_queues_than_a_page(db: &impl Database) {
    let store = db.open().await;
    let rows: Vec<NewRow> = (0..1300)
        .map(|n| row_in(&format!("q{n:04}"), 0, "k"))
        .collect();
    insert_new(&*store, &rows).await;
    publish(&*store, &rows, at(1, 0)).await;
    let (first, next) = published_in(&*store, "g", Stretch::ALL, 5000).await;
    let next = next.expect("a page has a bound of queues");
    let (rest, end) = published_in(
        &*store,
        "g",
        Stretch {
            after: Some(&next),
            ..Stretch::ALL
        },
        5000,
    )
    .await;
    assert_eq!(end, None);
    let walked: Vec<TaskId> = [first, rest].concat().iter().map(|task| task.id).collect();
    assert_eq!(walked, ids(&rows));
    let shards: Vec<ShardId> = rows
        .iter()
        .map(|row| shard(row.task.queue.as_str(), 0))
        .collect();
    let rebuilding = begin(&*store, &shards).await;
    let pages = pages(&*store, &rebuilding, 5000).await;
    assert_eq!(
        (pages.len(), tasks_of(&pages)),
        (2, tasks(&rows.iter().collect::<Vec<_>>()))
    );
}

pub(crate) async fn a_page_of_a_rebuild_has_bounded_weight(db: &impl Database) {
    let store = db.open().await;
    let large = |n: u32| {
        let payload = vec![7; 6 << 20].into();
        fresh(TaskRow {
            payload,
            partition: n % 2,
            ..task("q", format!("{n}"))
        })
    };
    let rows: Vec<NewRow> = (0..10).map(large).collect();
    for rows in rows.chunks(2) {
        insert_new(&*store, rows).await;
    }
    let rebuilding = begin(&*store, &[shard("q", 0)]).await;
    let pages = pages(&*store, &rebuilding, 100).await;
    assert_eq!(
        pages
            .iter()
            .map(|page| page.tasks.len())
            .collect::<Vec<_>>(),
        [3, 2]
    );
    assert_eq!(
        tasks_of(&pages),
        tasks(&rows.iter().step_by(2).collect::<Vec<_>>())
    );
}

pub(crate) async fn the_tasks_of_a_rebuilt_shard_have_one_place(db: &impl Database) {
    let store = db.open().await;
    let rows: Vec<NewRow> = (0..5)
        .map(|n| row_in("q", u32::from(n == 4), format!("{n}")))
        .collect();
    insert_new(&*store, &rows).await;
    publish(&*store, &rows, at(2, 0)).await;
    store.unpublish(&ids(&rows[..2]), Missing).await.unwrap();
    publish(&*store, &rows[..1], at(9, 0)).await;
    let first = shard("q", 0);
    let places = async |generation: &str| {
        let published = published_in(&*store, generation, Stretch::ALL, 100).await.0;
        let place = |row: &NewRow| {
            published
                .iter()
                .find(|task| task.id == row.task.id)
                .and_then(|task| task.offset)
        };
        let places: Vec<_> = rows.iter().map(place).collect();
        for (row, place) in rows
            .iter()
            .zip(&places)
            .filter(|(_, place)| place.is_some())
        {
            assert_eq!(
                store.place(generation, row.task.id).await.unwrap(),
                Some(Place::On(*place))
            );
        }
        places
    };
    let own = [
        Some(at(9, 0)),
        None,
        Some(at(2, 0)),
        Some(at(2, 0)),
        Some(at(2, 0)),
    ];
    begin(&*store, std::slice::from_ref(&first)).await;
    assert_eq!(places("g").await, own, "it is not published again yet");
    // The end of an earlier generation of the shard is ignored.
    end(&*store, &first, 1, Some(at(8, 8))).await;
    assert_eq!(
        store.rebuilding().await.unwrap().shards,
        [(first.clone(), 2)].into()
    );
    assert_eq!(places("g").await, own);

    end(&*store, &first, 2, Some(at(5, 7))).await;
    assert_eq!(store.rebuilding().await.unwrap(), Rebuilding::default());
    let rebuilt = [
        Some(at(9, 0)),
        None,
        Some(at(5, 7)),
        Some(at(5, 7)),
        Some(at(2, 0)),
    ];
    assert_eq!(places("g").await, rebuilt);
    assert_eq!(places("h").await, [None; 5], "of another topic");
    // A second watchdog, which published the tasks once more, ends later.
    end(&*store, &first, 2, Some(at(6, 0))).await;
    assert_eq!(places("g").await, rebuilt);

    // A task is published again at an earlier offset, and another one is stored later.
    publish(&*store, &rows[1..2], at(3, 0)).await;
    assert_eq!(places("g").await[1], Some(at(5, 7)));
    let late = [row_in("q", 0, "late")];
    insert_new(&*store, &late).await;
    assert!(
        !published(&*store)
            .await
            .iter()
            .any(|task| task.id == late[0].task.id)
    );
    assert!(detail_of(&*store, &late[0]).await.unpublished);
    publish(&*store, &late, at(7, 0)).await;
    assert!(
        published(&*store)
            .await
            .contains(&published_at(&late[0], Some(at(7, 0))))
    );

    // The shard is lost again, but there is nothing to publish.
    assert_eq!(
        store.begin_rebuild(&[(first.clone(), 2)]).await.unwrap(),
        [3]
    );
    end(&*store, &first, 3, None).await;
    assert_eq!(store.rebuilding().await.unwrap(), Rebuilding::default());
    assert_eq!(places("g").await[2], Some(at(5, 7)));
}

pub(crate) async fn many_shards_are_rebuilt_at_once(db: &impl Database) {
    let store = db.open().await;
    let mut many: Vec<ShardId> = (0..600).map(|n| shard(&format!("q{n}"), n % 3)).collect();
    many.sort_unstable();
    let rows: Vec<NewRow> = many
        .iter()
        .map(|id| row_in(id.queue.as_str(), id.number, "k"))
        .collect();
    insert_new(&*store, &rows).await;
    publish(&*store, &rows, at(1, 0)).await;
    let rebuilding = begin(&*store, &many).await;
    assert_eq!(
        rebuilding.shards,
        many.iter().map(|shard| (shard.clone(), 2)).collect()
    );
    let walked: Vec<TaskId> = tasks_of(&pages(&*store, &rebuilding, 250).await)
        .iter()
        .map(|task| task.id)
        .collect();
    assert_eq!(walked, ids(&rows));
    let place = |shard: &ShardId| at(u64::MAX >> 2, shard.number.into());
    let rebuilt = many.iter().map(|shard| {
        let (shard, offset) = (shard.clone(), Some(place(shard)));
        Rebuilt {
            shard,
            generation: 2,
            offset,
        }
    });
    store
        .end_rebuild("g", &rebuilt.collect::<Vec<_>>())
        .await
        .unwrap();
    let expected: Vec<_> = rows
        .iter()
        .zip(&many)
        .map(|(row, shard)| published_at(row, Some(place(shard))))
        .collect();
    assert_eq!(published(&*store).await, expected);
    assert_eq!(store.rebuilding().await.unwrap(), Rebuilding::default());
    store.end_rebuild("g", &[]).await.unwrap();
}
