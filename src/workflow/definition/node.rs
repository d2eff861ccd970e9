//! A document as a tree of values that know where they are.

use serde_json::{Map, Number, Value};

/// A position in the text. Both count from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A value.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: At,
    pub(super) data: Data,
}

#[derive(Clone, Debug)]
pub(super) enum Data {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Object(Vec<Entry>),
}

/// A field of an object.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Where the name is.
    pub(super) at: At,
    pub(super) value: Node,
}

impl Node {
    pub(super) fn to_value(&self) -> Value {
        match &self.data {
            Data::Null => Value::Null,
            Data::Bool(flag) => Value::Bool(*flag),
            Data::Number(number) => Value::Number(number.clone()),
            Data::Text(text) => Value::String(text.clone()),
            Data::List(values) => values.iter().map(Self::to_value).collect(),
            Data::Object(entries) => Value::Object(object(entries)),
        }
    }

    /// What it is, in a message.
    pub(super) fn kind(&self) -> &'static str {
        match &self.data {
            Data::Null => "empty",
            Data::Bool(_) => "a truth value",
            Data::Number(_) => "a number",
            Data::Text(_) => "a text",
            Data::List(_) => "a list",
            Data::Object(_) => "an object",
        }
    }
}

pub(super) fn object(entries: &[Entry]) -> Map<String, Value> {
    entries
        .iter()
        .map(|entry| (entry.name.clone(), entry.value.to_value()))
        .collect()
}

/// Appends a name or a number to a JSON pointer.
pub(super) fn pointer_to(pointer: &str, name: &str) -> String {
    let name = name.replace('~', "~0").replace('/', "~1");
    format!("{pointer}/{name}")
}

/// What to say of something that later versions have.
pub(super) fn not_yet(what: &str, instead: &str) -> String {
    format!("this version of taskd does not do {what} yet; {instead}")
}
