//! The store in a file, for a single process, without a server.

mod checkpoints;
mod connection;
#[cfg(test)]
mod events;
mod keys;
mod known;
mod migrate;
mod readers;
mod writer;

use std::{path::Path, sync::Arc};

use futures::FutureExt;
use parking_lot::RwLock;
use rusqlite::{MAIN_DB, OpenFlags};

use self::{
    connection::{Connection, error},
    keys::{Keys, Latest},
    known::{Known, Reading},
    readers::Readers,
    writer::Writer,
};
use super::{
    Error, Result,
    sql::{
        self, Backend, Columns, Dialect, MigrationFile, Recent, SqlStore, Statement, Value, Work,
        migration_files,
    },
};
use crate::model::{KeyHash, StoredStatus, TaskId};

pub type SqliteStore = SqlStore<File>;

const MIGRATIONS: &[MigrationFile] = migration_files!("sqlite");

/// Settings of the connection that writes.
///
/// - `cache_size`: 16 MiB of pages in memory.
/// - `wal_autocheckpoint`: the writer copies the part of its log that [`checkpoints`] has left each
///   32 MiB, instead of each 4.
/// - `journal_size_limit`: a log that grew beyond 64 MiB, because a reader blocked checkpoints, is
///   truncated.
/// - `temp_store`: statements of many rows without `OR FAIL` keep a separate journal, so that they
///   can be undone individually. In a file, it would have to be written.
const WRITES: &str = "\
    PRAGMA journal_mode = wal; \
    PRAGMA synchronous = full; \
    PRAGMA cache_size = -16384; \
    PRAGMA wal_autocheckpoint = 8192; \
    PRAGMA journal_size_limit = 67108864; \
    PRAGMA temp_store = memory";

/// The file: the thread that writes, and connections that read.
pub struct File {
    writer: Writer,
    readers: Readers,
    keys: Arc<RwLock<Latest>>,
    old_keys: Reading,
    #[cfg(test)]
    asked: sql::plans::Counter,
}

impl SqliteStore {
    /// Opens the database at `path`. Creates and migrates it if necessary.
    ///
    /// `max_page_count` limits its size, in pages of 4 KiB.
    pub async fn open(path: &Path, max_page_count: Option<u32>) -> Result<Self> {
        Self::open_with(path, max_page_count, keys::MOST).await
    }

    /// Opens the database. `most_keys` is the number of keys to keep in memory before they move.
    async fn open_with(path: &Path, max_page_count: Option<u32>, most_keys: usize) -> Result<Self> {
        let path = path.to_owned();
        let lock = migrate::lock(&path).await?;
        let opened = tokio::task::spawn_blocking(move || {
            let settings = match max_page_count {
                Some(pages) => format!("{WRITES}; PRAGMA max_page_count = {pages}"),
                None => WRITES.to_owned(),
            };
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
            let (readers, of_log) = (Readers::new(path.clone()), path.clone());
            let checkpoints =
                move || Connection::open(&of_log, OpenFlags::SQLITE_OPEN_READ_WRITE, "");
            let keys = Arc::<RwLock<Latest>>::default();
            let of_writer = Arc::clone(&keys);
            let open = move |known| {
                of_writer.write().begin_anew();
                let keys = Keys::new(&of_writer, known, most_keys);
                Ok(Connection {
                    keys,
                    ..Connection::open(&path, flags, &settings)?
                })
            };
            let known = Known::default();
            let mut connection = open(known.clone()).map_err(error)?;
            if connection.db.is_readonly(MAIN_DB).map_err(error)? {
                return Err(Error::Other(
                    "the file cannot be written to; give this user the right to write".into(),
                ));
            }
            let migrated = sql::migrate(MIGRATIONS, &mut connection).now_or_never();
            let migrated = migrated
                .ok_or_else(|| Error::Other("a migration waited for something else".into()))??;
            drop(lock);
            connection.keys.begin(&connection.db).map_err(error)?;
            if let Err(error) = connection.keys.finish(&connection.db) {
                tracing::warn!("keys of SQLite stay in memory until there is room: {error}");
            }
            let old_keys = Reading::start(known, &connection.db, {
                let open = checkpoints.clone();
                move || Ok(open()?.db)
            });
            let file = File {
                #[cfg(test)]
                asked: connection.asked.clone(),
                writer: Writer::start(
                    connection,
                    move || open(Known::of_every_key()),
                    checkpoints,
                )?,
                readers,
                keys,
                old_keys: old_keys.map_err(|error| Error::Other(error.into()))?,
            };
            Ok(Self::new(file, migrated))
        });
        opened
            .await
            .map_err(|stopped| Error::Other(stopped.into()))?
    }
}

#[cfg(test)]
impl SqliteStore {
    /// The work of the writer since the last call.
    fn asked(&self) -> sql::plans::Asked {
        self.database().asked.take()
    }
}

impl Backend for File {
    type Connection = Connection;

    async fn transact<I, T>(&self, work: &Work<Connection, I, T>) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.writer.transact(work).await
    }

    async fn read<T: Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        self.readers.read(statement).await
    }

    async fn recent(&self, keys: &[KeyHash]) -> Result<Option<Recent>> {
        let latest = Arc::clone(&self.keys);
        self.readers
            .run(move |connection| Latest::catch_up(&latest, &connection.db))
            .await?;
        Ok(Some(self.keys.read().recent(keys)))
    }

    async fn close(&self) {
        self.readers.close().await;
        self.old_keys.close().await;
        self.writer.close().await;
    }
}

impl Dialect for Connection {
    const FOR_UPDATE: &'static str = "";
    const FOR_SHARE: &'static str = "";
    const NOW_MS: &'static str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";
    const ERA: &'static str = "?";
    const NUMBER: Option<&'static str> = Some("number");
    const IS_RESULT_OF: &'static str = "task = number";
    const FINDER: &'static str = "?";
    // Without OR FAIL, SQLite copies each page before the statement changes it, to be able to undo
    // the statement alone.
    const INSERT: &'static str = "INSERT OR FAIL";
    const UPDATE: &'static str = "UPDATE OR FAIL";
    // SQLite does not prefer to scan a table, and it locks no rows.
    const BY_PRIMARY_KEY: &'static str = "";
    // Uses the unique index on ids, because the indexes of tasks on the bus begin with the queue.
    const BY_IDS_ON_BUS: &'static str = "";
    // A condition on the first column makes SQLite use the index. Each queue has a name, so it is
    // always true.
    const ON_BUS: &'static str =
        "INDEXED BY tasks_unfinished WHERE status = 0 AND queue > '' AND on_bus = 1";
    const COUNTS_INSERTED: bool = true;
    // SQLite only uses a partial index for a condition that repeats the one of the index.
    const IS_UNFINISHED: &'static str = "status = 0 AND count <> 0";
    // `seen` also has the keys of stored tasks.
    const SEEN_KEYS: &'static str = "SELECT seen.key_hash, task_id, COALESCE(tasks.status, seen.status) \
         FROM seen LEFT JOIN tasks ON id = task_id \
         WHERE (id IS NOT NULL OR seen.status <> 0) AND seen.key_hash IN ";

    fn group(id: &str) -> String {
        format!("{id}_group")
    }

    fn group_of(id: &TaskId) -> Value<'_> {
        Value::Bytes(id.as_bytes()[..5].into())
    }

    fn of_tasks(ids: &[TaskId]) -> Statement<'_> {
        Statement::new("task IN (SELECT number FROM tasks WHERE id IN ")
            .list(ids)
            .sql(")")
    }

    fn keep_first(_column: &str) -> String {
        " ON CONFLICT DO NOTHING".into()
    }

    fn on_conflict(key: &str) -> String {
        format!(" ON CONFLICT ({key}) DO UPDATE SET")
    }

    fn new_value(column: &str) -> String {
        format!("excluded.{column}")
    }

    fn by_index(index: &str) -> String {
        format!("INDEXED BY {index}")
    }

    // SQLite only uses a partial index for a condition that repeats the one of the index.
    fn of_status(status: StoredStatus) -> String {
        match status {
            StoredStatus::Unfinished => "INDEXED BY tasks_unfinished WHERE status = 0".into(),
            StoredStatus::Completed => "INDEXED BY tasks_completed WHERE status = 1".into(),
            StoredStatus::Dead | StoredStatus::Cancelled => {
                format!(
                    "INDEXED BY tasks_given_up WHERE status > 1 AND status = {}",
                    status as i64
                )
            }
        }
    }

    fn update_tasks(set: &str) -> [String; 2] {
        [
            format!("{} tasks SET {set} FROM (", Self::UPDATE),
            ") AS reported WHERE tasks.number = finder".into(),
        ]
    }

    // A migration is one transaction, so no statement of it can have been executed before.
    fn is_there_already(_error: &Error) -> bool {
        false
    }

    // A file does not become unavailable, and nobody else migrates it at the same time.
    fn is_transient(_error: &sqlx::Error) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
