//! Requests of workers that are read, and answers that are written.

use serde_json::json;

use super::{
    super::testing::{share, shown, tally},
    *,
};
use crate::model::{Encoding, ItemStatus, TaskBody};

#[test]
fn a_wrong_completion_is_answered_under_its_id() {
    let body = Bytes::from_static(
        br#"{"worker":"w","completions":[
            {"id":"1","lease_token":"t","result":{"ok":true},"discovered":[{"key":"x"}]},
            {"id":"2","lease_token":"t","discovered":[{"key":"x"},{"kee":"y"}]},
            {"lease_token":"t"}]}"#,
    );
    let (Batch { worker, items }, None) = completions(&body, &mut tally(&share())).unwrap() else {
        panic!("no next")
    };
    assert_eq!(worker, "w");
    let first = items[0].as_ref().unwrap().report.as_ref().unwrap();
    assert_eq!(
        (first.result.as_ref(), first.discovered.len()),
        (b"{\"ok\":true}".as_ref(), 1)
    );
    assert_eq!(first.result_encoding, Encoding::Json);
    let second = items[1].as_ref().unwrap().report.as_ref().unwrap();
    let note = second.not_stored.note();
    assert_eq!(second.discovered.len(), 1);
    assert!(
        note.starts_with("1 discovered task is not stored: discovered[1]: unknown field `kee`"),
        "{note}"
    );
    let third = items[2].as_ref().unwrap_err();
    assert_eq!(
        (third.status, third.error.as_str()),
        (ItemStatus::Invalid, "missing field `id`")
    );
}

#[test]
fn rejections_and_extensions_are_read() {
    let body = Bytes::from_static(
        br#"{"worker":"w","rejections":[{"id":"1","lease_token":"t","reason":"r","retry":false,"delay":"1m"}]}"#,
    );
    let rejection = rejections(&body, &mut tally(&share()))
        .unwrap()
        .items
        .remove(0)
        .unwrap()
        .report
        .unwrap();
    assert_eq!(
        (rejection.retry, rejection.delay),
        (false, Some(Duration::from_secs(60)))
    );
    let body = Bytes::from_static(
        br#"{"worker":"w","extensions":[{"id":"1","lease_token":"t","by":"2m"}]}"#,
    );
    let extension = extensions(&body, &mut tally(&share()))
        .unwrap()
        .items
        .remove(0)
        .unwrap();
    assert_eq!(extension.report.unwrap().by, Some(Duration::from_secs(120)));
}

#[test]
fn what_all_items_need_is_checked_before_the_first_is_read() {
    let refused = |worker: &str, items: &str| {
        let body = Bytes::from(format!(
            "{{\"worker\":\"{worker}\",\"completions\":[{items}]}}"
        ));
        completions(&body, &mut tally(&share())).unwrap_err()
    };
    let nobody = refused(&"w".repeat(129), "");
    assert!(
        matches!(nobody, Unread::Invalid(why) if why == "worker name has 129 bytes; at most 128")
    );
    let Unread::Malformed { detail, .. } = refused("w", &vec!["0"; 1001].join(",")) else {
        panic!("too many")
    };
    assert_eq!(detail, "completions: more than 1000 entries");
    let many = vec!["{\"key\":\"x\"}"; 10_000].join(",");
    let item = format!("{{\"id\":\"1\",\"lease_token\":\"t\",\"discovered\":[{many}]}}");
    assert_eq!(
        refused("w", &vec![item; 6].join(",")),
        Unread::Excess(Excess::Discovered)
    );
}

#[test]
fn one_completion_does_not_discover_more_than_it_may() {
    let item = format!(
        "{{\"id\":\"1\",\"lease_token\":\"t\",\"discovered\":[{}]}}",
        vec!["{}"; 10_001].join(",")
    );
    let body = Bytes::from(format!("{{\"worker\":\"w\",\"completions\":[{item}]}}"));
    let item = completions(&body, &mut tally(&share()))
        .unwrap()
        .0
        .items
        .remove(0)
        .unwrap_err();
    assert_eq!(
        (item.id.as_str(), item.error.as_str()),
        ("1", "discovered: more than 10000 entries")
    );
}

#[test]
fn a_request_that_is_no_object_or_lacks_something_is_malformed() {
    let read = |text: &'static str| {
        get_tasks(&Bytes::from_static(text.as_bytes()))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(read(r#"["w", ["q"]]"#), "expected a JSON object");
    assert_eq!(read(r#"{"worker":"w"}"#), "missing field `queues`");
    assert_eq!(
        read(r#"{"worker":"w","queues":"q"}"#),
        "queues: invalid type: string \"q\", expected a list"
    );
    assert!(
        read(r#"{"worker":"w","queues":["q"],"max":3}"#)
            .starts_with("unknown field `max`, expected one of")
    );
    assert!(read("{").starts_with("not JSON: EOF"));
    assert!(read("").starts_with("not JSON: EOF"));
}

#[test]
fn answers_leave_out_what_is_empty() {
    let lost = shown(ItemAnswer::new("1".into(), ItemStatus::LeaseLost));
    assert_eq!(lost, json!({"id": "1", "status": "LEASE_LOST"}));
}

#[test]
fn a_leased_task_has_its_payload_once_and_as_what_it_was() {
    let leased = |body: TaskBody| {
        let token = "q:0:1:1:1:0".parse().unwrap();
        model::LeasedTask {
            id: TaskId::new(),
            token,
            expires_unix_ms: 0,
            lease: Duration::ZERO,
            body,
        }
    };
    let shown_as = |payload: &'static [u8], payload_encoding: Encoding| {
        let payload = Bytes::from_static(payload);
        let task = leased(TaskBody {
            key: "k".into(),
            payload,
            payload_encoding,
            ..Default::default()
        });
        let mut json = shown(LeasedTask::from(&task));
        assert_eq!(
            (&json["key"], &json["priority"]),
            (&json!("k"), &json!("medium"))
        );
        ["payload", "payload_base64", "payload_encoding"].map(|name| json[name].take())
    };
    let null = serde_json::Value::Null;
    assert_eq!(
        shown_as(b"{\"a\":1}", Encoding::Json),
        [json!({"a": 1}), null.clone(), json!("json")]
    );
    assert_eq!(
        shown_as(b"{\"a\":1}", Encoding::Text),
        [json!("{\"a\":1}"), null.clone(), json!("text")]
    );
    assert_eq!(
        shown_as(b"\xff", Encoding::Bytes),
        [null.clone(), json!("/w=="), json!("bytes")]
    );
    assert_eq!(
        shown_as(b"", Encoding::Bytes),
        [null.clone(), null.clone(), null]
    );
    let task = leased(TaskBody {
        key: vec![0xff].into(),
        ..Default::default()
    });
    assert_eq!(shown(LeasedTask::from(&task))["key_base64"], "/w==");
}
