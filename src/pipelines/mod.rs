//! What moves tasks: three pipelines, the service that workers call, and what they share.

pub mod memory;
pub mod outbox;

pub mod discovery;
pub mod fanout;
pub mod tasks;
pub mod watchdog;
