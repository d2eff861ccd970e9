//! The messages and services of `proto/taskd/v1`, generated at build time.

/// Generated code; its comments are in the proto.
mod generated {
    #![allow(missing_docs, unreachable_pub, clippy::large_enum_variant, clippy::doc_lazy_continuation)]
    tonic::include_proto!("taskd.v1");
}

pub use generated::*;

/// For gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
