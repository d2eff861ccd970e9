//! Programs: definitions with names resolved, functions in the places of their calls, and
//! expressions and schemas compiled. The machine runs them.

mod code;
mod compile;
mod openapi;
mod task;
#[cfg(test)]
mod tests;
mod uri;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;

pub use self::task::Next;
pub(crate) use self::{
    code::{Code, Variable},
    openapi::Part,
    task::*,
    uri::{as_text, push_query},
};
pub use crate::model::HTTP_QUEUE;
use crate::{
    model::QueueName,
    workflow::definition::{Definition, Mistake},
};

/// The texts of the documents that a definition refers to, by their URIs.
pub type Documents = BTreeMap<String, Value>;

/// A definition that is ready to run.
#[derive(Debug)]
pub struct Program {
    /// The hash in hex of the definition, and of its documents if it has any. An execution is pinned to it.
    pub hash: String,
    pub namespace: String,
    pub name: String,
    pub version: String,
    /// The queues of its steps.
    pub queues: BTreeSet<QueueName>,
    /// The definition as JSON.
    pub(crate) source: Arc<Value>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) timeout: Option<Length>,
    /// The paths of the tasks of the workflow itself.
    pub(crate) list: List,
    pub(crate) tasks: BTreeMap<Arc<str>, Task>,
    /// The task of each branch of a fork, by the path of the branch.
    pub(crate) branches: BTreeMap<Arc<str>, Arc<str>>,
}

impl Program {
    /// Compiles a definition as it is stored: its text, and its documents as JSON or empty. The error
    /// is one line.
    pub fn of_stored(text: &str, documents: &str) -> Result<Self, String> {
        let first = |mistakes: Vec<Mistake>| {
            let first = mistakes.first().map(ToString::to_string);
            first.unwrap_or_default()
        };
        let documents = match documents {
            "" => Documents::new(),
            documents => serde_json::from_str(documents).map_err(|error| error.to_string())?,
        };
        let read = Definition::read(text).map_err(first)?;
        Self::compile(&read, &documents).map_err(first)
    }

    /// The task of a path. It was compiled, so a path of the log exists.
    pub(crate) fn task(&self, path: &str) -> Option<&Task> {
        self.tasks.get(path)
    }
}
