//! Temporary folders for benchmarks.

use anyhow::Context;
use tempfile::TempDir;

/// Creates a temporary folder, in TMPDIR.
pub(crate) fn folder() -> anyhow::Result<TempDir> {
    // The name must be short: the path of a socket is limited to 107 bytes.
    tempfile::Builder::new()
        .prefix("taskd-")
        .tempdir()
        .context("cannot make a folder")
}
