//! The store in a file, for one process. It needs no server.

use std::{path::Path, time::Duration};

use sqlx::{
    ConnectOptions, Sqlite, SqliteConnection,
    error::DatabaseError,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    Class, Error, Result,
    sql::{Dialect, MigrationFile, SqlStore, migration_files},
};

pub type SqliteStore = SqlStore<Sqlite>;

const MIGRATIONS: &[MigrationFile] = migration_files!("sqlite");

/// The longest wait for the file, which another process may hold, and for the connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that read while the writer writes.
const READERS: u32 = 4;
/// More than the shapes of all statements.
const PREPARED: usize = 256;
/// Rows that SQLite's thread may be ahead of their reader: a page, without a wake-up in between.
const ROWS_AT_ONCE: usize = 1024;
/// 16 MiB of pages in memory. Key hashes fall anywhere in their index, so that a batch touches most of its pages.
const CACHE_KIB: &str = "-16384";
/// SQLite copies its log back each 32 MiB instead of 4. By then the log has many pages twice: inserts are a third
/// faster.
const CHECKPOINT_PAGES: &str = "8192";

/// SQLite's primary result codes.
mod code {
    pub(super) const BUSY: i32 = 5;
    pub(super) const LOCKED: i32 = 6;
    pub(super) const FULL: i32 = 13;
    pub(super) const TOOBIG: i32 = 18;
    pub(super) const CONSTRAINT: i32 = 19;
    pub(super) const MISMATCH: i32 = 20;
}

impl SqliteStore {
    /// Opens the database at `path`, and creates and migrates it where needed.
    ///
    /// `max_page_count` bounds its size in pages of 4 KiB.
    pub async fn open(path: &Path, max_page_count: Option<u32>) -> Result<Self> {
        let mut options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(false)
            .busy_timeout(PATIENCE)
            .statement_cache_capacity(PREPARED)
            .row_buffer_size(ROWS_AT_ONCE)
            .disable_statement_logging();
        if let Some(pages) = max_page_count {
            options = options.pragma("max_page_count", pages.to_string());
        }
        // SQLite has one writer at a time. With one connection, writers wait in the pool's queue instead of SQLite's.
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(PATIENCE)
            .idle_timeout(None)
            .max_lifetime(None)
            // A file does not go away as a server does. The question would cost each transaction two thread switches.
            .test_before_acquire(false)
            .connect_with(
                options
                    .clone()
                    .pragma("cache_size", CACHE_KIB)
                    .pragma("wal_autocheckpoint", CHECKPOINT_PAGES)
                    // A statement of many rows keeps a journal of its own, so that it can be undone alone. In a file,
                    // that is two thirds of the bytes that an insert writes.
                    .pragma("temp_store", "memory"),
            )
            .await
            .map_err(SqliteConnection::error)?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(PATIENCE)
            .test_before_acquire(false)
            .connect_lazy_with(options.pragma("query_only", "on"));
        Self::migrate(MIGRATIONS, writer, readers).await
    }
}

impl Dialect for SqliteConnection {
    // A transaction that reads first cannot become the writer later if another one is.
    const BEGIN: &'static str = "BEGIN IMMEDIATE";
    const FOR_UPDATE: &'static str = "";
    const FOR_SHARE: &'static str = "";
    const NOW_MS: &'static str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";
    const ANSWER_WITHIN: Option<Duration> = None;
    const BUSY_HINT: &'static str = "the disk is slow, or too much is asked for at once";
    const ID: &'static str = "?";
    // SQLite does not scan a table by choice, and locks no rows.
    const BY_PRIMARY_KEY: &'static str = "";
    const COUNTS_INSERTED: bool = true;
    // SQLite uses a partial index only for a condition with the words of the index.
    const IS_UNFINISHED: &'static str = "status = 0 AND count <> 0";

    fn keep_first(_column: &str) -> String {
        " ON CONFLICT DO NOTHING".into()
    }

    fn replace(key: &str, columns: &[&str]) -> String {
        let set: Vec<String> = columns.iter().map(|column| format!("{column} = excluded.{column}")).collect();
        format!(" ON CONFLICT ({key}) DO UPDATE SET {}", set.join(", "))
    }

    fn add(key: &str, column: &str) -> String {
        format!(" ON CONFLICT ({key}) DO UPDATE SET {column} = {column} + excluded.{column}")
    }

    fn by_index(index: &str) -> String {
        format!("INDEXED BY {index}")
    }

    fn update_tasks(set: &str) -> [String; 2] {
        [format!("UPDATE tasks SET {set} FROM ("), ") AS changes WHERE id = task_id".into()]
    }

    fn class(error: &dyn DatabaseError) -> Class {
        // The low byte of an extended code is the primary one.
        match error.code().and_then(|code| code.parse::<i32>().ok()).map(|code| code & 0xff) {
            Some(code::BUSY | code::LOCKED) => Class::Transient,
            Some(code::FULL) => Class::Full,
            Some(code::TOOBIG | code::CONSTRAINT | code::MISMATCH) => Class::Refused,
            _ => Class::Other,
        }
    }

    // A migration is one transaction: no statement of it ran before.
    fn is_there_already(_error: &Error) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{
        config::Settings,
        model::{Encoding, LeaseNumber, NewTask, Offset, ShardId, TaskId, WorkerName, validate},
        store::{NewRow, Published, Settlement, Store, Turn, Unpublished},
    };

    #[tokio::test]
    async fn no_statement_scans_a_table() {
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
        store.next_generation(&shard, 2).await.unwrap();
        assert_eq!(store.shards(Some(1)).await.unwrap().len(), 1);
        assert!(store.task(ids[3]).await.unwrap().is_some());
        assert_eq!(store.results(ids[3]).await.unwrap().len(), 1);
        assert_eq!(store.remove_finished(Duration::from_secs(1), 10).await.unwrap(), 2);
        store.insert(&[row("3"), row("4")]).await.unwrap();
        store.insert(&[row("3"), row("4")]).await.unwrap();
    }
}
