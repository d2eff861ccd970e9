//! Bulk changes over HTTP.

use axum::{Json, response::IntoResponse};

use super::{
    answer::{Answer, list_within},
    call::Call,
    problem::Problem,
    request::{Id, Page},
};

pub(in crate::ingress) async fn get_bulk_changes(call: Call) -> Answer {
    let Page { before, limit } = call.fields()?;
    let bulk_changes = call
        .state
        .api
        .bulk_changes(&call.caller, before.as_deref(), limit)
        .await?;
    list_within(&call, "bulk", bulk_changes)
}

pub(in crate::ingress) async fn get_bulk_change(Id(id): Id, call: Call) -> Answer {
    let bulk = call.state.api.bulk_change(&call.caller, &id).await?;
    Ok(Json(bulk).into_response())
}

pub(in crate::ingress) async fn stop_bulk_change(Id(path): Id, call: Call) -> Answer {
    let Some(id) = path.strip_suffix(":stop") else {
        return Err(Problem::bad_request(
            "a bulk change takes POST with :stop after its id, and nothing else",
        ));
    };
    let bulk = call.state.api.stop_bulk_change(&call.caller, id).await?;
    Ok(Json(bulk).into_response())
}
