//! The quick tests: everything that needs no more than a redis-server and SQLite.

mod ingress_cli;
mod ingress_grpc;
mod ingress_http;
