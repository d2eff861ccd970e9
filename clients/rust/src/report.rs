//! Sends the reports of a worker to taskd. Reports that arrive while a call is in progress go with
//! the next call.
//!
//! A shard that is unavailable does not delay the reports of others: if taskd asks for a report to
//! be sent again later, the report waits briefly and then goes to the end of the list.

use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};

use backon::{BackoffBuilder as _, ExponentialBackoff};
use prost::Message;
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep_until},
};

use crate::{
    client::WAITS,
    error::Error,
    event::{Event, Tell},
    held::Number,
    pb,
    source::Source,
};

/// The most items in a call, and the most bytes; a single larger item is sent alone.
const MOST_ITEMS: usize = 500;
const MOST_BYTES: usize = 2 << 20;
/// How long to wait after a failed call before the next one: taskd, or one shard, may be
/// unavailable.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a call with completions may also wait for tasks. After that the completions are sent
/// again without asking, so that the worker can ask in a separate call.
const ASKS_FOR: Duration = Duration::from_secs(1);

/// Reports that wait, and the calls in flight: at most one of each kind.
pub(crate) struct Reports<S> {
    source: Arc<S>,
    tell: Tell,
    completions: Lane<pb::Completion>,
    rejections: Lane<pb::Rejection>,
    /// Tasks that were not started.
    returns: Lane<pb::Rejection>,
    /// Set if the call with completions that is in flight was sent to ask for tasks, too.
    asking: Option<Asking>,
}

struct Asking {
    until: Instant,
    /// Dropping it makes the call stop asking.
    goes_on: Option<oneshot::Sender<()>>,
}

/// The answers to a call.
pub(crate) struct Answered {
    pub(crate) kind: Kind,
    pub(crate) items: Vec<(Number, pb::ItemResult)>,
    pub(crate) tasks: Tasks,
}

/// The tasks that came with the answers to completions.
#[derive(Debug, Default)]
pub(crate) enum Tasks {
    #[default]
    NotAsked,
    Came(Vec<pb::LeasedTask>),
    /// The call was refused, failed, or took too long.
    InVain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completions,
    Rejections,
}

struct Lane<R> {
    waiting: VecDeque<(Number, R)>,
    /// How many of the first waiting reports are sent one per call, because one of them made the
    /// call with all of them fail.
    alone: usize,
    /// To be sent again later: taskd asked for that, or their call failed.
    later: Vec<(Number, R)>,
    /// When those in `later` move back to `waiting`.
    due: Option<Instant>,
    /// When the next call may be made, after one that failed.
    free: Option<Instant>,
    waits: ExponentialBackoff,
    /// The call in flight; at most one.
    calls: JoinSet<Called<R>>,
}

struct Called<R> {
    batch: Vec<(Number, R)>,
    answer: CallAnswer,
}

/// A result per report, and the tasks of a call that asked.
type CallAnswer = Result<(Vec<pb::ItemResult>, Option<Vec<pb::LeasedTask>>), Error>;

/// The results of a call whose items need no further report, and the tasks that it brought.
#[derive(Default)]
struct Noted {
    items: Vec<(Number, pb::ItemResult)>,
    tasks: Option<Vec<pb::LeasedTask>>,
}

impl<S: Source> Reports<S> {
    pub(crate) fn new(source: Arc<S>, tell: Tell) -> Self {
        let (completions, rejections, returns) = (Lane::new(), Lane::new(), Lane::new());
        Self {
            source,
            tell,
            completions,
            rejections,
            returns,
            asking: None,
        }
    }

    pub(crate) fn complete(&mut self, number: Number, completion: pb::Completion) {
        self.completions.waiting.push_back((number, completion));
    }

    pub(crate) fn reject(&mut self, number: Number, rejection: pb::Rejection) {
        self.rejections.waiting.push_back((number, rejection));
    }

    /// Gives back a task that was not started.
    pub(crate) fn give_back(&mut self, number: Number, rejection: pb::Rejection) {
        self.returns.waiting.push_back((number, rejection));
    }

    /// Sends the waiting reports of each kind that has no call in flight. A call with completions
    /// also asks for up to `most` tasks.
    pub(crate) fn send(&mut self, most: usize) {
        let source = &self.source;
        let none = |results| (results, None);
        let (goes_on, ends) = oneshot::channel();
        let completes = self.completions.send(|all| {
            let source = source.clone();
            async move {
                if most > 0 {
                    tokio::select! {
                        biased;
                        answer = source.complete_and_get(all.clone(), most) => match answer {
                            // The request for tasks may be at fault: report without it.
                            Err(error) if !error.may_pass() => {}
                            answer => return answer.map(|(results, tasks)| (results, Some(tasks))),
                        },
                        // It is safe to drop the call: taskd takes back undelivered tasks at no
                        // cost, and a report that arrives twice counts once.
                        _ = ends => {}
                    }
                }
                source.complete(all).await.map(none)
            }
        });
        if completes && most > 0 {
            self.asking = Some(Asking {
                until: Instant::now() + ASKS_FOR,
                goes_on: Some(goes_on),
            });
        }
        self.rejections.send(|all| {
            let source = source.clone();
            async move { source.reject(all).await.map(none) }
        });
        self.returns.send(|all| {
            let source = source.clone();
            async move { source.give_back(all).await.map(none) }
        });
    }

    /// True while a call in flight asks for tasks.
    pub(crate) fn asks(&self) -> bool {
        self.asks_until().is_some()
    }

    fn asks_until(&self) -> Option<Instant> {
        self.asking
            .as_ref()
            .filter(|asking| asking.goes_on.is_some())
            .map(|asking| asking.until)
    }

    /// Makes the call in flight stop asking for tasks: from now on it only reports.
    pub(crate) fn stop_asking(&mut self) {
        if let Some(asking) = &mut self.asking {
            asking.goes_on = None;
        }
    }

    /// Waits for the next answers. Returns no items if it is time to send again, and `None` if
    /// no call is in flight or waiting to be repeated.
    pub(crate) async fn answered(&mut self) -> Option<Result<Answered, Error>> {
        let until = self.asks_until();
        let (kind, noted) = tokio::select! {
            Some(noted) = self.completions.answered(&self.tell) => (Kind::Completions, noted),
            Some(noted) = self.rejections.answered(&self.tell) => (Kind::Rejections, noted),
            Some(noted) = self.returns.answered(&self.tell) => (Kind::Rejections, noted),
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                self.stop_asking();
                (Kind::Completions, Ok(Noted::default()))
            }
            else => return None,
        };
        // Only if the call has ended: otherwise it was merely time to send again.
        let asked = self.completions.calls.is_empty() && self.asking.take().is_some();
        let tasks = |came: Option<_>| match came {
            Some(came) => Tasks::Came(came),
            None if asked => Tasks::InVain,
            None => Tasks::NotAsked,
        };
        Some(noted.map(|Noted { items, tasks: came }| Answered {
            kind,
            items,
            tasks: tasks(came),
        }))
    }
}

impl<R: Message + Clone + 'static> Lane<R> {
    fn new() -> Self {
        let (waiting, later, calls) = (VecDeque::new(), Vec::new(), JoinSet::new());
        Self {
            waiting,
            alone: 0,
            later,
            due: None,
            free: None,
            waits: WAITS.build(),
            calls,
        }
    }

    /// Starts a call if none is in flight and something waits. Returns whether it did.
    fn send<F>(&mut self, call: impl FnOnce(Vec<R>) -> F) -> bool
    where
        F: Future<Output = CallAnswer> + Send + 'static,
    {
        if !self.calls.is_empty() || self.waiting.is_empty() || self.free.is_some() {
            return false;
        }
        let batch = self.batch();
        let answer = call(batch.iter().map(|(_, report)| report.clone()).collect());
        self.calls.spawn(async move {
            Called {
                batch,
                answer: answer.await,
            }
        });
        true
    }

    fn batch(&mut self) -> Vec<(Number, R)> {
        if self.alone > 0 {
            self.alone -= 1;
            return self.waiting.drain(..1).collect();
        }
        let mut bytes = 0;
        let weights = self
            .waiting
            .iter()
            .take(MOST_ITEMS)
            .map(|(_, item)| item.encoded_len());
        let fits = |weight: &usize| {
            bytes += weight;
            bytes <= MOST_BYTES
        };
        let count = weights.take_while(fits).count();
        self.waiting.drain(..count.max(1)).collect()
    }

    async fn answered(&mut self, tell: &Tell) -> Option<Result<Noted, Error>> {
        let wake = self.due.into_iter().chain(self.free).min();
        tokio::select! {
            // A call is never aborted, and its code does not panic.
            Some(Ok(called)) = self.calls.join_next() => Some(self.note(called, tell)),
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                self.wake();
                Some(Ok(Noted::default()))
            }
            else => None,
        }
    }

    fn wake(&mut self) {
        let now = Instant::now();
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            self.waiting.extend(self.later.drain(..));
        }
        self.free = self.free.filter(|free| *free > now);
    }

    /// Sorts the reports by their answers. A report that arrives twice counts once, so those
    /// without an answer are sent again.
    fn note(&mut self, called: Called<R>, tell: &Tell) -> Result<Noted, Error> {
        let Called { batch, answer } = called;
        let (mut items, mut tasks) = (Vec::with_capacity(batch.len()), None);
        let mut again = Vec::new();
        match answer {
            Ok((results, came)) => {
                tasks = came;
                let mut results = results.into_iter();
                for (number, report) in batch {
                    match results.next() {
                        Some(result) if result.status() != pb::ItemStatus::TryLater => {
                            items.push((number, result))
                        }
                        _ => again.push((number, report)),
                    }
                }
                if again.is_empty() {
                    self.waits = WAITS.build();
                }
            }
            Err(error) if error.may_pass() => {
                tell(Event::Away(&error));
                again = batch;
                self.free = Some(Instant::now() + PAUSE);
            }
            // One of the items makes the whole call fail: send each alone to find it.
            Err(error) if error.is_of_items() && batch.len() > 1 => {
                self.alone += batch.len();
                batch
                    .into_iter()
                    .rev()
                    .for_each(|item| self.waiting.push_front(item));
            }
            Err(error) if error.is_of_items() => {
                let status = pb::ItemStatus::Invalid.into();
                let result = pb::ItemResult {
                    status,
                    error: error.to_string(),
                    ..Default::default()
                };
                items.extend(
                    batch
                        .into_iter()
                        .map(|(number, _)| (number, result.clone())),
                );
            }
            Err(error) => return Err(error),
        }
        if !again.is_empty() {
            self.later.extend(again);
            let wait = self.waits.next().unwrap_or(Duration::from_secs(1));
            self.due.get_or_insert_with(|| Instant::now() + wait);
        }
        Ok(Noted { items, tasks })
    }
}
