//! The store in a file: for one process, with nothing to run beside it.

use std::{path::Path, time::Duration};

use sqlx::{
    ConnectOptions, Sqlite, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    Result,
    sql::{Dialect, MigrationFile, SqlStore, migration_files},
};

const MIGRATIONS: &[MigrationFile] = migration_files!("sqlite");

pub type SqliteStore = SqlStore<Sqlite>;

/// How long another process may hold the file, or one of ours the connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Reads go on while something is written.
const READERS: u32 = 4;
/// More than the shapes of all statements.
const PREPARED: usize = 256;
/// Rows that SQLite's thread may be ahead of their reader: a page of them without waking each other in between.
const ROWS_AT_ONCE: usize = 1024;
/// Key hashes fall anywhere in their index, so that a batch touches most of its pages. 16 MiB of them in memory …
const CACHE_KIB: &str = "-16384";
/// … and the log copied back each 32 MiB instead of 4, when many of its pages are there several times: inserts are a third faster.
const CHECKPOINT_PAGES: &str = "8192";

impl SqliteStore {
    /// Opens the database at `path`, creates and migrates it where needed. `max_page_count` bounds its size in pages of 4 KiB.
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
        // SQLite has one writer at a time: one connection, so that writers wait in our queue and not in its.
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(PATIENCE)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(
                options.clone().pragma("cache_size", CACHE_KIB).pragma("wal_autocheckpoint", CHECKPOINT_PAGES),
            )
            .await?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(PATIENCE)
            .connect_lazy_with(options.pragma("query_only", "on"));
        Self::migrate(MIGRATIONS, writer, readers).await
    }
}

impl Dialect for SqliteConnection {
    // A transaction that reads first and writes then could not become the writer when another one is.
    const BEGIN: &'static str = "BEGIN IMMEDIATE";
    const FOR_UPDATE: &'static str = "";
    const FOR_SHARE: &'static str = "";
    const NOW_MS: &'static str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";
    const ANSWER_WITHIN: Option<Duration> = None;
    const BUSY_HINT: &'static str = "the disk is slow, or too much is asked for at once";
    const ID: &'static str = "?";
    // It scans nothing that has a key, and locks no rows.
    const BY_PRIMARY_KEY: &'static str = "";
    const COUNTS_INSERTED: bool = true;
    // A partial index is taken for a condition that has its words.
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

    // A migration is one transaction.
    fn is_there_already(_error: &sqlx::Error) -> bool {
        false
    }

    fn update_tasks(set: &str) -> [String; 2] {
        [format!("UPDATE tasks SET {set} FROM ("), ") AS changes WHERE id = task_id".into()]
    }
}
