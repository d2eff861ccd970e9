//! Limits per key: what the scripts need of the settings, and when time alone lets a limit key go
//! on.

use std::{
    collections::{BTreeMap, HashMap},
    sync::OnceLock,
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};

use super::{known_limits::KnownLimits, wire::packed};
use crate::model::{KeyLimits, LimitFrom, QueueName, ShardId};

/// The limits of the limit keys of each queue; `None`: its tasks get no limit keys.
#[derive(Clone, Debug, Default)]
pub struct QueueLimits {
    pub default: Option<KeyLimits>,
    pub named: BTreeMap<QueueName, Option<KeyLimits>>,
    /// How long before its time a scheduled task may come to a shard.
    pub horizon: Duration,
}

/// What a process keeps for limits per key.
#[derive(Default)]
pub(super) struct Limits {
    pub(super) of_queues: OnceLock<QueueLimits>,
    /// When time alone lets a limit key of the shard go on (ms).
    starts: Mutex<HashMap<ShardId, i64>>,
    pub(super) sooner: Notify,
    pub(super) own: RwLock<KnownLimits>,
    /// Asks the reader of own limits to read them at once.
    pub(super) ask_own: Notify,
    /// The version of own limits that all open shards know.
    pub(super) told_own: watch::Sender<u64>,
}

impl Limits {
    pub(super) fn set(&self, limits: QueueLimits) {
        // The limits of a process stay as its settings have them.
        drop(self.of_queues.set(limits));
    }

    /// Whether the settings of this process have limits per key.
    pub(super) fn is_any(&self) -> bool {
        self.of_queues.get().is_some_and(|limits| {
            limits.default.is_some() || limits.named.values().any(Option::is_some)
        })
    }

    /// The limits of a queue as `lua/lib/limits.lua` reads them. Empty if the settings of this
    /// process have no `limit_by` for the queue: its tasks keep the limits that their shard has.
    pub(super) fn packed(&self, queue: &QueueName, wake_channel: &str) -> Vec<u8> {
        let limits = self.of_queues.get();
        let limits = limits.and_then(|all| *all.named.get(queue).unwrap_or(&all.default));
        let Some(limits) = limits else {
            return Vec::new();
        };
        let jitter_percent = (limits.jitter * 100.0).round() as u64;
        packed(&(
            limits.at_a_time,
            limits.pace.map_or(0, |pace| pace.interval_ms()),
            limits.burst,
            jitter_percent,
            u8::from(limits.from == LimitFrom::End),
            wake_channel,
            queue.as_str(),
        ))
    }

    /// Remembers that a limit key of the shard may go on at this time.
    pub(super) fn note_start(&self, shard: &ShardId, at_unix_ms: i64) {
        let is_sooner = {
            let mut starts = self.starts.lock();
            let known = starts.get(shard).copied();
            let is_sooner = known.is_none_or(|known| at_unix_ms < known);
            if is_sooner {
                starts.insert(shard.clone(), at_unix_ms);
            }
            is_sooner
        };
        if is_sooner {
            self.sooner.notify_one();
        }
    }

    /// Takes the shards whose time has come, each with that time; and the time of the next one.
    pub(super) fn take_due(&self, now_unix_ms: i64) -> (Vec<(ShardId, i64)>, Option<i64>) {
        let mut starts = self.starts.lock();
        let due = starts.extract_if(|_, at| *at <= now_unix_ms).collect();
        (due, starts.values().min().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(number: u32) -> ShardId {
        ShardId {
            queue: QueueName::new("q").unwrap(),
            number,
        }
    }

    #[test]
    fn a_queue_without_limit_keys_sends_no_limits() {
        let limits = Limits::default();
        let queue = QueueName::new("q").unwrap();
        assert!(limits.packed(&queue, "t:wake").is_empty());
        limits.set(QueueLimits {
            default: Some(KeyLimits::default()),
            named: BTreeMap::from([(queue.clone(), None)]),
            ..QueueLimits::default()
        });
        assert!(limits.packed(&queue, "t:wake").is_empty());
        let other = QueueName::new("other").unwrap();
        assert!(!limits.packed(&other, "t:wake").is_empty());
    }

    #[test]
    fn the_earliest_time_of_a_shard_counts() {
        let limits = Limits::default();
        limits.note_start(&shard(0), 50);
        limits.note_start(&shard(0), 20);
        limits.note_start(&shard(0), 30);
        limits.note_start(&shard(1), 40);
        assert_eq!(limits.take_due(10), (vec![], Some(20)));
        assert_eq!(limits.take_due(20), (vec![(shard(0), 20)], Some(40)));
        assert_eq!(limits.take_due(40), (vec![(shard(1), 40)], None));
    }
}
