//! Large answers as JSON that is written piece by piece, while the client reads.
//!
//! In JSON a byte of text may take six, so a whole answer may take far more memory than its
//! payloads. Here only one piece of it exists at a time.

use std::{collections::VecDeque, vec};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::model::Encoding;

/// A piece is sent when it has reached this size. It may exceed it by one [`CHUNK`] in escaped
/// form.
const PIECE: usize = 64 << 10;
/// How many bytes of a value are written at a time: a multiple of three, so that base64 needs no
/// padding.
const CHUNK: usize = 12 << 10;

/// A payload or a result that is written piece by piece. The kinds are those of
/// [`Shown`](super::value::Shown).
pub(in crate::ingress) enum Large {
    Nothing,
    Json(Bytes),
    Text(Bytes),
    Base64(Bytes),
}

impl Large {
    pub(super) fn of(bytes: Bytes, encoding: Encoding) -> Self {
        if bytes.is_empty() {
            return Self::Nothing;
        }
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Self::Base64(bytes);
        };
        match encoding {
            Encoding::Bytes => Self::Base64(bytes),
            Encoding::Text => Self::Text(bytes),
            Encoding::Json | Encoding::Unknown => {
                let is_json = serde_json::from_str::<&RawValue>(text).is_ok();
                if is_json {
                    Self::Json(bytes)
                } else {
                    Self::Text(bytes)
                }
            }
        }
    }

    pub(super) fn encoding(&self) -> Option<&'static str> {
        match self {
            Self::Nothing => None,
            Self::Json(_) => Some("json"),
            Self::Text(_) => Some("text"),
            Self::Base64(_) => Some("bytes"),
        }
    }
}

/// Bytes of an object, and how they are written.
enum Part {
    AsItIs(Bytes),
    /// UTF-8, to be escaped.
    Escaped(Bytes),
    Base64(Bytes),
}

impl Part {
    /// Moves the first bytes of the part into `piece`. Returns true if there are more.
    fn write(&mut self, piece: &mut Vec<u8>) -> bool {
        let (Self::AsItIs(bytes) | Self::Escaped(bytes) | Self::Base64(bytes)) = self;
        let mut length = bytes.len().min(CHUNK);
        if length < bytes.len() {
            // Do not split a character.
            while bytes[length] & 0xc0 == 0x80 && length > CHUNK - 4 {
                length -= 1;
            }
        }
        match self {
            Self::AsItIs(bytes) => piece.extend_from_slice(&bytes.split_to(length)),
            Self::Escaped(bytes) => {
                let chunk = bytes.split_to(length);
                let quoted =
                    serde_json::to_vec(&String::from_utf8_lossy(&chunk)).expect("text is JSON");
                piece.extend_from_slice(&quoted[1..quoted.len() - 1]);
            }
            Self::Base64(bytes) => {
                let length = bytes.len().min(CHUNK);
                piece.extend_from_slice(BASE64.encode(bytes.split_to(length)).as_bytes());
            }
        }
        let (Self::AsItIs(bytes) | Self::Escaped(bytes) | Self::Base64(bytes)) = self;
        !bytes.is_empty()
    }
}

/// An object whose large values come after its other fields.
pub(in crate::ingress) struct Entry {
    parts: VecDeque<Part>,
    has_fields: bool,
}

impl Entry {
    /// Begins an object with the fields of `object`.
    pub(in crate::ingress) fn new(object: &impl Serialize) -> Self {
        let mut text = serde_json::to_vec(object).expect("texts, numbers and times are JSON");
        let closing = text.pop();
        debug_assert_eq!(closing, Some(b'}'), "an object");
        let has_fields = text.len() > 1;
        Self {
            parts: [Part::AsItIs(text.into())].into(),
            has_fields,
        }
    }

    fn text(&mut self, text: impl Into<Bytes>) {
        self.parts.push_back(Part::AsItIs(text.into()));
    }

    fn name(&mut self, name: &str, behind: &str) {
        let comma = if self.has_fields { "," } else { "" };
        self.has_fields = true;
        self.text(format!("{comma}\"{name}\":{behind}"));
    }

    /// Adds the field `name`, or `name` with `_base64` if the value is bytes.
    pub(super) fn value(&mut self, name: &str, value: Large) {
        let part = match value {
            Large::Nothing => return,
            Large::Json(bytes) => {
                self.name(name, "");
                self.parts.push_back(Part::AsItIs(bytes));
                return;
            }
            Large::Text(bytes) => {
                self.name(name, "\"");
                Part::Escaped(bytes)
            }
            Large::Base64(bytes) => {
                self.name(&format!("{name}_base64"), "\"");
                Part::Base64(bytes)
            }
        };
        self.parts.push_back(part);
        self.text("\"");
    }

    /// Adds a list of objects.
    pub(super) fn list(&mut self, name: &str, entries: impl Iterator<Item = Self>) {
        self.name(name, "[");
        for (place, entry) in entries.enumerate() {
            if place > 0 {
                self.text(",");
            }
            self.parts.extend(entry.parts);
        }
        self.text("]");
    }

    /// Ends the object.
    pub(super) fn end(mut self) -> Self {
        self.text("}");
        self
    }

    /// Moves the next bytes into `piece`. Returns false if there are none.
    fn write(&mut self, piece: &mut Vec<u8>) -> bool {
        let Some(part) = self.parts.front_mut() else {
            return false;
        };
        if !part.write(piece) {
            self.parts.pop_front();
        }
        true
    }
}

/// An object whose last field is a list. The entries come in pages, and each becomes JSON when the
/// previous one has been written.
struct List<P, T> {
    pages: P,
    page: vec::IntoIter<T>,
    entry: fn(T) -> Entry,
    /// What is being written.
    at_hand: Entry,
    is_first: bool,
    is_over: bool,
}

impl<T, E, P: Stream<Item = Result<Vec<T>, E>> + Unpin> List<P, T> {
    async fn next(&mut self) -> Result<Option<Bytes>, E> {
        let mut piece = Vec::new();
        while piece.len() < PIECE {
            if self.at_hand.write(&mut piece) {
                continue;
            }
            if let Some(item) = self.page.next() {
                if !std::mem::take(&mut self.is_first) {
                    piece.push(b',');
                }
                self.at_hand = (self.entry)(item);
            } else if self.is_over {
                break;
            } else if let Some(page) = self.pages.next().await {
                self.page = page?.into_iter();
            } else {
                self.is_over = true;
                self.at_hand.text("]}");
            }
        }
        Ok((!piece.is_empty()).then(|| piece.into()))
    }
}

/// Writes `head`, an object without its end, and after its fields the list `name` with the entries
/// of all pages. If a page fails, the text breaks off.
pub(in crate::ingress) fn list<T, E, P>(
    mut head: Entry,
    name: &str,
    pages: P,
    entry: fn(T) -> Entry,
) -> impl Stream<Item = Result<Bytes, E>> + Send + use<T, E, P>
where
    T: Send,
    E: Send,
    P: Stream<Item = Result<Vec<T>, E>> + Send + Unpin,
{
    head.name(name, "[");
    let list = List {
        pages,
        page: Vec::new().into_iter(),
        entry,
        at_hand: head,
        is_first: true,
        is_over: false,
    };
    stream::unfold(Some(list), async |list| {
        let mut list = list?;
        match list.next().await {
            Ok(piece) => Some((Ok(piece?), Some(list))),
            Err(error) => Some((Err(error), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::TryStreamExt as _;
    use serde_json::{Value, json};

    use super::{super::value::Shown, *};

    fn entry(value: (Bytes, Encoding)) -> Entry {
        let value = Large::of(value.0, value.1);
        let mut entry = Entry::new(&json!({"encoding": value.encoding()}));
        entry.value("v", value);
        entry.end()
    }

    async fn written(head: Value, values: Vec<Vec<(Bytes, Encoding)>>) -> (Value, usize) {
        let pages = stream::iter(values.into_iter().map(Ok::<_, Infallible>));
        let pieces: Vec<Bytes> = list(Entry::new(&head), "list", pages, entry)
            .try_collect()
            .await
            .unwrap();
        let largest = pieces.iter().map(Bytes::len).max().unwrap();
        (serde_json::from_slice(&pieces.concat()).unwrap(), largest)
    }

    #[tokio::test]
    async fn values_are_those_of_answers_that_are_built_whole() {
        let long = |text: &str| Bytes::from(text.repeat(100_000 / text.len()));
        let values = [
            (Bytes::new(), Encoding::Text),
            (long("\u{1}"), Encoding::Text),
            (long("x\"\\\n\t\u{7f}é€𝄞"), Encoding::Text),
            (long("€"), Encoding::Text),
            (long("𝄞x"), Encoding::Unknown),
            (
                Bytes::from(format!("[\"{}\"]", "ö".repeat(50_000))),
                Encoding::Json,
            ),
            (Bytes::from_static(b"{\"a\":  1.50}"), Encoding::Unknown),
            (long("not JSON"), Encoding::Json),
            (long("bytes"), Encoding::Bytes),
            (vec![0xff; 100_001].into(), Encoding::Text),
        ];
        let pages = vec![values[..3].to_vec(), Vec::new(), values[3..].to_vec()];
        let (answer, largest) = written(json!({"granted": 1}), pages).await;
        assert_eq!(answer["granted"], 1);
        assert!(largest <= PIECE + 6 * CHUNK, "{largest}");
        for ((bytes, encoding), entry) in values.iter().zip(answer["list"].as_array().unwrap()) {
            let shown = Shown::of(bytes, *encoding);
            let mut expected = json!({"encoding": shown.encoding});
            if let Some(value) = shown.value {
                expected["v"] = json!(value);
            }
            if let Some(base64) = shown.base64 {
                expected["v_base64"] = json!(base64);
            }
            assert!(*entry == expected, "{encoding:?} {:.60}", entry.to_string());
        }
    }

    #[tokio::test]
    async fn a_list_may_be_empty_and_within_another() {
        assert_eq!(written(json!({}), Vec::new()).await.0, json!({"list": []}));
        let mut outer = Entry::new(&json!({"id": 1}));
        let values = ["a", "b"].map(|text| (Bytes::from(text), Encoding::Text));
        outer.list("inner", values.into_iter().map(entry));
        let mut outer = outer.end();
        let mut text = Vec::new();
        while outer.write(&mut text) {}
        let expected = json!({"id": 1, "inner": [{"encoding": "text", "v": "a"}, {"encoding": "text", "v": "b"}]});
        assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), expected);
    }

    #[tokio::test]
    async fn a_page_that_cannot_be_read_breaks_the_answer_off() {
        let pages = stream::iter([Ok(vec![(Bytes::from("x"), Encoding::Text)]), Err("gone")]);
        let pieces: Vec<_> = list(Entry::new(&json!({})), "list", pages, entry)
            .collect()
            .await;
        assert_eq!(pieces, [Err("gone")]);
    }
}
