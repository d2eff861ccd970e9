//! taskd is a durable task queue for work that grows while it is being done.
//!
//! The modules are listed in the order of their layers; `ARCHITECTURE.md` follows one task through
//! all of them. A module imports only from its own group and those above it, and no files import
//! each other in a cycle (`tests/it/architecture.rs`).

// `cli::print` does not panic when the reader has closed stdout or stderr.
#![warn(clippy::print_stderr, clippy::print_stdout)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

// What everything else builds on.
pub mod config;
pub mod model;
pub mod runtime;
pub mod telemetry;
pub mod wire;
pub mod workflow;

// The boundaries, one folder each.
pub mod bus;
pub mod coordination;
pub mod dedup;
pub mod embedded;
pub mod enrichment;
pub mod feeds;
pub mod outbound;
pub mod queue;
pub mod redis_pool;
pub mod store;

// The pipelines, and the operations that every protocol calls.
pub mod api;
pub mod pipelines;

// The entry points and the composition root.
pub mod app;
pub mod cli;
pub mod ingress;

/// Its examples are compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Its examples are compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/workers.md")]
struct Workers;
