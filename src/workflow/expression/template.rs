//! Strings of a definition that may contain expressions.

use serde_json::Value;

use super::{Bounds, Error, Expression};

/// A string of a definition.
#[derive(Clone, Debug)]
pub enum Template {
    /// Text without an expression.
    Text(String),
    /// Exactly one expression: its result is the value.
    Whole(Expression),
    /// Text with expressions in it: their results become text.
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
    /// set, a string without `${ }` around it is an expression, too.
    pub fn read(text: &str, bare: bool, variables: &[&str]) -> Result<Template, Error> {
        if bare {
            return Ok(Template::Whole(Expression::compile(text, variables)?));
        }
        Ok(Template::Text(text.to_owned()))
    }

    /// Returns the value of the string.
    pub fn evaluate(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: Bounds,
    ) -> Result<Value, Error> {
        match self {
            Template::Text(text) => Ok(Value::String(text.clone())),
            Template::Whole(expression) => expression.evaluate(input, variables, bounds),
            Template::Mixed(_) => Ok(Value::Null),
        }
    }
}
