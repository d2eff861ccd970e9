//! Tests through the running binary on both columns of backends: `it` runs them on taskd's own
//! Redis and SQLite, `full` on MariaDB, Kafka and a Redis Cluster. `crate::column` starts taskd.

pub(crate) mod access;
mod access_names;
mod acts;
mod backoff;
mod bitmap;
pub(crate) mod books;
pub(crate) mod bulk;
pub(crate) mod changes;
pub(crate) mod dead_letters;
mod deadline;
mod drained;
mod enrichment;
mod event_topic;
pub(crate) mod events;
pub(crate) mod explain;
mod history;
mod idempotency;
mod live_changes;
mod pauses;
mod search;
mod shares;
mod streams;
pub(crate) mod workers;
pub(crate) mod workflows;
