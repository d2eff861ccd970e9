//! The own limits of limit keys, as this process has read them from SQL.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

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
    /// The shards that said that they know no later version.
    asked: HashSet<ShardId>,
    /// The shards that know a later version than this process, with that version.
    ahead: HashMap<ShardId, u64>,
    /// The version that each shard knew last.
    told: HashMap<ShardId, u64>,
    /// The shards that may not know all that they must.
    unsure: HashSet<ShardId>,
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

    /// Forgets all of it, because SQL was set back.
    pub(super) fn forget(&mut self) {
        self.version = 0;
        self.of_queues.clear();
        self.ahead.clear();
        self.told.clear();
    }

    /// Notes the version that a shard knows from now on.
    pub(super) fn note_told(&mut self, shard: &ShardId, version: u64) {
        match self.told.get_mut(shard) {
            Some(told) => *told = version,
            None => drop(self.told.insert(shard.clone(), version)),
        }
    }

    /// Returns whether a shard that shows this version has forgotten a later one, because Redis
    /// lost its last writes. The shard then has to be told everything.
    pub(super) fn has_forgotten(&mut self, shard: &ShardId, version: u64) -> bool {
        if self.told.get(shard).is_none_or(|told| *told <= version) {
            return false;
        }
        self.told.remove(shard);
        self.unsure.insert(shard.clone());
        true
    }

    pub(super) fn note_unsure(&mut self, shards: impl IntoIterator<Item = ShardId>) {
        self.unsure.extend(shards);
    }

    pub(super) fn take_unsure(&mut self) -> HashSet<ShardId> {
        std::mem::take(&mut self.unsure)
    }

    pub(super) fn is_any_unsure(&self) -> bool {
        !self.unsure.is_empty()
    }

    /// Notes the version that a shard knows, and the one that it was told.
    pub(super) fn note(&mut self, shard: &ShardId, version: u64, told: u64) {
        if version > told {
            self.asked.remove(shard);
            self.ahead.insert(shard.clone(), version);
        } else if !self.asked.contains(shard) {
            self.asked.insert(shard.clone());
        }
    }

    pub(super) fn has_asked(&self, shard: &ShardId) -> bool {
        self.asked.contains(shard)
    }

    /// Takes the shards that know a later version than they were told.
    pub(super) fn take_ahead(&mut self) -> HashMap<ShardId, u64> {
        std::mem::take(&mut self.ahead)
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
    fn a_shard_that_shows_an_earlier_version_than_it_was_told_is_told_again() {
        let mut known = KnownLimits::default();
        let queue = QueueName::new("q").unwrap();
        let shard = ShardId { queue, number: 1 };
        assert!(!known.has_forgotten(&shard, 0));
        known.note_told(&shard, 4);
        assert!(!known.has_forgotten(&shard, 4) && !known.is_any_unsure());
        assert!(known.has_forgotten(&shard, 3) && known.is_any_unsure());
        // Once is enough.
        assert!(!known.has_forgotten(&shard, 3));
        assert_eq!(known.take_unsure(), HashSet::from([shard]));
        assert!(!known.is_any_unsure());
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
