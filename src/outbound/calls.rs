//! The requests of workflows: which servers they go to, redirects, and secrets.

use std::sync::{Arc, OnceLock};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    header::{AUTHORIZATION, COOKIE, HeaderValue, LOCATION},
};
use serde_json::Value;
use url::Url;

use super::{
    client::{Client, Failure, body},
    reach::Reach,
};
use crate::{config::Calls, workflow::machine::HttpAuthentication};

/// How many redirects are followed.
const MOST_REDIRECTS: usize = 5;
/// How many idle connections to a host are kept.
const IDLE_OF_HOST: usize = 8;
/// The shortest text of a secret that is removed from answers: a shorter one stands in them by chance.
const SHORTEST_HIDDEN: usize = 4;
const HIDDEN: &str = "***";

/// Sends the requests of workflows. Clones share its connections.
#[derive(Clone)]
pub struct Outbound(Arc<Inner>);

struct Inner {
    settings: Calls,
    /// For servers that stand in for others: the operator has named their addresses.
    named: OnceLock<Client>,
    public: OnceLock<Client>,
}

/// A request to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    pub method: Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// Follow redirects, if the method is safe. Otherwise they are answers.
    pub follows: bool,
}

/// The answer of a server.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// The header of a request that authenticates.
pub struct Authorization {
    pub header: HeaderValue,
    /// What answers must not show.
    secrets: Vec<String>,
}

impl Outbound {
    pub fn new(settings: &Calls) -> Self {
        Self(Arc::new(Inner {
            settings: settings.clone(),
            named: OnceLock::new(),
            public: OnceLock::new(),
        }))
    }

    /// Sends a request, and reads the answer, of at most so many bytes. The caller sets a deadline.
    pub async fn send(&self, outgoing: Outgoing, most: usize) -> Result<Answer, Failure> {
        let Outgoing {
            method,
            mut url,
            mut headers,
            body: content,
            follows,
        } = outgoing;
        let follows = follows && (method == Method::GET || method == Method::HEAD);
        let mut redirects = 0;
        loop {
            let (client, target) = self.target(&url);
            let mut request = Request::builder()
                .method(method.clone())
                .uri(target.as_str())
                .body(Full::from(content.clone()))
                .map_err(|error| Failure::Failed(format!("the URI cannot be sent: {error}")))?;
            request.headers_mut().clone_from(&headers);
            let response = client.send(request).await?;
            let may_follow = follows && redirects < MOST_REDIRECTS;
            match may_follow.then(|| redirected(&response, &url)).flatten() {
                Some(next) => {
                    if next.origin() != url.origin() {
                        headers.remove(AUTHORIZATION);
                        headers.remove(COOKIE);
                    }
                    url = next;
                    redirects += 1;
                }
                None => {
                    return Ok(Answer {
                        status: response.status(),
                        headers: response.headers().clone(),
                        body: body(response, most).await?,
                    });
                }
            }
        }
    }

    /// The client for a URL, and the URL that it calls.
    fn target(&self, url: &Url) -> (&Client, Url) {
        let Inner {
            settings,
            named,
            public,
        } = &*self.0;
        match settings.overrides.of(url) {
            Some(other) => {
                let client = || Client::new(Reach::Anything, IDLE_OF_HOST, true);
                (named.get_or_init(client), other)
            }
            None => {
                let allow = || Arc::new(settings.allow.clone());
                let client = || Client::new(Reach::Public(allow()), IDLE_OF_HOST, true);
                (public.get_or_init(client), url.clone())
            }
        }
    }

    /// Makes the header that authenticates. The error does not contain the secret.
    pub fn authorization(
        &self,
        authentication: &HttpAuthentication,
    ) -> Result<Authorization, String> {
        let secret = |name: &str| self.0.settings.secrets.read(name);
        let mut secrets = Vec::new();
        let written = match authentication {
            HttpAuthentication::Basic { username, password } => basic(username, password),
            HttpAuthentication::Bearer { token } => format!("Bearer {token}"),
            HttpAuthentication::BasicSecret(name) => {
                let text = secret(name)?;
                let (username, password) = user_and_password(&text).ok_or_else(|| {
                    format!(
                        "the secret {name:?} is not USER:PASSWORD, nor JSON with username and password"
                    )
                })?;
                let header = basic(&username, &password);
                secrets.push(header.trim_start_matches("Basic ").to_owned());
                secrets.push(password);
                header
            }
            HttpAuthentication::BearerSecret(name) => {
                let text = secret(name)?;
                let token = match serde_json::from_str::<Value>(&text) {
                    Ok(Value::Object(fields)) => fields
                        .get("token")
                        .and_then(Value::as_str)
                        .map(str::to_owned)
                        .ok_or_else(|| format!("the secret {name:?} is JSON without a token"))?,
                    _ => text,
                };
                secrets.push(token.clone());
                format!("Bearer {token}")
            }
        };
        let mut header = HeaderValue::try_from(written)
            .map_err(|_| "what authenticates cannot stand in a header".to_owned())?;
        header.set_sensitive(true);
        secrets.retain(|secret| secret.len() >= SHORTEST_HIDDEN);
        Ok(Authorization { header, secrets })
    }
}

impl Authorization {
    /// Removes secrets from a value that was read from an answer, where escapes hid them.
    pub fn hide_in(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                for secret in &self.secrets {
                    if text.contains(secret) {
                        *text = text.replace(secret, HIDDEN);
                    }
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.hide_in(item)),
            Value::Object(fields) => {
                let named = |name: &String| self.secrets.iter().any(|secret| name.contains(secret));
                if fields.keys().any(named) {
                    let all = std::mem::take(fields);
                    fields.extend(all.into_iter().map(|(name, value)| {
                        let hide = |name: String, secret: &String| name.replace(secret, HIDDEN);
                        (self.secrets.iter().fold(name, hide), value)
                    }));
                }
                fields.values_mut().for_each(|field| self.hide_in(field));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Removes secrets from an answer that repeats them.
    pub fn hide(&self, answer: &mut Answer) {
        for secret in &self.secrets {
            answer.body = hidden(&answer.body, secret.as_bytes());
            for value in answer.headers.values_mut() {
                let shown = hidden(&Bytes::copy_from_slice(value.as_bytes()), secret.as_bytes());
                if let Ok(shown) = HeaderValue::from_maybe_shared(shown) {
                    *value = shown;
                }
            }
        }
    }
}

/// A text with asterisks in the places of a secret.
fn hidden(text: &Bytes, secret: &[u8]) -> Bytes {
    let mut shown = Vec::new();
    let mut rest = &text[..];
    while let Some(at) = rest.windows(secret.len()).position(|part| part == secret) {
        shown.extend_from_slice(&rest[..at]);
        shown.extend_from_slice(HIDDEN.as_bytes());
        rest = &rest[at + secret.len()..];
    }
    if shown.is_empty() && rest.len() == text.len() {
        return text.clone();
    }
    shown.extend_from_slice(rest);
    shown.into()
}

fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", BASE64.encode(format!("{username}:{password}")))
}

/// Reads `USER:PASSWORD`, or JSON with `username` and `password`.
fn user_and_password(text: &str) -> Option<(String, String)> {
    if let Ok(Value::Object(fields)) = serde_json::from_str(text) {
        let field = |name: &str| fields.get(name)?.as_str().map(str::to_owned);
        return Some((field("username")?, field("password")?));
    }
    let (username, password) = text.split_once(':')?;
    Some((username.to_owned(), password.to_owned()))
}

/// Where an answer redirects to.
fn redirected<T>(response: &Response<T>, from: &Url) -> Option<Url> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = response.headers().get(LOCATION)?.to_str().ok()?;
    let next = from.join(location).ok()?;
    let is_web = matches!(next.scheme(), "http" | "https") && next.has_host();
    (is_web && next.username().is_empty() && next.password().is_none()).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_authenticate_and_are_removed_from_answers() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            format!("{name}=file:{}", path.display())
        };
        let secrets = [
            write("plain", "user:pass:word"),
            write("json", r#"{"username": "u", "password": "p"}"#),
            write("token", "abcdef"),
            write("none", "abcdef"),
        ];
        let settings = Calls {
            secrets: secrets.join(",").parse().unwrap(),
            ..Calls::default()
        };
        let outbound = Outbound::new(&settings);
        let basic =
            |name: &str| outbound.authorization(&HttpAuthentication::BasicSecret(name.to_owned()));
        assert_eq!(basic("plain").unwrap().header, "Basic dXNlcjpwYXNzOndvcmQ=");
        assert_eq!(basic("json").unwrap().header, "Basic dTpw");
        let error = basic("none").err().unwrap();
        assert!(
            error.contains("USER:PASSWORD") && !error.contains("abcdef"),
            "{error}"
        );
        let token = HttpAuthentication::BearerSecret("token".to_owned());
        let token = outbound.authorization(&token).unwrap();
        assert_eq!(token.header, "Bearer abcdef");
        let mut answer = Answer {
            status: StatusCode::OK,
            headers: HeaderMap::from_iter([(LOCATION, "/abcdef".parse().unwrap())]),
            body: "abcdef abcde abcdef".into(),
        };
        token.hide(&mut answer);
        assert_eq!(answer.body, "*** abcde ***");
        assert_eq!(answer.headers[LOCATION], "/***");
        let mut escaped = serde_json::from_str(r#"{"\u0061bcdef": ["\u0061bcdef", 1]}"#).unwrap();
        token.hide_in(&mut escaped);
        assert_eq!(escaped, serde_json::json!({"***": ["***", 1]}));
    }
}
