//! Shared instants for writes that may wait a little.

use std::{sync::LazyLock, time::Duration};

use tokio::time::Instant;

/// The time between two shared instants.
const EVERY: Duration = Duration::from_millis(20);

static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Waits for the next instant that all loops of the process share, at most 20 ms.
///
/// Writes that nobody waits for are sent then. Each loop sends what has gathered since the last
/// instant, and all of them reach Redis together, so they share one iteration of its event loop and
/// one wait for its disk.
pub async fn tick() {
    tokio::time::sleep_until(tick_after(Instant::now())).await;
}

/// The first shared instant after `time`.
pub fn tick_after(time: Instant) -> Instant {
    let count = time.saturating_duration_since(*BEGAN).as_nanos() / EVERY.as_nanos() + 1;
    *BEGAN + EVERY * u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_have_the_same_instants_and_each_lies_ahead() {
        let first = tick_after(*BEGAN);
        assert_eq!(first, *BEGAN + EVERY);
        assert_eq!(tick_after(*BEGAN + EVERY / 2), first);
        assert_eq!(tick_after(first), first + EVERY);
        let years = Duration::from_secs(2 * 365 * 24 * 3600);
        let late = tick_after(*BEGAN + years);
        assert!(late > *BEGAN + years && late <= *BEGAN + years + EVERY);
    }
}
