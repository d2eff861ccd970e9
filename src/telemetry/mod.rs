//! Logs and metrics.

mod error;
pub mod logging;
pub mod metrics;
mod series;

pub use self::error::Error;
