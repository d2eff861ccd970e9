//! Topics and their records.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    AtMost, Unread, first_byte, item, object,
    query::{not_a_number, parameters},
    text::{Instant, Time},
    utf8,
    value::{Shown, Value, read},
};
use crate::{
    model::{
        Encoding, MAX_ATTRIBUTES, MAX_ATTRIBUTES_BYTES, MOST_PUBLISHED, NewRecord, PutTopic,
        ReadFrom, ReadTopic, TopicPage, TopicRecord, to_rfc_3339,
    },
    wire::topics::read_from,
};

/// The settings of a topic. Those that are left out stay, or are the defaults.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "the settings of a topic")]
#[schemars(rename = "PutTopic")]
pub(in crate::ingress) struct Settings {
    /// 1 to 256; they only grow. Without it 1.
    partitions: Option<u32>,
    /// How long a record stays; without it 24h.
    retention_age: Option<Time>,
    /// How many records stay, in all partitions together; without it 1000000.
    retention_records: Option<u64>,
    /// How many bytes of records stay, in all partitions together; without it 536870912.
    retention_bytes: Option<u64>,
    /// Attach a topic that somebody else has made on Kafka: taskd never makes, trims or deletes it.
    attached: Option<bool>,
}

pub(in crate::ingress) fn settings(body: &Bytes) -> Result<PutTopic, Unread> {
    let settings: Settings = object(body)?;
    Ok(PutTopic {
        partitions: settings.partitions,
        retention_age: settings.retention_age.map(|time| time.0),
        retention_records: settings.retention_records,
        retention_bytes: settings.retention_bytes,
        attached: settings.attached,
    })
}

/// A record to publish.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "a record")]
pub(in crate::ingress) struct Record<'a> {
    /// Any JSON value. Readers get it byte for byte; a string is its text.
    #[serde(borrow)]
    value: Option<&'a RawValue>,
    /// Bytes, in place of `value`.
    #[schemars(extend("contentEncoding" = "base64"))]
    value_base64: Option<String>,
    /// Records with the same key keep their order: at most 4,096 bytes.
    key: String,
    /// Bytes, in place of `key`.
    #[schemars(extend("contentEncoding" = "base64"))]
    key_base64: Option<String>,
    /// Texts by name; a name may have several values. At most 64 values and 16 KiB.
    #[serde(borrow)]
    #[schemars(with = "Option<BTreeMap<String, TextOrTexts>>")]
    attributes: Option<&'a RawValue>,
    /// What tells a repeat from another record: at most 256 bytes.
    id: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum TextOrTexts {
    One(String),
    More(Vec<String>),
}

/// No attributes within their bounds have a longer text, even if each character is escaped.
const LONGEST_ATTRIBUTES: usize = 8 * MAX_ATTRIBUTES_BYTES;

/// One record or an array of them, as [`records`] reads them.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "only the document of the API has this type")]
pub(in crate::ingress) enum OneOrMoreRecords<'a> {
    One(Box<Record<'a>>),
    More(Vec<Record<'a>>),
}

/// Reads one record or an array of them. Returns whether it was one.
pub(in crate::ingress) fn records(
    body: &Bytes,
) -> Result<(Vec<Result<NewRecord, String>>, bool), Unread> {
    if first_byte(body) != Some(b'[') {
        let record: &RawValue = serde_json::from_slice(body)?;
        return Ok((vec![record_within(body, record.get())], true));
    }
    let records: AtMost<&RawValue, MOST_PUBLISHED> = serde_json::from_slice(body)?;
    let read = |record: &RawValue| record_within(body, record.get());
    Ok((records.0.into_iter().map(read).collect(), false))
}

/// Reads a record from a line.
pub(in crate::ingress) fn record(line: &Bytes) -> Result<NewRecord, String> {
    record_within(line, utf8(line)?)
}

fn record_within(body: &Bytes, text: &str) -> Result<NewRecord, String> {
    let record: Record<'_> = item(text, "a record")?;
    let (value, encoding) = read(body, "value", record.value, record.value_base64)?;
    let key = match (record.key, record.key_base64) {
        (key, None) => key.into_bytes(),
        (key, Some(base64)) if key.is_empty() => BASE64
            .decode(base64)
            .map_err(|error| format!("key_base64 is not base64: {error}"))?,
        _ => return Err("key and key_base64 are both given; use one".to_owned()),
    };
    Ok(NewRecord {
        value,
        key: key.into(),
        attributes: attributes(record.attributes)?,
        id: record.id,
        is_text: encoding == Encoding::Text,
    })
}

/// Reads attributes. The bounds are looked at before anything is copied, because a name is copied
/// for each of its values.
fn attributes(text: Option<&RawValue>) -> Result<Vec<(String, String)>, String> {
    let Some(text) = text.map(RawValue::get) else {
        return Ok(Vec::new());
    };
    if text.len() > LONGEST_ATTRIBUTES {
        return Err(format!(
            "attributes have more than {MAX_ATTRIBUTES_BYTES} bytes"
        ));
    }
    let by_name: BTreeMap<String, TextOrTexts> = serde_json::from_str(text)
        .map_err(|_| "attributes must be an object of texts, or lists of texts".to_owned())?;
    let counts = by_name.values().map(|values| match values {
        TextOrTexts::One(_) => 1,
        TextOrTexts::More(values) => values.len(),
    });
    let count: usize = counts.sum();
    if count > MAX_ATTRIBUTES {
        return Err(format!(
            "attributes have {count} values; at most {MAX_ATTRIBUTES}"
        ));
    }
    let mut attributes = Vec::with_capacity(count);
    for (name, values) in by_name {
        match values {
            TextOrTexts::One(value) => attributes.push((name, value)),
            TextOrTexts::More(values) => {
                attributes.extend(values.into_iter().map(|value| (name.clone(), value)));
            }
        }
    }
    Ok(attributes)
}

/// Reads the query of a page.
pub(in crate::ingress) fn page_of_query(query: &str) -> Result<ReadTopic, String> {
    let mut request = ReadTopic {
        from: ReadFrom::First,
        partition: None,
        limit: 0,
        wait: Duration::ZERO,
    };
    for (name, value) in parameters(query)? {
        let number = || value.parse().map_err(|_| not_a_number(&name, &value));
        match &*name {
            "from" => request.from = read_from(&value)?,
            "partition" => request.partition = Some(number()?),
            "limit" => request.limit = number()?,
            "wait" => {
                let wait: Time = value.parse().map_err(|why| format!("wait: {why}"))?;
                request.wait = wait.0;
            }
            // The router knows no others.
            _ => {}
        }
    }
    Ok(request)
}

/// Reads the place of a record from the query: its partition (0 if it is left out) and its offset.
pub(in crate::ingress) fn place_of_query(query: &str) -> Result<(u32, String), String> {
    let mut partition = 0;
    let mut offset = String::new();
    for (name, value) in parameters(query)? {
        match &*name {
            "partition" => partition = value.parse().map_err(|_| not_a_number(&name, &value))?,
            "offset" => offset = value,
            // The router knows no others.
            _ => {}
        }
    }
    Ok((partition, offset))
}

/// Records of a topic.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "TopicPage")]
pub(in crate::ingress) struct Page<'a> {
    records: Vec<Shows<'a>>,
    /// Where the next page begins: its `from`.
    next: &'a str,
}

/// A record of a topic.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "TopicRecord")]
pub(in crate::ingress) struct Shows<'a> {
    partition: u32,
    offset: String,
    #[schemars(with = "Instant")]
    published_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    value_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("contentEncoding" = "base64"))]
    key_base64: Option<String>,
    /// The values of each name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<&'a str, Vec<&'a str>>,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
}

impl<'a> From<&'a TopicPage> for Page<'a> {
    fn from(page: &'a TopicPage) -> Self {
        Self {
            records: page.records.iter().map(Shows::from).collect(),
            next: &page.next,
        }
    }
}

impl<'a> From<&'a TopicRecord> for Shows<'a> {
    fn from(read: &'a TopicRecord) -> Self {
        let record = &read.record;
        let encoding = match record.is_text {
            true => Encoding::Text,
            false => Encoding::Unknown,
        };
        let shown = Shown::of(&record.value, encoding);
        let key = std::str::from_utf8(&record.key);
        let mut attributes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, value) in &record.attributes {
            attributes.entry(name).or_default().push(value);
        }
        Self {
            partition: read.partition,
            offset: read.offset.to_string(),
            published_at: to_rfc_3339(read.published_unix_ms),
            value: shown.value,
            value_base64: shown.base64,
            key: key.ok().filter(|key| !key.is_empty()),
            key_base64: key.is_err().then(|| BASE64.encode(&record.key)),
            attributes,
            id: &record.id,
        }
    }
}
