//! Logs, metrics and spans.

mod error;
pub mod logging;
pub mod metrics;
mod series;
pub mod traces;

pub use self::error::Error;
