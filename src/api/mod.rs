//! The operations, one function each. Every protocol calls them; limits, spans and metrics are applied here, once.

mod insert;
pub mod query;
mod tasks;

use std::borrow::Cow;

use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::{
    model::{Caller, TaskId},
    pipelines::{discovery, tasks as service},
    queue, store,
};

/// The operations of this process. A handle is `None` where the process does not run the pipeline. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    pub discovery: Option<discovery::Handle>,
    pub tasks: Option<service::Handle>,
    pub query: Option<query::Handle>,
    /// Ends calls that wait for tasks.
    pub stop: CancellationToken,
}

/// The reason why an operation has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this process does not run the pipeline {0}")]
    NotRunHere(&'static str),
    #[error("{0:?} is not a task id; ids are UUIDs, as an insert answers them")]
    NotATaskId(String),
    #[error("there is no task {0}, or it finished so long ago that it was removed")]
    NoSuchTask(TaskId),
    #[error(transparent)]
    Insert(#[from] discovery::Error),
    #[error(transparent)]
    Tasks(#[from] service::Error),
    #[error("cannot read now: {0}")]
    Store(#[from] store::Error),
    #[error("cannot read now: {0}")]
    Queue(#[from] queue::Error),
}

/// The kind of an error: the caller's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong.
    Invalid,
    NotFound,
    /// taskd has no room now: try again later.
    Busy,
    /// A server does not answer now: try again later.
    Unavailable,
    /// Another process may do it.
    NotRunHere,
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotRunHere(_) => Kind::NotRunHere,
            Self::NotATaskId(_) | Self::Tasks(service::Error::Invalid(_)) => Kind::Invalid,
            Self::NoSuchTask(_) => Kind::NotFound,
            Self::Insert(discovery::Error::Busy(_)) => Kind::Busy,
            Self::Insert(discovery::Error::Unavailable(_))
            | Self::Tasks(service::Error::Unavailable(_))
            | Self::Store(_)
            | Self::Queue(_) => Kind::Unavailable,
        }
    }
}

/// The span of an operation.
fn span(operation: &'static str, caller: &Caller) -> Span {
    tracing::debug_span!(
        "operation",
        operation,
        protocol = %caller.protocol,
        peer = caller.peer.map(tracing::field::display)
    )
}

/// Parts readable items from answered ones. [`merge`] puts the answers together in the order of the items.
fn split<T, A>(items: Vec<Result<T, A>>) -> (Vec<T>, Vec<Option<A>>) {
    let mut readable = Vec::with_capacity(items.len());
    let mut note = |item| match item {
        Ok(item) => {
            readable.push(item);
            None
        }
        Err(answer) => Some(answer),
    };
    let known = items.into_iter().map(&mut note).collect();
    (readable, known)
}

fn merge<A>(known: Vec<Option<A>>, answers: Vec<A>) -> Vec<A> {
    let mut answers = answers.into_iter();
    known.into_iter().filter_map(|known| known.or_else(|| answers.next())).collect()
}

/// The bytes of a sent text in a message about it.
pub(crate) const ECHO: usize = 100;

/// The beginning of a text that may have megabytes.
pub(crate) fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    format!("{}…", &text[..end]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items() {
        let (readable, known) = split(vec![Ok("a"), Err(2), Ok("c"), Err(4)]);
        assert_eq!(readable, ["a", "c"]);
        assert_eq!(merge(known, vec![1, 3]), [1, 2, 3, 4]);
    }
}
