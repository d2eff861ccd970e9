//! Shared sessions are those without a stream. Their books are in Redis, and any process can serve
//! each call.
//!
//! A call reads the session, does its work in the shards, and then records the outcome in the book.
//! The book decides nothing: leases are in the shards, and `lua/session_end.lua` leaves a lease
//! alone if its deadline differs from that in the book. So a missing step costs little. The crash
//! windows:
//!
//! - Between a claim and its entry in the book, or if the session has ended by then: the leases are
//!   undelivered, and run out or are given back at no cost.
//! - Between the entry and the answer: the tasks count as held until their leases run out, until
//!   the session ends, or until the worker resumes the session and names what it holds.
//! - Between a report and its entry: the tasks count as held for just as long. An extended lease
//!   has another deadline than the book, so the end of the session leaves it alone, and it runs
//!   out.
//! - In the middle of an end: the session is due again after [`END_AGAIN`], and another process
//!   ends it once more.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future;
use tokio::time::{sleep, timeout};

use super::{
    super::{
        error::Error,
        get::{Leases, queues},
        handle::{Handle, worker},
        weights::Weights,
    },
    book::{Reported, Reports},
    opening::{Written, named},
    session::{LONGEST_TIMEOUT, Plan, SHORTEST_TIMEOUT, heartbeat, reason},
};
use crate::{
    model::{
        GetTasks, ItemAnswer, ItemStatus, LeasedTask, Pending, QueueName, SessionCall,
        SessionClosed, TaskId, TasksReported,
    },
    queue::{
        self, SESSION_SLOTS, SharedCalled, SharedDue, SharedHold, SharedLimits, SharedNotes,
        SharedSession, SharedWish, Started,
    },
    runtime::Supervisor,
    telemetry::metrics::{self, SessionEnd},
};

/// How often a process checks for sessions that are due, in a slot with sessions.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often it checks a slot in which it knows of no sessions: another process may have opened
/// one, and died.
const LOOK_IDLE: Duration = Duration::from_secs(10);
/// After this time another process continues the end of a session.
const END_AGAIN: Duration = Duration::from_secs(5);
/// How many times a call claims, if other calls of its session are faster.
const CLAIMS: usize = 5;
/// The longest interval between the heartbeats of a waiting call. From the answer it learns of a
/// surrender at another process.
const LONGEST_BEAT: Duration = Duration::from_secs(5);
/// How long a heartbeat may take. After that, or after an error, the call leaves tasks to others,
/// because it could not record them.
const ANSWERED_WITHIN: Duration = Duration::from_secs(3);
/// How often the call then checks whether Redis answers again.
const BEAT_AGAIN: Duration = Duration::from_secs(1);

/// Ends sessions that are due, whichever process opened them.
pub(super) fn start(handle: &Handle, supervisor: &Supervisor) {
    supervisor.spawn_loop(
        "tasks/shared_sessions",
        handle.clone(),
        |handle, cx| async move {
            let mut slots = [Slot {
                next: Instant::now(),
                was_away: true,
            }; SESSION_SLOTS as usize];
            while cx.pause(LOOK_EVERY).await {
                let looks = (0..SESSION_SLOTS)
                    .zip(&mut slots)
                    .map(|(number, slot)| handle.look_at(number, slot));
                future::join_all(looks).await;
                cx.beat();
            }
        },
    );
}

/// What a process knows of its checks of a slot.
#[derive(Clone, Copy)]
struct Slot {
    next: Instant,
    /// The process has not checked the slot yet, or Redis did not answer the last time. Redis may
    /// not have answered workers either, so it is not known yet which of them are silent.
    was_away: bool,
}

/// A session in the middle of a call.
pub struct Shared {
    session: SharedSession,
    plan: Plan,
    called: SharedCalled,
}

impl Shared {
    /// The queues of the session.
    pub fn queues(&self) -> &[QueueName] {
        &self.plan.queues
    }

    /// How much was granted, and the session's tasks.
    pub fn granted(&self) -> (u32, Pending) {
        (self.called.by, self.pending())
    }

    fn pending(&self) -> Pending {
        Pending {
            demand: self.called.demand,
            in_hand: self.called.in_hand,
        }
    }
}

/// The answer to a call for tasks.
#[derive(Default)]
pub struct SharedTasks {
    pub leases: Leases,
    pub granted: u32,
    pub pending: Pending,
}

impl Handle {
    /// Calls a session, and reads its plan.
    async fn called(
        &self,
        call: &SessionCall,
        wish: SharedWish,
        started: &[TaskId],
    ) -> Result<Shared, Error> {
        let session = named(&worker(&call.worker)?, &call.session)?;
        let called = self.call(&session, wish, started).await?;
        let Written {
            queues: names,
            timeout_ms,
            tells_started,
            lease_ms,
            max_bytes,
            weights,
        } = Written::read(&called.plan)?;
        let worker = call.worker.clone();
        let lease_duration = lease_ms.map(Duration::from_millis);
        let (claim, _) = self.claim(&GetTasks {
            worker,
            lease_duration,
            max_bytes,
            ..GetTasks::default()
        })?;
        let queues = queues(&names)?;
        let timeout = Duration::from_millis(timeout_ms);
        let plan = Plan {
            weights: Weights::new(&weights, &queues)?,
            queues,
            claim,
            timeout,
            tells_started,
            keep_leases: false,
        };
        Ok(Shared {
            session,
            plan,
            called,
        })
    }

    pub(super) async fn call(
        &self,
        session: &SharedSession,
        wish: SharedWish,
        started: &[TaskId],
    ) -> Result<SharedCalled, Error> {
        let limits = &self.settings.limits;
        let limits = SharedLimits {
            session: limits.max_session_tasks,
            worker: limits.max_worker_tasks,
        };
        let called = self
            .queue
            .call_shared(session, wish, limits, started)
            .await?;
        called.ok_or_else(|| Error::NoSession(session.id.to_string()))
    }

    /// Returns the queues of a session, or none if there is no such session. Changes nothing.
    pub async fn queues_of_shared(&self, call: &SessionCall) -> Result<Vec<QueueName>, Error> {
        let session = named(&worker(&call.worker)?, &call.session)?;
        match self.queue.shared_plan(&session).await? {
            Some(plan) => queues(&Written::read(plan.as_bytes())?.queues),
            None => Ok(Vec::new()),
        }
    }

    /// Adds to the demand of a session.
    pub async fn want_shared(&self, call: &SessionCall, want: u32) -> Result<Shared, Error> {
        let mut shared = self.called(call, SharedWish::More(want), &[]).await?;
        self.want_rest(&shared.session, want, &mut shared.called)
            .await?;
        Ok(shared)
    }

    /// Waits for tasks of the session's queues, at most as many as it demands. Dropping the future
    /// gives back what it has leased. `room` reserves memory for an answer of this many bytes; if
    /// that fails, the tasks are given back before they are in the session's book.
    pub async fn next_shared<R>(
        &self,
        mut shared: Shared,
        wait: Duration,
        room: impl Fn(usize) -> Result<R, Error>,
    ) -> Result<(SharedTasks, Option<R>), Error> {
        let granted = shared.called.by;
        let deadline = Instant::now() + wait.min(self.settings.limits.max_wait);
        for _ in 0..CLAIMS {
            let leases = self.claim_shared(&mut shared, deadline).await?;
            if leases.tasks.is_empty() {
                // The tasks of these leases cannot be read. Their leases run out, and the tasks end
                // up dead.
                leases.deliver();
                break;
            }
            let room = room(leases.tasks.iter().map(LeasedTask::weight).sum())?;
            let started = if shared.plan.tells_started {
                Started::No
            } else {
                Started::Perhaps
            };
            match self
                .queue
                .hold_shared(&shared.session, &leases.tasks, started)
                .await?
            {
                SharedHold::Held { demand, in_hand } => {
                    let pending = Pending { demand, in_hand };
                    return Ok((
                        SharedTasks {
                            leases,
                            granted,
                            pending,
                        },
                        Some(room),
                    ));
                }
                // Another call of the session was faster, or surrendered. The leases are given back
                // at no cost.
                SharedHold::TooMany { demand } => shared.called.demand = demand,
                SharedHold::Over => return Err(Error::NoSession(shared.session.id.to_string())),
            }
        }
        Ok((
            SharedTasks {
                leases: Leases::default(),
                granted,
                pending: shared.pending(),
            },
            None,
        ))
    }

    /// Claims for a session, and keeps it alive in the meantime.
    async fn claim_shared(&self, shared: &mut Shared, deadline: Instant) -> Result<Leases, Error> {
        let Shared {
            session,
            plan,
            called,
        } = shared;
        let demand = AtomicU32::new(called.demand);
        let max_items = self.settings.limits.max_items;
        let claim = || {
            let mut claim = plan.claim.clone();
            claim.max_tasks = (demand.load(Ordering::Relaxed) as usize).clamp(1, max_items);
            claim
        };
        let every = heartbeat(plan.timeout).min(LONGEST_BEAT);
        while called.demand > 0 {
            let beats = async {
                while called.demand > 0 {
                    sleep(every).await;
                    if self.beat(session, called).await?.is_some() {
                        break;
                    }
                    demand.store(called.demand, Ordering::Relaxed);
                }
                Ok::<_, Error>(())
            };
            let left = deadline.saturating_duration_since(Instant::now());
            tokio::select! {
                leases = self.wait_for(&plan.queues, &plan.weights, claim, left) => return leases,
                ended = beats => ended?,
            }
            while called.demand > 0 {
                match self.beat(session, called).await? {
                    None => break,
                    // The queues have not been checked since.
                    Some(error) if deadline <= Instant::now() => return Err(error.into()),
                    Some(_) => sleep(BEAT_AGAIN).await,
                }
            }
            demand.store(called.demand, Ordering::Relaxed);
        }
        Ok(Leases::default())
    }

    /// Sends the heartbeat of a waiting call. Returns the error if Redis does not answer.
    async fn beat(
        &self,
        session: &SharedSession,
        called: &mut SharedCalled,
    ) -> Result<Option<queue::Error>, Error> {
        let error = match timeout(
            ANSWERED_WITHIN,
            self.call(session, SharedWish::More(0), &[]),
        )
        .await
        {
            Ok(Ok(answer)) => {
                *called = SharedCalled {
                    plan: Vec::new(),
                    ..answer
                };
                return Ok(None);
            }
            Ok(Err(Error::Unavailable(error))) => error,
            Ok(Err(error)) => return Err(error),
            Err(late) => queue::Error::Unsure(Arc::new(late)),
        };
        tracing::debug!("cannot keep a session alive: {error}");
        Ok(Some(error))
    }

    /// Sets the demand to 0. Returns what it was, and the number of tasks held.
    pub async fn surrender_shared(&self, call: &SessionCall) -> Result<(u32, u32), Error> {
        let Shared { called, .. } = self.called(call, SharedWish::Surrender, &[]).await?;
        Ok((called.by, called.in_hand))
    }

    /// Records that the worker is alive, and which tasks it has started. Returns the session's
    /// tasks.
    pub async fn live_shared(
        &self,
        call: &SessionCall,
        started: &[String],
    ) -> Result<(Shared, Pending), Error> {
        let started: Vec<TaskId> = started.iter().filter_map(|id| id.parse().ok()).collect();
        let shared = self.called(call, SharedWish::More(0), &started).await?;
        let pending = shared.pending();
        Ok((shared, pending))
    }

    /// Records the answers to reports.
    pub async fn reported_shared(
        &self,
        shared: &Shared,
        reports: &Reports,
        started: &[String],
        mut answer: TasksReported,
    ) -> Result<TasksReported, Error> {
        let mut notes = SharedNotes::default();
        let begun: HashSet<TaskId> = started.iter().filter_map(|id| id.parse().ok()).collect();
        ended(&reports.completions, &answer.completions, &mut notes);
        ended(&reports.rejections, &answer.rejections, &mut notes);
        for (item, answer) in reports.extensions.iter().zip(&answer.extensions) {
            let Some((id, token)) = item.lease.clone() else {
                continue;
            };
            match (answer.status, answer.lease_expires_unix_ms) {
                (ItemStatus::Ok, Some(deadline)) => {
                    // Only used for leases that the session did not have.
                    let started = match shared.plan.tells_started {
                        true if begun.contains(&id) => Started::Yes,
                        true => Started::No,
                        false => Started::Perhaps,
                    };
                    notes.extended.push((id, token, deadline, started));
                }
                (status, _) if is_final(status) => notes.ended.push((id, token, false)),
                _ => {}
            }
        }
        // The session may have ended since. The reports count nevertheless, and its next call
        // learns of the end.
        let noted = self
            .queue
            .note_shared(&shared.session, &notes)
            .await?
            .unwrap_or_default();
        answer.counted = noted.counted;
        answer.pending = Pending {
            demand: noted.demand,
            in_hand: noted.in_hand,
        };
        Ok(answer)
    }

    /// Ends a session for its worker.
    pub async fn close_shared(&self, call: &SessionCall) -> Result<SessionClosed, Error> {
        let session = named(&worker(&call.worker)?, &call.session)?;
        let closed = self.end_shared(&session, SessionEnd::Closed).await?;
        closed.ok_or_else(|| Error::NoSession(session.id.to_string()))
    }

    /// Ends a session: first its leases, then its book, so that any process can continue the end.
    /// Returns `None` if there is none, or if its worker is alive.
    pub(super) async fn end_shared(
        &self,
        session: &SharedSession,
        why: SessionEnd,
    ) -> Result<Option<SessionClosed>, Error> {
        let only_due = why == SessionEnd::Silent;
        let Some(leases) = self.queue.end_shared(session, only_due, END_AGAIN).await? else {
            return Ok(None);
        };
        let ended = self.end_leases(leases, reason(why)).await;
        // Otherwise the session will be due again.
        if ended.is_whole {
            self.queue.forget_shared(session).await?;
            metrics::session_ended(why);
        }
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Ok(Some(SessionClosed {
            offered: count(ended.offered),
            failed: count(ended.failed),
        }))
    }

    /// Checks a slot, if it is time for that.
    async fn look_at(&self, number: u32, slot: &mut Slot) {
        if !self.sessions.slots.take(number) && slot.next > Instant::now() {
            return;
        }
        let asked = Instant::now();
        let looked = self.queue.due_shared(number, LONGEST_TIMEOUT).await;
        let was_away = std::mem::replace(&mut slot.was_away, looked.is_err())
            || asked.elapsed() >= SHORTEST_TIMEOUT;
        let wait = match looked {
            Ok(SharedDue {
                next: wait,
                dead,
                due,
            }) => {
                for process in dead {
                    if let Err(error) = self.queue.forget_allotments(number, &process).await {
                        tracing::debug!(
                            "cannot remove the allotments of a process that died: {error}"
                        );
                    }
                }
                let ends = due.iter().map(|session| async move {
                    match was_away {
                        true => Ok(self.queue.spare_shared(session).await?),
                        false => self.end_shared(session, SessionEnd::Silent).await.map(drop),
                    }
                });
                for error in future::join_all(ends)
                    .await
                    .into_iter()
                    .filter_map(Result::err)
                {
                    tracing::warn!("could not end a session whose worker is silent: {error}");
                }
                wait.map_or(LOOK_IDLE, |wait| wait.clamp(LOOK_EVERY, LOOK_IDLE))
            }
            Err(error) => {
                tracing::debug!("cannot look for sessions whose workers are silent: {error}");
                LOOK_EVERY
            }
        };
        slot.next = Instant::now() + wait;
    }
}

/// Returns whether an answer about a lease is final.
fn is_final(status: ItemStatus) -> bool {
    !matches!(status, ItemStatus::TryLater | ItemStatus::Invalid)
}

fn ended(items: &[Reported<()>], answers: &[ItemAnswer], notes: &mut SharedNotes) {
    for (item, answer) in items
        .iter()
        .zip(answers)
        .filter(|(_, answer)| is_final(answer.status))
    {
        let lease = item.lease.clone();
        notes
            .ended
            .extend(lease.map(|(id, token)| (id, token, answer.status == ItemStatus::Ok)));
    }
}
