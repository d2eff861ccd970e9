//! JSON values of a definition whose strings may contain expressions.

use std::fmt::Write;

use serde_json::Value;

use super::{Bounds, Error, Template, with_stack};

/// A JSON value of a definition, such as the argument of `set`. Only its own strings are read as
/// expressions, never what comes in as data.
#[derive(Clone, Debug)]
pub enum Shape {
    /// No string in it contains an expression.
    Constant(Value),
    String(Template),
    Array(Vec<Shape>),
    Object(Vec<(String, Shape)>),
}

impl Shape {
    /// Compiles every expression in the strings of a value. The names of properties stay as they
    /// are. An error comes with the JSON pointer of its string.
    pub fn read(value: &Value, variables: &[&str]) -> Result<Shape, (String, Error)> {
        let mut pointer = String::new();
        let read = || read(value, variables, &mut pointer);
        match with_stack(read) {
            Ok(Ok(shape)) => Ok(shape),
            Ok(Err(error)) | Err(error) => Err((pointer, error)),
        }
    }

    /// Returns the value with the results of its expressions. Each expression has the bounds for
    /// itself, but that of the output is for all.
    pub fn evaluate(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        if let Shape::Constant(value) = self {
            return Ok(value.clone());
        }
        with_stack(|| self.run(input, variables, bounds))?
    }

    fn run(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        match self {
            Shape::Constant(value) => Ok(value.clone()),
            Shape::String(template) => template.run(input, variables, bounds),
            Shape::Array(shapes) => {
                let values = shapes
                    .iter()
                    .map(|shape| shape.run(input, variables, bounds));
                Ok(Value::Array(values.collect::<Result<_, _>>()?))
            }
            Shape::Object(properties) => {
                let properties = properties
                    .iter()
                    .map(|(name, shape)| Ok((name.clone(), shape.run(input, variables, bounds)?)));
                Ok(Value::Object(properties.collect::<Result<_, Error>>()?))
            }
        }
    }

    fn is_constant(&self) -> bool {
        matches!(self, Shape::Constant(_))
    }
}

/// Reads a value. After an error, the pointer is that of its string.
fn read(value: &Value, variables: &[&str], pointer: &mut String) -> Result<Shape, Error> {
    let parent = pointer.len();
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
        Value::String(text) => {
            let template = Template::read(text, false, variables)?;
            if !template.is_constant() {
                return Ok(Shape::String(template));
            }
        }
        Value::Array(values) => {
            let mut shapes = Vec::new();
            for (index, value) in values.iter().enumerate() {
                // Writing to a string does not fail.
                let _written = write!(pointer, "/{index}");
                shapes.push(read(value, variables, pointer)?);
                pointer.truncate(parent);
            }
            if !shapes.iter().all(Shape::is_constant) {
                return Ok(Shape::Array(shapes));
            }
        }
        Value::Object(properties) => {
            let mut shapes = Vec::new();
            for (name, value) in properties {
                let _written = write!(pointer, "/{}", name.replace('~', "~0").replace('/', "~1"));
                shapes.push((name.clone(), read(value, variables, pointer)?));
                pointer.truncate(parent);
            }
            if !shapes.iter().all(|(_, shape)| shape.is_constant()) {
                return Ok(Shape::Object(shapes));
            }
        }
    }
    Ok(Shape::Constant(value.clone()))
}
