//! HTTP and gRPC.
