//! The counts of a shard.

use crate::config::QueueSettings;

/// The counts of a shard (`lua/stats.lua`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tasks with a replica left to claim.
    pub open: u64,
    pub leases: u64,
    /// Replicas in backoff.
    pub delayed: u64,
    pub live: u64,
    pub waiting_bytes: u64,
    pub outbox: u64,
    pub finals: u64,
    pub oldest_created_unix_ms: Option<i64>,
    pub ahead: u64,
    /// Items that wait behind limit keys. Some may count no more.
    pub behind: u64,
    /// Limit keys with a lease, a task that waits, or a time that is not over.
    pub limit_keys: u64,
    /// Limit keys of which tasks wait in SQL.
    pub crowded_keys: u64,
}

impl Stats {
    /// Returns the numbers of tasks with no replica left to claim: those that a worker has, and
    /// those that only wait for a backoff.
    pub fn assigned_and_delayed(&self) -> (u64, u64) {
        let nothing_left = self.live.saturating_sub(self.open);
        // `delayed` counts replicas, which belong to at most that many tasks.
        let delayed = self.delayed.min(nothing_left);
        (nothing_left - delayed, delayed)
    }

    /// Returns whether the shard takes parked tasks: it is below nine tenths of its limits.
    pub fn has_room(&self, settings: &QueueSettings) -> bool {
        let nine_tenths = |bound: u64| bound - bound / 10;
        self.ahead < nine_tenths(settings.high_water_tasks)
            && self.waiting_bytes < nine_tenths(settings.high_water_bytes)
            && self.live < nine_tenths(settings.live_tasks_max())
    }
}
