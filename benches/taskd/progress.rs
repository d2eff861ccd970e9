//! Shows the current measurement on a terminal.

use std::{io::IsTerminal, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::no_length();
        let steps = ProgressStyle::with_template("{spinner} {elapsed} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner());
        bar.set_style(steps);
        if !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    pub(crate) fn step(&self, what: String) {
        self.0.set_message(what);
    }
}

impl Drop for Progress {
    /// Removes the bar, so that it does not appear between the tables.
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
