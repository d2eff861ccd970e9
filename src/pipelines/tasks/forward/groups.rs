//! Groups the shards of a round into turns.

use std::collections::BTreeMap;

use crate::model::ShardId;

/// About how many bytes of reports to read in one turn.
pub(super) const READ_BYTES: usize = 4 << 20;
/// The most shards that share a turn.
pub(super) const TOGETHER: usize = 64;

/// Shards with something in their outboxes, and about how many bytes.
pub(super) type Due = BTreeMap<ShardId, usize>;

/// Shards that share a turn: their reports go to the same partition of the bus.
pub(super) struct Group {
    pub(super) partition: u32,
    pub(super) shards: Vec<ShardId>,
}

/// Groups the shards into turns of at most `most`. A shard with more than its share of
/// [`READ_BYTES`] gets a turn of its own.
pub(super) fn groups(due: Due, partitions: u32, most: usize) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut small = BTreeMap::<u32, Vec<ShardId>>::new();
    for (shard, bytes) in due {
        let partition = shard.number % partitions.max(1);
        match bytes > READ_BYTES / most {
            true => groups.push(Group {
                partition,
                shards: vec![shard],
            }),
            false => small.entry(partition).or_default().push(shard),
        }
    }
    for (partition, shards) in small {
        groups.extend(shards.chunks(most).map(|shards| Group {
            partition,
            shards: shards.to_vec(),
        }));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_with_few_reports_have_a_turn_together() {
        let shard = |name: &str, number| ShardId {
            queue: crate::model::QueueName::new(name).unwrap(),
            number,
        };
        let sizes = |due: Vec<(ShardId, usize)>| -> Vec<(u32, usize)> {
            let groups = groups(due.into_iter().collect(), 2, TOGETHER);
            groups
                .into_iter()
                .map(|group| (group.partition, group.shards.len()))
                .collect()
        };
        assert_eq!(sizes(vec![]), []);
        let small = |count| {
            (0..count)
                .map(|n| (shard(&format!("q{n}"), 0), 100))
                .collect()
        };
        assert_eq!(sizes(small(TOGETHER + 1)), [(0, TOGETHER), (0, 1)]);
        let other = vec![
            (shard("a", 0), 1),
            (shard("a", 1), 1),
            (shard("a", 2), 1),
            (shard("a", 3), 1),
        ];
        assert_eq!(
            sizes(other),
            [(0, 2), (1, 2)],
            "by the partition of their reports"
        );
        let large = vec![
            (shard("a", 0), 1),
            (shard("b", 0), READ_BYTES),
            (shard("c", 0), 0),
            (shard("d", 0), 1),
        ];
        assert_eq!(sizes(large), [(0, 1), (0, 3)]);
    }
}
