//! The reports of a worker, on their way to taskd: what comes while a call is under way goes with the next one.

use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};

use backon::BackoffBuilder as _;
use prost::Message;
use tokio::task::JoinSet;

use crate::{
    client::WAITS,
    error::Error,
    event::{Event, Tell},
    held::Number,
    pb,
    source::Source,
};

/// The items of a call, and their bytes; a single item may have more.
const MOST_ITEMS: usize = 500;
const MOST_BYTES: usize = 2 << 20;

/// Reports that wait, and the calls under way: at most one for completions and one for rejections.
pub(crate) struct Reports<S> {
    source: Arc<S>,
    tell: Tell,
    completions: Lane<pb::Completion>,
    rejections: Lane<pb::Rejection>,
    calls: JoinSet<Result<Answered, Error>>,
}

struct Lane<R> {
    waiting: VecDeque<(Number, R)>,
    is_busy: bool,
}

/// The answers to a call.
pub(crate) struct Answered {
    pub(crate) kind: Kind,
    pub(crate) items: Vec<(Number, pb::ItemResult)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completions,
    Rejections,
}

impl<S: Source> Reports<S> {
    pub(crate) fn new(source: Arc<S>, tell: Tell) -> Self {
        let (completions, rejections) = (Lane::default(), Lane::default());
        Self { source, tell, completions, rejections, calls: JoinSet::new() }
    }

    pub(crate) fn complete(&mut self, number: Number, completion: pb::Completion) {
        self.completions.waiting.push_back((number, completion));
    }

    pub(crate) fn reject(&mut self, number: Number, rejection: pb::Rejection) {
        self.rejections.waiting.push_back((number, rejection));
    }

    /// Sends what waits, if no call of its kind is under way.
    pub(crate) fn send(&mut self) {
        if let Some(batch) = self.completions.batch() {
            self.calls.spawn(send(self.source.clone(), Kind::Completions, batch, self.tell.clone()));
        }
        if let Some(batch) = self.rejections.batch() {
            self.calls.spawn(send(self.source.clone(), Kind::Rejections, batch, self.tell.clone()));
        }
    }

    /// The next answers. `None`: no call is under way.
    pub(crate) async fn answered(&mut self) -> Option<Result<Answered, Error>> {
        // A call is never aborted, and its code does not panic.
        let answered = self.calls.join_next().await?.ok()?;
        if let Ok(answered) = &answered {
            match answered.kind {
                Kind::Completions => self.completions.is_busy = false,
                Kind::Rejections => self.rejections.is_busy = false,
            }
        }
        Some(answered)
    }
}

impl<R> Default for Lane<R> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), is_busy: false }
    }
}

impl<R: Message> Lane<R> {
    fn batch(&mut self) -> Option<Vec<(Number, R)>> {
        if self.is_busy || self.waiting.is_empty() {
            return None;
        }
        let mut bytes = 0;
        let weights = self.waiting.iter().take(MOST_ITEMS).map(|(_, item)| item.encoded_len());
        let fits = |weight: &usize| {
            bytes += weight;
            bytes <= MOST_BYTES
        };
        let count = weights.take_while(fits).count();
        self.is_busy = true;
        Some(self.waiting.drain(..count.max(1)).collect())
    }
}

/// A report, and the call that takes it.
trait Report: Message + Clone + 'static {
    fn send<S: Source>(source: &S, all: Vec<Self>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send;
}

impl Report for pb::Completion {
    fn send<S: Source>(source: &S, all: Vec<Self>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send {
        source.complete(all)
    }
}

impl Report for pb::Rejection {
    fn send<S: Source>(source: &S, all: Vec<Self>) -> impl Future<Output = Result<Vec<pb::ItemResult>, Error>> + Send {
        source.reject(all)
    }
}

/// Sends a batch until taskd has answered each item. A report that arrives twice counts once.
async fn send<S: Source, R: Report>(
    source: Arc<S>,
    kind: Kind,
    batch: Vec<(Number, R)>,
    tell: Tell,
) -> Result<Answered, Error> {
    let mut items = Vec::with_capacity(batch.len());
    let mut calls = VecDeque::from([batch]);
    let mut waits = WAITS.build();
    while let Some(batch) = calls.pop_front() {
        let all = batch.iter().map(|(_, report)| report.clone()).collect();
        match R::send(&*source, all).await {
            Ok(results) => {
                let (mut again, mut results) = (Vec::new(), results.into_iter());
                for (number, report) in batch {
                    match results.next() {
                        Some(result) if result.status() != pb::ItemStatus::TryLater => items.push((number, result)),
                        _ => again.push((number, report)),
                    }
                }
                if again.is_empty() {
                    waits = WAITS.build();
                    continue;
                }
                calls.push_back(again);
            }
            Err(error) if error.may_pass() => {
                tell(Event::Away(&error));
                calls.push_front(batch);
            }
            // One of the items spoils the call.
            Err(error) if error.is_of_items() && batch.len() > 1 => {
                calls.extend(batch.into_iter().map(|item| vec![item]));
                continue;
            }
            Err(error) if error.is_of_items() => {
                let status = pb::ItemStatus::Invalid.into();
                let result = pb::ItemResult { status, error: error.to_string(), ..Default::default() };
                items.extend(batch.into_iter().map(|(number, _)| (number, result.clone())));
                continue;
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(waits.next().unwrap_or(Duration::from_secs(1))).await;
    }
    Ok(Answered { kind, items })
}
