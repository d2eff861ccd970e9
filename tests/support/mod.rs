//! What several test targets need: real servers, and the suites that run on more than one of them.
#![allow(dead_code, unused_macros, unused_imports)] // each target uses its part

pub mod bus_contract;
pub mod kafka;
pub mod redis;
