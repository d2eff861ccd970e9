//! What all parts of the reader use: mistakes, and values of simple types.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    Mistake, Period, Place, expressions,
    node::{At, Data, Entry, Node, not_yet, object, pointer_to},
    period,
};
use crate::model::{ECHO, PayloadSchema, is_hidden, nearest, printable, shorten};

/// The most mistakes that are named.
const MOST_MISTAKES: usize = 100;
/// The longest message, in bytes.
const LONGEST_MESSAGE: usize = 1000;
/// The most expressions. Compiling one takes half a millisecond.
const MOST_EXPRESSIONS: usize = 10_000;
/// The longest name of a task, a function and the like, in bytes.
const LONGEST_NAME: usize = 128;

/// A value in the document, and the way to it.
#[derive(Clone)]
pub(super) struct Spot<'n> {
    pub(super) node: &'n Node,
    /// Where its name is. Of a value without a name: where it begins itself.
    pub(super) key: At,
    pub(super) pointer: String,
}

impl<'n> Spot<'n> {
    /// The values of a list.
    pub(super) fn items(&self) -> Option<Vec<Spot<'n>>> {
        let Data::List(values) = &self.node.data else {
            return None;
        };
        let of_item = |(place, node): (usize, &'n Node)| Spot {
            node,
            key: node.at,
            pointer: pointer_to(&self.pointer, &place.to_string()),
        };
        Some(values.iter().enumerate().map(of_item).collect())
    }

    pub(super) fn text(&self) -> Option<&'n str> {
        match &self.node.data {
            Data::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_object(&self) -> bool {
        matches!(self.node.data, Data::Object(_))
    }
}

/// The fields of an object.
#[derive(Clone)]
pub(super) struct Fields<'n> {
    pub(super) spot: Spot<'n>,
    pub(super) entries: &'n [Entry],
}

impl<'n> Fields<'n> {
    pub(super) fn get(&self, name: &str) -> Option<Spot<'n>> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        Some(self.of(entry))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&'n str, Spot<'n>)> + '_ {
        self.entries
            .iter()
            .map(|entry| (entry.name.as_str(), self.of(entry)))
    }

    fn of(&self, entry: &'n Entry) -> Spot<'n> {
        Spot {
            node: &entry.value,
            key: entry.at,
            pointer: pointer_to(&self.spot.pointer, &entry.name),
        }
    }
}

/// The names of the variables that an expression may use, without `$`.
pub(super) type Scope = Vec<String>;

/// Checks the expressions in a text, as [`expressions::check`] does.
pub(super) type Check = fn(&str, bool, &[String]) -> Result<(), String>;

/// The mistakes found so far.
pub(super) struct Reader {
    check: Check,
    /// How many expressions there have been, those behind a name at each use.
    expressions: usize,
    mistakes: Vec<Mistake>,
    /// The policies of `use.retries` to which a task has referred.
    pub(super) used_retries: BTreeSet<String>,
}

impl Reader {
    pub(super) fn new(mistakes: Vec<Mistake>, check: Check) -> Self {
        Self {
            check,
            expressions: 0,
            mistakes,
            used_retries: BTreeSet::new(),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.mistakes.len()
    }

    /// Drops the mistakes that came after this many.
    pub(super) fn forget_after(&mut self, count: usize) {
        self.mistakes.truncate(count);
    }

    pub(super) fn has_mistakes(&self) -> bool {
        !self.mistakes.is_empty()
    }

    /// All mistakes, in the order of the text.
    pub(super) fn into_mistakes(mut self) -> Vec<Mistake> {
        self.mistakes.sort();
        // What stands behind an alias or a name is read wherever it is used.
        self.mistakes
            .dedup_by(|a, b| (a.line, a.column, &a.says) == (b.line, b.column, &b.says));
        self.mistakes.truncate(MOST_MISTAKES);
        for mistake in &mut self.mistakes {
            mistake.says = printable(&shorten(&mistake.says, LONGEST_MESSAGE));
            mistake.pointer = shorten(&mistake.pointer, LONGEST_MESSAGE).into_owned();
        }
        self.mistakes
    }

    fn push(&mut self, at: At, pointer: &str, says: String) {
        self.mistakes.push(Mistake {
            line: at.line,
            column: at.column,
            pointer: pointer.to_owned(),
            says,
        });
    }

    pub(super) fn wrong_at(&mut self, place: &Place, says: String) {
        let at = At {
            line: place.line,
            column: place.column,
        };
        self.push(at, &place.pointer, says);
    }

    /// Something is wrong with a value.
    pub(super) fn wrong(&mut self, spot: &Spot<'_>, says: impl Into<String>) {
        self.push(spot.node.at, &spot.pointer, says.into());
    }

    /// Something is wrong with a name, or with the whole of what has it.
    pub(super) fn wrong_name(&mut self, spot: &Spot<'_>, says: impl Into<String>) {
        self.push(spot.key, &spot.pointer, says.into());
    }

    pub(super) fn missing(&mut self, fields: &Fields<'_>, name: &str, example: &str) {
        let says = format!("{name} is missing: {example}");
        self.wrong_name(&fields.spot, says);
    }

    /// A field that later versions have. `instead` says what works today.
    pub(super) fn not_yet(&mut self, spot: &Spot<'_>, what: &str, instead: &str) {
        self.wrong_name(spot, not_yet(what, instead));
    }

    /// Refuses all fields but these.
    pub(super) fn only(&mut self, fields: &Fields<'_>, known: &[&str]) {
        for (name, spot) in fields.all() {
            if !known.contains(&name) {
                self.unknown(&spot, name, known);
            }
        }
    }

    pub(super) fn unknown(&mut self, spot: &Spot<'_>, name: &str, known: &[&str]) {
        let near = self.near(name, known.iter().copied());
        let name = shorten(name, ECHO);
        let known = known.join(", ");
        self.wrong_name(
            spot,
            format!("unknown field {name:?}; {near}expected {known}"),
        );
    }

    /// `did you mean …? `, if a known name is near.
    pub(super) fn near<'k>(&self, name: &str, known: impl Iterator<Item = &'k str>) -> String {
        // Comparing takes time, and of many mistakes only the first are named.
        if self.mistakes.len() > MOST_MISTAKES || name.len() > LONGEST_NAME {
            return String::new();
        }
        let near = nearest(name, known.filter(|known| known.len() <= LONGEST_NAME));
        near.map_or_else(String::new, |near| format!("did you mean {near}? "))
    }

    /// A name refers to nothing.
    pub(super) fn unresolved<'k>(
        &mut self,
        spot: &Spot<'_>,
        name: &str,
        what: &str,
        known: impl IntoIterator<Item = &'k str>,
    ) {
        let known: Vec<&str> = known.into_iter().collect();
        let near = self.near(name, known.iter().copied());
        let name = shorten(name, ECHO);
        let there = match known.as_slice() {
            [] => "there is none".to_owned(),
            [one] => format!("there is {one}"),
            known if known.len() > 10 => format!("there are {}", known.len()),
            known => format!("there are {}", known.join(", ")),
        };
        self.wrong(spot, format!("there is no {what} {name:?}; {near}{there}"));
    }

    pub(super) fn object<'n>(&mut self, what: &str, spot: &Spot<'n>) -> Option<Fields<'n>> {
        match &spot.node.data {
            Data::Object(entries) => Some(Fields {
                spot: spot.clone(),
                entries,
            }),
            _ => {
                let kind = spot.node.kind();
                self.wrong(spot, format!("{what} must be an object; this is {kind}"));
                None
            }
        }
    }

    /// An object whose values are data.
    pub(super) fn map(&mut self, what: &str, spot: &Spot<'_>) -> Option<Map<String, Value>> {
        self.object(what, spot).map(|fields| object(fields.entries))
    }

    pub(super) fn list<'n>(&mut self, what: &str, spot: &Spot<'n>) -> Option<Vec<Spot<'n>>> {
        let items = spot.items();
        if items.is_none() {
            let kind = spot.node.kind();
            self.wrong(spot, format!("{what} must be a list; this is {kind}"));
        }
        items
    }

    /// The one field of an object in a list, such as a task with its name.
    pub(super) fn named<'n>(&mut self, what: &str, spot: &Spot<'n>) -> Option<(&'n str, Spot<'n>)> {
        let says = format!("{what} must be an object with one field, its name: - name: …");
        let Data::Object(entries) = &spot.node.data else {
            self.wrong(spot, says);
            return None;
        };
        let fields = Fields {
            spot: spot.clone(),
            entries,
        };
        match entries.as_slice() {
            [entry] => {
                let spot = fields.of(entry);
                self.check_name(what, &spot, &entry.name);
                Some((&entry.name, spot))
            }
            [_, second, ..] => {
                let second = fields.of(second);
                self.wrong_name(&second, format!("{says}; this is a second one"));
                None
            }
            [] => {
                self.wrong(spot, says);
                None
            }
        }
    }

    /// Checks a name that its author chose.
    pub(super) fn check_name(&mut self, what: &str, spot: &Spot<'_>, name: &str) {
        let is_plain = name.chars().all(|c| !c.is_control() && !is_hidden(c));
        if name.is_empty() || name.len() > LONGEST_NAME || !is_plain {
            let name = shorten(name, ECHO);
            let says = format!(
                "{what} {name:?}: a name has 1 to {LONGEST_NAME} bytes without control characters"
            );
            self.wrong_name(spot, says);
        }
    }

    pub(super) fn text<'n>(&mut self, what: &str, spot: &Spot<'n>) -> Option<&'n str> {
        let text = spot.text();
        if text.is_none() {
            let says = match &spot.node.data {
                Data::Number(_) | Data::Bool(_) => {
                    let kind = spot.node.kind();
                    format!("{what} must be a text; this is {kind}: put it in quotes")
                }
                _ => format!("{what} must be a text; this is {}", spot.node.kind()),
            };
            self.wrong(spot, says);
        }
        text
    }

    pub(super) fn owned(&mut self, what: &str, spot: &Spot<'_>) -> Option<String> {
        self.text(what, spot).map(ToOwned::to_owned)
    }

    pub(super) fn flag(&mut self, what: &str, spot: &Spot<'_>) -> Option<bool> {
        match spot.node.data {
            Data::Bool(flag) => Some(flag),
            _ => {
                self.wrong(spot, format!("{what} must be true or false"));
                None
            }
        }
    }

    pub(super) fn whole(&mut self, what: &str, spot: &Spot<'_>) -> Option<i64> {
        let number = match &spot.node.data {
            Data::Number(number) => number.as_i64(),
            _ => None,
        };
        if number.is_none() {
            self.wrong(spot, format!("{what} must be a whole number"));
        }
        number
    }

    /// One of some values.
    pub(super) fn one_of<T: Copy>(
        &mut self,
        what: &str,
        spot: &Spot<'_>,
        known: &[(&str, T)],
    ) -> Option<T> {
        let text = self.text(what, spot)?;
        let found = known.iter().find(|(name, _)| *name == text);
        if found.is_none() {
            let text = shorten(text, ECHO);
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let says = format!("{what} is {text:?}; expected {}", names.join(", "));
            self.wrong(spot, says);
        }
        found.map(|(_, value)| *value)
    }

    pub(super) fn period(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<Period> {
        match &spot.node.data {
            Data::Text(text) if is_expression(text) => {
                self.check_expression(spot, text, scope);
                Some(Period::Expression(text.clone()))
            }
            Data::Text(text) => match period::iso_8601(text) {
                Ok(ms) => Some(Period::Fixed(ms)),
                Err(says) => {
                    self.wrong(spot, format!("{what}: {says}"));
                    None
                }
            },
            Data::Object(entries) => {
                let fields = Fields {
                    spot: spot.clone(),
                    entries,
                };
                self.units(what, &fields)
            }
            _ => {
                let says =
                    format!("{what} must be a duration: {{ seconds: 30 }}, or PT30S in ISO 8601");
                self.wrong(spot, says);
                None
            }
        }
    }

    fn units(&mut self, what: &str, fields: &Fields<'_>) -> Option<Period> {
        let mut sum = Some(0_u128);
        for (name, spot) in fields.all() {
            match period::unit(name, &spot.node.to_value()) {
                Ok(ms) => sum = sum.map(|sum| sum + ms),
                Err(says) => {
                    sum = None;
                    if period::is_unit(name) {
                        self.wrong(&spot, format!("{what}: {says}"));
                    } else {
                        self.wrong_name(&spot, format!("{what}: {says}"));
                    }
                }
            }
        }
        match period::total(sum?, !fields.entries.is_empty()) {
            Ok(ms) => Some(Period::Fixed(ms)),
            Err(says) => {
                self.wrong(&fields.spot, format!("{what}: {says}"));
                None
            }
        }
    }

    /// A text that is an expression, bare or wrapped.
    pub(super) fn condition(
        &mut self,
        what: &str,
        spot: &Spot<'_>,
        scope: &Scope,
    ) -> Option<String> {
        let text = self.text(what, spot)?;
        self.check_expression(spot, text, scope);
        Some(text.to_owned())
    }

    /// An expression, bare or wrapped, or an object of which each text may hold expressions.
    pub(super) fn transform(
        &mut self,
        what: &str,
        spot: &Spot<'_>,
        scope: &Scope,
    ) -> Option<Value> {
        match &spot.node.data {
            Data::Text(text) => self.check_expression(spot, text, scope),
            Data::Object(_) => self.check_templates(spot, scope),
            _ => {
                let kind = spot.node.kind();
                let says = format!("{what} must be an expression or an object; this is {kind}");
                self.wrong(spot, says);
                return None;
            }
        }
        Some(spot.node.to_value())
    }

    /// A text that may hold wrapped expressions.
    pub(super) fn template(
        &mut self,
        what: &str,
        spot: &Spot<'_>,
        scope: &Scope,
    ) -> Option<String> {
        let text = self.text(what, spot)?;
        self.check_templates(spot, scope);
        Some(text.to_owned())
    }

    /// An object of texts that may hold expressions, or a text that is an expression.
    pub(super) fn texts(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<Value> {
        match &spot.node.data {
            Data::Text(text) if is_expression(text) => {}
            Data::Object(entries) => {
                let fields = Fields {
                    spot: spot.clone(),
                    entries,
                };
                for (name, value) in fields.all() {
                    let name = shorten(name, ECHO);
                    self.text(&format!("{what}.{name}"), &value);
                }
            }
            _ => {
                let says = format!("{what} must be an object of texts, or an expression: ${{ … }}");
                self.wrong(spot, says);
                return None;
            }
        }
        self.check_templates(spot, scope);
        Some(spot.node.to_value())
    }

    /// A URI in which `{name}` and expressions are replaced.
    pub(super) fn uri(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<String> {
        let text = self.template(what, spot, scope)?;
        let has_expressions = text.contains("${");
        if !has_expressions && (text.is_empty() || text.chars().any(char::is_whitespace)) {
            let text = shorten(&text, ECHO);
            let says = format!("{what} is {text:?}, which is no URI");
            self.wrong(spot, says);
        }
        Some(text)
    }

    /// Checks the expressions in all texts of a value.
    pub(super) fn check_templates(&mut self, spot: &Spot<'_>, scope: &Scope) {
        match &spot.node.data {
            Data::Text(text) => self.check_text(spot, text, false, scope),
            Data::List(_) => {
                for item in spot.items().unwrap_or_default() {
                    self.check_templates(&item, scope);
                }
            }
            Data::Object(entries) => {
                let fields = Fields {
                    spot: spot.clone(),
                    entries,
                };
                for (_, value) in fields.all() {
                    self.check_templates(&value, scope);
                }
            }
            _ => {}
        }
    }

    fn check_expression(&mut self, spot: &Spot<'_>, text: &str, scope: &Scope) {
        self.check_text(spot, text, true, scope);
    }

    fn check_text(&mut self, spot: &Spot<'_>, text: &str, is_bare: bool, scope: &Scope) {
        let before = self.expressions;
        self.expressions += text.matches("${").count().max(is_bare.into());
        if self.expressions == before || before > MOST_EXPRESSIONS {
            return;
        }
        let checked = if self.expressions > MOST_EXPRESSIONS {
            Err(format!(
                "the definition has more than {MOST_EXPRESSIONS} expressions"
            ))
        } else {
            (self.check)(text, is_bare, scope)
        };
        if let Err(says) = checked {
            self.wrong(spot, says);
        }
    }

    /// Checks that a JSON schema compiles.
    pub(super) fn check_schema(&mut self, spot: &Spot<'_>) {
        let text = spot.node.to_value().to_string();
        if let Err(says) = PayloadSchema::compile(&text) {
            self.wrong(spot, format!("schema.document: {says}"));
        }
    }

    /// The name of a variable.
    pub(super) fn variable(&mut self, what: &str, spot: &Spot<'_>) -> Option<String> {
        let name = self.text(what, spot)?;
        let mut letters = name.chars();
        let is_name = letters
            .next()
            .is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
            && name.len() <= LONGEST_NAME;
        let shown = shorten(name, ECHO);
        if !is_name {
            let says = format!(
                "{what} is {shown:?}; a variable has 1 to {LONGEST_NAME} letters, digits and _, without $"
            );
            self.wrong(spot, says);
        } else if expressions::VARIABLES.contains(&name) || name == expressions::OUTPUT {
            let says = format!("{what} is {shown:?}, a variable that is there already");
            self.wrong(spot, says);
        }
        Some(name.to_owned())
    }
}

/// Whether a text is an expression as a whole: `${ … }`.
pub(super) fn is_expression(text: &str) -> bool {
    let inner = text.trim().strip_prefix("${");
    inner.is_some_and(|inner| inner.len() > 1 && inner.ends_with('}'))
}
