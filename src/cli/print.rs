//! Lines and tables, on stdout and stderr.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

use comfy_table::{Row, Table, presets};

use crate::model::escape_hidden;

/// Clears the terminal, and begins at its top left (ECMA-48: ED, CUP).
pub(super) const CLEAR: &str = "\x1b[2J\x1b[H";

/// A line could not be written to stdout.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
pub(super) struct Unwritten(#[from] io::Error);

impl Unwritten {
    /// Returns true if the reader has closed stdout, as `head -1` does when it has read enough.
    pub(super) fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// The thing that a command names does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NotThere(pub(super) String);

/// Writes a command's answer to stdout. `println` would panic if the reader has closed stdout. Here
/// that is not an error, so that the exit code still shows how the command itself went.
pub(super) fn print(answer: impl Display) -> Result<(), Unwritten> {
    print_one(answer).or_else(|unwritten| {
        if unwritten.is_closed() {
            Ok(())
        } else {
            Err(unwritten)
        }
    })
}

/// Writes one of many lines to stdout. If [`Unwritten::is_closed`] is true for the error, nobody
/// reads the rest and the command may end.
///
/// All commands print through this function. It escapes what JSON allows but a terminal would obey
/// or not show.
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

/// Returns a table without borders.
pub(super) fn table(head: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(head);
    table
}

/// Tells the user that a list stopped at its limit. `flag` is the flag that raises it.
pub(super) fn say_more(shown: impl Display, flag: &str) {
    say(format_args!(
        "{shown} shown, and there may be more; {flag} N shows N"
    ));
}

/// Writes a line to stderr. `eprintln` would panic if stderr is closed. Here the line is dropped.
pub(super) fn say(line: impl Display) {
    let line = line.to_string();
    writeln!(io::stderr(), "{}", escape_hidden(&line)).ok();
}
