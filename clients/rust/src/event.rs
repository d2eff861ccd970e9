//! The events of a worker, and its summary.

use std::{
    io::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{error::Error, task::TaskInfo};

pub(crate) type Tell = Arc<dyn Fn(Event<'_>) + Send + Sync>;

/// How often a worker repeats that taskd is still unavailable.
const REMIND_AFTER: Duration = Duration::from_secs(30);

/// Prints on stderr what a program without an event handler should not miss: failed attempts,
/// handlers that run for long, and that taskd is unavailable.
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
        Event::StillRuns { task, so_far } => {
            say(&format!(
                "the handler still runs, after {:.1} s (task {:?}, {})",
                so_far.as_secs_f64(),
                task.key(),
                task.id()
            ));
        }
        Event::NoLimitKey(task) => {
            say(&format!(
                "no limit key, so hold and pace do nothing: the queue had no limit_by at its insert (task {:?}, {})",
                task.key(),
                task.id()
            ));
        }
        Event::Started(_) | Event::Ended { .. } | Event::Draining(_) => {}
    })
}

/// Prints a line on stderr. Ignores errors, for example if stderr is closed.
pub(crate) fn say(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}

/// An event of a worker, for logs and progress.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A handler starts.
    Started(&'a TaskInfo),
    /// A handler has run for half of a lease; again when it has run twice as long.
    StillRuns {
        /// The task.
        task: &'a TaskInfo,
        /// For how long the handler has run.
        so_far: Duration,
    },
    /// taskd has answered the report of a task, or the worker lost the task.
    Ended {
        /// The task.
        task: &'a TaskInfo,
        /// How it ended.
        ended: Ended,
        /// Why it did not end well; otherwise empty.
        reason: &'a str,
        /// How long the handler ran, or `None` if it never started.
        took: Option<Duration>,
    },
    /// Some of the tasks that a handler discovered are invalid and were not stored. The others
    /// were.
    NotStored {
        /// The task whose handler discovered them.
        task: &'a TaskInfo,
        /// How many are invalid, and what is wrong with the first one.
        reason: &'a str,
    },
    /// A handler said [`Done::hold`](crate::Done::hold) or [`Done::pace`](crate::Done::pace), and the
    /// task has no limit key: the worker left that out.
    NoLimitKey(&'a TaskInfo),
    /// A call failed; the worker retries it.
    Away(&'a Error),
    /// The worker takes no more tasks; it still holds this many.
    Draining(usize),
}

/// How a worker's hold on a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Completed, and credited to the worker.
    Completed,
    /// Rejected: the attempt failed.
    Rejected,
    /// Put off, or given back because the worker stopped or its handler had not started.
    GivenBack,
    /// The lease was lost, or the task is final: cancelled, or completed by other workers.
    Lost,
}

/// The outcome of a run: how many tasks ended in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Completed tasks that taskd credited to the worker.
    pub completed: u64,
    /// Attempts that failed.
    pub rejected: u64,
    /// Tasks that were put off, or given back because the worker stopped or their handlers had not
    /// started.
    pub given_back: u64,
    /// Tasks whose leases the worker lost, including those that it finished in vain.
    pub lost: u64,
    /// Finished tasks whose reports taskd had not answered when the run ended: other workers may do
    /// them again.
    pub unreported: u64,
}
