//! Definitions of the Open Workflow Specification DSL 1.0, read from YAML or JSON, without I/O.

mod model;
mod period;

pub use self::model::*;
