//! Changes of tasks and queues over HTTP.

use axum::{Json, http::StatusCode, response::IntoResponse};

use super::{super::json, answer::Answer, call::Call, problem::Problem, request::Id};
use crate::model::TasksChanged;

pub(in crate::ingress) async fn cancel_tasks(mut call: Call) -> Answer {
    let change = call.counted(json::bulk::change).await?;
    changed(&call.state.api.cancel_chosen(&call.caller, change).await?)
}

pub(in crate::ingress) async fn retry_tasks(mut call: Call) -> Answer {
    let change = call.counted(json::bulk::change).await?;
    changed(&call.state.api.retry_tasks(&call.caller, change).await?)
}

pub(in crate::ingress) async fn update_tasks(mut call: Call) -> Answer {
    let (request, update) = call.counted(json::changes::update).await?;
    changed(
        &call
            .state
            .api
            .update_tasks(&call.caller, request, update)
            .await?,
    )
}

pub(in crate::ingress) async fn requeue_tasks(mut call: Call) -> Answer {
    let (request, requeue) = call.counted(json::changes::requeue).await?;
    changed(
        &call
            .state
            .api
            .requeue_tasks(&call.caller, request, requeue)
            .await?,
    )
}

fn changed(changed: &TasksChanged) -> Answer {
    Ok(Json(json::bulk::Changed::from(changed)).into_response())
}

pub(in crate::ingress) async fn cancel_task(Id(id): Id, call: Call) -> Answer {
    let answer = call.state.api.cancel_task(&call.caller, &id).await?;
    Ok(Json(answer).into_response())
}

/// `POST /v1/queues/NAME:pause` and `:resume`. The router cannot tell them apart, because it takes
/// the whole segment for the name.
pub(in crate::ingress) async fn pause_or_resume(Id(asked): Id, call: Call) -> Answer {
    let (queue, changed, paused) = match asked.rsplit_once(':') {
        Some((queue, "pause")) => (
            queue,
            call.state.api.pause_queue(&call.caller, queue).await?,
            true,
        ),
        Some((queue, "resume")) => (
            queue,
            call.state.api.resume_queue(&call.caller, queue).await?,
            false,
        ),
        _ => {
            let why = "a queue takes POST /v1/queues/NAME:pause and /v1/queues/NAME:resume";
            return Err(Problem::new(StatusCode::NOT_FOUND, why));
        }
    };
    Ok(Json(json::changes::Pausing {
        queue,
        paused,
        changed,
    })
    .into_response())
}
