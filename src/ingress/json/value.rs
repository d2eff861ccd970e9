//! Payloads and results: any JSON value, text, or bytes. Each is returned in the form in which it
//! was sent.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use super::without_place;
use crate::model::Encoding;

/// Returns the bytes of `payload` or `payload_base64`, and their encoding. `null` and an empty
/// string give no bytes.
pub(super) fn read(
    body: &Bytes,
    name: &str,
    json: Option<&RawValue>,
    base64: Option<String>,
) -> Result<(Bytes, Encoding), String> {
    match (json, base64) {
        (Some(_), Some(_)) => Err(format!("{name} and {name}_base64 are both given; use one")),
        (None, None) => Ok((Bytes::new(), Encoding::Unknown)),
        (None, Some(text)) => {
            let bytes = BASE64
                .decode(text)
                .map_err(|error| format!("{name}_base64 is not base64: {error}"))?;
            Ok((bytes.into(), Encoding::Bytes))
        }
        (Some(json), None) if json.get().starts_with('"') => {
            Ok((string_within(body, name, json.get())?, Encoding::Text))
        }
        (Some(json), None) => Ok((body.slice_ref(json.get().as_bytes()), Encoding::Json)),
    }
}

fn string_within(body: &Bytes, name: &str, json: &str) -> Result<Bytes, String> {
    // Without a backslash, the text between the quotes is the string.
    let inner = &json[1..json.len() - 1];
    if !inner.contains('\\') {
        return Ok(body.slice_ref(inner.as_bytes()));
    }
    let named = |error| format!("{name}: {}", without_place(&error));
    serde_json::from_str(json)
        .map(|text: String| Bytes::from(text))
        .map_err(named)
}

/// The kind of a payload or a result: what its sender sent.
#[derive(JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(dead_code, reason = "only the document of the API has this type")]
pub(super) enum EncodingName {
    Json,
    Text,
    Bytes,
}

/// The value of `payload` or `result`.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Value<'a> {
    Json(&'a RawValue),
    Text(&'a str),
}

/// A payload or a result in an answer: a value or base64, and the encoding; nothing if it is empty.
#[derive(Default)]
pub(super) struct Shown<'a> {
    pub(super) value: Option<Value<'a>>,
    pub(super) base64: Option<String>,
    pub(super) encoding: Option<&'static str>,
}

impl<'a> Shown<'a> {
    /// Shows bytes of unknown encoding as JSON if they are JSON, or as text if they are UTF-8.
    pub(super) fn of(bytes: &'a [u8], encoding: Encoding) -> Self {
        if bytes.is_empty() {
            return Self::default();
        }
        let text = || std::str::from_utf8(bytes).ok();
        let value = match encoding {
            Encoding::Bytes => None,
            Encoding::Text => text().map(Value::Text),
            // taskd checked JSON at the insert. If it is not JSON all the same, text is better than
            // a broken answer.
            Encoding::Json | Encoding::Unknown => {
                text().map(|text| serde_json::from_str(text).map_or(Value::Text(text), Value::Json))
            }
        };
        match value {
            Some(Value::Json(_)) => Self {
                value,
                base64: None,
                encoding: Some("json"),
            },
            Some(Value::Text(_)) => Self {
                value,
                base64: None,
                encoding: Some("text"),
            },
            None => Self {
                value: None,
                base64: Some(BASE64.encode(bytes)),
                encoding: Some("bytes"),
            },
        }
    }
}

/// A task's payload in an answer.
#[derive(JsonSchema, Serialize)]
pub(super) struct Payload<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    payload_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EncodingName>")]
    pub(super) payload_encoding: Option<&'static str>,
}

impl<'a> Payload<'a> {
    pub(super) fn of(bytes: &'a [u8], encoding: Encoding) -> Self {
        let Shown {
            value,
            base64,
            encoding,
        } = Shown::of(bytes, encoding);
        Self {
            payload: value,
            payload_base64: base64,
            payload_encoding: encoding,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_given_is_shown_again_once() {
        let shown = |bytes: &[u8], encoding| {
            let shown = Shown::of(bytes, encoding);
            (
                serde_json::to_string(&shown.value).unwrap(),
                shown.base64,
                shown.encoding.unwrap_or_default(),
            )
        };
        let text = |text: &str| serde_json::to_string(text).unwrap();
        let none = || "null".to_owned();
        let cases: [(&[u8], Encoding, _); 11] = [
            (
                b"{\"a\":  1.50}",
                Encoding::Json,
                ("{\"a\":  1.50}".into(), None, "json"),
            ),
            (
                b"\"quoted\"",
                Encoding::Json,
                ("\"quoted\"".into(), None, "json"),
            ),
            (b"42", Encoding::Text, (text("42"), None, "text")),
            (
                b"42",
                Encoding::Bytes,
                (none(), Some("NDI=".into()), "bytes"),
            ),
            (b"{}", Encoding::Text, (text("{}"), None, "text")),
            (b"", Encoding::Json, (none(), None, "")),
            // The encoding is unknown.
            (b"[1]", Encoding::Unknown, ("[1]".into(), None, "json")),
            (b"plain", Encoding::Unknown, (text("plain"), None, "text")),
            (
                b"\xff",
                Encoding::Unknown,
                (none(), Some("/w==".into()), "bytes"),
            ),
            // The bytes do not match their encoding.
            (b"{", Encoding::Json, (text("{"), None, "text")),
            (
                b"\xff",
                Encoding::Text,
                (none(), Some("/w==".into()), "bytes"),
            ),
        ];
        for (bytes, encoding, want) in cases {
            assert_eq!(shown(bytes, encoding), want, "{bytes:?} as {encoding:?}");
        }
        assert_eq!(json!(Shown::of(b"[1]", Encoding::Json).value), json!([1]));
    }
}
