//! `/openapi.json`: the HTTP API for programs, made from the list of operations and from the types
//! that the handlers read and write. `ui` serves a page that shows the document.

mod schemas;
mod ui;
mod written;

use std::sync::{Arc, LazyLock};

use axum::{Router, http::header, routing::get};
use bytes::Bytes;
use serde_json::{Map, Value, json};

use self::{schemas::Schemas, written::written};
use super::problem::Details;
use crate::{
    config::Auth,
    ingress::{operation::Operation, operations},
};

/// The routes of the document and of its page. They need no token, because they show the same to
/// everybody.
///
/// The document is made for the first caller, so that a process that nobody asks does not spend the
/// memory.
pub(super) fn routes<S: Clone + Send + Sync + 'static>(auth: Auth) -> Router<S> {
    let document = Arc::new(LazyLock::new(move || document(&operations::all(), auth)));
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

/// Makes the document of these operations.
fn document(operations: &[Operation], auth: Auth) -> Bytes {
    let mut schemas = Schemas::new();
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations {
        let Some(route) = &operation.http else {
            continue;
        };
        let of_path = paths.entry(route.path).or_insert_with(|| json!({}));
        of_path[route.method.as_str().to_ascii_lowercase()] =
            written(operation, route.path, auth, &mut schemas);
    }
    schemas.answers.subschema_for::<Details<'static>>();
    let groups = operations::GROUPS
        .map(|(name, description)| json!({"name": name, "description": description}));
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
        "tags": groups,
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
