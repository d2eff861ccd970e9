//! The depths of the last hour and the last day that a process knows.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::error::Error;
use crate::{
    coordination::Coordination,
    model::{DepthEntries, DepthEntry, DepthSpan},
    runtime::Supervisor,
};

/// How long nobody has to ask before a process forgets what it knows.
const FORGET_AFTER: Duration = Duration::from_secs(60);
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// What this process knows, and when somebody asked last. Clones share it.
#[derive(Clone, Default)]
pub struct KnownDepths(Arc<Mutex<Option<(Instant, KnownSpans)>>>);

#[derive(Default)]
struct KnownSpans {
    hour: KnownSpan,
    day: KnownSpan,
}

/// The entries of a span, in the order in which they were written.
#[derive(Default)]
struct KnownSpan {
    entries: Vec<Arc<DepthEntry>>,
    read: Option<Instant>,
}

impl KnownDepths {
    /// Starts a loop that forgets the depths when nobody asks for them any more.
    pub fn keep_while_used(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("known_depths", self.clone(), |depths, cx| async move {
            while cx.pause(CHECK_EVERY).await {
                depths.forget_if_unused();
                cx.beat();
            }
        });
    }

    /// Returns the entries of both spans. While Redis is away, these are the ones that were read
    /// last.
    pub(super) async fn get(
        &self,
        coordination: &Coordination,
        now_unix_ms: i64,
    ) -> Result<DepthEntries, Error> {
        // A second caller waits for what the first one reads.
        let mut known = self.0.lock().await;
        let (asked, spans) = known.get_or_insert_with(|| (Instant::now(), KnownSpans::default()));
        *asked = Instant::now();
        spans.hour.update(coordination, DepthSpan::Hour).await?;
        spans.day.update(coordination, DepthSpan::Day).await?;
        Ok(DepthEntries {
            hour: in_order(&spans.hour.entries, DepthSpan::Hour, now_unix_ms),
            day: in_order(&spans.day.entries, DepthSpan::Day, now_unix_ms),
        })
    }

    fn forget_if_unused(&self) {
        // If it is locked, somebody asks.
        if let Ok(mut known) = self.0.try_lock()
            && known
                .as_ref()
                .is_some_and(|(asked, _)| asked.elapsed() >= FORGET_AFTER)
        {
            *known = None;
        }
    }
}

impl KnownSpan {
    /// Reads the entries that are new, if it is time. Returns an error only if nothing is known.
    async fn update(&mut self, coordination: &Coordination, span: DepthSpan) -> Result<(), Error> {
        let rest = match span {
            // The first entry of a day is shown as soon as that of an hour.
            DepthSpan::Day if !self.entries.is_empty() => Duration::from_secs(60),
            DepthSpan::Day | DepthSpan::Hour => Duration::from_secs(5),
        };
        if self.read.is_some_and(|read| read.elapsed() < rest) {
            return Ok(());
        }
        let last = self.entries.last().map(|entry| entry.at_unix_ms);
        match coordination.depths_after(span, last).await {
            Ok(read) => {
                if !read.follow {
                    self.entries.clear();
                }
                self.entries.extend(read.entries.into_iter().map(Arc::new));
                let most = usize::try_from(span.entries()).unwrap_or(0);
                let surplus = self.entries.len().saturating_sub(most);
                self.entries.drain(..surplus);
            }
            Err(error) if self.read.is_none() => return Err(error.into()),
            Err(error) => tracing::debug!("cannot read the depths of the last hour: {error}"),
        }
        self.read = Some(Instant::now());
        Ok(())
    }
}

/// The entries of a span that ends now, in the order of their times.
///
/// After a clock has stepped back, times come again. Then the entries that were written later
/// count.
fn in_order(
    entries: &[Arc<DepthEntry>],
    span: DepthSpan,
    now_unix_ms: i64,
) -> Vec<Arc<DepthEntry>> {
    let mut last_first: Vec<Arc<DepthEntry>> = Vec::new();
    for entry in entries.iter().rev() {
        let at = entry.at_unix_ms;
        let is_within = (now_unix_ms - span.ms()..=now_unix_ms).contains(&at);
        let is_before = last_first.last().is_none_or(|next| at < next.at_unix_ms);
        if is_within && is_before {
            last_first.push(Arc::clone(entry));
        }
    }
    last_first.reverse();
    last_first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_within_the_span_and_in_order() {
        let now = 10 * 3_600_000;
        let times = |ages: &[i64]| -> Vec<i64> {
            let entry = |age: &i64| {
                Arc::new(DepthEntry {
                    at_unix_ms: now - age * 1000,
                    queues: Vec::new(),
                })
            };
            let entries: Vec<Arc<DepthEntry>> = ages.iter().map(entry).collect();
            let kept = in_order(&entries, DepthSpan::Hour, now);
            let age = |entry: Arc<DepthEntry>| (now - entry.at_unix_ms) / 1000;
            kept.into_iter().map(age).collect()
        };
        assert_eq!(times(&[3601, 3600, 20, 10, 0]), [3600, 20, 10, 0]);
        assert_eq!(times(&[30, 20, -3600]), [30, 20], "a clock is ahead");
        // The clock stepped back by half a minute after the third entry.
        assert_eq!(times(&[50, 40, 30, 45, 35, 25]), [50, 45, 35, 25]);
    }
}
