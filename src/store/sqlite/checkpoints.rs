//! Checkpoints: a thread copies the log of the file into the file, a little at a time, while the writer goes on.
//!
//! Left to SQLite, the writer does it at a commit, whenever the log has grown by thousands of pages. Keys fall anywhere
//! in their index, so that is as many places of the file, and all callers wait. Here the writer finds little left to
//! copy when the log is full: it only does the rest, and begins the log anew.
//!
//! A crash loses nothing: the log has what the file may have only in part.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::connection::Connection;

/// The time in which commits gather for a checkpoint.
const EVERY: Duration = Duration::from_millis(250);

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
    /// Starts the thread. It opens its connection by itself, and ends where it cannot: the writer then does everything.
    pub(super) fn start(
        &self,
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.0);
        thread::Builder::new().name("taskd-sqlite-log".into()).spawn(move || match open() {
            Ok(connection) => shared.run(&connection),
            Err(error) => tracing::warn!("no thread copies the log of SQLite, the writer does: {error}"),
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
        let mut state = self.state.lock();
        loop {
            self.changed.wait_while(&mut state, |state| !state.is_due && !state.is_stopped);
            self.changed.wait_while_for(&mut state, |state| !state.is_stopped, EVERY);
            if state.is_stopped {
                return;
            }
            state.is_due = false;
            drop(state);
            // Passive: it waits for nobody, and nobody for it.
            if let Err(error) = connection.db.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |_| Ok(())) {
                tracing::debug!("a checkpoint of SQLite failed, the next one comes: {error}");
            }
            state = self.state.lock();
        }
    }
}
