//! Moves tasks that waited in SQL for a full queue straight into it, when it is not full any more.
//!
//! Unlike new tasks, these may be in the queue already: enqueued by a process that was killed
//! before it marked them, or by the watchdog of another process. The queue ignores a task that it
//! knows, but only until it forgets a finished one. So the fence for such tasks also counts how
//! often the shard has forgotten tasks. If SQL shows a task as unfinished after the fence was read,
//! and the fence has not moved since, the queue has not forgotten it. A release moves the fence, as
//! a record flagged `again` does, because the process that stored the task may still be held up.
//!
//! Crash windows: before the script, and before the mark, the tasks still wait in SQL, and are
//! released again.

use std::collections::{HashMap, HashSet};

use futures::future::join_all;

use super::{RELEASED_AT_ONCE, Shortcut, call};
use crate::{
    model::{Offset, ShardId, TaskId, TaskRow},
    queue::{self, Fence, Source},
    store::{Published, Turn},
};

/// The fences of some shards at one moment, by partition.
pub struct Fences(HashMap<u32, (ShardId, Fence)>);

impl Fences {
    pub fn has(&self, partition: u32) -> bool {
        self.0.contains_key(&partition)
    }
}

/// The outcome of [`Shortcut::release`]. Tasks that are not published keep waiting.
#[derive(Default)]
pub struct Released {
    /// The tasks that are in the queue.
    pub published: Vec<Published>,
    /// The tasks whose limit keys have enough tasks in the queue.
    pub crowded: Vec<TaskId>,
    /// A shard is full for its next task.
    pub is_full: bool,
    /// A fence has moved. To enqueue the task, read the fence again, and then the task from SQL.
    pub has_moved: bool,
    /// The call of this shard failed. Its tasks may be in the queue.
    pub error: Option<(ShardId, queue::Error)>,
}

impl Shortcut {
    /// Returns the fences of the shards into which tasks may be released, if they are read from SQL
    /// after this call. Tasks of the other shards go by the bus.
    pub async fn fences(&self, shards: Vec<ShardId>) -> Fences {
        let looks = shards.into_iter().map(|shard| async move {
            if !self.wait_until_read(&shard).await {
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

    /// Enqueues tasks of the shards whose fences are known, in their order. Takes as many of each
    /// shard as fit into one call, because the call moves the fence.
    pub async fn release(&self, rows: &[(&TaskRow, Turn)], fences: &Fences) -> Released {
        let mut calls = Vec::new();
        for (shard, fence) in fences.0.values() {
            let rows: Vec<_> = rows
                .iter()
                .filter(|(row, _)| row.partition == shard.number)
                .copied()
                .collect();
            if !rows.is_empty() {
                calls.push(async move {
                    let now = call(&rows, RELEASED_AT_ONCE);
                    let put = self.put(shard, now, Source::Waiting(fence)).await;
                    let crowded: HashSet<TaskId> = put.crowded.iter().copied().collect();
                    let tasks: Vec<_> = now[..put.count]
                        .iter()
                        .map(|(row, turn)| (row.id, *turn))
                        .filter(|(id, _)| !crowded.contains(id))
                        .collect();
                    (shard, tasks, put.count < now.len(), put)
                });
            }
        }
        let mut released = Released::default();
        for (shard, tasks, is_over, put) in join_all(calls).await {
            released.crowded.extend(put.crowded);
            match put.refused {
                Some(Ok(_)) => released.has_moved = true,
                // The shard was lost or closed since.
                Some(Err(queue::Error::NoGeneration)) => released.is_full = true,
                Some(Err(error)) => released.error = Some((shard.clone(), error)),
                None => released.is_full |= is_over,
            }
            if !tasks.is_empty() {
                // As for new tasks: if the queue has no record of such a task, none will come.
                released.published.push(Published {
                    partition: shard.number,
                    offset: Offset::default(),
                    tasks,
                });
            }
        }
        released
    }
}
