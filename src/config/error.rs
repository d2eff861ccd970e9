//! Mistakes in the configuration.

use std::path::PathBuf;

/// One line with the error, where it is, and what would be valid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}:{line}: {message}", path.display())]
    File {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error("{0}")]
    Value(String),
}
