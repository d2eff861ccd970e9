//! The writer: one thread with the only connection that writes.
//!
//! Transactions queue for it, because SQLite has a single writer. Those that accumulate while it is
//! busy are executed one after the other and committed together, so that they wait for the disk
//! once. If one of them fails, all are rolled back and executed again, each inside a savepoint.
//!
//! Crash window: if the process is killed before the COMMIT, nothing took effect, and no caller got
//! an answer.

#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{
    io, iter,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
    time::Instant,
};

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{
    checkpoints::Checkpoints,
    connection::{Connection, PATIENCE, busy, closed, error},
};
use crate::store::{Error, Result, sql::Work};

/// The maximum number of transactions to commit together.
const TOGETHER: usize = 64;

pub(super) struct Writer {
    /// `None` after the close. Its length is limited by the number of callers, because each waits
    /// for its answer, for a minute at most.
    queue: Mutex<Option<Sender<Box<dyn Transaction>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    checkpoints: Checkpoints,
    #[cfg(test)]
    queued: AtomicUsize,
}

impl Writer {
    /// `reopen` opens a new connection if one could not roll back a transaction. `of_log` opens the
    /// connection for the checkpoints.
    pub(super) fn start(
        connection: Connection,
        reopen: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
        of_log: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
    ) -> Result<Self> {
        let (sender, receiver) = channel();
        let checkpoints = Checkpoints::default();
        let committed = checkpoints.clone();
        let failed = |error: io::Error| Error::Other(error.into());
        let thread = thread::Builder::new().name("taskd-sqlite".into());
        let thread = thread
            .spawn(move || serve(connection, &receiver, reopen, &committed))
            .map_err(failed)?;
        let threads = vec![thread, checkpoints.start(of_log).map_err(failed)?];
        Ok(Self {
            queue: Mutex::new(Some(sender)),
            threads: Mutex::new(threads),
            checkpoints,
            #[cfg(test)]
            queued: AtomicUsize::new(0),
        })
    }

    /// Runs `work` in a transaction. If the caller gives up before the transaction has begun, the
    /// transaction is dropped.
    pub(super) async fn transact<I, T>(&self, work: &Work<Connection, I, T>) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let transaction = Waiting {
            work: work.clone(),
            since: Instant::now(),
            done: None,
            answer,
        };
        let sent = self
            .queue
            .lock()
            .as_ref()
            .map(|queue| queue.send(Box::new(transaction)));
        #[cfg(test)]
        self.queued.fetch_add(1, Ordering::SeqCst);
        match sent {
            Some(Ok(())) => answered.await.unwrap_or_else(|_| Err(closed())),
            _ => Err(closed()),
        }
    }

    /// The number of transactions that were ever queued.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// Runs the queued transactions, and ends the threads.
    pub(super) async fn close(&self) {
        drop(self.queue.lock().take());
        self.checkpoints.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if let Ok(Err(_)) = tokio::task::spawn_blocking(|| thread.join()).await {
                tracing::error!("a thread of SQLite panicked");
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.checkpoints.stop();
    }
}

/// A transaction in the queue.
trait Transaction: Send {
    fn is_awaited(&self) -> bool;

    /// Runs its statements. Returns true if nothing has to be rolled back.
    fn run(&mut self, connection: &mut Connection) -> bool;

    /// Records that its statements were rolled back.
    fn undone(&mut self, because: &Error);

    fn answer(self: Box<Self>);
}

struct Waiting<I, T> {
    work: Work<Connection, I, T>,
    since: Instant,
    done: Option<Result<T>>,
    answer: oneshot::Sender<Result<T>>,
}

impl<I: Send + Sync, T: Send> Transaction for Waiting<I, T> {
    fn is_awaited(&self) -> bool {
        !self.answer.is_closed()
    }

    fn run(&mut self, connection: &mut Connection) -> bool {
        if self.done.is_none() && self.since.elapsed() > PATIENCE {
            // The transaction has not begun, so there is nothing to roll back.
            self.done = Some(Err(busy(1)));
            return true;
        }
        // The connection executes each statement immediately, so the future is ready at the first
        // poll.
        let done = match catch_unwind(AssertUnwindSafe(|| self.work.on(connection).now_or_never()))
        {
            Ok(Some(done)) => done,
            Ok(None) => Err(Error::Other(
                "a transaction waited for something else".into(),
            )),
            Err(_) => Err(Error::Other("a transaction panicked".into())),
        };
        self.done.insert(done).is_ok()
    }

    fn undone(&mut self, because: &Error) {
        if !matches!(self.done, Some(Err(_))) {
            self.done = Some(Err(alike(because)));
        }
    }

    fn answer(self: Box<Self>) {
        if let Some(done) = self.done {
            // The caller may have given up, which does not matter.
            drop(self.answer.send(done));
        }
    }
}

/// Copies an error for another caller.
fn alike(error: &Error) -> Error {
    match error {
        Error::Transient(cause) => Error::Transient(cause.to_string().into()),
        Error::Full(cause) => Error::Full(cause.to_string().into()),
        other => Error::Other(other.to_string().into()),
    }
}

fn serve(
    connection: Connection,
    queue: &Receiver<Box<dyn Transaction>>,
    reopen: impl Fn() -> rusqlite::Result<Connection>,
    checkpoints: &Checkpoints,
) {
    let mut kept = Some(connection);
    while let Ok(first) = queue.recv() {
        let gathered = iter::once(first).chain(queue.try_iter()).take(TOGETHER);
        let mut group: Vec<_> = gathered
            .filter(|transaction| transaction.is_awaited())
            .collect();
        let stored = match kept.take().map_or_else(&reopen, Ok) {
            Ok(mut connection) => {
                let stored = commit(&mut connection, &mut group);
                match stored {
                    Ok(()) => connection.keys.committed(),
                    Err(_) => connection.keys.undone(),
                }
                // A connection that cannot roll back is in an unknown state, so it is closed.
                let is_clean =
                    !connection.is_in_transaction() || connection.command("ROLLBACK").is_ok();
                kept = is_clean.then_some(connection);
                stored
            }
            Err(cause) => Err(error(cause)),
        };
        if let Err(because) = stored {
            group
                .iter_mut()
                .for_each(|transaction| transaction.undone(&because));
        }
        group
            .into_iter()
            .for_each(|transaction| transaction.answer());
        checkpoints.note_commit();
    }
}

/// Runs the transactions and commits those that succeeded. If this returns an error, none of them
/// is stored.
fn commit(connection: &mut Connection, group: &mut [Box<dyn Transaction>]) -> Result<()> {
    connection.begin()?;
    // Almost always all succeed. After a savepoint, SQLite would copy each page before a
    // transaction changes it.
    if group
        .iter_mut()
        .all(|transaction| transaction.run(connection))
    {
        return end(connection);
    }
    connection.keys.undone();
    if connection.is_in_transaction() {
        connection.command("ROLLBACK")?;
    }
    match group {
        [_] => Ok(()),
        _ => commit_apart(connection, group),
    }
}

/// Runs each transaction inside a savepoint, so that a failed one undoes only its own changes, and
/// commits the others.
fn commit_apart(connection: &mut Connection, group: &mut [Box<dyn Transaction>]) -> Result<()> {
    let mut left: Vec<_> = group.iter_mut().collect();
    loop {
        connection.begin()?;
        match run_apart(connection, &mut left)? {
            None => return end(connection),
            Some(failed) => {
                connection.keys.undone();
                left.remove(failed);
            }
        }
    }
}

/// Runs transactions inside savepoints. If SQLite rolls back everything, which it does when the
/// disk is full, returns the index of the transaction that caused it. The others may succeed
/// without that one.
fn run_apart(
    connection: &mut Connection,
    group: &mut [&mut Box<dyn Transaction>],
) -> Result<Option<usize>> {
    for (place, transaction) in group.iter_mut().enumerate() {
        connection.command("SAVEPOINT transaction_of_a_caller")?;
        let keys = connection.keys.taken();
        if !transaction.run(connection) {
            if !connection.is_in_transaction() {
                return Ok(Some(place));
            }
            connection.keys.give_back(keys);
            connection.command("ROLLBACK TO transaction_of_a_caller")?;
        }
        connection.command("RELEASE transaction_of_a_caller")?;
    }
    Ok(None)
}

fn end(connection: &mut Connection) -> Result<()> {
    connection.keys.step(&connection.db).map_err(error)?;
    connection.command("COMMIT")
}
