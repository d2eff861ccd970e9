//! Answers to lists, item by item, in the order of the items.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body::Body as _;
use serde::Serialize;

use super::{
    super::{Budget, insert_timed, json},
    problem::Problem,
};
use crate::{
    pipelines::discovery,
    telemetry::metrics::{self, Dropped, Source},
    wire::pb,
};

pub(super) type Answer = Result<Response, Problem>;

/// Inserts what could be read; the others are answered as rejected.
pub(super) async fn insert(
    discovery: &discovery::Handle,
    items: Vec<Result<pb::NewTask, String>>,
) -> Result<Vec<pb::InsertResult>, discovery::Error> {
    let (tasks, known) = split(items.into_iter().map(|item| item.map_err(json::insert::rejected)).collect());
    let unreadable = known.len() - tasks.len();
    let answers = insert_timed(discovery, tasks).await?;
    metrics::discovery_dropped(Source::Api, Dropped::Rejected, unreadable);
    Ok(merge(known, answers))
}

/// Parts what can be passed on from what is answered already. [`merge`] puts the answers together in the order of the
/// items.
pub(super) fn split<T, A>(items: Vec<Result<T, A>>) -> (Vec<T>, Vec<Option<A>>) {
    let mut passed = Vec::with_capacity(items.len());
    let mut note = |item| match item {
        Ok(item) => {
            passed.push(item);
            None
        }
        Err(answer) => Some(answer),
    };
    let known = items.into_iter().map(&mut note).collect();
    (passed, known)
}

fn merge<A>(known: Vec<Option<A>>, answers: Vec<A>) -> Vec<A> {
    let mut answers = answers.into_iter();
    known.into_iter().filter_map(|known| known.or_else(|| answers.next())).collect()
}

pub(super) fn item_answers(known: Vec<Option<pb::ItemResult>>, answers: Vec<pb::ItemResult>) -> Answer {
    list("results", merge(known, answers).iter().map(json::work::ItemAnswer::from))
}

/// An answer that may have megabytes counts until it is written.
pub(super) fn within(budget: &Budget, mut answer: Response) -> Answer {
    let bytes = answer.body().size_hint().exact().unwrap_or_default();
    let room = budget.answer(usize::try_from(bytes).unwrap_or(usize::MAX));
    let room = room.map_err(|error| Problem::later(StatusCode::TOO_MANY_REQUESTS, error))?;
    answer.extensions_mut().insert(room);
    Ok(answer)
}

pub(super) fn list<T: Serialize>(name: &'static str, entries: impl IntoIterator<Item = T>) -> Answer {
    let text = json::list(name, entries).map_err(|error| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write the answer: {error}"))
    })?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items() {
        let (passed, known) = split(vec![Ok("a"), Err(2), Ok("c"), Err(4)]);
        assert_eq!(passed, ["a", "c"]);
        assert_eq!(merge(known, vec![1, 3]), [1, 2, 3, 4]);
    }
}
