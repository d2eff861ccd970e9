//! Log lines go to stderr, so that stdout stays for what a command answers.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::{EnvFilter, fmt};

use super::error::Error;
use crate::config::LogFormat;

/// Starts logging, once per process. `filter` has been checked with the settings.
pub fn init(filter: &str, format: LogFormat) -> Result<(), Error> {
    // Their every failed connection comes back as an error of ours, once.
    let named = |library: &str| filter.split(',').any(|directive| directive.trim().starts_with(library));
    let quiet = ["librdkafka", "redis"].into_iter().filter(|library| !named(library));
    let filter = quiet.fold(filter.to_owned(), |filter, library| format!("{filter},{library}=off"));
    let filter = EnvFilter::try_new(filter)?;
    let terminal = stderr().is_terminal();
    let pretty = match format {
        LogFormat::Auto => terminal,
        LogFormat::Pretty => true,
        LogFormat::Json => false,
    };
    // Without a word of a line that cannot be written: eprintln! would say it, and panic.
    let lines = fmt().with_env_filter(filter).with_writer(stderr).log_internal_errors(false);
    let started = if pretty {
        lines.with_ansi(terminal).try_init()
    } else {
        // Fields beside the message, not below it: one level is what log stores index best.
        lines.json().flatten_event(true).with_current_span(false).try_init()
    };
    started.map_err(Error::Logging)
}
