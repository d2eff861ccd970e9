//! One session, and the stream that it is attached to.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    super::weights::Weights,
    book::{Book, EndedLeases, HeldLease, Reports},
    order::TakeoverRepeats,
};
use crate::{
    model::{ItemAnswer, ItemStatus, LeasedTask, QueueName, Share, TaskId, WorkerName},
    queue::{self, Claim, Code, Started},
    telemetry::metrics::SessionEnd,
};

pub(super) const SHORTEST_TIMEOUT: Duration = Duration::from_secs(2);
pub(super) const LONGEST_TIMEOUT: Duration = Duration::from_secs(600);

/// The heartbeat interval of a session: three of them fit into the time-out.
pub fn heartbeat(timeout: Duration) -> Duration {
    timeout / 3
}

/// The reason of a failed attempt that ended with its session.
pub(super) fn reason(why: SessionEnd) -> &'static str {
    match why {
        SessionEnd::Closed => "its worker closed the session",
        SessionEnd::Silent | SessionEnd::Away => "the worker's session timed out",
        SessionEnd::TakenOver => "another session of the worker took over",
        SessionEnd::Denied => "the worker's token is not valid any more",
    }
}

/// What a worker asked for when it opened its session.
#[derive(Clone)]
pub(super) struct Plan {
    pub(super) queues: Vec<QueueName>,
    pub(super) weights: Weights,
    pub(super) claim: Claim,
    pub(super) timeout: Duration,
    pub(super) tells_started: bool,
    pub(super) keep_leases: bool,
}

/// A worker's session.
pub(super) struct Session {
    pub(super) id: Uuid,
    pub(super) worker: WorkerName,
    state: Mutex<State>,
    /// Notified when `ended` has leases that the worker must hear of.
    notify: Notify,
    /// The session's share of `max_sessions`, until it ends.
    share: Mutex<Option<Share>>,
    /// True while the loop extends the leases of this session without a stream, or ends it.
    is_in_away_step: AtomicBool,
}

struct State {
    plan: Plan,
    book: Book,
    /// How many more tasks taskd may send.
    demand: u32,
    /// Leases that ended, by time or by an operator, before the worker was told.
    ended: Vec<ItemAnswer>,
    /// The number of the stream that the session is attached to, counted from 1.
    stream: u64,
    cut: CancellationToken,
    /// When its last stream ended, if it has none.
    away_since: Option<Instant>,
    took_over: Option<TakeoverRepeats>,
    end: Option<SessionEnd>,
}

/// Why a stream no longer belongs to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The session continues on another stream.
    Displaced,
    Ended(SessionEnd),
}

/// An opened session.
pub struct Opened {
    pub attached: Attached,
    pub resumed: bool,
}

impl State {
    /// Forgets the leases whose time is over, unless taskd extends them: then it asks Redis, and
    /// the worker learns which of them have ended.
    fn drop_lapsed(&mut self, now: Instant) {
        if !self.plan.keep_leases {
            self.book.drop_lapsed(now);
        }
    }

    /// Removes these leases if the session was taken over, and returns them: their extensions were
    /// in flight when it ended, so its end may have left them alone.
    fn take_late(&mut self, extended: impl Iterator<Item = TaskId>) -> Vec<(TaskId, HeldLease)> {
        match self.end {
            Some(SessionEnd::TakenOver) => self.book.take(extended),
            _ => Vec::new(),
        }
    }
}

impl Session {
    pub(super) fn open(id: Uuid, worker: WorkerName, plan: Plan) -> (Arc<Self>, Attached) {
        let book = Book::default();
        let ended = Vec::new();
        let cut = CancellationToken::new();
        let away_since = None;
        let took_over = None;
        let end = None;
        let demand = 0;
        let stream = 1;
        let its_cut = cut.clone();
        let state = State {
            plan,
            book,
            demand,
            ended,
            stream,
            cut: its_cut,
            away_since,
            took_over,
            end,
        };
        let session = Arc::new(Self {
            id,
            worker,
            state: Mutex::new(state),
            notify: Notify::new(),
            share: Mutex::default(),
            is_in_away_step: AtomicBool::default(),
        });
        (
            Arc::clone(&session),
            Attached {
                session,
                stream: 1,
                cut,
            },
        )
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Attaches the session to another stream. Also returns the leases that the worker does not
    /// hold. Returns `None` if the session has ended.
    pub(super) fn attach_again(
        self: &Arc<Self>,
        plan: Plan,
        holding: &HashSet<TaskId>,
    ) -> Option<(Attached, Vec<(TaskId, HeldLease)>)> {
        let mut state = self.state();
        if state.end.is_some() {
            return None;
        }
        state.cut.cancel();
        state.cut = CancellationToken::new();
        state.stream += 1;
        state.plan = plan;
        state.demand = 0;
        state.away_since = None;
        // The worker reports again which tasks it has started.
        state.book.forget_begun();
        let missing = state.book.take_missing(holding);
        let session = Arc::clone(self);
        let stream = state.stream;
        let cut = state.cut.clone();
        Some((
            Attached {
                session,
                stream,
                cut,
            },
            missing,
        ))
    }

    /// Returns whether the session has no stream and has not ended.
    pub(super) fn is_away(&self) -> bool {
        let state = self.state();
        state.away_since.is_some() && state.end.is_none()
    }

    /// Returns whether the session has no stream and nothing to keep, or has had no stream for
    /// longer than its time-out.
    pub(super) fn is_away_since(&self, now: Instant) -> bool {
        let mut state = self.state();
        let Some(since) = state.away_since else {
            return false;
        };
        state.drop_lapsed(now);
        state.book.is_empty() || now.saturating_duration_since(since) > state.plan.timeout
    }

    /// Keeps this session's share of `max_sessions`.
    pub(super) fn hold_share(&self, share: Share) {
        *self.share.lock() = Some(share);
    }

    /// Gives the share back. The session has ended, even if something still refers to it.
    pub(super) fn give_share_back(&self) {
        drop(self.share.lock().take());
    }

    /// Ends the session and returns the leases that it held. Returns `None` if it has ended
    /// already, or if its worker was away and has come back.
    pub(super) fn end(&self, why: SessionEnd) -> Option<Vec<(TaskId, HeldLease)>> {
        let mut state = self.state();
        if state.end.is_some() || why == SessionEnd::Away && state.away_since.is_none() {
            return None;
        }
        state.end = Some(why);
        state.demand = 0;
        state.cut.cancel();
        // They stay in the book, because an extension may be in flight.
        Some(state.book.all())
    }

    pub(super) fn plan(&self) -> Plan {
        self.state().plan.clone()
    }

    pub(super) fn demand(&self) -> u32 {
        self.state().demand
    }

    /// Records that the session took over, perhaps once more.
    pub(super) fn takes_over(&self, now: Instant) {
        self.state().took_over = Some(TakeoverRepeats::new(now));
    }

    pub(super) fn took_over(&self) -> bool {
        self.state().took_over.is_some()
    }

    /// Returns whether it is time to announce the takeover again.
    pub(super) fn tells_takeover_again(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.end.is_none()
            && state
                .took_over
                .as_mut()
                .is_some_and(|took_over| took_over.count_if_due(now))
    }

    /// The number of tasks that are held and demanded, perhaps including leases that are over.
    pub(super) fn noted(&self) -> usize {
        let state = self.state();
        state.book.len() + state.demand as usize
    }

    /// The number of tasks that are held and demanded.
    pub(super) fn taken(&self) -> usize {
        let mut state = self.state();
        state.drop_lapsed(Instant::now());
        state.book.len() + state.demand as usize
    }

    /// How many more tasks the session may demand.
    pub(super) fn room(&self, most: u32) -> u32 {
        most.saturating_sub(u32::try_from(self.taken()).unwrap_or(u32::MAX))
    }

    /// Removes the leases that an operator or a deadline ended from the book, and notifies the
    /// worker.
    pub(super) fn tell_ended(&self, leases: &EndedLeases) {
        let mut state = self.state();
        let ended = state.book.take_ended(leases);
        if !ended.is_empty() {
            state.ended.extend(
                ended
                    .iter()
                    .map(|id| ItemAnswer::new(id.to_string(), leases.status)),
            );
            self.notify.notify_one();
        }
    }

    /// Marks the start of a step for a session without a stream. Returns false if one is running.
    pub(super) fn begins_away_step(&self) -> bool {
        !self.is_in_away_step.swap(true, Ordering::Relaxed)
    }

    pub(super) fn ends_away_step(&self) {
        self.is_in_away_step.store(false, Ordering::Relaxed);
    }

    pub(super) fn leases_to_keep(&self, now: Instant) -> Vec<(TaskId, HeldLease)> {
        let state = self.state();
        if state.plan.keep_leases && state.end.is_none() {
            state.book.due(now)
        } else {
            Vec::new()
        }
    }

    pub(super) fn extension(&self, id: TaskId, held: &HeldLease) -> queue::Extension {
        queue::Extension {
            id,
            token: held.token.clone(),
            worker: self.worker.clone(),
            by: held.lease,
        }
    }

    /// Records the queue's answers to extensions. If the session was taken over in the meantime,
    /// returns the leases to give back.
    pub(super) fn kept(
        &self,
        held: &[(TaskId, HeldLease)],
        answers: &[(Code, i64)],
        now: Instant,
    ) -> Vec<(TaskId, HeldLease)> {
        let mut state = self.state();
        let mut extended = Vec::new();
        for ((id, held), (code, deadline_unix_ms)) in held.iter().zip(answers) {
            let status = match code {
                // It was extended in another way.
                Code::Ok if *deadline_unix_ms == 0 => continue,
                Code::Ok | Code::Repeat => {
                    state.book.kept(*id, held, *deadline_unix_ms, now);
                    extended.push(*id);
                    continue;
                }
                Code::Cancelled => ItemStatus::Cancelled,
                // The worker has reported it in another way, or is about to learn that it did.
                Code::AlreadyCompleted => {
                    state.book.forget(Some(&(*id, held.token.clone())));
                    continue;
                }
                Code::LeaseLost | Code::UnknownTask | Code::NotLimited => ItemStatus::LeaseLost,
            };
            if state.book.forget(Some(&(*id, held.token.clone()))) {
                state.ended.push(ItemAnswer::new(id.to_string(), status));
            }
        }
        if !state.ended.is_empty() {
            self.notify.notify_one();
        }
        state.take_late(extended.into_iter())
    }
}

/// Attaches a stream to its session. After it is dropped, a session with tasks in hand waits for
/// another stream until its time-out.
pub struct Attached {
    pub(super) session: Arc<Session>,
    stream: u64,
    cut: CancellationToken,
}

impl Attached {
    pub fn session(&self) -> String {
        self.session.id.to_string()
    }

    pub fn worker(&self) -> &str {
        self.session.worker.as_str()
    }

    pub fn timeout(&self) -> Duration {
        self.session.state().plan.timeout
    }

    pub fn demand(&self) -> u32 {
        self.session.demand()
    }

    /// The shortest lease since the worker last had no task in hand; `None` if it has none now.
    pub fn shortest_lease(&self) -> Option<Duration> {
        self.session.state().book.shortest()
    }

    /// Waits until the stream no longer belongs to the session, and returns why.
    pub async fn cut(&self) -> Cut {
        self.cut.cancelled().await;
        let state = self.session.state();
        match state.end {
            Some(why) if state.stream == self.stream => Cut::Ended(why),
            _ => Cut::Displaced,
        }
    }

    pub(super) fn is_current(&self) -> bool {
        self.session.state().stream == self.stream
    }

    /// Records tasks on their way to the worker, and takes them off the demand. Returns the leases
    /// that have ended, which the worker must hear of first, because one of the tasks may be among
    /// them. Returns `None` if the session has ended or has another stream: the leases go back.
    pub fn hold(&self, tasks: &[LeasedTask]) -> Option<Vec<ItemAnswer>> {
        let mut state = self.session.state();
        if state.end.is_some() || state.stream != self.stream {
            return None;
        }
        let started = if state.plan.tells_started {
            Started::No
        } else {
            Started::Perhaps
        };
        let now = Instant::now();
        tasks
            .iter()
            .for_each(|task| state.book.hold(task, started, now));
        // A claim asks for no more than the demand.
        state.demand = state
            .demand
            .saturating_sub(u32::try_from(tasks.len()).unwrap_or(u32::MAX));
        Some(std::mem::take(&mut state.ended))
    }

    /// Adds to the demand, and returns how much it added: nothing if the session has ended or has
    /// another stream.
    pub(super) fn want(&self, want: u32, most: u32) -> u32 {
        let mut state = self.session.state();
        if state.end.is_some() || state.stream != self.stream {
            return 0;
        }
        state.drop_lapsed(Instant::now());
        let in_hand = u32::try_from(state.book.len()).unwrap_or(u32::MAX);
        let granted = want.min(most.saturating_sub(in_hand).saturating_sub(state.demand));
        state.demand += granted;
        granted
    }

    /// Sets the demand to 0, and returns what it was. Does nothing if the session has another stream.
    pub fn surrender(&self) -> u32 {
        let mut state = self.session.state();
        if state.stream == self.stream {
            std::mem::take(&mut state.demand)
        } else {
            0
        }
    }

    pub fn started(&self, ids: &[String]) {
        let mut state = self.session.state();
        ids.iter()
            .filter_map(|id| id.parse().ok())
            .for_each(|id| state.book.start(id));
    }

    /// Waits for leases that ended before the worker reported their tasks.
    pub async fn ended(&self) -> Vec<ItemAnswer> {
        loop {
            let ended = std::mem::take(&mut self.session.state().ended);
            if !ended.is_empty() {
                return ended;
            }
            self.session.notify.notified().await;
        }
    }

    pub fn completed(&self, reports: &Reports, answers: &[ItemAnswer]) {
        self.session
            .state()
            .book
            .reported(&reports.completions, answers);
    }

    pub fn rejected(&self, reports: &Reports, answers: &[ItemAnswer]) {
        self.session
            .state()
            .book
            .reported(&reports.rejections, answers);
    }

    /// Records the answers to extensions. If the session was taken over meanwhile, returns the leases
    /// that must go back.
    pub(super) fn extended(
        &self,
        reports: &Reports,
        answers: &[ItemAnswer],
    ) -> Vec<(TaskId, HeldLease)> {
        let mut state = self.session.state();
        if state.end.is_some_and(|why| why != SessionEnd::TakenOver) {
            return Vec::new();
        }
        let tells_started = state.plan.tells_started;
        state
            .book
            .extended(&reports.extensions, answers, tells_started, Instant::now());
        let extended = reports
            .extensions
            .iter()
            .zip(answers)
            .filter(|(_, answer)| answer.status == ItemStatus::Ok);
        state.take_late(
            extended
                .filter_map(|(item, _)| item.lease.as_ref())
                .map(|(id, _)| *id),
        )
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut state = self.session.state();
        if state.stream == self.stream {
            state.away_since = Some(Instant::now());
            state.demand = 0;
        }
    }
}
