//! One run against one taskd, in queues of its own.

use indicatif::ProgressBar;

use super::{
    args::{Bench, Work},
    progress,
    report::Report,
    server::Server,
    work::Tasks,
};

/// A run. Its name is the prefix of its queues.
pub(super) struct Run<'a> {
    pub(super) args: &'a Bench,
    pub(super) server: Server,
    pub(super) name: String,
    pub(super) number: u16,
    pub(super) bar: &'a ProgressBar,
    pub(super) report: &'a mut Report,
}

impl Run<'_> {
    pub(super) fn tasks(&self, what: &str, work: &Work) -> Tasks {
        Tasks::new(&format!("{}-{what}", self.name), work)
    }

    pub(super) fn step(&self, what: &str, total: u64) {
        progress::step(
            self.bar,
            format!("run {} of {}: {what}", self.number, self.args.runs),
            total,
        );
    }
}
