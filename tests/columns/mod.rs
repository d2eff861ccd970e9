//! Tests through the running binary on both columns of backends: `it` runs them on taskd's own Redis and SQLite, `full`
//! on MariaDB, Kafka and a Redis Cluster. `crate::column` starts taskd.

mod access;
pub(crate) mod dead_letters;
mod enrichment;
pub(crate) mod explain;
pub(crate) mod jobs;
mod search;
