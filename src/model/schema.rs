//! JSON Schemas of payloads.

mod document;
#[cfg(test)]
mod hostile;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
};

use bytes::Bytes;
use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use self::document::{Document, Payload, Stopped};
use super::{
    Encoding,
    json::{self, Fault},
    validate,
};

/// The maximum length of a message about a payload, in bytes.
const MAX_MISFIT_BYTES: usize = 500;
/// The maximum size of a compiled pattern, in bytes. Some short patterns (`(x{1000}){1000}`) would
/// take gigabytes.
const MAX_PATTERN_BYTES: usize = 1 << 20;
/// The maximum number of steps to check a payload, in addition to those for its bytes. A step is
/// one access to a value of the payload.
const MOST_STEPS: u64 = 500_000;
/// The maximum number of additional steps for each byte of the payload.
const STEPS_PER_BYTE: u64 = 100;
/// The maximum total size of payloads that are checked on a thread that serves other requests.
/// Reading this many bytes takes some ten microseconds.
const QUICK_BYTES: usize = 16 << 10;
/// The maximum number of steps of all these checks together, which take less than a millisecond.
/// Most payloads need one step for every few bytes.
const QUICK_STEPS: u64 = 20_000;
/// How many steps a dedicated thread takes before other checks get their turn.
const STEPS_OF_TURN: u64 = 10_000_000;

/// A compiled schema. Clones share the compiled form.
#[derive(Clone)]
pub struct PayloadSchema(Arc<Compiled>);

struct Compiled {
    text: String,
    validator: Validator<Payload>,
}

impl PayloadSchema {
    /// Compiles a schema. The error is one line with the place in the schema and the problem.
    ///
    /// The schema may only refer to its own parts. Its patterns take linear time, so they support
    /// neither look-around nor backreferences.
    pub fn compile(text: &str) -> Result<Self, String> {
        let schema: Value =
            serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
        let patterns = PatternOptions::regex().size_limit(MAX_PATTERN_BYTES);
        let validator = jsonschema::options_for::<Payload>()
            .offline()
            .with_pattern_options(patterns)
            .build(&schema);
        match validator {
            Ok(validator) => Ok(Self(Arc::new(Compiled {
                text: schema.to_string(),
                validator,
            }))),
            Err(error) => {
                // If the schema itself is malformed, the error reports the place in the schema as
                // its instance path.
                let of_value = error.instance_path().as_str();
                let of_keyword = error.schema_path().as_str();
                let place = if of_value.is_empty() {
                    of_keyword
                } else {
                    of_value
                };
                let problem = shortened(&error).replace(['\n', '\r'], " ");
                Err(if place.is_empty() {
                    problem
                } else {
                    format!("at {place}: {problem}")
                })
            }
        }
    }

    /// The schema without line breaks.
    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// The maximum number of steps to check a payload.
    fn most_steps(payload: &[u8]) -> u64 {
        MOST_STEPS + STEPS_PER_BYTE * payload.len() as u64
    }

    /// Returns the first reason why a payload does not fit, with its place as a JSON pointer, or
    /// `None` if it fits.
    ///
    /// Text is checked as a JSON string, and a missing payload as `null`. Time and memory are
    /// bounded by the size of the payload, whatever the schema is.
    pub fn misfit(&self, payload: &[u8], encoding: Encoding) -> Option<Misfit> {
        self.misfit_within(payload, encoding, Self::most_steps(payload))
            .0
            .unwrap_or_else(|| Some(endless(payload)))
    }

    /// Like [`Self::misfit`], with at most `most` steps. Also returns the number of steps taken.
    /// The outer `None` means that `most` steps were not enough.
    fn misfit_within(
        &self,
        payload: &[u8],
        encoding: Encoding,
        most: u64,
    ) -> (Option<Option<Misfit>>, u64) {
        let document = match encoding {
            Encoding::Text => std::str::from_utf8(payload)
                .map(Document::text)
                .map_err(|_| not_json("it is not UTF-8")),
            _ if payload.is_empty() => Ok(Document::null()),
            Encoding::Json => Document::read(payload).map_err(|error| not_read(payload, &error)),
            Encoding::Bytes | Encoding::Unknown => Err(not_json("its payload_encoding is BYTES")),
        };
        let document = match document {
            Ok(document) => document,
            Err(misfit) => return (Some(Some(misfit)), 0),
        };
        if let Some(name) = document.repeated_name() {
            return (Some(Some(repeated(name))), 0);
        }
        let (is_valid, steps) = document.check(most, |payload| self.0.validator.is_valid(payload));
        match is_valid {
            Ok(true) => (Some(None), steps),
            Ok(false) => {
                let (misfit, more) = self.explain(&document, most - steps);
                // With the full number of steps, the payload is rejected even if the place is not
                // found.
                let is_all = most >= Self::most_steps(payload);
                let misfit = misfit.or_else(|| is_all.then(nowhere));
                (misfit.map(Some), steps + more)
            }
            Err(Stopped::OutOfSteps) => (None, steps),
            Err(Stopped::OutOfStack) => (Some(Some(too_deep_together())), steps),
            Err(Stopped::Panicked(why)) => (Some(Some(failed(&why))), steps),
        }
    }

    /// Finds the place of a misfit. Also returns the number of steps taken.
    fn explain<'a>(&self, document: &'a Document<'a>, most: u64) -> (Option<Misfit>, u64) {
        let (misfit, steps) = document.explain(most, |payload| {
            let error = self.0.validator.validate(payload).err()?;
            let place = match error.instance_path().as_str() {
                "" => "the payload".to_owned(),
                pointer => format!("payload at {}", shortened(&pointer)),
            };
            let says = format!(
                "{place} does not fit the queue's payload_schema: {}",
                shortened(&error)
            );
            // The log must not contain names and values of the payload.
            let rule = shortened(&error.schema_path().as_str());
            Some(Misfit {
                says,
                logged: format!("the payload does not fit the queue's payload_schema at {rule}"),
            })
        });
        match misfit {
            Ok(misfit) => (Some(misfit.unwrap_or_else(nowhere)), steps),
            Err(Stopped::OutOfStack) => (Some(nowhere()), steps),
            Err(Stopped::OutOfSteps) => (None, steps),
            Err(Stopped::Panicked(why)) => (Some(failed(&why)), steps),
        }
    }
}

/// A misfit whose place was not found.
fn nowhere() -> Misfit {
    let says = "the payload does not fit the queue's payload_schema; finding the place would take too long";
    Misfit {
        says: says.to_owned(),
        logged: says.to_owned(),
    }
}

/// Why a payload does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The reason for the sender, which may quote parts of the payload.
    pub says: String,
    /// The reason for the log, without parts of the payload.
    pub logged: String,
}

/// The misfit for JSON that serde_json does not read, which may also be because it is nested too
/// deeply.
fn not_read(payload: &[u8], error: &serde_json::Error) -> Misfit {
    match std::str::from_utf8(payload).map(json::check) {
        Ok(Err(Fault::TooDeep)) => {
            let says = validate::too_deep("payload");
            Misfit {
                logged: says.clone(),
                says,
            }
        }
        _ => not_json(&error.to_string()),
    }
}

/// Repeated names are rejected, because some readers take the first of them and others the last.
fn repeated(name: &str) -> Misfit {
    let why = "is there twice in one object; with a payload_schema each name is there once";
    Misfit {
        says: format!(
            "the payload's name {} {why}",
            shortened(&format_args!("{name:?}"))
        ),
        logged: format!("a name of the payload {why}"),
    }
}

/// The misfit if the check ran out of steps.
fn endless(payload: &[u8]) -> Misfit {
    let steps = PayloadSchema::most_steps(payload);
    let bytes = payload.len();
    let says = format!(
        "holding the payload against the queue's payload_schema takes more than {steps} steps for its {bytes} bytes: \
         parts of the schema that refer to themselves twice make it so"
    );
    Misfit {
        logged: says.clone(),
        says,
    }
}

fn too_deep_together() -> Misfit {
    let says = "holding the payload against the queue's payload_schema needs more memory than a thread has for it: \
                payload and schema are too deep together";
    Misfit {
        says: says.to_owned(),
        logged: says.to_owned(),
    }
}

/// The misfit if the check itself failed.
fn failed(why: &str) -> Misfit {
    let says = "taskd failed to hold the payload against the queue's payload_schema".to_owned();
    Misfit {
        logged: format!("{says}: {}", shortened(&why)),
        says,
    }
}

fn not_json(why: &str) -> Misfit {
    let says = format!("the queue has a payload_schema, and the payload is not JSON: {why}");
    Misfit {
        logged: says.clone(),
        says,
    }
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

/// Truncates a text. The text of an error may contain a whole payload.
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

/// Payloads to be checked against the schemas of their queues.
#[derive(Default)]
pub struct PayloadCheck {
    waiting: VecDeque<(usize, PayloadSchema, Bytes, Encoding)>,
    bytes: usize,
    misfits: HashMap<usize, Misfit>,
}

impl PayloadCheck {
    /// Adds a payload, identified by its index in the caller's list.
    pub fn add(
        &mut self,
        place: usize,
        schema: &PayloadSchema,
        payload: &Bytes,
        encoding: Encoding,
    ) {
        self.bytes += payload.len();
        self.waiting
            .push_back((place, schema.clone(), payload.clone(), encoding));
    }

    /// Checks small payloads that need few steps, in less than a millisecond for all. Returns true
    /// if all payloads have been checked.
    pub fn advance_quickly(&mut self) -> bool {
        if self.bytes <= QUICK_BYTES {
            self.advance_within(QUICK_STEPS);
        }
        self.waiting.is_empty()
    }

    /// Checks payloads for one turn, and at least one payload. Returns true if all have been
    /// checked.
    pub fn advance(&mut self) -> bool {
        let first = self
            .waiting
            .front()
            .map_or(0, |(_, _, payload, _)| PayloadSchema::most_steps(payload));
        self.advance_within(STEPS_OF_TURN.max(first));
        self.waiting.is_empty()
    }

    /// Checks payloads until the next one needs more steps than are left, if it may still have
    /// more.
    fn advance_within(&mut self, mut left: u64) {
        while let Some((place, schema, payload, encoding)) = self.waiting.front() {
            let most = PayloadSchema::most_steps(payload);
            let (misfit, steps) = schema.misfit_within(payload, *encoding, most.min(left));
            let misfit = match misfit {
                Some(misfit) => misfit,
                None if most <= left => Some(endless(payload)),
                None => return,
            };
            left = left.saturating_sub(steps);
            if let Some(misfit) = misfit {
                self.misfits.insert(*place, misfit);
            }
            self.waiting.pop_front();
        }
    }

    /// The payloads that do not fit, by index.
    pub fn misfits(self) -> HashMap<usize, Misfit> {
        self.misfits
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
        assert_eq!(
            misfit.says,
            "payload has arrays and objects more than 120 deep in each other"
        );
    }

    #[test]
    fn the_first_error_is_told_with_its_place() {
        let json = |text: &'static str| (text.as_bytes(), Encoding::Json);
        let fits = [
            json(r#"{"url": "http://x"}"#),
            json(r#"{"url": "https://x", "depth": 9, "more": 1}"#),
        ];
        for (payload, encoding) in fits {
            assert_eq!(page().misfit(payload, encoding), None);
        }
        let cases: [(&[u8], Encoding, &str); 8] = [
            (
                b"{\"url\": \"ftp://x\"}",
                Encoding::Json,
                "payload at /url does not fit the queue's payload_schema: ",
            ),
            (
                b"{\"url\": \"http://x\", \"depth\": 10}",
                Encoding::Json,
                "payload at /depth does not fit",
            ),
            (
                b"{}",
                Encoding::Json,
                "the payload does not fit the queue's payload_schema: \"url\" is a required prop",
            ),
            (
                b"",
                Encoding::Json,
                "the payload does not fit the queue's payload_schema: null is not of type",
            ),
            (
                b"x",
                Encoding::Text,
                "the payload does not fit the queue's payload_schema: \"x\" is not of type",
            ),
            (
                b"{",
                Encoding::Json,
                "the queue has a payload_schema, and the payload is not JSON: EOF",
            ),
            (
                b"{}",
                Encoding::Bytes,
                "the payload is not JSON: its payload_encoding is BYTES",
            ),
            (
                b"\xff",
                Encoding::Text,
                "the payload is not JSON: it is not UTF-8",
            ),
        ];
        for (payload, encoding, want) in cases {
            let misfit = page().misfit(payload, encoding).unwrap();
            assert!(misfit.says.contains(want), "{misfit:?} should say {want:?}");
        }
    }

    #[test]
    fn a_message_does_not_repeat_a_large_payload() {
        let payload = format!("[\"{}\"]", "é".repeat(100_000));
        let misfit = page()
            .misfit(payload.as_bytes(), Encoding::Json)
            .unwrap()
            .says;
        assert!(misfit.len() < 600 && misfit.ends_with('…'), "{misfit}");
        let key = format!("{{\"{}\": 1}}", "k".repeat(100_000));
        let schema =
            PayloadSchema::compile(r#"{"additionalProperties": {"type": "string"}}"#).unwrap();
        let misfit = schema.misfit(key.as_bytes(), Encoding::Json).unwrap().says;
        assert!(misfit.len() < 1200, "{misfit}");
    }

    #[test]
    fn a_log_line_has_no_part_of_the_payload() {
        let schema = r#"{"properties": {"url": {"maxLength": 3}}, "additionalProperties": {"type": "integer"},
            "propertyNames": {"maxLength": 9}}"#;
        let schema = PayloadSchema::compile(schema).unwrap();
        for payload in [
            r#"{"url": "secret"}"#,
            r#"{"secret": "secret"}"#,
            r#"{"secret-secret": 1}"#,
        ] {
            let misfit = schema.misfit(payload.as_bytes(), Encoding::Json).unwrap();
            assert!(misfit.says.contains("secret"), "{misfit:?}");
            assert!(!misfit.logged.contains("secret"), "{misfit:?}");
            assert!(
                misfit
                    .logged
                    .starts_with("the payload does not fit the queue's payload_schema at /"),
                "{misfit:?}"
            );
        }
    }

    #[test]
    fn a_schema_that_does_not_compile_is_one_line_with_its_place() {
        let cases = [
            (
                "{\"type\": ",
                "not JSON: EOF while parsing a value at line 1 column 9",
            ),
            (r#"{"type": "strin"}"#, "at /type: "),
            (
                r#"{"properties": {"a": {"minimum": "1"}}}"#,
                "at /properties/a/minimum: ",
            ),
            (
                r#"{"properties": {"a": {"pattern": "("}}}"#,
                "at /properties/a/pattern: ",
            ),
            (r#"{"pattern": "(?=x)y"}"#, "at /pattern: "),
            (r#"{"pattern": "((x{1000}){1000}){1000}"}"#, "at /pattern: "),
            (r##"{"$ref": "#/$defs/none"}"##, "none"),
            (
                r#"{"$ref": "https://example.org/schema.json"}"#,
                "https://example.org/schema.json",
            ),
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
    fn large_payloads_and_long_checks_are_not_quick() {
        let mut check = PayloadCheck::default();
        check.add(3, &page(), &"{}".into(), Encoding::Json);
        assert!(check.advance_quickly());
        check.add(5, &page(), &vec![b' '; QUICK_BYTES].into(), Encoding::Json);
        assert!(!check.advance_quickly());
        assert!(check.advance());
        let mut places: Vec<usize> = check.misfits().into_keys().collect();
        places.sort_unstable();
        assert_eq!(places, [3, 5]);
    }
}
