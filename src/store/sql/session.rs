//! A connection that runs statements.

use std::future::Future;

use sqlx::mysql::MySqlRow;

use super::{columns::FromRow, dialect::Dialect, statement::Statement};
use crate::store::Result;

/// A value that rows of both databases can be read into.
pub trait Columns: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static {}
impl<T> Columns for T where T: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static {}

/// A connection, inside or outside of a transaction.
pub trait Session: Dialect + Send {
    /// Answers the number of rows that it inserted, deleted, or found to update.
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send;

    /// The same for a statement that changes the schema: an index of a large table takes minutes.
    fn execute_for_long(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send;

    fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<Vec<T>>> + Send;
}
