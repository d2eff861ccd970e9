//! fsck and dumps over HTTP.

use axum::{
    Extension, Json,
    body::Body,
    extract::State as Extract,
    http::{HeaderMap, Uri},
    response::IntoResponse,
};

use super::{
    super::{State, json},
    answer::{Answer, within},
    request::{JSON, json_body},
};
use crate::model::Caller;

pub(super) async fn fsck(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let request = json::fsck::request(&json_body(&state, &headers, body, JSON).await?)?;
    let page = state.api.fsck(&caller, request).await?;
    within(&state.budget, Json(json::fsck::Page::from(&page)).into_response())
}

pub(super) async fn get_dump(Extract(state): Extract<State>, Extension(caller): Extension<Caller>, uri: Uri) -> Answer {
    let (queue, shard, limit) = json::fsck::dump(uri.query().unwrap_or_default())?;
    let shards = state.api.dump(&caller, &queue, shard, limit).await?;
    within(&state.budget, Json(json::fsck::Dump::new(&queue, shards)).into_response())
}
