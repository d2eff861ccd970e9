//! The own limits of limit keys, as this process has read them from SQL.

use std::{collections::BTreeMap, time::Duration};

use crate::model::{
    ALL_LIMIT_KEYS, ChangedLimits, QueueName, ShardId, limit_hash, limit_partition,
};

/// How long a process remembers that own limits were cleared: as long as SQL does.
const CLEARED_STAY: Duration = Duration::from_secs(24 * 3600);

/// The own limits of all queues, as this process has read them.
#[derive(Default)]
pub(super) struct KnownLimits {
    /// The version up to which they were read.
    pub(super) version: u64,
    /// The partitions among which limit keys are distributed.
    pub(super) partitions: u32,
    of_queues: BTreeMap<QueueName, BTreeMap<String, ChangedLimits>>,
}

impl KnownLimits {
    pub(super) fn learn(&mut self, changes: &[ChangedLimits], version: u64, now_unix_ms: i64) {
        for change in changes {
            let limits = &change.limits;
            self.of_queues
                .entry(limits.queue.clone())
                .or_default()
                .insert(limits.limit_key.clone(), change.clone());
        }
        self.version = self.version.max(version);
        let stay = i64::try_from(CLEARED_STAY.as_millis()).unwrap_or(i64::MAX);
        for known in self.of_queues.values_mut() {
            known.retain(|_, change| {
                !change.is_cleared || change.limits.at_unix_ms.saturating_add(stay) > now_unix_ms
            });
        }
        self.of_queues.retain(|_, known| !known.is_empty());
    }

    pub(super) fn is_in(&self, change: &ChangedLimits, shard: &ShardId) -> bool {
        let limits = &change.limits;
        limits.queue == shard.queue
            && (limits.limit_key == ALL_LIMIT_KEYS
                || limit_partition(
                    &limit_hash(&limits.queue, &limits.limit_key),
                    self.partitions.max(1),
                ) == shard.number)
    }

    /// All that a shard must know, in the order of versions.
    pub(super) fn of_shard(&self, shard: &ShardId) -> Vec<ChangedLimits> {
        let known = self.of_queues.get(&shard.queue);
        let known = known.into_iter().flat_map(BTreeMap::values);
        let mut changes: Vec<_> = known
            .filter(|change| self.is_in(change, shard))
            .cloned()
            .collect();
        changes.sort_by_key(|change| change.version);
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{OwnLimits, OwnValues};

    fn change(version: u64, key: &str, is_cleared: bool, at_unix_ms: i64) -> ChangedLimits {
        ChangedLimits {
            version,
            limits: OwnLimits {
                queue: QueueName::new("q").unwrap(),
                limit_key: key.into(),
                values: OwnValues::default(),
                at_unix_ms,
                who: "ops".into(),
            },
            is_cleared,
        }
    }

    #[test]
    fn a_shard_gets_its_keys_and_those_limits_that_all_have() {
        let mut known = KnownLimits {
            partitions: 4,
            ..KnownLimits::default()
        };
        let keys = ["a", "b", "c", "d", "e", "f", "*"];
        let changes: Vec<_> = (1..)
            .zip(keys)
            .map(|(version, key)| change(version, key, false, 0))
            .collect();
        known.learn(&changes, 9, 0);
        let of_shards: Vec<_> = (0..4)
            .map(|number| {
                let queue = QueueName::new("q").unwrap();
                known.of_shard(&ShardId { queue, number })
            })
            .collect();
        assert_eq!(of_shards.iter().map(Vec::len).sum::<usize>(), 6 + 4);
        for changes in of_shards {
            assert!(changes.is_sorted_by_key(|change| change.version));
            assert_eq!(changes.last().map(|change| change.version), Some(7));
        }
        assert_eq!(known.version, 9);
    }

    #[test]
    fn cleared_limits_are_remembered_for_a_day() {
        let mut known = KnownLimits::default();
        known.learn(&[change(1, "a", false, 0), change(2, "b", true, 0)], 2, 0);
        assert_eq!(known.of_queues[&QueueName::new("q").unwrap()].len(), 2);
        known.learn(&[change(3, "a", true, 1000)], 3, 24 * 3_600_000);
        let queue = QueueName::new("q").unwrap();
        assert_eq!(known.of_queues[&queue].keys().collect::<Vec<_>>(), ["a"]);
        known.learn(&[], 3, 24 * 3_600_000 + 1000);
        assert!(known.of_queues.is_empty());
    }
}
