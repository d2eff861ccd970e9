//! The JSON of the HTTP API, and of the files that `taskd insert` reads.
//!
//! Field names are those of the proto, in snake_case; durations are `"30s"`, times RFC 3339. A
//! payload is a slice of the body, not a copy. Lists are counted before their entries are read, and
//! each entry is read on its own, so that a wrong one does not spoil the others.

pub mod backoff;
pub(super) mod books;
pub mod bulk;
pub(super) mod changes;
pub(super) mod events;
pub(super) mod explain;
pub(super) mod fsck;
pub(super) mod history;
pub mod insert;
pub(super) mod large;
pub mod letters;
pub(super) mod limits;
pub(super) mod query;
pub mod read;
mod schema;
pub mod search;
pub(super) mod sessions;
pub(super) mod subscriptions;
mod text;
pub(super) mod topics;
pub(super) mod topologies;
pub mod trees;
mod value;
pub mod work;
pub(super) mod workflows;

use std::{borrow::Cow, collections::HashMap, fmt, marker::PhantomData};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::value::RawValue;

pub(super) use self::text::Instant;
use super::{
    MESSAGE,
    tally::{Excess, MAX_QUEUES},
};
use crate::{
    api::{ECHO, shorten},
    config::in_field,
};

/// Why taskd reads nothing of a request.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Unread {
    /// The text is not JSON, or not of the expected form.
    #[error("{detail}")]
    Malformed {
        detail: String,
        line: usize,
        column: usize,
    },
    /// A part that all items need is wrong: the worker's name.
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Excess(#[from] Excess),
}

impl From<serde_json::Error> for Unread {
    fn from(error: serde_json::Error) -> Self {
        let detail = if error.is_data() {
            without_place(&error)
        } else {
            format!("not JSON: {}", without_place(&error))
        };
        Self::Malformed {
            detail,
            line: error.line(),
            column: error.column(),
        }
    }
}

/// A list of at most `N` entries. One entry more is an error, and is not kept.
struct AtMost<T, const N: usize>(Vec<T>);

impl<T, const N: usize> Default for AtMost<T, N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for AtMost<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T, const N: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const N: usize> de::Visitor<'de> for Visitor<T, N> {
            type Value = AtMost<T, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: de::SeqAccess<'de>>(
                self,
                mut entries: A,
            ) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = entries.next_element()? {
                    if list.len() == N {
                        return Err(de::Error::custom(format_args!("more than {N} entries")));
                    }
                    list.push(entry);
                }
                Ok(AtMost(list))
            }
        }
        deserializer.deserialize_seq(Visitor(PhantomData))
    }
}

/// Reads a map of at most `N` headers. One header more is an error.
fn headers<'de, D: Deserializer<'de>, const N: usize>(
    deserializer: D,
) -> Result<HashMap<String, String>, D::Error> {
    entries::<D, String, N>(deserializer, "headers")
}

/// Reads the weights of queues, at most as many as a call may name.
fn weights<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<String, u32>, D::Error> {
    entries::<D, u32, MAX_QUEUES>(deserializer, "weights")
}

/// Reads a map of at most `N` entries, which an error calls by this name.
fn entries<'de, D, V, const N: usize>(
    deserializer: D,
    name: &'static str,
) -> Result<HashMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    struct Entries<V, const N: usize>(&'static str, PhantomData<V>);

    impl<'de, V: Deserialize<'de>, const N: usize> de::Visitor<'de> for Entries<V, N> {
        type Value = HashMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = HashMap::new();
            while let Some((name, value)) = entries.next_entry::<String, _>()? {
                if map.contains_key(&name) {
                    return Err(de::Error::custom(format_args!(
                        "duplicate field `{}`",
                        shorten(&name, ECHO)
                    )));
                }
                map.insert(name, value);
                if map.len() > N {
                    return Err(de::Error::custom(format_args!("more than {N} {}", self.0)));
                }
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(Entries::<V, N>(name, PhantomData))
}

/// An object within another one. serde alone would also accept an array, field by field.
struct Nested<T>(T);

/// The schema is that of the inner object.
impl<T: JsonSchema> JsonSchema for Nested<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        T::json_schema(generator)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Nested<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfObjects<D>(D);

        impl<'de, D: Deserializer<'de>> Deserializer<'de> for OfObjects<D> {
            type Error = D::Error;

            fn deserialize_any<V: de::Visitor<'de>>(
                self,
                visitor: V,
            ) -> Result<V::Value, D::Error> {
                self.0.deserialize_map(visitor)
            }

            serde::forward_to_deserialize_any! {
                bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
                unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
            }
        }
        T::deserialize(OfObjects(deserializer)).map(Self)
    }
}

/// Reads an object. serde alone would also accept an array, field by field.
fn object<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, Unread> {
    if first_byte(body).is_some_and(|byte| byte != b'{') {
        // Checks the syntax first, so that text that is not JSON is reported as such.
        let _: &RawValue = serde_json::from_slice(body)?;
        return Err(Unread::Malformed {
            detail: "expected a JSON object".into(),
            line: 1,
            column: 1,
        });
    }
    serde_json::from_slice(body).map_err(|error| match error.is_data() {
        true => {
            let detail = in_its_field::<T>(body, &error);
            Unread::Malformed {
                detail,
                line: error.line(),
                column: error.column(),
            }
        }
        false => error.into(),
    })
}

/// Reads an entry of a list, or a line.
fn item<'a, T: Deserialize<'a>>(text: &'a str, what: &str) -> Result<T, String> {
    if first_byte(text.as_bytes()).is_some_and(|byte| byte != b'{') {
        return Err(format!("expected {what}: a JSON object"));
    }
    serde_json::from_str(text).map_err(|error| {
        if error.is_data() {
            in_its_field::<T>(text.as_bytes(), &error)
        } else {
            format!(
                "not JSON at column {}: {}",
                error.column(),
                without_place(&error)
            )
        }
    })
}

/// Adds the path of the field to an error. serde does not report it, so a slower reader reads the
/// text again.
fn in_its_field<'a, T: Deserialize<'a>>(text: &'a [u8], error: &serde_json::Error) -> String {
    let message = without_place(error);
    match serde_path_to_error::deserialize::<_, T>(&mut serde_json::Deserializer::from_slice(text))
    {
        Err(again) => shorten(&in_field(again.path(), &message), MESSAGE).into_owned(),
        Ok(_) => message,
    }
}

fn first_byte(text: &[u8]) -> Option<u8> {
    text.iter()
        .copied()
        .find(|byte| !byte.is_ascii_whitespace())
}

fn utf8(text: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(text).map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to()))
}

/// serde's message without its " at line 1 column 9": a position within an item does not help the
/// sender.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    match &text[..end] {
        // serde_json's messages for a surrogate without the other half.
        "unexpected end of hex escape" | "lone leading surrogate in hex escape" => {
            "an escape is half of a character: a surrogate without the other one".to_owned()
        }
        said => shorten(said, MESSAGE).into_owned(),
    }
}

/// Writes `{"results": […]}`, or another list under its name.
pub fn list<T: Serialize>(
    name: &'static str,
    entries: impl IntoIterator<Item = T>,
) -> serde_json::Result<Vec<u8>> {
    let entries: Vec<T> = entries.into_iter().collect();
    serde_json::to_vec(&HashMap::from([(name, entries)]))
}

#[cfg(test)]
mod testing {
    use super::{
        super::{
            net::budget::{Budget, Share},
            tally::Tally,
        },
        *,
    };
    use crate::config::Settings;

    /// A share of a large budget.
    pub(super) fn share() -> Share {
        Budget::new(256 << 20).share()
    }

    /// A tally for a body of 4 MiB.
    pub(super) fn tally(share: &Share) -> Tally<'_> {
        Tally::new(&Settings::default(), share, 4 << 20)
    }

    pub(super) fn shown(value: impl Serialize) -> serde_json::Value {
        serde_json::to_value(value).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        testing::{share, tally},
        *,
    };

    /// Reads a body. The error is that of the request, or the first one of its parts.
    type Read = fn(&Bytes) -> Result<(), String>;

    fn first_error<T, E: ToString>(
        parts: impl IntoIterator<Item = Result<T, E>>,
    ) -> Result<(), String> {
        parts
            .into_iter()
            .find_map(Result::err)
            .map_or(Ok(()), |error| Err(error.to_string()))
    }

    fn items<T>(parts: Vec<Result<T, crate::model::ItemAnswer>>) -> Result<(), String> {
        first_error(
            parts
                .into_iter()
                .map(|item| item.map_err(|answer| answer.error)),
        )
    }

    /// A discovered task that cannot be read does not fail its completion; the answer says what is
    /// wrong with it.
    fn completions(
        parts: Vec<Result<crate::model::Item<crate::model::Completion>, crate::model::ItemAnswer>>,
    ) -> Result<(), String> {
        for part in parts.iter().flatten() {
            if let Ok(completion) = &part.report
                && !completion.not_stored.note().is_empty()
            {
                return Err(completion.not_stored.note());
            }
        }
        items(parts)
    }

    /// Every body of the API, with every object that it may contain.
    fn bodies() -> Vec<(Value, Read)> {
        let backoff = json!({"kind": "linear", "initial": "1s", "maximum": "9s", "jitter": 0.1, "give_up_after": "1h"});
        let task = json!({"queue": "q", "key": "k", "payload": {"a": {"b": 1}}, "headers": {"h": "v"}, "backoff": backoff});
        let get = json!({"worker": "w", "queues": ["q"], "max_tasks": 1});
        let lease = json!({"id": "1", "lease_token": "t"});
        let completion =
            json!({"id": "1", "lease_token": "t", "result": {"r": 1}, "discovered": [task]});
        let extension = json!({"id": "1", "lease_token": "t", "by": "1m"});
        let filter = json!({"queue": "q", "headers": {"h": "v"}});
        let with =
            |list: &str, items: &Value| json!({"worker": "w", "session": "s", list: [items]});
        let of_worker = |list: &str, items: &Value| json!({"worker": "w", list: [items]});
        let session = json!({"worker": "w", "session": "s"});
        let completing = json!({"worker": "w", "completions": [completion], "next": get});
        vec![
            (task.clone(), |body| insert::new_task(body).map(drop)),
            (json!([task]), |body| {
                let tasks = insert::new_tasks(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?;
                first_error(tasks.tasks)
            }),
            (get, |body| {
                work::get_tasks(body)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }),
            (completing, |body| {
                completions(
                    work::completions(body, &mut tally(&share()))
                        .map_err(|error| error.to_string())?
                        .0
                        .items,
                )
            }),
            (of_worker("rejections", &lease), |body| {
                items(
                    work::rejections(body, &mut tally(&share()))
                        .map_err(|error| error.to_string())?
                        .items,
                )
            }),
            (of_worker("extensions", &extension), |body| {
                items(
                    work::extensions(body, &mut tally(&share()))
                        .map_err(|error| error.to_string())?
                        .items,
                )
            }),
            (json!({"worker": "w", "queues": ["q"]}), |body| {
                sessions::open_session(body)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }),
            (session.clone(), |body| {
                sessions::want_tasks(body)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }),
            (session, |body| {
                sessions::session_call(body)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }),
            (with("completions", &completion), |body| {
                let report = sessions::report_tasks(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?;
                completions(report.completions)
            }),
            (with("rejections", &lease), |body| {
                let report = sessions::report_tasks(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?;
                items(report.rejections)
            }),
            (with("extensions", &extension), |body| {
                let report = sessions::report_tasks(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?;
                items(report.extensions)
            }),
            (json!({"filter": filter, "dry_run": true}), |body| {
                bulk::change(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?
                    .map(drop)
            }),
            (
                json!({"filter": filter, "dry_run": true, "priority": "high"}),
                |body| {
                    changes::update(body, &mut tally(&share()))
                        .map_err(|error| error.to_string())?
                        .0
                        .map(drop)
                },
            ),
            (
                json!({"filter": filter, "dry_run": true, "to": "w"}),
                |body| {
                    changes::requeue(body, &mut tally(&share()))
                        .map_err(|error| error.to_string())?
                        .0
                        .map(drop)
                },
            ),
            (json!({"filter": {"queue": "q"}, "dry_run": true}), |body| {
                letters::change(body, &mut tally(&share()))
                    .map_err(|error| error.to_string())?
                    .map(drop)
            }),
            (json!({"queue": "q"}), |body| {
                fsck::request(body)
                    .map(drop)
                    .map_err(|error| error.to_string())
            }),
        ]
    }

    /// Collects the JSON pointers of the objects in a body. Skips payloads and results, which may
    /// be any JSON.
    fn objects(value: &Value, at: String, found: &mut Vec<String>) {
        match value {
            Value::Object(members) => {
                for (name, value) in members
                    .iter()
                    .filter(|(name, _)| !["payload", "result"].contains(&&***name))
                {
                    objects(value, format!("{at}/{name}"), found);
                }
                found.push(at);
            }
            Value::Array(items) => {
                for (place, value) in items.iter().enumerate() {
                    objects(value, format!("{at}/{place}"), found);
                }
            }
            _ => {}
        }
    }

    #[test]
    fn an_array_is_no_object() {
        let mut tried = 0;
        for (body, read) in bodies() {
            read(&Bytes::from(body.to_string())).unwrap_or_else(|error| panic!("{error}: {body}"));
            let mut places = Vec::new();
            objects(&body, String::new(), &mut places);
            // Except the body itself: an array of tasks is valid.
            for place in places.into_iter().filter(|place| !place.is_empty()) {
                for values in [true, false] {
                    let mut wrong = body.clone();
                    let object = wrong.pointer_mut(&place).unwrap();
                    let members = object
                        .as_object()
                        .unwrap()
                        .values()
                        .cloned()
                        .collect::<Vec<_>>();
                    *object = json!(if values { members } else { Vec::new() });
                    let error =
                        read(&Bytes::from(wrong.to_string())).expect_err(&wrong.to_string());
                    assert!(
                        error.contains("expected a"),
                        "{error:?} should say what is expected: {wrong}"
                    );
                    tried += 1;
                }
            }
            let array = json!(
                body.as_object()
                    .map(|members| members.values().collect::<Vec<_>>())
            );
            if array.is_array() {
                read(&Bytes::from(array.to_string())).expect_err(&array.to_string());
            }
        }
        assert!(tried > 40, "{tried} objects");
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused() {
        let mut tried = 0;
        for (body, read) in bodies() {
            let mut places = Vec::new();
            objects(&body, String::new(), &mut places);
            for place in places {
                // Repeats the first name of the object at its end.
                let mut marked = body.clone();
                let object = marked.pointer_mut(&place).unwrap().as_object_mut().unwrap();
                let (name, value) = object
                    .iter()
                    .next()
                    .map(|(name, value)| (name.clone(), value.clone()))
                    .unwrap();
                object.insert("~".into(), json!(null));
                let twice = marked.to_string().replacen(
                    "\"~\":null",
                    &format!("{}:{value}", json!(name)),
                    1,
                );
                let error = read(&Bytes::from(twice.clone())).expect_err(&twice);
                assert!(
                    error.contains(&format!("duplicate field `{name}`")),
                    "{error}: {twice}"
                );
                tried += 1;
            }
        }
        assert!(tried > 40, "{tried} objects");
    }

    #[test]
    fn a_list_ends_before_it_is_too_long() {
        let read = |text| {
            serde_json::from_str::<AtMost<u8, 2>>(text)
                .map(|list| list.0)
                .map_err(|e| without_place(&e))
        };
        assert_eq!(read("[1,2]").unwrap(), [1, 2]);
        assert_eq!(read("[1,2,3").unwrap_err(), "more than 2 entries");
        assert_eq!(list("results", [1, 2]).unwrap(), br#"{"results":[1,2]}"#);
    }
}
