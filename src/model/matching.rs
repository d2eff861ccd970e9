//! Which records a subscription takes: a condition on the key and the attributes of a record.
//!
//! In JSON: `{"type": ["created", "changed"], "region": {"prefix": "eu-"}, "test": {"exists": false},
//! "$key": {"prefix": "a"}}`. All names must match, each by one of its tests.

use serde_json::{Map, Value};

use super::{ECHO, shorten};

/// The most tests of a condition, over all names.
pub const MOST_MATCH_TERMS: usize = 32;

/// The name that stands for the key of a record.
const KEY: &str = "$key";
/// The longest name of an attribute, and the longest text of a test.
const MAX_TEXT_BYTES: usize = 4096;

/// A condition on a record. Without names it matches every record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matching {
    names: Vec<NameTests>,
}

/// The tests of one name, of which one must match.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NameTests {
    /// An attribute, or [`KEY`].
    name: String,
    /// If there are none, nothing matches.
    tests: Vec<Test>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Equals(String),
    Prefix(String),
    Exists(bool),
}

impl Matching {
    /// Reads a condition. Returns one line about the first mistake.
    pub fn read(value: &Value) -> Result<Self, String> {
        let names = match value {
            Value::Null => return Ok(Self::default()),
            Value::Object(names) => names,
            _ => return Err("match is no object of names and tests".to_owned()),
        };
        let mut matching = Self::default();
        let mut terms = 0;
        for (name, tests) in names {
            if name.is_empty() || name.len() > MAX_TEXT_BYTES {
                return Err(format!(
                    "match: the name of an attribute has 1 to {MAX_TEXT_BYTES} bytes"
                ));
            }
            if name.starts_with('$') && name != KEY {
                let name = shorten(name, ECHO);
                return Err(format!(
                    "match: there is no {name:?}; write \"$key\" for the key of a record"
                ));
            }
            let tests: Vec<Test> = match tests {
                Value::Array(tests) => tests
                    .iter()
                    .map(|test| Test::read(name, test))
                    .collect::<Result<_, _>>()?,
                test => vec![Test::read(name, test)?],
            };
            if tests.is_empty() {
                return Err(format!(
                    "match: {:?} has no values, so nothing would match",
                    shorten(name, ECHO)
                ));
            }
            terms += tests.len();
            matching.names.push(NameTests {
                name: name.clone(),
                tests,
            });
        }
        if terms > MOST_MATCH_TERMS {
            return Err(format!(
                "match has {terms} values; at most {MOST_MATCH_TERMS}"
            ));
        }
        Ok(matching)
    }

    /// The condition as [`Self::read`] reads it.
    pub fn to_json(&self) -> Value {
        let mut names = Map::new();
        for NameTests { name, tests } in &self.names {
            let tests = tests.iter().map(Test::to_json).collect();
            names.insert(name.clone(), Value::Array(tests));
        }
        Value::Object(names)
    }

    /// The names that it has tests of.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|one| one.name.as_str())
    }

    /// Whether a record with this key and these attributes matches.
    pub fn matches(&self, key: &[u8], attributes: &[(String, String)]) -> bool {
        self.names.iter().all(|one| one.matches(key, attributes))
    }
}

impl NameTests {
    fn matches(&self, key: &[u8], attributes: &[(String, String)]) -> bool {
        let mut values: Vec<&[u8]> = Vec::new();
        if self.name == KEY {
            if !key.is_empty() {
                values.push(key);
            }
        } else {
            for (name, value) in attributes {
                if *name == self.name {
                    values.push(value.as_bytes());
                }
            }
        }
        self.tests.iter().any(|test| test.matches(&values))
    }
}

impl Test {
    fn read(name: &str, value: &Value) -> Result<Self, String> {
        let wrong = || {
            let name = shorten(name, ECHO);
            format!(
                "match: {name:?} has a value that is no text, no {{\"prefix\": \"…\"}} and no {{\"exists\": true}}"
            )
        };
        let test = match value {
            Value::String(text) => Self::Equals(text.clone()),
            Value::Object(test) if test.len() == 1 => {
                match (test.get("prefix"), test.get("exists")) {
                    (Some(Value::String(prefix)), _) => Self::Prefix(prefix.clone()),
                    (_, Some(Value::Bool(exists))) => Self::Exists(*exists),
                    _ => return Err(wrong()),
                }
            }
            _ => return Err(wrong()),
        };
        match &test {
            Self::Equals(text) | Self::Prefix(text) if text.len() > MAX_TEXT_BYTES => Err(format!(
                "match: a value of {:?} has {} bytes; at most {MAX_TEXT_BYTES}",
                shorten(name, ECHO),
                text.len()
            )),
            _ => Ok(test),
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Equals(text) => Value::String(text.clone()),
            Self::Prefix(prefix) => serde_json::json!({"prefix": prefix}),
            Self::Exists(exists) => serde_json::json!({"exists": exists}),
        }
    }

    /// `values` are all that the record has of the name.
    fn matches(&self, values: &[&[u8]]) -> bool {
        match self {
            Self::Equals(text) => values.contains(&text.as_bytes()),
            Self::Prefix(prefix) => values
                .iter()
                .any(|value| value.starts_with(prefix.as_bytes())),
            Self::Exists(exists) => values.is_empty() != *exists,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_anded_and_values_are_ored() {
        let created = &[("type", "created"), ("region", "eu-1")][..];
        let tagged = &[("tag", "a"), ("tag", "b")][..];
        for (matching, key, attributes, is_match) in [
            (json!(null), "", created, true),
            (json!({}), "", &[][..], true),
            (json!({"type": "created"}), "", created, true),
            (json!({"type": "create"}), "", created, false),
            (json!({"type": "created"}), "", &[][..], false),
            (json!({"type": ["changed", "created"]}), "", created, true),
            (json!({"type": ["changed", "gone"]}), "", created, false),
            (
                json!({"type": "created", "region": {"prefix": "eu-"}}),
                "",
                created,
                true,
            ),
            (
                json!({"type": "created", "region": {"prefix": "us-"}}),
                "",
                created,
                false,
            ),
            (json!({"region": {"prefix": "eu-1x"}}), "", created, false),
            (json!({"region": {"prefix": ""}}), "", created, true),
            (json!({"region": {"prefix": ""}}), "", tagged, false),
            // A name may have several values.
            (json!({"tag": "b"}), "", tagged, true),
            (json!({"tag": ["c", {"prefix": "a"}]}), "", tagged, true),
            (json!({"test": {"exists": false}}), "", created, true),
            (json!({"type": {"exists": false}}), "", created, false),
            (json!({"type": {"exists": true}}), "", created, true),
            (json!({"test": {"exists": true}}), "", created, false),
            (
                json!({"test": ["no", {"exists": false}]}),
                "",
                created,
                true,
            ),
            (json!({"$key": {"prefix": "a"}}), "abc", &[][..], true),
            (json!({"$key": "abc"}), "abc", &[][..], true),
            (json!({"$key": "abc"}), "ab", &[][..], false),
            (json!({"$key": {"exists": false}}), "", &[][..], true),
            (json!({"$key": {"exists": false}}), "a", &[][..], false),
        ] {
            let read = Matching::read(&matching).unwrap();
            let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            let owned: Vec<(String, String)> = attributes.iter().map(pair).collect();
            assert_eq!(
                read.matches(key.as_bytes(), &owned),
                is_match,
                "{matching} {key} {attributes:?}"
            );
            assert_eq!(Matching::read(&read.to_json()), Ok(read), "{matching}");
        }
        let has_key = Matching::read(&json!({"$key": {"exists": true}})).unwrap();
        assert!(has_key.matches(&[0xff, 1], &[]), "a key may be any bytes");
    }

    #[test]
    fn a_mistake_is_named() {
        let many: Vec<String> = (0..33).map(|n| n.to_string()).collect();
        for (matching, said) in [
            (json!([]), "match is no object"),
            (json!({"": "x"}), "match: the name of an attribute has 1 to"),
            (
                json!({"$kay": "x"}),
                "match: there is no \"$kay\"; write \"$key\"",
            ),
            (json!({"a": []}), "match: \"a\" has no values"),
            (json!({"a": 1}), "match: \"a\" has a value that is no text"),
            (
                json!({"a": {"suffix": "x"}}),
                "match: \"a\" has a value that is no text",
            ),
            (
                json!({"a": {"prefix": "x", "exists": true}}),
                "match: \"a\" has a value that is no text",
            ),
            (
                json!({"a": {"exists": "yes"}}),
                "match: \"a\" has a value that is no text",
            ),
            (json!({"a": many}), "match has 33 values; at most 32"),
            (
                json!({"a": "x".repeat(4097)}),
                "match: a value of \"a\" has 4097 bytes; at most 4096",
            ),
        ] {
            let wrong = Matching::read(&matching).unwrap_err();
            assert!(wrong.starts_with(said), "{matching}: {wrong}");
        }
    }
}
