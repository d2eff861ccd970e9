//! How the queues of a call share its tasks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::error::Error;
use crate::model::{ECHO, QueueName, shorten};

/// The highest weight of a queue.
const MAX_WEIGHT: u32 = 1000;

/// How the queues of a call share its tasks. Empty: priorities decide across queues.
#[derive(Clone, Default)]
pub(super) struct Weights(BTreeMap<QueueName, u32>);

impl Weights {
    pub(super) fn new(given: &HashMap<String, u32>, queues: &[QueueName]) -> Result<Self, Error> {
        let mut weights = BTreeMap::new();
        for (name, weight) in given {
            let Some(queue) = queues.iter().find(|queue| queue.as_str() == name) else {
                return Err(Error::Invalid(format!(
                    "weights names {:?}, which is not one of queues",
                    shorten(name, ECHO)
                )));
            };
            if !(1..=MAX_WEIGHT).contains(weight) {
                return Err(Error::Invalid(format!(
                    "weights gives {queue} {weight}; must be 1 to {MAX_WEIGHT}"
                )));
            }
            weights.insert(queue.clone(), *weight);
        }
        Ok(Self(weights))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns how many of `tasks` each of the queues gets in this turn, in proportion to their
    /// weights; the fractions add up over the turns.
    ///
    /// The queues lie one after the other on a line as long as there are tasks, each as long as its
    /// part of them. Of marks that are 1 apart, each gives a task to the queue on which it is. The
    /// first mark moves by the golden ratio each turn, so that also every second or third call
    /// comes to all places equally often. The queues are first in the answer in proportion to their
    /// weights, too, because a task that is larger than all shares of the bytes is alone in it.
    pub(super) fn shares<'q>(
        &self,
        queues: &BTreeSet<&'q QueueName>,
        tasks: usize,
        turn: usize,
    ) -> Vec<(&'q QueueName, usize)> {
        const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15; // its fraction, of 2^64
        let first_mark = (turn as u64).wrapping_mul(GOLDEN_RATIO) as f64 / 2f64.powi(64);
        let weight_of = |queue: &QueueName| self.0.get(queue).copied().unwrap_or(1);
        let all: u32 = queues.iter().map(|queue| weight_of(queue)).sum();
        let mut shares = Vec::with_capacity(queues.len());
        let mut weights_before = 0;
        let mut marks_before = 0;
        let mut first_queue = None;
        for queue in queues {
            weights_before += weight_of(queue);
            if first_mark * f64::from(all) < f64::from(weights_before) {
                first_queue = first_queue.or(Some(shares.len()));
            }
            let end = tasks as f64 * f64::from(weights_before) / f64::from(all);
            let marks = (end - first_mark).ceil().max(0.0) as usize;
            let marks = marks.clamp(marks_before, tasks);
            shares.push((*queue, marks - marks_before));
            marks_before = marks;
        }
        shares.rotate_left(first_queue.unwrap_or(0));
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_share_the_tasks_of_any_rhythm_of_calls_by_their_weights() {
        let [a, b, empty] = ["a", "b", "empty"].map(|name| QueueName::new(name).unwrap());
        let given = HashMap::from([("a".to_owned(), 3), ("empty".to_owned(), 100)]);
        let all = [a.clone(), b.clone(), empty];
        let weights = Weights::new(&given, &all).unwrap();
        let queues = BTreeSet::from([&a, &b]);
        for rhythm in 1..=20 {
            for tasks in [1, 2, 3, 8, 100] {
                let mut of_a = 0;
                let mut of_b = 0;
                let mut begin_with_a = 0;
                let calls = 400_usize.div_ceil(tasks);
                for call in 0..calls {
                    let shares = weights.shares(&queues, tasks, 7 + rhythm * call);
                    let share_of = |name: &QueueName| {
                        let share = shares.iter().find(|(queue, _)| *queue == name);
                        share.unwrap().1
                    };
                    assert_eq!(share_of(&a) + share_of(&b), tasks);
                    of_a += share_of(&a);
                    of_b += share_of(&b);
                    begin_with_a += usize::from(shares[0].0 == &a);
                }
                assert!(
                    begin_with_a.abs_diff(3 * (calls - begin_with_a)) <= 40,
                    "{begin_with_a} of {calls} calls begin with a"
                );
                assert!(
                    of_a.abs_diff(3 * of_b) <= 40,
                    "{of_a} and {of_b} of calls for {tasks}, each {rhythm}th"
                );
            }
        }
        for (name, weight, why) in [
            ("c", 1, "weights names \"c\", which is not one of queues"),
            ("a", 0, "weights gives a 0; must be 1 to 1000"),
            ("a", 1001, "weights gives a 1001; must be 1 to 1000"),
        ] {
            let given = HashMap::from([(name.to_owned(), weight)]);
            let error = Weights::new(&given, &all).err().unwrap();
            assert_eq!(error.to_string(), why);
        }
    }
}
