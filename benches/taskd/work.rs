//! The shape of the work, for taskd and for its limits.

use std::time::Duration;

/// The callers and the sizes of their calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) tasks: usize,
    pub(crate) inserters: usize,
    pub(crate) insert_batch: usize,
    pub(crate) workers: usize,
    /// Tasks of a get call, and of the complete call behind it.
    pub(crate) batch: usize,
}

/// The pause between single tasks. All becomes idle in it, and it keeps no rhythm with the loops of taskd.
pub(crate) fn pause(sample: usize) -> Duration {
    Duration::from_micros(5_000 + (sample as u64 * 2_654_435_761) % 10_000)
}
