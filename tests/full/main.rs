//! The tests that need the servers of a production setup.

#[path = "../support/mod.rs"]
mod support;

mod bus_kafka;
