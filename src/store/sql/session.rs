//! A connection that runs statements.

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

/// A value that rows of both databases can be read into.
pub trait Columns: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static {}
impl<T> Columns for T where T: for<'r> sqlx::FromRow<'r, MySqlRow> + FromRow + Send + Unpin + 'static
{}

/// The tasks of the latest keys, and the keys that are not among those.
#[derive(Default)]
pub struct Recent {
    pub(in crate::store) owners: HashMap<KeyHash, TaskId>,
    pub(in crate::store) others: Vec<KeyHash>,
}

/// A connection, inside or outside of a transaction.
pub trait Session: Dialect + Send {
    /// Answers the number of rows that it inserted, deleted, or found to update.
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = Result<u64>> + Send;

    /// Executes a statement that changes the schema: an index of a large table takes minutes.
    fn execute_for_long(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<u64>> + Send;

    fn fetch<T: Columns>(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<T>>> + Send;

    /// Fetches the ids of a statement that selects nothing else.
    fn ids(
        &mut self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<TaskId>>> + Send {
        async move { task_ids(self.fetch(statement).await?) }
    }

    /// The owners that the connection has in memory. `None`: a unique index of `tasks` decides who
    /// has a key.
    fn recent(&self, _keys: &[KeyHash]) -> Option<Recent> {
        None
    }

    /// Gives keys to tasks that this transaction has inserted, where no index does.
    fn take_keys(
        &mut self,
        _keys: &[(KeyHash, TaskId)],
    ) -> impl Future<Output = Result<()>> + Send {
        future::ready(Ok(()))
    }
}
