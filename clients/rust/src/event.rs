//! The events of a worker, and its summary.

use std::{
    io::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{error::Error, task::TaskInfo};

pub(crate) type Tell = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// How often a worker says that taskd is still away.
const REMIND_AFTER: Duration = Duration::from_secs(30);

/// Says on stderr what a program that asks for no events should not miss: failed attempts, and that
/// taskd is away.
pub(crate) fn say_on_stderr() -> Tell {
    let last_away: Mutex<Option<Instant>> = Mutex::default();
    Arc::new(move |event| match event {
        Event::Away(error) => {
            let mut last = last_away.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_none_or(|last| last.elapsed() >= REMIND_AFTER) {
                *last = Some(Instant::now());
                say(&match error {
                    Error::Away { address, message } => {
                        format!("taskd is away at {address}, trying again: {message}")
                    }
                    other => format!("taskd is away, trying again: {other}"),
                });
            }
        }
        Event::Ended {
            task,
            ended: Ended::Rejected,
            reason,
            ..
        } => {
            say(&format!(
                "rejected: {reason} (task {:?}, {})",
                task.key(),
                task.id()
            ));
        }
        Event::NotStored { task, reason } => {
            say(&format!(
                "not stored: {reason} (task {:?}, {})",
                task.key(),
                task.id()
            ));
        }
        Event::Started(_) | Event::Ended { .. } | Event::Draining(_) => {}
    })
}

/// Prints a line on stderr. A stderr that is closed is no reason to stop.
pub(crate) fn say(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}

/// An event of a worker, for logs and progress.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A handler begins.
    Started(&'a TaskInfo),
    /// taskd has answered the report of a task, or the worker lost it.
    Ended {
        /// The task.
        task: &'a TaskInfo,
        /// How it ended.
        ended: Ended,
        /// Why it did not end well; else empty.
        reason: &'a str,
        /// How long the handler ran; `None`: it never began.
        took: Option<Duration>,
    },
    /// Some tasks that a handler discovered are wrong, and not stored. The others are.
    NotStored {
        /// The task of the handler.
        task: &'a TaskInfo,
        /// How many there are, and what is wrong with the first.
        reason: &'a str,
    },
    /// A call failed; the worker tries again.
    Away(&'a Error),
    /// The worker takes no more tasks; so many are in its hands.
    Draining(usize),
}

/// How a task left the hands of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Completed, and credited to the worker.
    Completed,
    /// Rejected: the attempt failed.
    Rejected,
    /// Given back because the worker stopped, or before the handler had begun with it; or put off.
    GivenBack,
    /// The lease was lost, or the task ended in another way: cancelled, or completed by others.
    Lost,
}

/// The outcome of a run: how many tasks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Tasks that taskd credited.
    pub completed: u64,
    /// Attempts that failed.
    pub rejected: u64,
    /// Tasks given back at the stop, or before the handler had begun with them; and those that were
    /// put off.
    pub given_back: u64,
    /// Tasks that this worker lost, or finished in vain.
    pub lost: u64,
    /// Tasks that it finished, and whose reports taskd had not answered at the end: other workers
    /// may do them again.
    pub unreported: u64,
}
