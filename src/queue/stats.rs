//! The counts of a shard.

use crate::config::QueueSettings;

/// The counts of a shard (`lua/stats.lua`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tasks with something left to hand out.
    pub open: u64,
    pub leases: u64,
    /// Replicas whose backoff runs.
    pub delayed: u64,
    pub live: u64,
    pub waiting_bytes: u64,
    pub outbox: u64,
    pub finals: u64,
    pub oldest_created_unix_ms: Option<i64>,
    pub ahead: u64,
}

impl Stats {
    /// Tasks with nothing left to hand out: those that a worker has, and those that wait for a
    /// backoff alone.
    pub fn assigned_and_delayed(&self) -> (u64, u64) {
        let nothing_left = self.live.saturating_sub(self.open);
        // `delayed` counts replicas. They belong to as many tasks at most.
        let delayed = self.delayed.min(nothing_left);
        (nothing_left - delayed, delayed)
    }

    /// True if the shard takes parked tasks: it is below nine tenths of its bounds.
    pub fn has_room(&self, settings: &QueueSettings) -> bool {
        let nine_tenths = |bound: u64| bound - bound / 10;
        self.ahead < nine_tenths(settings.high_water_tasks)
            && self.waiting_bytes < nine_tenths(settings.high_water_bytes)
            && self.live < nine_tenths(settings.live_tasks_max())
    }
}
