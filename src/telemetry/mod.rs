//! Logs, metrics and spans.

mod error;
pub mod logging;
pub mod metrics;
mod openmetrics;
mod series;
pub mod traces;

pub use self::{error::Error, openmetrics::OPENMETRICS};
