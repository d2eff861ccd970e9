//! The amount of work: of a whole run, and of each caller.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// The size of a whole run.
pub(crate) struct Scale {
    pub(crate) runs: usize,
    pub(crate) flow_tasks: usize,
    pub(crate) flow_single_tasks: usize,
    pub(crate) latency_samples: usize,
    /// Tasks that wait while something is claimed.
    pub(crate) waiting: Vec<usize>,
    /// Claims of one kind in one run.
    pub(crate) claims: usize,
    /// Lines inserted through HTTP.
    pub(crate) lines: usize,
    /// Tasks of a fanout that is behind, and of a Redis that is lost.
    pub(crate) rebuilt: usize,
    /// Empty queues, each time more.
    pub(crate) queues: Vec<usize>,
    /// Queues that come while another works.
    pub(crate) new_names: usize,
    /// NUM of tasks.
    pub(crate) replicas: Vec<u32>,
    pub(crate) tasks_of_replicas: usize,
}

impl Scale {
    pub(crate) fn full() -> Self {
        Self {
            runs: 3,
            // Below the 100,000 at which a queue is full.
            flow_tasks: 80_000,
            flow_single_tasks: 20_000,
            latency_samples: 300,
            waiting: vec![10, 10_000, 1_000_000],
            claims: 200,
            lines: 60_000,
            rebuilt: 100_000,
            queues: vec![1, 1000, 10_000],
            new_names: 1000,
            replicas: vec![1, 10, 100, 1000],
            tasks_of_replicas: 100,
        }
    }

    pub(crate) fn quick() -> Self {
        Self {
            runs: 1,
            flow_tasks: 5_000,
            flow_single_tasks: 1_000,
            latency_samples: 20,
            waiting: vec![10, 2_000],
            claims: 20,
            lines: 4_000,
            rebuilt: 4_000,
            queues: vec![1, 20],
            new_names: 50,
            replicas: vec![1, 5],
            tasks_of_replicas: 10,
        }
    }
}

/// How many callers do how much at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) tasks: usize,
    pub(crate) inserters: usize,
    pub(crate) insert_batch: usize,
    pub(crate) workers: usize,
    /// Tasks of a get call, and of the complete call behind it.
    pub(crate) batch: usize,
}

/// The pause between single tasks: long enough for taskd to be idle again, and not in step with its loops.
pub(crate) fn pause(sample: usize) -> Duration {
    Duration::from_micros(5_000 + (sample as u64 * 2_654_435_761) % 10_000)
}

/// Takes up to `most` of the rest; 0: there is none.
pub(crate) fn take(left: &AtomicUsize, most: usize) -> usize {
    let before = left.fetch_update(Relaxed, Relaxed, |left| (left > 0).then(|| left.saturating_sub(most)));
    before.map_or(0, |left| left.min(most))
}
