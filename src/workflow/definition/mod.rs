//! Definitions of the Open Workflow Specification DSL 1.0, read from YAML or JSON, without I/O.

mod calls;
mod canonical;
mod document;
mod expressions;
mod functions;
mod mistake;
mod model;
mod node;
mod parts;
mod period;
mod reader;
mod tasks;
#[cfg(test)]
mod tests;
mod yaml;

pub use self::{
    canonical::Canonical,
    functions::{MOST_TASK_LEVELS, MOST_TASKS},
    mistake::Mistake,
    model::*,
    yaml::MAX_DEFINITION_BYTES,
};
