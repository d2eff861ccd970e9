//! A connection to the database file. SQLite runs on the calling thread, so no call here waits for
//! another thread.

use std::{future, path::Path, time::Duration};

use rusqlite::{OpenFlags, ToSql, config::DbConfig, ffi, types::ValueRef};

use super::keys::Keys;
use crate::{
    model::{KeyHash, TaskId},
    store::{
        Error, Result,
        sql::{Columns, FromRow, Recent, Session, Statement, Value},
    },
};

/// How long to wait for the file, which another process may have locked.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// More than the number of different statements.
const PREPARED: usize = 256;

/// A connection, inside or outside of a transaction.
pub struct Connection {
    pub(super) db: rusqlite::Connection,
    /// Only used by the connection that writes.
    pub(super) keys: Keys,
    /// The era of the running transaction.
    pub(super) era: i64,
    #[cfg(test)]
    pub(super) asked: crate::store::sql::plans::Counter,
}

impl Connection {
    /// Opens the file and applies `settings`, which are pragmas.
    pub(super) fn open(path: &Path, flags: OpenFlags, settings: &str) -> rusqlite::Result<Self> {
        let db =
            rusqlite::Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        db.busy_timeout(PATIENCE)?;
        // Otherwise SQLite would compile a statement with `LIMIT ?` again for each execution, to
        // plan for the value.
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        db.set_prepared_statement_cache_capacity(PREPARED);
        db.execute_batch(settings)?;
        Ok(Self {
            db,
            keys: Keys::default(),
            era: 0,
            #[cfg(test)]
            asked: Default::default(),
        })
    }

    /// Executes a command without values and rows.
    pub(super) fn command(&self, sql: &'static str) -> Result<()> {
        self.db
            .prepare_cached(sql)
            .and_then(|mut command| command.raw_execute())
            .map_err(error)?;
        #[cfg(test)]
        self.asked.note_command(sql);
        Ok(())
    }

    /// Begins a transaction, in the present era.
    pub(super) fn begin(&mut self) -> Result<()> {
        // A transaction that begins with a read could not start to write if another process is
        // writing.
        self.command("BEGIN IMMEDIATE")?;
        self.era = self
            .db
            .prepare_cached("SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'era'")
            .and_then(|mut era| era.query_row((), |row| row.get(0)))
            .map_err(error)?;
        self.keys.begin(&self.db).map_err(error)
    }

    pub(super) fn is_in_transaction(&self) -> bool {
        !self.db.is_autocommit()
    }

    fn run(&self, statement: &Statement<'_>) -> rusqlite::Result<u64> {
        let rows = self.prepared(statement)?.raw_execute()? as u64;
        #[cfg(test)]
        self.asked.note_statement(rows);
        Ok(rows)
    }

    pub(super) fn rows<T: Columns>(&self, statement: &Statement<'_>) -> rusqlite::Result<Vec<T>> {
        let mut prepared = self.prepared(statement)?;
        let (mut names, mut read) = (Vec::new(), Vec::new());
        T::names(&mut names);
        let places = names
            .into_iter()
            .map(|name| prepared.column_index(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut rows = prepared.raw_query();
        while let Some(row) = rows.next()? {
            read.push(FromRow::from_row(row, &mut places.iter())?);
        }
        #[cfg(test)]
        self.asked.note_statement(0);
        Ok(read)
    }

    /// Prepares the statement and binds its values.
    fn prepared(
        &self,
        statement: &Statement<'_>,
    ) -> rusqlite::Result<rusqlite::CachedStatement<'_>> {
        #[cfg(test)]
        crate::store::sql::plans::check(&self.db, &statement.text);
        let mut prepared = self.db.prepare_cached(&statement.text)?;
        #[cfg(test)]
        crate::store::sql::plans::check_compiled(&prepared, &statement.text);
        for (place, value) in statement.values.iter().enumerate() {
            prepared.raw_bind_parameter(place + 1, value)?;
        }
        Ok(prepared)
    }
}

impl ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        Ok(rusqlite::types::ToSqlOutput::Borrowed(match self {
            Self::Int(int) => ValueRef::Integer(*int),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Bytes(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

impl Session for Connection {
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send {
        future::ready(self.run(&statement).map_err(error))
    }

    fn execute_for_long(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<u64>> + Send {
        self.execute(statement)
    }

    fn fetch<T: Columns>(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<T>>> + Send {
        future::ready(self.rows(&statement).map_err(error))
    }

    fn era(&self) -> Option<i64> {
        Some(self.era)
    }

    fn enter_era(&mut self, era: i64) {
        self.era = era;
    }

    fn recent(&self, keys: &[KeyHash]) -> Option<Recent> {
        Some(self.keys.recent(keys))
    }

    fn take_keys(&mut self, keys: &[(KeyHash, TaskId)]) -> impl Future<Output = Result<()>> + Send {
        #[cfg(test)]
        self.asked.note_statement(1);
        future::ready(self.keys.take(&self.db, keys).map_err(error))
    }
}

/// The error if nothing became free within [`PATIENCE`].
pub(super) fn busy(connections: u32) -> Error {
    Error::Busy {
        connections,
        waited: PATIENCE,
        hint: "the disk is slow, or too much is asked for at once",
    }
}

pub(super) fn closed() -> Error {
    Error::Other("the database is closed".into())
}

/// Converts an error of SQLite, by what a caller can do about it.
pub(super) fn error(error: rusqlite::Error) -> Error {
    // The low byte of an extended code is the primary one.
    let of_kind = match error.sqlite_error().map(|error| error.extended_code & 0xff) {
        Some(ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED) => Error::Transient,
        Some(ffi::SQLITE_FULL) => Error::Full,
        Some(ffi::SQLITE_TOOBIG | ffi::SQLITE_CONSTRAINT | ffi::SQLITE_MISMATCH) => Error::Refused,
        _ => Error::Other,
    };
    of_kind(error.into())
}
