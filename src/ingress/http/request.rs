//! The parts of a request: its content type, its body, an id in its path.

use std::{convert::Infallible, io, time::Duration};

use axum::{
    body::Body,
    extract::{FromRequestParts, Path},
    http::{HeaderMap, StatusCode, header, request},
};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde::Deserialize;

use super::{
    super::{
        State,
        net::body::{Cut, Pace},
        net::lines::without_mark,
    },
    problem::Problem,
};
use crate::api::{ECHO, shorten};

/// How fast a body must arrive, unless it is NDJSON.
const PACE: Pace = Pace {
    silence: Duration::from_secs(30),
    whole: Duration::from_secs(120),
};

/// The most bytes that are allocated before the first of them has arrived.
const FIRST_BYTES: usize = 64 << 10;

/// Returns how fast the body of a request must arrive. Lines have no such limit; `ndjson` watches
/// them.
pub(super) fn pace(head: &request::Parts) -> Option<Pace> {
    let is_lines = is_ndjson(&head.headers).unwrap_or(false);
    (!is_lines).then_some(PACE)
}

pub(super) fn is_ndjson(headers: &HeaderMap) -> Result<bool, Problem> {
    const NDJSON: [&str; 4] = [
        "application/x-ndjson",
        "application/ndjson",
        "application/jsonl",
        "application/x-jsonl",
    ];
    Ok(NDJSON.contains(&content_type(headers)?.as_str()))
}

/// Returns the content type in lower case, without parameters. Refuses a compressed body.
fn content_type(headers: &HeaderMap) -> Result<String, Problem> {
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let encoding = String::from_utf8_lossy(value.as_bytes());
        if !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity") {
            let encoding = shorten(&encoding, ECHO);
            let why =
                format!("content encoding {encoding:?} is not understood; send the body as it is");
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
    }
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    Ok(kind
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase())
}

/// Reads a JSON body, and refuses every other type.
///
/// Browsers send the other types to any address without asking it first, and a web page must not be
/// able to insert tasks here.
pub(super) async fn json_body(
    state: &State,
    headers: &HeaderMap,
    body: Body,
    expected: &str,
) -> Result<Bytes, Problem> {
    typed_body(state, headers, body, &[JSON], expected).await
}

/// Like [`json_body`], for a body of one of `kinds`, which `expected` names.
pub(super) async fn typed_body(
    state: &State,
    headers: &HeaderMap,
    body: Body,
    kinds: &[&str],
    expected: &str,
) -> Result<Bytes, Problem> {
    let given = content_type(headers)?;
    if !kinds.contains(&given.as_str()) {
        let given = if given.is_empty() {
            "a request without a content type".into()
        } else {
            format!("content type {given:?}")
        };
        let why = format!("{given} is not understood; send {expected}");
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    whole(headers, body, state.settings.limits.max_request_bytes).await
}

/// Reads a body of at most `limit` bytes.
pub(super) async fn whole(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, Problem> {
    let too_large = || {
        let why = format!(
            "the body has more than {limit} bytes (max_request_bytes); send less at once, or NDJSON"
        );
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut chunks = body.into_data_stream();
    // A head may announce bytes that never come, and address space may be limited. So the buffer
    // grows with the bytes that arrive.
    let mut text = BytesMut::with_capacity(announced.unwrap_or_default().min(FIRST_BYTES));
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(cut)?;
        if text.len() + chunk.len() > limit {
            return Err(too_large());
        }
        text.extend_from_slice(&chunk);
    }
    let mut text = text.freeze();
    without_mark(&mut text);
    Ok(text)
}

/// Unwraps taskd's error from the one that axum makes of it.
pub(super) fn cut(error: axum::Error) -> Problem {
    match error.into_inner().downcast::<Cut>() {
        Ok(cut) => (*cut).into(),
        Err(error) => Problem::bad_request(format!("the body broke off: {error}")),
    }
}

/// Unwraps taskd's error from axum's error that a reader of lines has wrapped.
pub(super) fn cut_line(error: io::Error) -> Problem {
    match error
        .into_inner()
        .map(|inner| inner.downcast::<axum::Error>())
    {
        Some(Ok(error)) => cut(*error),
        Some(Err(error)) => Problem::bad_request(format!("the body broke off: {error}")),
        None => Problem::bad_request("the body broke off"),
    }
}

impl From<Cut> for Problem {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::NoRoom(_) => Self::later(StatusCode::TOO_MANY_REQUESTS, cut).and_close(),
            Cut::Stopping => Self::later(StatusCode::SERVICE_UNAVAILABLE, cut).and_close(),
            Cut::Late(_) | Cut::LongLine(_) => {
                Self::new(StatusCode::REQUEST_TIMEOUT, cut.to_string()).and_close()
            }
            Cut::Broken(_) => Self::bad_request(cut.to_string()),
        }
    }
}

pub(super) const JSON: &str = "application/json";

/// The text at the position of an id in the path. If it cannot be decoded, this is the error
/// message, which is not an id, either.
pub(in crate::ingress) struct Id(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Infallible;

    async fn from_request_parts(head: &mut request::Parts, state: &S) -> Result<Self, Infallible> {
        let path = Path::from_request_parts(head, state).await;
        Ok(Self(path.map_or_else(
            |rejection| rejection.body_text(),
            |Path(text)| text,
        )))
    }
}

/// The texts at the positions of two ids in the path. If they cannot be decoded, the first is empty,
/// which is no id.
pub(in crate::ingress) struct TwoIds(pub(super) String, pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for TwoIds {
    type Rejection = Infallible;

    async fn from_request_parts(head: &mut request::Parts, state: &S) -> Result<Self, Infallible> {
        let path = Path::<(String, String)>::from_request_parts(head, state).await;
        let (first, second) = path.map_or_else(|_| Default::default(), |path| path.0);
        Ok(Self(first, second))
    }
}

/// The texts at the positions of three ids in the path. If they cannot be decoded, the first is
/// empty, which is no id.
pub(in crate::ingress) struct ThreeIds(pub(super) String, pub(super) String, pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for ThreeIds {
    type Rejection = Infallible;

    async fn from_request_parts(head: &mut request::Parts, state: &S) -> Result<Self, Infallible> {
        let path = Path::<(String, String, String)>::from_request_parts(head, state).await;
        let (first, second, third) = path.map_or_else(|_| Default::default(), |path| path.0);
        Ok(Self(first, second, third))
    }
}

/// The requested part of a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    pub(super) before: Option<String>,
    #[serde(default)]
    pub(super) limit: u32,
}
