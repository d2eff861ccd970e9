//! Tasks as lines, of any number: read, stored and answered in batches, while the client still sends.
//!
//! Back pressure is the connection's own: the next batch is read when the client has taken the answers to earlier ones, so a
//! client must read while it sends. Memory holds [`IN_FLIGHT`] batches, which count against the budget of all requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream},
    http::header,
    response::{IntoResponse, Response},
};
use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        State,
        body::Cut,
        budget::Share,
        json::insert::{self, InsertAnswer},
        lines::{Line, Lines},
        tally::{Excess, Tally},
    },
    answer,
    problem::Problem,
    request,
};
use crate::{config::Settings, pipelines::discovery, wire::pb};

const BATCH: usize = 1000;
/// So that the next lines are read while SQL stores the ones before.
const IN_FLIGHT: usize = 3;
/// A client that sends no whole line for so long has gone.
const IDLE: Duration = Duration::from_secs(60);

/// Answers each line with a line, in order. A store that is busy from the start is an answer as a whole (429); later on it is
/// waited for, and when it stays busy the lines that it did not take are answered `TRY_LATER`.
pub(super) async fn insert(state: State, share: Share, body: Body) -> Result<Response, Problem> {
    let discovery = super::discovery(&state)?.clone();
    let mut source = Source::new(&state, share, body);
    let first = match source.next().await {
        Read::Lines(mut batch) => {
            batch.store(&discovery).await?;
            batch
        }
        Read::Cut(why) => return Err(why),
        Read::End => source.batch(Vec::new()),
    };
    let answers = answers(discovery, first, source, state.stop);
    let body = Body::from_stream(answers.map(Ok::<_, std::convert::Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// The answers to the first batch, which is answered already, perhaps in part, and to everything behind it.
fn answers(
    discovery: discovery::Handle,
    first: Batch,
    source: Source,
    stop: CancellationToken,
) -> impl Stream<Item = Bytes> {
    let failed = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&failed);
    let reads = stream::unfold(Some(source), move |source| {
        let failed = Arc::clone(&failed);
        async move {
            let mut source = source?;
            // Batches in flight are answered; none is begun after one that could not be stored.
            if failed.load(Ordering::Relaxed) {
                return None;
            }
            let read = source.next().await;
            if failed.load(Ordering::Relaxed) {
                return None;
            }
            match read {
                Read::Lines(batch) => Some((Ok(batch), Some(source))),
                Read::Cut(why) => Some((Err(why), None)),
                Read::End => None,
            }
        }
    });
    let answer = move |read: Result<Batch, Problem>| {
        let (discovery, stop, failed) = (discovery.clone(), stop.clone(), Arc::clone(&ended));
        async move {
            let mut batch = match read {
                Ok(batch) => batch,
                Err(why) => {
                    let why = format!("{}; send the lines that have no answer again", why.detail());
                    return Bytes::from(line_of(&try_later(why)));
                }
            };
            batch.store_patiently(&discovery, &stop).await;
            if !batch.is_answered() {
                failed.store(true, Ordering::Relaxed);
            }
            batch.into_lines()
        }
    };
    stream::once(std::future::ready(Ok(first))).chain(reads).map(answer).buffered(IN_FLIGHT)
}

/// The lines of a request.
struct Source {
    lines: Lines<BodyDataStream, axum::Error>,
    share: Share,
    settings: Arc<Settings>,
    stop: CancellationToken,
}

enum Read {
    Lines(Batch),
    /// For the client, if it still listens.
    Cut(Problem),
    End,
}

impl Source {
    fn new(state: &State, share: Share, body: Body) -> Self {
        let lines = Lines::new(body.into_data_stream(), state.settings.limits.max_request_bytes);
        Self { lines, share, settings: Arc::clone(&state.settings), stop: state.stop.clone() }
    }

    async fn next(&mut self) -> Read {
        let batch = tokio::time::timeout(IDLE, self.lines.next_batch(BATCH));
        match self.stop.run_until_cancelled(batch).await {
            None => Read::Cut(Cut::Stopping.into()),
            Some(Err(_)) => Read::Cut(Cut::Late(IDLE).into()),
            Some(Ok(Err(error))) => Read::Cut(request::cut(error)),
            Some(Ok(Ok(lines))) if lines.is_empty() => Read::End,
            Some(Ok(Ok(lines))) => Read::Lines(self.batch(lines)),
        }
    }

    fn batch(&mut self, lines: Vec<Line>) -> Batch {
        let results = vec![try_later(String::new()); lines.len()];
        let room = Room { share: self.share.clone(), bytes: self.lines.take_consumed(), parts: 0 };
        Batch { lines, results, room, settings: Arc::clone(&self.settings) }
    }
}

/// Lines and their answers; `TRY_LATER` is that of a line that has no other yet.
struct Batch {
    lines: Vec<Line>,
    results: Vec<pb::InsertResult>,
    room: Room,
    settings: Arc<Settings>,
}

/// A batch's part of the request's share, until its answers are written.
struct Room {
    share: Share,
    /// Of its lines, then of its answers.
    bytes: usize,
    /// What its lines are decoded to.
    parts: usize,
}

impl Room {
    fn become_answers(&mut self, bytes: usize) {
        self.bytes = self.share.change(self.bytes + std::mem::take(&mut self.parts), bytes);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.share.shrink(self.bytes + self.parts);
    }
}

/// Answers on their way to the client.
struct Answers {
    lines: Vec<u8>,
    _room: Room,
}

impl AsRef<[u8]> for Answers {
    fn as_ref(&self) -> &[u8] {
        &self.lines
    }
}

impl Batch {
    fn is_answered(&self) -> bool {
        !self.results.iter().any(is_open)
    }

    /// Stores the lines that have no answer, as many as there is room for. On `Err` nothing was stored.
    async fn store(&mut self, discovery: &discovery::Handle) -> Result<(), discovery::Error> {
        self.room.share.shrink(std::mem::take(&mut self.room.parts));
        let open: Vec<usize> = (0..self.lines.len()).filter(|place| is_open(&self.results[*place])).collect();
        let mut tally = Tally::new(&self.settings, &self.room.share, self.room.bytes);
        let mut items = Vec::with_capacity(open.len());
        for place in &open {
            match read(&self.lines[*place], &mut tally) {
                Ok(item) => items.push(item),
                Err(_) if items.is_empty() => {
                    let why = "the requests in hand have all that they may have (request_budget)";
                    return Err(discovery::Error::Busy(why.into()));
                }
                // The rest comes next.
                Err(_) => break,
            }
        }
        self.room.parts = tally.keep();
        for (place, result) in open.into_iter().zip(answer::insert(discovery, items).await?) {
            self.results[place] = result;
        }
        Ok(())
    }

    /// The same until all have an answer, again and again for about half a minute: the lines are read anew each time, which is
    /// cheaper than to keep a copy.
    async fn store_patiently(&mut self, discovery: &discovery::Handle, stop: &CancellationToken) {
        let mut waits = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(Duration::from_millis(50))
            .with_max_delay(Duration::from_secs(2))
            .with_max_times(20)
            .build();
        while !self.is_answered() {
            if let Err(error) = self.store(discovery).await {
                let open = self.results.iter_mut().filter(|result| is_open(result));
                open.for_each(|result| result.error = error.to_string());
            } else if self.is_answered() {
                return;
            }
            let Some(wait) = waits.next() else { return };
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
        }
    }

    fn into_lines(self) -> Bytes {
        let (mut lines, mut room) = (Vec::with_capacity(self.results.len() * 80), self.room);
        for (line, mut result) in self.lines.iter().zip(self.results) {
            if matches!(result.status(), pb::InsertStatus::Rejected | pb::InsertStatus::TryLater) {
                result.error.insert_str(0, &format!("line {}: ", line.number));
            }
            lines.extend(line_of(&result));
        }
        room.become_answers(lines.len());
        Bytes::from_owner(Answers { lines, _room: room })
    }
}

fn is_open(result: &pb::InsertResult) -> bool {
    result.status() == pb::InsertStatus::TryLater
}

fn read(line: &Line, tally: &mut Tally<'_>) -> Result<Result<pb::NewTask, String>, Excess> {
    tally.line()?;
    match &line.text {
        Ok(text) => insert::counted_task(text, tally),
        Err(too_long) => Ok(Err(too_long.to_string())),
    }
}

fn try_later(error: String) -> pb::InsertResult {
    pb::InsertResult { status: pb::InsertStatus::TryLater.into(), id: String::new(), error }
}

fn line_of(result: &pb::InsertResult) -> Vec<u8> {
    let mut line = serde_json::to_vec(&InsertAnswer::from(result)).expect("three strings are JSON");
    line.push(b'\n');
    line
}
