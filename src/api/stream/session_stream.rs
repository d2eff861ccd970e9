//! The loop that serves one stream.
//!
//! A stream does five things at once: it reads the worker's frames, works on their reports, claims
//! tasks while the session has demand, extends leases if the session asked for that, and checks
//! whether the token is still valid. [`SessionStream::run`] waits for whichever is ready first.
//!
//! Three rules keep it bounded. It does not wait for a report before it reads the next frame, but
//! reads no more while [`OPEN_FRAMES`] answers are outstanding. It reads nothing while a frame of
//! its own waits for a slow connection. And at most one frame with tasks waits for the connection.
//!
//! **Demand and answers.** When a frame reports tasks and asks for new ones (`want`), we claim for
//! that `want` at once if the session has room for all of it, rather than after the reports, so that
//! reports and claim can share one sync of Redis's disk. The worker must not notice: it learns of
//! the granted demand from the answer to its frame, and may treat earlier tasks as a mistake. So
//! tasks that arrive before the answer are kept in [`SessionStream::early_tasks`] until the worker
//! knows of enough demand, and go back to the queue if the answer takes longer than
//! [`KEEP_EARLY_TASKS`].

use std::{
    collections::VecDeque,
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{
    FutureExt, Stream, StreamExt,
    future::{self, BoxFuture, OptionFuture},
    stream::FuturesUnordered,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, sleep_until, timeout},
};

use super::frames::{BytesPermit, OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd};
use crate::{
    api::{Api, Error, heard::Heard},
    model::{Caller, FrameAnswer, SessionClosing, TaskId, TaskdFrame, WorkerFrame},
    pipelines::tasks::{self, Attached, Handle, Leases, Reports, heartbeat},
};

/// How many frames may be without an answer. While there are this many, none is read.
const OPEN_FRAMES: usize = 16;
/// How often a stream wakes up while its token may be revoked, its leases may run out, or the
/// process stops. Any other stream only wakes up for a heartbeat or its time-out, so that ten
/// thousand idle ones cost next to nothing.
const CHECK_EVERY: Duration = Duration::from_millis(700);
/// How long to wait before the next claim after one that failed.
const CLAIM_AGAIN: Duration = Duration::from_secs(1);
/// How long a worker may go on with its stream when the process stops.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long claimed tasks wait for the answer that tells the worker of their demand. It is short
/// because nobody extends their leases, and other workers may be idle.
const KEEP_EARLY_TASKS: Duration = Duration::from_secs(1);
/// How long the end of a session waits for outstanding reports and an outstanding extension.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

type Claimed = (Result<Leases, tasks::Error>, OwnedSemaphorePermit);

/// The state of one stream.
pub(super) struct SessionStream<'a> {
    api: &'a Api,
    tasks: &'a Handle,
    caller: &'a Caller,
    attached: &'a Attached,
    /// The worker in the list of workers.
    pub(super) heard: Option<Arc<Heard>>,
    out: mpsc::Sender<Box<OutgoingFrame>>,
    reserve: ReserveBytes,
    timeout: Duration,
    /// Whether taskd extends the leases of this session.
    extends_leases: bool,

    /// Frames whose reports are being worked on.
    outstanding: FuturesUnordered<BoxFuture<'a, Result<HandledFrame, StreamEnd>>>,
    /// Frames that are done but not answered, because another frame waited for the connection.
    done: VecDeque<Result<HandledFrame, StreamEnd>>,
    /// The tasks of reports that are not answered yet.
    unanswered: UnansweredReports,

    /// The claim that waits at the queues. There is one while the session has demand.
    claim: Option<Pin<Box<dyn Future<Output = Claimed> + Send + 'a>>>,
    /// A permit for the one frame with tasks that may wait for the connection.
    tasks_permit: Arc<Semaphore>,
    /// Tasks that arrived before the worker knows of the demand that they are for.
    early_tasks: Option<EarlyTasks>,
    /// Granted demand that the worker does not know of yet. An outstanding answer announces it.
    unannounced: Arc<AtomicU32>,
    /// That answer was overdue, so the early tasks went back. No claim runs for unannounced demand
    /// until the worker knows of some.
    is_answer_overdue: bool,
    /// The number of surrenders so far. A `want` from before a surrender no longer counts.
    surrenders: Arc<AtomicU64>,

    /// The extension of leases that is running.
    extension: Option<Pin<Box<dyn Future<Output = ()> + Send + 'a>>>,

    /// When the worker's last frame was read. Moved forward while taskd does not read.
    last_received: Instant,
    last_sent: Instant,
    /// When the token and the leases were last checked.
    last_check: Instant,
    /// When the process began to stop, if it does.
    stopping_since: Option<Instant>,
}

/// A frame of the worker whose reports are done, before its answer is sent.
struct HandledFrame {
    answer: FrameAnswer,
    /// The demand to add before the answer is sent, unless the worker surrendered since.
    want: u32,
    /// The demand that was added before the reports were done. The answer announces it.
    granted_early: u32,
    /// [`SessionStream::surrenders`] when the frame came.
    surrenders: u64,
    /// Whether the worker expects an answer.
    needs_answer: bool,
    /// The frame's number in [`SessionStream::unanswered`]; 0 if it has no reports.
    reports: u64,
}

/// Tasks that were claimed, and wait until the worker knows of the demand for them.
struct EarlyTasks {
    leases: Leases,
    tasks_permit: OwnedSemaphorePermit,
    permit: BytesPermit,
    since: Instant,
}

/// The tasks of reports that are not answered yet, by a number for each frame.
#[derive(Default)]
struct UnansweredReports {
    frames: Vec<(u64, Vec<TaskId>)>,
    /// The number of the last frame, counted from 1.
    last: u64,
}

impl UnansweredReports {
    fn add(&mut self, tasks: Vec<TaskId>) -> u64 {
        self.last += 1;
        self.frames.push((self.last, tasks));
        self.last
    }

    fn remove(&mut self, frame: u64) {
        self.frames.retain(|(number, _)| *number != frame);
    }

    fn contains(&self, task: TaskId) -> bool {
        self.frames.iter().any(|(_, tasks)| tasks.contains(&task))
    }
}

impl<'a> SessionStream<'a> {
    pub(super) fn new(
        api: &'a Api,
        tasks: &'a Handle,
        caller: &'a Caller,
        attached: &'a Attached,
        out: mpsc::Sender<Box<OutgoingFrame>>,
        reserve: ReserveBytes,
        extends_leases: bool,
    ) -> Self {
        let now = Instant::now();
        Self {
            api,
            tasks,
            caller,
            attached,
            heard: None,
            out,
            reserve,
            timeout: attached.timeout(),
            extends_leases,
            outstanding: FuturesUnordered::new(),
            done: VecDeque::new(),
            unanswered: UnansweredReports::default(),
            claim: None,
            tasks_permit: Arc::new(Semaphore::new(1)),
            early_tasks: None,
            unannounced: Arc::default(),
            is_answer_overdue: false,
            surrenders: Arc::default(),
            extension: None,
            last_received: now,
            last_sent: now,
            last_check: now,
            stopping_since: None,
        }
    }

    /// Serves the stream until one side ends it. Returns `Ok` if the worker closed the session.
    pub(super) async fn run(
        &mut self,
        frames: &mut (impl Stream<Item = Result<ReceivedFrame, ()>> + Unpin + Send),
    ) -> Result<(), StreamEnd> {
        let mut alarm = pin!(sleep_until(self.next_check().into()));
        let attached = self.attached;
        loop {
            // Finished answers come first: they may announce the demand for the early tasks.
            if self.done.is_empty() {
                self.send_early_tasks().await?;
            }
            self.start_or_drop_claim();
            let at = self.next_check().into();
            if at < alarm.deadline() {
                alarm.as_mut().reset(at);
            }
            let reads = self.open_frames() < OPEN_FRAMES && !self.is_closed();
            tokio::select! {
                biased;
                cut = attached.cut() => return Err(cut.into()),
                () = self.out.closed() => return Err(StreamEnd::Broken),
                () = self.api.stop.cancelled(), if self.stopping_since.is_none() => {
                    self.announce_stop().await?;
                }
                ended = attached.ended() => self.send(TaskdFrame { ended, ..self.frame() }).await?,
                Some(handled) = next_handled(&mut self.done, &mut self.outstanding) => {
                    self.answer(handled?).await?;
                }
                Some(claimed) = OptionFuture::from(self.claim.as_mut()) => {
                    self.claim = None;
                    self.accept_claim(claimed).await?;
                }
                Some(()) = OptionFuture::from(self.extension.as_mut()) => self.extension = None,
                frame = frames.next(), if reads => match frame {
                    Some(Ok(ReceivedFrame { frame, permit })) => {
                        self.last_received = Instant::now();
                        if self.receive(frame, permit)? {
                            return self.send_open_answers().await;
                        }
                    }
                    // The worker has closed its side of the connection.
                    None => {
                        self.send_open_answers().await?;
                        return Err(match self.stopping_since {
                            Some(_) => StreamEnd::Stopping,
                            None => StreamEnd::HalfClosed,
                        });
                    }
                    Some(Err(())) => return Err(StreamEnd::Broken),
                },
                () = alarm.as_mut() => {
                    self.check_times().await?;
                    alarm.as_mut().reset(self.next_check().into());
                }
            }
        }
    }

    /// Takes a frame of the worker. Returns whether it closes the session.
    pub(super) fn receive(
        &mut self,
        frame: WorkerFrame,
        permit: BytesPermit,
    ) -> Result<bool, StreamEnd> {
        if frame.open.is_some() {
            return Err(StreamEnd::Wrong(
                "only the first frame may have open".into(),
            ));
        }
        if let Some(heard) = &self.heard {
            self.api.workers.hear_again(heard);
        }
        let closes = frame.close;
        self.handle(frame, permit)?;
        // The loop prefers frames to its timer, so a worker that sends one after another would put
        // off the check of its token for ever.
        if self.last_check.elapsed() >= self.check_interval().unwrap_or(CHECK_EVERY) {
            self.check_token_and_leases()?;
        }
        Ok(closes)
    }

    /// Starts to work on a frame. Its memory is given back when its reports are done.
    fn handle(&mut self, frame: WorkerFrame, permit: BytesPermit) -> Result<(), StreamEnd> {
        let max = self.tasks.max_items();
        if frame.items() > max {
            return Err(StreamEnd::Wrong(format!(
                "{} items in one frame; at most {max}",
                frame.items()
            )));
        }
        self.tasks
            .few_ids("started", &frame.started)
            .map_err(Error::from)?;
        self.attached.started(&frame.started);
        let mut answer = FrameAnswer {
            number: frame.number,
            ..FrameAnswer::default()
        };
        if frame.surrender {
            answer.surrendered = self.surrender();
        }
        if frame.items() == 0 {
            self.grant_or_request(&frame, answer);
        } else {
            self.start_reports(frame, permit, answer);
        }
        Ok(())
    }

    /// Handles a frame without reports: grants what it wants, or asks other processes for a part of
    /// the worker's cap.
    fn grant_or_request(&mut self, frame: &WorkerFrame, answer: FrameAnswer) {
        let needs_answer = frame.number != 0;
        let surrenders = self.surrenders.load(Ordering::Relaxed);
        match self.tasks.want(self.attached, frame.want) {
            Some(granted_early) if needs_answer => {
                // The worker knows of this demand only when the answer is sent, and earlier answers
                // may be sent first.
                self.unannounced.fetch_add(granted_early, Ordering::Relaxed);
                let handled = HandledFrame {
                    answer,
                    want: 0,
                    granted_early,
                    surrenders,
                    needs_answer,
                    reports: 0,
                };
                self.outstanding.push(async move { Ok(handled) }.boxed());
            }
            Some(_) => {}
            None => self.request_demand(HandledFrame {
                answer,
                want: frame.want,
                granted_early: 0,
                surrenders,
                needs_answer,
                reports: 0,
            }),
        }
    }

    /// Starts to work on the reports of a frame. If the session has room for all that the frame
    /// wants, the demand is added at once: see *Demand and answers* in the head of this file.
    fn start_reports(&mut self, frame: WorkerFrame, permit: BytesPermit, answer: FrameAnswer) {
        let surrenders = self.surrenders.load(Ordering::Relaxed);
        let granted_early = self.tasks.want_whole(self.attached, frame.want);
        self.unannounced.fetch_add(granted_early, Ordering::Relaxed);
        let want = frame.want - granted_early;
        let tasks = Reports::of(&frame.completions, &frame.rejections, &frame.extensions);
        let reports = self.unanswered.add(tasks.ids());
        let api = self.api;
        let caller = self.caller;
        let attached = self.attached;
        let report = async move {
            let _permit = permit;
            let answer = api
                .report_frame(caller, attached, frame, tasks, answer)
                .await?;
            Ok(HandledFrame {
                answer,
                want,
                granted_early,
                surrenders,
                needs_answer: true,
                reports,
            })
        };
        self.outstanding.push(report.boxed());
    }

    /// Sends the answer to a frame. If the session had no room for the frame's `want` before, it is
    /// granted now, because the reported tasks have made room.
    async fn answer(&mut self, handled: HandledFrame) -> Result<(), StreamEnd> {
        let HandledFrame {
            mut answer,
            want,
            granted_early,
            surrenders,
            needs_answer,
            reports,
        } = handled;
        if surrenders == self.surrenders.load(Ordering::Relaxed) {
            let before = self.unannounced.fetch_sub(granted_early, Ordering::Relaxed);
            if before <= granted_early {
                self.is_answer_overdue = false;
            }
            answer.granted += granted_early;
            if want > 0 {
                match self.tasks.want(self.attached, want) {
                    Some(granted) => answer.granted += granted,
                    None => {
                        self.request_demand(HandledFrame {
                            answer,
                            want,
                            granted_early: 0,
                            surrenders,
                            needs_answer,
                            reports,
                        });
                        return Ok(());
                    }
                }
            }
        }
        if !needs_answer {
            return Ok(());
        }
        self.send(TaskdFrame {
            answer: Some(answer),
            ..self.frame()
        })
        .await?;
        self.unanswered.remove(reports);
        Ok(())
    }

    /// Asks other processes for a part of the worker's cap, before the frame is answered.
    fn request_demand(&self, mut handled: HandledFrame) {
        let tasks = self.tasks;
        let attached = self.attached;
        let surrenders = Arc::clone(&self.surrenders);
        let request = async move {
            let still_wanted = || surrenders.load(Ordering::Relaxed) == handled.surrenders;
            handled.answer.granted += tasks.want_more(attached, handled.want, still_wanted).await;
            handled.want = 0;
            handled.granted_early = 0;
            Ok(handled)
        };
        self.outstanding.push(request.boxed());
    }

    /// Sets the demand to 0, and returns the part of it that the worker knew of. Leases that a claim
    /// has brought go back, so that no task follows the answer.
    fn surrender(&mut self) -> u32 {
        self.surrenders.fetch_add(1, Ordering::Relaxed);
        self.claim = None;
        self.early_tasks = None;
        self.is_answer_overdue = false;
        let demand = self.attached.surrender();
        demand.saturating_sub(self.unannounced.swap(0, Ordering::Relaxed))
    }

    /// Keeps a claim waiting at the queues while there is demand. Dropping it gives back its leases.
    fn start_or_drop_claim(&mut self) {
        if self.attached.demand() == 0 || self.stopping_since.is_some() {
            self.claim = None;
            return;
        }
        let waits_for_answer = self.is_answer_overdue && self.announced_demand() == 0;
        if self.claim.is_none() && !waits_for_answer {
            self.start_claim_after(Duration::ZERO);
        }
    }

    /// Claims, after a pause, for the demand that the worker knows of. If it knows of none, claims
    /// for the demand that an outstanding answer will announce.
    fn start_claim_after(&mut self, pause: Duration) {
        let tasks = self.tasks;
        let attached = self.attached;
        let tasks_permit = Arc::clone(&self.tasks_permit);
        let unannounced = Arc::clone(&self.unannounced);
        self.claim = Some(Box::pin(async move {
            if !pause.is_zero() {
                sleep(pause).await;
            }
            let tasks_permit = tasks_permit
                .acquire_owned()
                .await
                .expect("nobody closes it");
            let most = |demand| match announced(demand, &unannounced) {
                0 => demand,
                announced => announced,
            };
            (tasks.next_tasks(attached, most).await, tasks_permit)
        }));
    }

    /// Takes the tasks that a claim brought, and sends them as soon as the worker knows of the
    /// demand for them.
    async fn accept_claim(&mut self, (leases, tasks_permit): Claimed) -> Result<(), StreamEnd> {
        let leases = match leases {
            Ok(leases) if leases.tasks.is_empty() => {
                // The records of these tasks cannot be read. Their leases must run out rather than
                // go back at no cost, so that the tasks become dead in the end.
                leases.deliver();
                return Ok(());
            }
            Ok(leases) => leases,
            Err(error) => {
                tracing::debug!("a session cannot claim: {error}");
                self.start_claim_after(CLAIM_AGAIN);
                return Ok(());
            }
        };
        // The token may have been revoked while the claim waited: then the leases go back.
        self.api.authentication.still_valid(self.caller)?;
        let bytes = leases.tasks.iter().map(|task| task.weight()).sum();
        let Ok(permit) = (self.reserve)(bytes) else {
            self.start_claim_after(CLAIM_AGAIN);
            return Ok(());
        };
        self.early_tasks = Some(EarlyTasks {
            leases,
            tasks_permit,
            permit,
            since: Instant::now(),
        });
        self.send_early_tasks().await
    }

    /// Sends the early tasks if the worker knows of enough demand, and if no report about one of
    /// them is unanswered: clients know a lease by its task, and would take the answer about the
    /// old lease for one about the new.
    async fn send_early_tasks(&mut self) -> Result<(), StreamEnd> {
        let announced = self.announced_demand() as usize;
        let unanswered = &self.unanswered;
        let may_go = |early: &mut EarlyTasks| {
            let tasks = &early.leases.tasks;
            tasks.len() <= announced && !tasks.iter().any(|task| unanswered.contains(task.id))
        };
        let Some(early) = self.early_tasks.take_if(may_go) else {
            return Ok(());
        };
        let before = self.frame();
        let Some(ended) = self.attached.hold(&early.leases.tasks) else {
            return Ok(());
        };
        // For the same reason the worker is told of leases that have ended before it gets new ones.
        if !ended.is_empty() {
            self.send(TaskdFrame { ended, ..before }).await?;
        }
        let Leases { tasks, deliveries } = early.leases;
        let frame = TaskdFrame {
            tasks,
            ..self.frame()
        };
        self.send_boxed(Box::new(OutgoingFrame {
            frame,
            deliveries,
            permit: Some(early.permit),
            _tasks_permit: Some(early.tasks_permit),
        }))
        .await
    }

    /// Sends a frame without tasks. See [`Self::send_boxed`].
    pub(super) async fn send(&mut self, frame: TaskdFrame) -> Result<(), StreamEnd> {
        self.send_boxed(Box::new(OutgoingFrame {
            frame,
            deliveries: Vec::new(),
            permit: None,
            _tasks_permit: None,
        }))
        .await
    }

    /// Waits until the connection can take the frame. Returns early if the session ends, the token
    /// is revoked, or the process has been stopping for [`LAST_WORDS`]. Reports and the extension of
    /// leases go on while it waits.
    async fn send_boxed(&mut self, outgoing: Box<OutgoingFrame>) -> Result<(), StreamEnd> {
        if let Ok(slot) = self.out.try_reserve() {
            slot.send(outgoing);
            self.last_sent = Instant::now();
            return Ok(());
        }
        // We do not poll the claim in this loop. It would receive a wake of its queue without
        // acting on it, and other workers would not get that wake. So it is dropped, and leases
        // that wait for an answer go back.
        self.claim = None;
        self.early_tasks = None;
        let api = self.api;
        let attached = self.attached;
        let out = self.out.clone();
        let began = Instant::now();
        let mut stopped = pin!(async {
            api.stop.cancelled().await;
            sleep(LAST_WORDS).await;
        });
        loop {
            tokio::select! {
                biased;
                cut = attached.cut() => return Err(cut.into()),
                slot = out.reserve() => {
                    slot.map_err(|_| StreamEnd::Broken)?.send(outgoing);
                    break;
                }
                () = &mut stopped => return Err(StreamEnd::Stopping),
                // Reports must be polled: one that is not would keep its connection to the database.
                Some(handled) = self.outstanding.next() => self.done.push_back(handled),
                Some(()) = OptionFuture::from(self.extension.as_mut()) => self.extension = None,
                () = sleep(CHECK_EVERY) => self.check_token_and_leases()?,
            }
        }
        // Nobody has read the worker's frames while this waited.
        self.last_received += began.elapsed();
        self.last_sent = Instant::now();
        Ok(())
    }

    /// An empty frame with the demand that the worker knows of.
    fn frame(&self) -> TaskdFrame {
        TaskdFrame {
            demand: self.announced_demand(),
            ..TaskdFrame::default()
        }
    }

    /// The demand that the worker knows of.
    fn announced_demand(&self) -> u32 {
        announced(self.attached.demand(), &self.unannounced)
    }

    /// Sets the demand to 0, waits for the outstanding reports, and sends their answers.
    pub(super) async fn send_open_answers(&mut self) -> Result<(), StreamEnd> {
        self.surrender();
        while let Some(handled) = next_handled(&mut self.done, &mut self.outstanding).await {
            self.answer(handled?).await?;
        }
        Ok(())
    }

    /// Gives back what a claim leased, and waits a while for outstanding reports and an outstanding
    /// extension. The end of the session needs the deadlines that Redis has after those: a lease
    /// that Redis extends later is not given back, and runs out.
    pub(super) async fn release_claim(&mut self) {
        self.claim = None;
        self.early_tasks = None;
        let reports = std::mem::take(&mut self.outstanding);
        let reports = reports.for_each(|_| future::ready(()));
        let extension = OptionFuture::from(self.extension.take());
        drop(timeout(SETTLED_WITHIN, future::join(reports, extension)).await);
    }

    /// Tells the worker that the process stops. It gets no more tasks, and may still report what it
    /// has.
    async fn announce_stop(&mut self) -> Result<(), StreamEnd> {
        self.stopping_since = Some(Instant::now());
        self.surrender();
        let closing = SessionClosing {
            reason: "this process stops: go on with the session at another one".to_owned(),
            within: LAST_WORDS,
        };
        self.send(TaskdFrame {
            closing: Some(closing),
            ..self.frame()
        })
        .await
    }

    /// When [`Self::check_times`] has something to do, at the latest.
    fn next_check(&self) -> Instant {
        let silent_at = self.last_received + self.timeout;
        let heartbeat_at = self.last_sent + heartbeat(self.timeout);
        let mut next = silent_at.min(heartbeat_at);
        if let Some(early) = &self.early_tasks {
            next = next.min(early.since + KEEP_EARLY_TASKS);
        }
        if let Some(every) = self.check_interval() {
            next = next.min(self.last_check + every);
        }
        next
    }

    /// How often to check the token and the leases; `None` if there is nothing to check.
    fn check_interval(&self) -> Option<Duration> {
        if let Some(lease) = self.shortest_extended_lease() {
            // A lease is extended when half of it is over.
            return Some(CHECK_EVERY.min(lease / 8));
        }
        let has_token = self.caller.access.token().is_some();
        (has_token || self.stopping_since.is_some()).then_some(CHECK_EVERY)
    }

    /// The shortest of the leases that taskd extends.
    fn shortest_extended_lease(&self) -> Option<Duration> {
        self.attached
            .shortest_lease()
            .filter(|_| self.extends_leases)
    }

    /// Fails if the token is no longer valid, and starts to extend leases that need it. Must be
    /// called regularly whatever else the stream does.
    fn check_token_and_leases(&mut self) -> Result<(), StreamEnd> {
        // If this check is late, the process stood still, and the worker may have gone elsewhere
        // with its leases, as it may if it was silent.
        let silent_for = self.last_received.elapsed();
        let late_by = self.last_check.elapsed().saturating_sub(CHECK_EVERY);
        let may_have_moved = silent_for.max(late_by) > heartbeat(self.timeout);
        self.last_check = Instant::now();
        self.api.authentication.still_valid(self.caller)?;
        if self.shortest_extended_lease().is_some() && self.extension.is_none() {
            self.extension = Some(Box::pin(
                self.tasks.keep_leases(self.attached, may_have_moved),
            ));
        }
        Ok(())
    }

    /// Does what is due by now: checks, the return of early tasks, the time-out, a heartbeat.
    async fn check_times(&mut self) -> Result<(), StreamEnd> {
        self.check_token_and_leases()?;
        let overdue = self
            .early_tasks
            .take_if(|early| early.since.elapsed() >= KEEP_EARLY_TASKS);
        if overdue.is_some() {
            self.claim = None;
            self.is_answer_overdue = true;
        }
        if self.is_closed() && self.open_frames() == 0 {
            return Err(StreamEnd::Stopping);
        }
        // The worker is not silent if taskd does not read its frames.
        if self.open_frames() >= OPEN_FRAMES {
            self.last_received = Instant::now();
        }
        if self.last_received.elapsed() >= self.timeout {
            return Err(StreamEnd::Silent(self.timeout));
        }
        if self.last_sent.elapsed() >= heartbeat(self.timeout) {
            self.send(self.frame()).await?;
        }
        Ok(())
    }

    /// The number of frames without an answer.
    fn open_frames(&self) -> usize {
        self.outstanding.len() + self.done.len()
    }

    /// True if the process stops and the worker's time for last frames is over.
    fn is_closed(&self) -> bool {
        self.stopping_since
            .is_some_and(|since| since.elapsed() >= LAST_WORDS)
    }
}

/// The part of the demand that the worker knows of.
fn announced(demand: u32, unannounced: &AtomicU32) -> u32 {
    demand.saturating_sub(unannounced.load(Ordering::Relaxed))
}

/// Waits for the next frame that is ready to be answered. Returns `None` if none is outstanding.
async fn next_handled<T>(
    done: &mut VecDeque<T>,
    outstanding: &mut FuturesUnordered<BoxFuture<'_, T>>,
) -> Option<T> {
    match done.pop_front() {
        Some(handled) => Some(handled),
        None => outstanding.next().await,
    }
}
