//! Describes an operation of taskd: its name, role, HTTP route and gRPC method, and the types and
//! texts for `/openapi.json`. [`super::operations`] lists them all.

use axum::{
    handler::Handler,
    http::Method,
    routing::{self, MethodRouter},
};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use super::{State, json::query};
use crate::model::Role;

/// An operation of taskd, over HTTP, over gRPC, or both.
pub struct Operation {
    /// The name in `/openapi.json`.
    pub name: &'static str,
    /// The role that a caller needs; `None` if no token is needed.
    pub role: Option<Role>,
    /// True if it is about all queues. It then refuses a token that reaches only some.
    pub needs_all_queues: bool,
    pub summary: &'static str,
    pub http: Option<Route>,
    /// The method, with its service.
    pub grpc: Option<&'static str>,
    pub(super) group: &'static str,
    pub(super) note: &'static str,
    pub(super) query: Vec<Parameter>,
    /// True if the query may have parameters that name headers of tasks. `/openapi.json` cannot
    /// describe them.
    pub(super) task_headers: bool,
    pub(super) headers: Vec<Parameter>,
    pub(super) body: Option<SchemaOf>,
    /// True if the body and the answer may also be lines.
    pub(super) lines: bool,
    pub(super) success: Success,
    pub(super) others: Vec<OtherAnswer>,
}

/// The HTTP route of an operation.
pub struct Route {
    pub method: Method,
    /// A path like `/v1/bulk/{id}:stop`, in which a verb may follow a parameter.
    pub path: &'static str,
    /// `None` if a separate route serves it, outside those that require tokens.
    pub(super) handler: Option<MethodRouter<State>>,
}

impl Route {
    /// The path that the router matches. The router cannot match a verb after a parameter, so
    /// operations that differ only in the verb share a handler, which reads it.
    pub(super) fn matched_path(&self) -> &'static str {
        match self.path.rsplit_once("}:") {
            Some((route, _)) => &self.path[..=route.len()],
            None => self.path,
        }
    }
}

/// The schema of a type.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Value;

/// A parameter of a query, or a header.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) schema: Value,
}

/// An answer with status 200.
pub(super) enum Success {
    /// An object of any kind.
    Object,
    Json(Content),
    Text,
    /// Server-Sent Events whose data has this type.
    Events(SchemaOf),
    /// NDJSON, each line of this type.
    Lines(SchemaOf),
}

/// The content of an answer: a type, or an object with a list of this name.
#[derive(Clone, Copy)]
pub(super) enum Content {
    One(SchemaOf),
    List(&'static str, SchemaOf),
}

/// An answer with another status.
pub(super) struct OtherAnswer {
    pub(super) status: u16,
    pub(super) description: &'static str,
    pub(super) kind: OtherKind,
}

pub(super) enum OtherKind {
    Empty,
    Problem,
    Json(Content),
}

fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}

impl Operation {
    pub(super) fn new(
        group: &'static str,
        name: &'static str,
        role: Option<Role>,
        summary: &'static str,
    ) -> Self {
        Self {
            name,
            role,
            needs_all_queues: false,
            summary,
            http: None,
            grpc: None,
            group,
            note: "",
            query: Vec::new(),
            task_headers: false,
            headers: Vec::new(),
            body: None,
            lines: false,
            success: Success::Object,
            others: Vec::new(),
        }
    }

    pub(super) fn get<T: 'static>(
        self,
        path: &'static str,
        handler: impl Handler<T, State>,
    ) -> Self {
        self.at(Method::GET, path, Some(routing::get(handler)))
    }

    pub(super) fn post<T: 'static>(
        self,
        path: &'static str,
        handler: impl Handler<T, State>,
    ) -> Self {
        self.at(Method::POST, path, Some(routing::post(handler)))
    }

    pub(super) fn delete<T: 'static>(
        self,
        path: &'static str,
        handler: impl Handler<T, State>,
    ) -> Self {
        self.at(Method::DELETE, path, Some(routing::delete(handler)))
    }

    pub(super) fn put<T: 'static>(
        self,
        path: &'static str,
        handler: impl Handler<T, State>,
    ) -> Self {
        self.at(Method::PUT, path, Some(routing::put(handler)))
    }

    /// Sets a path that a separate route serves.
    pub(super) fn served_at(self, path: &'static str) -> Self {
        self.at(Method::GET, path, None)
    }

    fn at(
        mut self,
        method: Method,
        path: &'static str,
        handler: Option<MethodRouter<State>>,
    ) -> Self {
        self.http = Some(Route {
            method,
            path,
            handler,
        });
        self
    }

    /// Sets the gRPC method, with its service.
    pub(super) fn grpc(mut self, method: &'static str) -> Self {
        self.grpc = Some(method);
        self
    }

    pub(super) fn for_all_queues(mut self) -> Self {
        self.needs_all_queues = true;
        self
    }

    /// Adds a note about what neither parameters nor schemas say.
    pub(super) fn says(mut self, note: &'static str) -> Self {
        self.note = note;
        self
    }

    /// Adds a parameter of the query.
    pub(super) fn query<T: JsonSchema>(
        mut self,
        name: &'static str,
        description: &'static str,
    ) -> Self {
        self.query.push(Parameter {
            name,
            description,
            schema: schema::<T>(&mut SchemaGenerator::default()),
        });
        self
    }

    /// Adds the parameter that limits the length of an answer.
    pub(super) fn limit(mut self, least: u32, description: &'static str) -> Self {
        self.query.push(Parameter {
            name: "limit",
            description,
            schema: json!({"type": "integer", "minimum": least, "maximum": 1000}),
        });
        self
    }

    /// Lets the query also name headers of tasks.
    pub(super) fn query_of_task_headers(mut self) -> Self {
        self.task_headers = true;
        self
    }

    /// Adds a header of the request.
    pub(super) fn header(mut self, name: &'static str, description: &'static str) -> Self {
        self.headers.push(Parameter {
            name,
            description,
            schema: json!({"type": "string"}),
        });
        self
    }

    /// Sets the type of the body.
    pub(super) fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some(schema::<T>);
        self
    }

    /// Lets the body and the answer also be NDJSON.
    pub(super) fn or_lines(mut self) -> Self {
        self.lines = true;
        self
    }

    pub(super) fn answers<T: JsonSchema>(mut self) -> Self {
        self.success = Success::Json(Content::One(schema::<T>));
        self
    }

    /// Sets the answer to an object with this list.
    pub(super) fn lists<T: JsonSchema>(mut self, name: &'static str) -> Self {
        self.success = Success::Json(Content::List(name, schema::<T>));
        self
    }

    pub(super) fn answers_text(mut self) -> Self {
        self.success = Success::Text;
        self
    }

    /// Sets the answer to a stream of Server-Sent Events whose data has this type.
    pub(super) fn answers_events<T: JsonSchema>(mut self) -> Self {
        self.success = Success::Events(schema::<T>);
        self
    }

    /// Sets the answer to NDJSON whose lines have this type.
    pub(super) fn answers_lines<T: JsonSchema>(mut self) -> Self {
        self.success = Success::Lines(schema::<T>);
        self
    }

    /// Adds another answer, without content.
    pub(super) fn or_nothing(self, status: u16, description: &'static str) -> Self {
        self.or_answer(status, description, OtherKind::Empty)
    }

    /// Adds another answer, with a type of its own.
    pub(super) fn or<T: JsonSchema>(self, status: u16, description: &'static str) -> Self {
        let content = Content::One(schema::<T>);
        self.or_answer(status, description, OtherKind::Json(content))
    }

    /// Adds another answer, an object with this list.
    pub(super) fn or_list<T: JsonSchema>(
        self,
        status: u16,
        description: &'static str,
        name: &'static str,
    ) -> Self {
        let content = Content::List(name, schema::<T>);
        self.or_answer(status, description, OtherKind::Json(content))
    }

    /// Adds another problem as an answer.
    pub(super) fn or_problem(self, status: u16, description: &'static str) -> Self {
        self.or_answer(status, description, OtherKind::Problem)
    }

    fn or_answer(mut self, status: u16, description: &'static str, kind: OtherKind) -> Self {
        self.others.push(OtherAnswer {
            status,
            description,
            kind,
        });
        self
    }

    /// Returns the names of the parameters that the query may have, which are exactly those in
    /// `/openapi.json`.
    pub(super) fn known_parameters(&self) -> Vec<&'static str> {
        let mut known: Vec<_> = self.query.iter().map(|parameter| parameter.name).collect();
        if self.task_headers {
            known.push(query::HEADERS);
        }
        known
    }
}
