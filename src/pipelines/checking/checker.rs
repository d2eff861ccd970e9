//! A checker: what it works with, and its pace.

use std::{sync::Arc, time::Instant};

use super::published::Published;
use crate::{
    bus::Bus,
    model::{Find, FindKind, ShardId, TaskId},
    queue::Shards,
    store::Store,
};

/// About 20 MiB.
const KEPT: usize = 200_000;

/// How fast a checker goes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Entries of a slice.
    pub(super) entries: usize,
    /// Records of a shard that are counted in one step, at most.
    pub(super) counted: usize,
    /// Records of a shard that a pass over it keeps in memory. A larger shard takes several passes.
    pub(super) kept: usize,
    /// The pause after a slice, as a multiple of the time that the slice took.
    rest: u32,
}

impl Pace {
    /// For an operator who waits.
    pub const FAST: Self = Self {
        entries: 500,
        counted: 10_000,
        kept: KEPT,
        rest: 0,
    };
    /// For a check that always runs in the background: takes a hundredth of the time.
    pub const BESIDE: Self = Self {
        entries: 100,
        counted: 2_000,
        kept: KEPT,
        rest: 99,
    };

    /// This pace with at most `kept` records in memory.
    pub fn keeping(self, kept: usize) -> Self {
        Self { kept, ..self }
    }
}

/// The checks. Cheap to clone.
#[derive(Clone)]
pub struct Checker {
    pub(super) store: Arc<dyn Store>,
    pub(super) queue: Shards,
    pub(super) published: Published,
    pub(super) pace: Pace,
}

impl Checker {
    pub fn new(store: Arc<dyn Store>, queue: Shards, bus: Arc<dyn Bus>, pace: Pace) -> Self {
        let published = Published::new(store.clone(), queue.clone(), bus);
        Self {
            store,
            queue,
            published,
            pace,
        }
    }

    /// Runs a step, and pauses after it.
    pub(super) async fn paced<T, E>(
        &self,
        step: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let began = Instant::now();
        let done = step.await;
        let rest = began.elapsed() * self.pace.rest;
        if !rest.is_zero() {
            tokio::time::sleep(rest).await;
        }
        done
    }
}

pub(super) fn find(
    kind: FindKind,
    shard: &ShardId,
    task: Option<TaskId>,
    says: String,
    mended: bool,
) -> Find {
    let queue = shard.queue.as_str().to_owned();
    let shard = Some(shard.number);
    Find::new(kind, queue, shard, task, says, mended)
}
