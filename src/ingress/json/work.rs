//! The calls of workers and the answers to them.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    super::tally::{Excess, MAX_QUEUES, Tally},
    AtMost, Key, Unread, insert, item, object,
    text::{Instant, Time},
    value::{self, EncodingName, Shown, Value},
};
use crate::{
    api::{ECHO, shorten},
    model::{self, Batch, Item, ItemStatus, LeaseToken, Priority, QueueName, TaskId, WorkerName},
    wire::time::to_rfc_3339,
};

/// The highest value of `max_items`.
pub(super) const MAX_ITEMS: usize = 1000;
/// The most tasks that one completion may discover.
const MAX_DISCOVERED: usize = 10_000;

/// A task that a worker has done.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a completion")]
pub(super) struct Completion<'a> {
    id: String,
    lease_token: String,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[schemars(extend("contentEncoding" = "base64"))]
    result_base64: Option<String>,
    /// The tasks that the worker found on the way.
    #[serde(borrow, default)]
    #[schemars(with = "AtMost<insert::NewTask<'a>, MAX_DISCOVERED>")]
    discovered: AtMost<&'a RawValue, MAX_DISCOVERED>,
}

/// A task that a worker gives back.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a rejection")]
pub(super) struct Rejection {
    id: String,
    lease_token: String,
    #[serde(default)]
    reason: String,
    /// `false`: the task is dead. Otherwise it is tried again, as often as `max_attempts` allows.
    retry: Option<bool>,
    /// The wait before the next attempt, in place of the backoff.
    delay: Option<Time>,
}

/// A lease that a worker needs for longer.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an extension")]
pub(super) struct Extension {
    id: String,
    lease_token: String,
    /// From now on. Without it the answer is INVALID.
    by: Option<Time>,
}

/// A worker's request for tasks.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and queues")]
pub(in crate::ingress) struct GetTasks {
    /// The worker's name. Only a token that names the worker makes it dispensable.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[schemars(with = "AtMost<QueueName, MAX_QUEUES>", extend("minItems" = 1))]
    queues: AtMost<String, MAX_QUEUES>,
    /// 0: one.
    #[serde(default)]
    max_tasks: u32,
    /// How long to wait for the first task.
    wait: Option<Time>,
    lease_duration: Option<Time>,
    #[serde(default)]
    /// The size of the answer, about; 0: 3.5 MiB.
    max_bytes: u64,
}

/// A worker's report of tasks that it has done.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and completions")]
pub(in crate::ingress) struct CompleteTasks<'a> {
    /// The worker's name. Only a token that names the worker makes it dispensable.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Completion<'a>, MAX_ITEMS>")]
    completions: AtMost<&'a RawValue, MAX_ITEMS>,
}

/// A worker's report of tasks that it gives back.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and rejections")]
pub(in crate::ingress) struct RejectTasks<'a> {
    /// The worker's name. Only a token that names the worker makes it dispensable.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Rejection, MAX_ITEMS>")]
    rejections: AtMost<&'a RawValue, MAX_ITEMS>,
}

/// A worker's request for longer leases.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and extensions")]
pub(in crate::ingress) struct ExtendTasks<'a> {
    /// The worker's name. Only a token that names the worker makes it dispensable.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[serde(borrow)]
    #[schemars(with = "AtMost<Extension, MAX_ITEMS>")]
    extensions: AtMost<&'a RawValue, MAX_ITEMS>,
}

pub(in crate::ingress) fn get_tasks(body: &Bytes) -> Result<model::GetTasks, Unread> {
    let request: GetTasks = object(body)?;
    Ok(model::GetTasks {
        worker: request.worker,
        queues: request.queues.0,
        max_tasks: request.max_tasks,
        wait: request.wait.map_or(Duration::ZERO, |time| time.0),
        lease_duration: request.lease_duration.map(|time| time.0),
        max_bytes: request.max_bytes,
    })
}

/// Reads the tasks that a worker has finished.
pub(in crate::ingress) fn completions(body: &Bytes, tally: &mut Tally<'_>) -> Result<Batch<model::Completion>, Unread> {
    let CompleteTasks { worker, completions } = object(body)?;
    batch(worker, &completions.0, tally, |text, tally| completion(body, text, tally))
}

/// Reads the tasks that a worker gives back.
pub(in crate::ingress) fn rejections(body: &Bytes, tally: &mut Tally<'_>) -> Result<Batch<model::Rejection>, Unread> {
    let RejectTasks { worker, rejections } = object(body)?;
    batch(worker, &rejections.0, tally, |text, _| Ok(rejection(text)))
}

/// Reads the tasks that a worker needs for longer.
pub(in crate::ingress) fn extensions(body: &Bytes, tally: &mut Tally<'_>) -> Result<Batch<model::Extension>, Unread> {
    let ExtendTasks { worker, extensions } = object(body)?;
    batch(worker, &extensions.0, tally, |text, _| Ok(extension(text)))
}

/// Checks what all items have in common, then reads each.
pub(super) fn batch<T>(
    worker: String,
    texts: &[&RawValue],
    tally: &mut Tally<'_>,
    read: impl Fn(&str, &mut Tally<'_>) -> Result<Result<Item<T>, String>, Excess>,
) -> Result<Batch<T>, Unread> {
    // The caller's token may say which worker it is.
    if !worker.is_empty() {
        WorkerName::new(&worker).map_err(|error| Unread::Invalid(error.to_string()))?;
    }
    texts.iter().try_for_each(|_| tally.item())?;
    let answered = |text: &&RawValue| {
        let item = read(text.get(), tally)?;
        item.as_ref().err().map_or(Ok(()), |why| tally.unreadable(why))?;
        Ok(item.map_err(|why| model::ItemAnswer::invalid(echoed_id(text.get()), why)))
    };
    let items = texts.iter().map(answered).collect::<Result<_, Excess>>()?;
    Ok(Batch { worker, items })
}

/// The id of an item that cannot be read, if that can.
fn echoed_id(text: &str) -> String {
    #[derive(Deserialize)]
    struct Id {
        id: String,
    }
    serde_json::from_str(text).map_or_else(|_| String::new(), |Id { id }| shorten(&id, ECHO).into_owned())
}

pub(super) fn completion(
    body: &Bytes,
    text: &str,
    tally: &mut Tally<'_>,
) -> Result<Result<Item<model::Completion>, String>, Excess> {
    let completion: Completion<'_> = match item(text, "a completion") {
        Ok(completion) => completion,
        Err(error) => return Ok(Err(error)),
    };
    let mut discovered = Vec::new();
    for (index, task) in completion.discovered.0.iter().enumerate() {
        tally.discovered()?;
        match insert::part(body, task.get(), tally)? {
            Ok(task) => discovered.push(task),
            Err(error) => return Ok(Err(format!("discovered[{index}]: {error}"))),
        }
    }
    let (id, lease_token) = (completion.id, completion.lease_token);
    let result = value::read(body, "result", completion.result, completion.result_base64);
    Ok(result.map(|(result, result_encoding)| {
        let report = model::Completion { result, result_encoding, discovered };
        Item { id, lease_token, report: Ok(report) }
    }))
}

pub(super) fn rejection(text: &str) -> Result<Item<model::Rejection>, String> {
    let Rejection { id, lease_token, reason, retry, delay } = item(text, "a rejection")?;
    let report = model::Rejection { reason, retry: retry.unwrap_or(true), delay: delay.map(|time| time.0) };
    Ok(Item { id, lease_token, report: Ok(report) })
}

pub(super) fn extension(text: &str) -> Result<Item<model::Extension>, String> {
    let Extension { id, lease_token, by } = item(text, "an extension")?;
    Ok(Item { id, lease_token, report: Ok(model::Extension { by: by.map(|time| time.0) }) })
}

/// The answer to an item, in the order of the request.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct ItemAnswer<'a> {
    id: &'a str,
    #[schemars(with = "ItemStatus")]
    status: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// After an extension.
    #[schemars(with = "Option<Instant>")]
    lease_expires_at: Option<String>,
}

impl<'a> From<&'a model::ItemAnswer> for ItemAnswer<'a> {
    fn from(answer: &'a model::ItemAnswer) -> Self {
        Self {
            id: &answer.id,
            status: answer.status.as_str(),
            error: &answer.error,
            lease_expires_at: answer.lease_expires_unix_ms.map(to_rfc_3339),
        }
    }
}

/// A task with a lease for the worker.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct LeasedTask<'a> {
    id: TaskId,
    #[schemars(with = "QueueName")]
    queue: &'a str,
    #[serde(flatten)]
    key: Key<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    payload_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<EncodingName>")]
    payload_encoding: Option<&'static str>,
    headers: &'a HashMap<String, String>,
    traceparent: &'a str,
    #[schemars(with = "String")]
    lease_token: &'a LeaseToken,
    #[schemars(with = "Instant")]
    lease_expires_at: String,
    attempt: u32,
    replicas: u32,
    priority: Priority,
}

impl<'a> From<&'a model::LeasedTask> for LeasedTask<'a> {
    fn from(task: &'a model::LeasedTask) -> Self {
        let model::LeasedTask { id, token, expires_unix_ms, lease: _, body } = task;
        let Shown { value, base64, encoding } = Shown::of(&body.payload, body.payload_encoding);
        Self {
            id: *id,
            queue: token.shard.queue.as_str(),
            key: (&body.key).into(),
            payload: value,
            payload_base64: base64,
            payload_encoding: encoding,
            headers: &body.headers,
            traceparent: &body.traceparent,
            lease_token: token,
            lease_expires_at: to_rfc_3339(*expires_unix_ms),
            attempt: token.attempt,
            replicas: body.replicas,
            priority: body.priority,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::testing::{share, shown, tally},
        *,
    };
    use crate::model::{Encoding, TaskBody};

    #[test]
    fn a_wrong_completion_is_answered_under_its_id() {
        let body = Bytes::from_static(
            br#"{"worker":"w","completions":[
                {"id":"1","lease_token":"t","result":{"ok":true},"discovered":[{"key":"x"}]},
                {"id":"2","lease_token":"t","discovered":[{"key":"x"},{"kee":"y"}]},
                {"lease_token":"t"}]}"#,
        );
        let Batch { worker, items } = completions(&body, &mut tally(&share())).unwrap();
        assert_eq!(worker, "w");
        let first = items[0].as_ref().unwrap().report.as_ref().unwrap();
        assert_eq!((first.result.as_ref(), first.discovered.len()), (b"{\"ok\":true}".as_ref(), 1));
        assert_eq!(first.result_encoding, Encoding::Json);
        let second = items[1].as_ref().unwrap_err();
        assert_eq!((second.id.as_str(), second.status), ("2", ItemStatus::Invalid));
        assert!(second.error.starts_with("discovered[1]: unknown field `kee`"), "{}", second.error);
        assert_eq!(items[2].as_ref().unwrap_err().error, "missing field `id`");
    }

    #[test]
    fn rejections_and_extensions_are_read() {
        let body = Bytes::from_static(
            br#"{"worker":"w","rejections":[{"id":"1","lease_token":"t","reason":"r","retry":false,"delay":"1m"}]}"#,
        );
        let rejection = rejections(&body, &mut tally(&share())).unwrap().items.remove(0).unwrap().report.unwrap();
        assert_eq!((rejection.retry, rejection.delay), (false, Some(Duration::from_secs(60))));
        let body = Bytes::from_static(br#"{"worker":"w","extensions":[{"id":"1","lease_token":"t","by":"2m"}]}"#);
        let extension = extensions(&body, &mut tally(&share())).unwrap().items.remove(0).unwrap();
        assert_eq!(extension.report.unwrap().by, Some(Duration::from_secs(120)));
    }

    #[test]
    fn what_all_items_need_is_checked_before_the_first_is_read() {
        let refused = |worker: &str, items: &str| {
            let body = Bytes::from(format!("{{\"worker\":\"{worker}\",\"completions\":[{items}]}}"));
            completions(&body, &mut tally(&share())).unwrap_err()
        };
        let nobody = refused(&"w".repeat(129), "");
        assert!(matches!(nobody, Unread::Invalid(why) if why == "worker name has 129 bytes; at most 128"));
        let Unread::Malformed { detail, .. } = refused("w", &vec!["0"; 1001].join(",")) else { panic!("too many") };
        assert_eq!(detail, "completions: more than 1000 entries");
        let many = vec!["{\"key\":\"x\"}"; 10_000].join(",");
        let item = format!("{{\"id\":\"1\",\"lease_token\":\"t\",\"discovered\":[{many}]}}");
        assert_eq!(refused("w", &vec![item; 6].join(",")), Unread::Excess(Excess::Discovered));
    }

    #[test]
    fn one_completion_does_not_discover_more_than_it_may() {
        let item = format!("{{\"id\":\"1\",\"lease_token\":\"t\",\"discovered\":[{}]}}", vec!["{}"; 10_001].join(","));
        let body = Bytes::from(format!("{{\"worker\":\"w\",\"completions\":[{item}]}}"));
        let item = completions(&body, &mut tally(&share())).unwrap().items.remove(0).unwrap_err();
        assert_eq!((item.id.as_str(), item.error.as_str()), ("1", "discovered: more than 10000 entries"));
    }

    #[test]
    fn a_request_that_is_no_object_or_lacks_something_is_malformed() {
        let read = |text: &'static str| get_tasks(&Bytes::from_static(text.as_bytes())).unwrap_err().to_string();
        assert_eq!(read(r#"["w", ["q"]]"#), "expected a JSON object");
        assert_eq!(read(r#"{"worker":"w"}"#), "missing field `queues`");
        assert_eq!(read(r#"{"worker":"w","queues":"q"}"#), "queues: invalid type: string \"q\", expected a list");
        assert!(read(r#"{"worker":"w","queues":["q"],"max":3}"#).starts_with("unknown field `max`, expected one of"));
        assert!(read("{").starts_with("not JSON: EOF"));
        assert!(read("").starts_with("not JSON: EOF"));
    }

    #[test]
    fn answers_leave_out_what_is_empty() {
        let lost = shown(ItemAnswer::from(&model::ItemAnswer::new("1".into(), ItemStatus::LeaseLost)));
        assert_eq!(lost, json!({"id": "1", "status": "LEASE_LOST"}));
    }

    #[test]
    fn a_leased_task_has_its_payload_once_and_as_what_it_was() {
        let leased = |body: TaskBody| {
            let token = "q:0:1:1:1".parse().unwrap();
            model::LeasedTask { id: TaskId::new(), token, expires_unix_ms: 0, lease: Duration::ZERO, body }
        };
        let shown_as = |payload: &'static [u8], payload_encoding: Encoding| {
            let payload = Bytes::from_static(payload);
            let task = leased(TaskBody { key: "k".into(), payload, payload_encoding, ..Default::default() });
            let mut json = shown(LeasedTask::from(&task));
            assert_eq!((&json["key"], &json["priority"]), (&json!("k"), &json!("medium")));
            ["payload", "payload_base64", "payload_encoding"].map(|name| json[name].take())
        };
        let null = serde_json::Value::Null;
        assert_eq!(shown_as(b"{\"a\":1}", Encoding::Json), [json!({"a": 1}), null.clone(), json!("json")]);
        assert_eq!(shown_as(b"{\"a\":1}", Encoding::Text), [json!("{\"a\":1}"), null.clone(), json!("text")]);
        assert_eq!(shown_as(b"\xff", Encoding::Bytes), [null.clone(), json!("/w=="), json!("bytes")]);
        assert_eq!(shown_as(b"", Encoding::Bytes), [null.clone(), null.clone(), null]);
        let task = leased(TaskBody { key: vec![0xff].into(), ..Default::default() });
        assert_eq!(shown(LeasedTask::from(&task))["key_base64"], "/w==");
    }
}
