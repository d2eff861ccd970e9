//! What is to be published, what was, and where: the outbox, batches and shards.

pub(crate) mod batches;
pub(crate) mod entries;
pub(crate) mod pages;
pub(crate) mod place;
pub(crate) mod rebuild;
pub(crate) mod shards;
pub(crate) mod walk;
