//! Why an expression cannot be compiled or evaluated.

/// Says in one line what is wrong with an expression or with its evaluation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text is no jq expression. `at` is a byte of the text.
    #[error("not a jq expression: {message}")]
    Syntax { message: String, at: usize },
    /// It names a function or variable that does not exist here. `at` is a byte of the text.
    #[error("unknown {name}")]
    Unknown { name: String, at: usize },
    #[error("an expression may have {limit} tokens")]
    TooLong { limit: usize },
    #[error("an expression may nest brackets {limit} deep")]
    TooNested { limit: usize },
    /// It wants more fuel than [`super::Bounds::fuel`].
    #[error("the expression takes too many steps (expr_fuel)")]
    Fuel,
    #[error("the expression takes too much memory (expr_memory)")]
    Memory,
    /// The calls of its functions or the values that it builds nest too deep.
    #[error("the expression nests calls or values too deep")]
    TooDeep,
    #[error("the result of the expression is too large")]
    Output,
    #[error("the expression has several results, where one is expected")]
    SeveralOutputs,
    /// jq's own errors, and those that the expression raises by `error`.
    #[error("{0}")]
    Raised(String),
    /// The caller gave another number of variables than were named at compilation.
    #[error("the expression was compiled for other variables")]
    Variables,
    #[error("no thread for an expression: {0}")]
    Thread(String),
    /// A bug of the interpreter: the evaluation panicked.
    #[error("the interpreter of expressions failed: {0}")]
    Internal(String),
}

impl Error {
    /// The bound that the evaluation went beyond.
    pub fn bound(&self) -> Option<&'static str> {
        match self {
            Error::Fuel => Some("fuel"),
            Error::Memory => Some("memory"),
            Error::TooDeep => Some("depth"),
            Error::Output => Some("output"),
            _ => None,
        }
    }

    /// Moves the place of an error in an expression that is a part of a longer text.
    pub(super) fn shifted(mut self, by: usize) -> Error {
        if let Error::Syntax { at, .. } | Error::Unknown { at, .. } = &mut self {
            *at += by;
        }
        self
    }
}
