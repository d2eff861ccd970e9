//! Sessions over HTTP.

use axum::{Extension, Json, body::Body, extract::State as Extract, http::HeaderMap, response::IntoResponse};

use http_body::Body as _;

use super::{
    super::{State, budget::Share, delivery::Deliveries, json, tally::Tally},
    answer::Answer,
    problem::Problem,
    request::{JSON, json_body},
};
use crate::model::{Caller, SessionCall};

pub(super) async fn open_session(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let open = json::sessions::open_session(&json_body(&state, &headers, body, JSON).await?)?;
    let opened = state.api.open_session(&caller, Ok(open)).await?;
    Ok(Json(json::sessions::SessionOpened::from(&opened)).into_response())
}

pub(super) async fn want_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let want = json::sessions::want_tasks(&json_body(&state, &headers, body, JSON).await?)?;
    // The call may wait, and its body is gone.
    share.become_answer(0);
    let room = |bytes| state.budget.answer(bytes).map_err(|no_room| no_room.to_string());
    let (mut wanted, room) = state.api.want_tasks(&caller, Ok(want), room).await?;
    let mut answer = Json(json::sessions::WantedTasks::from(&wanted)).into_response();
    let bytes = answer.body().size_hint().exact().unwrap_or_default();
    if let Some(room) = room {
        // The session's book has the tasks, so their answer goes out.
        room.become_answer(usize::try_from(bytes).unwrap_or(usize::MAX));
        answer.extensions_mut().insert(room);
    }
    answer.extensions_mut().insert(Deliveries::from(std::mem::take(&mut wanted.leases.deliveries)));
    Ok(answer)
}

pub(super) async fn surrender_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let call = call(&state, &headers, body).await?;
    let (surrendered, in_hand) = state.api.surrender_tasks(&caller, call).await?;
    Ok(Json(json::sessions::Surrendered { surrendered, in_hand }).into_response())
}

pub(super) async fn pending_count(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let call = call(&state, &headers, body).await?;
    Ok(Json(state.api.pending_count(&caller, call).await?).into_response())
}

pub(super) async fn report_tasks(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    Extension(share): Extension<Share>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let body = json_body(&state, &headers, body, JSON).await?;
    let mut tally = Tally::new(&state.settings, &share, body.len());
    let report = json::sessions::report_tasks(&body, &mut tally)?;
    tally.keep();
    let reported = state.api.report_tasks(&caller, report).await?;
    Ok(Json(json::sessions::TasksReported::from(&reported)).into_response())
}

pub(super) async fn close_session(
    Extract(state): Extract<State>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let call = call(&state, &headers, body).await?;
    Ok(Json(state.api.close_session(&caller, call).await?).into_response())
}

async fn call(state: &State, headers: &HeaderMap, body: Body) -> Result<SessionCall, Problem> {
    Ok(json::sessions::session_call(&json_body(state, headers, body, JSON).await?)?)
}
