//! The messages of `proto/taskd/v1/taskd.proto` and the clients of its services. `make proto`
//! generates `pb/`.

/// Generated code; its comments are in the proto.
#[allow(missing_docs, unreachable_pub)]
#[allow(clippy::large_enum_variant, clippy::doc_lazy_continuation, clippy::too_many_lines)]
#[rustfmt::skip]
mod generated;

pub use generated::*;
