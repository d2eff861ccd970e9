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

    /// The CPU that taskd and Redis use while nobody calls, in percent of a core.
    pub(super) async fn idle_cpu(&self) -> Option<f64> {
        let idle = self.args.flat.idle.0;
        let before = self.server.usage().await;
        tokio::time::sleep(idle).await;
        let used = self.server.usage().await.since(before);
        let seconds = used
            .taskd
            .zip(used.redis)
            .map(|(taskd, redis)| taskd + redis);
        seconds.map(|seconds| 100.0 * seconds / idle.as_secs_f64())
    }

    pub(super) fn step(&self, what: &str, total: u64) {
        progress::step(
            self.bar,
            format!("run {} of {}: {what}", self.number, self.args.runs),
            total,
        );
    }
}
