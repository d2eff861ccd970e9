//! Tasks of a program.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{code::Code, openapi::Operation, uri::UriTemplate};
use crate::{
    model::{PayloadSchema, QueueName},
    workflow::definition::{ErrorFilter, HttpOutput, RetryBackoff, StepOptions},
};

/// Where a list of tasks goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Next {
    /// At the task of this path.
    Task(String),
    /// Nowhere: the list ends.
    Exit,
    /// Nowhere: the workflow ends.
    End,
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
    Try(Box<Try>),
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

/// A call of an operation.
#[derive(Debug)]
pub(crate) struct OpenApiCall {
    pub(crate) operation: Operation,
    /// The parameters by name.
    pub(crate) parameters: Vec<(String, Code)>,
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
