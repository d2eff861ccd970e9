//! Sessions: taskd sends tasks to a worker as soon as there are some, instead of waiting for a `get`.
//!
//! A worker says how many tasks it wants: its *demand*. While there is demand, the session has a
//! claim for at most that many tasks waiting at the queues, next to the claims of calls to `get`. So
//! push and pull share the queue, and a lease that does not reach its worker goes back without an
//! attempt. This process remembers its sessions and what their workers have in hand; the leases are
//! in Redis, which decides.
//!
//! What happens in a crash:
//!
//! - The process dies before it writes a frame with tasks: their leases run out, without an attempt.
//! - It dies later: the worker goes on with its leases at another process, by their tokens. If the
//!   worker died too, they run out.
//! - A session ends although its worker has moved to another process: the worker has extended its
//!   leases there, so `lua/session_end.lua` leaves them alone.

mod allotment;
mod allotments;
mod book;
mod opening;
mod order;
pub(super) mod registry;
mod session;
mod shared;
mod takeover;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashSet},
    future::Future,
    time::{Duration, Instant},
};

use futures::future;
use tokio::sync::broadcast::error::RecvError;
use uuid::Uuid;

pub use self::{
    book::Reports,
    session::{Attached, Cut, Opened, heartbeat},
    shared::{Shared, SharedTasks},
};
use self::{
    book::{EndedLeases, HeldLease},
    registry::{Crowded, SessionLimits, most_of_worker},
    session::{LONGEST_TIMEOUT, Plan, SHORTEST_TIMEOUT, Session, reason},
};
use super::{
    error::Error,
    get::{Leases, queues},
    handle::Handle,
    weights::Weights,
};
use crate::{
    model::{
        Access, GetTasks, ItemAnswer, NoShare, OpenSession, QueueName, ShardId, TaskId, WorkerName,
    },
    queue::{EndedLease, LeaseEnd, SessionNotice},
    runtime::Supervisor,
    telemetry::metrics::{self, SessionEnd},
};

/// After this time without a frame a session ends.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How long a claim waits for a wake before it asks all shards again, because a wake may be lost.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// How often the process checks for sessions whose workers stay away.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A call may name at least this many task ids, however small `max_session_tasks` is.
const MOST_IDS: usize = 5000;

/// Starts the loops that end sessions whose workers stay away, and that pass notices of other
/// processes on to the sessions.
pub(super) fn start(handle: &Handle, supervisor: &Supervisor) {
    shared::start(handle, supervisor);
    allotments::start(handle, supervisor);
    supervisor.spawn_loop("tasks/sessions", handle.clone(), |handle, cx| async move {
        while cx.pause(LOOK_EVERY).await {
            let now = Instant::now();
            // Each in a task of its own, so that a shard that does not answer holds up only the
            // sessions with leases there. The end of a session waits for the extension of its
            // leases, because it needs the deadlines that Redis has.
            for session in handle
                .sessions
                .all()
                .into_iter()
                .filter(|session| session.is_away())
            {
                if !session.begins_away_step() {
                    continue;
                }
                let stepping = handle.clone();
                let step = async move {
                    match session.is_away_since(now) {
                        true => stepping.end_session(&session, SessionEnd::Away).await,
                        false => stepping.keep(&session, true).await,
                    }
                    session.ends_away_step();
                };
                handle.sessions.streams.spawn(step);
            }
            cx.beat();
            handle.tell_takeovers_again(now);
            cx.beat();
        }
        // Their connections have ended before this. Each stream now gives its tasks back.
        handle.sessions.streams.close();
        handle.sessions.streams.wait().await;
    });
    supervisor.spawn_loop("tasks/notices", handle.clone(), |handle, cx| async move {
        let mut notices = handle.queue.notices();
        loop {
            let notice = tokio::select! {
                notice = cx.idle(notices.recv()) => notice,
                () = cx.stop.cancelled() => return,
            };
            match notice {
                Ok(SessionNotice::Cancelled(ids)) => {
                    handle.tell_ended(&EndedLeases::cancelled(&ids))
                }
                Ok(SessionNotice::LeasesLost(leases)) => {
                    handle.tell_ended(&EndedLeases::lost(&leases))
                }
                Ok(SessionNotice::Takeover { worker, session }) => {
                    handle.hear_takeover(worker, session)
                }
                Ok(SessionNotice::Allotment { worker }) => handle.give_back_allotment(worker),
                // Workers learn of ended leases when they extend them, and a takeover is announced
                // again.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
            cx.beat();
        }
    });
}

impl Handle {
    /// Runs a stream. The pipeline waits for it when it stops.
    pub fn spawn_stream(&self, stream: impl Future<Output = ()> + Send + 'static) {
        self.sessions.streams.spawn(stream);
    }

    /// Opens a session, or resumes one of this process. `is_own`: the caller is limited to this
    /// worker name.
    pub fn open_session(
        &self,
        open: &OpenSession,
        access: &Access,
        is_own: bool,
    ) -> Result<Opened, Error> {
        let plan = self.plan(open)?;
        let worker = plan.claim.worker.clone();
        Ok(match self.resume(&worker, open, &plan) {
            Some(attached) => Opened {
                attached,
                resumed: true,
            },
            None => Opened {
                attached: self.open_anew(plan, open, access, is_own)?,
                resumed: false,
            },
        })
    }

    /// Returns the queues of the session that `open` resumes, or none if there is no such session
    /// in this process.
    pub fn queues_to_go_on(&self, open: &OpenSession) -> Vec<QueueName> {
        let (Ok(worker), Ok(id)) = (WorkerName::new(&open.worker), open.session.parse()) else {
            return Vec::new();
        };
        let session = self.sessions.by_id.lock().get(&(worker, id)).cloned();
        session.map_or_else(Vec::new, |session| session.plan().queues)
    }

    /// Notifies workers of leases that an operator or a deadline ended.
    fn tell_ended(&self, leases: &EndedLeases) {
        self.sessions
            .all()
            .iter()
            .for_each(|session| session.tell_ended(leases));
    }

    fn plan(&self, open: &OpenSession) -> Result<Plan, Error> {
        let queues = queues(&open.queues)?;
        let worker = open.worker.clone();
        let lease_duration = open.lease_duration;
        let max_bytes = open.max_bytes;
        let (claim, _) = self.claim(&GetTasks {
            worker,
            lease_duration,
            max_bytes,
            ..GetTasks::default()
        })?;
        let timeout = open.timeout.unwrap_or(TIMEOUT);
        if !(SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(&timeout) {
            return Err(Error::Invalid(format!(
                "timeout is {timeout:?}; from 2s to 10m"
            )));
        }
        let tells_started = open.tells_started;
        let keep_leases = open.keep_leases;
        Ok(Plan {
            weights: Weights::new(&open.weights, &queues)?,
            queues,
            claim,
            timeout,
            tells_started,
            keep_leases,
        })
    }

    fn resume(&self, worker: &WorkerName, open: &OpenSession, plan: &Plan) -> Option<Attached> {
        let id: Uuid = open.session.parse().ok()?;
        let session = self
            .sessions
            .by_id
            .lock()
            .get(&(worker.clone(), id))
            .cloned()?;
        let holding: HashSet<TaskId> = open
            .holding
            .iter()
            .filter_map(|id| id.parse().ok())
            .collect();
        let (attached, missing) = session.attach_again(plan.clone(), &holding)?;
        // These did not reach the worker, whatever this process believed.
        let missing: Vec<_> = missing
            .into_iter()
            .map(|(id, held)| (id, held.not_started()))
            .collect();
        if !missing.is_empty() {
            // The worker does not wait for this: a Redis that stalls would hold up everything that
            // it holds.
            let handle = self.clone();
            let worker = worker.clone();
            let gives_back = async move {
                handle
                    .give_back(&worker, missing, "it did not reach its worker")
                    .await
            };
            self.sessions.streams.spawn(gives_back);
        }
        Some(attached)
    }

    fn open_anew(
        &self,
        plan: Plan,
        open: &OpenSession,
        access: &Access,
        is_own: bool,
    ) -> Result<Attached, Error> {
        let worker = plan.claim.worker.clone();
        if !open.session.is_empty() {
            WorkerName::new(&open.session)
                .map_err(|_| Error::Invalid("session is not a session's name".into()))?;
        }
        let of_process = self.settings.limits.max_sessions;
        // A worker with too many sessions may take over to get rid of them.
        let of_worker =
            is_own.then(|| most_of_worker(of_process) * if open.takeover { 2 } else { 1 });
        let room = SessionLimits {
            of_process,
            of_worker,
        };
        let share = self.session_shares.take(access, 1).map_err(|no_share| {
            let most = no_share.most();
            Error::Full(match no_share {
                NoShare::OfAll(_) => format!("{most} sessions are open here (max_sessions); try again later"),
                NoShare::OfToken(_) => {
                    format!("{most} sessions of this token are open here, half of max_sessions; close some")
                }
            })
        })?;
        let now_unix_ms = self.queue.announcer().now_unix_ms();
        let opened = self.sessions.add(worker.clone(), now_unix_ms, room, |id| {
            Session::open(id, worker.clone(), plan)
        });
        let why = |crowded| match crowded {
            Crowded::Process(most) => {
                format!("{most} sessions are open here (max_sessions); try again later")
            }
            Crowded::Worker(most) => format!(
                "worker {worker} has {most} sessions here, and with its own token may have no more (a tenth of \
                 max_sessions): close some, or take over (takeover)"
            ),
        };
        let opened = opened.map_err(|crowded| Error::Full(why(crowded)))?;
        opened.session.hold_share(share);
        Ok(opened)
    }

    /// The most items of a frame.
    pub fn max_items(&self) -> usize {
        self.settings.limits.max_items
    }

    /// Refuses more ids than a session can have tasks, because Redis checks all of them in one
    /// step.
    pub fn few_ids(&self, field: &str, ids: &[String]) -> Result<(), Error> {
        let most = MOST_IDS.max(2 * self.settings.limits.max_session_tasks as usize);
        if ids.len() > most {
            return Err(Error::Invalid(format!(
                "{} ids in {field}; at most {most}",
                ids.len()
            )));
        }
        Ok(())
    }

    /// The most tasks that a session may hold and demand.
    pub fn most_session_tasks(&self) -> u32 {
        self.settings.limits.max_session_tasks
    }

    /// Waits for tasks of the session's queues. `most` turns the session's demand into the number
    /// of tasks to claim. Dropping the future gives back what it has leased.
    pub async fn next_tasks(
        &self,
        attached: &Attached,
        most: impl Fn(u32) -> u32,
    ) -> Result<Leases, Error> {
        let plan = attached.session.plan();
        let max_items = self.settings.limits.max_items;
        let claim = || {
            let mut claim = plan.claim.clone();
            claim.max_tasks = (most(attached.session.demand()) as usize).clamp(1, max_items);
            claim
        };
        self.wait_for(&plan.queues, &plan.weights, claim, LOOK_AGAIN)
            .await
    }

    /// Extends the leases whose time is half over. The worker is told which ones had ended.
    /// `may_have_moved`: the worker may have continued with its leases in another session.
    pub async fn keep_leases(&self, attached: &Attached, may_have_moved: bool) {
        self.keep(&attached.session, may_have_moved).await;
    }

    /// A worker that is silent or away may have continued with its leases in another session, which
    /// owns them then.
    async fn keep(&self, session: &Session, may_have_moved: bool) {
        let due = session.leases_to_keep(Instant::now());
        let mut by_shard: BTreeMap<ShardId, Vec<(TaskId, HeldLease)>> = BTreeMap::new();
        for (id, held) in due {
            by_shard
                .entry(held.token.shard.clone())
                .or_default()
                .push((id, held));
        }
        let calls = by_shard.into_iter().map(|(shard, held)| async move {
            for held in held.chunks(self.settings.limits.max_items) {
                let extensions: Vec<_> = held
                    .iter()
                    .map(|(id, held)| session.extension(*id, held))
                    .collect();
                let known: Vec<i64> = held.iter().map(|(_, held)| held.deadline_unix_ms).collect();
                match self
                    .queue
                    .keep(&shard, &extensions, may_have_moved.then_some(&known))
                    .await
                {
                    Ok(answers) => {
                        self.give_back_late(session, session.kept(held, &answers, Instant::now()))
                            .await
                    }
                    // They are retried at once, and run out if Redis stays away.
                    Err(error) => {
                        tracing::debug!(%shard, "cannot extend leases of a session: {error}")
                    }
                }
            }
        });
        future::join_all(calls).await;
    }

    /// Records the answers to extensions of a stream.
    pub async fn extended(&self, attached: &Attached, reports: &Reports, answers: &[ItemAnswer]) {
        self.give_back_late(&attached.session, attached.extended(reports, answers))
            .await;
    }

    /// Gives back leases that were extended while another session took over.
    async fn give_back_late(&self, session: &Session, late: Vec<(TaskId, HeldLease)>) {
        if !late.is_empty() {
            self.give_back(&session.worker, late, reason(SessionEnd::TakenOver))
                .await;
        }
    }

    /// Ends a session and gives back what its worker has not reported. Does nothing if it has ended
    /// already.
    async fn end_session(&self, session: &Session, why: SessionEnd) {
        let Some(held) = session.end(why) else { return };
        self.sessions.remove(session);
        metrics::session_ended(why);
        self.give_back(&session.worker, held, reason(why)).await;
        self.drop_allotment(&session.worker).await;
    }

    /// Ends the session of a stream.
    pub async fn end_attached(&self, attached: &Attached, why: SessionEnd) {
        if attached.is_current() {
            self.end_session(&attached.session, why).await;
        }
    }

    async fn give_back(&self, worker: &WorkerName, held: Vec<(TaskId, HeldLease)>, reason: &str) {
        let lease = |(
            id,
            HeldLease {
                token,
                deadline_unix_ms,
                started,
                ..
            },
        )| {
            let worker = worker.clone();
            EndedLease {
                id,
                token,
                worker,
                deadline_unix_ms,
                started,
            }
        };
        self.end_leases(held.into_iter().map(lease).collect(), reason)
            .await;
    }

    /// Ends leases in their shards. Those of a shard that does not answer run out.
    async fn end_leases(&self, leases: Vec<EndedLease>, reason: &str) -> Ended {
        let mut by_shard: BTreeMap<ShardId, Vec<EndedLease>> = BTreeMap::new();
        for lease in leases {
            by_shard
                .entry(lease.token.shard.clone())
                .or_default()
                .push(lease);
        }
        let calls = by_shard.into_iter().map(|(shard, leases)| async move {
            let backoff = &self.settings.queues.get(&shard.queue).backoff;
            match self.queue.end_leases(&shard, &leases, backoff, reason).await {
                Ok(ends) => {
                    let count = |end| ends.iter().filter(|one| **one == end).count();
                    let [offered, failed, dead] = [LeaseEnd::Offered, LeaseEnd::Failed, LeaseEnd::Dead].map(count);
                    metrics::session_leases(offered, failed, dead);
                    let failed = failed + dead;
                    if failed > 0 {
                        self.reported.add([(shard, 0)]);
                    }
                    Ended { offered, failed, is_whole: true }
                }
                Err(error) => {
                    tracing::warn!(%shard, "could not end {} leases of a session: {error}", leases.len());
                    Ended { offered: 0, failed: 0, is_whole: false }
                }
            }
        });
        let all = Ended {
            offered: 0,
            failed: 0,
            is_whole: true,
        };
        future::join_all(calls)
            .await
            .into_iter()
            .fold(all, |all, one| Ended {
                offered: all.offered + one.offered,
                failed: all.failed + one.failed,
                is_whole: all.is_whole && one.is_whole,
            })
    }
}

/// The outcome of ending some leases.
struct Ended {
    offered: usize,
    failed: usize,
    /// All shards answered.
    is_whole: bool,
}
