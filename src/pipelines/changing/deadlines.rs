//! Ends tasks whose deadline has passed.
//!
//! SQL stores the deadline at the insert. The queue decides in one script, as it does for a cancel,
//! and its report ends the task in SQL, like that of any other death.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt, stream};

use super::{AT_ONCE, Changing, Error, MOST};
use crate::{
    model::{ChangingTask, ShardId, deadline_passed},
    queue::Arbitrated,
    store::Overdue,
};

/// How long a shard may take. Its tasks are tried again later, and other shards need not wait for
/// it.
const WITHIN: Duration = Duration::from_secs(2);

impl Changing {
    /// Ends tasks. Returns how many died of their deadline, and the first error. The tasks of a
    /// shard that failed stay as they are.
    pub async fn end_overdue(&self, overdue: Vec<Overdue>) -> (usize, Option<Error>) {
        let mut by_shard: BTreeMap<ShardId, Vec<Overdue>> = BTreeMap::new();
        for one in overdue {
            by_shard
                .entry(one.task.shard.clone())
                .or_default()
                .push(one);
        }
        let calls = by_shard.into_iter().map(|(shard, overdue)| async move {
            let ended = tokio::time::timeout(WITHIN, self.end_in(&shard, &overdue)).await;
            ended.unwrap_or(Err(Error::Silent {
                shard,
                within: WITHIN,
            }))
        });
        let ended: Vec<_> = stream::iter(calls)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut dead = 0;
        let mut failed = None;
        for ended in ended {
            match ended {
                Ok(count) => dead += count,
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        (dead, failed)
    }

    async fn end_in(&self, shard: &ShardId, overdue: &[Overdue]) -> Result<usize, Error> {
        let mut dead = 0;
        for overdue in overdue.chunks(MOST) {
            let tasks: Vec<(&ChangingTask, String)> = overdue
                .iter()
                .map(|one| (&one.task, deadline_passed(one.deadline_unix_ms)))
                .collect();
            let decided = self
                .when_open(shard, || self.queue.end_overdue(shard, &tasks))
                .await?;
            dead += decided
                .answers
                .iter()
                .filter(|answer| **answer == Arbitrated::Done)
                .count();
        }
        Ok(dead)
    }
}
