//! Mistakes with their places.

use std::fmt;

/// A mistake in a definition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    /// Both count from 1.
    pub line: usize,
    pub column: usize,
    /// A JSON pointer to the value that is wrong. Of an unknown field: with its name.
    pub pointer: String,
    pub says: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.says)
    }
}
