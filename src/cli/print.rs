//! Lines on stdout.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

/// Stdout does not take a line.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
pub(super) struct Unwritten(#[from] io::Error);

impl Unwritten {
    /// Whether the reader has closed stdout: it has read enough, as in `taskd tasks | head -1`.
    pub(super) fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Writes a line to stdout. `println` panics where the reader has closed it.
pub(super) fn print(line: impl Display) -> Result<(), Unwritten> {
    Ok(writeln!(io::stdout(), "{line}")?)
}
