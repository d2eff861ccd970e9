//! One task over HTTP, with its payload and its history.

use axum::{Extension, Json, extract::State as Extract, response::IntoResponse};

use super::{
    super::{State, json, tally::Excess},
    answer::{Answer, within},
    problem::Problem,
    request::{Id, task_id},
};
use crate::model::Caller;

pub(super) async fn get_task(Extract(state): Extract<State>, Extension(caller): Extension<Caller>, id: Id) -> Answer {
    // The room comes before the JSON.
    let room = |bytes| state.budget.answer(bytes).map_err(|no_room| Problem::from(Excess::from(no_room)));
    let (file, room) = state.api.task_file(&caller, &task_id(id), room).await?;
    let answer = Json(json::history::TaskFile::from(&file)).into_response();
    drop((file, room));
    within(&state.budget, answer)
}
