//! The Rust client of taskd: workers and inserts, over gRPC.
//!
//! A worker is a function that is called once for each task. This crate calls it for up to
//! [`Worker::concurrency`] tasks at a time, extends their leases while it runs, reports what it
//! returns in batches, keeps going while taskd is unavailable, and shuts down gracefully. It holds
//! a stream on which taskd sends tasks as soon as they are available, or polls ([`Worker::poll`]).
//!
//! ```no_run
//! use taskd_client::{Client, Done, Failure, Json, NewTask, Task, Worker};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), taskd_client::Error> {
//!     let client = Client::new("http://127.0.0.1:7601")?;
//!     Worker::new("rs-1", ["demo"]).concurrency(8).stop_on_signals().run(&client, work).await.map(drop)
//! }
//! async fn work(task: Task<Option<Json<Page>>>) -> Result<Done, Failure> {
//!     let depth = task.payload.as_ref().map_or(0, |page| page.depth);
//!     println!("{}", task.key());
//!     let child = |n| NewTask::new("demo", format!("{}/{n}", task.key())).json(&Page { depth: depth - 1 });
//!     let found = if depth > 0 { vec![child(0)?, child(1)?] } else { vec![] };
//!     Ok(Done::text("done").discover(found))
//! }
//! #[derive(serde::Deserialize, serde::Serialize)]
//! struct Page {
//!     depth: u32,
//! }
//! ```
//!
//! A handler that returns an error rejects its task: taskd retries it after the backoff of its
//! queue (see [`Failure`]). [`Client::insert`] inserts tasks. [`Mock`] replaces taskd in tests.

mod address;
mod backoff;
mod calls;
mod client;
mod duration;
mod error;
mod event;
mod extend;
mod held;
mod mock;
mod new_task;
mod options;
mod outcome;
mod report;
mod run;
mod session;
mod source;
mod stop;
mod surplus;
mod task;
mod token;
mod tree;
mod unary;
mod waiting;
mod worker;

/// Compiles the examples of the README as doctests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Crate;
}

/// The messages of `proto/taskd/v1/taskd.proto` and the clients of its services.
pub use taskd_proto::pb;

pub use self::{
    backoff::Backoff,
    client::{Client, ClientBuilder, Inserted, InsertedAs},
    error::Error,
    event::{Ended, Event, Summary},
    mock::Mock,
    new_task::{NewTask, Priority},
    options::Next,
    outcome::{Done, Failure},
    source::{EndedLease, Source},
    stop::Stop,
    task::{FromPayload, Json, Task, TaskInfo},
    token::Token,
    tree::NewTree,
    unary::Unary,
    waiting::Awaited,
    worker::Worker,
};
