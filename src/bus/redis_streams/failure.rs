//! Errors in Redis's responses that the bus reports.

use std::num::ParseIntError;

#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("a topic needs at least one partition")]
    NoPartitions,
    #[error("no generation")]
    NoGeneration,
    #[error("not a number of partitions: {0}")]
    Partitions(#[source] ParseIntError),
    #[error("not a stream id: {0}")]
    Id(#[source] ParseIntError),
    #[error("committed position: {0}")]
    Committed(#[source] ParseIntError),
    #[error("no partition {0}")]
    NoPartition(u32),
    #[error("a shared reader has no position")]
    NoPosition,
    /// The server's error message for a command.
    #[error("{code}: {details}")]
    Refused { code: String, details: String },
}
