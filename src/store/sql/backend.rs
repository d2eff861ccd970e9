//! What the store requires of a database.

use std::{
    future::{self, Future},
    sync::Arc,
};

use futures::future::BoxFuture;

use super::{
    session::{Columns, Recent, Session},
    statement::Statement,
};
use crate::{model::KeyHash, store::Result};

pub trait Backend: Send + Sync + 'static {
    type Connection: Session + 'static;

    /// Runs `work` in a transaction and commits it.
    fn transact<I, T>(
        &self,
        work: &Work<Self::Connection, I, T>,
    ) -> impl Future<Output = Result<T>> + Send
    where
        I: Send + Sync + 'static,
        T: Send + 'static;

    /// Runs one statement that changes nothing.
    fn read<T: Columns>(
        &self,
        statement: Statement<'_>,
    ) -> impl Future<Output = Result<Vec<T>>> + Send;

    /// The tasks that own these keys, as far as the database has them in memory. `None` if an index
    /// of `tasks` covers all keys.
    fn recent(&self, _keys: &[KeyHash]) -> impl Future<Output = Result<Option<Recent>>> + Send {
        future::ready(Ok(None))
    }

    /// Checks whether the database responds. A database without a server always does.
    fn ping(&self) -> impl Future<Output = Result<()>> + Send {
        future::ready(Ok(()))
    }

    /// Ends running calls and closes the connections.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

/// The statements of a transaction, as a function of a connection and the caller's input.
pub(super) type Steps<C, I, T> = for<'a> fn(&'a mut C, &'a I) -> BoxFuture<'a, Result<T>>;

/// The work of a transaction. It owns its input, so that it can run on another thread, and more
/// than once.
pub struct Work<C, I, T> {
    input: Arc<I>,
    steps: Steps<C, I, T>,
    /// No other transaction begins an era before this one has ended.
    pub(in crate::store) is_in_era: bool,
}

impl<C, I, T> Work<C, I, T> {
    pub(in crate::store) fn new(input: I, steps: Steps<C, I, T>) -> Self {
        Self {
            input: Arc::new(input),
            steps,
            is_in_era: false,
        }
    }

    pub(in crate::store) fn in_era(input: I, steps: Steps<C, I, T>) -> Self {
        Self {
            is_in_era: true,
            ..Self::new(input, steps)
        }
    }

    pub(in crate::store) fn on<'a>(&'a self, connection: &'a mut C) -> BoxFuture<'a, Result<T>> {
        (self.steps)(connection, &self.input)
    }
}

impl<C, I, T> Clone for Work<C, I, T> {
    fn clone(&self) -> Self {
        Self {
            input: Arc::clone(&self.input),
            steps: self.steps,
            is_in_era: self.is_in_era,
        }
    }
}
