//! Why logs, metrics or spans could not be started.

use std::error;

use metrics_exporter_prometheus::BuildError;
use tracing_subscriber::filter::ParseError;

/// The reason why logs, metrics or spans cannot start. Only a mistake in taskd causes one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the filter of the log: {0}")]
    Filter(#[from] ParseError),
    #[error("cannot start logging: {0}")]
    Logging(#[source] Box<dyn error::Error + Send + Sync>),
    #[error("cannot set up histogram buckets: {0}")]
    Buckets(#[from] BuildError),
    #[error("another recorder of metrics or spans is installed")]
    Installed,
    #[error("cannot reach a collector at otlp_endpoint: {0}")]
    Endpoint(#[from] tonic::transport::Error),
    #[error("cannot reach a collector at otlp_endpoint: {0}")]
    OtlpUrl(String),
}
