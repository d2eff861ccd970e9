//! Keeps track of the shards that fail in a loop.

use std::{
    collections::HashMap,
    fmt::Display,
    time::{Duration, Instant},
};

use crate::model::ShardId;

/// The least and the most time for which a shard is left out.
const LEFT_OUT: Duration = Duration::from_secs(1);
const LEFT_OUT_AT_MOST: Duration = Duration::from_secs(30);
/// How long to leave out a shard whose failure somebody has to fix.
const LEFT_OUT_FOR_HELP: Duration = Duration::from_secs(60);
/// The most shards of one round that the log names.
const NAMED: usize = 10;

/// A loop's shards that failed. Each is left out for as long as its failure took, so that the
/// others have at least half of the loop's time.
#[derive(Debug)]
pub struct Failing<E> {
    until: HashMap<ShardId, Instant>,
    /// The failures of this round, and whether each is new.
    failed: Vec<(ShardId, E, bool)>,
    done: usize,
}

/// The first failure of a round in which shards failed and none succeeded.
#[derive(Debug)]
pub struct FailedRound<E> {
    pub step: &'static str,
    pub shard: ShardId,
    pub cause: E,
}

impl<E> Default for Failing<E> {
    fn default() -> Self {
        Self {
            until: HashMap::new(),
            failed: Vec::new(),
            done: 0,
        }
    }
}

impl<E: Display> Failing<E> {
    pub fn leaves_out(&self, shard: &ShardId) -> bool {
        self.until
            .get(shard)
            .is_some_and(|until| Instant::now() < *until)
    }

    /// Records the outcome of a shard's turn that began at `began`.
    pub fn note<T>(&mut self, shard: &ShardId, began: Instant, outcome: Result<T, E>) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.done += 1;
                self.until.remove(shard);
                Some(value)
            }
            Err(error) => {
                let pause = began.elapsed().clamp(LEFT_OUT, LEFT_OUT_AT_MOST);
                let is_new = self
                    .until
                    .insert(shard.clone(), Instant::now() + pause)
                    .is_none();
                self.failed.push((shard.clone(), error, is_new));
                None
            }
        }
    }

    /// Records a failure that somebody has to fix, and that says nothing about the other shards.
    pub fn needs_help(&mut self, shard: &ShardId, error: E) {
        let is_new = self
            .until
            .insert(shard.clone(), Instant::now() + LEFT_OUT_FOR_HELP)
            .is_none();
        self.failed.push((shard.clone(), error, is_new));
        self.done += 1;
    }

    /// The shards that failed in this round.
    pub fn failed(&self) -> impl Iterator<Item = &ShardId> {
        self.failed.iter().map(|(shard, ..)| shard)
    }

    /// Ends a round. Returns an error if some shards failed and none succeeded: then the shards are
    /// not the cause.
    pub fn end_round(&mut self, step: &'static str) -> Result<(), FailedRound<E>> {
        if self.done == 0 && !self.failed.is_empty() {
            self.until.clear();
            let (shard, cause, _) = self.failed.swap_remove(0);
            self.failed.clear();
            return Err(FailedRound { step, shard, cause });
        }
        self.end_part(step);
        Ok(())
    }

    /// Ends a part of a round in which other things succeeded. So the shards that failed are the
    /// cause, even if all of them failed.
    pub fn end_part(&mut self, step: &'static str) {
        let now = Instant::now();
        // If a shard has not failed again for long, it is gone.
        self.until
            .retain(|_, until| now < *until + LEFT_OUT_AT_MOST);
        self.done = 0;
        for (shard, error, _) in self
            .failed
            .drain(..)
            .filter(|(.., is_new)| *is_new)
            .take(NAMED)
        {
            tracing::warn!(%shard, "cannot {step} {shard}, which is tried again from time to time: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(number: u32) -> ShardId {
        ShardId {
            queue: crate::model::QueueName::new("q").unwrap(),
            number,
        }
    }

    #[test]
    fn one_that_fails_is_left_out_and_no_error_where_others_are_done() {
        let mut failing = Failing::default();
        let began = Instant::now();
        assert_eq!(failing.note(&shard(0), began, Ok(7)), Some(7));
        assert_eq!(failing.note::<()>(&shard(1), began, Err("no")), None);
        assert!(failing.end_round("tend").is_ok());
        assert_eq!([0, 1].map(|n| failing.leaves_out(&shard(n))), [false, true]);

        failing.note::<()>(&shard(1), began, Err("no"));
        let FailedRound {
            step,
            shard: failed,
            cause,
        } = failing.end_round("tend").unwrap_err();
        assert_eq!((step, failed, cause), ("tend", shard(1), "no"));
        failing.note(&shard(1), began, Ok(()));
        assert!(!failing.leaves_out(&shard(1)) && failing.end_round("tend").is_ok());

        failing.needs_help(&shard(1), "too large");
        assert!(failing.end_round("tend").is_ok() && failing.leaves_out(&shard(1)));

        failing.note::<()>(&shard(0), began, Err("no"));
        failing.end_part("tend");
        assert!(
            failing.leaves_out(&shard(0)) && failing.end_round("tend").is_ok(),
            "that part is over"
        );
    }
}
