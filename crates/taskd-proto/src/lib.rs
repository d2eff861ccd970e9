//! The messages of `proto/taskd/v1`, the clients and servers of its services, and their codec.
//!
//! `make proto` generates `pb/`.

pub mod codec;

/// Generated code. Its comments are in the `.proto` files.
#[allow(missing_docs, unreachable_pub)]
#[allow(clippy::large_enum_variant, clippy::doc_lazy_continuation, clippy::too_many_lines)]
#[rustfmt::skip]
#[path = "pb/generated.rs"]
pub mod pb;

/// For gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("pb/descriptors.bin");
