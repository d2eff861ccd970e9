//! Tests of listing tasks with every filter, page by page.

use std::collections::HashSet;

use taskd::{
    model::{Change, ShardId, TaskFilter, TaskId, TaskStatus, WorkerName},
    store::{Decided, EndedChange, ListedTask, Settlement, Store, TaskPage, TaskSearch, Wanted},
};

use super::{
    Completed, Database, Dead, NOW, StoredStatus, TaskRow, Unfinished, completed, died, fresh,
    insert_new, queue, rows, task,
};

/// A stored task, with the properties that a filter can match.
struct Known {
    task: TaskRow,
    status: StoredStatus,
    workers: Vec<&'static str>,
}

impl Known {
    fn fits(&self, filter: &TaskFilter) -> bool {
        let (task, at) = (&self.task, self.task.id.created_unix_ms());
        filter
            .queue
            .as_ref()
            .is_none_or(|queue| *queue == task.queue)
            && (filter.statuses.is_empty() || filter.stored_statuses().contains(&self.status))
            && filter.key.as_ref().is_none_or(|key| *key == task.key)
            && task.key.starts_with(&filter.key_prefix)
            && filter
                .headers
                .iter()
                .all(|header| task.headers.contains(header))
            && filter
                .worker
                .as_ref()
                .is_none_or(|worker| self.workers.contains(&worker.as_str()))
            && filter.since_unix_ms.is_none_or(|since| at >= since)
            && filter.until_unix_ms.is_none_or(|until| at < until)
    }
}

/// The ids on all pages, and the number of pages.
async fn listed(
    store: &dyn Store,
    filter: &TaskFilter,
    limit: u32,
    look_at: u32,
) -> (Vec<TaskId>, usize) {
    let mut search = TaskSearch {
        filter: filter.clone(),
        limit,
        look_at,
        after: None,
        stays_in_queue: false,
    };
    let (mut ids, mut pages) = (Vec::new(), 0);
    loop {
        let TaskPage {
            tasks,
            looked_at,
            next,
        } = store.search(&search).await.unwrap();
        assert!(
            tasks.len() <= limit as usize
                && looked_at <= look_at
                && looked_at as usize >= tasks.len()
        );
        ids.extend(tasks.iter().map(|task| task.id));
        pages += 1;
        match next {
            Some(next) => assert!(
                search
                    .after
                    .replace(next)
                    .is_none_or(|before| next.0 < before.0)
            ),
            None => return (ids, pages),
        }
    }
}

pub(crate) async fn tasks_are_listed_by_every_filter(db: &impl Database) {
    let store = db.open().await;
    let mut known = Vec::new();
    for n in 0..60_usize {
        let name = ["q", "r", "q2"][n % 3];
        let header = |name: &str, value: usize| (name.to_owned(), value.to_string());
        let task = TaskRow {
            id: TaskId::at(NOW + n as i64 / 4 * 1000, n),
            headers: [header("two", n % 2), header("five", n % 5)].into(),
            replicas: 2,
            ..task(name, format!("{}/{n}", if n % 7 < 3 { "a" } else { "ab" }))
        };
        known.push(Known {
            task,
            status: Unfinished,
            workers: vec![],
        });
    }
    insert_new(
        &*store,
        &known
            .iter()
            .map(|one| fresh(one.task.clone()))
            .collect::<Vec<_>>(),
    )
    .await;
    let mut reports = Vec::new();
    for (n, one) in known.iter_mut().enumerate() {
        let row = fresh(one.task.clone());
        match n % 4 {
            0 => {}
            1 => (one.workers, one.status) = (vec!["v"], Unfinished),
            2 => (one.workers, one.status) = (vec!["v", "w"], Completed),
            _ => one.status = Dead,
        }
        reports.extend(one.workers.iter().map(|worker| completed(&row, worker)));
        if one.status == Dead {
            let mut death = died(&row);
            if let Settlement::Died { reason, .. } = &mut death {
                *reason = format!("no\0luck{}", "ü".repeat(5000));
            }
            reports.push(death);
        }
    }
    store.settle(&reports).await.unwrap();

    let q = TaskFilter {
        queue: Some(queue("q")),
        ..Default::default()
    };
    let statuses = |text: &str| TaskStatus::list(text).unwrap();
    let worker = |name: &str| WorkerName::new(name).ok();
    let (since_unix_ms, until_unix_ms) = (Some(NOW + 3_000), Some(NOW + 9_000));
    let filters = [
        TaskFilter::default(),
        TaskFilter {
            since_unix_ms,
            ..Default::default()
        },
        TaskFilter {
            since_unix_ms,
            until_unix_ms,
            ..Default::default()
        },
        q.clone(),
        TaskFilter {
            queue: Some(queue("none")),
            ..Default::default()
        },
        TaskFilter {
            statuses: statuses("dead"),
            ..q.clone()
        },
        TaskFilter {
            statuses: statuses("unfinished,completed"),
            since_unix_ms,
            until_unix_ms,
            ..q.clone()
        },
        TaskFilter {
            statuses: statuses("cancelled"),
            ..q.clone()
        },
        TaskFilter {
            key: Some(known[3].task.key.clone()),
            ..q.clone()
        },
        TaskFilter {
            key: Some(known[3].task.key.clone()),
            statuses: statuses("completed"),
            ..q.clone()
        },
        TaskFilter {
            key: Some("missing".into()),
            ..q.clone()
        },
        TaskFilter {
            key_prefix: "ab".into(),
            ..q.clone()
        },
        TaskFilter {
            key_prefix: "a/".into(),
            statuses: statuses("dead,completed"),
            until_unix_ms,
            ..q.clone()
        },
        TaskFilter {
            headers: vec![("two".into(), "1".into())],
            ..q.clone()
        },
        TaskFilter {
            headers: vec![("two".into(), "1".into()), ("five".into(), "3".into())],
            ..q.clone()
        },
        TaskFilter {
            headers: vec![("three".into(), "1".into())],
            ..q.clone()
        },
        TaskFilter {
            worker: worker("w"),
            ..Default::default()
        },
        TaskFilter {
            worker: worker("v"),
            since_unix_ms,
            until_unix_ms,
            ..Default::default()
        },
        TaskFilter {
            worker: worker("v"),
            statuses: statuses("unfinished"),
            ..q.clone()
        },
        TaskFilter {
            worker: worker("V"),
            ..Default::default()
        },
    ];
    known.sort_by_key(|one| std::cmp::Reverse(one.task.id));
    for filter in &filters {
        let expected: Vec<TaskId> = known
            .iter()
            .filter(|one| one.fits(filter))
            .map(|one| one.task.id)
            .collect();
        for (limit, look_at) in [(1, 100), (3, 100), (100, 7), (100, 100)] {
            let (ids, pages) = listed(&*store, filter, limit, look_at).await;
            assert_eq!(ids, expected, "{filter:?}, {limit} of {look_at}");
            assert!(pages <= 61, "{pages} pages for {filter:?}");
        }
    }

    let search = TaskSearch {
        filter: q,
        limit: 100,
        look_at: 100,
        after: None,
        stays_in_queue: false,
    };
    let page = store.search(&search).await.unwrap();
    let dead = page.tasks.iter().find(|task| task.status == Dead).unwrap();
    let row = known
        .iter()
        .map(|one| &one.task)
        .find(|row| row.id == dead.id)
        .unwrap();
    let expected = ListedTask {
        id: row.id,
        shard: taskd::model::ShardId {
            queue: row.queue.clone(),
            number: row.partition,
        },
        key: row.key.clone(),
        status: Dead,
        replicas: 2,
        completed: 0,
        attempts: 5,
        priority: row.priority,
        updated_unix_ms: NOW + 20,
        not_before_unix_ms: 0,
        deadline_unix_ms: 0,
        sequence: String::new(),
        tree: None,
        reason: format!("no\0luck{}", "ü".repeat(4096 - 7)),
        epoch: 0,
    };
    assert_eq!(*dead, expected);
}

/// SQL learns of ends and inserts late, so their times do not say whether a count saw them.
pub(crate) async fn what_was_counted_is_found_again_and_nothing_else(db: &impl Database) {
    let store = db.open().await;
    let old = |n: usize| {
        fresh(TaskRow {
            id: TaskId::at(NOW - 1_000 + n as i64, n),
            ..task("q", format!("key {n}"))
        })
    };
    let tasks: Vec<_> = (0..12).map(old).collect();
    insert_new(&*store, &tasks[..10]).await;
    let deaths: Vec<Settlement> = tasks[..4].iter().map(died).collect();
    store.settle(&deaths).await.unwrap();
    let shard = ShardId {
        queue: queue("q"),
        number: tasks[8].task.partition,
    };
    store.open_shards(&[shard]).await.unwrap();

    let as_of = store.begin_era(NOW + 100).await.unwrap();
    assert_eq!(as_of, NOW + 100);
    let ended = TaskFilter {
        queue: Some(queue("q")),
        statuses: TaskStatus::list("dead,cancelled").unwrap(),
        as_of_unix_ms: Some(as_of),
        ..Default::default()
    };
    let found = async |filter: &TaskFilter| {
        let (mut found, _) = listed(&*store, filter, 100, 100).await;
        found.sort_unstable();
        found
    };
    let ids = |of: &[usize]| -> Vec<TaskId> { of.iter().map(|n| tasks[*n].task.id).collect() };
    assert_eq!(found(&ended).await, ids(&[0, 1, 2, 3]));

    // All of this happened before the count, and SQL learns of it now.
    store
        .settle(&[died(&tasks[4]), died(&tasks[5])])
        .await
        .unwrap();
    let another_process = db.open().await;
    another_process.settle(&[died(&tasks[6])]).await.unwrap();
    insert_new(&*another_process, &tasks[10..]).await;
    store.settle(&[died(&tasks[10])]).await.unwrap();
    let cancel = store
        .want(&[tasks[8].task.id], &Change::Cancel, NOW, &[])
        .await
        .unwrap();
    let [Wanted::Kept(cancel)] = &cancel[..] else {
        panic!("{cancel:?}")
    };
    let cancelled = EndedChange {
        id: cancel.task.id,
        turn: Some(cancel.turn),
        end: Decided::Cancelled {
            epoch: cancel.task.epoch,
            generation: 1,
        },
    };
    store.end_changes(&[cancelled], NOW).await.unwrap();
    assert_eq!(found(&ended).await, ids(&[0, 1, 2, 3]));
    // A job has found some, and they change before it changes them.
    let of_count = Some(as_of);
    let (late, mixed) = (ids(&[4, 10]), ids(&[7, 11]));
    let retried = store.retry_as_of(&late, NOW, "ops", "retry task", of_count);
    assert!(
        retried.await.unwrap().is_empty(),
        "they died after the count"
    );
    let cancel = store.want_as_of(&mixed, &Change::Cancel, NOW, &[], of_count);
    let cancel = cancel.await.unwrap();
    assert!(
        matches!(&cancel[..], [Wanted::Kept(_), Wanted::Unknown]),
        "11 came late: {cancel:?}"
    );
    let [Wanted::Kept(kept), _] = &cancel[..] else {
        panic!("{cancel:?}")
    };
    let stays = EndedChange {
        id: kept.task.id,
        turn: Some(kept.turn),
        end: Decided::Over,
    };
    store.end_changes(&[stays], NOW).await.unwrap();
    // One that was counted is sent again, and dies once more.
    store
        .retry_with_acts(&ids(&[0]), NOW, "ops", "retry task")
        .await
        .unwrap();
    store.settle(&[died(&tasks[0])]).await.unwrap();
    assert_eq!(found(&ended).await, ids(&[1, 2, 3]));
    // A late result makes a filter by its worker match.
    store.settle(&[completed(&tasks[1], "w")]).await.unwrap();
    let by_worker = TaskFilter {
        worker: WorkerName::new("w").ok(),
        ..ended.clone()
    };
    assert_eq!(found(&by_worker).await, []);
    let unfinished = TaskFilter {
        statuses: TaskStatus::list("unfinished").unwrap(),
        ..ended.clone()
    };
    assert_eq!(found(&unfinished).await, ids(&[7, 9]), "11 came late");

    // The next count sees all of it, whatever its clock says.
    let next = store.begin_era(NOW).await.unwrap();
    assert_eq!(next, as_of + 1);
    let later = TaskFilter {
        as_of_unix_ms: Some(next),
        ..ended
    };
    assert_eq!(found(&later).await, ids(&[0, 1, 2, 3, 4, 5, 6, 8, 10]));
}

pub(crate) async fn a_page_that_stays_in_its_queue_tells_nothing_of_others(db: &impl Database) {
    let store = db.open().await;
    let (own, others) = (rows("q", 6), rows("other", 30));
    insert_new(&*store, &own).await;
    insert_new(&*store, &others).await;
    let done: Vec<_> = own[..4]
        .iter()
        .chain(&others)
        .map(|row| completed(row, "w"))
        .collect();
    store.settle(&done).await.unwrap();
    let filter = TaskFilter {
        queue: Some(queue("q")),
        worker: WorkerName::new("w").ok(),
        ..Default::default()
    };
    let ids: HashSet<TaskId> = own.iter().map(|row| row.task.id).collect();
    for limit in [1, 3, 100] {
        let mut search = TaskSearch {
            filter: filter.clone(),
            limit,
            look_at: 4,
            after: None,
            stays_in_queue: true,
        };
        let (mut found, mut looked_at) = (Vec::new(), 0);
        loop {
            let page = store.search(&search).await.unwrap();
            found.extend(page.tasks.iter().map(|task| task.id));
            looked_at += page.looked_at;
            match page.next {
                Some(next) => assert!(
                    ids.contains(&search.after.insert(next).0),
                    "a place of another queue"
                ),
                None => break,
            }
        }
        let mut expected: Vec<TaskId> = own[..4].iter().map(|row| row.task.id).collect();
        expected.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!((found, looked_at), (expected, 6), "pages of {limit}");
    }
}

pub(crate) async fn a_page_ends_when_it_has_looked_at_enough(db: &impl Database) {
    let store = db.open().await;
    let all = rows("q", 1500);
    for rows in all.chunks(500) {
        insert_new(&*store, rows).await;
    }
    // The oldest task has the key that is searched for.
    let oldest = all.iter().min_by_key(|row| row.task.id).unwrap();
    let filter = TaskFilter {
        queue: Some(queue("q")),
        key_prefix: oldest.task.key.clone(),
        ..Default::default()
    };
    let mut search = TaskSearch {
        filter,
        limit: 10,
        look_at: 1000,
        after: None,
        stays_in_queue: false,
    };
    let is_alone = |id: TaskId| id == oldest.task.id;
    let first = store.search(&search).await.unwrap();
    assert_eq!(
        (
            first.looked_at,
            first.tasks.iter().any(|task| is_alone(task.id))
        ),
        (1000, false)
    );
    search.after = first.next;
    let second = store.search(&search).await.unwrap();
    assert_eq!((second.looked_at, second.next), (500, None));
    assert!(second.tasks.iter().any(|task| is_alone(task.id)));
}
