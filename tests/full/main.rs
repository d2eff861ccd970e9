<<<<<<< HEAD
//! The tests that need more than redis-server and SQLite: other servers, or processes that are killed.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod store_mysql;
=======
//! The tests that need the servers of a production setup.

#[path = "../support/mod.rs"]
mod support;

mod bus_kafka;
>>>>>>> bus
