//! The run of a worker: a single tokio task owns all of its state, and reacts to handlers, answers,
//! timers and stops.

use std::{
    future::{Future, pending},
    pin::Pin,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use backon::BackoffBuilder as _;
use bytes::Bytes;
use tokio::{
    sync::watch,
    task::{Id, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout},
};

use crate::{
    client::WAITS,
    error::Error,
    event::{Ended, Event, Summary, Tell},
    extend::{Extended, MOST_EXTENSIONS, extend_all},
    held::{Number, Table},
    new_task::proto,
    options::Options,
    outcome::{Done, Failure},
    pb::{self, ItemStatus},
    report::{Answered, Kind, Reports, Tasks},
    source::{EndedLease, Source, get_round},
    stop::{Level, stop_on_signals},
    task::TaskInfo,
};

/// If more than this many reports are unanswered, the worker takes no more tasks.
const MOST_UNREPORTED: usize = 2000;
/// How long to wait for the last reports after all handlers have ended.
const LAST_REPORTS: Duration = Duration::from_secs(10);
/// The same, if only tasks that were given back are left: their leases expire anyway.
const LAST_RETURNS: Duration = Duration::from_secs(5);
/// How long taskd may take to confirm that no more tasks are in flight.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait for the answer of a poll when the worker stops: as long as taskd takes to
/// answer if it has tasks.
const ANSWER_COMES: Duration = Duration::from_millis(250);
const CLOSE_WITHIN: Duration = Duration::from_secs(3);
/// For how long reports do not ask for tasks, after one that did was refused or timed out.
const ASKS_NOT_FOR: Duration = Duration::from_secs(1);

/// Why tasks go back that wait in a worker which stops.
const STOPPED: &str = "not started: the worker stopped";

type Outcome = Result<Done, Failure>;
pub(crate) type Handler = Box<
    dyn Fn(&Arc<TaskInfo>, Bytes) -> Pin<Box<dyn Future<Output = Outcome> + Send>> + Send + Sync,
>;
type Got = Result<Option<Vec<pb::LeasedTask>>, Error>;

pub(crate) struct Run<S> {
    source: Arc<S>,
    handler: Handler,
    options: Options,
    table: Table,
    handlers: JoinSet<Outcome>,
    reports: Reports<S>,
    extensions: JoinSet<Extended>,
    /// The number of leases that one call extends.
    most_extensions: Arc<AtomicUsize>,
    get: Option<Pin<Box<dyn Future<Output = Got> + Send>>>,
    /// When a report may ask for tasks again.
    reports_ask: Instant,
    /// When the worker may take tasks again, after a handler has throttled it.
    throttled_until: Option<Instant>,
    /// Collects the tasks that were in flight when the drain began.
    rest: Option<Pin<Box<dyn Future<Output = Vec<pb::LeasedTask>> + Send>>>,
    stops: watch::Receiver<Level>,
    level: Level,
    /// When the current stop level times out.
    deadline: Option<Instant>,
    /// True if no handler runs any more, and only answers are missing.
    is_last: bool,
    summary: Summary,
}

impl<S: Source> Run<S> {
    pub(crate) fn new(source: S, handler: Handler, options: Options) -> Self {
        let source = Arc::new(source);
        Self {
            reports: Reports::new(source.clone(), options.tell.clone()),
            source,
            handler,
            table: Table::default(),
            handlers: JoinSet::new(),
            extensions: JoinSet::new(),
            most_extensions: Arc::new(MOST_EXTENSIONS.into()),
            get: None,
            reports_ask: Instant::now(),
            throttled_until: None,
            rest: None,
            stops: options.stop.watch(),
            level: Level::Run,
            deadline: None,
            is_last: false,
            summary: Summary::default(),
            options,
        }
    }

    /// Runs until a stop, or until a permanent error.
    pub(crate) async fn run(mut self) -> Result<Summary, Error> {
        let every = self.options.lease / 3;
        let mut extend = interval_at(Instant::now() + every, every);
        extend.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut signals = JoinSet::new();
        if self.options.has_signals {
            signals.spawn(stop_on_signals(self.options.stop.clone()));
        }
        let level = *self.stops.borrow();
        self.raise(level);
        loop {
            if self.is_throttled() {
                self.give_back_waiting("not started: the worker takes no tasks for a while");
            } else {
                self.throttled_until = None;
                self.start_handlers();
            }
            let room = self.room();
            self.source.room(room);
            let asks = self.get.is_none()
                && self.source.brings_tasks()
                && self.reports_ask <= Instant::now();
            self.reports.send(if asks { room } else { 0 });
            self.start_get(room);
            if self.is_over() {
                return Ok(self.finish().await);
            }
            tokio::select! {
                got = ready(&mut self.get) => {
                    self.get = None;
                    match got? {
                        Some(tasks) => tasks.into_iter().for_each(|task| self.table.add(task)),
                        None => self.raise(Level::Drain),
                    }
                }
                tasks = ready(&mut self.rest) => {
                    self.rest = None;
                    tasks.into_iter().for_each(|task| self.table.add(task));
                    self.give_back_waiting(STOPPED);
                }
                // Without this, tasks that taskd sent before it heard that the worker has no more
                // room would wait in the source until their leases expire.
                tasks = self.source.arrived(), if self.takes_arrivals() => {
                    tasks.into_iter().for_each(|task| self.table.add(task));
                }
                () = until(self.throttled_until) => {}
                ended = self.source.ended() => self.cancelled(&ended),
                Some(ended) = self.handlers.join_next_with_id() => self.ended(ended),
                Some(answered) = self.reports.answered() => self.answered(answered?),
                _ = extend.tick() => {
                    for (task, so_far) in self.table.long_running(self.options.lease / 2) {
                        (self.options.tell)(Event::StillRuns { task: &task, so_far });
                    }
                    self.extend();
                }
                Some(extended) = self.extensions.join_next() => self.extended(extended)?,
                changed = self.stops.changed() => {
                    // Cannot fail: `options` holds the sender.
                    changed.ok();
                    let level = *self.stops.borrow_and_update();
                    self.raise(level);
                }
                // Leases whose reports are unanswered expire.
                () = until(self.deadline) => match self.level {
                    Level::Run | Level::Drain if !self.is_last => self.raise(Level::Now),
                    Level::Run | Level::Drain | Level::Now => return Ok(self.finish().await),
                },
                Some(failed) = signals.join_next() => if let Ok(Err(error)) = failed {
                    return Err(Error::Options(format!("cannot hear signals: {error}")));
                },
            }
        }
    }

    /// True if the worker is stopping and nothing is left to do. As soon as a drain has no running
    /// handlers, it waits only for answers, with a short deadline.
    fn is_over(&mut self) -> bool {
        if self.level == Level::Run || self.rest.is_some() {
            return false;
        }
        if self.table.running() == 0 && !self.is_last {
            self.is_last = true;
            let limit = if self.table.finished() > 0 {
                LAST_REPORTS
            } else {
                LAST_RETURNS
            };
            let end = Instant::now() + limit;
            self.deadline = Some(self.deadline.map_or(end, |deadline| deadline.min(end)));
        }
        self.table.is_empty()
    }

    async fn finish(mut self) -> Summary {
        self.summary.unreported = self.table.finished() as u64;
        timeout(CLOSE_WITHIN, self.source.close()).await.ok();
        self.summary
    }

    fn start_handlers(&mut self) {
        while self.level == Level::Run && self.table.running() < self.options.concurrency {
            let Some((number, info, payload)) = self.table.next() else {
                return;
            };
            (self.options.tell)(Event::Started(&info));
            let handler = self.handlers.spawn((self.handler)(&info, payload));
            self.table.started(number, handler);
        }
    }

    fn is_throttled(&self) -> bool {
        self.throttled_until
            .is_some_and(|until| Instant::now() < until)
    }

    /// True if no call waits for tasks. A drain collects them itself.
    fn takes_arrivals(&self) -> bool {
        self.level == Level::Run && self.get.is_none()
    }

    /// How many more tasks the worker can take.
    fn room(&self) -> usize {
        let most = self.options.concurrency + self.options.prefetch;
        let takes_more = self.level == Level::Run
            && !self.is_throttled()
            && self.table.len() <= most + MOST_UNREPORTED;
        if takes_more {
            most.saturating_sub(self.table.unfinished())
        } else {
            0
        }
    }

    /// Starts a call for up to `room` tasks, unless a report asks for some already.
    fn start_get(&mut self, room: usize) {
        if self.get.is_some() || self.reports.asks() || room == 0 {
            return;
        }
        let (source, tell) = (self.source.clone(), self.options.tell.clone());
        self.get = Some(Box::pin(async move {
            let mut waits = WAITS.build();
            loop {
                match get_round(source.as_ref(), room).await {
                    Err(error) if error.may_pass() => tell(Event::Away(&error)),
                    got => return got,
                }
                tokio::time::sleep(waits.next().unwrap_or(Duration::from_secs(1))).await;
            }
        }));
    }

    fn ended(&mut self, ended: Result<(Id, Outcome), JoinError>) {
        let (handler, outcome) = match ended {
            Ok((handler, outcome)) => (handler, Some(outcome)),
            Err(error) if error.is_panic() => (
                error.id(),
                Some(Err(Failure::new(format!(
                    "the handler panicked: {}",
                    words(error)
                )))),
            ),
            // The handler was aborted: its task is lost, or the worker stops.
            Err(error) => (error.id(), None),
        };
        let Some((number, held)) = self.table.ended(handler) else {
            return;
        };
        match outcome {
            Some(Ok(done)) => {
                held.ending = Ended::Completed;
                let mut completion = done.completion(held.info.id(), &held.info.lease_token);
                check_limit(&mut completion.limit, &held.info, &self.options.tell);
                self.reports.complete(number, completion);
            }
            Some(Err(failure)) => {
                let ending = if failure.not_started {
                    Ended::GivenBack
                } else {
                    Ended::Rejected
                };
                self.reject(number, ending, failure);
            }
            None => self.reject(
                number,
                Ended::GivenBack,
                Failure::new("the worker stopped").again_after(Duration::ZERO),
            ),
        }
    }

    fn reject(&mut self, number: Number, ending: Ended, failure: Failure) {
        let Some(held) = self.table.get_mut(number) else {
            return;
        };
        held.ending = ending;
        held.reason.clone_from(&failure.reason);
        let is_put_off = failure.is_put_off().is_some();
        if failure.throttles {
            let until = failure.is_put_off().map(|delay| Instant::now() + delay);
            self.throttled_until = self.throttled_until.max(until);
        }
        let mut rejection = failure.rejection(held.info.id(), &held.info.lease_token);
        check_limit(&mut rejection.limit, &held.info, &self.options.tell);
        if rejection.not_started && !is_put_off {
            self.reports.give_back(number, rejection);
        } else {
            self.reports.reject(number, rejection);
        }
    }

    fn answered(&mut self, answered: Answered) {
        match answered.tasks {
            Tasks::NotAsked => {}
            Tasks::InVain => self.reports_ask = Instant::now() + ASKS_NOT_FOR,
            Tasks::Came(tasks) => {
                tasks.into_iter().for_each(|task| self.table.add(task));
                if self.level > Level::Run {
                    self.give_back_waiting(STOPPED);
                }
            }
        }
        for (number, result) in answered.items {
            match (result.status(), answered.kind) {
                (ItemStatus::Ok, _) => {
                    // taskd lists the discovered tasks that it did not store.
                    if let Some(held) = self
                        .table
                        .get_mut(number)
                        .filter(|_| !result.error.is_empty())
                    {
                        (self.options.tell)(Event::NotStored {
                            task: &held.info,
                            reason: &result.error,
                        });
                    }
                    self.leave(number, None);
                }
                (ItemStatus::Invalid, Kind::Completions) => {
                    let why =
                        Failure::new(format!("taskd refused the completion: {}", result.error));
                    self.reject(number, Ended::Rejected, why);
                }
                (status, _) => self.leave(number, Some(&lost(status, &result.error))),
            }
        }
    }

    /// Removes a task from the table. If `lost` gives a reason, it ends as lost, otherwise as its
    /// report says.
    fn leave(&mut self, number: Number, lost: Option<&str>) {
        let Some(held) = self.table.remove(number) else {
            return;
        };
        let ended = if lost.is_some() {
            Ended::Lost
        } else {
            held.ending
        };
        match ended {
            Ended::Completed => self.summary.completed += 1,
            Ended::Rejected => self.summary.rejected += 1,
            Ended::GivenBack => self.summary.given_back += 1,
            Ended::Lost => self.summary.lost += 1,
        }
        let reason = lost.unwrap_or(&held.reason);
        (self.options.tell)(Event::Ended {
            task: &held.info,
            ended,
            reason,
            took: held.took,
        });
    }

    /// Handles leases that taskd ended. A task that is already reported gets its own answer.
    fn cancelled(&mut self, ended: &[EndedLease]) {
        for (token, result) in ended {
            let Some(number) = self.table.find(&result.id, token) else {
                continue;
            };
            if self
                .table
                .get_mut(number)
                .is_some_and(|held| !held.is_reported())
            {
                self.leave(number, Some(&lost(result.status(), &result.error)));
            }
        }
    }

    /// Gives back the tasks whose handlers have not started.
    fn give_back_waiting(&mut self, why: &str) {
        while let Some((number, ..)) = self.table.next() {
            self.reject(number, Ended::GivenBack, Failure::new(why).not_started());
        }
    }

    /// Extends all leases, including those of waiting tasks and of unanswered reports.
    fn extend(&mut self) {
        // If the previous extension still runs, it serves as this one.
        if self.table.is_empty() || !self.extensions.is_empty() {
            return;
        }
        let extension = |info: &TaskInfo| pb::Extension {
            id: info.id().to_owned(),
            lease_token: info.lease_token.clone(),
            by: Some(proto(self.options.lease)),
        };
        let all: Vec<_> = self
            .table
            .leases()
            .map(|(number, info)| (number, extension(info)))
            .collect();
        let (source, tell, most) = (
            self.source.clone(),
            self.options.tell.clone(),
            self.most_extensions.clone(),
        );
        let until = Instant::now() + self.options.lease / 3;
        self.extensions
            .spawn(async move { extend_all(source.as_ref(), all, &most, &tell, until).await });
    }

    /// Aborts the handlers of tasks that the worker has lost.
    fn extended(&mut self, extended: Result<Extended, JoinError>) -> Result<(), Error> {
        // The extension task does not panic.
        let Ok(extended) = extended else {
            return Ok(());
        };
        for (number, result) in extended? {
            let is_lost = match result.status() {
                ItemStatus::Ok
                | ItemStatus::TryLater
                | ItemStatus::Invalid
                | ItemStatus::Unspecified => false,
                ItemStatus::LeaseLost
                | ItemStatus::AlreadyCompleted
                | ItemStatus::UnknownTask
                | ItemStatus::Cancelled => true,
            };
            // A reported task gets its own answer.
            if is_lost
                && self
                    .table
                    .get_mut(number)
                    .is_some_and(|held| !held.is_reported())
            {
                self.leave(number, Some(&lost(result.status(), &result.error)));
            }
        }
        Ok(())
    }

    fn raise(&mut self, level: Level) {
        if level <= self.level {
            return;
        }
        if self.level == Level::Run {
            (self.options.tell)(Event::Draining(self.table.len()));
            self.source.room(0);
            self.give_back_waiting(STOPPED);
            // taskd takes back an answer that it has not written yet. One that is already in flight
            // arrives soon, as does that of a report that asks for tasks.
            let (get, source) = (self.get.take(), self.source.clone());
            let within = if source.brings_tasks() {
                ANSWER_COMES
            } else {
                Duration::ZERO
            };
            self.rest = Some(Box::pin(async move {
                let got = async { timeout(within, get?).await.ok()?.ok()? };
                let (got, rest) = tokio::join!(got, timeout(DRAIN_WITHIN, source.drain()));
                got.into_iter()
                    .flatten()
                    .chain(rest.unwrap_or_default())
                    .collect()
            }));
        }
        self.level = level;
        let limit = match level {
            Level::Now => LAST_REPORTS,
            Level::Run | Level::Drain => self.options.drain_limit,
        };
        self.deadline = Some(Instant::now() + limit);
        if level == Level::Now {
            self.table.abort_all();
        }
    }
}

/// Awaits the call in flight; pends forever if there is none.
async fn ready<T>(call: &mut Option<Pin<Box<dyn Future<Output = T> + Send>>>) -> T {
    match call {
        Some(call) => call.await,
        None => pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}

/// Removes what the handler has learnt of a limit key that its task does not have: taskd would
/// refuse the whole report.
fn check_limit(limit: &mut Option<pb::LimitReport>, info: &TaskInfo, tell: &Tell) {
    if limit.is_some() && info.limit_key().is_empty() {
        *limit = None;
        tell(Event::NoLimitKey(info));
    }
}

/// The reason why a task is lost.
fn lost(status: ItemStatus, error: &str) -> String {
    let status = status.as_str_name().trim_start_matches("ITEM_STATUS_");
    if error.is_empty() {
        status.to_owned()
    } else {
        format!("{status}: {error}")
    }
}

/// The message of a panic.
fn words(error: JoinError) -> String {
    let panic = error.into_panic();
    let text = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref().cloned());
    text.unwrap_or_default()
}
