//! A connection that runs statements.
//!
//! Each call has a time limit, and its error is sorted by what the caller can do about it.

use std::{borrow::Cow, future::Future, io};

use sqlx::{
    Arguments, AssertSqlSafe, Database, FromRow, MySql, MySqlConnection, Sqlite, SqliteConnection, mysql::MySqlRow,
    sqlite::SqliteRow,
};

use super::{
    dialect::Dialect,
    statement::{Statement, Value},
};
use crate::store::Result;

/// A value that rows of both databases can be read into.
pub trait Columns: for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, MySqlRow> + Send + Unpin {}
impl<T> Columns for T where T: for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, MySqlRow> + Send + Unpin {}

/// A connection, inside or outside of a transaction.
pub trait Session: Dialect + Send {
    /// Runs a command without values and rows. It need not be preparable.
    fn command(&mut self, sql: &'static str) -> impl Future<Output = Result<()>> + Send;

    /// Answers the number of rows that it inserted, deleted, or found to update.
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send;

    fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<Vec<T>>> + Send;
}

/// The answer of the database within its time limit.
pub(super) async fn answered<D: Dialect, T>(answer: impl Future<Output = sqlx::Result<T>>) -> Result<T> {
    let Some(limit) = D::ANSWER_WITHIN else { return answer.await.map_err(D::error) };
    let silent = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer from the database within {limit:?}"));
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer.map_err(D::error),
        Err(_) => Err(D::error(silent().into())),
    }
}

fn arguments<DB: Database>(values: Vec<Value<'_>>) -> sqlx::Result<DB::Arguments>
where
    DB::Arguments: Arguments<Database = DB>,
    i64: for<'q> sqlx::Encode<'q, DB> + sqlx::Type<DB>,
    String: for<'q> sqlx::Encode<'q, DB> + sqlx::Type<DB>,
    for<'v> &'v str: sqlx::Encode<'v, DB> + sqlx::Type<DB>,
    for<'v> &'v [u8]: sqlx::Encode<'v, DB> + sqlx::Type<DB>,
{
    let mut arguments = DB::Arguments::default();
    arguments.reserve(values.len(), 0);
    for value in values {
        match value {
            Value::Int(int) => arguments.add(int),
            Value::Text(Cow::Owned(text)) => arguments.add(text),
            Value::Text(Cow::Borrowed(text)) => arguments.add(text),
            Value::Bytes(bytes) => arguments.add(bytes),
        }
        .map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}

// AssertSqlSafe: taskd wrote the texts, and binds everything that comes from outside.
macro_rules! session {
    ($connection:ty, $db:ty $(, $plans:ident)?) => {
        impl Session for $connection {
            async fn command(&mut self, sql: &'static str) -> Result<()> {
                $(#[cfg(test)] super::$plans::note_command(sql);)?
                answered::<Self, _>(sqlx::raw_sql(sql).execute(self)).await.map(drop)
            }

            async fn execute(&mut self, statement: Statement<'_>) -> Result<u64> {
                $(#[cfg(test)] super::$plans::check(self, &statement.text).await;)?
                let arguments = arguments::<$db>(statement.values).map_err(Self::error)?;
                let done = sqlx::query_with::<$db, _>(AssertSqlSafe(statement.text), arguments).execute(self);
                let rows = answered::<Self, _>(done).await?.rows_affected();
                $(#[cfg(test)] super::$plans::note_statement(rows);)?
                Ok(rows)
            }

            async fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> Result<Vec<T>> {
                $(#[cfg(test)] super::$plans::check(self, &statement.text).await;)?
                let arguments = arguments::<$db>(statement.values).map_err(Self::error)?;
                let rows = sqlx::query_as_with::<$db, T, _>(AssertSqlSafe(statement.text), arguments).fetch_all(self);
                let rows = answered::<Self, _>(rows).await;
                $(#[cfg(test)] super::$plans::note_statement(0);)?
                rows
            }
        }
    };
}
session!(SqliteConnection, Sqlite, plans);
session!(MySqlConnection, MySql);
