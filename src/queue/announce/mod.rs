//! Announcements: steps tell the watchers of tasks which status a task took on.
//!
//! An announcement is a hint. It goes over a Redis channel per queue, in batches, at the tick
//! behind the step, and only while somebody watches the queue: a process with watchers keeps a
//! lease on the queue's entry of `<p>:watched`, and every process reads that key once a second.
//! When nobody watches, a step looks at a flag. Queues with `events = true` are always announced,
//! for programs of users that read the channel. A lost announcement delays what a watcher sees,
//! because its process asks SQL and Redis, too (`api/watching.rs`).
//!
//! `announcer.rs` is what steps and watchers call, `watchers.rs` has the watchers of this process,
//! `listening.rs` the exchange with Redis. The watchers of a queue (`queue_watch.rs`) share its
//! events (`ring.rs`).

mod announcer;
mod listening;
mod mailbox;
mod queue_watch;
mod ring;
mod watchers;

pub use self::{
    announcer::Announcer,
    mailbox::WatcherNews,
    queue_watch::QueueWatch,
    ring::TooSlow,
    watchers::{Full, Interest, Watch},
};
