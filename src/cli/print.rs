//! Lines and tables, on stdout and stderr.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

use comfy_table::{Row, Table, presets};

use crate::model::escape_hidden;

/// Clears the terminal, and begins at its top left (ECMA-48: ED, CUP).
pub(super) const CLEAR: &str = "\x1b[2J\x1b[H";

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

/// The error of a command that names something that is not there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NotThere(pub(super) String);

/// Writes a command's answer to stdout. `println` panics where the reader has closed it; here that
/// is no failure, so that the exit code still tells the command's own outcome.
pub(super) fn print(answer: impl Display) -> Result<(), Unwritten> {
    print_one(answer).or_else(|unwritten| {
        if unwritten.is_closed() {
            Ok(())
        } else {
            Err(unwritten)
        }
    })
}

/// Writes one of many lines to stdout. [`Unwritten::is_closed`]: nobody reads the rest, so the
/// command may end.
///
/// This is the one printer of all commands. It escapes what JSON lets pass and a terminal obeys, or
/// does not show.
pub(super) fn print_one(line: impl Display) -> Result<(), Unwritten> {
    let line = line.to_string();
    Ok(writeln!(io::stdout(), "{}", escape_hidden(&line))?)
}

/// What a command prints instead of a table without rows.
pub(super) const NONE: &str = "none";

/// Prints a table, or [`NONE`].
pub(super) fn print_table(table: &Table) -> Result<(), Unwritten> {
    print(shown(table))
}

/// A table as text, or [`NONE`].
pub(super) fn shown(table: &Table) -> String {
    if table.is_empty() {
        NONE.to_owned()
    } else {
        table.to_string()
    }
}

/// A table without lines.
pub(super) fn table(head: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(head);
    table
}

/// Says that a list ended at its limit. `flag` raises it.
pub(super) fn say_more(shown: impl Display, flag: &str) {
    say(format_args!(
        "{shown} shown, and there may be more; {flag} N shows N"
    ));
}

/// Writes a line to stderr. `eprintln` panics where the reader has closed it; then nobody misses
/// the line.
pub(super) fn say(line: impl Display) {
    let line = line.to_string();
    writeln!(io::stderr(), "{}", escape_hidden(&line)).ok();
}
