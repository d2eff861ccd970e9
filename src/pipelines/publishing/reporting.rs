//! Topics that only report. If such a topic accepts nothing, that must not stop the work that it
//! reports.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{
    bus::{self, Log},
    telemetry::metrics,
};

/// How long a topic may refuse reports before they are left out, and how often to try it from then
/// on.
const PATIENCE: Duration = Duration::from_secs(30);
const TRY_AGAIN: Duration = Duration::from_secs(300);

/// A topic that only reports, and since when it has refused records.
pub struct Reporting {
    log: Log,
    refuses: Mutex<Option<Refuses>>,
}

#[derive(Clone, Copy)]
struct Refuses {
    since: Instant,
    last: Instant,
}

impl Refuses {
    fn is_given_up(self) -> bool {
        self.last - self.since >= PATIENCE
    }
}

impl Reporting {
    pub fn new(log: Log) -> Self {
        Self {
            log,
            refuses: Mutex::default(),
        }
    }

    /// Publishes `count` reports with `publish`. Leaves them out if the topic has refused for
    /// [`PATIENCE`]. Returns an error if it has not refused for that long: try again.
    pub async fn publish(
        &self,
        count: usize,
        publish: impl Future<Output = bus::Result<()>>,
    ) -> bus::Result<()> {
        if count == 0 {
            // Publishing nothing would succeed, as if the topic accepted records again.
            return Ok(());
        }
        if self.rests() {
            metrics::reports_left_out(&self.log.name, count);
            return Ok(());
        }
        match publish.await {
            Ok(()) => *self.refuses.lock() = None,
            Err(error) if error.is_lost() => return Err(error),
            Err(error) if self.note(Instant::now()) => {
                let topic = &self.log.name;
                tracing::warn!(
                    "{topic} takes nothing, so its reports are left out, and tried again later: {error}"
                );
                metrics::reports_left_out(topic, count);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns whether a report is left out now. When it is time to try the topic again, one caller
    /// does so for all.
    fn rests(&self) -> bool {
        let mut refuses = self.refuses.lock();
        let Some(known) = refuses.as_mut().filter(|known| known.is_given_up()) else {
            return false;
        };
        let rests = known.last.elapsed() < TRY_AGAIN;
        if !rests {
            known.last = Instant::now();
        }
        rests
    }

    /// Records that the topic has refused. Returns whether it has done so for long enough.
    fn note(&self, now: Instant) -> bool {
        let mut refuses = self.refuses.lock();
        // If the last refusal is long ago, the topic might have accepted something since: start
        // counting again.
        let known =
            refuses.filter(|known| now.saturating_duration_since(known.last) < 2 * TRY_AGAIN);
        let since = known.map_or(now, |known| known.since);
        let known = Refuses { since, last: now };
        *refuses = Some(known);
        known.is_given_up()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> bus::Result<()> {
        Err(bus::Error::Publish {
            topic: Log::EXPIRATIONS.name,
            cause: "no".into(),
        })
    }

    #[tokio::test]
    async fn a_topic_that_refuses_for_long_is_left_out_until_it_is_tried_again() {
        let reporting = Reporting::new(Log::EXPIRATIONS);
        let began = Instant::now();
        assert!(
            reporting.publish(1, async { refused() }).await.is_err(),
            "it may take the next"
        );
        assert!(!reporting.note(began + PATIENCE / 2));
        reporting.publish(0, async { Ok(()) }).await.unwrap();
        assert!(
            reporting.note(began + 2 * PATIENCE),
            "it has refused for long"
        );
        reporting
            .publish(1, async { panic!("it rests") })
            .await
            .unwrap();
        // As if the time until the next try were over.
        *reporting.refuses.lock() = Some(Refuses {
            since: began - TRY_AGAIN - PATIENCE,
            last: began - TRY_AGAIN,
        });
        let another = async || {
            reporting
                .publish(1, async { panic!("one tries already") })
                .await
        };
        let tried = async {
            another().await.unwrap();
            refused()
        };
        reporting.publish(1, tried).await.unwrap();
        *reporting.refuses.lock() = Some(Refuses {
            since: began - TRY_AGAIN - PATIENCE,
            last: began - TRY_AGAIN,
        });
        reporting.publish(1, async { Ok(()) }).await.unwrap();
        assert!(
            reporting.publish(1, async { refused() }).await.is_err(),
            "it has taken something meanwhile"
        );
    }
}
