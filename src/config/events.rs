//! The setting `events`: which queues publish their events.

use std::collections::BTreeMap;

use super::Queues;
use crate::model::QueueName;

/// The queues whose events are published to topic `events` and to the queues' channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventQueues {
    /// Whether queues without a section of their own publish events.
    others: bool,
    /// The queues whose setting differs from `others`.
    named: BTreeMap<QueueName, bool>,
}

impl EventQueues {
    pub fn of(queues: &Queues) -> Self {
        let others = queues.default.events;
        let named = queues
            .named
            .iter()
            .filter(|(_, queue)| queue.events != others);
        Self {
            others,
            named: named
                .map(|(name, queue)| (name.clone(), queue.events))
                .collect(),
        }
    }

    pub fn is_on(&self, queue: &QueueName) -> bool {
        self.named.get(queue).copied().unwrap_or(self.others)
    }

    /// True if there may be a queue that publishes events.
    pub fn are_some_on(&self) -> bool {
        self.others || !self.named.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::QueueSettings;

    #[test]
    fn a_section_of_a_queue_decides_about_it_and_the_default_about_the_others() {
        let [a, b] = ["a", "b"].map(|name| QueueName::new(name).unwrap());
        let settings = |events| QueueSettings {
            events,
            ..Default::default()
        };
        let of = |default, of_a| {
            let named = [(a.clone(), settings(of_a))].into();
            EventQueues::of(&Queues {
                default: settings(default),
                named,
            })
        };
        let on = |queues: &EventQueues| (queues.is_on(&a), queues.is_on(&b), queues.are_some_on());
        assert_eq!(on(&of(false, false)), (false, false, false));
        assert_eq!(on(&of(false, true)), (true, false, true));
        assert_eq!(on(&of(true, false)), (false, true, true));
        assert_eq!(on(&of(true, true)), (true, true, true));
    }
}
