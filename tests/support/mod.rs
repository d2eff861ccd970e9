//! What the test targets share.
#![allow(dead_code, unused_macros, unused_imports, reason = "no target uses all of it")]

pub(crate) mod mariadb;
pub(crate) mod sqlite;
#[macro_use]
pub(crate) mod store_contract;
