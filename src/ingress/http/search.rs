//! Lists of tasks over HTTP.

use axum::{Extension, Json, extract::State as Extract, http::Uri, response::IntoResponse};

use super::{
    super::{State, json},
    answer::{Answer, within},
};
use crate::model::Caller;

pub(super) async fn list_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Answer {
    let list = state.api.list_tasks(&caller, json::search::query(uri.query().unwrap_or_default())).await?;
    within(&state.budget, Json(json::search::List::from(&list)).into_response())
}
