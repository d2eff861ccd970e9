//! Reproducible randomness: everything random in this test derives from one seed.

use proptest::{
    prelude::RngExt,
    test_runner::{RngAlgorithm, TestRng},
};

pub(crate) struct Dice(TestRng);

impl Dice {
    /// Creates an independent sequence for each `who`, so that they do not affect each other.
    pub(crate) fn new(seed: u64, who: &str) -> Self {
        use sha2::{Digest, Sha256};
        let bytes = Sha256::new()
            .chain_update(seed.to_be_bytes())
            .chain_update(who)
            .finalize();
        Self(TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
    }

    /// A number from 0 to n - 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n)
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
