//! Changes of live work over HTTP.

use axum::{Extension, Json, body::Body, extract::State as Extract, http::HeaderMap, response::IntoResponse};

use super::{
    super::{State, budget::Share, json, tally::Tally},
    answer::{Answer, item_answers},
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
    let ids = json::changes::ids(&body, &mut tally)?;
    tally.keep();
    item_answers(state.api.cancel_tasks(&caller, ids).await?)
}

pub(super) async fn cancel_task(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Answer {
    let answer = state.api.cancel_task(&caller, &task_id(id)).await?;
    Ok(Json(json::work::ItemAnswer::from(&answer)).into_response())
}
