//! Programs: definitions with names resolved, functions in the places of their calls, and
//! expressions and schemas compiled. The machine runs them.

mod code;
mod compile;
mod openapi;
#[cfg(test)]
mod tests;
mod uri;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;

pub(crate) use self::{
    code::{Code, Variable},
    openapi::{OpenApiCall, Part},
    uri::{UriTemplate, as_text, push_query},
};
use super::definition::{ErrorFilter, HttpOutput, RetryBackoff, StepOptions};
pub use super::machine::Next;
use crate::model::{PayloadSchema, QueueName};

/// The queue of HTTP calls, which taskd works through itself.
pub const HTTP_QUEUE: &str = "wf.http";

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

/// The paths of tasks, in order.
pub(crate) type List = Vec<Arc<str>>;

/// A task.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) name: String,
    /// Its definition, for expressions.
    pub(crate) definition: Arc<Value>,
    pub(crate) if_: Option<Code>,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) export: Option<Export>,
    pub(crate) timeout: Option<Length>,
    /// Where its list goes on after it, and if it was skipped.
    pub(crate) next: Next,
    pub(crate) next_if_skipped: Next,
    pub(crate) kind: Kind,
}

#[derive(Debug, Default)]
pub(crate) struct Input {
    pub(crate) schema: Option<PayloadSchema>,
    pub(crate) from: Option<Code>,
}

#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) as_: Option<Code>,
    pub(crate) schema: Option<PayloadSchema>,
}

#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) as_: Option<Code>,
    pub(crate) schema: Option<PayloadSchema>,
}

/// A length of time.
#[derive(Debug)]
pub(crate) enum Length {
    /// Milliseconds.
    Fixed(u64),
    Code(Code),
}

#[derive(Debug)]
pub(crate) enum Kind {
    Do(List),
    Set(Code),
    Switch(Vec<Case>),
    For(For),
    Fork(Fork),
    Try(Try),
    Raise(Raise),
    Wait(Length),
    /// The attributes of the event.
    Emit(Code),
    Http(HttpCall),
    OpenApi(OpenApiCall),
    /// A call of a function of the definition, which is the task of this path.
    Function {
        with: Option<Code>,
        body: Arc<str>,
    },
    /// A call of a function of the user's workers.
    Step {
        with: Option<Code>,
        queue: QueueName,
        options: StepOptions,
    },
}

#[derive(Debug)]
pub(crate) struct Case {
    /// `None`: always.
    pub(crate) when: Option<Code>,
    pub(crate) next: Next,
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) in_: Code,
    pub(crate) while_: Option<Code>,
    pub(crate) list: List,
}

#[derive(Debug)]
pub(crate) struct Fork {
    pub(crate) compete: bool,
    /// The paths of the branches, in order.
    pub(crate) branches: List,
}

#[derive(Debug)]
pub(crate) struct Try {
    pub(crate) list: List,
    pub(crate) errors: Option<ErrorFilter>,
    pub(crate) when: Option<Code>,
    pub(crate) except_when: Option<Code>,
    pub(crate) retry: Option<Retry>,
    pub(crate) catch: List,
    /// Where the list of the task goes on after a caught error.
    pub(crate) next: Next,
}

#[derive(Debug)]
pub(crate) struct Retry {
    pub(crate) when: Option<Code>,
    pub(crate) except_when: Option<Code>,
    pub(crate) delay: Option<Length>,
    pub(crate) backoff: RetryBackoff,
    pub(crate) attempts: Option<u64>,
    pub(crate) attempt_duration: Option<Length>,
    pub(crate) duration: Option<Length>,
    pub(crate) jitter: Option<(Length, Length)>,
}

#[derive(Debug)]
pub(crate) struct Raise {
    pub(crate) type_: Code,
    pub(crate) status: i64,
    pub(crate) instance: Option<Code>,
    pub(crate) title: Option<Code>,
    pub(crate) detail: Option<Code>,
}

#[derive(Debug)]
pub(crate) struct HttpCall {
    pub(crate) method: String,
    pub(crate) uri: Uri,
    pub(crate) headers: Option<Code>,
    pub(crate) query: Option<Code>,
    pub(crate) body: Option<Code>,
    pub(crate) answer: Answer,
    pub(crate) queue: QueueName,
    pub(crate) options: StepOptions,
}

/// What HTTP calls and OpenAPI calls have in common.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) authentication: Option<Authentication>,
    pub(crate) output: HttpOutput,
    pub(crate) redirect: bool,
}

#[derive(Debug)]
pub(crate) enum Uri {
    Template(UriTemplate),
    Code(Code),
}

#[derive(Debug)]
pub(crate) enum Authentication {
    Basic { username: Code, password: Code },
    BasicSecret(String),
    Bearer(Code),
    BearerSecret(String),
}

impl Program {
    /// The task of a path. It was compiled, so a path of the log exists.
    pub(crate) fn task(&self, path: &str) -> Option<&Task> {
        self.tasks.get(path)
    }
}
