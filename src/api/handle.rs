//! The handle for all operations.

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use super::{
    access::Authentication,
    error::Error,
    heard::HeardWorkers,
    reader::Reader,
    waits::{Wait, Waits},
};
use crate::{
    model::{Access, Caller, Role},
    pipelines::{changing::Changing, discovery, tasks},
};

/// The operations of this process. A handle is `None` if the process does not run its pipeline.
pub struct Api {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<tasks::Handle>,
    pub query: Option<Reader>,
    pub changing: Option<Changing>,
    pub authentication: Authentication,
    pub waits: Waits,
    pub workers: HeardWorkers,
    /// Ends calls that wait for tasks.
    pub stop: CancellationToken,
}

impl Api {
    /// Admits a call with this `Authorization` header if its token has the role.
    pub async fn authenticate(
        &self,
        authorization: Option<&str>,
        role: Role,
    ) -> Result<Access, Error> {
        Ok(self
            .authentication
            .authenticate(authorization, role)
            .await?)
    }

    /// The time by the clock that all processes share; 0 in a process that reads nothing.
    pub fn now_unix_ms(&self) -> i64 {
        self.query.as_ref().map_or(0, Reader::now_unix_ms)
    }

    /// Says that Redis has little memory left, if it has.
    pub fn memory_shortage(&self) -> Option<String> {
        let gates = &self.query.as_ref()?.gates;
        let shortage = gates.shortage().map(|shortage| shortage.why);
        let is_much = || "redis has used 70 % of its memory limit or more".to_owned();
        shortage.or_else(|| gates.logs_are_large().then(is_much))
    }

    /// Counts a call that waits, until the returned value is dropped.
    pub fn wait(&self, caller: &Caller) -> Result<Wait, Error> {
        self.waits.call(&caller.access)
    }

    /// Waits until the token of a caller is no longer valid, and returns the reason. Without a
    /// token, waits for ever.
    pub fn revoked(&self, caller: &Caller) -> BoxFuture<'static, Error> {
        let revoked = self.authentication.revoked(&caller.access);
        Box::pin(async { Error::from(revoked.await) })
    }

    /// True while the token of this access is valid.
    pub fn is_valid(&self, access: &Access) -> bool {
        self.authentication.valid(access).is_ok()
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
