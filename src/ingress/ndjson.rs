//! Tasks as lines, of any number: read, stored and answered in batches, while the client still sends.
//!
//! Back pressure is the connection's own: the next batch is read when the client has taken the answers to earlier ones, so a
//! client must read while it sends. Memory holds [`IN_FLIGHT`] batches.

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
use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use tokio_util::sync::CancellationToken;

use super::{
    State, http,
    json::{self, InsertAnswer},
    lines::{Line, Lines},
    problem::Problem,
};
use crate::{discovery, pb};

const BATCH: usize = 1000;
/// So that the next lines are read while SQL stores the ones before.
const IN_FLIGHT: usize = 3;
/// A client that sends no whole line for so long has gone.
const IDLE: Duration = Duration::from_secs(60);
/// What lines are answered when the store stayed busy: unlike a rejected one, such a line is worth sending again.
const TRY_LATER: &str = "TRY_LATER";

/// Answers each line with a line, in order. A store that is busy from the start is an answer as a whole (429); later on it is
/// waited for.
pub(super) async fn insert(state: State, body: Body) -> Result<Response, Problem> {
    let discovery = http::discovery(&state)?.clone();
    let mut source = Source::new(&state, body);
    let first = match source.next().await {
        Read::Lines(lines) => Bytes::from(store(&discovery, &lines).await?),
        Read::Broken(why) => return Err(Problem::bad_request(why)),
        Read::End => Bytes::new(),
    };
    let answers = stream::once(std::future::ready(first)).chain(rest(discovery, source, state.stop));
    let body = Body::from_stream(answers.map(Ok::<_, std::convert::Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// The answers to everything behind the first batch.
fn rest(discovery: discovery::Handle, source: Source, stop: CancellationToken) -> impl Stream<Item = Bytes> {
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
                Read::Lines(lines) => Some((Ok(lines), Some(source))),
                Read::Broken(why) => Some((Err(why), None)),
                Read::End => None,
            }
        }
    });
    let answer = move |read: Result<Vec<Line>, String>| {
        let (discovery, stop, failed) = (discovery.clone(), stop.clone(), Arc::clone(&ended));
        async move {
            let lines = match read {
                Ok(lines) => lines,
                Err(why) => return Bytes::from(line_of(&InsertAnswer { status: TRY_LATER, id: "", error: &why })),
            };
            let stored = store_patiently(&discovery, &lines, &stop).await;
            Bytes::from(stored.unwrap_or_else(|error| {
                failed.store(true, Ordering::Relaxed);
                not_stored(&lines, &error)
            }))
        }
    };
    reads.map(answer).buffered(IN_FLIGHT)
}

/// The lines of a request.
struct Source {
    lines: Lines<BodyDataStream, axum::Error>,
    stop: CancellationToken,
}

enum Read {
    Lines(Vec<Line>),
    /// For the client, if it still listens.
    Broken(String),
    End,
}

impl Source {
    fn new(state: &State, body: Body) -> Self {
        let lines = Lines::new(body.into_data_stream(), state.settings.limits.max_request_bytes);
        Self { lines, stop: state.stop.clone() }
    }

    async fn next(&mut self) -> Read {
        let batch = tokio::time::timeout(IDLE, self.lines.next_batch(BATCH));
        match self.stop.run_until_cancelled(batch).await {
            None => Read::Broken("this process is stopping; send the lines that have no answer again".into()),
            Some(Err(_)) => Read::Broken(format!("no line came for {IDLE:?}")),
            Some(Ok(Err(error))) => Read::Broken(format!("the body broke off: {error}")),
            Some(Ok(Ok(lines))) if lines.is_empty() => Read::End,
            Some(Ok(Ok(lines))) => Read::Lines(lines),
        }
    }
}

/// Stores a batch and writes its answers.
async fn store(discovery: &discovery::Handle, lines: &[Line]) -> Result<Vec<u8>, discovery::Error> {
    let items = lines.iter().map(read).collect();
    let mut results = http::insert(discovery, items).await?;
    let mut answers = Vec::with_capacity(results.len() * 80);
    for (line, result) in lines.iter().zip(&mut results) {
        if result.status() == pb::InsertStatus::Rejected {
            result.error.insert_str(0, &format!("line {}: ", line.number));
        }
        answers.extend(line_of(&InsertAnswer::from(&*result)));
    }
    Ok(answers)
}

/// The same, again and again for about half a minute: the lines are read anew each time, which is cheaper than to keep a copy.
async fn store_patiently(
    discovery: &discovery::Handle,
    lines: &[Line],
    stop: &CancellationToken,
) -> Result<Vec<u8>, discovery::Error> {
    let waits = ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(2))
        .with_max_times(20);
    (|| store(discovery, lines)).retry(waits).when(|_| !stop.is_cancelled()).await
}

fn read(line: &Line) -> Result<pb::NewTask, String> {
    match &line.text {
        Ok(text) => json::new_task(text),
        Err(too_long) => Err(too_long.to_string()),
    }
}

fn not_stored(lines: &[Line], error: &discovery::Error) -> Vec<u8> {
    let answer = |line: &Line| {
        line_of(&InsertAnswer { status: TRY_LATER, id: "", error: &format!("line {}: {error}", line.number) })
    };
    lines.iter().flat_map(answer).collect()
}

fn line_of(answer: &InsertAnswer<'_>) -> Vec<u8> {
    let mut line = serde_json::to_vec(answer).expect("three strings are JSON");
    line.push(b'\n');
    line
}
