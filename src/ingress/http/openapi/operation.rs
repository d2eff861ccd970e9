//! One operation of the document.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::{
    super::super::json,
    schemas::{SCHEMAS, Schemas},
};
use crate::{config::Auth, model};

/// The groups of operations, and what they are for.
pub(super) const TAGS: [(&str, &str); 4] = [
    ("tasks", "Insert tasks, and see what became of them"),
    ("workers", "Get tasks, and report them"),
    ("operators", "Queues, dead letters and acts"),
    ("process", "This process: probes, metrics, this document"),
];

/// The right that an operation asks for.
#[derive(Clone, Copy)]
pub(super) enum Role {
    Nothing,
    /// A token with the role, if taskd asks for tokens at all.
    Needs(model::Role, Auth),
}

type SchemaOf = Box<dyn Fn(&mut SchemaGenerator) -> Value>;

/// A parameter of a query, or a header.
struct Parameter {
    name: &'static str,
    description: &'static str,
    schema: Value,
}

/// An answer with status 200.
enum Success {
    Json(SchemaOf),
    Text,
    /// Server-Sent Events; the type of their data.
    Events(SchemaOf),
}

/// The description of an operation.
pub(super) struct Operation {
    pub(super) path: &'static str,
    id: String,
    tag: &'static str,
    summary: &'static str,
    note: &'static str,
    query: Vec<Parameter>,
    /// The query may have parameters that name headers of tasks. The document has no form for them.
    task_headers: bool,
    headers: Vec<Parameter>,
    body: Option<SchemaOf>,
    /// The body and the answer may also be lines.
    lines: bool,
    success: Success,
    /// An answer without content.
    empty: Option<(u16, &'static str)>,
    /// Other answers of its own.
    others: Vec<(u16, &'static str, Option<SchemaOf>)>,
}

fn schema<T: JsonSchema>() -> SchemaOf {
    Box::new(|generator| generator.subschema_for::<T>().to_value())
}

fn list<T: JsonSchema>(name: &'static str) -> SchemaOf {
    Box::new(move |generator| {
        let items = generator.subschema_for::<T>();
        json!({
            "type": "object",
            "properties": {name: {"type": "array", "items": items}},
            "required": [name],
        })
    })
}

impl Operation {
    pub(super) fn new(
        path: &'static str,
        tag: &'static str,
        id: &str,
        summary: &'static str,
    ) -> Self {
        let anything: SchemaOf = Box::new(|_| json!({"type": "object"}));
        Self {
            path,
            id: id.to_owned(),
            tag,
            summary,
            note: "",
            query: Vec::new(),
            task_headers: false,
            headers: Vec::new(),
            body: None,
            lines: false,
            success: Success::Json(anything),
            empty: None,
            others: Vec::new(),
        }
    }

    /// Adds what neither parameters nor schemas say.
    pub(super) fn says(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    /// Adds a parameter of the query.
    pub(super) fn query<T: JsonSchema>(
        mut self,
        name: &'static str,
        description: &'static str,
    ) -> Self {
        let schema = SchemaGenerator::default().subschema_for::<T>().to_value();
        self.query.push(Parameter {
            name,
            description,
            schema,
        });
        self
    }

    /// The query may also name headers of tasks.
    pub(super) fn query_of_task_headers(self) -> Self {
        Self {
            task_headers: true,
            ..self
        }
    }

    /// The names of the parameters that the query may have.
    pub(super) fn known_parameters(&self) -> Vec<&'static str> {
        let mut known: Vec<_> = self.query.iter().map(|parameter| parameter.name).collect();
        if self.task_headers {
            known.push(json::query::HEADERS);
        }
        known
    }

    /// Adds the parameter for the length of an answer.
    pub(super) fn limit(mut self, least: u32, description: &'static str) -> Self {
        let schema = json!({"type": "integer", "minimum": least, "maximum": 1000});
        self.query.push(Parameter {
            name: "limit",
            description,
            schema,
        });
        self
    }

    /// Adds a header of the request.
    pub(super) fn header(mut self, name: &'static str, description: &'static str) -> Self {
        let schema = json!({"type": "string"});
        self.headers.push(Parameter {
            name,
            description,
            schema,
        });
        self
    }

    /// The type of the body.
    pub(super) fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some(schema::<T>());
        self
    }

    /// The body and the answer may also be NDJSON.
    pub(super) fn or_lines(self) -> Self {
        Self {
            lines: true,
            ..self
        }
    }

    pub(super) fn answers<T: JsonSchema>(self) -> Self {
        Self {
            success: Success::Json(schema::<T>()),
            ..self
        }
    }

    /// The answer is an object with this list.
    pub(super) fn lists<T: JsonSchema>(self, name: &'static str) -> Self {
        Self {
            success: Success::Json(list::<T>(name)),
            ..self
        }
    }

    pub(super) fn answers_text(self) -> Self {
        Self {
            success: Success::Text,
            ..self
        }
    }

    /// The answer is a stream of Server-Sent Events. The generators know no type of their data; the
    /// document has it.
    pub(super) fn answers_events(self) -> Self {
        Self {
            success: Success::Events(schema::<json::events::Event<'_>>()),
            ..self
        }
    }

    /// Another answer, without content.
    pub(super) fn or_nothing(mut self, status: u16, description: &'static str) -> Self {
        self.empty = Some((status, description));
        self
    }

    /// Another answer, with a type of its own.
    pub(super) fn or<T: JsonSchema>(mut self, status: u16, description: &'static str) -> Self {
        self.others.push((status, description, Some(schema::<T>())));
        self
    }

    pub(super) fn or_list<T: JsonSchema>(
        mut self,
        status: u16,
        description: &'static str,
        name: &'static str,
    ) -> Self {
        self.others
            .push((status, description, Some(list::<T>(name))));
        self
    }

    /// Another problem.
    pub(super) fn or_problem(mut self, status: u16, description: &'static str) -> Self {
        self.others.push((status, description, None));
        self
    }

    /// As the document has it.
    pub(super) fn written(&self, path: &str, role: Role, schemas: &mut Schemas) -> Value {
        let said = [self.note, &role.said()].join(" ");
        let mut operation = json!({
            "operationId": self.id,
            "tags": [self.tag],
            "summary": self.summary,
            "description": said.trim(),
            "security": role.security(),
            "responses": self.responses(path, role, schemas),
        });
        let parameters = self.parameters(path);
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(body) = &self.body {
            let mut content = json!({"application/json": {"schema": body(&mut schemas.requests)}});
            if self.lines {
                content["application/x-ndjson"] = json!({"schema": {
                    "type": "string",
                    "description": "Lines of any number, each a task as in `NewTask`",
                }});
            }
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        operation
    }

    fn parameters(&self, path: &str) -> Vec<Value> {
        let in_path = path
            .split('{')
            .skip(1)
            .filter_map(|rest| rest.split_once('}'))
            .map(|(name, _)| {
                let schema = match name {
                    "id" => json!({"type": "string", "format": "uuid"}),
                    _ => SchemaGenerator::default()
                        .subschema_for::<model::QueueName>()
                        .to_value(),
                };
                json!({"name": name, "in": "path", "required": true, "schema": schema})
            });
        let given =
            |place: &'static str, parameters: &[Parameter]| -> Vec<Value> {
                let written = parameters.iter().map(|Parameter { name, description, schema }| {
                json!({"name": name, "in": place, "description": description, "schema": schema})
            });
                written.collect()
            };
        in_path
            .chain(given("query", &self.query))
            .chain(given("header", &self.headers))
            .collect()
    }

    fn responses(&self, path: &str, role: Role, schemas: &mut Schemas) -> Map<String, Value> {
        let mut responses = Map::new();
        let content = match &self.success {
            Success::Json(schema) => {
                json!({"application/json": {"schema": schema(&mut schemas.answers)}})
            }
            Success::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
            // The schema is that of one event.
            Success::Events(schema) => {
                json!({"text/event-stream": {"schema": {"type": "object", "properties": {
                    "id": {"type": "string"},
                    "event": {"type": "string"},
                    "data": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": schema(&mut schemas.answers),
                    },
                }}}})
            }
        };
        responses.insert(
            "200".into(),
            json!({"description": "Done", "content": content}),
        );
        if self.lines {
            responses["200"]["content"]["application/x-ndjson"] = json!({"schema": {
                "type": "string",
                "description": "A line for each line, in order, each an `InsertAnswer`",
            }});
        }
        if let Some((status, description)) = self.empty {
            responses.insert(status.to_string(), json!({"description": description}));
        }
        let mut add = |status: u16, response: Value| responses.insert(status.to_string(), response);
        if is_guarded(path) {
            add(
                400,
                problem("The request is wrong; `detail` says what is wrong with it"),
            );
            add(
                403,
                problem("The token does not allow the call, or a page of another site sent it"),
            );
            add(
                421,
                problem("The host that the request names is not taskd's"),
            );
            add(
                503,
                problem("taskd cannot do it now, or this process does not do it at all"),
            );
        }
        if let Role::Needs(..) = role {
            add(401, problem("The token is missing, or not valid"));
            let mut busy = problem("taskd has no room for it now: try again later");
            busy["headers"] = json!({"Retry-After": {"schema": {"type": "integer"}}});
            add(429, busy);
        }
        if path.contains("{id}") {
            add(404, problem("There is no such thing, or not any more"));
        }
        if self.body.is_some() {
            add(408, problem("The body came too slowly"));
            add(413, problem("The body is too large"));
            add(415, problem("The body is of another type, or compressed"));
        }
        for (status, description, schema) in &self.others {
            let response = schema.as_ref().map_or_else(
                || problem(description),
                |schema| {
                    let schema = schema(&mut schemas.answers);
                    json!({"description": description, "content": {"application/json": {"schema": schema}}})
                },
            );
            add(*status, response);
        }
        responses
    }
}

fn problem(description: &str) -> Value {
    let schema = json!({"$ref": format!("{SCHEMAS}Problem")});
    json!({"description": description, "content": {"application/problem+json": {"schema": schema}}})
}

/// False for probes, which may use any name.
fn is_guarded(path: &str) -> bool {
    !["/healthz", "/readyz"].contains(&path)
}

impl Role {
    fn said(self) -> String {
        match self {
            Self::Nothing => "Takes no token.".into(),
            Self::Needs(role, _) => {
                format!("For a token with the role `{role}`, or with the role `admin`.")
            }
        }
    }

    fn security(self) -> Value {
        match self {
            Self::Nothing => json!([]),
            Self::Needs(_, Auth::None) => json!([{}, {"token": []}]),
            Self::Needs(_, Auth::Tokens) => json!([{"token": []}]),
        }
    }
}
