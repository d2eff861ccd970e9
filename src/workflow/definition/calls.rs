//! Reads calls, and what they say about their tasks in the queue.

use std::time::Duration;

use super::{
    Agree, CallFunction, CallHttp, CallOpenApi, Endpoint, HttpOutput, StepOptions, TaskKind,
    node::not_yet,
    reader::{Fields, Scope, Spot},
    tasks::{Tasks, field},
};
use crate::model::{
    BackoffKind, ECHO, LimitBy, MAX_REPLICAS, NewBackoff, NewTask, Priority, QueueName, TaskRules,
    shorten, validate,
};

const HTTP_FIELDS: [&str; 7] = [
    "method", "endpoint", "headers", "query", "body", "output", "redirect",
];
const OPENAPI_FIELDS: [&str; 6] = [
    "document",
    "operationId",
    "parameters",
    "authentication",
    "output",
    "redirect",
];
const STEP_FIELDS: [&str; 8] = [
    "queue",
    "replicas",
    "agree",
    "lease",
    "priority",
    "max_attempts",
    "backoff",
    "finish_within",
];
const BACKOFF_FIELDS: [&str; 5] = ["kind", "initial", "maximum", "jitter", "give_up_after"];
const OUTPUTS: [(&str, HttpOutput); 3] = [
    ("raw", HttpOutput::Raw),
    ("content", HttpOutput::Content),
    ("response", HttpOutput::Response),
];

/// The longest that any taskd takes; a queue may have a shorter one.
const LONGEST_LEASE: Duration = Duration::from_secs(30 * 24 * 3600);

/// What does other calls today.
const INSTEAD: &str = "call http, openapi, or a function: a task for your own workers";

impl Tasks<'_, '_> {
    pub(super) fn call(
        &mut self,
        fields: &Fields<'_>,
        spot: &Spot<'_>,
        scope: &Scope,
    ) -> Option<TaskKind> {
        let callee = self.reader.text("call", spot)?;
        let step = fields
            .get("metadata")
            .and_then(|metadata| field(&metadata, "taskd"));
        match callee {
            "http" => {
                let step = self.step(step.as_ref(), true);
                let with = self.with(fields, "method and endpoint")?;
                self.http(&with, scope, step)
            }
            "openapi" => {
                let step = self.step(step.as_ref(), true);
                let with = self.with(fields, "document and operationId")?;
                self.openapi(&with, scope, step)
            }
            "grpc" | "asyncapi" | "mcp" | "a2a" => {
                let what = format!("call: {callee}");
                self.reader.wrong(spot, not_yet(&what, INSTEAD));
                None
            }
            name => {
                let is_own = self.names.functions.contains(name);
                let place = step.clone();
                let step = self.step(step.as_ref(), false);
                let with = fields
                    .get("with")
                    .and_then(|spot| self.arguments("with", &spot, scope));
                match (is_own, &place) {
                    (true, Some(place)) => self.reader.wrong_name(
                        place,
                        "metadata.taskd belongs into the function, which use.functions has",
                    ),
                    (false, _) if name.contains('@') || name.contains("://") => {
                        let says = not_yet("functions of catalogs", "write it in use.functions");
                        self.reader.wrong(spot, says);
                    }
                    (false, _) if step.queue.is_none() => self.check_queue(spot, name),
                    _ => {}
                }
                Some(TaskKind::CallFunction(CallFunction {
                    function: name.to_owned(),
                    with,
                    step,
                }))
            }
        }
    }

    /// A function that `use` does not have is a queue.
    fn check_queue(&mut self, spot: &Spot<'_>, name: &str) {
        if QueueName::new(name).is_err() {
            let name = shorten(name, ECHO);
            let says = format!(
                "{name:?} is no function of use.functions and no name of a queue: name one in metadata.taskd.queue"
            );
            self.reader.wrong(spot, says);
        }
    }

    fn with<'n>(&mut self, fields: &Fields<'n>, what: &str) -> Option<Fields<'n>> {
        match fields.get("with") {
            Some(spot) => self.reader.object("with", &spot),
            None => {
                self.reader.missing(fields, "with", what);
                None
            }
        }
    }

    fn http(&mut self, with: &Fields<'_>, scope: &Scope, step: StepOptions) -> Option<TaskKind> {
        self.reader.only(with, &HTTP_FIELDS);
        let method = match with.get("method") {
            Some(spot) => self.method(&spot, scope),
            None => {
                self.reader.missing(with, "method", "method: get");
                None
            }
        };
        let endpoint = match with.get("endpoint") {
            Some(spot) => self.endpoint("endpoint", &spot, scope),
            None => {
                let example = "endpoint: https://example.com/{id}";
                self.reader.missing(with, "endpoint", example);
                None
            }
        };
        let mut texts = |name: &str| {
            let spot = with.get(name)?;
            self.reader.texts(name, &spot, scope)
        };
        let headers = texts("headers");
        let query = texts("query");
        let body = with.get("body").map(|spot| {
            self.reader.check_templates(&spot, scope);
            spot.node.to_value()
        });
        let (output, redirect) = self.answer(with);
        Some(TaskKind::CallHttp(CallHttp {
            method: method?,
            endpoint: endpoint?,
            headers,
            query,
            body,
            output,
            redirect,
            step,
        }))
    }

    /// A method is a token of HTTP, or an expression.
    fn method(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<String> {
        let method = self.reader.template("method", spot, scope)?;
        let is_token = !method.is_empty()
            && method.len() <= 32
            && method
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !is_token && !method.contains("${") {
            let shown = shorten(&method, ECHO);
            let says = format!("method is {shown:?}; expected get, post, put, patch, delete, …");
            self.reader.wrong(spot, says);
        }
        Some(method)
    }

    fn openapi(&mut self, with: &Fields<'_>, scope: &Scope, step: StepOptions) -> Option<TaskKind> {
        self.reader.only(with, &OPENAPI_FIELDS);
        let document = match with.get("document") {
            Some(spot) => self.resource(&spot, scope),
            None => {
                let example = "document: { endpoint: https://example.com/openapi.json }";
                self.reader.missing(with, "document", example);
                None
            }
        };
        let operation_id = match with.get("operationId") {
            Some(spot) => self.reader.owned("operationId", &spot),
            None => {
                let example = "the id of an operation of the document";
                self.reader.missing(with, "operationId", example);
                None
            }
        };
        let parameters = with
            .get("parameters")
            .and_then(|spot| self.arguments("parameters", &spot, scope));
        let authentication = with
            .get("authentication")
            .and_then(|spot| self.reader.authentication(&spot, self.names, scope));
        let (output, redirect) = self.answer(with);
        Some(TaskKind::CallOpenApi(CallOpenApi {
            document: document?,
            operation_id: operation_id?,
            parameters: parameters.unwrap_or_default(),
            authentication,
            output,
            redirect,
            step,
        }))
    }

    /// A document that is elsewhere.
    fn resource(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Endpoint> {
        let fields = self.reader.object("document", spot)?;
        self.reader.only(&fields, &["name", "endpoint"]);
        if let Some(spot) = fields.get("name") {
            self.reader.text("document.name", &spot);
        }
        let Some(endpoint) = fields.get("endpoint") else {
            let example = "endpoint: https://example.com/openapi.json";
            self.reader.missing(&fields, "endpoint", example);
            return None;
        };
        let read = self.endpoint("document.endpoint", &endpoint, scope)?;
        // It is fetched when the definition is deployed.
        if read.uri.contains("${") || read.uri.contains('{') {
            let says = "document.endpoint must be without {…} and expressions: the document is fetched when the definition is deployed";
            self.reader.wrong(&endpoint, says);
        }
        Some(read)
    }

    fn arguments(
        &mut self,
        what: &str,
        spot: &Spot<'_>,
        scope: &Scope,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
        let arguments = self.reader.map(what, spot)?;
        self.reader.check_templates(spot, scope);
        Some(arguments)
    }

    fn endpoint(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<Endpoint> {
        if spot.text().is_some() {
            let uri = self.address(what, spot, scope)?;
            return Some(Endpoint {
                uri,
                authentication: None,
            });
        }
        if !spot.is_object() {
            let says = format!("{what} must be a URI or an object with uri");
            self.reader.wrong(spot, says);
            return None;
        }
        let fields = self.reader.object(what, spot)?;
        self.reader.only(&fields, &["uri", "authentication"]);
        let uri = match fields.get("uri") {
            Some(spot) => self.address("uri", &spot, scope),
            None => {
                let example = "uri: https://example.com/{id}";
                self.reader.missing(&fields, "uri", example);
                None
            }
        };
        let authentication = fields
            .get("authentication")
            .and_then(|spot| self.reader.authentication(&spot, self.names, scope));
        Some(Endpoint {
            uri: uri?,
            authentication,
        })
    }

    /// A URI that can be called.
    fn address(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<String> {
        let uri = self.reader.uri(what, spot, scope)?;
        let lower = uri.to_ascii_lowercase();
        let is_known = lower.starts_with("http://") || lower.starts_with("https://");
        // What stands in braces is known only later.
        let is_open = uri.starts_with('{') || uri.trim_start().starts_with("${");
        if !is_known && !is_open {
            let shown = shorten(&uri, ECHO);
            let says = format!("{what} is {shown:?}; expected http://… or https://…");
            self.reader.wrong(spot, says);
        }
        Some(uri)
    }

    /// What becomes of the answer.
    fn answer(&mut self, with: &Fields<'_>) -> (HttpOutput, bool) {
        let output = with
            .get("output")
            .and_then(|spot| self.reader.one_of("output", &spot, &OUTPUTS));
        let redirect = with
            .get("redirect")
            .and_then(|spot| self.reader.flag("redirect", &spot));
        (output.unwrap_or_default(), redirect.unwrap_or_default())
    }

    /// Reads `metadata.taskd`. A call that taskd makes itself has a queue of its own.
    fn step(&mut self, spot: Option<&Spot<'_>>, is_ours: bool) -> StepOptions {
        let mut step = StepOptions::default();
        let Some(fields) = spot.and_then(|spot| self.reader.object("metadata.taskd", spot)) else {
            return step;
        };
        self.reader.only(&fields, &STEP_FIELDS);
        for (name, spot) in fields.all() {
            if is_ours && matches!(name, "queue" | "replicas" | "agree") {
                let says =
                    format!("{name} is for calls of functions; taskd makes this call itself");
                self.reader.wrong_name(&spot, says);
                continue;
            }
            let mut task = NewTask::default();
            match name {
                "queue" => {
                    let Some(text) = self.reader.text("queue", &spot) else {
                        continue;
                    };
                    match QueueName::new(text) {
                        Ok(queue) => step.queue = Some(queue),
                        Err(error) => self.reader.wrong(&spot, error.to_string()),
                    }
                    continue;
                }
                "agree" => {
                    let known = [
                        ("first", Agree::First),
                        ("majority", Agree::Majority),
                        ("all", Agree::All),
                    ];
                    let agree = self.reader.one_of("agree", &spot, &known);
                    step.agree = agree.unwrap_or_default();
                    continue;
                }
                "priority" => {
                    let known = Priority::ALL.map(|priority| (priority.as_str(), priority));
                    step.priority = self.reader.one_of("priority", &spot, &known);
                    continue;
                }
                "replicas" => task.replicas = self.number(name, &spot),
                "max_attempts" => task.max_attempts = self.number(name, &spot),
                "lease" => task.lease_duration = self.time(name, &spot),
                "finish_within" => task.finish_within = self.time(name, &spot),
                "backoff" => task.backoff = self.backoff(&spot),
                _ => continue,
            }
            if let Err(says) = check(&task) {
                self.reader
                    .wrong(&spot, says.replace("lease_duration", "lease"));
            }
            step.replicas = task.replicas.or(step.replicas);
            step.max_attempts = task.max_attempts.or(step.max_attempts);
            step.lease = task.lease_duration.or(step.lease);
            step.finish_within = task.finish_within.or(step.finish_within);
            step.backoff = task.backoff.or(step.backoff);
        }
        step
    }

    fn number(&mut self, what: &str, spot: &Spot<'_>) -> Option<u32> {
        let number = self.reader.whole(what, spot)?;
        let found = u32::try_from(number).ok();
        if found.is_none() {
            self.reader.wrong(spot, format!("{what} is {number}"));
        }
        found
    }

    /// A duration as everywhere in taskd.
    fn time(&mut self, what: &str, spot: &Spot<'_>) -> Option<Duration> {
        let time = spot.text().map(humantime::parse_duration);
        let time = time.and_then(Result::ok);
        if time.is_none() {
            let says = format!("{what} must be a duration: {what}: 30s");
            self.reader.wrong(spot, says);
        }
        time
    }

    fn backoff(&mut self, spot: &Spot<'_>) -> Option<NewBackoff> {
        let fields = self.reader.object("backoff", spot)?;
        self.reader.only(&fields, &BACKOFF_FIELDS);
        let mut backoff = NewBackoff::default();
        for (name, spot) in fields.all() {
            match name {
                "kind" => {
                    let known = BackoffKind::OWN.map(|kind| (kind.as_str(), kind));
                    backoff.kind = self.reader.one_of("kind", &spot, &known)?;
                }
                "initial" => backoff.initial = self.time(name, &spot),
                "maximum" => backoff.maximum = self.time(name, &spot),
                "give_up_after" => backoff.give_up_after = self.time(name, &spot),
                "jitter" => {
                    backoff.jitter = spot.node.to_value().as_f64();
                    if backoff.jitter.is_none() {
                        self.reader
                            .wrong(&spot, "jitter must be a number from 0 to 1");
                    }
                }
                _ => {}
            }
        }
        Some(backoff)
    }
}

/// Checks the settings of a task as an insert does. Queues may have narrower bounds.
fn check(settings: &NewTask) -> Result<(), String> {
    let task = NewTask {
        queue: "q".to_owned(),
        key: "k".into(),
        ..settings.clone()
    };
    let rules = TaskRules {
        max_payload_bytes: usize::MAX,
        max_headers_bytes: usize::MAX,
        max_replicas: MAX_REPLICAS,
        max_lease: LONGEST_LEASE,
        replicas: 1,
        priority: Priority::default(),
        lease: Duration::from_secs(30),
        max_attempts: 1,
        idempotency_window: Duration::ZERO,
        limit_by: LimitBy::Nothing,
        is_accepted: false,
        is_step: false,
    };
    validate::check(&task, &rules, 0).map(|_| ())
}
