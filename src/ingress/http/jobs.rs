//! Changes of many tasks, and jobs, over HTTP.

use axum::{
    Extension, Json,
    body::Body,
    extract::{Query, State as Extract, rejection::QueryRejection},
    http::HeaderMap,
    response::IntoResponse,
};
use serde::Deserialize;

use super::{
    super::{State, budget::Share, json, tally::Tally},
    answer::{Answer, list, within},
    problem::Problem,
    request::{Id, JSON, json_body, task_id},
};
use crate::model::Caller;

pub(super) async fn retry_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let change = json::jobs::change(&body, &mut tally)?;
    tally.keep();
    let changed = state.api.retry_tasks(&caller, change).await?;
    Ok(Json(json::jobs::Changed::from(&changed)).into_response())
}

/// Which jobs are asked for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Jobs {
    before: Option<String>,
    #[serde(default)]
    limit: u32,
}

pub(super) async fn get_jobs(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Jobs>, QueryRejection>,
) -> Answer {
    let Query(Jobs { before, limit }) = query.map_err(|error| Problem::bad_request(error.body_text()))?;
    let jobs = state.api.jobs(&caller, before.as_deref(), limit).await?;
    within(&state.budget, list("jobs", jobs.iter().map(json::jobs::Job::from))?)
}

pub(super) async fn get_job(Extract(state): Extract<State>, Extension(caller): Extension<Caller>, id: Id) -> Answer {
    let job = state.api.job(&caller, &task_id(id)).await?;
    Ok(Json(json::jobs::Job::from(&job)).into_response())
}

pub(super) async fn stop_job(Extract(state): Extract<State>, Extension(caller): Extension<Caller>, id: Id) -> Answer {
    let path = task_id(id);
    let Some(id) = path.strip_suffix(":stop") else {
        return Err(Problem::bad_request("a job takes POST with :stop behind its id, and nothing else"));
    };
    let job = state.api.stop_job(&caller, id).await?;
    Ok(Json(json::jobs::Job::from(&job)).into_response())
}
