//! Expressions with the variables that they name.

use std::sync::Arc;

use serde_json::Value;

use super::super::expression::{Bounds, Error, Shape, Template};

/// Where the value of a variable comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Variable {
    Context,
    Input,
    Output,
    Task,
    Workflow,
    Runtime,
    /// The item and its number of the loop with this path.
    Item(Arc<str>),
    Index(Arc<str>),
    /// The error that the `try` of this path caught.
    Caught(Arc<str>),
}

/// The variables that an expression may name. Of two with a name, the later one is meant.
#[derive(Clone, Debug)]
pub(super) struct Names(Vec<(String, Variable)>);

impl Names {
    /// What every expression may name.
    pub(super) fn everywhere() -> Self {
        let names = [
            ("context", Variable::Context),
            ("input", Variable::Input),
            ("task", Variable::Task),
            ("workflow", Variable::Workflow),
            ("runtime", Variable::Runtime),
        ];
        Self(names.map(|(name, from)| (name.to_owned(), from)).into())
    }

    pub(super) fn with(&self, name: &str, from: Variable) -> Self {
        let mut names = self.clone();
        names.0.retain(|(known, _)| known != name);
        names.0.push((name.to_owned(), from));
        names
    }

    /// Those whose names occur in a text. The others would cost time at each evaluation.
    fn in_text(&self, text: &str) -> (Vec<&str>, Vec<Variable>) {
        let named = self.0.iter().filter(|(name, _)| {
            text.match_indices('$')
                .any(|(at, _)| text[at + 1..].trim_start().starts_with(name.as_str()))
        });
        named
            .map(|(name, from)| (name.as_str(), from.clone()))
            .unzip()
    }
}

/// An expression, or a value of the definition with expressions in it.
#[derive(Debug)]
pub(crate) struct Code {
    form: Form,
    variables: Vec<Variable>,
}

#[derive(Debug)]
enum Form {
    Template(Template),
    Shape(Shape),
}

impl Code {
    /// Compiles an expression, bare or wrapped.
    pub(super) fn bare(text: &str, names: &Names) -> Result<Self, Error> {
        Self::template(text, true, names)
    }

    /// Compiles a text in which expressions are wrapped.
    pub(super) fn text(text: &str, names: &Names) -> Result<Self, Error> {
        Self::template(text, false, names)
    }

    fn template(text: &str, bare: bool, names: &Names) -> Result<Self, Error> {
        let (names, variables) = names.in_text(text);
        Ok(Self {
            form: Form::Template(Template::read(text, bare, &names)?),
            variables,
        })
    }

    /// Compiles a value in whose texts expressions are wrapped. An error comes with the JSON
    /// pointer of its text.
    pub(super) fn value(value: &Value, names: &Names) -> Result<Self, (String, Error)> {
        let (names, variables) = names.in_text(&value.to_string());
        Ok(Self {
            form: Form::Shape(Shape::read(value, &names)?),
            variables,
        })
    }

    /// Compiles a text that is an expression, bare or wrapped, or another value as [`Self::value`].
    pub(super) fn bare_or_value(value: &Value, names: &Names) -> Result<Self, (String, Error)> {
        match value {
            Value::String(text) => Self::bare(text, names).map_err(|error| (String::new(), error)),
            value => Self::value(value, names),
        }
    }

    /// Evaluates it. `look_up` gives the values of variables.
    pub(crate) fn evaluate(
        &self,
        input: &Value,
        look_up: impl Fn(&Variable) -> Arc<Value>,
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        let values: Vec<Arc<Value>> = self.variables.iter().map(look_up).collect();
        let values: Vec<&Value> = values.iter().map(|value| &**value).collect();
        match &self.form {
            Form::Template(template) => template.evaluate(input, &values, bounds),
            Form::Shape(shape) => shape.evaluate(input, &values, bounds),
        }
    }
}
