//! `/openapi.json`: the HTTP API for programs, made from the table of routes and from the types that the handlers read
//! and write. [`operations`] describes each route; `ui` serves a page that shows the document.

mod operation;
mod operations;
mod ui;

use axum::{
    Router,
    http::{Method, header},
    routing::get,
};
use bytes::Bytes;
use schemars::{Schema, SchemaGenerator, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Map, Value, json};

use self::operation::Role::{Needs, Nothing};
use super::problem::Details;
use crate::{config::Auth, model};

/// The places of named schemas.
const SCHEMAS: &str = "#/components/schemas/";

/// A route of the table: method, path, and the role that its callers need.
pub(super) type RouteOfRole = (Method, &'static str, model::Role);

/// The generators of schemas: a request and an answer of one type differ in the fields that must be there.
struct Schemas {
    requests: SchemaGenerator,
    answers: SchemaGenerator,
}

impl Schemas {
    fn new() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.definitions_path = "/components/schemas".into();
                settings.meta_schema = None;
                settings.transforms.push(Box::new(RecursiveTransform(as_object)));
            })
        };
        let answers = settings().for_serialize().with_transform(RecursiveTransform(without_null));
        Self { requests: settings().for_deserialize().into_generator(), answers: answers.into_generator() }
    }

    /// The named schemas.
    fn into_components(mut self) -> Map<String, Value> {
        let mut schemas = self.requests.take_definitions(true);
        schemas.extend(self.answers.take_definitions(true));
        schemas
    }
}

/// Writes `{}` for any value: not every program knows the schema `true`.
fn as_object(schema: &mut Schema) {
    if schema.as_bool() == Some(true) {
        schema.ensure_object();
    }
}

/// An answer leaves out what is not there.
fn without_null(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else { return };
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if let Some(Value::Array(choices)) = object.get_mut("anyOf") {
        choices.retain(|choice| choice.get("type").is_none_or(|name| name != "null"));
        if let [Value::Object(only)] = &choices[..] {
            let only = only.clone();
            object.remove("anyOf");
            object.extend(only);
        }
    }
}

/// The routes of the document and of its page. They take no token: what they show is the same for everybody.
pub(super) fn routes<S: Clone + Send + Sync + 'static>(table: &[RouteOfRole], auth: Auth) -> Router<S> {
    let document = document(table, auth);
    let answer = move || async move { ([(header::CONTENT_TYPE, "application/json")], document) };
    Router::new().route("/openapi.json", get(answer)).merge(ui::routes())
}

/// The document of these routes.
fn document(routes: &[RouteOfRole], auth: Auth) -> Bytes {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    let mut insert = |path: &str, method: &Method, operation: Value| {
        let path = paths.entry(path).or_insert_with(|| json!({}));
        path[method.as_str().to_ascii_lowercase()] = operation;
    };
    for (method, path, role) in routes {
        let operation = operations::of(method, path);
        insert(path, method, operation.written(path, Needs(*role, auth), &mut schemas));
    }
    for operation in operations::open() {
        insert(operation.path, &Method::GET, operation.written(operation.path, Nothing, &mut schemas));
    }
    schemas.answers.subschema_for::<Details<'static>>();
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "taskd",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "A task queue for work that grows while it is being done",
            "description": DESCRIPTION,
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": operation::TAGS.map(|(name, description)| json!({"name": name, "description": description})),
        "paths": paths,
        "components": {
            "schemas": schemas.into_components(),
            "securitySchemes": {"token": {
                "type": "http",
                "scheme": "bearer",
                "description": "An access token. `taskd token create NAME --roles ROLES` makes one.",
            }},
        },
    });
    serde_json::to_vec(&document).expect("a value is JSON").into()
}

const DESCRIPTION: &str = "\
Durations are text such as `\"30s\"`, times are RFC 3339. A request with an unknown field is refused; in a list of \
tasks or reports, only the entry that has it. Errors are RFC 9457 problem details. 429 and 503 may be repeated \
unchanged, after the time of the header `Retry-After` where it is there.\n\n\
taskd with `auth = \"none\"` takes calls without a token.";
