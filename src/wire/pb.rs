//! The messages and services of `proto/taskd/v1`. `make proto` generates the files in `pb/`, and
//! those of the crate `taskd-client`: the messages of the API, and the clients of its services.

/// Generated code; its comments are in the proto.
#[allow(missing_docs, unreachable_pub)]
#[allow(clippy::large_enum_variant, clippy::doc_lazy_continuation, clippy::too_many_lines)]
#[rustfmt::skip]
mod generated;

pub use generated::*;
pub use taskd_client::pb::*;

/// For gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("pb/descriptors.bin");
