//! A connection that executes statements.

use std::{
    collections::HashMap,
    future::{self, Future},
};

use sqlx::mysql::MySqlRow;

use super::{columns::FromRow, dialect::Dialect, rows::task_ids, statement::Statement};
use crate::{
    model::{KeyHash, TaskId},
    store::Result,
};

/// A value that can be read from rows of both databases.
pub trait Columns: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static {}
impl<T> Columns for T where T: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static
{}

/// The owners of those keys that are among the latest ones, and the remaining keys.
#[derive(Default)]
pub struct Recent {
    pub(in crate::store) owners: HashMap<KeyHash, TaskId>,
    pub(in crate::store) others: Vec<KeyHash>,
}

/// A connection, inside or outside of a transaction.
pub trait Session: Dialect + Send {
    /// Returns the number of rows that were inserted, deleted, or matched by an update.
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send;

    /// Executes a statement that changes the schema without a time limit, because creating an index
    /// of a large table takes minutes.
    fn execute_for_long(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<u64>> + Send;

    fn fetch<T: Columns>(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<T>>> + Send;

    /// Fetches the result of a statement that selects only ids.
    fn ids(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<TaskId>>> + Send {
        async move { task_ids(self.fetch(statement).await?) }
    }

    /// The owners of these keys, as far as the connection has them in memory. `None` if a unique
    /// index of `tasks` decides who owns a key.
    fn recent(&self, _keys: &[KeyHash]) -> Option<Recent> {
        None
    }

    /// The value for [`Dialect::ERA`], if that is a placeholder.
    fn era(&self) -> Option<i64> {
        None
    }

    /// Records that this transaction has begun an era.
    fn enter_era(&mut self, _era: i64) {}

    /// Assigns keys to tasks that this transaction has inserted, if no index does that.
    fn take_keys(
        &mut self,
        _keys: &[(KeyHash, TaskId)],
    ) -> impl Future<Output = Result<()>> + Send {
        future::ready(Ok(()))
    }
}
