//! The ways in: HTTP and gRPC. A handler reads its protocol, calls an operation of `api`, and
//! writes the answer.
//!
//! `listener` accepts clients, `tls` encrypts, `connection` serves one of them, `authenticate` asks
//! for its token; `standing` knows whose connection it is; `socket` and `delivery` see an answer
//! off. `body`, `budget`, `tally` and `staying` limit what a request may take.

mod authenticate;
mod body;
mod budget;
mod connection;
mod delivery;
mod descriptors;
#[cfg(test)]
mod fuzz;
pub mod grpc;
pub mod http;
pub mod json;
pub mod lines;
mod listener;
mod measure;
mod messages;
mod operation;
mod operations;
mod refused;
mod socket;
mod standing;
mod staying;
mod tally;
mod tls;
mod traced;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

pub use budget::Budget;
pub use descriptors::raise_limit;
pub use http::Waiting;
pub use listener::{CannotListen, bind};
pub use operation::{Operation, Route};
pub use operations::all as operations;
pub use tls::{Tls, TlsError};

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
    /// `None`: both ports speak plain text.
    pub tls: Option<Tls>,
    /// The budget of both listeners' requests.
    pub budget: Budget,
    /// Ends endless requests, so that a stop need not wait for them.
    pub stop: CancellationToken,
}

/// The bytes of a message about a request.
const MESSAGE: usize = 500;
