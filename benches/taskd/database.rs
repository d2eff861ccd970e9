//! The limits of the database: inserting rows like taskd's into a copy of its table, and reading
//! them back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::ensure;
use sqlx::{AssertSqlSafe, MySqlConnection, QueryBuilder, Row};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::{limits::take, lines, servers::connect};

/// A direct connection to a taskd's database.
pub(crate) struct Database(MySqlConnection);

/// Rows per read, as in a repair.
const PAGE: usize = 1000;

impl Database {
    pub(crate) async fn connect(url: &str) -> anyhow::Result<Self> {
        Ok(Self(connect(url).await?))
    }

    pub(crate) async fn wait_for_results(&mut self, wanted: usize) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let results: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM results")
                .fetch_one(&mut self.0)
                .await?;
            if usize::try_from(results)? == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{results} results are in SQL instead of {wanted}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Reads all tasks, page by page, over one connection. Returns rows per second.
    pub(crate) async fn read_tasks(&mut self, count: usize) -> anyhow::Result<f64> {
        let page = format!("SELECT * FROM tasks WHERE id > ? ORDER BY id LIMIT {PAGE}");
        let (mut last, mut read) = (Vec::new(), 0);
        let began = Instant::now();
        loop {
            let rows = sqlx::query(AssertSqlSafe(page.clone()))
                .bind(last)
                .fetch_all(&mut self.0)
                .await?;
            read += rows.len();
            match rows.last() {
                Some(row) => last = row.try_get("id")?,
                None => break,
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        ensure!(read == count, "{read} tasks are in SQL instead of {count}");
        Ok(count as f64 / seconds)
    }
}

/// Inserts rows into an empty copy of taskd's table `tasks`, with all of its indexes. The batches
/// are as large as in taskd's transactions, and there are as many connections as taskd has callers.
/// Returns rows per second.
pub(crate) async fn insert_rows(
    url: &str,
    connections: usize,
    batch: usize,
    rows: usize,
) -> anyhow::Result<f64> {
    let mut conn = connect(url).await?;
    sqlx::raw_sql("CREATE TABLE limit_rows LIKE tasks")
        .execute(&mut conn)
        .await?;
    let mut conns = Vec::new();
    for _ in 0..connections {
        let mut writer = connect(url).await?;
        sqlx::raw_sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            .execute(&mut writer)
            .await?;
        conns.push(writer);
    }
    let left = Arc::new(AtomicUsize::new(rows));
    let next = Arc::new(AtomicUsize::new(0));
    let mut writers = JoinSet::new();
    let began = Instant::now();
    for mut conn in conns {
        let (left, next) = (Arc::clone(&left), Arc::clone(&next));
        writers.spawn(async move {
            loop {
                let count = take(&left, batch);
                if count == 0 {
                    return Ok::<_, sqlx::Error>(());
                }
                let first = next.fetch_add(count, Relaxed);
                insert_batch(&mut conn, first..first + count).await?;
            }
        });
    }
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    let seconds = began.elapsed().as_secs_f64();
    let stored: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM limit_rows")
        .fetch_one(&mut conn)
        .await?;
    ensure!(
        usize::try_from(stored)? == rows,
        "{stored} rows are stored instead of {rows}"
    );
    sqlx::raw_sql("DROP TABLE limit_rows")
        .execute(&mut conn)
        .await?;
    Ok(rows as f64 / seconds)
}

/// Inserts rows with one statement, which is one transaction.
async fn insert_batch(
    conn: &mut MySqlConnection,
    numbers: std::ops::Range<usize>,
) -> sqlx::Result<()> {
    let mut rows: Vec<_> = numbers
        .map(|number| {
            let hash = <sha2::Sha256 as sha2::Digest>::digest(number.to_be_bytes());
            (Uuid::now_v7(), hash.to_vec(), lines::key(number))
        })
        .collect();
    // Like taskd, sort the rows by key, so that all transactions lock in the same order.
    rows.sort_unstable_by(|(_, one, _), (_, other, _)| one.cmp(other));
    let mut insert = QueryBuilder::new(
        "INSERT INTO limit_rows (id, key_hash, queue, shard, task_key, replicas, priority, max_attempts, lease_ms, \
         not_before_ms, headers, traceparent, created_ms, updated_ms, insertion, payload) ",
    );
    insert.push_values(rows, |mut row, (id, hash, key)| {
        row.push_bind(id.as_bytes().to_vec())
            .push_bind(hash)
            .push_bind("bench")
            .push_bind(0_i64);
        row.push_bind(key.into_bytes())
            .push_bind(1_i64)
            .push_bind(2_i64)
            .push_bind(5_i64)
            .push_bind(30_000_i64);
        row.push_bind(0_i64)
            .push_bind("[]")
            .push_bind("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        row.push_bind(1_i64)
            .push_bind(1_i64)
            .push_bind(1_i64)
            .push_bind(lines::PAYLOAD.as_bytes());
    });
    // For a known key, this sets the first column to itself. IGNORE would also suppress errors
    // about data that does not fit.
    insert
        .push(" ON DUPLICATE KEY UPDATE id = id")
        .build()
        .execute(conn)
        .await?;
    Ok(())
}
