//! Log lines go to stderr, so that stdout is left to the output of commands.
//!
//! A thread of its own writes them. A stopped terminal, a pipe that is not read or a disk that is
//! busy holds up the log, not the work.

use std::io::{self, IsTerminal, Write, stderr};

use parking_lot::Mutex;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{EnvFilter, fmt};

use super::error::Error;
use crate::{config::LogFormat, model::escape_hidden};

/// How many lines wait for stderr. Further ones are dropped, and counted.
const WAITING: usize = 10_000;

/// The thread that writes the lines, and its count of dropped ones.
static WRITER: Mutex<Option<(WorkerGuard, ErrorCounter)>> = Mutex::new(None);

/// Starts logging, once per process. `filter` has been checked with the settings.
pub fn init(filter: &str, format: LogFormat) -> Result<(), Error> {
    // Unless the filter names these libraries, silence them: each of their failed connections
    // reaches taskd as an error, which is logged once.
    let named = |library: &str| {
        filter
            .split(',')
            .any(|directive| directive.trim().starts_with(library))
    };
    let quiet = ["librdkafka", "redis"]
        .into_iter()
        .filter(|library| !named(library));
    let filter = quiet.fold(filter.to_owned(), |filter, library| {
        format!("{filter},{library}=off")
    });
    let filter = EnvFilter::try_new(filter)?;
    let terminal = stderr().is_terminal();
    let pretty = match format {
        LogFormat::Auto => terminal,
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(WAITING)
        .thread_name("log")
        .finish(OneLine(stderr()));
    *WRITER.lock() = Some((guard, writer.error_counter()));
    // Do not report a line that cannot be written: the subscriber would use eprintln!, which
    // panics.
    let lines = fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .log_internal_errors(false);
    let started = if pretty {
        lines.with_ansi(terminal).try_init()
    } else {
        // Fields next to the message, not nested: log stores index a flat object best.
        lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .try_init()
    };
    started.map_err(Error::Logging)
}

/// Writes the lines that wait, for a second at most. Lines that are logged later may be lost.
pub fn finish() {
    drop(WRITER.lock().take());
}

/// How many lines were dropped because stderr took no more.
pub(super) fn dropped_lines() -> u64 {
    let writer = WRITER.lock();
    let count = writer.as_ref().map(|(_, count)| count.dropped_lines());
    count.unwrap_or_default() as u64
}

/// Writes each event as one line. The writing thread passes an event as a whole.
///
/// Messages contain text of others: of callers, servers, a collector. It must not be able to begin
/// a line that looks like one of taskd, or change how a line is shown. The subscriber has escaped
/// other control characters.
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.0
            .write_all(in_one_line(&String::from_utf8_lossy(event)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Escapes all line breaks except the last one, and hidden characters.
fn in_one_line(event: &str) -> String {
    let (line, end) = match event.strip_suffix('\n') {
        Some(line) => (line, "\n"),
        None => (event, ""),
    };
    let line = escape_hidden(line);
    let mut written = String::with_capacity(line.len() + 1);
    for c in line.chars() {
        match c {
            '\n' => written.push_str("\\n"),
            '\r' => written.push_str("\\r"),
            other => written.push(other),
        }
    }
    written.push_str(end);
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_others_say() {
        let mut lines = OneLine(Vec::new());
        let event = "  INFO taskd: bad\n2026-11-28T00:00:00Z  INFO taskd: FORGED\r\u{202e}\u{9b}x\u{2028}é\n";
        lines.write_all(event.as_bytes()).unwrap();
        let want = "  INFO taskd: bad\\n2026-11-28T00:00:00Z  INFO taskd: FORGED\\r\\u202e\\u009bx\\u2028é\n";
        assert_eq!(String::from_utf8(lines.0).unwrap(), want);
    }
}
