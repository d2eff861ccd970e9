//! The handle of all operations.

use tokio_util::sync::CancellationToken;
use tracing::Span;

use super::reader::Reader;
use crate::{
    model::Caller,
    pipelines::{discovery, tasks},
};

/// The operations of this process. A handle is `None` where the process does not run the pipeline. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<tasks::Handle>,
    pub query: Option<Reader>,
    /// Ends calls that wait for tasks.
    pub stop: CancellationToken,
}

/// The span of an operation.
pub(super) fn span(operation: &'static str, caller: &Caller) -> Span {
    tracing::debug_span!(
        "operation",
        operation,
        protocol = %caller.protocol,
        peer = caller.peer.map(tracing::field::display)
    )
}
