//! Connections that read while the writer writes. Reads run on threads for blocking work, so they
//! do not block other tasks.

use std::{path::PathBuf, sync::Arc};

use parking_lot::Mutex;
use rusqlite::OpenFlags;
use tokio::sync::Semaphore;

use super::connection::{Connection, PATIENCE, busy, closed, error};
use crate::store::{
    Error, Result,
    sql::{Columns, Statement},
};

/// The maximum number of concurrent reads.
const READERS: usize = 4;

pub(super) struct Readers {
    path: PathBuf,
    idle: Arc<Mutex<Vec<Connection>>>,
    turns: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            idle: Arc::default(),
            turns: Arc::new(Semaphore::new(READERS)),
        }
    }

    pub(super) async fn read<T: Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        let statement = statement.into_owned();
        self.run(move |connection| connection.rows(&statement))
            .await
    }

    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = tokio::time::timeout(PATIENCE, Arc::clone(&self.turns).acquire_owned()).await;
        let turn = turn
            .map_err(|_| busy(READERS as u32))?
            .map_err(|_| closed())?;
        let (path, idle) = (self.path.clone(), Arc::clone(&self.idle));
        let read = tokio::task::spawn_blocking(move || {
            let kept = idle.lock().pop();
            let connection = kept.map_or_else(|| open(path), Ok)?;
            let done = work(&connection);
            idle.lock().push(connection);
            drop(turn);
            done
        });
        read.await
            .map_err(|stopped| Error::Other(stopped.into()))?
            .map_err(error)
    }

    /// Waits for the reads in progress, and closes the connections.
    pub(super) async fn close(&self) {
        // Does not wait longer for a read that hangs.
        drop(tokio::time::timeout(PATIENCE, self.turns.acquire_many(READERS as u32)).await);
        self.turns.close();
        self.idle.lock().clear();
    }
}

fn open(path: PathBuf) -> rusqlite::Result<Connection> {
    Connection::open(
        &path,
        OpenFlags::SQLITE_OPEN_READ_WRITE,
        "PRAGMA query_only = on",
    )
}
