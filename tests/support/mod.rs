//! What the test targets share: real servers, and the suites that run on more than one of them.
#![allow(dead_code, unreachable_pub, unused_macros, unused_imports, reason = "no target uses all of it")]

pub(crate) mod bus_contract;
pub(crate) mod kafka;
pub(crate) mod mariadb;
pub(crate) mod redis;
pub(crate) mod sqlite;
#[macro_use]
pub(crate) mod store_contract;
