//! Pipelines that move tasks, the service that workers call, and what they share.

pub mod admission;
pub mod changing;
pub mod checking;
pub mod context;
pub mod memory;
pub mod publishing;
pub mod shortcut;

pub mod discovery;
pub mod fanout;
pub mod tasks;
pub mod watchdog;
pub mod workflows;
