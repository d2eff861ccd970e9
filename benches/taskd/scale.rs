//! The sizes of a run: the full one, and a quick one that only checks that everything works.

use std::time::Duration;

/// The sizes of a run.
pub(crate) struct Scale {
    pub(crate) runs: usize,
    pub(crate) tasks: usize,
    pub(crate) single_tasks: usize,
    pub(crate) latency_samples: usize,
    /// Tasks whose CPU is measured, at 500 per second.
    pub(crate) paced: u32,
    /// The arguments of `taskd bench flat start`.
    pub(crate) compared: &'static [&'static str],
    /// The arguments of `taskd bench limits`.
    pub(crate) limited: &'static [&'static str],
    /// Tasks per added delay.
    pub(crate) delayed: usize,
    /// Tasks that wait while a worker claims.
    pub(crate) waiting: Vec<usize>,
    /// Claims per case and run.
    pub(crate) claims: usize,
    /// Lines inserted through HTTP.
    pub(crate) lines: usize,
    /// Tasks in the fanout's backlog, and in a Redis that loses everything.
    pub(crate) rebuilt: usize,
    /// How many empty queues, in increasing steps.
    pub(crate) queues: Vec<usize>,
    /// New queues that appear while another one is measured.
    pub(crate) new_names: usize,
    /// Values of NUM.
    pub(crate) replicas: Vec<u32>,
    pub(crate) tasks_of_replicas: usize,
    /// Tasks in the database that is searched.
    pub(crate) searched: Vec<usize>,
    /// Tasks and queues that the dashboard shows, and how long viewers look.
    pub(crate) shown: [usize; 2],
    pub(crate) look_for: Duration,
    /// How long tasks arrive faster than taskd can handle, and how long at a percentage of that
    /// rate.
    pub(crate) overloaded_for: &'static str,
    pub(crate) loaded_for: &'static str,
    /// How many workers wait for tasks, and for how long.
    pub(crate) waiting_workers: usize,
    pub(crate) wait_for: Duration,
}

impl Scale {
    pub(crate) fn full() -> Self {
        Self {
            runs: 3,
            // Less than the capacity of a queue.
            tasks: 80_000,
            single_tasks: 20_000,
            latency_samples: 300,
            paced: 2_500,
            compared: &[],
            limited: &[],
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
            shown: [1_000_000, 1_000],
            look_for: Duration::from_secs(40),
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
            limited: &[
                "--tasks",
                "2000",
                "--blocked",
                "5000",
                "--paced-keys",
                "100",
                "--duration",
                "2s",
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
            shown: [2_000, 20],
            look_for: Duration::from_secs(4),
            overloaded_for: "50ms",
            loaded_for: "1s",
            waiting_workers: 600,
            wait_for: Duration::from_secs(2),
        }
    }
}
