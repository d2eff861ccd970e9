//! Dead letters over HTTP.

use axum::{Json, response::IntoResponse};

use super::{
    super::json,
    answer::{Answer, within},
    call::Call,
    request::Id,
};

pub(in crate::ingress) async fn get_letters(call: Call) -> Answer {
    let page = call
        .state
        .api
        .letters(&call.caller, json::letters::pages_of_query(call.query()))
        .await?;
    within(&call, &json::letters::Page::from(&page))
}

pub(in crate::ingress) async fn count_letters(call: Call) -> Answer {
    let pages = json::letters::pages_of_query(call.query());
    let reasons = call.state.api.letter_reasons(&call.caller, pages).await?;
    within(&call, &reasons)
}

pub(in crate::ingress) async fn get_letter(Id(id): Id, call: Call) -> Answer {
    let letter = call.state.api.letter(&call.caller, &id).await?;
    within(&call, &json::letters::Letter::from(&letter))
}

pub(in crate::ingress) async fn retry_letters(mut call: Call) -> Answer {
    let change = call.counted(json::letters::change).await?;
    let changed = call.state.api.retry_letters(&call.caller, change).await?;
    Ok(Json(changed).into_response())
}

pub(in crate::ingress) async fn purge_letters(mut call: Call) -> Answer {
    let change = call.counted(json::letters::change).await?;
    let changed = call.state.api.purge_letters(&call.caller, change).await?;
    Ok(Json(changed).into_response())
}
