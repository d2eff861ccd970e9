//! Events that librdkafka reports by itself.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::{
    ClientContext,
    config::RDKafkaLogLevel,
    consumer::ConsumerContext,
    error::{KafkaError, RDKafkaErrorCode},
};

/// Handles the events of all clients of one open bus.
///
/// librdkafka reports each connection that fails, again and again: those reports are for debugging.
/// The log says at most once a minute that all brokers are away, or why one refuses taskd.
#[derive(Clone, Default)]
pub(super) struct ClientEvents(Arc<Mutex<Reported>>);

#[derive(Default)]
struct Reported {
    refusals: u32,
    last_refusal: Option<String>,
    warned: Option<Instant>,
    /// Until the bus is open, the caller learns of problems from the error of the opening.
    is_open: bool,
}

impl Reported {
    fn warn(&mut self, text: &str) {
        if self.is_open
            && self
                .warned
                .is_none_or(|at| at.elapsed() >= WARN_AGAIN_AFTER)
        {
            self.warned = Some(Instant::now());
            tracing::warn!("{text}");
        }
    }
}

const WARN_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// From this many refusals on, the brokers are taken to mean it. A broker that is starting may
/// refuse taskd once.
const REFUSALS: u32 = 3;

impl ClientEvents {
    /// Why the brokers refuse taskd, if they have done so repeatedly.
    pub(super) fn refusal(&self) -> Option<String> {
        let reported = self.0.lock();
        reported
            .last_refusal
            .clone()
            .filter(|_| reported.refusals >= REFUSALS)
    }

    fn refused(&self, reason: &str) {
        let mut reported = self.0.lock();
        reported.refusals = reported.refusals.saturating_add(1);
        reported.last_refusal = Some(reason.to_owned());
        if reported.refusals >= REFUSALS {
            reported.warn(&format!("kafka does not let us in: {reason}"));
        }
    }

    /// Marks the bus as open: from now on problems are logged.
    pub(super) fn opened(&self) {
        self.0.lock().is_open = true;
    }

    fn away(&self) {
        self.0
            .lock()
            .warn("kafka is away: no broker can be reached; going on when one is there");
    }
}

impl ClientContext for ClientEvents {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!("librdkafka: {facility} {message}");
            }
            _ => tracing::debug!("librdkafka: {facility} {message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let code = error.rdkafka_error_code();
        if matches!(
            code,
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL)
        ) {
            self.refused(reason);
        }
        if code == Some(RDKafkaErrorCode::AllBrokersDown) {
            self.away();
        }
        tracing::debug!("librdkafka: {error}: {reason}");
    }
}

impl ConsumerContext for ClientEvents {}
