//! Tasks: how they are stored, settled, sent again and removed, and how they are read.

pub(crate) mod counts;
pub(crate) mod events;
pub(crate) mod expired_keys;
pub(crate) mod groups;
pub(crate) mod idempotency;
pub(crate) mod insert;
pub(crate) mod keys;
pub(crate) mod letters;
pub(crate) mod owned;
pub(crate) mod pending;
pub(crate) mod progress;
pub(crate) mod reads;
pub(crate) mod retention;
pub(crate) mod search;
pub(crate) mod settle;
