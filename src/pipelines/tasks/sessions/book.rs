//! The leases that a session's worker holds, as this process remembers them.
//!
//! Redis decides; the book may be out of date. A lease that the worker reported or extended through
//! another process stays in the book until it would have run out. When the session ends, the queue
//! leaves such a lease alone.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{
    model::{
        Completion, Extension, Item, ItemAnswer, ItemStatus, Items, LeaseToken, LeasedTask,
        Rejection, TaskId,
    },
    queue::Started,
};

/// A lease that the worker holds.
#[derive(Clone, Debug)]
pub(super) struct HeldLease {
    pub(super) token: LeaseToken,
    pub(super) deadline_unix_ms: i64,
    pub(super) lease: Duration,
    /// When its deadline was set, by the clock of this process.
    set: Instant,
    pub(super) started: Started,
}

impl HeldLease {
    pub(super) fn not_started(self) -> Self {
        Self {
            started: Started::No,
            ..self
        }
    }
}

/// The leases by their tasks: a worker holds no task twice.
#[derive(Debug, Default)]
pub(super) struct Book {
    leases: HashMap<TaskId, HeldLease>,
    /// The shortest lease since the book was last empty.
    shortest: Duration,
    /// Tasks that the worker says it started, but whose leases are not in the book. An extension may
    /// add them.
    begun: HashSet<TaskId>,
    /// There were more such tasks than `begun` holds.
    begun_more: bool,
}

/// The most tasks to remember as started before their leases are known.
const MOST_BEGUN: usize = 1000;

impl Book {
    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }

    /// The shortest lease since the book was last empty; `None` if it is empty.
    pub(super) fn shortest(&self) -> Option<Duration> {
        (!self.is_empty()).then_some(self.shortest)
    }

    fn insert(&mut self, id: TaskId, held: HeldLease) {
        self.shortest = self
            .shortest()
            .map_or(held.lease, |shortest| shortest.min(held.lease));
        self.leases.insert(id, held);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Records a task on its way to the worker.
    pub(super) fn hold(&mut self, task: &LeasedTask, started: Started, now: Instant) {
        let token = task.token.clone();
        let deadline_unix_ms = task.expires_unix_ms;
        let lease = task.lease;
        self.insert(
            task.id,
            HeldLease {
                token,
                deadline_unix_ms,
                lease,
                set: now,
                started,
            },
        );
    }

    pub(super) fn start(&mut self, id: TaskId) {
        if let Some(held) = self.leases.get_mut(&id) {
            held.started = Started::Yes;
        } else if self.begun.len() < MOST_BEGUN {
            self.begun.insert(id);
        } else {
            self.begun_more = true;
        }
    }

    pub(super) fn forget_begun(&mut self) {
        self.begun = HashSet::new();
        self.begun_more = false;
    }

    /// Removes the tasks whose completion or rejection was answered for good.
    pub(super) fn reported<T>(&mut self, items: &[Reported<T>], answers: &[ItemAnswer]) {
        for (item, answer) in items.iter().zip(answers) {
            if !matches!(answer.status, ItemStatus::TryLater | ItemStatus::Invalid) {
                self.forget(item.lease.as_ref());
            }
        }
    }

    /// Records the answers to extensions. A lease that the session did not have was granted in
    /// another way, and belongs to the session from now on.
    pub(super) fn extended(
        &mut self,
        items: &[Reported<Duration>],
        answers: &[ItemAnswer],
        tells_started: bool,
        now: Instant,
    ) {
        for (item, answer) in items.iter().zip(answers) {
            match (&item.lease, answer.status, answer.lease_expires_unix_ms) {
                (Some((id, token)), ItemStatus::Ok, Some(deadline_unix_ms)) => {
                    let is_same = |held: &HeldLease| held.token.lease() == token.lease();
                    let started = match self.leases.remove(id) {
                        Some(held) if is_same(&held) || held.started == Started::Yes => {
                            held.started
                        }
                        _ if self.begun.remove(id) => Started::Yes,
                        _ if tells_started && !self.begun_more => Started::No,
                        _ => Started::Perhaps,
                    };
                    let token = token.clone();
                    let lease = item.report;
                    self.insert(
                        *id,
                        HeldLease {
                            token,
                            deadline_unix_ms,
                            lease,
                            set: now,
                            started,
                        },
                    );
                }
                (lease, status, _)
                    if !matches!(status, ItemStatus::TryLater | ItemStatus::Invalid) =>
                {
                    self.forget(lease.as_ref());
                }
                _ => {}
            }
        }
    }

    /// Records that taskd extended a lease, unless the lease was replaced since, or its worker has
    /// extended it for longer.
    pub(super) fn kept(
        &mut self,
        id: TaskId,
        before: &HeldLease,
        deadline_unix_ms: i64,
        now: Instant,
    ) {
        let is_same = |held: &&mut HeldLease| held.token.lease() == before.token.lease();
        let Some(held) = self.leases.get_mut(&id).filter(is_same) else {
            return;
        };
        if held.deadline_unix_ms == before.deadline_unix_ms
            || held.deadline_unix_ms < deadline_unix_ms
        {
            held.deadline_unix_ms = deadline_unix_ms;
            held.set = now;
        }
    }

    /// Removes the lease. Returns whether the book had it.
    pub(super) fn forget(&mut self, lease: Option<&(TaskId, LeaseToken)>) -> bool {
        let Some((id, token)) = lease else {
            return false;
        };
        if !self.begun.is_empty() {
            self.begun.remove(id);
        }
        let is_here = self
            .leases
            .get(id)
            .is_some_and(|held| is_same(&held.token, token));
        is_here && self.leases.remove(id).is_some()
    }

    /// Removes the leases that an operator or a deadline ended, and returns their tasks. Iterates
    /// over the smaller of the two.
    pub(super) fn take_ended(&mut self, ended: &EndedLeases) -> Vec<TaskId> {
        if self.leases.len() < ended.grants.len() {
            return self
                .leases
                .extract_if(|id, held| ended.has(*id, held))
                .map(|(id, _)| id)
                .collect();
        }
        let is_here = |id: &TaskId| self.leases.get(id).is_some_and(|held| ended.has(*id, held));
        let ids: Vec<TaskId> = ended.grants.keys().copied().filter(is_here).collect();
        ids.iter().for_each(|id| drop(self.leases.remove(id)));
        ids
    }

    /// Returns the leases whose time is half over.
    pub(super) fn due(&self, now: Instant) -> Vec<(TaskId, HeldLease)> {
        let due = self
            .leases
            .iter()
            .filter(|(_, held)| now.saturating_duration_since(held.set) * 2 >= held.lease);
        due.map(|(id, held)| (*id, held.clone())).collect()
    }

    /// Removes the leases whose time is over, even if they may have been extended elsewhere.
    pub(super) fn drop_lapsed(&mut self, now: Instant) {
        self.leases
            .retain(|_, held| now.saturating_duration_since(held.set) <= held.lease);
    }

    /// Removes the leases that the worker does not hold, and returns them.
    pub(super) fn take_missing(&mut self, holding: &HashSet<TaskId>) -> Vec<(TaskId, HeldLease)> {
        self.leases
            .extract_if(|id, _| !holding.contains(id))
            .collect()
    }

    /// Removes the leases of these tasks, and returns them.
    pub(super) fn take(&mut self, tasks: impl Iterator<Item = TaskId>) -> Vec<(TaskId, HeldLease)> {
        tasks
            .filter_map(|id| Some((id, self.leases.remove(&id)?)))
            .collect()
    }

    pub(super) fn all(&self) -> Vec<(TaskId, HeldLease)> {
        self.leases
            .iter()
            .map(|(id, held)| (*id, held.clone()))
            .collect()
    }
}

/// Leases that an operator or a deadline ended.
pub(super) struct EndedLeases {
    pub(super) status: ItemStatus,
    /// For each task its grants; an empty list stands for all of them.
    grants: HashMap<TaskId, Vec<u64>>,
}

impl EndedLeases {
    pub(super) fn cancelled(tasks: &[TaskId]) -> Self {
        Self {
            status: ItemStatus::Cancelled,
            grants: tasks.iter().map(|id| (*id, Vec::new())).collect(),
        }
    }

    pub(super) fn lost(leases: &[(TaskId, u64)]) -> Self {
        let mut grants: HashMap<_, Vec<_>> = HashMap::new();
        leases
            .iter()
            .for_each(|(id, grant)| grants.entry(*id).or_default().push(*grant));
        Self {
            status: ItemStatus::LeaseLost,
            grants,
        }
    }

    fn has(&self, id: TaskId, held: &HeldLease) -> bool {
        self.grants
            .get(&id)
            .is_some_and(|grants| grants.is_empty() || grants.contains(&held.token.grant))
    }
}

fn is_same(one: &LeaseToken, other: &LeaseToken) -> bool {
    one.shard == other.shard && one.lease() == other.lease()
}

/// An item of a report, reduced to what a book needs.
pub(super) struct Reported<T> {
    /// `None` if the item names no lease.
    pub(super) lease: Option<(TaskId, LeaseToken)>,
    pub(super) report: T,
}

impl<T> Reported<T> {
    fn of<R>(item: &Result<Item<R>, ItemAnswer>, report: impl FnOnce(&R) -> T) -> Self
    where
        T: Default,
    {
        let Ok(item) = item else {
            return Self {
                lease: None,
                report: T::default(),
            };
        };
        let lease = item.id.parse().ok().zip(item.lease_token.parse().ok());
        Self {
            lease,
            report: item.report.as_ref().map(report).unwrap_or_default(),
        }
    }
}

/// The leases that a frame reports.
pub struct Reports {
    pub(super) completions: Vec<Reported<()>>,
    pub(super) rejections: Vec<Reported<()>>,
    pub(super) extensions: Vec<Reported<Duration>>,
}

impl Reports {
    /// Prepares to record the answers to these reports.
    pub fn of(
        completions: &Items<Completion>,
        rejections: &Items<Rejection>,
        extensions: &Items<Extension>,
    ) -> Self {
        Self {
            completions: completions
                .iter()
                .map(|item| Reported::of(item, |_| ()))
                .collect(),
            rejections: rejections
                .iter()
                .map(|item| Reported::of(item, |_| ()))
                .collect(),
            extensions: extensions
                .iter()
                .map(|item| Reported::of(item, by))
                .collect(),
        }
    }

    /// The tasks of all reports.
    pub fn ids(&self) -> Vec<TaskId> {
        let ids = |reported: &[Reported<()>]| {
            reported
                .iter()
                .filter_map(|one| Some(one.lease.as_ref()?.0))
                .collect()
        };
        let mut all: Vec<TaskId> = ids(&self.completions);
        all.extend::<Vec<_>>(ids(&self.rejections));
        all.extend(
            self.extensions
                .iter()
                .filter_map(|one| Some(one.lease.as_ref()?.0)),
        );
        all
    }
}

/// The new length of an extended lease.
fn by(extension: &Extension) -> Duration {
    extension.by.unwrap_or_default()
}
