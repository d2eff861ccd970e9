//! Limit keys and their own limits over HTTP.

use axum::{Json, response::IntoResponse};

use super::{
    super::json,
    answer::{Answer, within},
    call::Call,
    request::{Id, TwoIds},
};

pub(in crate::ingress) async fn list_limits(Id(queue): Id, call: Call) -> Answer {
    let pages = json::limits::pages(&queue, call.query())?;
    let page = call.state.api.limit_keys(&call.caller, &pages).await?;
    within(&call, &page)
}

pub(in crate::ingress) async fn get_limit(TwoIds(queue, key): TwoIds, call: Call) -> Answer {
    let api = &call.state.api;
    let answer = api.limit_key(&call.caller, &queue, &key).await?;
    Ok(Json(answer).into_response())
}

pub(in crate::ingress) async fn set_limit(TwoIds(queue, key): TwoIds, mut call: Call) -> Answer {
    let set = call
        .json(|body| json::limits::set(&queue, &key, body))
        .await?;
    let answer = call.state.api.set_limits(&call.caller, &set).await?;
    Ok(Json(answer).into_response())
}

pub(in crate::ingress) async fn clear_limit(TwoIds(queue, key): TwoIds, call: Call) -> Answer {
    let api = &call.state.api;
    let answer = api.clear_limits(&call.caller, &queue, &key).await?;
    Ok(Json(answer).into_response())
}
