//! Announcements: steps notify the watchers of tasks of the status that a task took on.
//!
//! An announcement is a hint. It goes over a Redis channel per queue, in batches, at the tick after
//! the step, and only while somebody watches the queue: a process with watchers keeps a lease on
//! the queue's entry of `<p>:watched`, and every process reads that key once a second. If nobody
//! watches, a step only reads a flag. Queues with `events = true` are always announced, for
//! programs of users that read the channel. If an announcement is lost, a watcher only sees the
//! change later, because its process asks SQL and Redis, too (`api/watching.rs`).
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
