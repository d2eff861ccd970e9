//! The ways in: HTTP and gRPC. They decode, call a handle, and turn its answer or error into what the caller expects.
//!
//! `listener` lets clients in, `connection` serves one of them, `socket` and `delivery` see an answer off. `body`,
//! `budget` and `tally` bound what a request may take.

mod body;
mod budget;
mod connection;
mod delivery;
mod descriptors;
pub mod grpc;
pub mod http;
pub mod json;
pub mod lines;
mod listener;
mod measure;
mod socket;
mod tally;
mod wire;

use std::{borrow::Cow, sync::Arc, time::Instant};

use tokio_util::sync::CancellationToken;

pub use budget::Budget;
pub use descriptors::raise_limit;
pub use http::Waiting;
pub use listener::bind;

use crate::{
    api::query,
    config::Settings,
    pipelines::{admission::Gates, discovery, tasks},
    runtime::Progress,
    telemetry::metrics,
    wire::pb,
};

/// What the routes call. A handle is `None` where this process does not run what is behind it: its routes answer 503.
#[derive(Clone)]
pub struct State {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<tasks::Handle>,
    pub reading: Option<query::Handle>,
    pub progress: Progress,
    pub gates: Gates,
    pub settings: Arc<Settings>,
    pub metrics: metrics::Handle,
    /// For the requests of both listeners together.
    pub budget: Budget,
    /// Ends endless requests, so that a stop need not wait for them.
    pub stop: CancellationToken,
}

/// For a handle that is `None`.
fn not_run_here(pipeline: &str) -> String {
    format!("this process does not run the pipeline {pipeline}")
}

/// Inserts tasks, and records how long that took their caller.
async fn insert_timed(
    discovery: &discovery::Handle,
    tasks: Vec<pb::NewTask>,
) -> Result<Vec<pb::InsertResult>, discovery::Error> {
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let started = Instant::now();
    let answers = discovery.insert(tasks).await;
    metrics::discovery_insert(started.elapsed());
    answers
}

/// Bytes of what somebody sent, in a message about it.
const ECHO: usize = 100;
/// Bytes of such a message.
const MESSAGE: usize = 500;

/// The beginning of a text that may have megabytes.
fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    format!("{}…", &text[..end]).into()
}
