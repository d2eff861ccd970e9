//! An in-memory replacement for taskd, for tests of handlers.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::{
    error::Error,
    new_task::{NewTask, Priority},
    pb::{self, ItemStatus},
    source::Source,
};

/// The default of taskd.
const MAX_ATTEMPTS: u32 = 5;
/// Delays end at once here, so a handler that puts a task off until something changes would
/// otherwise loop forever.
const MOST_PUT_OFF: u32 = 100;

/// Delivers its tasks, and those that handlers discover, until all of them are final; then the
/// worker ends.
///
/// Like taskd, it drops a key that the queue has already seen, and delivers a rejected task again,
/// up to `max_attempts`. Unlike taskd, it ignores time: leases do not expire, and delays end at
/// once. A task that is put off a hundred times dies. Clones are handles of the same mock.
///
/// ```
/// # use taskd_client::{Done, Failure, Mock, NewTask, Task, Worker};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), taskd_client::Error> {
/// let mock = Mock::new([NewTask::new("q", "a").text("ab"), NewTask::new("q", "b").text("abc")]);
/// let length = async |task: Task<String>| Ok::<_, Failure>(Done::text(task.payload.len().to_string()));
/// Worker::new("w", ["q"]).run_on(mock.clone(), length).await?;
/// assert_eq!(mock.result("q", "b").unwrap(), "3");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Mock(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Notify,
}

type Name = (String, Bytes);

#[derive(Default)]
struct State {
    seen: HashSet<Name>,
    /// Tasks that can be claimed, with the number of their attempts so far.
    offered: VecDeque<(pb::NewTask, u32)>,
    leased: HashMap<String, (pb::NewTask, u32)>,
    completed: HashMap<Name, Bytes>,
    dead: HashMap<Name, String>,
    /// How often each task was put off.
    put_off: HashMap<Name, u32>,
    last: u64,
}

impl Mock {
    /// A mock with these tasks.
    pub fn new(tasks: impl IntoIterator<Item = NewTask>) -> Self {
        let mock = Self::default();
        mock.state().add(tasks.into_iter().map(|task| task.0));
        mock
    }

    /// The result of a completed task.
    pub fn result(&self, queue: &str, key: impl Into<Bytes>) -> Option<Bytes> {
        self.state()
            .completed
            .get(&(queue.to_owned(), key.into()))
            .cloned()
    }

    /// The last failure reason of a dead task.
    pub fn dead(&self, queue: &str, key: impl Into<Bytes>) -> Option<String> {
        self.state()
            .dead
            .get(&(queue.to_owned(), key.into()))
            .cloned()
    }

    /// How many tasks are completed.
    pub fn completed(&self) -> usize {
        self.state().completed.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No method panics while the state is half changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles the report of one task, and returns the status that taskd would.
    fn report(
        &self,
        id: String,
        has_limit: bool,
        report: impl FnOnce(&mut State, pb::NewTask, u32),
    ) -> pb::ItemResult {
        let mut state = self.state();
        let status = match state.leased.remove(&id) {
            // As in taskd, the lease stays.
            Some((task, attempt)) if has_limit && task.limit_key.is_empty() => {
                state.leased.insert(id.clone(), (task, attempt));
                ItemStatus::Invalid
            }
            Some((task, attempt)) => {
                report(&mut state, task, attempt);
                ItemStatus::Ok
            }
            None => ItemStatus::LeaseLost,
        };
        self.0.changed.notify_waiters();
        pb::ItemResult {
            id,
            status: status.into(),
            ..Default::default()
        }
    }
}

impl State {
    fn add(&mut self, tasks: impl IntoIterator<Item = pb::NewTask>) {
        for task in tasks {
            if self.seen.insert(name(&task)) {
                self.offered.push_back((task, 0));
            }
        }
    }

    fn lease(&mut self, most: usize) -> Vec<pb::LeasedTask> {
        let mut leased = Vec::new();
        while leased.len() < most {
            let Some((task, attempts)) = self.offered.pop_front() else {
                break;
            };
            self.last += 1;
            let id = format!("mock-{}", self.last);
            leased.push(pb::LeasedTask {
                id: id.clone(),
                queue: task.queue.clone(),
                key: task.key.clone(),
                payload: task.payload.clone(),
                payload_encoding: task.payload_encoding,
                headers: task.headers.clone(),
                lease_token: id.clone(),
                attempt: attempts + 1,
                replicas: task.replicas.unwrap_or(1),
                priority: match task.priority() {
                    Priority::Unspecified => Priority::Medium.into(),
                    given => given.into(),
                },
                limit_key: task.limit_key.clone(),
                ..Default::default()
            });
            self.leased.insert(id, (task, attempts + 1));
        }
        leased
    }
}

fn name(task: &pb::NewTask) -> Name {
    (task.queue.clone(), task.key.clone())
}

impl Source for Mock {
    async fn get(&self, most: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        loop {
            let mut changed = std::pin::pin!(self.0.changed.notified());
            // Register for notifications before reading the state, so that no change is missed in
            // between.
            changed.as_mut().enable();
            {
                let mut state = self.state();
                let leased = state.lease(most);
                if !leased.is_empty() {
                    return Ok(Some(leased));
                }
                if state.leased.is_empty() {
                    return Ok(None);
                }
            }
            changed.await;
        }
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        let complete = |completion: pb::Completion| {
            let has_limit = completion.limit.is_some();
            self.report(completion.id, has_limit, |state, task, _| {
                state.completed.insert(name(&task), completion.result);
                state.add(completion.discovered);
            })
        };
        Ok(all.into_iter().map(complete).collect())
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        let reject = |rejection: pb::Rejection| {
            let has_limit = rejection.limit.is_some();
            self.report(rejection.id, has_limit, |state, task, attempt| {
                let most = task.max_attempts.unwrap_or(MAX_ATTEMPTS);
                let is_put_off = rejection.not_started
                    && rejection
                        .delay
                        .is_some_and(|delay| delay != Default::default());
                if is_put_off {
                    let times = state.put_off.entry(name(&task)).or_default();
                    *times += 1;
                    if *times < MOST_PUT_OFF {
                        state.offered.push_back((task, attempt - 1));
                    } else {
                        state.dead.insert(name(&task), rejection.reason);
                    }
                } else if rejection.not_started {
                    state.offered.push_front((task, attempt - 1));
                } else if rejection.retry == Some(false) || attempt >= most {
                    state.dead.insert(name(&task), rejection.reason);
                } else {
                    state.offered.push_back((task, attempt));
                }
            })
        };
        Ok(all.into_iter().map(reject).collect())
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        let state = self.state();
        let extend = |extension: pb::Extension| {
            let is_held = state.leased.contains_key(&extension.id);
            let status = if is_held {
                ItemStatus::Ok
            } else {
                ItemStatus::LeaseLost
            };
            pb::ItemResult {
                id: extension.id,
                status: status.into(),
                ..Default::default()
            }
        };
        Ok(all.into_iter().map(extend).collect())
    }
}
