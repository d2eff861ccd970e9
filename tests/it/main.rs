//! The quick tests: everything that needs no more than a redis-server and SQLite.

#[path = "../support/mod.rs"]
mod support;

mod bus_redis_streams;
