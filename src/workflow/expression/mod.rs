//! jq expressions, run by jaq behind a fence: whoever may deploy a definition cannot harm the
//! process with it.
//!
//! An expression sees its input and its variables, nothing else: no environment, clock, input,
//! file or `halt`. Its length and nesting are bounded before it is parsed; its steps, memory, stack
//! and output while it runs. What goes beyond a bound ends the evaluation with an [`Error`], and no
//! `try` of the expression can catch that.

mod bounds;
mod error;
mod fence;
mod meter;
mod natives;
mod need;
mod number;
mod program;
mod shape;
mod stack;
mod template;
mod value;

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use program::Program;

pub use bounds::Bounds;
pub use error::Error;
pub use shape::Shape;
pub use stack::with_stack;
pub use template::Template;

/// A compiled jq expression. Clones share it.
#[derive(Clone)]
pub struct Expression {
    text: Arc<str>,
    program: Arc<Program>,
}

impl Expression {
    /// Compiles the text of an expression, without `${ }`. It may name the variables, which are
    /// given without `$`.
    pub fn compile(text: &str, variables: &[&str]) -> Result<Expression, Error> {
        let program = with_stack(|| Program::compile(text, variables))??;
        Ok(Expression {
            text: text.into(),
            program: Arc::new(program),
        })
    }

    /// Returns the text that was compiled.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the result for an input and the values of the variables, in the order in which they
    /// were named. An expression without a result gives null, one with several is an error. The
    /// same arguments always give the same result.
    pub fn evaluate(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        self.run(input, variables, bounds)
    }

    /// Takes what the result has from the bound of the output.
    fn run(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<Value, Error> {
        with_stack(|| self.program.run(input, variables, bounds))?
    }

    /// Returns the result as a part of a text: a string as it is, others as JSON.
    fn run_to_text(
        &self,
        input: &Value,
        variables: &[&Value],
        bounds: &mut Bounds,
    ) -> Result<String, Error> {
        with_stack(|| self.program.run_to_text(input, variables, bounds))?
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Expression").field(&self.text).finish()
    }
}

#[cfg(test)]
mod tests;
