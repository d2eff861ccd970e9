//! Joins of topologies: what comes out of one task of a fork, brought together in one task.
//!
//! The credited completion of a task of a *fork* begins a *subtree* for each join behind it. What is
//! sent into the join is a *part*, and no task. When nothing of the subtree is unfinished, its parts
//! become the payload of one task of the join.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

use super::{Encoding, TaskId, TaskRow, ThenTask, Way};

/// What a report on a task of a stage means for joins. `J` is [`NewJoin`] in a report, and [`Join`] for
/// SQL.
#[derive(Clone, Debug, PartialEq)]
pub struct Joining<J> {
    /// The way of each discovered task. Those that are missing stay in the level of their parent.
    pub ways: Vec<Way>,
    /// The joins whose subtrees the report begins.
    pub joins: Vec<J>,
    pub parts: Vec<Part>,
}

impl<J> Default for Joining<J> {
    fn default() -> Self {
        Self {
            ways: Vec::new(),
            joins: Vec::new(),
            parts: Vec::new(),
        }
    }
}

impl<J> Joining<J> {
    /// Whether all stay in the level of their parent.
    pub fn is_plain(&self) -> bool {
        let stays = |way: &Way| *way == Way::default();
        self.joins.is_empty() && self.parts.is_empty() && self.ways.iter().all(stays)
    }
}

/// A join whose subtree begins, as SQL stores it: as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Join {
    pub task: ThenTask,
    pub from: Vec<String>,
    /// The largest payload of the task, in bytes.
    pub max_bytes: usize,
}

/// An output that went into a join.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    pub way: Way,
    /// The queue of the join. Another topology file may have moved the task's level since.
    pub join: String,
    /// The place of the output in the report of its task.
    pub index: u32,
    pub stage: String,
    pub port: String,
    pub key: Bytes,
    pub payload: Bytes,
    pub encoding: Encoding,
}

impl Part {
    /// The fewest bytes that it can be in the payload of the join's task.
    pub fn weight(&self) -> usize {
        // The names of the fields, with quotes and commas, are 42.
        self.stage.len() + self.port.len() + self.key.len() + self.payload.len() + 42
    }
}

/// The task of a fork as its join shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forked {
    pub key: Bytes,
    pub payload: Bytes,
    pub encoding: Encoding,
}

/// A part of the payload of a join's task. Text that is JSON stays as it was written.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<&'a str>,
    #[serde(flatten)]
    key: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl<'a> Shown<'a> {
    fn new(
        stage: Option<&'a str>,
        port: Option<&'a str>,
        key: &[u8],
        payload: &[u8],
        encoding: Encoding,
    ) -> Self {
        let key = match std::str::from_utf8(key) {
            Ok(text) => json!({ "key": text }),
            Err(_) => json!({ "key_base64": BASE64.encode(key) }),
        };
        let as_text = || {
            let text = std::str::from_utf8(payload).ok()?;
            match encoding {
                Encoding::Bytes => None,
                Encoding::Json if text.is_empty() => Some(RawValue::NULL.to_owned()),
                Encoding::Json => RawValue::from_string(text.to_owned()).ok(),
                Encoding::Text | Encoding::Unknown => serde_json::value::to_raw_value(text).ok(),
            }
        };
        let payload_as_text = as_text();
        let payload_base64 = payload_as_text.is_none().then(|| BASE64.encode(payload));
        Self {
            stage,
            port,
            key,
            payload: payload_as_text,
            payload_base64,
        }
    }
}

impl Join {
    /// The task of a subtree that is over, with these parts, which are in order. Returns the number of
    /// bytes of its payload as `Err` if they are too many.
    ///
    /// The inner value is `None` only if somebody has changed the row in SQL.
    pub fn row(
        &self,
        subtree: TaskId,
        forked: &Forked,
        parts: &[Part],
        at_unix_ms: i64,
    ) -> Result<Option<TaskRow>, usize> {
        let shown: Vec<Shown<'_>> = parts
            .iter()
            .map(|part| {
                let Part {
                    stage,
                    port,
                    key,
                    payload,
                    encoding,
                    ..
                } = part;
                Shown::new(Some(stage), Some(port), key, payload, *encoding)
            })
            .collect();
        let has_parts = |stage: &&String| parts.iter().any(|part| part.stage == **stage);
        let missing: Vec<&String> = self.from.iter().filter(|stage| !has_parts(stage)).collect();
        #[derive(Serialize)]
        struct Payload<'a> {
            fork: Shown<'a>,
            parts: Vec<Shown<'a>>,
            missing: Vec<&'a String>,
        }
        let payload = serde_json::to_vec(&Payload {
            fork: Shown::new(None, None, &forked.key, &forked.payload, forked.encoding),
            parts: shown,
            missing,
        })
        .expect("texts and JSON are always JSON");
        if payload.len() > self.max_bytes {
            return Err(payload.len());
        }
        let id = TaskId::derived_from(&[b"join", subtree.as_bytes()], at_unix_ms);
        Ok(self.task.task(id, payload.into(), at_unix_ms))
    }

    /// The place of a stage among those with edges into the join.
    pub fn place_of(&self, stage: &str) -> usize {
        let known = self.from.iter().position(|known| known == stage);
        known.unwrap_or(self.from.len())
    }
}

/// The id of the subtree that a completion of this task begins for the join of a queue.
pub fn subtree_id(fork: TaskId, join: &str, at_unix_ms: i64) -> TaskId {
    TaskId::derived_from(&[b"subtree", fork.as_bytes(), join.as_bytes()], at_unix_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_shows_its_fork_its_parts_and_who_sent_none() {
        let join = Join {
            task: ThenTask::of_queue("crawl.page"),
            from: vec!["index".to_owned(), "screenshot".to_owned()],
            max_bytes: 1000,
        };
        let forked = Forked {
            key: "k".into(),
            payload: "1.0".into(),
            encoding: Encoding::Json,
        };
        let part = |payload: &'static [u8], encoding| Part {
            stage: "index".to_owned(),
            port: "out".to_owned(),
            key: "".into(),
            payload: payload.into(),
            encoding,
            ..Part::default()
        };
        let parts = [
            part(b"{\"n\": 18446744073709551617}", Encoding::Json),
            part(b"\xff", Encoding::Bytes),
        ];
        let subtree = TaskId::new();
        let task = join.row(subtree, &forked, &parts, 7).unwrap().unwrap();
        assert_eq!(
            std::str::from_utf8(&task.payload).unwrap(),
            "{\"fork\":{\"key\":\"k\",\"payload\":1.0},\"parts\":[\
             {\"stage\":\"index\",\"port\":\"out\",\"key\":\"\",\"payload\":{\"n\": 18446744073709551617}},\
             {\"stage\":\"index\",\"port\":\"out\",\"key\":\"\",\"payload_base64\":\"/w==\"}],\
             \"missing\":[\"screenshot\"]}"
        );
        let again = join.row(subtree, &forked, &parts, 7).unwrap().unwrap();
        assert_eq!(task.id, again.id);
        let small = Join {
            max_bytes: 10,
            ..join
        };
        assert!(small.row(subtree, &forked, &parts, 7).is_err());
    }
}
