//! Watchdog: what ran out of time.
