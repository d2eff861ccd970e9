//! The quick tests: everything that needs no more than a redis-server and SQLite.

mod architecture;
mod embedded;
#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod store_sqlite;
