//! Inserts any number of tasks as lines, which are read, stored and answered in batches while the
//! client still sends.
//!
//! The connection itself is the back pressure: taskd reads the next batch when the client has read
//! earlier answers, so a client must read while it sends. Memory holds [`IN_FLIGHT`] batches, which
//! count against the budget of all requests.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::IntoResponse,
};
use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::Bytes;
use futures::{
    Stream, StreamExt, TryStreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        State,
        json::insert,
        net::body::Cut,
        net::budget::Share,
        net::lines::{Line, Lines},
        tally::{Excess, Tally},
        traced,
    },
    answer::Answer,
    call::Call,
    problem::Problem,
    request,
};
use crate::{
    api::{self, Api, Wait},
    config::Settings,
    model::{Caller, InsertAnswer, InsertStatus, NewTask},
};

const BATCH: usize = 1000;
/// How many batches are in progress at a time: taskd reads lines while SQL stores earlier ones.
const IN_FLIGHT: usize = 3;
/// A client that sends nothing for this long counts as gone. A part of a line or a blank line is
/// enough.
const IDLE: Duration = Duration::from_secs(60);
/// How long a line may take after its first byte: as long as any other body. The whole request may
/// take any time.
const LINE_TIME: Duration = Duration::from_secs(120);

/// Answers each line with a line, in order.
///
/// If the store is busy, the first batch is refused and with it the request (429). Later batches
/// wait for the store; if it stays busy, the answer to each of their lines is `TRY_LATER`.
pub(super) async fn insert(call: Call) -> Answer {
    let Call {
        state,
        caller,
        share,
        headers,
        body,
        ..
    } = call;
    state.api.can_insert()?;
    let waiting = Waiting {
        _wait: state.api.wait(&caller)?,
        revoked: state.api.revoked(&caller),
    };
    let inserter = Inserter {
        api: Arc::clone(&state.api),
        caller,
        context: traced::caller_context(&headers),
    };
    let mut source = Source::new(&state, share, body, waiting);
    let first = match source.next().await {
        Read::Lines(mut batch) => {
            batch.store(&inserter).await?;
            batch
        }
        Read::Cut(why) => return Err(why),
        Read::End => source.batch(Vec::new()),
    };
    let answers = answers(inserter, first, source, state.stop);
    let body = Body::from_stream(answers.map(Ok::<_, std::convert::Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Inserts the lines of this request.
#[derive(Clone)]
struct Inserter {
    api: Arc<Api>,
    caller: Caller,
    /// The trace context of the request.
    context: Option<String>,
}

/// Why no line of a batch was stored.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Excess(#[from] Excess),
    #[error(transparent)]
    Api(#[from] api::Error),
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Excess(_) => Self::later(StatusCode::TOO_MANY_REQUESTS, refused),
            Refused::Api(error) => error.into(),
        }
    }
}

/// The answers to the first batch, which has some already, and to the batches after it.
fn answers(
    inserter: Inserter,
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
            // After a batch that was not stored, taskd begins no other one, and answers those in
            // flight.
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
        let (inserter, stop, failed) = (inserter.clone(), stop.clone(), Arc::clone(&ended));
        async move {
            let mut batch = match read {
                Ok(batch) => batch,
                Err(why) => {
                    let why = format!("{}; send the lines that have no answer again", why.detail());
                    return Bytes::from(line_of(&InsertAnswer::try_later(why)));
                }
            };
            batch.store_patiently(&inserter, &stop).await;
            if !batch.is_answered() {
                failed.store(true, Ordering::Relaxed);
            }
            batch.into_lines()
        }
    };
    stream::once(std::future::ready(Ok(first)))
        .chain(reads)
        .map(answer)
        .buffered(IN_FLIGHT)
}

/// The chunks of a body, with errors that an async reader can return.
type BodyChunks = BoxStream<'static, io::Result<Bytes>>;

/// The lines of a request.
struct Source {
    lines: Lines<BodyChunks>,
    /// When a part of the body last arrived.
    heard: Arc<Mutex<Instant>>,
    /// When the line began that has not ended yet.
    begun: Arc<Mutex<Option<Instant>>>,
    idle: Duration,
    line_time: Duration,
    share: Share,
    settings: Arc<Settings>,
    stop: CancellationToken,
    /// `None` if the wait is not counted.
    waiting: Option<Waiting>,
}

/// A request that waits for its next line.
struct Waiting {
    _wait: Wait,
    /// Resolves when the token of the request is no longer valid.
    revoked: BoxFuture<'static, api::Error>,
}

enum Read {
    Lines(Batch),
    /// The answer, if the client still reads it.
    Cut(Problem),
    End,
}

impl Source {
    fn new(state: &State, share: Share, body: Body, waiting: Waiting) -> Self {
        let chunks = body.into_data_stream().map_err(io::Error::other);
        Self {
            waiting: Some(waiting),
            ..Self::of(
                chunks,
                Arc::clone(&state.settings),
                share,
                state.stop.clone(),
            )
        }
    }

    fn of(
        chunks: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        settings: Arc<Settings>,
        share: Share,
        stop: CancellationToken,
    ) -> Self {
        let heard = Arc::new(Mutex::new(Instant::now()));
        let hearing = Arc::clone(&heard);
        let chunks = chunks
            .inspect(move |_| *hearing.lock() = Instant::now())
            .boxed();
        let dropped = share.clone();
        let dropped = move |bytes| dropped.shrink(bytes);
        let lines = Lines::new(chunks, settings.limits.max_request_bytes, dropped);
        let begun = lines.begun();
        Self {
            lines,
            heard,
            begun,
            idle: IDLE,
            line_time: LINE_TIME,
            share,
            settings,
            stop,
            waiting: None,
        }
    }

    async fn next(&mut self) -> Read {
        let Self {
            lines,
            heard,
            begun,
            idle,
            line_time,
            stop,
            waiting,
            ..
        } = &mut *self;
        // The time in which taskd was busy and did not read does not count.
        let now = Instant::now();
        *heard.lock() = now;
        if let Some(begun) = &mut *begun.lock() {
            *begun = now;
        }
        let batch = async {
            tokio::select! {
                biased;
                // Lines that arrived before the token was revoked come first. Each is answered with
                // the refusal.
                batch = lines.next_batch(BATCH) => Come::Lines(batch),
                late = late(heard, *idle, begun, *line_time) => Come::Late(late),
                error = revoked(waiting) => Come::Revoked(error),
            }
        };
        match stop.run_until_cancelled(batch).await {
            None => Read::Cut(Cut::Stopping.into()),
            Some(Come::Late(late)) => Read::Cut(late.into()),
            Some(Come::Revoked(error)) => Read::Cut(error.into()),
            Some(Come::Lines(Err(error))) => Read::Cut(request::cut_line(error)),
            Some(Come::Lines(Ok(lines))) if lines.is_empty() => Read::End,
            Some(Come::Lines(Ok(lines))) => Read::Lines(self.batch(lines)),
        }
    }

    fn batch(&mut self, lines: Vec<Line>) -> Batch {
        let answers = vec![InsertAnswer::try_later(String::new()); lines.len()];
        let room = Room {
            share: self.share.clone(),
            bytes: self.lines.take_consumed(),
            parts: 0,
        };
        Batch {
            lines,
            answers,
            room,
            settings: Arc::clone(&self.settings),
        }
    }
}

/// What happened first.
enum Come {
    Lines(Result<Vec<Line>, io::Error>),
    Late(Cut),
    Revoked(api::Error),
}

/// Resolves when the token of a request is no longer valid. Must not be polled again after that.
async fn revoked(waiting: &mut Option<Waiting>) -> api::Error {
    match waiting {
        Some(waiting) => (&mut waiting.revoked).await,
        None => std::future::pending().await,
    }
}

/// Resolves when no part of a body has arrived for `idle`, or when a line has not ended within
/// `line_time`. A part may be less than a line, or a blank one.
async fn late(
    heard: &Mutex<Instant>,
    idle: Duration,
    begun: &Mutex<Option<Instant>>,
    line_time: Duration,
) -> Cut {
    loop {
        let silent = *heard.lock() + idle;
        let line = begun.lock().map(|begun| begun + line_time);
        let now = Instant::now();
        if line.is_some_and(|end| now >= end) {
            return Cut::LongLine(line_time);
        }
        if now >= silent {
            return Cut::Late(idle);
        }
        // A line that begins during the sleep is due after it.
        sleep_until(line.map_or(silent, |line| line.min(silent))).await;
    }
}

/// Lines and their answers; `TRY_LATER` for a line that has none yet.
struct Batch {
    lines: Vec<Line>,
    answers: Vec<InsertAnswer>,
    room: Room,
    settings: Arc<Settings>,
}

/// A batch's part of the request's memory, until its answers are written.
struct Room {
    share: Share,
    /// The bytes of its lines, later those of its answers.
    bytes: usize,
    /// The memory of its decoded lines.
    parts: usize,
}

impl Room {
    fn become_answers(&mut self, bytes: usize) {
        self.bytes = self
            .share
            .change(self.bytes + std::mem::take(&mut self.parts), bytes);
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
        !self.answers.iter().any(is_open)
    }

    /// Stores the lines that have no answer yet, as far as memory allows. If it fails, nothing was
    /// stored.
    async fn store(&mut self, inserter: &Inserter) -> Result<(), Refused> {
        self.room.share.shrink(std::mem::take(&mut self.room.parts));
        let open: Vec<usize> = (0..self.lines.len())
            .filter(|place| is_open(&self.answers[*place]))
            .collect();
        let mut tally = Tally::new(&self.settings, &self.room.share, self.room.bytes);
        let mut items = Vec::with_capacity(open.len());
        for place in &open {
            match read(&self.lines[*place], &mut tally) {
                Ok(item) => items.push(item),
                Err(excess) if items.is_empty() => return Err(excess.into()),
                // The next call takes the rest.
                Err(_) => break,
            }
        }
        self.room.parts = tally.keep();
        traced::adopt(&mut items, inserter.context.as_deref());
        let answers = inserter.api.insert(&inserter.caller, items).await?;
        for (place, answer) in open.into_iter().zip(answers) {
            self.answers[place] = answer;
        }
        Ok(())
    }

    /// Retries until all lines have an answer, for about half a minute. Each attempt decodes the
    /// lines again, which is cheaper than a copy.
    async fn store_patiently(&mut self, inserter: &Inserter, stop: &CancellationToken) {
        let mut waits = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(Duration::from_millis(50))
            .with_max_delay(Duration::from_secs(2))
            .with_max_times(20)
            .build();
        while !self.is_answered() {
            if let Err(error) = self.store(inserter).await {
                let open = self.answers.iter_mut().filter(|answer| is_open(answer));
                open.for_each(|answer| answer.error = error.to_string());
                // The token was revoked, so waiting does not help.
                if matches!(&error, Refused::Api(error) if error.kind() == api::Kind::Unauthenticated)
                {
                    return;
                }
            } else if self.is_answered() {
                return;
            }
            let Some(wait) = waits.next() else { return };
            if stop
                .run_until_cancelled(tokio::time::sleep(wait))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    fn into_lines(self) -> Bytes {
        let (mut lines, mut room) = (Vec::with_capacity(self.answers.len() * 80), self.room);
        for (line, mut answer) in self.lines.iter().zip(self.answers) {
            if matches!(
                answer.status,
                InsertStatus::Rejected | InsertStatus::TryLater
            ) {
                answer
                    .error
                    .insert_str(0, &format!("line {}: ", line.number));
            }
            lines.extend(line_of(&answer));
        }
        room.become_answers(lines.len());
        Bytes::from_owner(Answers { lines, _room: room })
    }
}

fn is_open(answer: &InsertAnswer) -> bool {
    answer.status == InsertStatus::TryLater
}

fn read(line: &Line, tally: &mut Tally<'_>) -> Result<Result<NewTask, String>, Excess> {
    tally.line()?;
    match &line.text {
        Ok(text) => insert::counted_task(text, tally),
        Err(too_long) => Ok(Err(too_long.to_string())),
    }
}

fn line_of(answer: &InsertAnswer) -> Vec<u8> {
    let mut line = serde_json::to_vec(answer).expect("three strings are JSON");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, poll};
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::{super::super::net::budget::Budget, *};

    #[tokio::test]
    async fn a_part_that_has_no_line_is_heard_all_the_same() {
        const LONG: Duration = Duration::from_secs(3600);
        let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(8);
        let (settings, share) = (Arc::new(Settings::default()), Budget::new(1 << 20).share());
        let mut source = Source::of(
            ReceiverStream::new(receiver),
            settings,
            share,
            CancellationToken::new(),
        );
        source.idle = LONG;
        let heard = Arc::clone(&source.heard);
        let mut next = Box::pin(source.next());
        for part in ["\n", "{\"queue\":", " \r\n\n"] {
            assert!(poll!(&mut next).is_pending());
            let begun = Instant::now();
            *heard.lock() = begun.checked_sub(Duration::from_secs(1)).unwrap_or(begun);
            sender.send(Ok(part.into())).await.unwrap();
            if part.starts_with(' ') {
                break;
            }
            assert!(
                poll!(&mut next).is_pending() && *heard.lock() >= begun,
                "{part:?}"
            );
        }
        assert!(matches!(next.await, Read::Lines(batch) if batch.lines.len() == 1));
        source.idle = Duration::ZERO;
        assert!(
            matches!(source.next().await, Read::Cut(why) if why.detail().contains("was not here after 0ns"))
        );
    }

    #[tokio::test]
    async fn a_silence_ends_with_the_part_that_was_heard_last() {
        let heard = Mutex::new(Instant::now() + Duration::from_secs(1));
        let last = Instant::now() + Duration::from_millis(1100);
        let no_line = Mutex::new(None);
        let mut silence = Box::pin(late(&heard, Duration::ZERO, &no_line, Duration::ZERO));
        assert!((&mut silence).now_or_never().is_none());
        *heard.lock() = last;
        assert!(matches!(silence.await, Cut::Late(Duration::ZERO)));
        assert!(Instant::now() >= last);
    }

    #[tokio::test]
    async fn a_line_that_does_not_end_is_cut_however_often_a_part_of_it_comes() {
        let heard = Mutex::new(Instant::now() + Duration::from_secs(3600));
        let begun = Mutex::new(Some(Instant::now()));
        let line = late(
            &heard,
            Duration::from_secs(3600),
            &begun,
            Duration::from_millis(10),
        );
        assert!(matches!(line.await, Cut::LongLine(_)));
    }
}
