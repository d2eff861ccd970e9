//! Listing tasks in a large database: each filter, with few and with many tasks in SQLite.
//!
//! The rows are generated inside the database. Nine in ten tasks are completed, by ten workers; of
//! every ten thousand, one is dead, and one was completed by a worker that completed nothing else.

use std::{path::Path, time::Instant};

use anyhow::ensure;
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use taskd::{
    model::{QueueName, TaskCursor, TaskFilter, TaskId, TaskStatus, WorkerName, now_unix_ms},
    store::{TaskSearch, Tasks, sqlite::SqliteStore},
};

use crate::{
    folder::folder,
    progress::Progress,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
};

/// Rows per statement.
const AT_ONCE: usize = 250_000;
/// Pages per figure.
const PAGES: usize = 20;
const LIMIT: u32 = 100;
const LOOK_AT: u32 = 10_000;

/// The time per page, in µs, by filter.
type Took = Vec<(&'static str, f64)>;

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut figures: Vec<(&'static str, Runs)> = Vec::new();
    let mut few: Option<Vec<Runs>> = None;
    let mut rows = Vec::new();
    for &tasks in &scale.searched {
        progress.step(format!("search: {tasks} tasks"));
        let folder = folder()?;
        let file = folder.path().join("taskd.db");
        let store = SqliteStore::open(&file, None).await?;
        fill(&file, tasks).await?;
        figures.clear();
        for _ in 0..scale.runs {
            for (at, (name, took)) in measure(&store, tasks).await?.into_iter().enumerate() {
                match figures.get_mut(at) {
                    Some((_, runs)) => runs.push(took),
                    None => figures.push((name, Runs(vec![took]))),
                }
            }
        }
        let reference =
            few.get_or_insert_with(|| figures.iter().map(|(_, runs)| runs.clone()).collect());
        for ((name, runs), few) in figures.iter().zip(reference) {
            let ratios = vec![Some(runs.over(few))];
            rows.push(Row {
                figure: format!("{tasks} tasks: {name}"),
                unit: Unit::Micros,
                runs: runs.clone(),
                ratios,
            });
        }
    }
    let first = scale.searched.first().copied().unwrap_or_default();
    Ok(vec![Table {
        bench: "search",
        title: "Lists of tasks",
        conditions: format!(
            "SQLite; a page of {LIMIT} tasks, the mean of {PAGES} pages, one after the other"
        ),
        references: vec![format!("{first} tasks")],
        rows,
    }])
}

/// Inserts tasks and results in the order of their ids.
async fn fill(file: &Path, tasks: usize) -> anyhow::Result<()> {
    let mut sqlite = SqliteConnection::connect(&format!("sqlite://{}", file.display())).await?;
    // The store does not write meanwhile, and durability does not matter here.
    for pragma in [
        "PRAGMA synchronous = off",
        "PRAGMA cache_size = -1500000",
        "PRAGMA temp_store = memory",
    ] {
        sqlx::query(pragma).execute(&mut sqlite).await?;
    }
    let first_ms = now_unix_ms() - i64::try_from(tasks)? / 10;
    for from in (0..tasks).step_by(AT_ONCE) {
        let upto = tasks.min(from + AT_ONCE);
        for text in [TASKS, RESULTS] {
            let text = text
                .replace(":from", &from.to_string())
                .replace(":upto", &upto.to_string());
            sqlx::query(AssertSqlSafe(
                text.replace(":first_ms", &first_ms.to_string()),
            ))
            .execute(&mut sqlite)
            .await?;
        }
    }
    sqlite.close().await?;
    Ok(())
}

/// Inserts ten tasks per millisecond, so that the time and the number can be read from the id.
const TASKS: &str = "\
    WITH RECURSIVE n(n) AS (SELECT :from UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :upto) \
    INSERT INTO tasks (number, id, key_hash, queue, shard, task_key, replicas, priority, max_attempts, \
        lease_ms, not_before_ms, headers, traceparent, created_ms, insertion, status, completed, updated_ms, payload) \
    SELECT n, unhex(printf('%012x7%03x8%015x', :first_ms + n / 10, n % 10, n)), randomblob(32), 'q' || (n % 4), 0, \
        CAST('https://example.org/' || n AS BLOB), 1, 2, 5, 30000, 0, '[[\"site\",\"' || (n % 1000) || '\"]]', \
        '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01', :first_ms + n / 10, n / 1000, \
        CASE WHEN n % 10000 = 0 THEN 2 WHEN n % 10 = 9 THEN 0 ELSE 1 END, 0, :first_ms, zeroblob(100) FROM n";
const RESULTS: &str = "\
    WITH RECURSIVE n(n) AS (SELECT :from UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :upto) \
    INSERT INTO results (task, task_id_group, task_id, worker, attempt, completed_ms, surplus, result) \
    SELECT n, unhex(printf('%010x', (:first_ms + n / 10) >> 8)), \
        unhex(printf('%012x7%03x8%015x', :first_ms + n / 10, n % 10, n)), \
        CASE WHEN n % 10000 = 1 THEN 'rare' ELSE 'w' || (n % 10) END, 1, 0, 0, X'' FROM n \
    WHERE n % 10 <> 9 AND n % 10000 <> 0";

async fn measure(store: &SqliteStore, tasks: usize) -> anyhow::Result<Took> {
    let q = TaskFilter {
        queue: QueueName::new("q0").ok(),
        ..Default::default()
    };
    let middle = now_unix_ms() - i64::try_from(tasks)? / 20;
    let worker = |name: &str| WorkerName::new(name).ok();
    let status = |status: TaskStatus| TaskFilter {
        statuses: vec![status],
        ..q.clone()
    };
    let filters = [
        ("all", TaskFilter::default()),
        (
            "before a time in the middle",
            TaskFilter {
                until_unix_ms: Some(middle),
                ..Default::default()
            },
        ),
        ("queue", q.clone()),
        (
            "queue, dead (one in ten thousand)",
            status(TaskStatus::Dead),
        ),
        (
            "queue, unfinished",
            TaskFilter {
                statuses: TaskStatus::UNFINISHED.to_vec(),
                ..q.clone()
            },
        ),
        ("queue, completed, before the middle", {
            TaskFilter {
                until_unix_ms: Some(middle),
                ..status(TaskStatus::Completed)
            }
        }),
        (
            "worker",
            TaskFilter {
                worker: worker("w2"),
                ..Default::default()
            },
        ),
        (
            "worker of one in ten thousand",
            TaskFilter {
                worker: worker("rare"),
                ..Default::default()
            },
        ),
        ("queue, header of one in a thousand", {
            TaskFilter {
                headers: vec![("site".into(), "4".into())],
                ..q.clone()
            }
        }),
        (
            "queue, beginning of no key",
            TaskFilter {
                key_prefix: "nothing".into(),
                ..q
            },
        ),
    ];
    let mut took = Vec::new();
    for (name, filter) in filters {
        let mut after: Option<TaskCursor> = None;
        let began = Instant::now();
        for _ in 0..PAGES {
            let search = TaskSearch {
                filter: filter.clone(),
                limit: LIMIT,
                look_at: LOOK_AT,
                after,
                stays_in_queue: false,
            };
            let page = store.search(&search).await?;
            ensure!(
                page.tasks.is_sorted_by(|one, next| one.id > next.id),
                "{name}: a page is not in order"
            );
            ensure!(
                page.looked_at <= LOOK_AT,
                "{name}: a page looked at {} tasks",
                page.looked_at
            );
            // After the last page, start over.
            after = page.next;
        }
        took.push((name, began.elapsed().as_secs_f64() * 1e6 / PAGES as f64));
    }
    ensure!(
        store.listed(&[TaskId::new()]).await?.is_empty(),
        "a task that nobody inserted"
    );
    Ok(took)
}
