//! HTTP and gRPC. A handler reads its protocol, calls an operation of `api`, and writes the answer.
//!
//! `net` is the network layer, and `operations` lists what is served. `authenticate` checks the
//! token of a caller, `tally` limits the parts of a request.

mod authenticate;
#[cfg(test)]
mod fuzz;
pub mod grpc;
pub mod http;
pub mod json;
mod measure;
pub mod net;
mod operation;
mod operations;
mod refused;
mod tally;
mod traced;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

pub use http::Waiting;
pub use http::ui::{UiRoute, table as ui_routes};
pub use net::budget::Budget;
pub use net::descriptors::raise_limit;
pub use net::listener::{CannotListen, bind};
pub use net::tls::{Tls, TlsError};
pub use operation::{Operation, Route};
pub use operations::all as operations;

use crate::{
    api::Api,
    config::Settings,
    pipelines::admission::Gates,
    runtime::{Progress, Servers},
    telemetry::metrics,
};

/// Everything that the routes use.
#[derive(Clone)]
pub struct State {
    pub api: Arc<Api>,
    pub progress: Progress,
    pub gates: Gates,
    pub servers: Servers,
    pub settings: Arc<Settings>,
    pub metrics: metrics::Handle,
    pub ports: http::Ports,
    /// `None` if both ports speak plain text.
    pub tls: Option<Tls>,
    /// The budget of both listeners' requests.
    pub budget: Budget,
    /// Ends requests that would otherwise last for ever, so that a stop does not wait for them.
    pub stop: CancellationToken,
}

/// The most bytes of a message about a request.
const MESSAGE: usize = 500;
