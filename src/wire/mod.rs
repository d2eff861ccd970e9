//! Protobuf: the generated messages, and gRPC's codec.

pub mod grpc_codec;
pub mod pb;
