//! The progress bar, and the detection of stalls.

use std::time::{Duration, Instant};

use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinSet;

pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A progress bar for a number of tasks; it is hidden if stderr is not a terminal.
pub(super) fn bar() -> ProgressBar {
    let template = "{msg:28} {bar:30} {human_pos}/{human_len}  {per_sec}  {elapsed}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::no_length().with_style(style)
}

/// Starts a step of `total` tasks.
pub(super) fn step(bar: &ProgressBar, what: String, total: u64) {
    bar.reset();
    bar.set_length(total);
    bar.set_message(what);
}

/// Detects that a position has not changed for too long.
pub(super) struct Stall {
    limit: Duration,
    position: u64,
    since: Instant,
}

impl Stall {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            position: 0,
            since: Instant::now(),
        }
    }

    pub(super) fn is_stuck(&mut self, position: u64) -> bool {
        if position != self.position {
            (self.position, self.since) = (position, Instant::now());
        }
        self.since.elapsed() > self.limit
    }
}

/// The result of the next of `tasks` to end, or `None` if all have ended. Fails if the bar has not
/// moved for `limit`.
pub(super) async fn next_moving<T: 'static>(
    tasks: &mut JoinSet<T>,
    bar: &ProgressBar,
    limit: Duration,
) -> anyhow::Result<Option<T>> {
    let mut stall = Stall::new(limit);
    loop {
        tokio::select! {
            ended = tasks.join_next() => return Ok(ended.transpose()?),
            () = tokio::time::sleep(LOOK_EVERY) => if stall.is_stuck(bar.position()) {
                bail!("gave up: taskd took no task for {}", humantime::format_duration(limit));
            }
        }
    }
}
