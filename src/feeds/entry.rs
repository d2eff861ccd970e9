//! What an entry of a stream says.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde_json::{Map, Value as Json, map::Entry};

use super::{
    reply,
    source::{FeedContent, FeedRecord},
};
use crate::model::RedisStream;

pub(super) fn record(
    settings: &RedisStream,
    (reference, fields): reply::Entry,
    may_be_repeated: bool,
) -> FeedRecord {
    FeedRecord {
        reference,
        may_be_repeated,
        content: fields.map(|fields| content(&settings.payload, fields)),
    }
}

/// What an entry says. The field `payload` is the payload, and the others are headers; if it is
/// empty or absent, all fields are the payload, as a JSON object of texts. A name that comes several times
/// has a list of them.
fn content(payload: &str, fields: Vec<(Bytes, Bytes)>) -> FeedContent {
    let is_payload = |name: &Bytes| !payload.is_empty() && name == payload.as_bytes();
    if fields.iter().any(|(name, _)| is_payload(name)) {
        let mut content = FeedContent::default();
        for (name, value) in fields {
            if is_payload(&name) {
                content.payload = value;
            } else {
                let name = String::from_utf8_lossy(&name).into_owned();
                content.attributes.push((name, value));
            }
        }
        return content;
    }
    let mut object = Map::new();
    for (name, value) in fields {
        let name = String::from_utf8_lossy(&name).into_owned();
        let (name, value) = match std::str::from_utf8(&value) {
            Ok(text) => (name, Json::from(text)),
            Err(_) => (format!("{name}_base64"), BASE64.encode(&value).into()),
        };
        match object.entry(name) {
            Entry::Vacant(place) => {
                place.insert(value);
            }
            Entry::Occupied(mut place) => match place.get_mut() {
                Json::Array(values) => values.push(value),
                first => *first = Json::Array(vec![first.take(), value]),
            },
        }
    }
    FeedContent {
        payload: Json::Object(object).to_string().into(),
        attributes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(pairs: &[(&'static str, &'static [u8])]) -> Vec<(Bytes, Bytes)> {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (Bytes::from(*name), Bytes::from_static(value)))
            .collect()
    }

    #[test]
    fn the_fields_of_an_entry_are_its_payload() {
        let entry = fields(&[("url", b"http://a/"), ("raw", b"\xff")]);
        let all = content("", entry.clone());
        assert_eq!(
            all.payload,
            "{\"raw_base64\":\"/w==\",\"url\":\"http://a/\"}"
        );
        assert!(all.attributes.is_empty());
        assert_eq!(
            content("data", entry.clone()),
            all,
            "there is no such field"
        );
        let twice = content(
            "",
            fields(&[("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"4")]),
        );
        assert_eq!(twice.payload, "{\"a\":[\"1\",\"3\",\"4\"],\"b\":\"2\"}");
        let one = content("url", entry);
        assert_eq!(one.payload, "http://a/");
        assert_eq!(
            one.attributes,
            [("raw".to_owned(), Bytes::from_static(b"\xff"))]
        );
    }
}
