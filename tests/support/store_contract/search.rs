//! Tests of listing tasks with every filter, page by page.

use std::collections::HashSet;

use taskd::{
    model::{TaskFilter, TaskId, TaskStatus, WorkerName},
    store::{ListedTask, Settlement, Store, TaskPage, TaskSearch},
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
        reason: format!("no\0luck{}", "ü".repeat(4096 - 7)),
        epoch: 0,
    };
    assert_eq!(*dead, expected);
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
