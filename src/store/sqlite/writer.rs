//! The writer: one thread with the only connection that writes.
//!
//! Transactions queue for it, because SQLite has one writer at a time. Those that gather while it
//! is busy run one after another and commit together: they wait for the disk once. If one of them
//! fails, all are undone and run again, each inside a savepoint.
//!
//! The crash window: killed before the COMMIT, nothing took effect, and no caller was answered.

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

/// Transactions that commit together, at most.
const TOGETHER: usize = 64;

pub(super) struct Writer {
    /// `None` after the close. The number of callers bounds it: each waits for its answer, a minute
    /// at most.
    queue: Mutex<Option<Sender<Box<dyn Transaction>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    checkpoints: Checkpoints,
    #[cfg(test)]
    queued: AtomicUsize,
}

impl Writer {
    /// `reopen` makes a connection after one that could not undo what it had begun; `of_log` that
    /// of the checkpoints.
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

    /// Runs `work` in a transaction of its own. A caller that gives up before it began takes it
    /// back.
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

    /// The number of transactions that were ever in the queue.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.queued.load(Ordering::SeqCst)
    }

    /// Runs the transactions that wait, and ends the threads.
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

    /// Runs its statements. Answers whether nothing has to be undone.
    fn run(&mut self, connection: &mut Connection) -> bool;

    /// Notes that its statements were undone.
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
            // The transaction has not begun, so nothing has to be undone.
            self.done = Some(Err(busy(1)));
            return true;
        }
        // The connection runs each statement at once, so the work never waits.
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
            // A caller that has given up does not matter.
            drop(self.answer.send(done));
        }
    }
}

/// A copy of an error for another caller.
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
                // A connection that cannot undo is in an unknown state: it is closed.
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

/// Runs the transactions and commits those that went well. After an error none of them is stored.
fn commit(connection: &mut Connection, group: &mut [Box<dyn Transaction>]) -> Result<()> {
    begin(connection)?;
    // Nearly always all go well. Behind a savepoint SQLite would copy each page before its
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

/// Runs and commits each transaction behind a savepoint, so that one that fails undoes only its own
/// changes.
fn commit_apart(connection: &mut Connection, group: &mut [Box<dyn Transaction>]) -> Result<()> {
    let mut left: Vec<_> = group.iter_mut().collect();
    loop {
        begin(connection)?;
        match run_apart(connection, &mut left)? {
            None => return end(connection),
            Some(failed) => {
                connection.keys.undone();
                left.remove(failed);
            }
        }
    }
}

/// Runs transactions behind savepoints. Answers the place of one with which SQLite undid all: it
/// does that where the disk is full. The others may go without it.
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

fn begin(connection: &mut Connection) -> Result<()> {
    // One that reads first could not become the writer later if another process is.
    connection.command("BEGIN IMMEDIATE")?;
    connection.keys.begin(&connection.db).map_err(error)
}

fn end(connection: &mut Connection) -> Result<()> {
    connection.keys.step(&connection.db).map_err(error)?;
    connection.command("COMMIT")
}
