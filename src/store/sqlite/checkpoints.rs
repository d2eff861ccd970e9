//! Checkpoints: a thread copies the write-ahead log into the database file, a little at a time,
//! while the writer continues.
//!
//! If it were left to SQLite, the writer would do it in a commit whenever the log has grown by
//! thousands of pages. Keys are spread randomly over their index, so these pages are in as many
//! places of the file, and all callers would wait. With this thread, the writer finds little left
//! to copy when the log is full: it copies only the rest, and restarts the log.
//!
//! A crash loses nothing, because the log contains everything that the file may have only in part.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rusqlite::Connection as Db;

use super::connection::Connection;
use crate::telemetry::metrics;

/// How long commits accumulate before a checkpoint.
const EVERY: Duration = Duration::from_millis(250);
/// If the log has more pages than this that are not in the file, something must be blocking
/// checkpoints. That is 64 MiB, twice the size at which the writer itself copies the log.
const HELD_UP: i64 = 16_384;
const PAGE_BYTES: i64 = 4096;

/// The thread, and the state that it waits for. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Checkpoints(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Something has been committed since the last checkpoint.
    is_due: bool,
    is_stopped: bool,
}

impl Checkpoints {
    /// Starts the thread. It opens its own connection, and ends if that fails, in which case the
    /// writer does all the work.
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

    /// Reports that something was committed.
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

/// Copies as much as possible. Returns how many pages of the log are not in the file yet. PASSIVE
/// means that it waits for nobody, and nobody waits for it.
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
