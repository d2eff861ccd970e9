//! Templates of URIs: `{name}` stands for a field of the input.

use std::fmt::Write as _;

use serde_json::Value;

/// A URI in which names in braces are replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UriTemplate(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Name(String),
}

impl UriTemplate {
    /// Reads a template. Braces that do not close are text.
    pub(crate) fn read(text: &str) -> Self {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let Some((name, after)) = after.split_once('}') else {
                break;
            };
            parts.push(Part::Text(before.to_owned()));
            parts.push(Part::Name(name.to_owned()));
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        Self(parts)
    }

    /// The URI for these fields. A field that is missing is empty.
    pub(crate) fn expand<'a>(&self, field: impl Fn(&str) -> Option<&'a Value>) -> String {
        let mut uri = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => uri.push_str(text),
                Part::Name(name) => {
                    if let Some(value) = field(name) {
                        push_encoded(&mut uri, &as_text(value));
                    }
                }
            }
        }
        uri
    }
}

/// Appends a field to the query of a URI. An array repeats the field.
pub(crate) fn push_query(uri: &mut String, name: &str, value: &Value) {
    if let Value::Array(values) = value {
        for value in values {
            push_query(uri, name, value);
        }
        return;
    }
    let fragment = uri.find('#').map(|at| uri.split_off(at));
    uri.push(if uri.contains('?') { '&' } else { '?' });
    push_encoded(uri, name);
    uri.push('=');
    push_encoded(uri, &as_text(value));
    uri.push_str(&fragment.unwrap_or_default());
}

/// A text as it is, nothing for null, and JSON for the others.
pub(crate) fn as_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Appends a text with all but unreserved characters encoded (RFC 3986).
fn push_encoded(uri: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                uri.push(char::from(byte));
            }
            // Writing to a String never fails.
            _ => drop(write!(uri, "%{byte:02X}")),
        }
    }
}
