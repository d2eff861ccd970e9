//! The reader of `pipeline`.

use crate::pipelines::context::Context;

/// The reader. Each of its steps has a file of its own.
#[derive(Clone)]
pub(super) struct Fanout(pub(super) Context);

/// The most shards that are called concurrently.
pub(super) const AT_ONCE: usize = 64;
