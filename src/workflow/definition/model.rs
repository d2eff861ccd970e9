//! What a definition says, without what it leaves to defaults of the program.
//!
//! Values that may hold expressions stay as they are written. The reader has checked them, and
//! whoever compiles the definition makes expressions of them.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value};

use crate::model::{NewBackoff, Priority, QueueName};

/// A definition of DSL 1.0 without mistakes.
#[derive(Clone, Debug, PartialEq)]
pub struct Definition {
    pub document: Document,
    pub input: Option<Input>,
    pub use_: Use,
    pub do_: Vec<Task>,
    pub timeout: Option<Timeout>,
    pub output: Option<Output>,
}

/// A definition as it was read.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadDefinition {
    pub definition: Definition,
    /// What the text says, as JSON.
    pub json: Value,
}

/// What names the definition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// The version of the language, such as `1.0.3`.
    pub dsl: String,
    pub namespace: String,
    pub name: String,
    /// A semantic version.
    pub version: String,
    pub title: Option<String>,
    pub summary: Option<String>,
    pub tags: Map<String, Value>,
    pub metadata: Map<String, Value>,
}

/// What tasks refer to by name. The reader has put retries, timeouts, errors and authentications in
/// the places of their names already; functions are in [`CallFunction::function`] only by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Use {
    pub functions: BTreeMap<String, Task>,
    pub errors: BTreeMap<String, ErrorDefinition>,
    pub retries: BTreeMap<String, RetryPolicy>,
    pub timeouts: BTreeMap<String, Timeout>,
    pub authentications: BTreeMap<String, Authentication>,
    /// The names of the secrets.
    pub secrets: Vec<String>,
}

/// Where something is in the definition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// A JSON pointer, such as `/do/0/greet`: the `instance` of an error.
    pub pointer: String,
    /// Both count from 1.
    pub line: usize,
    pub column: usize,
}

/// A task.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub name: String,
    pub place: Place,
    /// An expression, bare or wrapped.
    pub if_: Option<String>,
    pub input: Option<Input>,
    pub output: Option<Output>,
    pub export: Option<Export>,
    pub timeout: Option<Timeout>,
    pub then: Option<Then>,
    /// Everything, also what is in [`CallFunction::step`].
    pub metadata: Map<String, Value>,
    pub kind: TaskKind,
}

/// What a task does.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskKind {
    Do(Vec<Task>),
    /// A text that is an expression, or an object of which each text may hold expressions.
    Set(Value),
    Switch(Vec<Case>),
    For(For),
    Fork(Fork),
    Try(Try),
    Raise(ErrorDefinition),
    Wait(Period),
    Emit(Emit),
    CallHttp(CallHttp),
    CallOpenApi(CallOpenApi),
    CallFunction(CallFunction),
}

/// How the input of a workflow or a task comes about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Input {
    pub schema: Option<Schema>,
    /// An expression, bare or wrapped, or an object of which each text may hold expressions.
    pub from: Option<Value>,
}

/// How the output of a workflow or a task comes about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    pub schema: Option<Schema>,
    /// As [`Input::from`].
    pub as_: Option<Value>,
}

/// What becomes the context.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Export {
    pub schema: Option<Schema>,
    /// As [`Input::from`].
    pub as_: Option<Value>,
}

/// A JSON schema, which compiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Schema(pub Value);

/// The time after which the error 408 is raised.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeout {
    pub after: Period,
}

/// A length of time.
#[derive(Clone, Debug, PartialEq)]
pub enum Period {
    /// Milliseconds.
    Fixed(u64),
    /// A wrapped expression, `${ … }`, that gives a text in ISO 8601 or an object with units.
    /// [`Period::read`] reads its result.
    Expression(String),
}

/// Where the flow goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// At the next task of the list.
    #[default]
    Continue,
    /// After the list.
    Exit,
    /// Nowhere: the workflow completes.
    End,
    /// At this task of the same list. The number is its place in the list.
    Task(String, usize),
}

/// A case of a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    pub name: String,
    pub place: Place,
    /// An expression, bare or wrapped. `None`: always.
    pub when: Option<String>,
    pub then: Then,
}

/// A loop.
#[derive(Clone, Debug, PartialEq)]
pub struct For {
    /// The name of the variable for the item, without `$`.
    pub each: String,
    /// An expression, bare or wrapped, or a list of objects.
    pub in_: Value,
    /// The name of the variable for its number, from 0, without `$`.
    pub at: String,
    /// An expression, bare or wrapped.
    pub while_: Option<String>,
    pub do_: Vec<Task>,
}

/// Branches at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Fork {
    pub branches: Vec<Task>,
    /// The first that succeeds wins.
    pub compete: bool,
}

/// Tasks whose errors are caught.
#[derive(Clone, Debug, PartialEq)]
pub struct Try {
    pub try_: Vec<Task>,
    pub catch: Catch,
}

/// Which errors are caught, and what happens then.
#[derive(Clone, Debug, PartialEq)]
pub struct Catch {
    pub place: Place,
    /// `None`: all.
    pub errors: Option<ErrorFilter>,
    /// The name of the variable for the error, without `$`.
    pub as_: String,
    /// Expressions, bare or wrapped.
    pub when: Option<String>,
    pub except_when: Option<String>,
    pub retry: Option<RetryPolicy>,
    pub do_: Option<Vec<Task>>,
    /// A task in the list of the try task.
    pub then: Option<Then>,
}

/// What an error must have to be caught.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorFilter {
    pub type_: Option<String>,
    pub status: Option<i64>,
    pub instance: Option<String>,
    pub title: Option<String>,
    pub detail: Option<String>,
}

/// When to try again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RetryPolicy {
    /// Expressions, bare or wrapped.
    pub when: Option<String>,
    pub except_when: Option<String>,
    pub delay: Option<Period>,
    pub backoff: Option<RetryBackoff>,
    /// The most retries.
    pub attempts: Option<u64>,
    /// The time that one attempt may take.
    pub attempt_duration: Option<Period>,
    /// The time that all attempts and the waits between them may take.
    pub duration: Option<Period>,
    /// The random part of a wait.
    pub jitter: Option<(Period, Period)>,
}

/// How the wait grows from retry to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryBackoff {
    Constant,
    Linear,
    Exponential,
}

/// An error to raise.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorDefinition {
    /// A URI, or a wrapped expression.
    pub type_: String,
    pub status: i64,
    /// Texts that may hold expressions.
    pub instance: Option<String>,
    pub title: Option<String>,
    pub detail: Option<String>,
}

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub struct Emit {
    /// Its attributes and `data`. There is a `type`; each text may hold expressions.
    pub with: Map<String, Value>,
}

/// A call over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct CallHttp {
    pub method: String,
    pub endpoint: Endpoint,
    /// An object of texts, each of which may hold expressions, or a text that is an expression.
    pub headers: Option<Value>,
    /// The same.
    pub query: Option<Value>,
    /// Each text may hold expressions.
    pub body: Option<Value>,
    pub output: HttpOutput,
    /// Redirects are no errors.
    pub redirect: bool,
    pub step: StepOptions,
}

/// A call of an operation of an OpenAPI document.
#[derive(Clone, Debug, PartialEq)]
pub struct CallOpenApi {
    pub document: Endpoint,
    pub operation_id: String,
    /// Each text may hold expressions.
    pub parameters: Map<String, Value>,
    pub authentication: Option<Authentication>,
    pub output: HttpOutput,
    pub redirect: bool,
    pub step: StepOptions,
}

/// A call of a function: one of [`Use::functions`], otherwise a task for workers.
#[derive(Clone, Debug, PartialEq)]
pub struct CallFunction {
    pub function: String,
    /// Each text may hold expressions.
    pub with: Option<Map<String, Value>>,
    /// For a task for workers: its queue is [`StepOptions::queue`], else the name of the function,
    /// which is the name of a queue then.
    pub step: StepOptions,
}

/// Where a call goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// A URI in which `{name}` is replaced, or a wrapped expression.
    pub uri: String,
    pub authentication: Option<Authentication>,
}

/// How a call authenticates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authentication {
    /// Both may hold expressions.
    Basic { username: String, password: String },
    /// The secret of this name.
    BasicSecret(String),
    /// May hold expressions.
    Bearer { token: String },
    /// The secret of this name.
    BearerSecret(String),
}

/// What of an answer becomes the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HttpOutput {
    /// The body in base64.
    Raw,
    /// The body, read by its media type.
    #[default]
    Content,
    /// The request, status, headers and body.
    Response,
}

/// `metadata.taskd` of a call: settings of the task in the queue. What is left out is the setting of
/// the queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOptions {
    pub queue: Option<QueueName>,
    pub replicas: Option<u32>,
    pub agree: Agree,
    pub lease: Option<Duration>,
    pub priority: Option<Priority>,
    pub max_attempts: Option<u32>,
    pub backoff: Option<NewBackoff>,
    /// The time within which it must be complete.
    pub finish_within: Option<Duration>,
}

/// How the results of several workers become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Agree {
    /// The first by time.
    #[default]
    First,
    /// The one that more than half of the workers have.
    Majority,
    /// All, as an array.
    All,
}

impl Definition {
    /// The documents that its calls refer to, with the places of the calls.
    pub fn documents(&self) -> Vec<(&Place, &Endpoint)> {
        fn add<'a>(task: &'a Task, found: &mut Vec<(&'a Place, &'a Endpoint)>) {
            if let TaskKind::CallOpenApi(call) = &task.kind {
                found.push((&task.place, &call.document));
            }
            task.inner().for_each(|inner| add(inner, found));
        }
        let mut found = Vec::new();
        let functions = self.use_.functions.values();
        let tasks = self.do_.iter().chain(functions);
        tasks.for_each(|task| add(task, &mut found));
        found
    }
}

impl Task {
    /// The tasks directly in it.
    pub fn inner(&self) -> impl Iterator<Item = &Self> {
        let (first, second): (&[Self], &[Self]) = match &self.kind {
            TaskKind::Do(tasks) => (tasks, &[]),
            TaskKind::For(for_) => (&for_.do_, &[]),
            TaskKind::Fork(fork) => (&fork.branches, &[]),
            TaskKind::Try(try_) => (&try_.try_, try_.catch.do_.as_deref().unwrap_or_default()),
            _ => (&[], &[]),
        };
        first.iter().chain(second)
    }
}
