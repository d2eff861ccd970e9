//! taskd works through an open-ended set of tasks that grows while it is being worked on.
//!
//! The modules in the order in which a task meets them; `ARCHITECTURE.md` walks one task through all of them.
//! Imports point from the last group to the first, never back (`tests/it/architecture.rs` checks it).

// What everything else is made of.
pub mod config;
pub mod model;
pub mod pb;
pub mod supervise;
pub mod telemetry;

// The boundaries: one folder each, with its trait and its backends.
pub mod bus;
pub mod dedup;
pub mod embedded;
pub mod queue;
pub mod redis_pool;
pub mod store;

// What pipelines share, then the pipelines and the service.
pub mod outbox;

pub mod discovery;
pub mod fanout;
pub mod reading;
pub mod tasks;
pub mod watchdog;

// The ways in, and the one file that puts it all together.
pub mod app;
pub mod cli;
pub mod ingress;
