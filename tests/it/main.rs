//! The quick tests: everything that needs no more than a redis-server and SQLite.

mod architecture;
mod embedded;
