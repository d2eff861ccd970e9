//! Applies migrations to the file in sqlx's way: each is one transaction, which is recorded in a
//! row of the migrations table.

use std::{
    fs::{self, File, OpenOptions, Permissions, TryLockError},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::Path,
    time::{Duration, Instant},
};

use futures::future::{BoxFuture, FutureExt, ready};
use nix::fcntl::OFlag;
use sqlx::{
    error::{DatabaseError, ErrorKind},
    migrate::{AppliedMigration, Migrate, MigrateError, Migration},
};

use super::connection::Connection;
use crate::store::Error;

/// How long a start waits while another process migrates.
const LOCKED_WITHIN: Duration = Duration::from_secs(60);
/// How often to try to take the lock.
const LOOK_EVERY: Duration = Duration::from_millis(50);

type Migrated<'e, T> = BoxFuture<'e, Result<T, MigrateError>>;

/// Takes the lock of the migrations, which is a separate file next to the database. It is released
/// when the returned file is closed.
///
/// A lock on the database file itself would block SQLite on file systems that do not distinguish
/// the two kinds of locks.
pub(super) async fn lock(database: &Path) -> Result<File, Error> {
    // The path may be a symbolic link.
    let database = database
        .canonicalize()
        .unwrap_or_else(|_| database.to_owned());
    let mut beside = database.clone().into_os_string();
    beside.push("-migration");
    let failed = |cause: io::Error| {
        Error::Other(format!("cannot lock {}: {cause}", beside.display()).into())
    };
    let mut options = OpenOptions::new();
    let options = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    // Following a symbolic link could make root open a file of another user.
    let lock = options
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&beside)
        .map_err(failed)?;
    let own = lock.metadata().map_err(failed)?;
    if let Ok(found) = fs::metadata(&database)
        && own.is_file()
        && own.nlink() == 1
    {
        // Like SQLite's own files, the lock must be usable by all users of the database, no matter
        // who created it. Only the owner of the lock and root can change this, which is enough.
        drop(lock.set_permissions(Permissions::from_mode(found.mode() | 0o600)));
        drop(fchown(&lock, Some(found.uid()), Some(found.gid())));
    }
    let began = Instant::now();
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) if began.elapsed() < LOCKED_WITHIN => {
                tokio::time::sleep(LOOK_EVERY).await
            }
            Err(TryLockError::WouldBlock) => return Err(Error::Migrating),
            Err(TryLockError::Error(cause)) => return Err(failed(cause)),
        }
    }
}

impl Migrate for Connection {
    fn create_schema_if_not_exists<'e>(&'e mut self, _schema: &'e str) -> Migrated<'e, ()> {
        ready(Ok(())).boxed()
    }

    fn ensure_migrations_table<'e>(&'e mut self, table: &'e str) -> Migrated<'e, ()> {
        let create = format!(
            "CREATE TABLE IF NOT EXISTS {table} (
                version BIGINT PRIMARY KEY,
                description TEXT NOT NULL,
                installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
                success BOOLEAN NOT NULL,
                checksum BLOB NOT NULL,
                execution_time BIGINT NOT NULL
            )"
        );
        ready(self.db.execute_batch(&create).map_err(failed)).boxed()
    }

    fn dirty_version<'e>(&'e mut self, _table: &'e str) -> Migrated<'e, Option<i64>> {
        // A migration is one transaction, so it is never half done.
        ready(Ok(None)).boxed()
    }

    fn list_applied_migrations<'e>(
        &'e mut self,
        table: &'e str,
    ) -> Migrated<'e, Vec<AppliedMigration>> {
        let list = || -> rusqlite::Result<Vec<AppliedMigration>> {
            let mut list = self.db.prepare(&format!(
                "SELECT version, checksum FROM {table} ORDER BY version"
            ))?;
            let applied = list.query_map([], |row| {
                Ok(AppliedMigration {
                    version: row.get(0)?,
                    checksum: row.get::<_, Vec<u8>>(1)?.into(),
                })
            })?;
            applied.collect()
        };
        ready(list().map_err(failed)).boxed()
    }

    // The caller holds a lock of its own.
    fn lock(&mut self) -> Migrated<'_, ()> {
        ready(Ok(())).boxed()
    }

    fn unlock(&mut self) -> Migrated<'_, ()> {
        ready(Ok(())).boxed()
    }

    fn apply<'e>(&'e mut self, table: &'e str, migration: &'e Migration) -> Migrated<'e, Duration> {
        let mut apply = || -> rusqlite::Result<Duration> {
            let began = Instant::now();
            let transaction = self.db.transaction()?;
            transaction.execute_batch(migration.sql.as_str())?;
            let note = format!(
                "INSERT INTO {table} (version, description, success, checksum, execution_time) \
                 VALUES (?, ?, TRUE, ?, ?)"
            );
            let took = i64::try_from(began.elapsed().as_nanos()).unwrap_or(i64::MAX);
            transaction.execute(
                &note,
                (
                    migration.version,
                    &*migration.description,
                    &*migration.checksum,
                    took,
                ),
            )?;
            transaction.commit()?;
            Ok(began.elapsed())
        };
        ready(
            apply().map_err(|error| {
                MigrateError::ExecuteMigration(reported(error), migration.version)
            }),
        )
        .boxed()
    }

    fn revert<'e>(
        &'e mut self,
        _table: &'e str,
        migration: &'e Migration,
    ) -> Migrated<'e, Duration> {
        ready(Err(MigrateError::VersionNotPresent(migration.version))).boxed()
    }
}

fn failed(error: rusqlite::Error) -> MigrateError {
    MigrateError::Execute(reported(error))
}

fn reported(error: rusqlite::Error) -> sqlx::Error {
    sqlx::Error::Database(Box::new(Reported {
        text: error.to_string(),
        error,
    }))
}

/// An error of SQLite, wrapped for sqlx.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
struct Reported {
    text: String,
    error: rusqlite::Error,
}

impl DatabaseError for Reported {
    fn message(&self) -> &str {
        &self.text
    }

    fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn into_error(self: Box<Self>) -> Box<dyn std::error::Error + Send + Sync + 'static> {
        self
    }

    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::OpenFlags;

    use super::*;
    use crate::store::sql::{self, MigrationFile};

    const FIRST: &[MigrationFile] = super::super::MIGRATIONS;
    const SECOND: &[MigrationFile] = &[FIRST[0], ("0002_add_a_table", "CREATE TABLE added (a);")];
    const THIRD: &[MigrationFile] = &[
        SECOND[0],
        SECOND[1],
        (
            "0003_fail",
            "CREATE TABLE half (a); INSERT INTO nowhere VALUES (1);",
        ),
    ];

    #[tokio::test]
    async fn a_later_migration_is_applied_once_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let mut connection = Connection::open(&folder.path().join("db"), flags, "").unwrap();
        let tables = |connection: &Connection| {
            let count = "SELECT COUNT(*) FROM sqlite_master WHERE name IN ('added', 'half')";
            connection
                .db
                .query_row(count, (), |row| row.get::<_, i64>(0))
                .unwrap()
        };
        assert_eq!(sql::migrate(FIRST, &mut connection).await.unwrap(), 1);
        assert_eq!(sql::migrate(SECOND, &mut connection).await.unwrap(), 1);
        assert_eq!(sql::migrate(SECOND, &mut connection).await.unwrap(), 0);
        assert_eq!(tables(&connection), 1);
        // A taskd that only knows the first migration may continue.
        assert_eq!(sql::migrate(FIRST, &mut connection).await.unwrap(), 0);

        let failed = sql::migrate(THIRD, &mut connection).await.unwrap_err();
        let text = failed.to_string();
        assert!(text.contains("nowhere") && !text.contains('\n'), "{text}");
        assert_eq!(tables(&connection), 1);
        assert_eq!(sql::migrate(SECOND, &mut connection).await.unwrap(), 0);
    }
}
