//! What an expression reads of its input and of its variables, so that only that is copied for an
//! evaluation: `$context.color` should not cost more because the context is large.

use std::collections::BTreeSet;

use jaq_core::load::lex::StrPart;
use jaq_core::load::parse::{BinaryOp, Term};
use jaq_core::path::Part;
use serde_json::Value as Json;

use super::value::{Text, Val};

/// How much of a value is read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    all: bool,
    /// These properties, where the value is an object.
    properties: BTreeSet<String>,
}

impl Need {
    /// Returns what a term may read of its input. It is rather too much than too little.
    pub(super) fn of(term: &Term<&str>) -> Need {
        let mut need = Need::default();
        need.read(term);
        need
    }

    pub(super) fn add_all(&mut self) {
        self.all = true;
    }

    pub(super) fn add(&mut self, property: &str) {
        self.properties.insert(property.to_owned());
    }

    /// Copies what is needed of a value.
    pub(super) fn copy(&self, json: &Json) -> Val {
        match json {
            Json::Object(properties) if !self.all => {
                let needed = self.properties.iter().filter_map(|name| {
                    let value = Val::from_json(properties.get(name)?);
                    Some((Text::new(name.as_str()), value))
                });
                Val::object(needed)
            }
            // Whoever reads a property of something else gets an error that shows it.
            _ if self.all || !self.properties.is_empty() => Val::from_json(json),
            _ => Val::Null,
        }
    }

    fn read(&mut self, term: &Term<&str>) {
        match term {
            Term::Num(_) | Term::Var(_) | Term::Break(_) => {}
            Term::Str(_, parts) => {
                for part in parts {
                    if let StrPart::Term(term) = part {
                        self.read(term);
                    }
                }
            }
            Term::Arr(term) => term.iter().for_each(|term| self.read(term)),
            Term::Obj(properties) => {
                for (name, value) in properties {
                    match (value, property(name)) {
                        (Some(value), _) => {
                            self.read(name);
                            self.read(value);
                        }
                        (None, Some(name)) => self.add(name),
                        (None, None) => self.add_all(),
                    }
                }
            }
            Term::Neg(term) | Term::Label(_, term) | Term::Def(_, term) => self.read(term),
            // The right side of a pipe gets what the left gives.
            Term::BinOp(left, BinaryOp::Pipe(None), _) => self.read(left),
            Term::BinOp(left, operator, right) => match operator {
                BinaryOp::Assign
                | BinaryOp::Update
                | BinaryOp::UpdateMath(_)
                | BinaryOp::UpdateAlt => self.add_all(),
                _ => {
                    self.read(left);
                    self.read(right);
                }
            },
            Term::IfThenElse(cases, Some(otherwise)) => {
                for (when, then) in cases {
                    self.read(when);
                    self.read(then);
                }
                self.read(otherwise);
            }
            Term::Path(term, path) => {
                let mut parts = path.0.iter().map(|(part, _)| part).peekable();
                let first = parts.peek().and_then(|part| match part {
                    Part::Index(index) => property(index),
                    Part::Range(..) => None,
                });
                match (&**term, first) {
                    (Term::Id, Some(name)) => self.add(name),
                    (term, _) => self.read(term),
                }
                for part in parts {
                    match part {
                        Part::Index(index) => self.read(index),
                        Part::Range(from, to) => {
                            from.iter().chain(to).for_each(|bound| self.read(bound));
                        }
                    }
                }
            }
            Term::Call("true" | "false" | "null", arguments) if arguments.is_empty() => {}
            Term::Id
            | Term::Recurse
            | Term::Call(..)
            | Term::Fold(..)
            | Term::TryCatch(..)
            | Term::IfThenElse(_, None) => self.add_all(),
        }
    }
}

/// Returns the text of a string without expressions or escapes.
pub(super) fn property<'s>(term: &Term<&'s str>) -> Option<&'s str> {
    match term {
        Term::Str(None, parts) => match parts.as_slice() {
            [StrPart::Str(text)] => Some(text),
            _ => None,
        },
        _ => None,
    }
}
