//! Changes of live work over HTTP.

use axum::{Extension, Json, body::Body, extract::State as Extract, http::HeaderMap, response::IntoResponse};

use super::{
    super::{State, budget::Share, json, tally::Tally},
    answer::Answer,
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

pub(super) async fn cancel_task(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Answer {
    let answer = state.api.cancel_task(&caller, &task_id(id)).await?;
    Ok(Json(json::work::ItemAnswer::from(&answer)).into_response())
}
