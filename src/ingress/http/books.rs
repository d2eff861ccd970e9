//! The books over HTTP.

use axum::{Extension, Json, extract::State as Extract, http::Uri, response::IntoResponse};

use super::{
    super::{State, json},
    answer::{Answer, within},
};
use crate::model::Caller;

pub(super) async fn get_books(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Answer {
    let queue = json::books::query(uri.query().unwrap_or_default())?;
    let books = state.api.books(&caller, &queue).await?;
    within(&state.budget, Json(json::books::Books::from(&books)).into_response())
}
