//! A snapshot of the work that waits in a shard.

use std::time::Duration;

use redis::Value;

use super::{
    error::Result,
    wire::{numbers, unsigned},
};

/// The work that waits in a shard, as `lua/look.lua` returns it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardSnapshot {
    /// The shard is empty.
    pub is_idle: bool,
    pub expires: bool,
    pub promotes: bool,
    /// The time until the next lease or delay ends.
    pub next: Option<Duration>,
    /// Elements of tasks that have no replica left to hand out.
    pub spent: u64,
    /// The number of lanes with pointers of workers.
    pub pointers: u64,
    pub outbox: u64,
    pub settles: bool,
    /// The number of tasks with a replica left to hand out.
    pub open: u64,
    /// The version of own limits that the shard knows, if it has tasks with limit keys.
    pub own_limits: Option<u64>,
    /// Calls that reported long holds of limit keys, which SQL does not have yet.
    pub long_holds: u64,
}

impl ShardSnapshot {
    pub(super) fn read(value: Value) -> Result<Self> {
        if matches!(value, Value::Int(_)) {
            return Ok(Self {
                is_idle: true,
                ..Self::default()
            });
        }
        let n = numbers(value, 10)?;
        let next = u64::try_from(n[2]).ok().map(Duration::from_millis);
        Ok(Self {
            is_idle: false,
            expires: n[0] != 0,
            promotes: n[1] != 0,
            next,
            spent: unsigned(n[3]),
            pointers: unsigned(n[4]),
            outbox: unsigned(n[5]),
            settles: n[6] != 0,
            open: unsigned(n[7]),
            own_limits: u64::try_from(n[8]).ok(),
            long_holds: unsigned(n[9]),
        })
    }
}
