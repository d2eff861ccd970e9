//! Promotes shards when time alone lets a limit key go on.
//!
//! The script that puts a limit key among those that wait for their time tells when that is. The
//! process that called it promotes the shard then; if it dies, the watchdog's look finds the key.

use std::time::Duration;

use futures::StreamExt;

use super::{error::Error, limits::QueueLimits, shards::Shards, types::Promoted, upkeep::Upkeep};
use crate::{model::ShardId, runtime::Loop, telemetry::metrics};

/// Two promotions of a process are this far apart, so that keys of one moment go together.
const GRAIN: Duration = Duration::from_millis(10);
/// The longest sleep of the loop that promotes.
const LONGEST: Duration = Duration::from_secs(60);
/// Limit keys and delays of one promotion.
const AT_ONCE: usize = 1000;
/// Shards that are promoted at once.
const SHARDS_AT_ONCE: usize = 8;

/// How long to wait until the shard is to be promoted again (ms). Counted from Redis's clock: if
/// that of this process is ahead, what is due here is not due there.
fn until_next(promoted: &Promoted) -> Option<i64> {
    let grain = i64::try_from(GRAIN.as_millis()).unwrap_or(i64::MAX);
    if promoted.more {
        return Some(grain);
    }
    // A shard without limited tasks tells no time: the watchdog promotes it.
    let now = promoted.now_unix_ms?;
    let next = promoted.next_unix_ms?;
    Some((next - now).max(grain))
}

impl Shards {
    /// Tells the limits of all queues, once.
    pub fn set_limits(&self, limits: QueueLimits) {
        self.limits().set(limits);
    }
}

impl Upkeep {
    /// Promotes shards when limit keys may go on that calls of this process have met.
    pub(super) async fn promote_in_time(&self, cx: &Loop) {
        let limits = self.limits();
        while !cx.stop.is_cancelled() {
            let now = self.clock().now_unix_ms();
            let (due, next) = limits.take_due(now);
            let any_due = !due.is_empty();
            futures::stream::iter(due)
                .for_each_concurrent(SHARDS_AT_ONCE, |(shard, at)| async move {
                    self.promote_limited(&shard).await;
                    let late_ms = self.clock().now_unix_ms().saturating_sub(at);
                    let late_ms = u64::try_from(late_ms).unwrap_or(0);
                    metrics::limits_promoted(Duration::from_millis(late_ms));
                })
                .await;
            cx.beat();
            let until_next = match next {
                Some(next) => Duration::from_millis((next - now).unsigned_abs()).min(LONGEST),
                None => LONGEST,
            };
            let wait = if any_due {
                GRAIN
            } else {
                until_next.max(GRAIN)
            };
            tokio::select! {
                () = cx.stop.cancelled() => return,
                () = cx.idle(self.clock().sleep(wait)) => {}
                () = cx.idle(limits.sooner.notified()), if !any_due => {}
            }
        }
    }

    async fn promote_limited(&self, shard: &ShardId) {
        let limits = self.limits();
        let horizon = limits.of_queues.get().map(|limits| limits.horizon);
        match self
            .promote(shard, AT_ONCE, horizon.unwrap_or_default())
            .await
        {
            Ok(promoted) => {
                if let Some(wait) = until_next(&promoted) {
                    limits.note_start(shard, self.clock().now_unix_ms() + wait);
                }
            }
            Err(Error::NoGeneration) => {}
            Err(error) => {
                tracing::debug!(%shard, "cannot release tasks of limit keys in {shard}, the watchdog will: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_promotion_waits_by_the_clock_of_redis() {
        let promoted = |next, now, more| Promoted {
            promoted: 0,
            more,
            next_unix_ms: next,
            now_unix_ms: now,
        };
        for (answer, wait) in [
            (promoted(Some(1500), Some(1000), false), Some(500)),
            (promoted(Some(1001), Some(1000), false), Some(10)),
            (promoted(Some(1500), Some(1000), true), Some(10)),
            (promoted(None, Some(1000), false), None),
            (promoted(Some(1500), None, false), None),
        ] {
            assert_eq!(until_next(&answer), wait, "{answer:?}");
        }
    }
}
