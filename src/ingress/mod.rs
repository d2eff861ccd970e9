//! The ways in: HTTP and gRPC. They decode, call a handle, and turn its answer or error into what the caller expects.

pub mod grpc;
pub mod http;
pub mod json;
pub mod lines;
mod listener;
mod ndjson;
mod problem;
mod waiting;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::{config::Settings, discovery, outbox::Gates, reading, supervise::Progress, tasks, telemetry::metrics};

pub use listener::bind;
pub use waiting::Waiting;

/// What the routes call. A handle is `None` where this process does not run what is behind it: its routes answer 503.
#[derive(Clone)]
pub struct State {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<tasks::Handle>,
    pub reading: Option<reading::Handle>,
    pub progress: Progress,
    pub gates: Gates,
    pub settings: Arc<Settings>,
    pub metrics: metrics::Handle,
    /// Ends endless requests, so that a stop need not wait for them.
    pub stop: CancellationToken,
}

/// For a handle that is `None`.
fn not_run_here(pipeline: &str) -> String {
    format!("this process does not run the pipeline {pipeline}")
}

/// More than discovery's buffer holds could never be taken, so trying again would not help.
fn check_insert_size(tasks: usize, settings: &Settings) -> Result<(), String> {
    let most = settings.discovery.buffer;
    if tasks > most {
        return Err(format!(
            "{tasks} tasks in one request; at most {most} (discovery_buffer). NDJSON over HTTP has no limit"
        ));
    }
    Ok(())
}
