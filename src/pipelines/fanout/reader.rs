//! The reader of `pipeline`.

use crate::pipelines::context::Context;

/// The reader. Each of its steps has a file.
#[derive(Clone)]
pub(super) struct Fanout(pub(super) Context);

/// Shards that are called at a time.
pub(super) const AT_ONCE: usize = 64;
