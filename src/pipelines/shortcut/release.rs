//! Tasks that waited in SQL for room, straight into the queue.
//!
//! Unlike new tasks, these may be there already: by a process that was killed before it marked them, or by the watchdog
//! of another one. The queue ignores a task that it knows, until it forgets a finished one. So the fence of such tasks
//! also counts how often it has forgotten: what SQL showed unfinished behind a look at the fence is known while it
//! stands.
//!
//! Crash windows: before the script and before the mark the tasks still wait in SQL, and are released again.

use std::collections::HashMap;

use futures::future::join_all;

use super::Shortcut;
use crate::{
    model::{Offset, ShardId, TaskRow},
    queue::{self, Enqueued, Fence, Source},
    store::{Published, Turn},
};

/// The fences of some shards at one moment, by partition.
pub struct Fences(HashMap<u32, (ShardId, Fence)>);

impl Fences {
    pub fn has(&self, partition: u32) -> bool {
        self.0.contains_key(&partition)
    }
}

/// The outcome of [`Shortcut::release`].
#[derive(Default)]
pub struct Released {
    /// Those that are in the queue.
    pub published: Vec<Published>,
    /// The others wait on: there is no room for them, or a fence has moved.
    pub is_over: bool,
    /// A call failed; some of the others may be in the queue.
    pub error: Option<queue::Error>,
}

impl Shortcut {
    /// The fences of shards into which tasks may be released that are read from SQL behind this call. Tasks of the
    /// others go by the bus.
    pub async fn fences(&self, shards: Vec<ShardId>) -> Fences {
        let looks = shards.into_iter().map(|shard| async move {
            if !self.is_read(shard.number).await {
                return None;
            }
            match self.look(&shard).await {
                Ok(fence) => Some((shard.number, (shard, fence))),
                Err(outcome) => {
                    tracing::debug!("the fence of {shard} is not known: {outcome:?}");
                    None
                }
            }
        });
        Fences(join_all(looks).await.into_iter().flatten().collect())
    }

    /// Enqueues tasks of shards whose fences are known, in their order.
    pub async fn release(&self, rows: &[(&TaskRow, Turn)], fences: &Fences) -> Released {
        let mut released = Released::default();
        for (partition, (shard, fence)) in &fences.0 {
            let rows: Vec<_> = rows.iter().filter(|(row, _)| row.partition == *partition).copied().collect();
            let (count, refused) = self.put(shard, &rows, Source::Waiting(fence)).await;
            if count > 0 {
                let tasks = rows[..count].iter().map(|(row, turn)| (row.id, *turn)).collect();
                // As for new tasks: if the queue has no record of such a task, none will come.
                released.published.push(Published { partition: *partition, offset: Offset::default(), tasks });
            }
            released.is_over |= count < rows.len();
            match refused {
                Some(Err(error)) => released.error = Some(error),
                Some(Ok(Enqueued::Moved(_))) => tracing::debug!("the fence of {shard} has moved"),
                _ => {}
            }
        }
        released
    }
}
