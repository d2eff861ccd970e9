//! Exports spans to an OTLP collector, in batches.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span as OtlpSpan, Status, span, status::StatusCode},
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    span::{Hop, Span},
    transport::{Refused, Transport},
};
use crate::{
    config::Traces,
    telemetry::{
        error::Error,
        metrics::{self, SpanOutcome},
    },
};

/// The most spans of one call.
const BATCH: usize = 512;
/// How long the first span of a batch waits for more.
const GATHER: Duration = Duration::from_secs(1);
/// How long a batch is retried. Meanwhile the queue fills up, and then spans are dropped.
const TRY_FOR: Duration = Duration::from_secs(15);
/// The wait before each retry.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long exporting the last spans may take at the stop.
const FLUSH_WITHIN: Duration = Duration::from_secs(3);

/// Sends the spans of the queue to a collector.
pub struct Exporter {
    transport: Transport,
    timeout: Duration,
    resource: Resource,
    spans: mpsc::Receiver<Span>,
    /// True if the last call failed, which has been logged.
    is_failing: bool,
}

impl Exporter {
    pub(super) fn new(settings: &Traces, spans: mpsc::Receiver<Span>) -> Result<Self, Error> {
        let mut attributes = vec![
            text("service.name", "taskd"),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("service.instance.id", Uuid::new_v4().to_string()),
        ];
        for (key, value) in &settings.resource {
            attributes.retain(|one| one.key != *key);
            attributes.push(text(key, value));
        }
        let resource = Resource {
            attributes,
            ..Resource::default()
        };
        let transport = Transport::new(settings)?;
        Ok(Self {
            transport,
            timeout: settings.timeout,
            resource,
            spans,
            is_failing: false,
        })
    }

    /// Exports until the stop, and then the spans that are left, as far as time allows.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH);
        while stop
            .run_until_cancelled(self.gather(&mut batch))
            .await
            .is_some()
        {
            let until = Instant::now() + TRY_FOR;
            // At the stop the batch is kept, and the flush below tries it once more.
            if stop
                .run_until_cancelled(self.export_until(&batch, until))
                .await
                .is_none()
            {
                break;
            }
            batch.clear();
        }
        let deadline = Instant::now() + FLUSH_WITHIN;
        loop {
            while batch.len() < BATCH {
                let Ok(span) = self.spans.try_recv() else {
                    break;
                };
                batch.push(span);
            }
            if batch.is_empty() {
                return;
            }
            let is_exported = timeout_at(deadline, self.export(&batch))
                .await
                .is_ok_and(|sent| sent.is_ok());
            if !is_exported {
                let left = batch.len() + self.spans.len();
                metrics::traces_spans(SpanOutcome::Failed, left);
                tracing::warn!("the last {left} spans did not reach the collector");
                return;
            }
            batch.clear();
        }
    }

    /// Fills the batch. If the future is dropped, the batch keeps the spans that it has.
    async fn gather(&mut self, batch: &mut Vec<Span>) {
        while batch.is_empty() {
            if self.spans.recv_many(batch, BATCH).await == 0 {
                // Cannot happen: the sender is in a static.
                return std::future::pending().await;
            }
        }
        let deadline = Instant::now() + GATHER;
        while batch.len() < BATCH {
            let Ok(count) =
                timeout_at(deadline, self.spans.recv_many(batch, BATCH - batch.len())).await
            else {
                return;
            };
            if count == 0 {
                return;
            }
        }
    }

    /// Retries the export until it succeeds, the collector refuses it for good, or time is up.
    async fn export_until(&mut self, batch: &[Span], until: Instant) {
        loop {
            let Err(Refused { why, is_final }) = self.export(batch).await else {
                return;
            };
            if !self.is_failing {
                self.is_failing = true;
                tracing::warn!("cannot export spans, and drops those that find no room: {why}");
            }
            if is_final || Instant::now() + TRY_AGAIN_AFTER >= until {
                return metrics::traces_spans(SpanOutcome::Failed, batch.len());
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    async fn export(&mut self, batch: &[Span]) -> Result<(), Refused> {
        let spans = batch.iter().map(otlp).collect();
        let scope = InstrumentationScope {
            name: "taskd".to_owned(),
            ..Default::default()
        };
        let scope_spans = vec![ScopeSpans {
            scope: Some(scope),
            spans,
            ..Default::default()
        }];
        let resource = Some(self.resource.clone());
        let resource_spans = vec![ResourceSpans {
            resource,
            scope_spans,
            ..Default::default()
        }];
        let sent = self
            .transport
            .send(ExportTraceServiceRequest { resource_spans }, self.timeout);
        let no_answer = || Refused {
            why: "no answer in time".to_owned(),
            is_final: false,
        };
        let refused = tokio::time::timeout(self.timeout, sent)
            .await
            .map_err(|_| no_answer())??;
        let refused = usize::try_from(refused).unwrap_or(0).min(batch.len());
        metrics::traces_spans(SpanOutcome::Failed, refused);
        metrics::traces_spans(SpanOutcome::Exported, batch.len() - refused);
        if std::mem::take(&mut self.is_failing) {
            tracing::info!("spans are exported again");
        }
        Ok(())
    }
}

/// Converts a span to OTLP, with the attributes that OpenTelemetry defines for messaging.
fn otlp(span: &Span) -> OtlpSpan {
    let Span {
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
    } = span;
    let mut attributes = vec![
        text("messaging.system", "taskd"),
        text("messaging.operation.name", hop.as_str()),
        text("messaging.destination.name", queue.as_str()),
        text("messaging.message.id", task.to_string()),
        text("taskd.outcome", *outcome),
    ];
    attributes.extend(worker.as_deref().map(|worker| text("taskd.worker", worker)));
    attributes.extend(
        attempt
            .map(|attempt| attribute("taskd.attempt", any_value::Value::IntValue(attempt.into()))),
    );
    let links = link.map(|link| span::Link {
        trace_id: link.trace.0.to_vec(),
        span_id: link.span.0.to_vec(),
        flags: link.flags.into(),
        ..Default::default()
    });
    let status = (!error.is_empty()).then(|| Status {
        message: error.clone(),
        code: StatusCode::Error.into(),
    });
    OtlpSpan {
        trace_id: context.trace.0.to_vec(),
        span_id: context.span.0.to_vec(),
        parent_span_id: parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
        flags: context.flags.into(),
        name: hop.as_str().to_owned(),
        kind: kind(*hop).into(),
        start_time_unix_nano: unix_nanos(*start),
        // The clocks of two machines may differ.
        end_time_unix_nano: unix_nanos(*end.max(start)),
        attributes,
        links: links.into_iter().collect(),
        status,
        ..Default::default()
    }
}

fn kind(hop: Hop) -> span::SpanKind {
    match hop {
        Hop::Insert | Hop::Claim => span::SpanKind::Server,
        Hop::Publish => span::SpanKind::Producer,
        Hop::Enqueue | Hop::Settle => span::SpanKind::Consumer,
        Hop::Work => span::SpanKind::Internal,
    }
}

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, any_value::Value::StringValue(value.into()))
}

fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..Default::default()
    }
}

fn unix_nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
