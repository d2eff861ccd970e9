//! The loop that serves a stream. It never waits for a report: up to [`OPEN_FRAMES`] are under way,
//! and it reads no more while there are as many, or while the worker does not read. At most one
//! frame with tasks waits for the connection.

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
    Stream, StreamExt,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, sleep_until, timeout},
};

use super::{
    frames::{Answered, FindRoom, Held, Received, Room, Sent, StreamEnd},
    report::OptionFuture,
};
use crate::{
    api::Api,
    model::{Caller, SessionClosing, TaskId, TaskdFrame, WorkerFrame},
    pipelines::tasks::{self, Attached, Handle, Leases, heartbeat},
};

/// The frames whose answers are under way.
const OPEN_FRAMES: usize = 16;
/// How often a stream looks at the time while its token may be revoked, its leases may run out, or
/// the process stops. Any other stream looks when a heartbeat or its time-out is due: ten thousand
/// idle ones cost next to nothing.
pub(super) const TICK: Duration = Duration::from_millis(700);
/// How long a claim waits after one that failed.
const CLAIM_AGAIN: Duration = Duration::from_secs(1);
/// How long a worker may go on with its stream when the process stops.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(2);
/// The longest that claimed tasks wait until the worker knows of their demand. Nobody extends their
/// leases meanwhile, and other workers may be idle.
const HELD_FOR: Duration = Duration::from_secs(1);
/// How long the end of a session waits for reports and for an extension of its leases.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

pub(super) struct Streaming<'a> {
    pub(super) api: &'a Api,
    pub(super) tasks: &'a Handle,
    pub(super) caller: &'a Caller,
    pub(super) attached: &'a Attached,
    pub(super) out: mpsc::Sender<Box<Sent>>,
    room: FindRoom,
    /// For the one frame with tasks that waits for the connection.
    place: Arc<Semaphore>,
    pub(super) answers: FuturesUnordered<BoxFuture<'a, Result<Answered, StreamEnd>>>,
    /// Answers that came while another frame waited for the connection.
    pub(super) answered: VecDeque<Result<Answered, StreamEnd>>,
    /// The claim that waits for tasks.
    pub(super) claim: Option<Pin<Box<dyn Future<Output = Claimed> + Send + 'a>>>,
    /// Demand of which the worker does not know yet: an answer under way tells it.
    pub(super) untold: Arc<AtomicU32>,
    /// The tasks of the reports whose answers are not sent.
    pub(super) reporting: Reporting,
    /// Tasks that a claim brought, until the worker knows of so much demand.
    pub(super) held: Option<Held>,
    /// The answer took too long, and the tasks that waited for it went back.
    pub(super) is_late: bool,
    /// The extension of leases, while one is under way.
    pub(super) keeping: Option<Pin<Box<dyn Future<Output = ()> + Send + 'a>>>,
    /// Counts surrenders: what was wanted before one is no longer wanted.
    pub(super) surrenders: Arc<AtomicU64>,
    /// When the worker sent its last frame, and taskd sent its own. The time in which nobody reads
    /// does not count.
    pub(super) heard: Instant,
    pub(super) spoke: Instant,
    /// When taskd last looked at the token.
    looked: Instant,
    timeout: Duration,
    keeps: bool,
    /// Since when the process stops.
    closing: Option<Instant>,
}

/// The tasks of reports under way, by the number of their frame.
#[derive(Default)]
pub(super) struct Reporting {
    frames: Vec<(u64, Vec<TaskId>)>,
    /// The number of the last frame, counted from 1.
    last: u64,
}

impl Reporting {
    pub(super) fn begin(&mut self, tasks: Vec<TaskId>) -> u64 {
        self.last += 1;
        self.frames.push((self.last, tasks));
        self.last
    }

    pub(super) fn end(&mut self, frame: u64) {
        self.frames.retain(|(number, _)| *number != frame);
    }

    fn has(&self, task: TaskId) -> bool {
        self.frames.iter().any(|(_, tasks)| tasks.contains(&task))
    }
}

type Claimed = (Result<Leases, tasks::Error>, OwnedSemaphorePermit);

impl<'a> Streaming<'a> {
    pub(super) fn new(
        api: &'a Api,
        tasks: &'a Handle,
        caller: &'a Caller,
        attached: &'a Attached,
        out: mpsc::Sender<Box<Sent>>,
        room: FindRoom,
        keeps: bool,
    ) -> Self {
        let place = Arc::new(Semaphore::new(1));
        let answers = FuturesUnordered::new();
        let now = Instant::now();
        let answered = VecDeque::new();
        let claim = None;
        let keeping = None;
        let surrenders = Arc::default();
        let closing = None;
        let heard = now;
        let spoke = now;
        let looked = now;
        let timeout = attached.timeout();
        Self {
            api,
            tasks,
            caller,
            attached,
            out,
            room,
            place,
            answers,
            answered,
            claim,
            untold: Arc::default(),
            reporting: Reporting::default(),
            held: None,
            is_late: false,
            keeping,
            surrenders,
            heard,
            spoke,
            looked,
            timeout,
            keeps,
            closing,
        }
    }

    pub(super) async fn run(
        &mut self,
        frames: &mut (impl Stream<Item = Result<Received, ()>> + Unpin + Send),
    ) -> Result<(), StreamEnd> {
        let mut alarm = pin!(sleep_until(self.look_at().into()));
        let attached = self.attached;
        loop {
            // Answers that are ready say of which demand the worker knows.
            if self.answered.is_empty() {
                self.pass_on_held().await?;
            }
            self.stand_claim();
            let at = self.look_at().into();
            if at < alarm.deadline() {
                alarm.as_mut().reset(at);
            }
            let reads = self.open_frames() < OPEN_FRAMES && !self.is_closed();
            tokio::select! {
                biased;
                cut = attached.cut() => return Err(cut.into()),
                () = self.out.closed() => return Err(StreamEnd::Broken),
                () = self.api.stop.cancelled(), if self.closing.is_none() => self.close_soon().await?,
                ended = attached.ended() => self.send(TaskdFrame { ended, ..self.frame() }).await?,
                Some(answered) = next(&mut self.answered, &mut self.answers) => self.answer(answered?).await?,
                Some(claimed) = OptionFuture(&mut self.claim) => {
                    self.claim = None;
                    self.claimed(claimed).await?;
                }
                Some(()) = OptionFuture(&mut self.keeping) => self.keeping = None,
                frame = frames.next(), if reads => match frame {
                    Some(Ok(Received { frame, room })) => {
                        self.heard = Instant::now();
                        if self.receive(frame, room)? {
                            return self.finish().await;
                        }
                    }
                    // The worker has nothing more to say.
                    None => {
                        self.finish().await?;
                        return Err(if self.closing.is_some() { StreamEnd::Stopping } else { StreamEnd::HalfClosed });
                    }
                    Some(Err(())) => return Err(StreamEnd::Broken),
                },
                () = alarm.as_mut() => {
                    self.tick().await?;
                    alarm.as_mut().reset(self.look_at().into());
                }
            }
        }
    }

    /// When the time changes something for this stream.
    fn look_at(&self) -> Instant {
        let due = (self.heard + self.timeout).min(self.spoke + heartbeat(self.timeout));
        let due = self
            .held
            .as_ref()
            .map_or(due, |held| due.min(held.since + HELD_FOR));
        self.looks_every()
            .map_or(due, |every| due.min(self.looked + every))
    }

    /// How often the stream looks at the time while it must.
    fn looks_every(&self) -> Option<Duration> {
        let looks = self.closing.is_some() || self.caller.access.token().is_some();
        // A lease is extended when half of it is over.
        let kept = self.shortest_kept().map(|lease| TICK.min(lease / 8));
        kept.or(looks.then_some(TICK))
    }

    /// The shortest of the leases that taskd extends.
    fn shortest_kept(&self) -> Option<Duration> {
        self.attached.shortest_lease().filter(|_| self.keeps)
    }

    pub(super) fn frame(&self) -> TaskdFrame {
        TaskdFrame {
            demand: self.told(),
            ..TaskdFrame::default()
        }
    }

    /// The demand of which the worker knows.
    fn told(&self) -> u32 {
        told(self.attached.demand(), &self.untold)
    }

    /// Lets a claim wait at the queues while there is demand, and none without.
    fn stand_claim(&mut self) {
        if self.attached.demand() == 0 || self.closing.is_some() {
            // The claim's leases go back.
            self.claim = None;
        } else if self.claim.is_none() && !(self.is_late && self.told() == 0) {
            self.claim_after(Duration::ZERO);
        }
    }

    /// Sends tasks that a claim brought, as soon as the worker knows of so much demand.
    async fn claimed(&mut self, (leases, place): Claimed) -> Result<(), StreamEnd> {
        let leases = match leases {
            Ok(leases) if leases.tasks.is_empty() => {
                // Nobody can read the tasks of these leases. They run out, and at last the tasks
                // are dead.
                leases.deliver();
                return Ok(());
            }
            Ok(leases) => leases,
            Err(error) => {
                tracing::debug!("a session cannot claim: {error}");
                self.claim_after(CLAIM_AGAIN);
                return Ok(());
            }
        };
        // The token may have been revoked while the claim waited: the leases go back.
        self.api.authentication.still_valid(self.caller)?;
        let bytes = leases.tasks.iter().map(|task| task.weight()).sum();
        let Ok(room) = (self.room)(bytes) else {
            self.claim_after(CLAIM_AGAIN);
            return Ok(());
        };
        self.held = Some(Held {
            leases,
            place,
            room,
            since: Instant::now(),
        });
        self.pass_on_held().await
    }

    /// Sends the tasks that a claim brought, if the worker knows of so much demand, and waits for
    /// no answer about one of them: clients know a lease by its task, and would take that answer
    /// for the end of the new lease.
    async fn pass_on_held(&mut self) -> Result<(), StreamEnd> {
        let told = self.told() as usize;
        let reporting = &self.reporting;
        let may_go = |held: &mut Held| {
            let tasks = &held.leases.tasks;
            tasks.len() <= told && !tasks.iter().any(|task| reporting.has(task.id))
        };
        let Some(Held {
            leases,
            place,
            room,
            ..
        }) = self.held.take_if(may_go)
        else {
            return Ok(());
        };
        let before = self.frame();
        let Some(ended) = self.attached.hold(&leases.tasks) else {
            return Ok(());
        };
        // Clients know a lease by its task: behind a new lease of it they would take this for the
        // end of the new one.
        if !ended.is_empty() {
            self.send(TaskdFrame { ended, ..before }).await?;
        }
        let Leases { tasks, deliveries } = leases;
        let frame = TaskdFrame {
            tasks,
            ..self.frame()
        };
        self.send_all(Box::new(Sent {
            frame,
            deliveries,
            room: Some(room),
            _place: Some(place),
        }))
        .await
    }

    /// Claims for the demand that the worker knows, or if there is none for the rest.
    fn claim_after(&mut self, wait: Duration) {
        let tasks = self.tasks;
        let attached = self.attached;
        let place = Arc::clone(&self.place);
        let untold = Arc::clone(&self.untold);
        self.claim = Some(Box::pin(async move {
            if !wait.is_zero() {
                sleep(wait).await;
            }
            let place = place.acquire_owned().await.expect("nobody closes it");
            let most = |demand| match told(demand, &untold) {
                0 => demand,
                told => told,
            };
            (tasks.next_tasks(attached, most).await, place)
        }));
    }

    /// Takes a frame; whether it closes the session.
    pub(super) fn receive(&mut self, frame: WorkerFrame, room: Room) -> Result<bool, StreamEnd> {
        if frame.open.is_some() {
            return Err(StreamEnd::Wrong(
                "only the first frame may have open".into(),
            ));
        }
        let closes = frame.close;
        self.take(frame, room)?;
        // A worker that sends frame after frame must not keep taskd from the time.
        if self.looked.elapsed() >= self.looks_every().unwrap_or(TICK) {
            self.look()?;
        }
        Ok(closes)
    }

    /// Answers what is under way.
    pub(super) async fn finish(&mut self) -> Result<(), StreamEnd> {
        self.surrender();
        while let Some(answered) = next(&mut self.answered, &mut self.answers).await {
            self.answer(answered?).await?;
        }
        Ok(())
    }

    /// Gives back what a claim leased, and waits for reports and for an extension under way: the
    /// session's end needs the deadlines that Redis has. A lease that Redis extends later than that
    /// runs out.
    pub(super) async fn settle(&mut self) {
        self.claim = None;
        self.held = None;
        let reports = std::mem::take(&mut self.answers);
        let keeping = self.keeping.take();
        let keeping = async { OptionFuture(&mut { keeping }).await };
        drop(
            timeout(
                SETTLED_WITHIN,
                future::join(reports.for_each(|_| future::ready(())), keeping),
            )
            .await,
        );
    }

    /// The process stops: no more tasks, and the worker may say what it has.
    async fn close_soon(&mut self) -> Result<(), StreamEnd> {
        self.closing = Some(Instant::now());
        self.surrender();
        let reason = "this process stops: go on with the session at another one".to_owned();
        let closing = Some(SessionClosing {
            reason,
            within: LAST_WORDS,
        });
        self.send(TaskdFrame {
            closing,
            ..self.frame()
        })
        .await
    }

    /// Looks at the token and at the leases. It must go on, whatever the stream does.
    pub(super) fn look(&mut self) -> Result<(), StreamEnd> {
        // A look that is late: this process stood still.
        let silent = self
            .heard
            .elapsed()
            .max(self.looked.elapsed().saturating_sub(TICK));
        self.looked = Instant::now();
        self.api.authentication.still_valid(self.caller)?;
        if self.shortest_kept().is_some() && self.keeping.is_none() {
            let may_have_moved = silent > heartbeat(self.timeout);
            self.keeping = Some(Box::pin(
                self.tasks.keep_leases(self.attached, may_have_moved),
            ));
        }
        Ok(())
    }

    fn open_frames(&self) -> usize {
        self.answers.len() + self.answered.len()
    }

    /// True when the worker has said its last words: no more frames are read.
    fn is_closed(&self) -> bool {
        self.closing
            .is_some_and(|since| since.elapsed() >= LAST_WORDS)
    }

    async fn tick(&mut self) -> Result<(), StreamEnd> {
        self.look()?;
        if self
            .held
            .take_if(|held| held.since.elapsed() >= HELD_FOR)
            .is_some()
        {
            self.claim = None;
            self.is_late = true;
        }
        if self.is_closed() && self.open_frames() == 0 {
            return Err(StreamEnd::Stopping);
        }
        // While so many answers are under way, nobody reads the worker's frames.
        if self.open_frames() >= OPEN_FRAMES {
            self.heard = Instant::now();
        }
        if self.heard.elapsed() >= self.timeout {
            return Err(StreamEnd::Silent(self.timeout));
        }
        if self.spoke.elapsed() >= heartbeat(self.timeout) {
            self.send(self.frame()).await?;
        }
        Ok(())
    }
}

/// The demand without the part of which the worker does not know.
fn told(demand: u32, untold: &AtomicU32) -> u32 {
    demand.saturating_sub(untold.load(Ordering::Relaxed))
}

/// The next answer; `None`: nothing is under way.
async fn next<T>(
    there: &mut VecDeque<T>,
    under_way: &mut FuturesUnordered<BoxFuture<'_, T>>,
) -> Option<T> {
    match there.pop_front() {
        Some(answer) => Some(answer),
        None => under_way.next().await,
    }
}
