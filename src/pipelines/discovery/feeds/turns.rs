//! Whose turn it is: the cursors that may have records to read, by subscription.

use std::collections::{HashMap, VecDeque};

use crate::model::{PositionKey, SubscriptionName};

/// How many steps one subscription may have, so that one whose inserts take long holds up no other.
const STEPS_OF_ONE: usize = 8;

/// The cursors that are due. Those of a subscription come in the order in which they became due, and
/// subscriptions take turns.
#[derive(Default)]
pub(super) struct Turns {
    of: HashMap<SubscriptionName, OfOne>,
    /// The subscriptions that have due cursors, and room for a step.
    ready: VecDeque<SubscriptionName>,
}

#[derive(Default)]
struct OfOne {
    due: VecDeque<PositionKey>,
    /// How many steps run.
    running: usize,
    is_ready: bool,
}

impl Turns {
    pub(super) fn push(&mut self, key: PositionKey) {
        let name = key.subscription.clone();
        self.of.entry(name.clone()).or_default().due.push_back(key);
        self.settle(name);
    }

    /// Takes the next cursor. Its step runs until [`Self::end`].
    pub(super) fn next(&mut self) -> Option<PositionKey> {
        let name = self.ready.pop_front()?;
        let one = self.of.get_mut(&name)?;
        one.is_ready = false;
        let key = one.due.pop_front()?;
        one.running += 1;
        self.settle(name);
        Some(key)
    }

    /// A step of a subscription has ended.
    pub(super) fn end(&mut self, name: &SubscriptionName) {
        if let Some(one) = self.of.get_mut(name) {
            one.running = one.running.saturating_sub(1);
            self.settle(name.clone());
        }
    }

    /// Forgets what is due. The steps that run are still counted.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
        self.of.retain(|_, one| {
            one.due.clear();
            one.is_ready = false;
            one.running > 0
        });
    }

    fn settle(&mut self, name: SubscriptionName) {
        let Some(one) = self.of.get_mut(&name) else {
            return;
        };
        if one.due.is_empty() {
            if one.running == 0 {
                self.of.remove(&name);
            }
        } else if !one.is_ready && one.running < STEPS_OF_ONE {
            one.is_ready = true;
            self.ready.push_back(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TopicName;

    fn key(subscription: &str, partition: u32) -> PositionKey {
        PositionKey {
            subscription: SubscriptionName::new(subscription).unwrap(),
            topic: TopicName::new("t").unwrap(),
            partition,
        }
    }

    #[test]
    fn a_subscription_with_many_due_cursors_holds_up_no_other() {
        let mut turns = Turns::default();
        for partition in 0..10 {
            turns.push(key("a", partition));
        }
        turns.push(key("b", 0));
        assert_eq!(turns.next(), Some(key("a", 0)));
        assert_eq!(turns.next(), Some(key("b", 0)));
        for partition in 1..8 {
            assert_eq!(turns.next(), Some(key("a", partition)));
        }
        // It has no room for another step, whatever becomes due.
        turns.push(key("a", 10));
        assert_eq!(turns.next(), None);
        turns.end(&key("a", 0).subscription);
        assert_eq!(turns.next(), Some(key("a", 8)));
        assert_eq!(turns.next(), None);
    }

    #[test]
    fn steps_that_run_are_counted_after_all_was_forgotten() {
        let mut turns = Turns::default();
        let name = key("a", 0).subscription;
        for partition in 0..10 {
            turns.push(key("a", partition));
        }
        for _ in 0..8 {
            turns.next().unwrap();
        }
        turns.clear();
        turns.push(key("a", 3));
        assert_eq!(turns.next(), None);
        turns.end(&name);
        assert_eq!(turns.next(), Some(key("a", 3)));
        for _ in 0..8 {
            turns.end(&name);
        }
        assert!(turns.of.is_empty() && turns.ready.is_empty());
    }
}
