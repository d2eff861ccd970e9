//! The task that a record becomes.

use std::collections::{BTreeMap, HashMap};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};

use crate::{
    bus::LogMessage,
    model::{
        Encoding, NewTask, OnDead, SUBSCRIPTION_HEADERS, SequenceBy, Subscription, TEXT_MARK,
        TaskId, TopicName, is_traceparent, json, record_task_id, sequence_of_key, to_rfc_3339,
    },
};

/// An attribute with this name becomes the context of the task.
const TRACEPARENT: &str = "traceparent";

/// Makes the task of a record, and its id.
pub fn record_task(
    subscription: &Subscription,
    replay: u64,
    topic: &TopicName,
    message: &LogMessage,
) -> (TaskId, NewTask) {
    let record = &message.record;
    let id = record_task_id(
        subscription,
        replay,
        topic,
        record.partition,
        message.offset,
        message.published_unix_ms,
    );
    let mut headers = HashMap::new();
    let mut traceparent = String::new();
    let mut payload_encoding = encoding(&record.value);
    for (name, values) in by_name(&record.attributes) {
        if (name, values[0]) == TEXT_MARK && payload_encoding == Encoding::Json {
            payload_encoding = Encoding::Text;
            continue;
        }
        // Somebody else's record could name another place.
        if name.starts_with("taskd-") {
            continue;
        }
        if name == TRACEPARENT && is_traceparent(values[0]) {
            values[0].clone_into(&mut traceparent);
            continue;
        }
        let text = match values[..] {
            [value] => value.to_owned(),
            _ => serde_json::to_string(&values).unwrap_or_default(),
        };
        put(&mut headers, name, text.as_bytes());
    }
    let [of_subscription, of_replay] = SUBSCRIPTION_HEADERS;
    put(
        &mut headers,
        of_subscription,
        subscription.name.as_str().as_bytes(),
    );
    put(&mut headers, of_replay, replay.to_string().as_bytes());
    put(&mut headers, "taskd-topic", topic.as_str().as_bytes());
    let partition = record.partition.to_string();
    put(&mut headers, "taskd-partition", partition.as_bytes());
    let offset = message.offset.to_string();
    put(&mut headers, "taskd-offset", offset.as_bytes());
    if !record.key.is_empty() {
        put(&mut headers, "taskd-key", &record.key);
    }
    let published_at = to_rfc_3339(message.published_unix_ms);
    put(&mut headers, "taskd-published-at", published_at.as_bytes());
    // The key of a task says which repeats are duplicates: records of the topic with the same id.
    // Another subscription may have the same queue. The task of a record without an id takes no
    // key; that of the record chooses its shard.
    let (given, key) = match record.id.as_str() {
        "" => (Some(id), record.key.clone()),
        repeat => {
            let name = &subscription.name;
            (None, format!("{name}:{replay}:{topic}:{repeat}").into())
        }
    };
    // A record without a key is in no sequence.
    let sequence = match subscription.sequence {
        SequenceBy::Key => sequence_of_key(&record.key),
        SequenceBy::None => String::new(),
    };
    let on_dead = if sequence.is_empty() {
        OnDead::Next
    } else {
        subscription.on_dead
    };
    let task = NewTask {
        id: given,
        queue: subscription.queue.as_str().to_owned(),
        key,
        payload: record.value.clone(),
        payload_encoding,
        headers,
        traceparent,
        sequence,
        on_dead,
        ..NewTask::default()
    };
    (id, task)
}

/// The values of each attribute, in the order given.
fn by_name(attributes: &[(String, String)]) -> BTreeMap<&str, Vec<&str>> {
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, value) in attributes {
        by_name.entry(name).or_default().push(value);
    }
    by_name
}

/// Adds a header. A value that no header can have becomes `NAME_base64`.
pub(in crate::pipelines::discovery) fn put(
    headers: &mut HashMap<String, String>,
    name: &str,
    value: &[u8],
) {
    match std::str::from_utf8(value) {
        Ok(text) if !text.chars().any(char::is_control) => {
            headers.insert(name.to_owned(), text.to_owned());
        }
        _ => {
            headers.insert(format!("{name}_base64"), BASE64.encode(value));
        }
    }
}

pub(in crate::pipelines::discovery) fn encoding(value: &[u8]) -> Encoding {
    match std::str::from_utf8(value) {
        Ok(text) if json::check(text).is_ok() => Encoding::Json,
        Ok(_) => Encoding::Text,
        Err(_) => Encoding::Bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bus::LogRecord,
        model::{Matching, Offset, QueueName, SubscriptionName, TopicPattern},
    };

    #[test]
    fn a_task_has_all_that_its_record_has() {
        let mut subscription = Subscription {
            name: SubscriptionName::new("s").unwrap(),
            topics: TopicPattern::new("t").unwrap(),
            queue: QueueName::new("q").unwrap(),
            start: "0".to_owned(),
            matching: Matching::default(),
            sequence: SequenceBy::None,
            on_dead: OnDead::Next,
            created_unix_ms: 1,
            version: 1,
        };
        let topic = TopicName::new("t").unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let mut message = LogMessage {
            offset: Offset { major: 7, minor: 1 },
            published_unix_ms: 1000,
            number: 0,
            record: LogRecord {
                partition: 3,
                value: "{\"a\": 1}".into(),
                key: vec![0xff].into(),
                attributes: vec![
                    pair("lang", "en"),
                    pair("tag", "b"),
                    pair("tag", "a"),
                    pair("lines", "1\n2"),
                    pair("taskd-topic", "forged"),
                    pair("traceparent", traceparent),
                ],
                id: String::new(),
            },
        };
        let (id, task) = record_task(&subscription, 2, &topic, &message);
        let mut headers: Vec<(&str, &str)> = task
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        headers.sort_unstable();
        assert_eq!(
            headers,
            [
                ("lang", "en"),
                ("lines_base64", "MQoy"),
                ("tag", "[\"b\",\"a\"]"),
                ("taskd-key_base64", "/w=="),
                ("taskd-offset", "7-1"),
                ("taskd-partition", "3"),
                ("taskd-published-at", "1970-01-01T00:00:01Z"),
                ("taskd-replay", "2"),
                ("taskd-subscription", "s"),
                ("taskd-topic", "t"),
            ]
        );
        assert_eq!(task.traceparent, traceparent);
        assert_eq!(task.payload_encoding, Encoding::Json);
        assert_eq!((task.id, &task.key[..]), (Some(id), &[0xff][..]));
        let mark = (TEXT_MARK.0.to_owned(), TEXT_MARK.1.to_owned());
        message.record.attributes.push(mark);
        let (_, text) = record_task(&subscription, 2, &topic, &message);
        assert_eq!(text.payload_encoding, Encoding::Text);
        assert_eq!(text.headers, task.headers, "the mark is no header");
        assert_eq!(task.sequence, "");
        subscription.sequence = SequenceBy::Key;
        subscription.on_dead = OnDead::Hold;
        message.record.id = "once".to_owned();
        message.record.value = "text".into();
        let (_, task) = record_task(&subscription, 2, &topic, &message);
        assert_eq!((task.id, &task.key[..]), (None, &b"s:2:t:once"[..]));
        assert_eq!(task.payload_encoding, Encoding::Text);
        assert!(task.sequence.starts_with("sha256:"), "{}", task.sequence);
        assert_eq!(task.on_dead, OnDead::Hold);
        // A record without a key goes at any time, and holds up no other.
        message.record.key = bytes::Bytes::new();
        message.record.attributes = vec![pair("taskd-key", "forged")];
        let (_, task) = record_task(&subscription, 2, &topic, &message);
        assert_eq!(task.headers.get("taskd-key"), None);
        assert_eq!((task.sequence.as_str(), task.on_dead), ("", OnDead::Next));
    }
}
