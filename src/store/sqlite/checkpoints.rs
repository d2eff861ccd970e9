//! Checkpoints: a thread copies the log of the file into the file, a little at a time, while the
//! writer goes on.
//!
//! Left to SQLite, the writer does it at a commit, whenever the log has grown by thousands of
//! pages. Keys fall anywhere in their index, so that is as many places of the file, and all callers
//! wait. Here the writer finds little left to copy when the log is full: it only does the rest, and
//! begins the log anew.
//!
//! A crash loses nothing: the log has what the file may have only in part.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rusqlite::Connection as Db;

use super::connection::Connection;
use crate::telemetry::metrics;

/// The time in which commits gather for a checkpoint.
const EVERY: Duration = Duration::from_millis(250);
/// Pages of the log that are not in the file, from which on something must hold checkpoints up: 64
/// MiB, twice the log after which the writer copies itself.
const HELD_UP: i64 = 16_384;
const PAGE_BYTES: i64 = 4096;

/// The thread, and what it waits for. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Checkpoints(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Something was committed since the last checkpoint.
    is_due: bool,
    is_stopped: bool,
}

impl Checkpoints {
    /// Starts the thread. It opens its connection by itself, and ends where it cannot: the writer
    /// then does everything.
    pub(super) fn start(
        &self,
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.0);
        thread::Builder::new()
            .name("taskd-sqlite-log".into())
            .spawn(move || match open() {
                Ok(connection) => shared.run(&connection),
                Err(error) => {
                    tracing::warn!("no thread copies the log of SQLite, the writer does: {error}")
                }
            })
    }

    /// Something was committed.
    pub(super) fn note_commit(&self) {
        let mut state = self.0.state.lock();
        if !state.is_due {
            state.is_due = true;
            self.0.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.0.state.lock().is_stopped = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn run(&self, connection: &Connection) {
        let mut is_held_up = false;
        let mut state = self.state.lock();
        loop {
            self.changed
                .wait_while(&mut state, |state| !state.is_due && !state.is_stopped);
            self.changed
                .wait_while_for(&mut state, |state| !state.is_stopped, EVERY);
            if state.is_stopped {
                return;
            }
            state.is_due = false;
            drop(state);
            match checkpoint(&connection.db) {
                Ok(left) => {
                    metrics::sqlite_log(left * PAGE_BYTES);
                    if left > HELD_UP && !is_held_up {
                        let mib = (left * PAGE_BYTES) >> 20;
                        tracing::warn!(
                            "the log of SQLite (taskd.db-wal) has {mib} MiB that are not in the file, and grows: does \
                             another program hold a transaction open on taskd.db?"
                        );
                    }
                    is_held_up = left > HELD_UP;
                }
                Err(error) => {
                    tracing::debug!("a checkpoint of SQLite failed, the next one comes: {error}")
                }
            }
            state = self.state.lock();
        }
    }
}

/// Copies what it may; answers how many pages of the log are not in the file. Passive: it waits for
/// nobody, and nobody for it.
fn checkpoint(db: &Db) -> rusqlite::Result<i64> {
    db.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |row| {
        Ok(row.get::<_, i64>(1)? - row.get::<_, i64>(2)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_stays_is_seen_by_what_is_left_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Db::open(dir.path().join("taskd.db")).unwrap();
        let (writer, reader) = (open(), open());
        writer
            .execute_batch(
                "PRAGMA journal_mode = wal; CREATE TABLE t (x); INSERT INTO t VALUES (1)",
            )
            .unwrap();
        assert_eq!(checkpoint(&writer).unwrap(), 0);
        reader.execute_batch("BEGIN; SELECT * FROM t").unwrap();
        writer
            .execute_batch("INSERT INTO t VALUES (zeroblob(100000))")
            .unwrap();
        let left = checkpoint(&writer).unwrap();
        assert!(left > 20, "{left}");
        reader.execute_batch("COMMIT").unwrap();
        assert_eq!(checkpoint(&writer).unwrap(), 0);
    }
}
