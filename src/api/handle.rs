//! The handle of all operations.

use tokio_util::sync::CancellationToken;
use tracing::Span;

use super::{access::Authentication, error::Error, reader::Reader};
use crate::{
    model::{Access, Caller, Role},
    pipelines::{changing::Changing, discovery, tasks},
};

/// The operations of this process. A handle is `None` where the process does not run the pipeline.
pub struct Api {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<tasks::Handle>,
    pub query: Option<Reader>,
    pub changing: Option<Changing>,
    pub authentication: Authentication,
    /// Ends calls that wait for tasks.
    pub stop: CancellationToken,
}

impl Api {
    /// Admits a call with this `Authorization`, if it may do what needs the role.
    pub async fn authenticate(&self, authorization: Option<&str>, role: Role) -> Result<Access, Error> {
        Ok(self.authentication.authenticate(authorization, role).await?)
    }
}

/// The span of an operation.
pub(super) fn span(operation: &'static str, caller: &Caller) -> Span {
    tracing::debug_span!(
        "operation",
        operation,
        protocol = %caller.client.protocol,
        peer = caller.client.peer.map(tracing::field::display),
        token = caller.access.token().map(|token| token.name.as_str())
    )
}
