//! Converts the books for the service `Operator`.

use super::{pb, time::timestamp};
use crate::model::{Books, BooksState, QueueBooks};

impl From<Books> for pb::Books {
    fn from(books: Books) -> Self {
        let bus = books.bus.unwrap_or_default();
        Self {
            at: Some(timestamp(books.at_unix_ms)),
            pipeline: bus.pipeline,
            task_results: bus.task_results,
            rejected_elsewhere: books.rejected_elsewhere,
            queues: books.queues.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<QueueBooks> for pb::QueueBooks {
    fn from(of: QueueBooks) -> Self {
        let state = match of.state {
            BooksState::Balanced => pb::BooksState::Balanced,
            BooksState::Moving => pb::BooksState::Moving,
            BooksState::Unbalanced => pb::BooksState::Unbalanced,
        };
        let stored = of.stored();
        let held = of.held;
        Self {
            queue: of.queue.as_str().to_owned(),
            state: state.into(),
            stored,
            duplicates: of.duplicates,
            rejected: of.rejected,
            completed: of.completed,
            dead: of.dead,
            cancelled: of.cancelled,
            held: held.total,
            fresh: held.fresh,
            parked: held.parked,
            crowded: held.crowded,
            behind: held.behind,
            scheduled: held.scheduled,
            missing: held.missing,
            between: held.between,
            waiting: held.waiting,
            behind_limits: held.behind_limits,
            assigned: held.assigned,
            delayed: held.delayed,
            leases: held.leases,
            reports: held.reports,
            lanes: held
                .lanes
                .into_iter()
                .map(|(lane, length)| (lane.to_owned(), length))
                .collect(),
            lost_shards: held.lost_shards,
        }
    }
}
