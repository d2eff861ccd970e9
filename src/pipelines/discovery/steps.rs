//! The steps that both inputs of discovery take.

use std::{sync::Arc, time::Instant};

use crate::{
    model::{QueueName, Scope},
    pipelines::{admission::NoName, context::Context, shortcut::Moment},
    runtime::Supervisor,
};

/// When a step that stores tasks began, and the moment before.
pub(super) type Began = (Instant, Option<Moment>);

fn no_name(queue: &QueueName, max: usize, why: NoName) -> String {
    match why {
        NoName::All => {
            format!(
                "queue {queue} is new, and there are {max} queues already (max_queues); use one of those"
            )
        }
        NoName::OfScope => format!(
            "queue {queue} is new, and the scope of a token has {} queues already, half of max_queues; use one of those",
            (max / 2).max(1)
        ),
    }
}

impl Context {
    /// Admits tasks of a queue. The name of a new queue must fit into the limit on names, and into
    /// that of the caller's scope, if there is one.
    pub(super) fn let_in(&self, queue: &QueueName, scope: Option<&Scope>) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        self.occupancy
            .lets_in(queue, max, &self.settings.queues, scope)
            .map_err(|why| no_name(queue, max, why))
    }

    /// Admits discovered tasks of a queue.
    pub(super) fn let_in_discovered(&self, queue: &QueueName) -> Result<(), String> {
        let max = self.settings.discovery.max_queues;
        self.occupancy
            .lets_in_discovered(queue, max, &self.settings.queues)
            .map_err(|why| no_name(queue, max, why))
    }

    /// Starts the loop that writes marks.
    pub(super) fn start_marking(&self, supervisor: &Supervisor) {
        let of = (self.filter.clone(), Arc::clone(&self.settings));
        supervisor.spawn_loop("discovery/marks", of, |(filter, settings), cx| async move {
            filter
                .write_marks(|queue| settings.queues.get(queue).filter_keys, cx)
                .await;
        });
    }
}
