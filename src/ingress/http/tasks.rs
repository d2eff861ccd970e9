//! New tasks, and the calls of workers, over HTTP.

use axum::{Json, http::StatusCode, response::IntoResponse};

use super::{
    super::{State, json, traced},
    answer::{Answer, item_answers, leased, list, list_within, within},
    call::Call,
    events, idempotency, ndjson,
    problem::Problem,
    request,
};
use crate::model::{InsertStatus, LeasedTask};

pub(in crate::ingress) async fn insert_tasks(mut call: Call) -> Answer {
    let wait = json::events::wait(call.query()).map_err(Problem::bad_request)?;
    if request::is_ndjson(&call.headers)? {
        if wait.is_some() {
            return Err(Problem::bad_request(
                "wait is for tasks in JSON, not for lines of any number",
            ));
        }
        idempotency::refuse(&call.headers)?;
        return ndjson::insert(call).await;
    }
    let expected = "application/json (a task or an array of them) or application/x-ndjson";
    let mut asked = call.counted_or(expected, json::insert::new_tasks).await?;
    idempotency::adopt(&call.headers, &mut asked)?;
    traced::adopt(
        &mut asked.tasks,
        traced::caller_context(&call.headers).as_deref(),
    );
    if let Some(wait) = wait {
        return events::insert_and_wait(call, asked, wait).await;
    }
    let answers = call.state.api.insert(&call.caller, asked.tasks).await?;
    let is_rejected = asked.is_single
        && answers
            .iter()
            .all(|answer| answer.status == InsertStatus::Rejected);
    let answer = list("results", answers)?;
    Ok(if is_rejected {
        (StatusCode::UNPROCESSABLE_ENTITY, answer).into_response()
    } else {
        answer
    })
}

pub(in crate::ingress) async fn get_tasks(mut call: Call) -> Answer {
    let request = call.json(json::work::get_tasks).await?;
    // The call may wait, and its body has been dropped.
    call.share.become_answer(0);
    let leases = call.state.api.get(&call.caller, Ok(request)).await?;
    let head = || json::large::Entry::new(&serde_json::json!({}));
    leased(&call, leases, head, |tasks| {
        list_within(
            &call,
            "tasks",
            tasks.iter().map(json::work::LeasedTask::from),
        )
    })
}

pub(in crate::ingress) async fn complete_tasks(mut call: Call) -> Answer {
    let (batch, next) = call.counted(json::work::completions).await?;
    let Call {
        state: State { api, .. },
        caller,
        ..
    } = &call;
    let Some(next) = next else {
        return item_answers(api.complete(caller, batch).await?);
    };
    let (answers, leases) = api.complete_and_get(caller, batch, Ok(next)).await?;
    // If there is no room for the tasks, their leases go back. The reports are done in any case.
    let head = || json::work::Completed::before_tasks(&answers);
    let answer = |tasks: &[LeasedTask]| within(&call, &json::work::Completed::new(&answers, tasks));
    leased(&call, leases, head, answer)
        .or_else(|_no_room| Ok(Json(json::work::Completed::new(&answers, &[])).into_response()))
}

pub(in crate::ingress) async fn reject_tasks(mut call: Call) -> Answer {
    let batch = call.counted(json::work::rejections).await?;
    item_answers(call.state.api.reject(&call.caller, batch).await?)
}

pub(in crate::ingress) async fn extend_tasks(mut call: Call) -> Answer {
    let batch = call.counted(json::work::extensions).await?;
    item_answers(call.state.api.extend(&call.caller, batch).await?)
}
