//! Jobs over HTTP.

use axum::{Json, response::IntoResponse};

use super::{
    answer::{Answer, list_within},
    call::Call,
    problem::Problem,
    request::{Id, Page},
};

pub(in crate::ingress) async fn get_jobs(call: Call) -> Answer {
    let Page { before, limit } = call.fields()?;
    let jobs = call
        .state
        .api
        .jobs(&call.caller, before.as_deref(), limit)
        .await?;
    list_within(&call, "jobs", jobs)
}

pub(in crate::ingress) async fn get_job(Id(id): Id, call: Call) -> Answer {
    let job = call.state.api.job(&call.caller, &id).await?;
    Ok(Json(job).into_response())
}

pub(in crate::ingress) async fn stop_job(Id(path): Id, call: Call) -> Answer {
    let Some(id) = path.strip_suffix(":stop") else {
        return Err(Problem::bad_request(
            "a job takes POST with :stop behind its id, and nothing else",
        ));
    };
    let job = call.state.api.stop_job(&call.caller, id).await?;
    Ok(Json(job).into_response())
}
