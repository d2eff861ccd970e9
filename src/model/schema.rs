//! JSON Schemas of payloads.

use std::{collections::HashMap, fmt, sync::Arc};

use bytes::Bytes;
use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use super::{
    Encoding,
    json::{self, Fault},
    validate,
};

/// The longest message about a payload, in bytes.
const MAX_MISFIT_BYTES: usize = 500;
/// The most bytes of a compiled pattern. Some short patterns (`(x{1000}){1000}`) would take gigabytes.
const MAX_PATTERN_BYTES: usize = 1 << 20;
/// Payloads of more bytes than this keep a thread busy for a millisecond and more.
const LARGE_BYTES: usize = 64 << 10;

/// A compiled schema. Clones share it.
#[derive(Clone)]
pub struct PayloadSchema(Arc<Compiled>);

struct Compiled {
    text: String,
    validator: Validator,
}

impl PayloadSchema {
    /// Compiles a schema. The error is one line: the place in the schema, and the problem.
    ///
    /// The schema may refer to its own parts only. Its patterns take linear time, so they have no look-around and no
    /// backreferences.
    pub fn compile(text: &str) -> Result<Self, String> {
        let schema: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
        let patterns = PatternOptions::regex().size_limit(MAX_PATTERN_BYTES);
        let validator = jsonschema::options().offline().with_pattern_options(patterns).build(&schema);
        match validator {
            Ok(validator) => Ok(Self(Arc::new(Compiled { text: schema.to_string(), validator }))),
            Err(error) => {
                // An error of the schema's form names the place in the schema as that of a value.
                let (of_value, of_keyword) = (error.instance_path().as_str(), error.schema_path().as_str());
                let place = if of_value.is_empty() { of_keyword } else { of_value };
                let problem = shortened(&error).replace(['\n', '\r'], " ");
                Err(if place.is_empty() { problem } else { format!("at {place}: {problem}") })
            }
        }
    }

    /// The schema without line ends.
    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// The first reason why a payload does not fit, and its place as a JSON pointer. `None`: it fits.
    ///
    /// Text counts as a JSON string, and no payload as `null`.
    pub fn misfit(&self, payload: &[u8], encoding: Encoding) -> Option<Misfit> {
        let value = match encoding {
            Encoding::Text => match std::str::from_utf8(payload) {
                Ok(text) => Value::String(text.to_owned()),
                Err(_) => return Some(not_json("it is not UTF-8")),
            },
            _ if payload.is_empty() => Value::Null,
            Encoding::Json => match serde_json::from_slice(payload) {
                Ok(value) => value,
                Err(error) => return Some(not_read(payload, &error)),
            },
            Encoding::Bytes | Encoding::Unknown => return Some(not_json("its payload_encoding is BYTES")),
        };
        // This is faster than a search for the first error.
        if self.0.validator.is_valid(&value) {
            return None;
        }
        let error = self.0.validator.iter_errors(&value).next()?;
        let place = match error.instance_path().as_str() {
            "" => "the payload".to_owned(),
            pointer => format!("payload at {}", shortened(&pointer)),
        };
        let says = format!("{place} does not fit the queue's payload_schema: {}", shortened(&error));
        // The payload's own names and values are left out.
        let rule = shortened(&error.schema_path().as_str());
        Some(Misfit { says, logged: format!("the payload does not fit the queue's payload_schema at {rule}") })
    }
}

/// A payload that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The reason, with parts of the payload, for its sender.
    pub says: String,
    /// The reason without parts of the payload, for the log.
    pub logged: String,
}

/// JSON that serde_json does not read: it counts depths, too.
fn not_read(payload: &[u8], error: &serde_json::Error) -> Misfit {
    match std::str::from_utf8(payload).map(json::check) {
        Ok(Err(Fault::TooDeep)) => {
            let says = validate::too_deep("payload");
            Misfit { logged: says.clone(), says }
        }
        _ => not_json(&error.to_string()),
    }
}

fn not_json(why: &str) -> Misfit {
    let says = format!("the queue has a payload_schema, and the payload is not JSON: {why}");
    Misfit { logged: says.clone(), says }
}

impl PartialEq for PayloadSchema {
    fn eq(&self, other: &Self) -> bool {
        self.0.text == other.0.text
    }
}

impl fmt::Debug for PayloadSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

/// The beginning of a text. The text of an error may contain all of a payload.
fn shortened(text: &impl fmt::Display) -> String {
    struct Beginning(String);

    impl fmt::Write for Beginning {
        fn write_str(&mut self, part: &str) -> fmt::Result {
            let room = MAX_MISFIT_BYTES - self.0.len();
            if part.len() <= room {
                self.0.push_str(part);
                return Ok(());
            }
            self.0.push_str(&part[..part.floor_char_boundary(room)]);
            Err(fmt::Error)
        }
    }

    let mut beginning = Beginning(String::new());
    match fmt::write(&mut beginning, format_args!("{text}")) {
        Ok(()) => beginning.0,
        Err(fmt::Error) => beginning.0 + "…",
    }
}

/// Payloads that wait to be held against the schemas of their queues.
#[derive(Default)]
pub struct PayloadCheck {
    payloads: Vec<(usize, PayloadSchema, Bytes, Encoding)>,
}

impl PayloadCheck {
    /// Adds a payload. Its place in the caller's list names it.
    pub fn add(&mut self, place: usize, schema: &PayloadSchema, payload: &Bytes, encoding: Encoding) {
        self.payloads.push((place, schema.clone(), payload.clone(), encoding));
    }

    /// True if the check is not for a thread that serves others.
    pub fn is_large(&self) -> bool {
        self.payloads.iter().map(|(_, _, payload, _)| payload.len()).sum::<usize>() > LARGE_BYTES
    }

    /// The payloads that do not fit, by place.
    pub fn misfits(self) -> HashMap<usize, Misfit> {
        let payloads = self.payloads.into_iter();
        payloads
            .filter_map(|(place, schema, payload, encoding)| Some((place, schema.misfit(&payload, encoding)?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r##"{
        "type": "object",
        "properties": {"url": {"type": "string", "pattern": "^https?://"}, "depth": {"$ref": "#/$defs/depth"}},
        "required": ["url"],
        "$defs": {"depth": {"type": "integer", "maximum": 9}}
    }"##;

    fn page() -> PayloadSchema {
        PayloadSchema::compile(PAGE).unwrap()
    }

    #[test]
    fn a_payload_that_is_too_deep_is_called_so() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        let misfit = page().misfit(deep.as_bytes(), Encoding::Json).unwrap();
        assert_eq!(misfit.says, "payload has arrays and objects more than 120 deep in each other");
    }

    #[test]
    fn the_first_error_is_told_with_its_place() {
        let json = |text: &'static str| (text.as_bytes(), Encoding::Json);
        let fits = [json(r#"{"url": "http://x"}"#), json(r#"{"url": "https://x", "depth": 9, "more": 1}"#)];
        for (payload, encoding) in fits {
            assert_eq!(page().misfit(payload, encoding), None);
        }
        let cases: [(&[u8], Encoding, &str); 8] = [
            (b"{\"url\": \"ftp://x\"}", Encoding::Json, "payload at /url does not fit the queue's payload_schema: "),
            (b"{\"url\": \"http://x\", \"depth\": 10}", Encoding::Json, "payload at /depth does not fit"),
            (b"{}", Encoding::Json, "the payload does not fit the queue's payload_schema: \"url\" is a required prop"),
            (b"", Encoding::Json, "the payload does not fit the queue's payload_schema: null is not of type"),
            (b"x", Encoding::Text, "the payload does not fit the queue's payload_schema: \"x\" is not of type"),
            (b"{", Encoding::Json, "the queue has a payload_schema, and the payload is not JSON: EOF"),
            (b"{}", Encoding::Bytes, "the payload is not JSON: its payload_encoding is BYTES"),
            (b"\xff", Encoding::Text, "the payload is not JSON: it is not UTF-8"),
        ];
        for (payload, encoding, want) in cases {
            let misfit = page().misfit(payload, encoding).unwrap();
            assert!(misfit.says.contains(want), "{misfit:?} should say {want:?}");
        }
    }

    #[test]
    fn a_message_does_not_repeat_a_large_payload() {
        let payload = format!("[\"{}\"]", "é".repeat(100_000));
        let misfit = page().misfit(payload.as_bytes(), Encoding::Json).unwrap().says;
        assert!(misfit.len() < 600 && misfit.ends_with('…'), "{misfit}");
        let key = format!("{{\"{}\": 1}}", "k".repeat(100_000));
        let schema = PayloadSchema::compile(r#"{"additionalProperties": {"type": "string"}}"#).unwrap();
        let misfit = schema.misfit(key.as_bytes(), Encoding::Json).unwrap().says;
        assert!(misfit.len() < 1200, "{misfit}");
    }

    #[test]
    fn a_log_line_has_no_part_of_the_payload() {
        let schema = r#"{"properties": {"url": {"maxLength": 3}}, "additionalProperties": {"type": "integer"},
            "propertyNames": {"maxLength": 9}}"#;
        let schema = PayloadSchema::compile(schema).unwrap();
        for payload in [r#"{"url": "secret"}"#, r#"{"secret": "secret"}"#, r#"{"secret-secret": 1}"#] {
            let misfit = schema.misfit(payload.as_bytes(), Encoding::Json).unwrap();
            assert!(misfit.says.contains("secret"), "{misfit:?}");
            assert!(!misfit.logged.contains("secret"), "{misfit:?}");
            assert!(
                misfit.logged.starts_with("the payload does not fit the queue's payload_schema at /"),
                "{misfit:?}"
            );
        }
    }

    #[test]
    fn a_schema_that_does_not_compile_is_one_line_with_its_place() {
        let cases = [
            ("{\"type\": ", "not JSON: EOF while parsing a value at line 1 column 9"),
            (r#"{"type": "strin"}"#, "at /type: "),
            (r#"{"properties": {"a": {"minimum": "1"}}}"#, "at /properties/a/minimum: "),
            (r#"{"properties": {"a": {"pattern": "("}}}"#, "at /properties/a/pattern: "),
            (r#"{"pattern": "(?=x)y"}"#, "at /pattern: "),
            (r#"{"pattern": "((x{1000}){1000}){1000}"}"#, "at /pattern: "),
            (r##"{"$ref": "#/$defs/none"}"##, "none"),
            (r#"{"$ref": "https://example.org/schema.json"}"#, "https://example.org/schema.json"),
            (r#"{"$ref": "file:///etc/passwd"}"#, "file:///etc/passwd"),
            ("7", ""),
        ];
        for (schema, want) in cases {
            let error = PayloadSchema::compile(schema).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn patterns_take_linear_time() {
        let schema = PayloadSchema::compile(r#"{"pattern": "^(a+)+$"}"#).unwrap();
        let payload = format!("{}b", "a".repeat(50_000));
        assert!(schema.misfit(payload.as_bytes(), Encoding::Text).is_some());
    }

    #[test]
    fn large_payloads_are_told_apart() {
        let mut check = PayloadCheck::default();
        check.add(3, &page(), &"{}".into(), Encoding::Json);
        assert!(!check.is_large());
        check.add(5, &page(), &vec![b' '; LARGE_BYTES].into(), Encoding::Json);
        assert!(check.is_large());
        let mut places: Vec<usize> = check.misfits().into_keys().collect();
        places.sort_unstable();
        assert_eq!(places, [3, 5]);
    }
}
