//! The payloads of steps.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    problem::Problem,
    scope::{Scope, View},
};
use crate::workflow::{
    definition::HttpOutput,
    program::{
        Answer, Authentication, Code, HttpCall, OpenApiCall, Part, Uri, as_text, push_query,
    },
};

/// An HTTP request to send: `request` in the payload of a step of [`super::super::program::HTTP_QUEUE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpRequest {
    /// In capital letters.
    pub method: String,
    /// With its query.
    pub uri: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// JSON, unless a header says otherwise. Then it is a string as it is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authentication: Option<HttpAuthentication>,
    /// `raw`, `content` or `response`.
    pub output: String,
    /// Whether an answer that redirects is a success.
    #[serde(default)]
    pub redirect: bool,
}

/// How a request authenticates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HttpAuthentication {
    Basic {
        username: String,
        password: String,
    },
    /// The secret of this name.
    BasicSecret(String),
    Bearer {
        token: String,
    },
    /// The secret of this name.
    BearerSecret(String),
}

const CONTENT_TYPE: &str = "content-type";

impl View<'_> {
    /// The payload of a task for the user's workers.
    pub(super) fn worker_payload(&self, path: &str, input: &Value) -> Value {
        json!({ "workflow": self.workflow_name(), "path": path, "input": input })
    }

    fn workflow_name(&self) -> Value {
        json!({
            "namespace": self.program.namespace,
            "name": self.program.name,
            "version": self.program.version,
        })
    }

    fn http_payload(&self, path: &str, request: &HttpRequest) -> Value {
        json!({ "workflow": self.workflow_name(), "path": path, "request": request })
    }

    pub(super) fn http(
        &self,
        path: &str,
        call: &HttpCall,
        input: &Value,
    ) -> Result<Value, Problem> {
        let scope = Scope::at(path);
        let mut uri = match &call.uri {
            Uri::Template(template) => template.expand(|name| input.get(name)),
            Uri::Code(code) => self.text(code, "endpoint", input, &scope)?,
        };
        if let Some(query) = &call.query {
            for (name, value) in self.fields(query, "query", input, &scope)? {
                push_query(&mut uri, &name, &value);
            }
        }
        let mut headers = BTreeMap::new();
        if let Some(code) = &call.headers {
            for (name, value) in self.fields(code, "headers", input, &scope)? {
                headers.insert(name, as_text(&value));
            }
        }
        let body = call.body.as_ref();
        let body = body.map(|body| self.evaluate(body, "body", input, &scope));
        let request = HttpRequest {
            method: call.method.clone(),
            uri,
            headers,
            body: body.transpose()?,
            authentication: self.authentication(&call.answer, input, &scope)?,
            output: output_name(call.answer.output).to_owned(),
            redirect: call.answer.redirect,
        };
        Ok(self.http_payload(path, &request))
    }

    pub(super) fn openapi(
        &self,
        path: &str,
        call: &OpenApiCall,
        input: &Value,
    ) -> Result<Value, Problem> {
        let scope = Scope::at(path);
        let mut in_path = Map::new();
        let mut query = Vec::new();
        let mut headers = BTreeMap::new();
        let mut cookies = Vec::new();
        let mut body = None;
        let mut fields = Map::new();
        let mut form = String::new();
        for (name, code) in &call.parameters {
            let value = self.evaluate(code, name, input, &scope)?;
            match call.operation.part(name) {
                Some(Part::Path) => {
                    in_path.insert(name.clone(), value);
                }
                Some(Part::Query) => query.push((name, value)),
                Some(Part::Header) => {
                    headers.insert(name.clone(), as_text(&value));
                }
                Some(Part::Cookie) => cookies.push(format!("{name}={}", as_text(&value))),
                Some(Part::Body) => body = Some(value),
                Some(Part::Form) => push_query(&mut form, name, &value),
                Some(Part::Field) | None => {
                    fields.insert(name.clone(), value);
                }
            }
        }
        let mut uri = call.operation.uri.expand(|name| in_path.get(name));
        for (name, value) in query {
            // A parameter that the input does not have is not sent.
            if !value.is_null() {
                push_query(&mut uri, name, &value);
            }
        }
        if !cookies.is_empty() {
            headers.insert("cookie".to_owned(), cookies.join("; "));
        }
        if !form.is_empty() {
            let kind = "application/x-www-form-urlencoded".to_owned();
            headers.insert(CONTENT_TYPE.to_owned(), kind);
            body = Some(form.split_off(1).into());
        } else if !fields.is_empty() {
            body = Some(Value::Object(fields));
        }
        let request = HttpRequest {
            method: call.operation.method.to_ascii_uppercase(),
            uri,
            headers,
            body,
            authentication: self.authentication(&call.answer, input, &scope)?,
            output: output_name(call.answer.output).to_owned(),
            redirect: call.answer.redirect,
        };
        Ok(self.http_payload(path, &request))
    }

    fn authentication(
        &self,
        answer: &Answer,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<Option<HttpAuthentication>, Problem> {
        let Some(authentication) = &answer.authentication else {
            return Ok(None);
        };
        let text = |code: &Code| self.text(code, "authentication", input, scope);
        Ok(Some(match authentication {
            Authentication::Basic { username, password } => HttpAuthentication::Basic {
                username: text(username)?,
                password: text(password)?,
            },
            Authentication::Bearer(token) => HttpAuthentication::Bearer {
                token: text(token)?,
            },
            Authentication::BasicSecret(name) => HttpAuthentication::BasicSecret(name.clone()),
            Authentication::BearerSecret(name) => HttpAuthentication::BearerSecret(name.clone()),
        }))
    }
}

fn output_name(output: HttpOutput) -> &'static str {
    match output {
        HttpOutput::Raw => "raw",
        HttpOutput::Content => "content",
        HttpOutput::Response => "response",
    }
}
