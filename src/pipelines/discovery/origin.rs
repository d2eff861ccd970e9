//! The places of reports on the bus.

use crate::{bus::Message, model::TraceContext, wire};

/// The place of a report on the bus.
pub(super) struct Origin<'m> {
    pub(super) message: &'m Message,
    pub(super) index: usize,
    /// The work of the report, if it is sampled.
    pub(super) trace: Option<TraceContext>,
}

/// The message with only one of its reports.
pub(super) fn alone(message: &Message, index: usize) -> Message {
    Message {
        value: wire::one_report(&message.value, index),
        ..message.clone()
    }
}
