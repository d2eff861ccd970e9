//! Reads YAML 1.2, of which JSON is a part, into a tree of values with their places.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError, Span, Tag};
use serde_json::Number;

use super::{
    Mistake,
    node::{At, Data, Entry, Node, pointer_to},
};
use crate::model::{ECHO, json, shorten};

/// The largest definition.
pub const MAX_DEFINITION_BYTES: usize = 256 << 10;
/// The most values of a definition, with copies in the places of aliases.
const MOST_VALUES: usize = 50_000;
/// The longest name of a field, in bytes.
const LONGEST_NAME: usize = 4096;
/// The largest sum of its texts, with the same copies.
const MOST_TEXT: usize = 4 * MAX_DEFINITION_BYTES;

/// Reads a document. Returns it unless it is unreadable, and the mistakes that concern its form.
pub(super) fn read(text: &str) -> (Option<Node>, Vec<Mistake>) {
    let mut builder = Builder::default();
    if text.len() > MAX_DEFINITION_BYTES {
        let bytes = text.len();
        let says = format!("the definition has {bytes} bytes; at most {MAX_DEFINITION_BYTES}");
        builder.wrong(At { line: 1, column: 1 }, says);
        return (None, builder.mistakes);
    }
    for event in Parser::new_from_str(text) {
        let step = match event {
            Ok((event, span)) => builder.take(event, &span),
            Err(error) => {
                builder.unreadable(&error);
                Err(Unreadable)
            }
        };
        if step.is_err() {
            return (None, builder.mistakes);
        }
    }
    if builder.root.is_none() {
        let says = "the definition is empty".to_owned();
        builder.wrong(At { line: 1, column: 1 }, says);
    }
    (builder.root, builder.mistakes)
}

/// The rest cannot be read.
struct Unreadable;

/// A list or an object of which the end has not come yet.
struct Open {
    at: At,
    anchor: usize,
    content: Content,
}

enum Content {
    List(Vec<Node>),
    Object {
        entries: Vec<Entry>,
        names: HashSet<String>,
        /// The name whose value comes next.
        next: Option<(String, At)>,
    },
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    root: Option<Node>,
    anchors: HashMap<usize, Anchored>,
    values: usize,
    text: usize,
    mistakes: Vec<Mistake>,
}

/// A value to which aliases may refer.
struct Anchored {
    node: Node,
    values: usize,
    text: usize,
    levels: usize,
}

impl Builder {
    fn wrong(&mut self, at: At, says: String) {
        let pointer = self.pointer();
        self.mistakes.push(Mistake {
            line: at.line,
            column: at.column,
            pointer,
            says,
        });
    }

    fn unreadable(&mut self, error: &ScanError) {
        let marker = error.marker();
        let at = At {
            line: marker.line(),
            column: marker.col() + 1,
        };
        let remedy = match error.kind() {
            ErrorKind::RecursionLimitExceeded => {
                self.wrong(at, too_deep());
                return;
            }
            ErrorKind::UnexpectedCharacter { .. } => ": put the text in quotes",
            _ if error.info().contains("mapping values") => {
                ": put a text with a colon in quotes, or mend the indentation"
            }
            _ => "",
        };
        let says = format!("this is no YAML: {}{remedy}", error.info());
        self.wrong(at, says);
    }

    /// Where the next value is.
    fn pointer(&self) -> String {
        let mut pointer = String::new();
        for open in &self.open {
            match &open.content {
                Content::List(values) => {
                    pointer = pointer_to(&pointer, &values.len().to_string());
                }
                Content::Object { next, .. } => {
                    if let Some((name, _)) = next {
                        pointer = pointer_to(&pointer, name);
                    }
                }
            }
        }
        pointer
    }

    fn take(&mut self, event: Event<'_>, span: &Span) -> Result<(), Unreadable> {
        let at = At {
            line: span.start.line(),
            column: span.start.col() + 1,
        };
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                if let Some((name, at)) = self.name(&text, style, at) {
                    if name.len() > LONGEST_NAME {
                        let says = format!("this name has more than {LONGEST_NAME} bytes");
                        self.wrong(at, says);
                        return Err(Unreadable);
                    }
                    self.check_tag(at, tag.as_deref(), "str");
                    self.begin_entry(name, at, anchor);
                    return Ok(());
                }
                self.count(at, 1, text.len())?;
                let data = self.scalar(at, &text, style, tag.as_deref());
                self.add(Node { at, data }, anchor)?;
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse_name(at)?;
                self.check_tag(at, tag.as_deref(), "seq");
                self.begin(at, anchor, Content::List(Vec::new()))?;
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse_name(at)?;
                self.check_tag(at, tag.as_deref(), "map");
                let content = Content::Object {
                    entries: Vec::new(),
                    names: HashSet::new(),
                    next: None,
                };
                self.begin(at, anchor, content)?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    let data = match open.content {
                        Content::List(values) => Data::List(values),
                        Content::Object { entries, .. } => Data::Object(entries),
                    };
                    self.add(Node { at: open.at, data }, open.anchor)?;
                }
            }
            Event::Alias(anchor) => self.copy(at, anchor)?,
            Event::DocumentStart(..) if self.root.is_some() => {
                let says = "a second document begins: one definition in a file".to_owned();
                self.wrong(at, says);
                return Err(Unreadable);
            }
            _ => {}
        }
        Ok(())
    }

    /// The name of a field, if one is due.
    fn name(&mut self, text: &str, style: ScalarStyle, at: At) -> Option<(String, At)> {
        let Some(Open {
            content: Content::Object { next: None, .. },
            ..
        }) = self.open.last()
        else {
            return None;
        };
        if matches!(style, ScalarStyle::Plain) {
            let says = match text {
                "" | "~" => Some("the name of a field is missing"),
                "<<" => Some("YAML 1.2 has no merge keys (<<): write the fields out"),
                _ => None,
            };
            if let Some(says) = says {
                self.wrong(at, says.to_owned());
            }
        }
        Some((text.to_owned(), at))
    }

    fn begin_entry(&mut self, name: String, at: At, anchor: usize) {
        if anchor != 0 {
            let node = Node {
                at,
                data: Data::Text(name.clone()),
            };
            self.anchor(anchor, node, 1, name.len());
        }
        self.text += name.len();
        let mut is_known = false;
        if let Some(Open {
            content: Content::Object { names, next, .. },
            ..
        }) = self.open.last_mut()
        {
            is_known = !names.insert(name.clone());
            *next = Some((name, at));
        }
        if is_known {
            self.wrong(at, "this name is there already: two of one name".to_owned());
        }
    }

    /// Refuses a list or an object in the place of a name.
    fn refuse_name(&mut self, at: At) -> Result<(), Unreadable> {
        if let Some(Open {
            content: Content::Object { next: None, .. },
            ..
        }) = self.open.last()
        {
            self.wrong(at, "the name of a field must be a text".to_owned());
            return Err(Unreadable);
        }
        Ok(())
    }

    fn begin(&mut self, at: At, anchor: usize, content: Content) -> Result<(), Unreadable> {
        self.count(at, 1, 0)?;
        self.check_depth(at, self.open.len() + 1)?;
        self.open.push(Open {
            at,
            anchor,
            content,
        });
        Ok(())
    }

    fn check_depth(&mut self, at: At, levels: usize) -> Result<(), Unreadable> {
        if levels > json::MAX_DEPTH {
            self.wrong(at, too_deep());
            return Err(Unreadable);
        }
        Ok(())
    }

    fn count(&mut self, at: At, values: usize, text: usize) -> Result<(), Unreadable> {
        self.values += values;
        self.text += text;
        if self.values > MOST_VALUES {
            let says = format!("the definition has more than {MOST_VALUES} values");
            self.wrong(at, says);
            return Err(Unreadable);
        }
        if self.text > MOST_TEXT {
            let says = format!(
                "the definition has more than {MOST_TEXT} bytes with its aliases written out"
            );
            self.wrong(at, says);
            return Err(Unreadable);
        }
        Ok(())
    }

    /// Puts a copy in the place of an alias.
    fn copy(&mut self, at: At, anchor: usize) -> Result<(), Unreadable> {
        let Some(anchored) = self.anchors.get(&anchor) else {
            self.wrong(at, "this alias is inside of what it stands for".to_owned());
            return Err(Unreadable);
        };
        let (values, text, levels) = (anchored.values, anchored.text, anchored.levels);
        self.count(at, values, text)?;
        self.check_depth(at, self.open.len() + levels)?;
        let node = self.anchors[&anchor].node.clone();
        if let Some(Open {
            content: Content::Object { next: None, .. },
            ..
        }) = self.open.last()
        {
            match node.data {
                Data::Text(name) => self.begin_entry(name, at, 0),
                _ => {
                    self.wrong(at, "the name of a field must be a text".to_owned());
                    return Err(Unreadable);
                }
            }
            return Ok(());
        }
        self.add(node, 0)
    }

    fn anchor(&mut self, anchor: usize, node: Node, values: usize, text: usize) {
        let levels = levels(&node);
        self.anchors.insert(
            anchor,
            Anchored {
                node,
                values,
                text,
                levels,
            },
        );
    }

    /// Adds a complete value to what is open.
    fn add(&mut self, node: Node, anchor: usize) -> Result<(), Unreadable> {
        if anchor != 0 {
            let (values, text) = size(&node);
            // The copy that is kept counts, too.
            self.count(node.at, values, text)?;
            self.anchor(anchor, node.clone(), values, text);
        }
        match self.open.last_mut().map(|open| &mut open.content) {
            None => self.root = Some(node),
            Some(Content::List(values)) => values.push(node),
            Some(Content::Object { entries, next, .. }) => {
                if let Some((name, at)) = next.take() {
                    entries.push(Entry {
                        name,
                        at,
                        value: node,
                    });
                }
            }
        }
        Ok(())
    }

    fn check_tag(&mut self, at: At, tag: Option<&Tag>, wanted: &str) {
        let Some(tag) = tag else { return };
        if tag.core_suffix() != Some(wanted) {
            let shown = tag.original();
            let shown = shorten(&shown, ECHO);
            self.wrong(at, format!("tag {shown} means nothing here: leave it out"));
        }
    }

    fn scalar(&mut self, at: At, text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Data {
        let is_plain = matches!(style, ScalarStyle::Plain);
        let data = match tag.map(Tag::core_suffix) {
            Some(Some("str")) => return Data::Text(text.to_owned()),
            None if !is_plain => return Data::Text(text.to_owned()),
            _ => plain(text),
        };
        let data = data.unwrap_or_else(|says| {
            self.wrong(at, says);
            Data::Null
        });
        let has_type = match tag.map(Tag::core_suffix) {
            None => true,
            Some(Some("null")) => matches!(data, Data::Null),
            Some(Some("bool")) => matches!(data, Data::Bool(_)),
            Some(Some("int")) => matches!(&data, Data::Number(number) if !number.is_f64()),
            Some(Some("float")) => matches!(data, Data::Number(_)),
            Some(_) => false,
        };
        if !has_type {
            let shown = tag.map(Tag::original).unwrap_or_default();
            let shown = shorten(&shown, ECHO);
            self.wrong(at, format!("tag {shown} means nothing here: leave it out"));
        }
        data
    }
}

fn too_deep() -> String {
    format!(
        "lists and objects are more than {} deep in each other",
        json::MAX_DEPTH
    )
}

/// How deep lists and objects are in a value.
fn levels(node: &Node) -> usize {
    let inner = |values: &mut dyn Iterator<Item = &Node>| values.map(levels).max().unwrap_or(0);
    match &node.data {
        Data::List(values) => 1 + inner(&mut values.iter()),
        Data::Object(entries) => 1 + inner(&mut entries.iter().map(|entry| &entry.value)),
        _ => 0,
    }
}

/// How many values it has, and how much text.
fn size(node: &Node) -> (usize, usize) {
    let mut sum = (1, 0);
    let mut add = |(values, text)| {
        sum.0 += values;
        sum.1 += text;
    };
    match &node.data {
        Data::Text(text) => add((0, text.len())),
        Data::List(values) => values.iter().for_each(|value| add(size(value))),
        Data::Object(entries) => entries.iter().for_each(|entry| {
            add((0, entry.name.len()));
            add(size(&entry.value));
        }),
        _ => {}
    }
    sum
}

/// Reads a text without quotes by YAML's core schema.
fn plain(text: &str) -> Result<Data, String> {
    let data = match text {
        "" | "~" | "null" | "Null" | "NULL" => Data::Null,
        "true" | "True" | "TRUE" => Data::Bool(true),
        "false" | "False" | "FALSE" => Data::Bool(false),
        _ => match number(text) {
            Some(number) => Data::Number(number?),
            None => Data::Text(text.to_owned()),
        },
    };
    Ok(data)
}

/// Reads a number. `None` if it looks like none.
fn number(text: &str) -> Option<Result<Number, String>> {
    let too_large = || {
        let shown = shorten(text, ECHO);
        format!("the number {shown} does not fit: put it in quotes")
    };
    let based = |digits: &str, base| {
        let is_valid = !digits.is_empty() && digits.chars().all(|c| c.is_digit(base));
        is_valid.then(|| {
            let number = u64::from_str_radix(digits, base).map_err(|_| too_large());
            number.map(Number::from)
        })
    };
    if let Some(digits) = text.strip_prefix("0x") {
        return based(digits, 16);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return based(digits, 8);
    }
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(
        unsigned,
        ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN"
    ) {
        return Some(Err(format!("JSON has no number {text}")));
    }
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (unsigned, None),
    };
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let is_number = are_digits(whole)
        && fraction.is_none_or(are_digits)
        && !(whole.is_empty() && fraction.is_none_or(str::is_empty))
        && exponent.is_none_or(|exponent| {
            let digits = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
            !digits.is_empty() && are_digits(digits)
        });
    if !is_number {
        return None;
    }
    if fraction.is_none() && exponent.is_none() {
        let digits = text.strip_prefix('+').unwrap_or(text);
        let number = match digits.parse::<u64>() {
            Ok(number) => Ok(number.into()),
            Err(_) => digits.parse::<i64>().map(Number::from),
        };
        return Some(number.map_err(|_| too_large()));
    }
    let text: Cow<'_, str> = text.into();
    let number = text.parse().ok().and_then(Number::from_f64);
    Some(number.ok_or_else(too_large))
}
