//! Puts ticks into a parsed expression, so that nothing loops, recurses or branches without paying.
//!
//! A tick is a filter that returns its input. It stands before the body of each definition, before
//! the update of each `reduce` and `foreach`, to the right of each comma (else `(.,.) | (.,.) | …`
//! doubles for nothing), and before every few levels of nesting, so that little stack is used from
//! one tick to the next. Its weight grows with the size of what follows. Where a definition calls a
//! function that it was given, as in `def f(g): f(g | g)`, stands a cheaper one, because `map(g)`
//! does that for every element.

use std::collections::{BTreeMap, BTreeSet};

use jaq_core::load::lex::StrPart;
use jaq_core::load::parse::{BinaryOp, Def, Pattern, Term};
use jaq_core::load::{Arena, span};
use jaq_core::path::{Part, Path};

use super::need::{Need, property};

/// The names of the ticks. No expression can write them. Each weighs twice as much as the one
/// before.
pub(super) const TICKS: [&str; 10] = [
    "!tick1", "!tick2", "!tick4", "!tick8", "!tick16", "!tick32", "!tick64", "!tick128",
    "!tick256", "!tick512",
];

/// The name of the tick before a call of a function that is a parameter.
pub(super) const CALL: &str = "!call";

/// A variable of jq that stands for the place where it is written.
const LOCATION: &str = "$__loc__";

/// From how many terms on a tick weighs two.
const TERMS_PER_FUEL: usize = 16;

/// After how many levels of nesting a tick follows.
const LEVELS: usize = 12;

/// What an expression refers to.
#[derive(Default)]
pub(super) struct Names<'s> {
    /// The parameters that are functions, of the definitions around.
    parameters: Vec<&'s str>,
    /// The text of the expression, and where new texts are kept.
    text: Option<(&'s str, &'s Arena)>,
    /// Functions, with their number of arguments.
    pub(super) functions: BTreeSet<(&'s str, usize)>,
    /// Variables, with their `$`, and what is read of them.
    pub(super) variables: BTreeMap<&'s str, Need>,
}

impl<'s> Names<'s> {
    pub(super) fn of(text: &'s str, arena: &'s Arena) -> Names<'s> {
        Names {
            text: Some((text, arena)),
            ..Names::default()
        }
    }

    /// Whether a function of this name with this many arguments is called, or may be.
    pub(super) fn calls(&self, name: &str, arguments: usize) -> bool {
        name == CALL || TICKS.contains(&name) || self.functions.contains(&(name, arguments))
    }

    /// Puts ticks into the definition and its body.
    pub(super) fn fence(&mut self, definition: Def<&'s str>) -> Def<&'s str> {
        let outer = self.parameters.len();
        let functions = definition.args.iter().filter(|name| !name.starts_with('$'));
        self.parameters.extend(functions);
        let mut terms = 0;
        let body = self.inner(definition.body, 0, &mut terms);
        self.parameters.truncate(outer);
        Def {
            name: definition.name,
            args: definition.args,
            body: ticked(body, terms),
        }
    }

    /// A term in whose place a tick may stand.
    fn term(&mut self, term: Term<&'s str>, level: usize, terms: &mut usize) -> Term<&'s str> {
        if level < LEVELS || matches!(term, Term::Id | Term::Num(_) | Term::Var(_)) {
            return self.inner(term, level + 1, terms);
        }
        self.paid(term, terms)
    }

    /// A term with a tick before it. What it costs is not counted above it.
    fn paid(&mut self, term: Term<&'s str>, terms: &mut usize) -> Term<&'s str> {
        let mut own = 0;
        let term = self.inner(term, 0, &mut own);
        *terms += 1;
        ticked(term, own)
    }

    fn boxed(
        &mut self,
        term: Term<&'s str>,
        level: usize,
        terms: &mut usize,
    ) -> Box<Term<&'s str>> {
        Box::new(self.term(term, level, terms))
    }

    /// The term itself stays what it is, since some places take only certain terms.
    fn inner(&mut self, term: Term<&'s str>, level: usize, terms: &mut usize) -> Term<&'s str> {
        *terms += 1;
        match term {
            Term::Id | Term::Recurse | Term::Num(_) | Term::Break(_) => term,
            Term::Var(LOCATION) => self.location(&term),
            Term::Var(name) => {
                self.variables.entry(name).or_default().add_all();
                term
            }
            Term::Str(format, parts) => {
                if let Some(format) = format {
                    self.functions.insert((format, 0));
                }
                let parts = parts.into_iter().map(|part| match part {
                    StrPart::Term(term) => StrPart::Term(self.term(term, level, terms)),
                    other => other,
                });
                Term::Str(format, parts.collect())
            }
            Term::Arr(term) => Term::Arr(term.map(|term| self.boxed(*term, level, terms))),
            Term::Obj(properties) => {
                let properties = properties.into_iter().map(|(name, value)| match value {
                    Some(value) => {
                        let name = self.inner(name, level + 1, terms);
                        (name, Some(self.term(value, level, terms)))
                    }
                    None => (self.inner(name, level + 1, terms), None),
                });
                Term::Obj(properties.collect())
            }
            Term::Neg(term) => Term::Neg(self.boxed(*term, level, terms)),
            Term::BinOp(left, operator, right) => {
                let left = self.boxed(*left, level, terms);
                let (operator, right) = match operator {
                    BinaryOp::Comma => (operator, Box::new(self.paid(*right, terms))),
                    BinaryOp::Pipe(Some(pattern)) => {
                        let pattern = self.pattern(pattern, level, terms);
                        let right = self.boxed(*right, level, terms);
                        (BinaryOp::Pipe(Some(pattern)), right)
                    }
                    operator => (operator, self.boxed(*right, level, terms)),
                };
                Term::BinOp(left, operator, right)
            }
            Term::Label(name, term) => Term::Label(name, self.boxed(*term, level, terms)),
            Term::Fold(name, over, pattern, arguments) => {
                let over = self.boxed(*over, level, terms);
                let pattern = self.pattern(pattern, level, terms);
                let arguments = arguments.into_iter().enumerate();
                let arguments = arguments.map(|(index, argument)| {
                    // The first is where the loop begins.
                    if index == 1 {
                        self.paid(argument, terms)
                    } else {
                        self.term(argument, level, terms)
                    }
                });
                Term::Fold(name, over, pattern, arguments.collect())
            }
            Term::TryCatch(term, catch) => {
                let term = self.boxed(*term, level, terms);
                let catch = catch.map(|catch| self.boxed(*catch, level, terms));
                Term::TryCatch(term, catch)
            }
            Term::IfThenElse(cases, otherwise) => {
                let cases = cases.into_iter().map(|(when, then)| {
                    let when = self.term(when, level, terms);
                    (when, self.term(then, level, terms))
                });
                let cases = cases.collect();
                let otherwise = otherwise.map(|term| self.boxed(*term, level, terms));
                Term::IfThenElse(cases, otherwise)
            }
            Term::Def(definitions, term) => {
                let definitions = definitions.into_iter().map(|def| self.fence(def)).collect();
                Term::Def(definitions, self.boxed(*term, level, terms))
            }
            Term::Call(name, arguments)
                if arguments.is_empty() && self.parameters.contains(&name) =>
            {
                *terms += 1;
                piped(CALL, Term::Call(name, arguments))
            }
            Term::Call(name, arguments) => {
                self.functions.insert((name, arguments.len()));
                let arguments = arguments.into_iter();
                let arguments = arguments.map(|argument| self.term(argument, level, terms));
                Term::Call(name, arguments.collect())
            }
            Term::Path(term, path) => self.path(*term, path, level, terms),
        }
    }

    fn path(
        &mut self,
        term: Term<&'s str>,
        path: Path<Term<&'s str>>,
        level: usize,
        terms: &mut usize,
    ) -> Term<&'s str> {
        let first = path.0.first().and_then(|(part, _)| match part {
            Part::Index(index) => property(index),
            Part::Range(..) => None,
        });
        let term = match (term, first) {
            (Term::Var(name), Some(first)) if name != LOCATION => {
                self.variables.entry(name).or_default().add(first);
                Box::new(Term::Var(name))
            }
            (term, _) => self.boxed(term, level, terms),
        };
        let parts = path.0.into_iter().map(|(part, optional)| {
            *terms += 1;
            let part = match part {
                Part::Index(index) => Part::Index(self.term(index, level, terms)),
                Part::Range(from, to) => {
                    let from = from.map(|from| self.term(from, level, terms));
                    Part::Range(from, to.map(|to| self.term(to, level, terms)))
                }
            };
            (part, optional)
        });
        Term::Path(term, Path(parts.collect()))
    }

    /// What `$__loc__` stands for: the line on which it is written.
    fn location(&self, variable: &Term<&'s str>) -> Term<&'s str> {
        let (Some((text, arena)), Term::Var(name)) = (self.text, variable) else {
            return variable.clone();
        };
        let before = &text[..span(text, name).start];
        let line = arena.alloc((before.matches('\n').count() + 1).to_string());
        let text = |text| Term::Str(None, vec![StrPart::Str(text)]);
        Term::Obj(vec![
            (text("file"), Some(text("<top-level>"))),
            (text("line"), Some(Term::Num(line.as_str()))),
        ])
    }

    fn pattern(
        &mut self,
        pattern: Pattern<&'s str>,
        level: usize,
        terms: &mut usize,
    ) -> Pattern<&'s str> {
        *terms += 1;
        match pattern {
            Pattern::Var(_) => pattern,
            Pattern::Arr(parts) => {
                let parts = parts.into_iter();
                let parts = parts.map(|part| self.pattern(part, level, terms));
                Pattern::Arr(parts.collect())
            }
            Pattern::Obj(parts) => {
                let parts = parts.into_iter().map(|(name, part)| {
                    let name = self.inner(name, level + 1, terms);
                    (name, self.pattern(part, level, terms))
                });
                Pattern::Obj(parts.collect())
            }
        }
    }
}

/// Puts a tick before a term that has this many terms up to the next ticks.
fn ticked(term: Term<&str>, terms: usize) -> Term<&str> {
    let weight = (terms / TERMS_PER_FUEL).max(1);
    let index = weight.next_power_of_two().trailing_zeros() as usize;
    piped(TICKS[index.min(TICKS.len() - 1)], term)
}

fn piped<'s>(function: &'s str, term: Term<&'s str>) -> Term<&'s str> {
    let call = Term::Call(function, Vec::new());
    Term::BinOp(Box::new(call), BinaryOp::Pipe(None), Box::new(term))
}
