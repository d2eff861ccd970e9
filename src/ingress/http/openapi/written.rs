//! Describes an operation for `/openapi.json`.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::schemas::{SCHEMAS, Schemas};
use crate::{
    config::Auth,
    ingress::operation::{Content, Operation, OtherKind, Parameter, Success},
    model::{self, Role},
};

/// Describes the operation at `path`.
pub(super) fn written(
    operation: &Operation,
    path: &str,
    auth: Auth,
    schemas: &mut Schemas,
) -> Value {
    let said = [operation.note, &role_said(operation.role)].join(" ");
    let mut written = json!({
        "operationId": operation.name,
        "tags": [operation.group],
        "summary": operation.summary,
        "description": said.trim(),
        "security": security(operation.role, auth),
        "responses": responses(operation, path, schemas),
    });
    let parameters = parameters(operation, path);
    if !parameters.is_empty() {
        written["parameters"] = parameters.into();
    }
    if let Some(body) = &operation.body {
        let mut content = json!({"application/json": {"schema": body(&mut schemas.requests)}});
        if operation.lines {
            content["application/x-ndjson"] = json!({"schema": {
                "type": "string",
                "description": "Lines of any number, each a task as in `NewTask`",
            }});
        }
        written["requestBody"] = json!({"required": true, "content": content});
    }
    written
}

fn parameters(operation: &Operation, path: &str) -> Vec<Value> {
    let mut parameters = Vec::new();
    for rest in path.split('{').skip(1) {
        let Some((name, _)) = rest.split_once('}') else {
            continue;
        };
        let schema = match name {
            "id" => json!({"type": "string", "format": "uuid"}),
            "namespace" | "name" | "version" | "execution" => json!({"type": "string"}),
            _ => SchemaGenerator::default()
                .subschema_for::<model::QueueName>()
                .to_value(),
        };
        parameters.push(json!({"name": name, "in": "path", "required": true, "schema": schema}));
    }
    for (place, given) in [("query", &operation.query), ("header", &operation.headers)] {
        for Parameter {
            name,
            description,
            schema,
        } in given
        {
            parameters.push(
                json!({"name": name, "in": place, "description": description, "schema": schema}),
            );
        }
    }
    parameters
}

fn responses(operation: &Operation, path: &str, schemas: &mut Schemas) -> Map<String, Value> {
    let mut responses = Map::new();
    let content = match &operation.success {
        Success::Object => json!({"application/json": {"schema": {"type": "object"}}}),
        Success::Json(content) => {
            json!({"application/json": {"schema": content_schema(*content, schemas)}})
        }
        Success::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
        // The schema is that of one line.
        Success::Lines(schema) => json!({"application/x-ndjson": {"schema": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schema(&mut schemas.answers),
        }}}),
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
    if operation.lines {
        responses["200"]["content"]["application/x-ndjson"] = json!({"schema": {
            "type": "string",
            "description": "A line for each line, in order, each an `InsertAnswer`",
        }});
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
    if operation.role.is_some() {
        add(401, problem("The token is missing, or not valid"));
        let mut busy = problem("taskd has no room for it now: try again later");
        busy["headers"] = json!({"Retry-After": {"schema": {"type": "integer"}}});
        add(429, busy);
    }
    if path.contains("{id}") {
        add(404, problem("There is no such thing, or not any more"));
    }
    if operation.body.is_some() {
        add(408, problem("The body came too slowly"));
        add(413, problem("The body is too large"));
        add(415, problem("The body is of another type, or compressed"));
    }
    for other in &operation.others {
        let description = other.description;
        let response = match &other.kind {
            OtherKind::Empty => json!({"description": description}),
            OtherKind::Problem => problem(description),
            OtherKind::Json(content) => {
                let schema = content_schema(*content, schemas);
                json!({"description": description, "content": {"application/json": {"schema": schema}}})
            }
        };
        add(other.status, response);
    }
    responses
}

fn content_schema(content: Content, schemas: &mut Schemas) -> Value {
    match content {
        Content::One(schema) => schema(&mut schemas.answers),
        Content::List(name, schema) => json!({
            "type": "object",
            "properties": {name: {"type": "array", "items": schema(&mut schemas.answers)}},
            "required": [name],
        }),
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

fn role_said(role: Option<Role>) -> String {
    match role {
        None => "Takes no token.".into(),
        Some(role) => {
            format!("For a token with the role `{role}`, or with the role `admin`.")
        }
    }
}

fn security(role: Option<Role>, auth: Auth) -> Value {
    match (role, auth) {
        (None, _) => json!([]),
        (Some(_), Auth::None) => json!([{}, {"token": []}]),
        (Some(_), Auth::Tokens) => json!([{"token": []}]),
    }
}
