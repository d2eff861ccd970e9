//! What the test targets share: real servers, and the suites that run on more than one of them.
#![allow(dead_code, unused_macros, unused_imports, reason = "no target uses all of it")]

pub mod bus_contract;
pub mod kafka;
pub mod mariadb;
pub mod redis;
pub mod sqlite;
#[macro_use]
pub mod store_contract;
