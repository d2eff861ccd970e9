//! Tests of opening and closing shards, and of the counts of each queue.

use std::{collections::HashSet, task::Poll};

use futures::future::join_all;
use taskd::{
    model::{QueueName, ShardId, StoredStatus, TaskId, TaskRow},
    store::{BroughtForward, NewRow, Opening, Store, Unpublished},
};

use super::{Database, NOW, completed, died, fresh, insert_new, queue, row, rows, task};

fn shard(name: &str, number: u32) -> ShardId {
    ShardId {
        queue: queue(name),
        number,
    }
}

fn first(is_new: bool) -> Opening {
    Opening {
        generation: 1,
        is_new,
    }
}

async fn open(store: &dyn Store) -> Vec<(ShardId, u64)> {
    store
        .shards(None)
        .await
        .unwrap()
        .into_iter()
        .map(|shard| (shard.id, shard.generation))
        .collect()
}

pub(crate) async fn shards_open_all_at_once_and_close_one_by_one(db: &impl Database) {
    let store = db.open().await;
    // More than fit into one statement, in two partitions.
    let many: Vec<ShardId> = (0..600)
        .map(|n| shard(&format!("q{}", n / 2), n % 2))
        .collect();
    assert_eq!(
        store.open_shards(&many).await.unwrap(),
        vec![first(true); 600]
    );
    assert_eq!(open(&*store).await.len(), 600);
    // Open some of them again, together with a new one.
    let some = [
        many[3].clone(),
        shard("new", 7),
        many[0].clone(),
        many[3].clone(),
    ];
    let again = [first(false), first(true), first(false), first(false)];
    assert_eq!(store.open_shards(&some).await.unwrap(), again);
    assert_eq!(store.open_shards(&[]).await.unwrap(), []);

    // A shard only closes if the caller names its generation.
    assert!(!store.close_shard(&many[0], 2).await.unwrap());
    for _ in 0..2 {
        assert!(store.close_shard(&many[0], 1).await.unwrap());
    }
    assert!(!open(&*store).await.iter().any(|(id, _)| *id == many[0]));
    // Its neighbour stays open, and the shard reopens in a new generation.
    assert_eq!(
        store.open_shards(&many[..2]).await.unwrap(),
        [
            Opening {
                generation: 2,
                is_new: true
            },
            first(false)
        ]
    );
    assert!(
        !store.close_shard(&many[0], 1).await.unwrap(),
        "it lives again"
    );
    // It is closed, and then rebuilt by a process that considers it lost.
    assert!(store.close_shard(&many[0], 2).await.unwrap());
    assert_eq!(
        store.begin_rebuild(&[(many[0].clone(), 2)]).await.unwrap(),
        [3]
    );
    assert!(open(&*store).await.contains(&(many[0].clone(), 3)));
}

pub(crate) async fn changes_of_shards_are_read_once_and_none_is_missed(db: &impl Database) {
    let stores = [db.open().await, db.open().await];
    let opening = (0..40).map(|n| {
        let store = stores[n % 2].clone();
        tokio::spawn(async move {
            let shards = [shard(&format!("q{n}"), 0), shard("all", n as u32 % 4)];
            store.open_shards(&shards).await.unwrap();
            assert!(store.close_shard(&shards[0], 1).await.unwrap());
        })
    });
    let mut opening = join_all(opening);
    let (mut version, mut opened, mut closed) = (0, HashSet::new(), HashSet::new());
    loop {
        let ends = futures::poll!(&mut opening);
        let changes = stores[0].shards(Some(version)).await.unwrap();
        assert!(
            changes.is_sorted_by_key(|changed| changed.version)
                && changes.iter().all(|one| one.version > version)
        );
        for changed in changes {
            let seen = if changed.is_open {
                &mut opened
            } else {
                &mut closed
            };
            version = changed.version;
            seen.insert(changed.id);
        }
        if let Poll::Ready(ends) = ends {
            ends.into_iter().for_each(|end| end.unwrap());
            break;
        }
    }
    assert_eq!(closed.len(), 40, "each was closed in the end");
    assert_eq!(
        opened
            .iter()
            .filter(|id| id.queue.as_str() == "all")
            .count(),
        4
    );
    assert_eq!(stores[1].shards(Some(version)).await.unwrap(), []);
}

pub(crate) async fn only_queues_with_unfinished_tasks_are_counted(db: &impl Database) {
    let store = db.open().await;
    let (busy, over) = (rows("busy", 3), rows("over", 2));
    insert_new(&*store, &busy).await;
    insert_new(&*store, &over).await;
    store
        .settle(&[
            completed(&over[0], "w"),
            died(&over[1]),
            completed(&busy[0], "w"),
        ])
        .await
        .unwrap();
    assert_eq!(store.unfinished().await.unwrap(), [(queue("busy"), 2)]);
    insert_new(&*store, &[row("over", "new")]).await;
    let mut unfinished = store.unfinished().await.unwrap();
    unfinished.sort();
    assert_eq!(unfinished, [(queue("busy"), 2), (queue("over"), 1)]);

    let of = async |names: &[&str]| {
        let names: Vec<QueueName> = names.iter().map(|name| queue(name)).collect();
        store.counts(Some(&names)).await.unwrap().len()
    };
    assert_eq!(
        (
            of(&["over"]).await,
            of(&["busy", "over"]).await,
            of(&["other"]).await,
            of(&[]).await
        ),
        (3, 5, 0, 0)
    );
}

pub(crate) async fn the_oldest_that_waits_in_sql_is_told(db: &impl Database) {
    let store = db.open().await;
    let at = |name: &str, key: &str, unix_ms: i64, unpublished| {
        let id = TaskId::at(unix_ms, 0);
        NewRow {
            unpublished,
            due_unix_ms: unix_ms + 5,
            ..fresh(TaskRow {
                id,
                ..task(name, key)
            })
        }
    };
    use Unpublished::{Fresh, Parked, Scheduled};
    let stored = [
        at("parked", "a", NOW + 3, Parked),
        at("parked", "b", NOW + 2, Parked),
        at("both", "a", NOW + 4, Parked),
        at("both", "b", NOW + 1, Fresh),
        at("fresh", "a", NOW + 9, Fresh),
        at("scheduled", "a", NOW, Scheduled),
    ];
    insert_new(&*store, &stored).await;
    insert_new(&*store, &[at("young", "a", NOW + 20, Fresh)]).await;
    let expected = [("both", NOW + 1), ("fresh", NOW + 9), ("parked", NOW + 2)]
        .map(|(name, at)| (queue(name), at));
    assert_eq!(store.oldest_waiting(NOW + 15).await.unwrap(), expected);
    assert_eq!(
        store.oldest_waiting(0).await.unwrap(),
        [(queue("both"), NOW + 4), (queue("parked"), NOW + 2)]
    );
}

pub(crate) async fn rows_of_a_time_that_the_clock_left_again_are_due(db: &impl Database) {
    let store = db.open().await;
    let hour = 3_600_000;
    let at = |key: &str, due_unix_ms, unpublished| NewRow {
        due_unix_ms,
        unpublished,
        ..row("q", key)
    };
    use Unpublished::{Fresh, Parked, Scheduled};
    let mut stored: Vec<NewRow> = (0..10)
        .map(|n| at(&format!("f{n}"), NOW + hour + n / 4, Fresh))
        .collect();
    stored.extend((0..5).map(|n| at(&format!("s{n}"), NOW + hour + n, Scheduled)));
    stored.push(at("full", 0, Parked));
    insert_new(&*store, &stored).await;
    insert_new(&*store, &[at("soon", NOW + 5000, Fresh)]).await;

    let (mut after, mut rows, mut pages) = (None, 0, 0);
    loop {
        let page = store
            .bring_forward(NOW + 5000, NOW, after, 3)
            .await
            .unwrap();
        (after, rows, pages) = (page.next, rows + page.rows, pages + 1);
        if after.is_none() {
            break;
        }
    }
    assert_eq!((rows, pages), (10, 2));
    let due = store.due(NOW, 100, &HashSet::new()).await.unwrap();
    assert_eq!(due.len(), 10);
    assert!(due.iter().all(|row| row.task.key.starts_with(b"f")));
    let nothing = BroughtForward {
        rows: 0,
        next: None,
    };
    assert_eq!(
        store
            .bring_forward(NOW + 5000, NOW, None, 100)
            .await
            .unwrap(),
        nothing
    );
}

pub(crate) async fn rows_and_owners_are_found_by_ids_and_keys(db: &impl Database) {
    let store = db.open().await;
    let stored = rows("q", 300);
    insert_new(&*store, &stored).await;
    let mut ids: Vec<TaskId> = stored.iter().map(|row| row.task.id).collect();
    ids.push(TaskId::new());
    let mut found = store.rows(&ids).await.unwrap();
    found.sort_by_key(|row| row.id);
    let mut expected: Vec<TaskRow> = stored.iter().map(|row| row.task.clone()).collect();
    expected.sort_by_key(|row| row.id);
    assert_eq!(found, expected);
    assert_eq!(store.rows(&[]).await.unwrap(), []);

    // This includes a task that was removed.
    store.settle(&[completed(&stored[0], "w")]).await.unwrap();
    let (hour, century) = (
        std::time::Duration::from_secs(3600),
        std::time::Duration::from_secs(3_600_000_000),
    );
    assert_eq!(
        store.lately_final(&ids, century).await.unwrap(),
        [stored[0].task.id]
    );
    assert_eq!(store.lately_final(&ids, hour).await.unwrap(), []);
    assert_eq!(
        store
            .remove_finished(std::time::Duration::from_secs(1), 10)
            .await
            .unwrap(),
        1
    );
    let mut keys: Vec<_> = stored.iter().map(|row| row.task.key_hash).collect();
    keys.push(row("q", "nobody's").task.key_hash);
    let with_status: HashSet<_> = store.key_owners(&keys).await.unwrap().into_iter().collect();
    let status = |place: usize| {
        if place == 0 {
            StoredStatus::Completed
        } else {
            StoredStatus::Unfinished
        }
    };
    let expected = stored
        .iter()
        .enumerate()
        .map(|(place, row)| (row.task.key_hash, row.task.id, status(place)));
    assert_eq!(with_status, expected.collect());
}
