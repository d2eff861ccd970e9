//! Results as their readers see them.

use schemars::JsonSchema;
use serde::Serialize;

use super::{
    large::{Entry, Large},
    text::Instant,
    value::{EncodingName, Shown, Value},
};
use crate::model::{self, to_rfc_3339};

/// A worker's result.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct TaskResult<'a> {
    worker: &'a str,
    attempt: u32,
    #[schemars(with = "Instant")]
    completed_at: String,
    /// True if the task had all its completions before.
    surplus: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    result_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EncodingName>")]
    result_encoding: Option<&'static str>,
}

impl<'a> From<&'a model::TaskResult> for TaskResult<'a> {
    fn from(row: &'a model::TaskResult) -> Self {
        let Shown {
            value,
            base64,
            encoding,
        } = Shown::of(&row.result, row.encoding);
        Self {
            worker: &row.worker,
            attempt: row.attempt,
            completed_at: to_rfc_3339(row.completed_unix_ms),
            surplus: row.surplus,
            result: value,
            result_base64: base64,
            result_encoding: encoding,
        }
    }
}

/// Writes a result as an entry of a large answer.
pub(in crate::ingress) fn large(mut row: model::TaskResult) -> Entry {
    let result = Large::of(std::mem::take(&mut row.result), row.encoding);
    let fields = TaskResult {
        result_encoding: result.encoding(),
        ..TaskResult::from(&row)
    };
    let mut entry = Entry::new(&fields);
    entry.value("result", result);
    entry.end()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::{super::testing::shown, *};
    use crate::model::Encoding;

    #[test]
    fn a_result_is_shown_once_and_as_what_it_was() {
        let row = |result: &'static [u8], encoding| {
            let (worker, result) = ("w".into(), Bytes::from_static(result));
            let row = model::TaskResult {
                worker,
                result,
                encoding,
                attempt: 2,
                completed_unix_ms: 1_500,
                surplus: true,
            };
            shown(TaskResult::from(&row))
        };
        let json = row(br#"{"links":[1]}"#, Encoding::Json);
        assert_eq!(
            (&json["result"], &json["result_encoding"]),
            (&json!({"links": [1]}), &json!("json"))
        );
        assert_eq!(
            (&json["surplus"], &json["attempt"]),
            (&json!(true), &json!(2))
        );
        assert_eq!(json["completed_at"], "1970-01-01T00:00:01.500Z");
        assert!(json.get("result_base64").is_none());
        assert_eq!(row(b"42", Encoding::Text)["result"], "42");
        assert!(row(b"", Encoding::Text).get("result_encoding").is_none());
        let json = row(b"\xff", Encoding::Bytes);
        assert_eq!(
            (&json["result_base64"], &json["result_encoding"]),
            (&json!("/w=="), &json!("bytes"))
        );
    }
}
