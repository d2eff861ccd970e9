//! Topologies over HTTP.

use axum::{Json, http::StatusCode, response::IntoResponse};

use super::{
    super::json,
    answer::{Answer, list_within, within},
    call::Call,
    request::Id,
};

pub(in crate::ingress) async fn list_topologies(call: Call) -> Answer {
    let topologies = call.state.api.topologies(&call.caller).await?;
    list_within(&call, "topologies", topologies)
}

pub(in crate::ingress) async fn get_topology(Id(name): Id, call: Call) -> Answer {
    let topology = call.state.api.topology(&call.caller, &name).await?;
    within(&call, &topology)
}

pub(in crate::ingress) async fn apply_topology(Id(name): Id, mut call: Call) -> Answer {
    let text = call.json(json::topologies::text).await?;
    let api = &call.state.api;
    let topology = api.apply_topology(&call.caller, &name, &text).await?;
    Ok(Json(topology).into_response())
}

pub(in crate::ingress) async fn delete_topology(Id(name): Id, call: Call) -> Answer {
    call.state.api.delete_topology(&call.caller, &name).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
