//! Answers that are lists.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body::Body as _;
use serde::Serialize;

use super::{
    super::{Budget, delivery::Deliveries, json, tally::Excess},
    problem::Problem,
};
use crate::{
    model::{ItemAnswer, LeasedTask},
    pipelines::tasks::Leases,
};

pub(super) type Answer = Result<Response, Problem>;

pub(super) fn item_answers(answers: Vec<ItemAnswer>) -> Answer {
    list("results", answers.iter().map(json::work::ItemAnswer::from))
}

/// Counts an answer, which may have megabytes, until it is written.
pub(super) fn within(budget: &Budget, mut answer: Response) -> Answer {
    let bytes = answer.body().size_hint().exact().unwrap_or_default();
    let room = budget.answer(usize::try_from(bytes).unwrap_or(usize::MAX));
    let room = room.map_err(|error| Problem::later(StatusCode::TOO_MANY_REQUESTS, error))?;
    answer.extensions_mut().insert(room);
    Ok(answer)
}

/// An answer with leases, which its connection confirms or gives back.
pub(super) fn leased(budget: &Budget, leased: Leases, write: impl FnOnce(&[LeasedTask]) -> Answer) -> Answer {
    let Leases { tasks, deliveries } = leased;
    // The room comes before the JSON.
    let room = budget.answer(tasks.iter().map(LeasedTask::weight).sum()).map_err(Excess::from)?;
    let answer = write(&tasks)?;
    drop((tasks, room));
    let mut answer = within(budget, answer)?;
    answer.extensions_mut().insert(Deliveries::from(deliveries));
    Ok(answer)
}

pub(super) fn list<T: Serialize>(name: &'static str, entries: impl IntoIterator<Item = T>) -> Answer {
    let text = json::list(name, entries).map_err(|error| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write the answer: {error}"))
    })?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}
