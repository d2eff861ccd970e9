//! Where reports are on the bus.

use crate::{bus::Message, model::TraceContext, wire};

/// The message that a report came in, and the report's index among the reports of that message.
pub(super) struct Origin<'m> {
    pub(super) message: &'m Message,
    pub(super) index: usize,
    /// The trace context of the reported work, if it is sampled.
    pub(super) trace: Option<TraceContext>,
}

/// Returns the message with only one of its reports.
pub(super) fn alone(message: &Message, index: usize) -> Message {
    Message {
        value: wire::one_report(&message.value, index),
        ..message.clone()
    }
}
