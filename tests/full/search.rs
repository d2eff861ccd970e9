//! Searches on a server: how many rows they read.

use sqlx::{Connection, MySqlConnection};
use taskd::{
    model::{TaskFilter, TaskStatus, WorkerName},
    store::{Store, TaskSearch, Tasks, mysql::MysqlStore},
};

use crate::support::{
    mariadb::MariadbServer,
    store_contract::{completed, insert_new, rows},
};

/// Rows and entries of indexes that the server has read since it started.
async fn rows_read(server: &mut MySqlConnection) -> i64 {
    let read = "SELECT CAST(SUM(variable_value) AS SIGNED) FROM information_schema.global_status \
                WHERE variable_name LIKE 'Handler_read%'";
    sqlx::query_scalar(read).fetch_one(server).await.unwrap()
}

#[tokio::test]
async fn a_search_reads_no_more_rows_than_it_looks_at() {
    let server = MariadbServer::start(&[]);
    let store = MysqlStore::connect(server.url(), 2).await.unwrap();
    let all = rows("q", 4000);
    for part in all.chunks(500) {
        insert_new(&store, part).await;
        let others: Vec<_> = part.iter().map(|row| completed(row, "other")).collect();
        store.settle(&others[..400]).await.unwrap();
        store
            .settle(
                &part[400..410]
                    .iter()
                    .map(|row| completed(row, "w"))
                    .collect::<Vec<_>>(),
            )
            .await
            .unwrap();
    }
    let mut observer = MySqlConnection::connect(server.url()).await.unwrap();
    let q = TaskFilter {
        queue: Some(all[0].task.queue.clone()),
        ..Default::default()
    };
    for (filter, found) in [
        (TaskFilter::default(), 10),
        (q.clone(), 10),
        (
            TaskFilter {
                statuses: vec![TaskStatus::Completed, TaskStatus::Dead],
                ..q.clone()
            },
            10,
        ),
        (
            TaskFilter {
                statuses: TaskStatus::UNFINISHED.to_vec(),
                ..q.clone()
            },
            10,
        ),
        (
            TaskFilter {
                key: Some(all[7].task.key.clone()),
                ..q.clone()
            },
            1,
        ),
        (
            TaskFilter {
                worker: WorkerName::new("w").ok(),
                ..Default::default()
            },
            10,
        ),
        (
            TaskFilter {
                worker: WorkerName::new("nobody").ok(),
                ..Default::default()
            },
            0,
        ),
    ] {
        let search = TaskSearch {
            filter,
            limit: 10,
            look_at: 100,
            after: None,
            stays_in_queue: false,
        };
        let before = rows_read(&mut observer).await;
        let page = store.search(&search).await.unwrap();
        let read = rows_read(&mut observer).await - before;
        assert_eq!(page.tasks.len(), found, "{search:?}");
        assert!(
            found as i64 <= read && read < 200,
            "{search:?} read {read} rows of 4000"
        );
    }
    store.close().await;
    drop(observer);
}
