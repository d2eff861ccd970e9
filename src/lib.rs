//! taskd works through an open-ended set of tasks that grows while it is being worked on.
//!
//! The modules stand in the order of their layers; `ARCHITECTURE.md` walks one task through all of
//! them. Imports point from the last group to the first, never back, and no files form a circle
//! (`tests/it/architecture.rs`).

// `cli::print` does not panic where the reader has closed stdout or stderr.
#![warn(clippy::print_stderr, clippy::print_stdout)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

// The ground of everything else.
pub mod config;
pub mod model;
pub mod runtime;
pub mod telemetry;
pub mod wire;

// The boundaries, one folder each.
pub mod bus;
pub mod coordination;
pub mod dedup;
pub mod embedded;
pub mod enrichment;
pub mod queue;
pub mod redis_pool;
pub mod store;

// The pipelines, and the operations that every protocol calls.
pub mod api;
pub mod pipelines;

// The ways in and the composition root.
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
