//! Dead letters, and the requests that list and change them.

use std::{collections::HashMap, iter};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    super::tally::Tally, AtMost, Nested, Unread, object, query, text::Instant, value::Payload,
};
use crate::model::{
    self, ChangeLetters, ChosenLetters, Key, LetterFilter, LetterKind, LetterPages, Priority,
    QueueName, StoredLetter, TaskId, to_rfc_3339,
};

/// The most letters that a call names by id.
const MAX_IDS: usize = 1000;

/// The kinds that a filter accepts.
fn kinds() -> Vec<&'static str> {
    iter::once("")
        .chain(LetterKind::ALL.map(LetterKind::as_str))
        .collect()
}

/// Which letters; `{}` chooses all.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "a filter")]
#[schemars(rename = "LetterFilter")]
struct Filter {
    queue: String,
    /// Empty: all kinds.
    #[schemars(extend("enum" = kinds()))]
    kind: String,
    /// At this time or later; empty: any.
    since: Option<String>,
    /// Before this time; empty: any.
    until: Option<String>,
    /// The beginning of the reason. It needs a queue.
    reason: String,
}

/// Letters by id, or by filter with `dry_run` or `yes`.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with ids or a filter"
)]
#[schemars(rename = "ChangeLetters")]
pub(in crate::ingress) struct Change {
    ids: AtMost<String, MAX_IDS>,
    filter: Option<Nested<Filter>>,
    /// Only count.
    dry_run: bool,
    yes: bool,
    /// With a filter: how many letters this call looks at; 0: 500; at most 1,000.
    #[schemars(range(max = 1000))]
    limit: u32,
    /// The cursor of the previous answer.
    cursor: String,
}

impl Filter {
    fn read(self) -> Result<LetterFilter, String> {
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        let time = |text: Option<String>| {
            text.and_then(given)
                .map(|text| text.parse::<Instant>())
                .transpose()
        };
        let queue = given(self.queue)
            .map(|queue| QueueName::new(&queue))
            .transpose();
        Ok(LetterFilter {
            queue: queue.map_err(|error| error.to_string())?,
            kind: given(self.kind).map(|kind| kind.parse()).transpose()?,
            since_unix_ms: time(self.since)?.map(|since| since.0),
            until_unix_ms: time(self.until)?.map(|until| until.0),
            reason: self.reason,
        })
    }
}

fn pages(filter: Filter, limit: u32, cursor: &str) -> Result<LetterPages, String> {
    let after = if cursor.is_empty() {
        None
    } else {
        Some(cursor.parse()?)
    };
    Ok(LetterPages {
        filter: filter.read()?,
        limit,
        after,
    })
}

/// Reads the query of a list.
pub(in crate::ingress) fn pages_of_query(text: &str) -> Result<LetterPages, String> {
    let mut filter = Filter::default();
    let mut limit = 0;
    let mut cursor = String::new();
    for (name, value) in query::parameters(text)? {
        match &*name {
            // As in JSON, an empty value counts as absent.
            "limit" if value.is_empty() => {}
            "queue" => filter.queue = value,
            "kind" => filter.kind = value,
            "since" => filter.since = Some(value),
            "until" => filter.until = Some(value),
            "reason" => filter.reason = value,
            "limit" => {
                limit = value
                    .parse()
                    .map_err(|_| query::not_a_number(&name, &value))?
            }
            "cursor" => cursor = value,
            // The route has refused all other parameters.
            _ => {}
        }
    }
    pages(filter, limit, &cursor)
}

/// Reads which letters to change.
pub(in crate::ingress) fn change(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<Result<ChangeLetters, String>, Unread> {
    let Change {
        ids,
        filter,
        dry_run,
        yes,
        limit,
        cursor,
    } = object(body)?;
    for _ in &ids.0 {
        tally.item()?;
    }
    let by_filter = filter
        .map(|Nested(filter)| pages(filter, limit, &cursor))
        .transpose();
    let chosen = by_filter.and_then(|pages| ChosenLetters::new(ids.0, pages));
    Ok(chosen.map(|chosen| ChangeLetters {
        chosen,
        dry_run,
        yes,
    }))
}

/// Letters without payloads.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "LetterPage")]
pub(in crate::ingress) struct Page<'a> {
    letters: Vec<Letter<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// The cursor for the next page; absent on the last one.
    cursor: Option<String>,
}

impl<'a> From<&'a model::LetterPage> for Page<'a> {
    fn from(page: &'a model::LetterPage) -> Self {
        Self {
            letters: page.letters.iter().map(Letter::brief).collect(),
            cursor: page.next.map(|at| at.to_string()),
        }
    }
}

/// A failed attempt.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "FailedAttempt")]
struct Attempt<'a> {
    #[schemars(with = "Instant")]
    at: String,
    worker: &'a str,
    error: &'a str,
}

/// A dead letter.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Letter<'a> {
    id: String,
    #[schemars(with = "LetterKind")]
    kind: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    queue: &'a str,
    #[serde(flatten)]
    key: Option<Key<'a>>,
    reason: &'a str,
    #[schemars(with = "Instant")]
    at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    history: Vec<Attempt<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<TaskId>")]
    parent_id: Option<String>,
    #[serde(flatten)]
    record: Option<Record<'a>>,
    #[serde(flatten)]
    task: Option<Task<'a>>,
}

/// The place of a record, and its value.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "LetterRecord")]
struct Record<'a> {
    topic: &'a str,
    partition: u32,
    offset: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    value_base64: Option<String>,
}

/// The parts of a task that a list leaves out.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "LetterTask")]
struct Task<'a> {
    #[serde(flatten)]
    payload: Payload<'a>,
    headers: &'a HashMap<String, String>,
    #[serde(skip_serializing_if = "str::is_empty")]
    traceparent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<Priority>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_attempts: Option<u32>,
}

impl<'a> Letter<'a> {
    fn brief(stored: &'a StoredLetter) -> Self {
        let StoredLetter { id, kind, letter } = stored;
        let attempt = |failure: &'a model::Failure| Attempt {
            at: to_rfc_3339(failure.at_unix_ms),
            worker: &failure.worker,
            error: &failure.reason,
        };
        let (topic, partition, offset) = (&letter.topic, letter.partition, &letter.offset);
        Self {
            id: id.to_string(),
            kind: kind.as_str(),
            queue: &letter.queue,
            key: letter.task.as_ref().map(|task| (&task.key).into()),
            reason: &letter.reason,
            at: to_rfc_3339(letter.at_unix_ms),
            attempts: (*kind == model::LetterKind::Task).then_some(letter.attempts),
            history: letter.history.iter().map(attempt).collect(),
            parent_id: letter.parent_id.map(|id| id.to_string()),
            record: (!topic.is_empty()).then_some(Record {
                topic,
                partition,
                offset,
                value_base64: None,
            }),
            task: None,
        }
    }
}

/// A whole letter, not the brief form of a list.
impl<'a> From<&'a StoredLetter> for Letter<'a> {
    fn from(stored: &'a StoredLetter) -> Self {
        let mut shown = Self::brief(stored);
        let letter = &stored.letter;
        if let Some(record) = &mut shown.record {
            record.value_base64 = Some(BASE64.encode(&letter.value));
        }
        shown.task = letter.task.as_ref().map(|task| Task {
            payload: Payload::of(&task.payload, task.payload_encoding),
            headers: &task.headers,
            traceparent: &task.traceparent,
            replicas: task.replicas,
            priority: task.priority,
            max_attempts: task.max_attempts,
        });
        shown
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::testing::{share, shown, tally},
        *,
    };
    use crate::model::{DeadLetter, NewTask};

    #[test]
    fn a_query_and_a_filter_say_the_same() {
        let text = "queue=q&kind=record&since=1970-01-01T00:00:01Z&until=1970-01-01T00%3A00%3A02%2B00%3A00&limit=7";
        let pages = pages_of_query(text).unwrap();
        let filter = LetterFilter {
            queue: QueueName::new("q").ok(),
            kind: Some(LetterKind::Record),
            since_unix_ms: Some(1_000),
            until_unix_ms: Some(2_000),
            reason: String::new(),
        };
        assert_eq!(
            pages,
            LetterPages {
                filter: filter.clone(),
                limit: 7,
                after: None
            }
        );
        let body = Bytes::from_static(
            br#"{"filter":{"queue":"q","kind":"record","since":"1970-01-01T00:00:01Z",
                "until":"1970-01-01T00:00:02Z"},"dry_run":true,"limit":7}"#,
        );
        let read = change(&body, &mut tally(&share())).unwrap().unwrap();
        assert_eq!(
            read,
            ChangeLetters {
                chosen: ChosenLetters::Pages(pages),
                dry_run: true,
                yes: false
            }
        );
    }

    #[test]
    fn empty_texts_choose_all() {
        let all = LetterPages {
            filter: LetterFilter::default(),
            limit: 0,
            after: None,
        };
        assert_eq!(
            pages_of_query("queue=&kind=&since=&until=&reason=&limit=&cursor="),
            Ok(all.clone())
        );
        let body = Bytes::from_static(br#"{"filter":{"since":"","until":null},"yes":true}"#);
        let read = change(&body, &mut tally(&share())).unwrap().unwrap();
        assert_eq!(
            read,
            ChangeLetters {
                chosen: ChosenLetters::Pages(all),
                dry_run: false,
                yes: true
            }
        );
    }

    #[test]
    fn a_wrong_query_is_named() {
        for (text, why) in [
            ("queue=a&queue=b", "\"queue\" is given twice"),
            (
                "kind=dead",
                "unknown kind \"dead\"; expected task, discovered, record, refused",
            ),
            ("since=monday", "\"monday\" is not a time"),
            ("limit=x", "limit \"x\" is not a whole number"),
            ("cursor=x", "the cursor is not one of an earlier answer"),
            ("queue=a%20b", "contains ' '"),
        ] {
            let said = pages_of_query(text).unwrap_err();
            assert!(said.contains(why), "{said:?} should say {why:?}");
        }
    }

    #[test]
    fn a_list_leaves_out_what_a_letter_shows() {
        let task = NewTask {
            key: "k".into(),
            payload: "p".into(),
            ..Default::default()
        };
        let letter = DeadLetter {
            queue: "q".into(),
            task: Some(task),
            attempts: 3,
            ..Default::default()
        };
        let stored = StoredLetter {
            id: TaskId::new(),
            kind: LetterKind::Task,
            letter,
        };
        let brief = shown(Letter::brief(&stored));
        assert_eq!(
            (&brief["key"], &brief["attempts"], brief.get("payload")),
            (&json!("k"), &json!(3), None)
        );
        assert_eq!(shown(Letter::from(&stored))["payload"], "p");
        let letter = DeadLetter {
            topic: "pipeline".into(),
            value: "v".into(),
            ..Default::default()
        };
        let stored = StoredLetter {
            id: TaskId::new(),
            kind: LetterKind::Record,
            letter,
        };
        let whole = shown(Letter::from(&stored));
        assert_eq!(
            (&whole["partition"], &whole["value_base64"]),
            (&json!(0), &json!("dg=="))
        );
        assert!(whole.get("attempts").is_none() && whole.get("queue").is_none());
    }
}
