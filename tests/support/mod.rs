//! What several test targets need: real servers, and the suites that run on more than one of them.
// Each target uses its part, and is a crate of its own.
#![allow(dead_code, unused_imports, unused_macros, unreachable_pub)]

pub mod bus_contract;
pub mod kafka;
pub mod redis;
