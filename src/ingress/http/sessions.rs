//! Sessions over HTTP.

use axum::{Json, response::IntoResponse};
use http_body::Body as _;

use super::{
    super::{json, net::delivery::Deliveries},
    answer::{Answer, LARGE, one_page, streamed},
    call::Call,
};
use crate::model::LeasedTask;

pub(in crate::ingress) async fn open_session(mut call: Call) -> Answer {
    let open = call.json(json::sessions::open_session).await?;
    let opened = call.state.api.open_session(&call.caller, Ok(open)).await?;
    Ok(Json(opened).into_response())
}

pub(in crate::ingress) async fn want_tasks(mut call: Call) -> Answer {
    let want = call.json(json::sessions::want_tasks).await?;
    // The call may wait, and its body has been dropped.
    call.share.become_answer(0);
    let room = |bytes| {
        call.state
            .budget
            .answer(&call.caller.access, bytes)
            .map_err(|no_room| no_room.to_string())
    };
    let (mut wanted, room) = call
        .state
        .api
        .want_tasks(&call.caller, Ok(want), room)
        .await?;
    let deliveries = std::mem::take(&mut wanted.leases.deliveries);
    let bytes: usize = wanted.leases.tasks.iter().map(LeasedTask::weight).sum();
    let mut answer = match room {
        Some(room) if bytes > LARGE => {
            let head = json::sessions::before_tasks(&wanted);
            streamed(
                head,
                "tasks",
                one_page(wanted.leases.tasks),
                json::work::large,
                room,
            )
        }
        room => {
            let mut answer = Json(json::sessions::WantedTasks::from(&wanted)).into_response();
            let bytes = answer.body().size_hint().exact().unwrap_or_default();
            if let Some(room) = room {
                // The session book has the tasks already, so the answer must go out.
                room.become_answer(usize::try_from(bytes).unwrap_or(usize::MAX));
                answer.extensions_mut().insert(room);
            }
            answer
        }
    };
    answer.extensions_mut().insert(Deliveries::from(deliveries));
    Ok(answer)
}

pub(in crate::ingress) async fn surrender_tasks(mut call: Call) -> Answer {
    let session = call.json(json::sessions::session_call).await?;
    let (surrendered, in_hand) = call
        .state
        .api
        .surrender_tasks(&call.caller, session)
        .await?;
    Ok(Json(json::sessions::Surrendered {
        surrendered,
        in_hand,
    })
    .into_response())
}

pub(in crate::ingress) async fn pending_count(mut call: Call) -> Answer {
    let session = call.json(json::sessions::session_call).await?;
    Ok(Json(call.state.api.pending_count(&call.caller, session).await?).into_response())
}

pub(in crate::ingress) async fn report_tasks(mut call: Call) -> Answer {
    let report = call.counted(json::sessions::report_tasks).await?;
    let reported = call.state.api.report_tasks(&call.caller, report).await?;
    Ok(Json(reported).into_response())
}

pub(in crate::ingress) async fn close_session(mut call: Call) -> Answer {
    let session = call.json(json::sessions::session_call).await?;
    Ok(Json(call.state.api.close_session(&call.caller, session).await?).into_response())
}
