//! Subscriptions over HTTP.

use axum::{Json, http::StatusCode, response::IntoResponse};

use super::{
    super::json,
    answer::{Answer, list_within, within},
    call::Call,
    problem::Problem,
    request::Id,
};

pub(in crate::ingress) async fn list_subscriptions(call: Call) -> Answer {
    let subscriptions = call.state.api.subscriptions(&call.caller).await?;
    list_within(&call, "subscriptions", subscriptions)
}

pub(in crate::ingress) async fn get_subscription(Id(name): Id, call: Call) -> Answer {
    let subscription = call.state.api.subscription(&call.caller, &name).await?;
    within(&call, &subscription)
}

pub(in crate::ingress) async fn put_subscription(Id(name): Id, mut call: Call) -> Answer {
    let request = call.json(json::subscriptions::settings).await?;
    let api = &call.state.api;
    let subscription = api.put_subscription(&call.caller, &name, &request).await?;
    Ok(Json(subscription).into_response())
}

pub(in crate::ingress) async fn delete_subscription(Id(name): Id, call: Call) -> Answer {
    let api = &call.state.api;
    api.delete_subscription(&call.caller, &name).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /v1/subscriptions/NAME:seek`. The router takes the whole segment for the name.
pub(in crate::ingress) async fn seek(Id(path): Id, mut call: Call) -> Answer {
    let Some(name) = path.strip_suffix(":seek") else {
        let why = "a subscription takes POST /v1/subscriptions/NAME:seek";
        return Err(Problem::new(StatusCode::NOT_FOUND, why));
    };
    let to = call.json(json::subscriptions::seek).await?;
    let subscription = call.state.api.seek(&call.caller, name, &to).await?;
    Ok(Json(subscription).into_response())
}
