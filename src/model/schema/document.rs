//! A payload in the form that the validator reads: a flat list of values, and a count of the steps
//! that the check takes.
//!
//! The crate `jsonschema` does not limit its work: with some schemas its time grows exponentially
//! with the size of the payload. But it reads a payload only through the types of this module, so
//! each access to a value takes a step, and a check that has no steps left ends immediately. The
//! list takes 32 bytes per value, whereas a tree of objects can take a hundred times the size of
//! its text.

use std::{
    any::Any,
    borrow::Cow,
    cell::Cell,
    collections::HashSet,
    fmt,
    panic::{self, AssertUnwindSafe},
};

use jsonschema::{
    JsonType,
    json::{Array, Json, Node, NodeIdentity, Object, cmp},
};
use jsonschema_value::LazyInstance;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// How many bytes of a string one step covers.
const STEP_BYTES: usize = 16;
/// The maximum stack size of a check, in bytes. A thread has twice as much.
const STACK_BYTES: usize = 1 << 20;
/// Approximately how much of a payload's text errors may copy, in bytes. Messages are shorter.
const SHOWN_BYTES: usize = 2048;
/// Up to this many names are compared with each other. More names are put into a set.
const FEW_NAMES: usize = 8;

/// Implements `jsonschema`'s representation of payloads.
pub(super) struct Payload;

/// A parsed payload.
pub(super) struct Document<'a> {
    /// Each value is followed by its parts, in order. A member of an object is stored as its name,
    /// then its value.
    entries: Vec<Entry<'a>>,
    steps: Cell<u64>,
    /// The stack position when the check began.
    stack: Cell<usize>,
    shows: Cell<Shows>,
    shown: Cell<usize>,
}

/// What the document shows to the validator.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shows {
    /// Everything.
    All,
    /// Everything until the first error. After it, the validator would collect the errors of each
    /// branch of a union, recursively: their number grows exponentially, and nobody reads them.
    UntilError,
    /// Nothing more: each value looks like `null`.
    Nulls,
}

enum Entry<'a> {
    Null,
    Bool(bool),
    Number(Number),
    Text(Cow<'a, str>),
    /// `end` is the index after its last part.
    Array {
        len: usize,
        end: usize,
    },
    Object {
        len: usize,
        end: usize,
    },
}

static NULL: Entry<'static> = Entry::Null;

// docs/queues.md says how much memory a payload takes.
const _: () = assert!(size_of::<Entry<'_>>() <= 32);

/// Why a check ended without a result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    OutOfSteps,
    OutOfStack,
    /// The validator panicked.
    Panicked(String),
}

impl<'a> Document<'a> {
    pub(super) fn text(text: &'a str) -> Self {
        Self::of(vec![Entry::Text(Cow::Borrowed(text))])
    }

    pub(super) fn null() -> Self {
        Self::of(vec![Entry::Null])
    }

    pub(super) fn read(json: &'a [u8]) -> serde_json::Result<Self> {
        let mut entries = Vec::new();
        let mut reader = serde_json::Deserializer::from_slice(json);
        Reader(&mut entries).deserialize(&mut reader)?;
        reader.end()?;
        Ok(Self::of(entries))
    }

    fn of(entries: Vec<Entry<'a>>) -> Self {
        Self {
            entries,
            steps: Cell::new(0),
            stack: Cell::new(stack()),
            shows: Cell::new(Shows::All),
            shown: Cell::new(SHOWN_BYTES),
        }
    }

    /// Returns a name that occurs twice in one object.
    pub(super) fn repeated_name(&self) -> Option<&str> {
        (0..self.entries.len()).find_map(|at| self.repeated_name_of(at))
    }

    fn repeated_name_of(&self, at: usize) -> Option<&str> {
        let Entry::Object { len, end } = self.entries[at] else {
            return None;
        };
        let mut names = Members(Parts {
            document: self,
            next: at + 1,
            len,
            end,
        })
        .names();
        if len > FEW_NAMES {
            let mut seen = HashSet::with_capacity(len);
            return names.find(|name| !seen.insert(*name));
        }
        let mut seen = Vec::with_capacity(len);
        names.find(|name| {
            let is_repeated = seen.contains(name);
            seen.push(*name);
            is_repeated
        })
    }

    /// Lets the validator read the payload in at most `most` steps. Returns its result and the
    /// number of steps taken.
    pub(super) fn check<T>(
        &'a self,
        most: u64,
        check: impl FnOnce(Place<'a>) -> T,
    ) -> (Result<T, Stopped>, u64) {
        self.shows.set(Shows::All);
        self.run(most, check)
    }

    /// Lets the validator find the first error in at most `most` steps.
    pub(super) fn explain<T>(
        &'a self,
        most: u64,
        explain: impl FnOnce(Place<'a>) -> T,
    ) -> (Result<T, Stopped>, u64) {
        self.shows.set(Shows::UntilError);
        self.run(most, explain)
    }

    fn run<T>(&'a self, most: u64, work: impl FnOnce(Place<'a>) -> T) -> (Result<T, Stopped>, u64) {
        self.steps.set(most);
        self.stack.set(stack());
        self.shown.set(SHOWN_BYTES);
        let root = Place {
            document: self,
            at: 0,
        };
        // Unwinding is safe, because validators keep no state of a check.
        let result = panic::catch_unwind(AssertUnwindSafe(|| work(root))).map_err(why);
        (result, most - self.steps.get())
    }

    fn take_steps(&self, count: usize) {
        let Some(left) = self.steps.get().checked_sub(count as u64) else {
            self.steps.set(0);
            panic::resume_unwind(Box::new(Stopped::OutOfSteps));
        };
        self.steps.set(left);
        if self.stack.get().abs_diff(stack()) > STACK_BYTES {
            panic::resume_unwind(Box::new(Stopped::OutOfStack));
        }
    }

    /// Returns the index after a value and its parts.
    fn after(&self, at: usize) -> usize {
        match self.entries[at] {
            Entry::Array { end, .. } | Entry::Object { end, .. } => end,
            _ => at + 1,
        }
    }

    fn string(&self, at: usize) -> &str {
        match &self.entries[at] {
            Entry::Text(text) => text,
            _ => "",
        }
    }
}

fn why(panic: Box<dyn Any + Send>) -> Stopped {
    match panic.downcast::<Stopped>() {
        Ok(stopped) => *stopped,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            Stopped::Panicked(
                text.or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_default(),
            )
        }
    }
}

/// Returns the present stack position. The validator recurses for each level of the payload and of
/// the schema.
#[inline]
fn stack() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(std::hint::black_box(&here)).addr()
}

/// Adds a value and its parts to the list.
struct Reader<'d, 'a>(&'d mut Vec<Entry<'a>>);

impl<'de> DeserializeSeed<'de> for Reader<'_, 'de> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0.push(Entry::Null);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.0.push(Entry::Bool(value));
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0.push(Entry::Number(value.into()));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0.push(Entry::Number(value.into()));
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        // JSON has no other numbers, so NaN and infinity do not occur.
        self.0
            .push(Number::from_f64(value).map_or(Entry::Null, Entry::Number));
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<(), E> {
        self.0.push(Entry::Text(Cow::Borrowed(text)));
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.push(Entry::Text(Cow::Owned(text.to_owned())));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self(entries) = self;
        let at = entries.len();
        entries.push(Entry::Null);
        let mut len = 0;
        while items.next_element_seed(Reader(entries))?.is_some() {
            len += 1;
        }
        let end = entries.len();
        entries[at] = Entry::Array { len, end };
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let Self(entries) = self;
        let at = entries.len();
        entries.push(Entry::Null);
        let mut len = 0;
        while members.next_key_seed(Reader(entries))?.is_some() {
            members.next_value_seed(Reader(entries))?;
            len += 1;
        }
        let end = entries.len();
        entries[at] = Entry::Object { len, end };
        Ok(())
    }
}

/// A value of a payload.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    document: &'a Document<'a>,
    at: usize,
}

/// The items of an array, or the members of an object.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    document: &'a Document<'a>,
    next: usize,
    len: usize,
    end: usize,
}

pub(super) struct Items<'a>(Parts<'a>);

pub(super) struct Members<'a>(Parts<'a>);

impl<'a> Members<'a> {
    /// Iterates over the names without taking steps.
    fn names(self) -> impl Iterator<Item = &'a str> {
        let Parts {
            document,
            next,
            end,
            ..
        } = self.0;
        let is_name = move |place: &usize| *place < end;
        let following = move |place: &usize| Some(document.after(*place + 1)).filter(is_name);
        let places = std::iter::successors(Some(next).filter(is_name), following);
        places.map(|place| document.string(place))
    }
}

impl<'a> Place<'a> {
    /// Takes a step, and returns the entry.
    fn entry(&self) -> &'a Entry<'a> {
        self.document.take_steps(1);
        match self.document.shows.get() {
            Shows::All | Shows::UntilError => &self.document.entries[self.at],
            Shows::Nulls => &NULL,
        }
    }

    fn parts(&self, len: usize, end: usize) -> Parts<'a> {
        Parts {
            document: self.document,
            next: self.at + 1,
            len,
            end,
        }
    }

    /// A copy of the value for an error, limited to [`SHOWN_BYTES`] for the whole check. The rest
    /// is left out, because no message shows it.
    fn shown(&self) -> Value {
        let document = self.document;
        let left = &document.shown;
        let take = |bytes: usize| left.set(left.get().saturating_sub(bytes));
        take(2);
        match &document.entries[self.at] {
            Entry::Null => Value::Null,
            Entry::Bool(value) => Value::Bool(*value),
            Entry::Number(number) => Value::Number(number.clone()),
            Entry::Text(text) => {
                let text = &text[..text.floor_char_boundary(left.get())];
                take(text.len());
                Value::String(text.to_owned())
            }
            Entry::Array { len, end } => {
                let items = Items(self.parts(*len, *end));
                Value::Array(
                    items
                        .take_while(|_| left.get() > 0)
                        .map(|item| item.shown())
                        .collect(),
                )
            }
            Entry::Object { len, end } => {
                let members = Members(self.parts(*len, *end)).take_while(|_| left.get() > 0);
                let members = members.map(|(name, value)| {
                    take(name.len());
                    (name.to_owned(), value.shown())
                });
                Value::Object(members.collect::<Map<_, _>>())
            }
        }
    }

    fn equals(&self, expected: &Value) -> bool {
        match (self.entry(), expected) {
            (Entry::Null, Value::Null) => true,
            (Entry::Bool(one), Value::Bool(other)) => one == other,
            (Entry::Number(one), Value::Number(other)) => cmp::equal_numbers(one, other),
            (Entry::Text(one), Value::String(other)) => *one == **other,
            (Entry::Array { len, end }, Value::Array(others)) => {
                let items = Items(self.parts(*len, *end));
                *len == others.len() && items.zip(others).all(|(item, other)| item.equals(other))
            }
            (Entry::Object { len, end }, Value::Object(others)) => {
                let mut members = Members(self.parts(*len, *end));
                // Names are unique, so it is enough to look up each of them.
                *len == others.len()
                    && members.all(|(name, value)| {
                        others.get(name).is_some_and(|other| value.equals(other))
                    })
            }
            _ => false,
        }
    }

    /// Writes the value such that equal values have equal texts.
    fn write_canonical(&self, text: &mut String) {
        match self.entry() {
            Entry::Null => text.push('n'),
            Entry::Bool(true) => text.push('t'),
            Entry::Bool(false) => text.push('f'),
            Entry::Number(number) => write_number(number, text),
            Entry::Text(string) => {
                self.document.take_steps(string.len() / STEP_BYTES);
                write_string(string, text);
            }
            Entry::Array { len, end } => {
                text.push('[');
                for item in Items(self.parts(*len, *end)) {
                    item.write_canonical(text);
                }
                text.push(']');
            }
            Entry::Object { len, end } => {
                text.push('{');
                let mut members: Vec<_> = Members(self.parts(*len, *end)).collect();
                members.sort_unstable_by_key(|(name, _)| *name);
                for (name, value) in members {
                    write_string(name, text);
                    value.write_canonical(text);
                }
                text.push('}');
            }
        }
    }
}

/// Writes a string with its length, so that one string cannot look like two.
fn write_string(string: &str, text: &mut String) {
    text.push_str(&string.len().to_string());
    text.push('"');
    text.push_str(string);
}

/// Writes a number by its value: 1 and 1.0 are equal.
fn write_number(number: &Number, text: &mut String) {
    let float = number.as_f64().unwrap_or_default();
    let integer = number
        .as_i64()
        .map(i128::from)
        .or_else(|| number.as_u64().map(i128::from));
    // Whole numbers of this size fit into `i128`.
    #[allow(clippy::cast_possible_truncation)]
    let whole = (float.fract() == 0.0 && float.abs() < 1e30).then_some(float as i128);
    match integer.or(whole) {
        Some(integer) => text.push_str(&integer.to_string()),
        None => text.push_str(&format!("{float:e}")),
    }
    text.push(',');
}

impl Json for Payload {
    type Node<'a> = Place<'a>;
    type PreparedKey = String;
    type StringBuffer = ();

    const KEYS_PER_LOOKUP: usize = 8;
    const ACYCLIC: bool = true;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>((): &mut (), string: &str, f: impl FnOnce(Place<'_>) -> T) -> T {
        let document = Document::text(string);
        // A string has no parts, so the check cannot read them repeatedly.
        document.steps.set(u64::MAX);
        f(Place {
            document: &document,
            at: 0,
        })
    }
}

impl<'a> Node<'a, Payload> for Place<'a> {
    type Object = Parts<'a>;
    type Array = Parts<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Parts<'a>> {
        match self.entry() {
            Entry::Object { len, end } => Some(self.parts(*len, *end)),
            _ => None,
        }
    }

    fn as_array(&self) -> Option<Parts<'a>> {
        match self.entry() {
            Entry::Array { len, end } => Some(self.parts(*len, *end)),
            _ => None,
        }
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        match self.entry() {
            Entry::Text(text) => {
                self.document.take_steps(text.len() / STEP_BYTES);
                Some(Cow::Borrowed(text))
            }
            _ => None,
        }
    }

    fn as_number(&self) -> Option<&'a Number> {
        match self.entry() {
            Entry::Number(number) => Some(number),
            _ => None,
        }
    }

    fn as_boolean(&self) -> Option<bool> {
        match self.entry() {
            Entry::Bool(value) => Some(*value),
            _ => None,
        }
    }

    fn is_null(&self) -> bool {
        matches!(self.entry(), Entry::Null)
    }

    fn json_type(&self) -> JsonType {
        match self.entry() {
            Entry::Null => JsonType::Null,
            Entry::Bool(_) => JsonType::Boolean,
            Entry::Number(_) => JsonType::Number,
            Entry::Text(_) => JsonType::String,
            Entry::Array { .. } => JsonType::Array,
            Entry::Object { .. } => JsonType::Object,
        }
    }

    fn equals_value(&self, expected: &Value) -> bool {
        self.equals(expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        Cow::Owned(if self.document.shown.get() == 0 {
            Value::Null
        } else {
            self.shown()
        })
    }

    /// The value for an error. After the first error only nulls are shown: the validator creates
    /// the error of a union before those of its branches.
    fn lazy_value(&self) -> LazyInstance<'a> {
        let value = self.to_value();
        if self.document.shows.get() == Shows::UntilError {
            self.document.shows.set(Shows::Nulls);
        }
        LazyInstance::Ready(value)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        self.document.take_steps(1);
        Some(NodeIdentity::new(
            std::ptr::from_ref(&self.document.entries[self.at]).addr(),
        ))
    }
}

impl<'a> Object<'a, Payload> for Parts<'a> {
    type Node = Place<'a>;
    type MemberName = &'a str;
    type MembersIter = Members<'a>;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, key: &String) -> Option<Place<'a>> {
        Members(*self)
            .find(|(name, _)| name == key)
            .map(|(_, value)| value)
    }

    fn members(&self) -> Members<'a> {
        Members(*self)
    }
}

impl<'a> Array<'a, Payload> for Parts<'a> {
    type Node = Place<'a>;
    type ElementsIter = Items<'a>;

    fn len(&self) -> usize {
        self.len
    }

    fn elements(&self) -> Items<'a> {
        Items(*self)
    }

    fn is_unique(&self) -> bool {
        let mut seen = HashSet::with_capacity(self.len);
        Items(*self).all(|item| {
            let mut text = String::new();
            item.write_canonical(&mut text);
            seen.insert(text)
        })
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Place<'a>;

    fn next(&mut self) -> Option<Place<'a>> {
        let Parts {
            document,
            next,
            end,
            ..
        } = self.0;
        if next == end {
            return None;
        }
        document.take_steps(1);
        self.0.next = document.after(next);
        Some(Place { document, at: next })
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, Place<'a>);

    fn next(&mut self) -> Option<(&'a str, Place<'a>)> {
        let Parts {
            document,
            next,
            end,
            ..
        } = self.0;
        if next == end {
            return None;
        }
        let name = document.string(next);
        document.take_steps(1 + name.len() / STEP_BYTES);
        self.0.next = document.after(next + 1);
        Some((
            name,
            Place {
                document,
                at: next + 1,
            },
        ))
    }
}
