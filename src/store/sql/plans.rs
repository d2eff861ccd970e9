//! In tests of the library, SQLite is asked how it would run each statement before it does: none may scan a table that grows.

use sqlx::{AssertSqlSafe, Row, SqliteConnection};

const GROWING: [&str; 4] = ["tasks", "outbox", "results", "seen"];

pub(super) async fn check(connection: &mut SqliteConnection, text: &str) -> sqlx::Result<()> {
    let plan = sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"))).fetch_all(connection).await?;
    for row in plan {
        let step: String = row.try_get("detail")?;
        let scans =
            GROWING.iter().any(|table| step == format!("SCAN {table}") || step.starts_with(&format!("SCAN {table} ")));
        let sorts = step.contains("ORDER BY") && text.contains("FROM outbox");
        assert!(!scans && !sorts && !step.contains("AUTOMATIC"), "{step}: {text}");
    }
    Ok(())
}

#[tokio::test]
async fn no_statement_scans_a_table() {
    use std::{collections::HashSet, time::Duration};

    use crate::{
        config::Settings,
        model::{Encoding, LeaseNumber, NewTask, Offset, ShardId, TaskId, WorkerName, validate},
        store::{NewRow, Published, Settlement, Store, Turn, Unpublished, sqlite::SqliteStore},
    };

    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("taskd.db"), None).await.unwrap();
    let row = |key: &str| {
        let task = NewTask { queue: "q".into(), key: key.as_bytes().to_vec().into(), ..Default::default() };
        let task = validate::task_row(task, TaskId::new(), &Settings::default().task_rules("q"), 1, 1).unwrap();
        NewRow { task, unpublished: Unpublished::Fresh, due_unix_ms: 0 }
    };
    let rows: Vec<NewRow> = (0..30).map(|i| row(&i.to_string())).collect();
    let ids: Vec<TaskId> = rows.iter().map(|row| row.task.id).collect();
    store.insert(&rows).await.unwrap();
    store.insert(&[row("0"), row("new")]).await.unwrap();
    let tasks = ids[..9].iter().map(|id| (*id, Turn::FIRST)).collect();
    let (partition, offset) = (0, Offset { major: 1, minor: 1 });
    store.mark_published("g", &[Published { partition, offset, tasks }]).await.unwrap();
    // A late mark, and of one that came back.
    store.unpublish(&ids[..2], Unpublished::Parked).await.unwrap();
    let tasks = vec![(ids[0], Turn::FIRST), (ids[20], Turn::FIRST)];
    store.mark_published("g", &[Published { partition, offset: Offset::default(), tasks }]).await.unwrap();
    let completed = Settlement::Completed {
        id: ids[3],
        worker: "w".into(),
        lease: LeaseNumber { generation: 1, grant: 1 },
        result: "r".into(),
        encoding: Encoding::Text,
        attempt: 1,
        at_unix_ms: 1,
        discovered: vec![row("1"), row("child")],
    };
    let died = Settlement::Died { id: ids[4], reason: "no luck".into(), attempts: 1, at_unix_ms: 1 };
    store.settle(&[completed.clone(), completed, died]).await.unwrap();
    let without: HashSet<TaskId> = [ids[10]].into();
    store.due(i64::MAX, 5, &without).await.unwrap();
    let queue = &rows[0].task.queue;
    assert_eq!(store.parked(queue, 5, &without).await.unwrap().len(), 2);
    assert_eq!(store.parked_queues().await.unwrap().len(), 1);
    store.states(&ids).await.unwrap();
    store.states_for(&WorkerName::new("w").unwrap(), &ids).await.unwrap();
    assert_eq!(store.published("g", Some(ids[5]), 10).await.unwrap().len(), 4);
    let shard = ShardId { queue: queue.clone(), number: 0 };
    assert!(store.unpublish_shard(&shard, Some(ids[5]), 2).await.unwrap().is_some());
    assert_eq!(store.rows(&ids[..3]).await.unwrap().len(), 3);
    assert_eq!(store.owners(&[rows[0].task.key_hash]).await.unwrap(), [(rows[0].task.key_hash, ids[0])]);
    store.bring_forward(-1, 0, None, 100).await.unwrap();
    store.oldest_waiting(i64::MAX).await.unwrap();
    assert_eq!(store.unfinished().await.unwrap().len(), 1);
    store.counts(Some(std::slice::from_ref(queue))).await.unwrap();
    store.open_shards(std::slice::from_ref(&shard)).await.unwrap();
    store.close_shard(&shard, 1).await.unwrap();
    store.open_shards(std::slice::from_ref(&shard)).await.unwrap();
    store.next_life(&shard, 2).await.unwrap();
    assert_eq!(store.shards(Some(1)).await.unwrap().len(), 1);
    assert!(store.task(ids[3]).await.unwrap().is_some());
    assert_eq!(store.results(ids[3]).await.unwrap().len(), 1);
    assert_eq!(store.remove_finished(Duration::from_secs(1), 10).await.unwrap(), 2);
    store.insert(&[row("3"), row("4")]).await.unwrap();
    store.insert(&[row("3"), row("4")]).await.unwrap();
}
