//! The expressions of a definition, checked without being evaluated.

use super::node::not_yet;
use crate::workflow::expression::{Error, Template};

/// The variables that every expression may use, without `$`.
pub(super) const VARIABLES: [&str; 5] = ["context", "input", "task", "workflow", "runtime"];
/// The variable of expressions that come after a task.
pub(super) const OUTPUT: &str = "output";

/// Checks the expressions in a text. With `is_bare`, a text that is not wrapped is one, too.
pub(super) fn check(text: &str, is_bare: bool, scope: &[String]) -> Result<(), String> {
    let variables: Vec<&str> = VARIABLES
        .into_iter()
        .chain(scope.iter().map(String::as_str))
        .collect();
    match Template::read(text, is_bare, &variables) {
        Ok(_) => Ok(()),
        Err(Error::Unknown { name, .. }) if name == "variable $secrets" => Err(not_yet(
            "$secrets in expressions",
            "authentication takes a secret by use: NAME",
        )),
        Err(Error::Unknown { name, .. }) if name.starts_with("variable ") => {
            let known: Vec<_> = variables.iter().map(|known| format!("${known}")).collect();
            Err(format!("unknown {name}; there are {}", known.join(", ")))
        }
        Err(error) => Err(error.to_string()),
    }
}
