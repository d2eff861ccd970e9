//! The cap of a worker over all processes.
//!
//! A process has an *allotment* of the cap for all streams of a worker together, and grants demand
//! within it. Redis adds up the allotments of all processes and the shared sessions, so the sum
//! never exceeds the cap. As long as everybody gets enough, an allotment is the most that the
//! worker's sessions here can use, and is requested once, when a session opens. A process or a call
//! that gets too little notifies all other processes: each lowers its allotment to what it uses,
//! and for a while requests no more than that.
//!
//! A process that is silent for ten seconds loses its allotments, and what its workers hold no
//! longer counts. If it comes back, or Redis has lost its data, it writes its allotments again,
//! even if they exceed the cap. If Redis does not answer for as long, the process allows a worker
//! up to the cap by itself: the worker's queues may be in another part of a cluster.

use std::time::{Duration, Instant};

use futures::future;

use super::{
    super::{error::Error, handle::Handle},
    allotment::Allotment,
    session::Attached,
};
use crate::{
    model::WorkerName,
    queue::{self, SESSION_SLOTS, SharedCalled, SharedSession, SharedWish},
    runtime::{Loop, Supervisor},
};

/// How often a process checks for allotments that may be smaller, and how often it reports that it
/// is alive.
const EVERY: Duration = Duration::from_millis(500);
const LIVE_EVERY: Duration = Duration::from_secs(3);
/// How many allotments are written again concurrently.
const AT_ONCE: usize = 64;
/// The waits before each of the retries of somebody who got too little.
const ASK_AGAIN: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(300),
];
/// For how long, and how often, to ask again for more while Redis does not answer.
const TRY_FOR: Duration = Duration::from_secs(10);
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Keeps the allotments of this process alive, and small if others get too little.
pub(super) fn start(handle: &Handle, supervisor: &Supervisor) {
    supervisor.spawn_loop(
        "tasks/allotments",
        handle.clone(),
        |handle, cx| async move {
            let mut lived = Instant::now();
            while cx.pause(EVERY).await {
                if lived.elapsed() >= LIVE_EVERY {
                    lived = Instant::now();
                    handle.keep_allotments(&cx).await;
                }
                let scarce = handle.sessions.allotments.scarce();
                future::join_all(scarce.iter().map(|worker| handle.lower(worker))).await;
                cx.beat();
            }
        },
    );
}

impl Handle {
    /// Adds to the demand of a session within the allotment of this process, and returns how much
    /// was added. Returns `None` if Redis must be asked for more.
    pub fn want(&self, attached: &Attached, want: u32) -> Option<u32> {
        if want == 0 {
            return Some(0);
        }
        self.sessions
            .want(attached, want, self.settings.limits.max_session_tasks)
    }

    /// Adds all of `want` to the demand, as [`Self::want`] does, or nothing. Returns how much was
    /// added.
    pub fn want_whole(&self, attached: &Attached, want: u32) -> u32 {
        match attached
            .session
            .room(self.settings.limits.max_session_tasks)
            >= want
        {
            true => self.want(attached, want).unwrap_or(0),
            false => 0,
        }
    }

    /// Adds to the demand of a session as long as `still` returns true, and returns how much was
    /// added. Asks Redis for a larger allotment, and waits while Redis does not answer.
    pub async fn want_more(&self, attached: &Attached, want: u32, still: impl Fn() -> bool) -> u32 {
        let worker = &attached.session.worker;
        let most = self.settings.limits.max_session_tasks;
        let lock_of_allotment = self.sessions.allotments.lock_or_insert(worker);
        let mut again = ASK_AGAIN.into_iter();
        let began = Instant::now();
        loop {
            let wait = {
                // Held for one question only, so that the end of the worker's sessions and their
                // other requests can run in between.
                let _turn = lock_of_allotment.lock().await;
                if !still() || self.sessions.of_worker(worker).is_empty() {
                    return 0;
                }
                if let Some(granted) = self.want(attached, want) {
                    return granted;
                }
                let enlarged = self
                    .enlarge(worker, want.min(attached.session.room(most)))
                    .await;
                if let Err(error) = &enlarged {
                    tracing::debug!("cannot ask for an allotment of {worker}'s tasks: {error}");
                }
                let wait = match enlarged {
                    Ok(true) => again.next().map(|wait| (wait, true)),
                    Ok(false) => None,
                    Err(_) => Some((TRY_AGAIN, false)),
                };
                let Some(wait) = wait.filter(|_| began.elapsed() < TRY_FOR) else {
                    if !still() {
                        return 0;
                    }
                    if enlarged.is_err() {
                        self.allow_unasked(worker, want.min(attached.session.room(most)));
                    }
                    return self.sessions.want_rest(attached, want, most);
                };
                wait
            };
            let (wait, is_scarce) = wait;
            if is_scarce {
                self.tell_allotment(worker).await;
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// Asks for the rest of what a session wants, if streams of the worker may hold more of its cap
    /// than they use.
    pub(super) async fn want_rest(
        &self,
        session: &SharedSession,
        want: u32,
        called: &mut SharedCalled,
    ) -> Result<(), Error> {
        for wait in ASK_AGAIN {
            if !called.streams_hold {
                break;
            }
            self.tell_allotment(&session.worker).await;
            tokio::time::sleep(wait).await;
            // The worker may have surrendered since.
            let rest = SharedWish::Rest {
                want: want - called.by,
                surrenders: called.surrenders,
            };
            let more = self.call(session, rest, &[]).await?;
            *called = SharedCalled {
                by: called.by + more.by,
                plan: std::mem::take(&mut called.plan),
                ..more
            };
        }
        Ok(())
    }

    /// Asks for an allotment that is large enough for `want` more tasks. Returns true if it got
    /// less, and others may give some back.
    async fn enlarge(&self, worker: &WorkerName, want: u32) -> queue::Result<bool> {
        let limits = &self.settings.limits;
        let (used, asked, needed) = {
            let allotments = self.sessions.allotments.0.lock();
            let taken = self.sessions.taken_by(worker);
            let is_scarce = allotments
                .get(worker)
                .is_some_and(|allotment| allotment.scarce_since.is_some());
            let whole = self.sessions.of_worker(worker).len() * limits.max_session_tasks as usize;
            let needed = taken + want as usize;
            // Sessions may use up what is allowed while Redis is being asked.
            let used = allotments
                .get(worker)
                .map_or(0, |allotment| allotment.allowed)
                .max(taken);
            (
                used,
                if is_scarce { needed } else { needed.max(whole) },
                needed,
            )
        };
        let answer = self
            .allot(worker, asked.min(limits.max_worker_tasks.max(used)), used)
            .await?;
        Ok(answer.allotment < needed && answer.streams_hold)
    }

    /// Allows `want` more tasks, within the cap, although Redis does not answer. The caller holds
    /// the lock. Redis learns of it later, because the allotment is marked as unwritten.
    fn allow_unasked(&self, worker: &WorkerName, want: u32) {
        let needed = self.sessions.taken_by(worker) + want as usize;
        let allowed = needed.min(self.settings.limits.max_worker_tasks);
        self.sessions.allotments.change(worker, |allotment| {
            allotment.allowed = allotment.allowed.max(allowed)
        });
    }

    /// Asks Redis for an allotment. The caller holds the lock.
    async fn allot(
        &self,
        worker: &WorkerName,
        asked: usize,
        used: usize,
    ) -> queue::Result<queue::Allotment> {
        let allotments = &self.sessions.allotments;
        let most = self.settings.limits.max_worker_tasks;
        // Redis may store the allotment although its answer, or the call that waits for it, is
        // lost.
        allotments.change(worker, |allotment| allotment.is_unwritten = true);
        let answer = self
            .queue
            .allot(&self.sessions.process.0, worker, asked, used, most)
            .await?;
        allotments.change(worker, |allotment| {
            allotment.allowed = answer.allotment;
            allotment.is_unwritten = false;
        });
        Ok(answer)
    }

    /// Handles the notification that somebody gets too little of this worker's cap. Does not wait
    /// for Redis, like [`Self::hear_takeover`].
    pub(super) fn give_back_allotment(&self, worker: WorkerName) {
        self.sessions.allotments.change(&worker, |allotment| {
            allotment.scarce_since = Some(Instant::now())
        });
        let handle = self.clone();
        self.sessions
            .streams
            .spawn(async move { handle.lower(&worker).await });
    }

    /// Lowers an allotment to what is used.
    async fn lower(&self, worker: &WorkerName) {
        let Some(lock_of_allotment) = self.sessions.allotments.lock_of_allotment(worker) else {
            return;
        };
        // Whoever holds the lock asks Redis now, and then leaves a small allotment.
        let Ok(_turn) = lock_of_allotment.try_lock() else {
            return;
        };
        let used = {
            let mut allotments = self.sessions.allotments.0.lock();
            let used = self.sessions.taken_by(worker);
            let is_large =
                |allotment: &&mut Allotment| allotment.allowed > used || allotment.is_unwritten;
            let Some(allotment) = allotments.get_mut(worker).filter(is_large) else {
                return;
            };
            // Nothing beyond this is granted from now on, even if Redis learns of it only later.
            allotment.allowed = used;
            used
        };
        self.write(worker, used).await;
    }

    /// Gives back the allotment of a worker that has no session here any more.
    pub(super) async fn drop_allotment(&self, worker: &WorkerName) {
        if !self.sessions.of_worker(worker).is_empty() {
            return;
        }
        let Some(lock_of_allotment) = self.sessions.allotments.lock_of_allotment(worker) else {
            return;
        };
        let _turn = lock_of_allotment.lock().await;
        if self.sessions.leave_allotment(worker) {
            self.write(worker, 0).await;
            // If this failed, the next round tries again.
            self.sessions.allotments.forget(worker, &lock_of_allotment);
        }
    }

    /// Writes to Redis how much is allowed.
    async fn write(&self, worker: &WorkerName, allowed: usize) {
        if let Err(error) = self.allot(worker, allowed, allowed).await {
            tracing::debug!("cannot write the allotment of {worker}'s tasks: {error}");
        }
    }

    /// Reports that this process is alive, and writes the allotments again that Redis has lost.
    /// This may take long, so it keeps reporting, in every slot: Redis must not presume the process
    /// dead meanwhile.
    async fn keep_allotments(&self, cx: &Loop) {
        let workers = self.sessions.allotments.all();
        future::join_all(workers.iter().map(|worker| self.drop_allotment(worker))).await;
        cx.beat();
        let lacks = self.live().await;
        let mut lived = Instant::now();
        for some in workers.chunks(AT_ONCE) {
            if cx.stop.is_cancelled() {
                return;
            }
            if lived.elapsed() >= LIVE_EVERY {
                // What Redis has lost since then is left to the next round.
                self.live().await;
                lived = Instant::now();
            }
            let again = some.iter().filter_map(|worker| {
                let lacks = lacks[self.queue.session_slot(worker) as usize]?;
                Some(self.write_again(worker, lacks))
            });
            future::join_all(again).await;
            cx.beat();
        }
    }

    /// Reports in each slot that this process is alive. Returns for each slot whether Redis lacks
    /// allotments; `None` if there are none, or if Redis does not answer.
    async fn live(&self) -> Vec<Option<bool>> {
        let lives = (0..SESSION_SLOTS).map(async |slot| {
            let allotments = self
                .sessions
                .allotments
                .count(|worker| self.queue.session_slot(worker) == slot)?;
            let lacks = self
                .queue
                .live(&self.sessions.process.0, slot, allotments)
                .await;
            lacks
                .inspect_err(|error| tracing::debug!("cannot say that this process lives: {error}"))
                .ok()
        });
        future::join_all(lives).await
    }

    /// Writes an allotment again if Redis may have another one, or `in_any_case`.
    async fn write_again(&self, worker: &WorkerName, in_any_case: bool) {
        let Some(lock_of_allotment) = self.sessions.allotments.lock_of_allotment(worker) else {
            return;
        };
        let _turn = lock_of_allotment.lock().await;
        let unwritten = self
            .sessions
            .allotments
            .0
            .lock()
            .get(worker)
            .map(|one| (one.allowed, one.is_unwritten));
        if let Some((allowed, _)) =
            unwritten.filter(|(_, is_unwritten)| in_any_case || *is_unwritten)
        {
            self.write(worker, allowed).await;
        }
    }

    /// Asks all processes to give back what their streams of this worker do not use.
    pub(super) async fn tell_allotment(&self, worker: &WorkerName) {
        if let Err(error) = self.queue.tell_allotment(worker).await {
            tracing::debug!("cannot tell other processes that {worker} lacks tasks: {error}");
        }
    }
}
