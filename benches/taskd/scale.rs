//! The sizes of a run: the full one, and a quick one that measures nothing.

use std::time::Duration;

/// The sizes of a run.
pub(crate) struct Scale {
    pub(crate) runs: usize,
    pub(crate) tasks: usize,
    pub(crate) single_tasks: usize,
    pub(crate) latency_samples: usize,
    /// Tasks of which the CPU is taken, at 500 a second.
    pub(crate) paced: u32,
    /// Arguments of `taskd bench flat start`.
    pub(crate) compared: &'static [&'static str],
    /// Tasks at each added round trip.
    pub(crate) delayed: usize,
    /// Tasks that wait while a worker claims.
    pub(crate) waiting: Vec<usize>,
    /// Claims of one kind in one run.
    pub(crate) claims: usize,
    /// Lines inserted through HTTP.
    pub(crate) lines: usize,
    /// Tasks of a fanout that is behind, and of a Redis that is lost.
    pub(crate) rebuilt: usize,
    /// Empty queues, more in each step.
    pub(crate) queues: Vec<usize>,
    /// New queues while another works.
    pub(crate) new_names: usize,
    /// NUM of tasks.
    pub(crate) replicas: Vec<u32>,
    pub(crate) tasks_of_replicas: usize,
    /// Tasks of a database that is searched.
    pub(crate) searched: Vec<usize>,
    /// How long tasks come faster than taskd can take them, and how long at a part of that.
    pub(crate) overloaded_for: &'static str,
    pub(crate) loaded_for: &'static str,
    /// Workers that wait for tasks, and how long.
    pub(crate) waiting_workers: usize,
    pub(crate) wait_for: Duration,
}

impl Scale {
    pub(crate) fn full() -> Self {
        Self {
            runs: 3,
            // Below what a queue has room for.
            tasks: 80_000,
            single_tasks: 20_000,
            latency_samples: 300,
            paced: 2_500,
            compared: &[],
            delayed: 40_000,
            waiting: vec![10, 10_000, 1_000_000],
            claims: 200,
            lines: 60_000,
            rebuilt: 100_000,
            queues: vec![1, 1000, 10_000],
            new_names: 1000,
            replicas: vec![1, 10, 100, 1000],
            tasks_of_replicas: 100,
            searched: vec![10_000, 10_000_000],
            overloaded_for: "1s",
            loaded_for: "10s",
            waiting_workers: 10_000,
            wait_for: Duration::from_secs(20),
        }
    }

    pub(crate) fn quick() -> Self {
        Self {
            runs: 1,
            tasks: 5_000,
            single_tasks: 1_000,
            latency_samples: 20,
            paced: 250,
            compared: &[
                "--waiting",
                "1000,3000",
                "--taken",
                "1000",
                "--many-workers",
                "100",
                "--many-queues",
                "20",
            ],
            delayed: 1_000,
            waiting: vec![10, 2_000],
            claims: 20,
            lines: 4_000,
            rebuilt: 4_000,
            queues: vec![1, 20],
            new_names: 50,
            replicas: vec![1, 5],
            tasks_of_replicas: 10,
            searched: vec![2_000, 20_000],
            overloaded_for: "50ms",
            loaded_for: "1s",
            waiting_workers: 600,
            wait_for: Duration::from_secs(2),
        }
    }
}
