//! The request of a task.

use std::{fmt::Write as _, time::Duration};

use bytes::Bytes;
use hyper::{
    HeaderMap, Method, Uri,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT},
};
use serde::Deserialize;
use serde_json::Value;
use url::Url;

use super::answer;
use crate::{
    model::{LeasedTask, shorten},
    outbound::{self, Answer, Authorization, Outbound, Outgoing},
    pipelines::workflows::row::OF_KEY,
    workflow::machine::{HttpRequest, Problem, ProblemKind},
};

/// The key under which a request is sent again after a crash.
const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Headers that say how a request is sent. Those that begin with `proxy-` do, too.
const OF_TRANSPORT: [&str; 9] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
const SHOWN: usize = 100;

/// What became of a request.
pub(super) enum End {
    /// The result, as JSON.
    Answered(Bytes),
    /// An error of the workflow.
    Failed(Problem),
    /// Nothing was sent. It is an error once the task has no attempts left.
    NotConnected(Problem),
    /// Nothing is wrong, but it has to wait.
    PutOff(Duration),
    /// The task is none of a workflow.
    Wrong(String),
}

/// A request to send.
pub(super) struct Request {
    pub(super) outgoing: Outgoing,
    written: HttpRequest,
    authorization: Option<Authorization>,
}

#[derive(Deserialize)]
struct Payload {
    request: HttpRequest,
}

impl Request {
    /// Reads the request of a task.
    pub(super) fn read(task: &LeasedTask, outbound: &Outbound) -> Result<Self, End> {
        let body = &task.body;
        let Some(key) = body.headers.get(OF_KEY) else {
            return Err(End::Wrong("the task is no step of a workflow".to_owned()));
        };
        let Payload { request } = serde_json::from_slice(&body.payload).map_err(|error| {
            End::Wrong(format!(
                "the payload is no HTTP request of a workflow: {error}"
            ))
        })?;
        let wrong = |why: String| {
            let why = shorten(&why, 5 * SHOWN);
            End::Failed(Problem::new(ProblemKind::Configuration, "", why))
        };
        let url = url(&request.uri).map_err(wrong)?;
        let method = Method::from_bytes(request.method.as_bytes())
            .map_err(|_| wrong(format!("{:?} is no method of HTTP", request.method)))?;
        let mut headers = headers(&request).map_err(wrong)?;
        let content = content(&request, &mut headers);
        let mut add = |name: HeaderName, value: &str| {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.entry(name).or_insert(value);
            }
        };
        add(HeaderName::from_static(IDEMPOTENCY_KEY), &visible(key));
        add(USER_AGENT, outbound::USER_AGENT);
        add(ACCEPT, "application/json, */*;q=0.5");
        if !body.traceparent.is_empty() {
            add(HeaderName::from_static("traceparent"), &body.traceparent);
        }
        let authorization = match &request.authentication {
            Some(authentication) => {
                let made = outbound.authorization(authentication).map_err(|why| {
                    End::Failed(Problem::new(ProblemKind::Authentication, "", why))
                })?;
                headers.insert(AUTHORIZATION, made.header.clone());
                Some(made)
            }
            None => None,
        };
        Ok(Self {
            outgoing: Outgoing {
                method,
                url,
                headers,
                body: content,
                follows: !request.redirect,
            },
            written: request,
            authorization,
        })
    }

    /// The error of a request to which there was no proper answer.
    pub(super) fn failed(&self, status: u16, why: &str) -> Problem {
        let Outgoing { method, url, .. } = &self.outgoing;
        let origin = url.origin().ascii_serialization();
        let path = shorten(url.path(), SHOWN);
        let detail = format!("{method} {origin}{path}: {why}");
        Problem {
            status: status.into(),
            ..Problem::new(ProblemKind::Communication, "", detail)
        }
    }

    /// What an answer means.
    pub(super) fn end(&mut self, mut answer: Answer, most: usize) -> End {
        if let Some(authorization) = &self.authorization {
            authorization.hide(&mut answer);
        }
        let status = answer.status;
        let is_redirect = status.is_redirection() && self.written.redirect;
        if !status.is_success() && !is_redirect {
            return End::Failed(self.failed(status.as_u16(), &status.to_string()));
        }
        let mut result = answer::result(&self.written, &answer);
        if let Some(authorization) = &self.authorization {
            authorization.hide_in(&mut result);
        }
        let result = result.to_string();
        match result.len() <= most {
            true => End::Answered(result.into()),
            false => {
                let bytes = result.len();
                let why = format!(
                    "the answer makes a result of {bytes} bytes; at most {most} (max_result_bytes)"
                );
                End::Failed(self.failed(500, &why))
            }
        }
    }
}

fn url(uri: &str) -> Result<Url, String> {
    let shown = shorten(uri.split(['?', '#']).next().unwrap_or_default(), SHOWN);
    let mut url = Url::parse(uri).map_err(|error| format!("{shown:?} is no URI: {error}"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(format!("{shown:?} is not http://… or https://…"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the URI has a user or a password; use authentication".to_owned());
    }
    url.set_fragment(None);
    // A mistake of the workflow is no failure of the host.
    match url.as_str().parse::<Uri>() {
        Ok(_) => Ok(url),
        Err(error) => Err(format!("{shown:?} cannot be sent: {error}")),
    }
}

fn headers(request: &HttpRequest) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &request.headers {
        let shown = shorten(name, SHOWN);
        let wrong = || format!("{shown:?} with its value is no header of HTTP");
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        if OF_TRANSPORT.contains(&name.as_str()) || name.as_str().starts_with("proxy-") {
            return Err(format!("taskd sets the header {shown:?} itself"));
        }
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| wrong())?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// The bytes of the body. It is JSON, unless a header says otherwise; then a text is sent as it is.
fn content(request: &HttpRequest, headers: &mut HeaderMap) -> Bytes {
    match &request.body {
        None => Bytes::new(),
        Some(Value::String(text)) if headers.contains_key(CONTENT_TYPE) => text.clone().into(),
        Some(body) => {
            let json = HeaderValue::from_static("application/json");
            headers.entry(CONTENT_TYPE).or_insert(json);
            body.to_string().into()
        }
    }
}

/// A text in characters that a header may have.
fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~' if byte != b'%' => visible.push(char::from(byte)),
            // Writing to a String never fails.
            _ => drop(write!(visible, "%{byte:02X}")),
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_visible_and_stay_apart() {
        assert_eq!(visible("a//do/0/b#1.0"), "a//do/0/b#1.0");
        assert_eq!(visible("ä b%20\n"), "%C3%A4%20b%2520%0A");
    }

    #[test]
    fn addresses_are_of_the_web_and_without_passwords() {
        assert_eq!(url("http://a/b?c=d#e").unwrap().as_str(), "http://a/b?c=d");
        let long = format!("http://a/{}", "b".repeat(70_000));
        let error = url(&long).unwrap_err();
        assert!(
            error.contains("cannot be sent") && error.len() < 300,
            "{error}"
        );
        for wrong in ["a", "ftp://a/", "http://u:secret@a/", "https://?key=secret"] {
            let error = url(wrong).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
