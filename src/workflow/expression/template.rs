//! Strings of a definition that may contain expressions.

use serde_json::Value;

use super::{Bounds, Error, Expression, with_stack};

/// How an expression begins within a string. It ends with the `}` that belongs to it.
const BEGIN: &str = "${";

/// A string of a definition.
#[derive(Clone, Debug)]
pub enum Template {
    /// Text without an expression.
    Text(String),
    /// Nothing but an expression: its result is the value.
    Whole(Expression),
    /// Text with expressions in it: their results become text, strings as they are and others as
    /// JSON.
    Mixed(Vec<Part>),
}

/// A part of a text with expressions in it.
#[derive(Clone, Debug)]
pub enum Part {
    Text(String),
    Expression(Expression),
}

impl Template {
    /// Reads a string and compiles the expressions in it, which are written `${ … }`. If `bare` is
    /// set, the whole string is an expression, with or without `${ }` around it. Errors count bytes
    /// from the beginning of the string.
    pub fn read(text: &str, bare: bool, variables: &[&str]) -> Result<Template, Error> {
        let compile = |from: usize, to: usize| {
            Expression::compile(&text[from..to], variables).map_err(|error| error.shifted(from))
        };
        let first = text.len() - text.trim_start().len();
        let last = text.trim_end().len();
        let begins = text[first..].starts_with(BEGIN);
        if begins && end(&text[first + BEGIN.len()..]) == Some(last - 1 - first - BEGIN.len()) {
            return Ok(Template::Whole(compile(first + BEGIN.len(), last - 1)?));
        }
        if bare {
            return Ok(Template::Whole(compile(0, text.len())?));
        }
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(begin) = text[at..].find(BEGIN) {
            let begin = at + begin;
            let from = begin + BEGIN.len();
            let to = from
                + end(&text[from..]).ok_or_else(|| Error::Syntax {
                    message: "expected } at the end of ${".to_owned(),
                    at: begin,
                })?;
            if begin > at {
                parts.push(Part::Text(text[at..begin].to_owned()));
            }
            parts.push(Part::Expression(compile(from, to)?));
            at = to + 1;
        }
        if parts.is_empty() {
            return Ok(Template::Text(text.to_owned()));
        }
        if at < text.len() {
            parts.push(Part::Text(text[at..].to_owned()));
        }
        Ok(Template::Mixed(parts))
    }

    /// Returns the value of the string.
    pub fn evaluate(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        self.run(input, variables, bounds)
    }

    /// Takes what the value has from the bound of the output.
    pub(super) fn run(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        match self {
            Template::Text(text) => {
                bounds.spend(text.len())?;
                Ok(Value::String(text.clone()))
            }
            Template::Whole(expression) => expression.run(input, variables, bounds),
            Template::Mixed(parts) => with_stack(|| {
                let mut text = String::new();
                for part in parts {
                    match part {
                        Part::Text(part) => {
                            bounds.spend(part.len())?;
                            text.push_str(part);
                        }
                        Part::Expression(part) => {
                            text.push_str(&part.run_to_text(input, variables, bounds)?);
                        }
                    }
                }
                Ok(Value::String(text))
            })?,
        }
    }

    /// Whether it is text without an expression.
    pub(super) fn is_constant(&self) -> bool {
        matches!(self, Template::Text(_))
    }
}

/// Returns where the `}` is that ends an expression. Braces in strings and comments do not count.
fn end(expression: &str) -> Option<usize> {
    /// What is open within the expression.
    #[derive(PartialEq)]
    enum Open {
        Bracket(u8),
        String,
    }
    let mut open = Vec::new();
    let mut bytes = expression.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        if open.last() == Some(&Open::String) {
            match byte {
                b'"' => {
                    open.pop();
                }
                b'\\' => {
                    if let Some((_, b'(')) = bytes.next() {
                        open.push(Open::Bracket(b')'));
                    }
                }
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => open.push(Open::String),
            b'(' => open.push(Open::Bracket(b')')),
            b'[' => open.push(Open::Bracket(b']')),
            b'{' => open.push(Open::Bracket(b'}')),
            b'}' if open.is_empty() => return Some(at),
            b')' | b']' | b'}' if open.pop() != Some(Open::Bracket(byte)) => return None,
            b'#' => {
                bytes.find(|(_, byte)| *byte == b'\n');
            }
            _ => {}
        }
    }
    None
}
