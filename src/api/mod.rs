//! The operations, one function each. Every protocol calls them.

pub mod query;
