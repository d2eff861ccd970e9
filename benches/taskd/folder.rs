//! Folders for the files of a benchmark.

use anyhow::Context;
use tempfile::TempDir;

/// Makes a folder on the disk that TMPDIR names.
pub(crate) fn folder() -> anyhow::Result<TempDir> {
    // A short name: the path of a socket holds 107 bytes.
    tempfile::Builder::new()
        .prefix("taskd-")
        .tempdir()
        .context("cannot make a folder")
}
