//! Protobuf: the generated messages, every conversion between them and `model`, and gRPC's codec.

mod call;
pub mod grpc_codec;
pub mod pb;
mod records;
pub mod time;

pub use records::{
    body, body_blob, completed_report, died_report, expiration, pipeline_record, read_body, report_batch, with_time,
};
