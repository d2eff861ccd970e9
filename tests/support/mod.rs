//! What the test targets share.
#![allow(dead_code, unused_macros, unused_imports, reason = "no target uses all of it")]

pub mod mariadb;
pub mod sqlite;
#[macro_use]
pub mod store_contract;
