//! Changes of live work over HTTP.

use axum::{
    Extension, Json,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
};

use super::{
    super::{State, budget::Share, json, tally::Tally},
    answer::Answer,
    problem::Problem,
    request::{Id, JSON, json_body, task_id},
};
use crate::model::Caller;

pub(super) async fn cancel_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let change = json::jobs::change(&body, &mut tally)?;
    tally.keep();
    let changed = state.api.cancel_chosen(&caller, change).await?;
    Ok(Json(json::jobs::Changed::from(&changed)).into_response())
}

pub(super) async fn update_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let (request, update) = json::changes::update(&body, &mut tally)?;
    tally.keep();
    let changed = state.api.update_tasks(&caller, request, update).await?;
    Ok(Json(json::jobs::Changed::from(&changed)).into_response())
}

pub(super) async fn requeue_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let (request, requeue) = json::changes::requeue(&body, &mut tally)?;
    tally.keep();
    let changed = state.api.requeue_tasks(&caller, request, requeue).await?;
    Ok(Json(json::jobs::Changed::from(&changed)).into_response())
}

pub(super) async fn cancel_task(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Answer {
    let answer = state.api.cancel_task(&caller, &task_id(id)).await?;
    Ok(Json(json::work::ItemAnswer::from(&answer)).into_response())
}

/// `POST /v1/queues/NAME:pause` and `:resume`. The router cannot tell them apart: a name is the whole segment for it.
pub(super) async fn pause_or_resume(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    queue: Id,
) -> Answer {
    let asked = task_id(queue);
    let (queue, changed, paused) = match asked.rsplit_once(':') {
        Some((queue, "pause")) => (queue, state.api.pause_queue(&caller, queue).await?, true),
        Some((queue, "resume")) => (queue, state.api.resume_queue(&caller, queue).await?, false),
        _ => {
            let why = "a queue takes POST /v1/queues/NAME:pause and /v1/queues/NAME:resume";
            return Err(Problem::new(StatusCode::NOT_FOUND, why));
        }
    };
    Ok(Json(json::changes::Pausing { queue, paused, changed }).into_response())
}
