//! `/openapi.json`: the HTTP API for programs, made from the table of routes and from the types
//! that the handlers read and write. [`operations`] describes each route; `ui` serves a page that
//! shows the document.

mod operation;
mod operations;
mod schemas;
mod ui;

use std::sync::{Arc, LazyLock};

use axum::{
    Router,
    http::{Method, header},
    routing::get,
};
use bytes::Bytes;
use serde_json::{Map, Value, json};

use self::{
    operation::Role::{Needs, Nothing},
    schemas::Schemas,
};
use super::problem::Details;
use crate::{config::Auth, model};

/// A route of the table: method, path, and the role that its callers need.
pub(super) type RouteOfRole = (Method, &'static str, model::Role);

/// The routes of the document and of its page. They take no token: what they show is the same for
/// everybody.
///
/// The first caller has the document made: a process that nobody asks does without its memory.
pub(super) fn routes<S: Clone + Send + Sync + 'static>(
    table: &[RouteOfRole],
    auth: Auth,
) -> Router<S> {
    let table = table.to_vec();
    let document = Arc::new(LazyLock::new(move || document(&table, auth)));
    let answer = move || async move {
        (
            [(header::CONTENT_TYPE, "application/json")],
            Bytes::clone(&document),
        )
    };
    Router::new()
        .route("/openapi.json", get(answer))
        .merge(ui::routes())
}

/// The parameters that the query of a route may have: those that the document describes, and no
/// others.
pub(super) fn known_parameters(method: &Method, path: &'static str) -> Vec<&'static str> {
    operations::of(method, path).known_parameters()
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
        for operation in [
            Some(operations::of(method, path)),
            operations::second(method, path),
        ]
        .into_iter()
        .flatten()
        {
            insert(
                operation.path,
                method,
                operation.written(operation.path, Needs(*role, auth), &mut schemas),
            );
        }
    }
    for operation in operations::open() {
        insert(
            operation.path,
            &Method::GET,
            operation.written(operation.path, Nothing, &mut schemas),
        );
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
    serde_json::to_vec(&document)
        .expect("a value is JSON")
        .into()
}

const DESCRIPTION: &str = "\
Durations are text such as `\"30s\"`, times are RFC 3339. A request with an unknown field is refused; in a list of \
tasks or reports, only the entry that has it. Errors are RFC 9457 problem details. 429 and 503 may be repeated \
unchanged, after the time of the header `Retry-After` where it is there.\n\n\
taskd with `auth = \"none\"` takes calls without a token.";
