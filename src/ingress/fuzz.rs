//! Random input for everything that reads what clients send. No reader panics, none takes more
//! memory than a request may have, and a task that was read is the same after it is written and
//! read again.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use futures::{FutureExt as _, stream};
use proptest::{collection::vec, prelude::*, sample::Index};
use serde_json::{Map, Value, value::RawValue};

use super::{
    json,
    net::budget::Budget,
    net::lines::{Line, Lines},
    tally::Tally,
};
use crate::{
    config::Settings,
    model::{Encoding, NewTask, to_rfc_3339},
};

/// Bodies that are read, with every field.
const BODIES: [&str; 12] = [
    r#"{"queue":"q","key":"k","payload":{"a":[1.50,null]},"replicas":3,"priority":"High","delay":"1m 30s",
        "lease_duration":"1500ms","max_attempts":7,"headers":{"h":"v"},"traceparent":"tp"}"#,
    r#"[{"queue":"q","payload":"te\u00e9xt\n"},
        {"queue":"q","payload_base64":"AP8=","not_before":"2030-01-02T03:04:05Z","deadline":"2030-01-03T03:04:05Z"}]"#,
    r#"{"worker":"w","queues":["a","b"],"max_tasks":3,"wait":"30s","lease_duration":"1m","max_bytes":100}"#,
    r#"{"worker":"w","completions":[
        {"id":"1","lease_token":"q:0:1:1:1:0","result":{"x":1},"discovered":[{"key":"x"}]}]}"#,
    r#"{"worker":"w","rejections":[{"id":"1","lease_token":"t","reason":"r","retry":false,"delay":"1m"}]}"#,
    r#"{"worker":"w","extensions":[{"id":"1","lease_token":"t","by":"2m"}]}"#,
    r#"{"ids":["a"],"filter":{"queue":"q","kind":"task","since":"2030-01-02T03:04:05Z"},"dry_run":true,"limit":7}"#,
    r#"{"filter":{"queue":"q","status":["DEAD"],"key_prefix":"k","headers":{"a":"b"},"worker":"w"},"yes":true}"#,
    r#"{"ids":["a","b"],"priority":"high","replicas":3}"#,
    r#"{"ids":["a"],"away_from":"w7"}"#,
    r#"{"ids":["a"],"to":"w8","reserved_for":"10m"}"#,
    r#"{"queue":"q","repair":true,"cursor":"shards/q:0"}"#,
];
const QUERIES: [&str; 6] = [
    "queue=q&kind=record&since=1970-01-01T00:00:01Z&until=1970-01-01T00%3A00%3A02%2B00%3A00&limit=7&cursor=x",
    "queue=q&key=https%3A%2F%2Fa%2F%3Fb+c&worker=w",
    "id=0190a5c2-0000-7000-8000-000000000000",
    "queue=q&status=dead,CANCELLED&key_prefix=a&header.site=a+b&header.x=&limit=1&until=2030-01-01T00:00:00Z",
    "queue=q&shard=3&limit=100",
    "queue=a%20b",
];

/// A part of a text is cut out, written again and again, or made to other bytes.
#[derive(Clone, Debug)]
enum Damage {
    Cut(Index, u8),
    Repeat(Index, u8, u8),
    Write(Index, Vec<u8>),
}

impl Damage {
    fn apply(&self, text: &mut Vec<u8>) {
        let part = |at: &Index, length: u8, text: &[u8]| {
            let from = at.index(text.len() + 1);
            from..text.len().min(from + usize::from(length))
        };
        match self {
            Self::Cut(at, length) => drop(text.drain(part(at, *length, text))),
            Self::Repeat(at, length, times) => {
                let range = part(at, *length, text);
                let more = text[range.clone()].repeat(usize::from(*times));
                text.splice(range.end..range.end, more);
            }
            Self::Write(at, bytes) => drop(text.splice(part(at, 1, text), bytes.iter().copied())),
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let signs = prop::sample::select(&b"{}[]\":,\\\0\xff0-9eE.u &=%+"[..]);
    prop_oneof![
        (any::<Index>(), 0..40_u8).prop_map(|(at, length)| Damage::Cut(at, length)),
        (any::<Index>(), 0..60_u8, 0..60_u8)
            .prop_map(|(at, length, times)| Damage::Repeat(at, length, times)),
        (any::<Index>(), vec(signs, 0..4)).prop_map(|(at, bytes)| Damage::Write(at, bytes)),
    ]
}

/// Random bytes, or a sample with a little damage.
pub(super) fn hostile(samples: impl IntoIterator<Item = Vec<u8>>) -> impl Strategy<Value = Bytes> {
    let samples: Vec<_> = samples.into_iter().collect();
    let damaged =
        (prop::sample::select(samples), vec(damage(), 0..4)).prop_map(|(mut text, damages)| {
            damages.iter().for_each(|damage| damage.apply(&mut text));
            text
        });
    prop_oneof![1 => vec(any::<u8>(), 0..64), 9 => damaged].prop_map(Bytes::from)
}

/// Reads with a tally, and checks the memory that the request may have taken from the budget.
pub(super) fn within<T>(bytes: usize, read: impl FnOnce(&mut Tally<'_>) -> T) -> T {
    let budget = Budget::new(256 << 20);
    let share = budget.share();
    let mut tally = Tally::new(&Settings::default(), &share, bytes);
    let answer = read(&mut tally);
    assert!(
        budget.held() <= (24 << 20) + 4 * bytes + (32 << 10),
        "{} bytes for {bytes}",
        budget.held()
    );
    drop(tally);
    assert_eq!(budget.held(), 0, "what a request does not keep goes back");
    answer
}

/// The JSON of a task, as a client may write it.
fn written(task: &NewTask) -> String {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    set("queue", task.queue.clone().into());
    set("key", String::from_utf8(task.key.to_vec()).unwrap().into());
    set("replicas", task.replicas.into());
    set(
        "priority",
        task.priority.map(|priority| priority.as_str()).into(),
    );
    let durations = [
        ("delay", task.delay),
        ("finish_within", task.finish_within),
        ("lease_duration", task.lease_duration),
    ];
    for (name, time) in durations {
        set(
            name,
            time.map(|time| humantime::format_duration(time).to_string())
                .into(),
        );
    }
    set(
        "not_before",
        task.not_before_unix_ms.map(to_rfc_3339).into(),
    );
    set("deadline", task.deadline_unix_ms.map(to_rfc_3339).into());
    set("max_attempts", task.max_attempts.into());
    set("headers", serde_json::to_value(&task.headers).unwrap());
    set("traceparent", task.traceparent.clone().into());
    match task.payload_encoding {
        Encoding::Text => drop(set(
            "payload",
            String::from_utf8(task.payload.to_vec()).unwrap().into(),
        )),
        Encoding::Bytes => drop(set("payload_base64", BASE64.encode(&task.payload).into())),
        Encoding::Unknown => assert!(task.payload.is_empty()),
        Encoding::Json => {
            // Byte for byte, which a value would not be.
            let text = serde_json::to_string(&fields).unwrap();
            let payload = std::str::from_utf8(&task.payload).unwrap();
            let _: &RawValue = serde_json::from_str(payload).unwrap();
            return format!(
                "{},\"payload\":{payload}}}",
                text.strip_suffix('}').unwrap()
            );
        }
    }
    serde_json::to_string(&fields).unwrap()
}

fn comes_back(task: &NewTask) {
    let text = Bytes::from(written(task));
    assert_eq!(json::insert::new_task(&text).as_ref(), Ok(task), "{text:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bodies_of_any_kind_are_read_within_their_bounds(body in hostile(BODIES.map(|body| body.as_bytes().to_vec()))) {
        let bytes = body.len();
        if let Ok(read) = within(bytes, |tally| json::insert::new_tasks(&body, tally)) {
            read.tasks.iter().flatten().for_each(comes_back);
        }
        if let Ok(task) = json::insert::new_task(&body) {
            comes_back(&task);
        }
        if let Ok(request) = json::work::get_tasks(&body) {
            prop_assert!(request.queues.len() <= 100);
        }
        if let Ok((batch, next)) = within(bytes, |tally| json::work::completions(&body, tally)) {
            prop_assert!(next.is_none_or(|next| next.queues.len() <= 100));
            prop_assert!(batch.items.len() <= 1000);
            for item in batch.items.into_iter().flatten() {
                item.report.into_iter().flat_map(|report| report.discovered).for_each(|task| comes_back(&task));
            }
        }
        drop(within(bytes, |tally| json::work::rejections(&body, tally)));
        drop(within(bytes, |tally| json::work::extensions(&body, tally)));
        drop(within(bytes, |tally| json::letters::change(&body, tally)));
        drop(within(bytes, |tally| json::bulk::change(&body, tally)));
        drop(within(bytes, |tally| json::changes::update(&body, tally)));
        drop(within(bytes, |tally| json::changes::requeue(&body, tally)));
        drop(json::fsck::request(&body));
    }

    #[test]
    fn queries_of_any_kind_are_read_or_refused_in_a_few_words(
        query in hostile(QUERIES.map(|query| query.as_bytes().to_vec())),
    ) {
        let text = String::from_utf8_lossy(&query);
        let refusals = [
            json::letters::pages_of_query(&text).err(),
            json::search::pages_of_query(&text).err(),
            json::explain::question(&text).err().map(|error| error.to_string()),
            json::fsck::dump(&text).err().map(|error| error.to_string()),
            json::books::queue_of_query(&text).err().map(|error| error.to_string()),
        ];
        for said in refusals.into_iter().flatten() {
            // Problems are cut before they are sent; the parameter that they name is cut here.
            prop_assert!(said.len() <= text.len() + 300 && !said.contains('\n'), "{said:?}");
        }
    }

    #[test]
    fn lines_are_the_same_however_their_bytes_come(
        text in vec(prop::sample::select(&b"ab \t\r\n\n{}\xff"[..]), 0..200),
        cuts in vec(any::<Index>(), 0..8),
        max in 1..30_usize,
    ) {
        let read = |chunks: Vec<Bytes>| -> Vec<Line> {
            let mut lines = Lines::new(stream::iter(chunks.into_iter().map(Ok)), max, drop);
            let mut all = Vec::new();
            loop {
                let batch = lines.next_batch(3).now_or_never().expect("all is there").expect("no error");
                if batch.is_empty() {
                    return all;
                }
                all.extend(batch);
            }
        };
        let mut places: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        places.extend([0, text.len()]);
        places.sort_unstable();
        let whole = Bytes::from(text);
        let parts = places.windows(2).map(|ends| whole.slice(ends[0]..ends[1])).filter(|part| !part.is_empty());
        let (in_parts, at_once) = (read(parts.collect()), read(vec![whole.clone()]));
        prop_assert_eq!(&in_parts, &at_once);
        for line in &at_once {
            prop_assert!(line.text.as_ref().map_or(0, Bytes::len) <= max);
        }
    }
}
