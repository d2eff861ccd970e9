//! What answers become in a workflow.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use hyper::{HeaderMap, header::CONTENT_TYPE};
use serde_json::{Map, Value, json};

use crate::{outbound::Answer, workflow::machine::HttpRequest};

/// The result of a request.
pub(super) fn result(request: &HttpRequest, answer: &Answer) -> Value {
    match request.output.as_str() {
        "raw" => BASE64.encode(&answer.body).into(),
        "response" => json!({
            "request": {
                "method": request.method,
                "uri": request.uri,
                "headers": request.headers,
            },
            "statusCode": answer.status.as_u16(),
            "headers": shown(&answer.headers),
            "content": content(answer),
        }),
        _ => content(answer),
    }
}

/// The body: JSON as a value, other texts as they are, and anything else in base64.
fn content(answer: &Answer) -> Value {
    let Answer { headers, body, .. } = answer;
    if body.is_empty() {
        return Value::Null;
    }
    let kind = headers
        .get(CONTENT_TYPE)
        .map(|kind| kind.to_str().unwrap_or_default());
    let kind = kind.map(|kind| {
        kind.split(';')
            .next()
            .unwrap_or(kind)
            .trim()
            .to_ascii_lowercase()
    });
    let is_json = kind.is_none_or(|kind| kind.ends_with("/json") || kind.ends_with("+json"));
    let read = is_json.then(|| serde_json::from_slice(body).ok()).flatten();
    read.unwrap_or_else(|| text(body))
}

fn text(body: &Bytes) -> Value {
    match std::str::from_utf8(body) {
        Ok(text) => text.into(),
        Err(_) => BASE64.encode(body).into(),
    }
}

/// Headers as an object. Several of one name are joined.
fn shown(headers: &HeaderMap) -> Map<String, Value> {
    let mut shown = Map::new();
    for name in headers.keys() {
        let values = headers.get_all(name).iter();
        let values = values.map(|value| String::from_utf8_lossy(value.as_bytes()));
        let joined = values.collect::<Vec<_>>().join(", ");
        shown.insert(name.as_str().to_owned(), joined.into());
    }
    shown
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;

    use super::*;

    #[test]
    fn content_is_json_or_text_or_bytes() {
        let content = |kind: Option<&str>, body: &'static [u8]| {
            let headers = kind.map(|kind| (CONTENT_TYPE, kind.parse().unwrap()));
            content(&Answer {
                status: StatusCode::OK,
                headers: headers.into_iter().collect(),
                body: body.into(),
            })
        };
        let json = Some("application/problem+json; charset=utf-8");
        assert_eq!(content(json, br#"{"a": 1}"#), json!({ "a": 1 }));
        assert_eq!(content(json, b"{"), json!("{"));
        assert_eq!(content(None, b"[1]"), json!([1]));
        assert_eq!(content(Some("text/plain"), b"[1]"), json!("[1]"));
        assert_eq!(content(Some("image/png"), b"\xff"), json!("/w=="));
        assert_eq!(content(json, b""), Value::Null);
    }
}
