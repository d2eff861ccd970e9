//! The tests that need more than redis-server and SQLite: other servers, or processes that are killed.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod api;
mod bus_kafka;
mod crawl;
mod flushall;
mod lifecycle;
mod pressure;
mod processes;
mod recovery;
mod redis_access;
mod redis_cluster;
mod redis_wait;
mod store_mysql;
