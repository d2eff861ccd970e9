//! Spans of tasks. taskd knows the times and the parent of each hop, so it builds finished spans
//! itself, and only for sampled tasks.
//!
//! [`install`] gives the process one bounded queue of spans, which [`Exporter`] empties. Nothing
//! here waits: a span that finds the queue full is counted and dropped. Without an endpoint nothing
//! is installed, and each hop costs one atomic load.

mod export;
mod span;
mod transport;

use std::{
    num::NonZeroU32,
    sync::OnceLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use tokio::sync::mpsc;

pub use self::{
    export::Exporter,
    span::{Hop, Span},
};
use super::{
    error::Error,
    metrics::{self, SpanOutcome},
};
use crate::{
    config::Traces,
    model::{LeaseNumber, LeaseTrace, QueueName, SpanId, TaskId, TraceContext, TraceId},
};

/// The most spans that wait for the exporter, about 8 MiB.
const QUEUE: usize = 16_384;

static SINK: OnceLock<Sink> = OnceLock::new();

/// How many tasks per second, and in one burst, callers may have traced in this process. The right
/// to insert does not include filling the queue of spans, which all callers share.
const OF_CALLERS: NonZeroU32 = NonZeroU32::new(1000).unwrap();

/// Where this process sends its spans, and which tasks it samples.
struct Sink {
    of_callers: DefaultDirectRateLimiter,
    spans: mpsc::Sender<Span>,
    /// A task is sampled if a random `u64` is below this.
    sample_below: u64,
    sample_all: bool,
}

/// Installs the queue of spans, once per process. Returns `None` without an endpoint.
pub fn install(settings: &Traces) -> Result<Option<Exporter>, Error> {
    if settings.endpoint.is_empty() {
        return Ok(None);
    }
    let (spans, receiver) = mpsc::channel(QUEUE);
    let exporter = Exporter::new(settings, receiver)?;
    let sample_below = (settings.sample * u64::MAX as f64) as u64;
    let of_callers = RateLimiter::direct(Quota::per_second(OF_CALLERS));
    let sink = Sink {
        of_callers,
        spans,
        sample_below,
        sample_all: settings.sample >= 1.0,
    };
    SINK.set(sink).map_err(|_| Error::Installed)?;
    Ok(Some(exporter))
}

/// The start time for a span. It comes from this machine's clock: a collector shows it to people,
/// and nothing compares it.
pub fn now() -> SystemTime {
    SystemTime::now()
}

/// True if this process exports spans.
pub fn is_on() -> bool {
    SINK.get().is_some()
}

/// The trace of a sampled task, for a log line.
pub fn trace_of(traceparent: &str) -> Option<tracing::field::DisplayValue<TraceId>> {
    TraceContext::sampled(traceparent).map(|context| tracing::field::display(context.trace))
}

/// Hands a span to the exporter. Drops it if the queue is full.
pub fn record(span: Span) {
    if let Some(sink) = SINK.get()
        && sink.spans.try_send(span).is_err()
    {
        metrics::traces_spans(SpanOutcome::Dropped, 1);
    }
}

/// A span that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    context: TraceContext,
    parent: Option<SpanId>,
    link: Option<TraceContext>,
    start: SystemTime,
}

impl Begun {
    /// Begins a child of a sampled context. Returns `None` if the context is not sampled or this
    /// process exports nothing.
    pub fn child_of(traceparent: &str) -> Option<Self> {
        let parent = TraceContext::sampled(traceparent).filter(|_| is_on())?;
        Some(Self::child(parent))
    }

    /// Begins a child of the sampled context that came with an inserted task. Beyond a number of
    /// tasks per second the task is not traced, and `traceparent` says so from then on.
    pub fn child_of_caller(traceparent: &mut String) -> Option<Self> {
        let parent = TraceContext::sampled(traceparent)?;
        let sink = SINK.get()?;
        if !sink.sample_all && sink.of_callers.check().is_err() {
            metrics::traces_spans(SpanOutcome::Dropped, 1);
            *traceparent = TraceContext {
                flags: parent.flags & !1,
                ..parent
            }
            .to_string();
            return None;
        }
        Some(Self::child(parent))
    }

    /// Begins a child of a context that is known to be sampled, in a process that exports spans.
    pub fn child(parent: TraceContext) -> Self {
        let context = parent.at(new_span());
        Self {
            context,
            parent: Some(parent.span),
            link: None,
            start: SystemTime::now(),
        }
    }

    /// Begins a new trace, for the fraction of tasks that is to be sampled.
    pub fn root() -> Option<Self> {
        let sink = SINK.get()?;
        if !sink.sample_all && (sink.sample_below == 0 || random() >= sink.sample_below) {
            return None;
        }
        let trace = (u128::from(random()) << 64) | u128::from(random() | 1);
        let context = TraceContext {
            trace: TraceId(trace.to_be_bytes()),
            span: new_span(),
            flags: 1,
        };
        Some(Self {
            context,
            parent: None,
            link: None,
            start: SystemTime::now(),
        })
    }

    /// Adds a link to another span.
    pub fn linked(self, link: Option<TraceContext>) -> Self {
        Self { link, ..self }
    }

    pub fn since(self, start: SystemTime) -> Self {
        Self { start, ..self }
    }

    /// The context of this span, which is the parent of those that follow.
    pub fn context(&self) -> TraceContext {
        self.context
    }

    /// Ends the span now. `error` is empty if the hop went well.
    pub fn end(
        self,
        hop: Hop,
        task: TaskId,
        queue: &QueueName,
        outcome: &'static str,
        error: String,
    ) {
        record(self.ended(hop, task, queue, outcome, error));
    }

    /// Ends the span as [`Self::end`] does, for a caller that adds to it.
    pub fn ended(
        self,
        hop: Hop,
        task: TaskId,
        queue: &QueueName,
        outcome: &'static str,
        error: String,
    ) -> Span {
        let Self {
            context,
            parent,
            link,
            start,
        } = self;
        let queue = queue.clone();
        let end = SystemTime::now();
        let worker = None;
        let attempt = None;
        Span {
            hop,
            context,
            parent,
            link,
            start,
            end,
            task,
            queue,
            worker,
            attempt,
            outcome,
            error,
        }
    }
}

/// How a worker's report ended its lease.
pub struct WorkEnd<'a> {
    pub task: TaskId,
    pub queue: &'a QueueName,
    pub worker: &'a str,
    pub attempt: u32,
    pub lease: LeaseNumber,
    pub outcome: &'static str,
    pub error: String,
}

/// Records the work under a lease, from its claim to now.
pub fn record_work(trace: &LeaseTrace, end: WorkEnd<'_>) {
    if !is_on() {
        return;
    }
    let WorkEnd {
        task,
        queue,
        worker,
        attempt,
        lease,
        outcome,
        error,
    } = end;
    record(Span {
        hop: Hop::Work,
        context: trace.work,
        parent: Some(claim_of(trace.work, lease)),
        link: trace.first.map(|first| trace.work.at(first)),
        start: UNIX_EPOCH + Duration::from_micros(trace.leased_unix_us),
        end: SystemTime::now(),
        task,
        queue: queue.clone(),
        worker: Some(worker.to_owned()),
        attempt: Some(attempt),
        outcome,
        error,
    });
}

/// Returns the span id of the claim that led to this work. It is derived from the lease number,
/// because the process that gets the report knows only the lease token, and because an attempt has
/// several claims if its lease came back at no cost.
pub fn claim_of(work: TraceContext, lease: LeaseNumber) -> SpanId {
    SpanId::derived(
        work,
        "claim",
        &[&lease.generation.to_be_bytes(), &lease.grant.to_be_bytes()],
    )
}

/// A new span id, which is not zero.
fn new_span() -> SpanId {
    SpanId((random() | 1).to_be_bytes())
}

fn random() -> u64 {
    // The lower half of a v4 UUID begins with the two fixed bits of the variant, which the shift
    // drops. The upper half of another UUID fills the gap; its fixed bits of the version do no
    // harm, since they are combined with random ones.
    uuid::Uuid::new_v4().as_u64_pair().1 << 2 ^ uuid::Uuid::new_v4().as_u64_pair().0
}
