//! Dead letters over HTTP.

use axum::{
    Extension, Json,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Uri},
    response::IntoResponse,
};

use super::{
    super::{State, budget::Share, json, tally::Tally},
    answer::{Answer, within},
    problem::Problem,
    request::{Id, JSON, json_body, task_id},
};
use crate::model::{Caller, ChangeLetters};

pub(super) async fn get_letters(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Answer {
    let page = state.api.letters(&caller, json::letters::query(uri.query().unwrap_or_default())).await?;
    within(&state.budget, Json(json::letters::Page::from(&page)).into_response())
}

pub(super) async fn get_letter(Extract(state): Extract<State>, Extension(caller): Extension<Caller>, id: Id) -> Answer {
    let letter = state.api.letter(&caller, &task_id(id)).await?;
    within(&state.budget, Json(json::letters::Letter::from(&letter)).into_response())
}

pub(super) async fn retry_letters(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let change = change_of_letters(&state, &share, &headers, body).await?;
    let changed = state.api.retry_letters(&caller, change).await?;
    Ok(Json(json::letters::Changed::from(&changed)).into_response())
}

pub(super) async fn purge_letters(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let change = change_of_letters(&state, &share, &headers, body).await?;
    let changed = state.api.purge_letters(&caller, change).await?;
    Ok(Json(json::letters::Changed::from(&changed)).into_response())
}

async fn change_of_letters(
    state: &State,
    share: &Share,
    headers: &HeaderMap,
    body: Body,
) -> Result<Result<ChangeLetters, String>, Problem> {
    let body = json_body(state, headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, share, body.len());
    let change = json::letters::change(&body, &mut tally)?;
    tally.keep();
    Ok(change)
}
