//! Events of tasks as Server-Sent Events, and inserts that wait.

use std::{collections::HashMap, convert::Infallible, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use serde::Deserialize;

use super::{
    super::{
        json::{self, events::End, insert::NewTasks, large::Entry},
        net::budget::WAITING_TASK,
    },
    answer::{Answer, LARGE, list, one_page, streamed, within_budget},
    call::Call,
    problem::Problem,
    request::Id,
};
use crate::{
    api::Watching,
    model::{InsertStatus, WaitFor, Watched},
};

/// How long a browser waits before it connects again.
const RETRY: &str = "retry: 1000\n\n";

/// The header with the last event that the caller has seen. Browsers send it; other clients may put
/// the id into the query.
const LAST_EVENT_ID: &str = "last-event-id";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfTask {
    last_event_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfQueue {
    queue: String,
    last_event_id: Option<String>,
}

pub(in crate::ingress) async fn watch_task(Id(id): Id, call: Call) -> Answer {
    let OfTask { last_event_id } = call.fields()?;
    let last = last_event(&call.headers, last_event_id)?;
    let watching = call
        .state
        .api
        .watch_task(&call.caller, &id, last.as_deref())
        .await?;
    // A browser that gets 204 does not connect again.
    Ok(if watching.is_over() {
        StatusCode::NO_CONTENT.into_response()
    } else {
        events(watching)
    })
}

pub(in crate::ingress) async fn watch_queue(call: Call) -> Answer {
    let OfQueue {
        queue,
        last_event_id,
    } = call.fields()?;
    let last = last_event(&call.headers, last_event_id)?;
    Ok(events(
        call.state
            .api
            .watch_queue(&call.caller, &queue, last.as_deref())
            .await?,
    ))
}

pub(super) fn last_event(
    headers: &HeaderMap,
    of_query: Option<String>,
) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(LAST_EVENT_ID) else {
        return Ok(of_query);
    };
    let text = value
        .to_str()
        .map_err(|_| Problem::bad_request("the header Last-Event-ID is no text"))?;
    Ok(Some(text.to_owned()))
}

/// The events of a watch, as a stream.
pub(super) fn events(watching: Watching) -> Response {
    let events = stream::unfold(watching, async |mut watching| {
        let next = watching.next().await?;
        Some((written(next, watching.key()), watching))
    });
    event_stream(events)
}

/// An answer of Server-Sent Events.
pub(super) fn event_stream(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let events = stream::once(async { Bytes::from_static(RETRY.as_bytes()) }).chain(events);
    let head = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        // A proxy that buffers would hold events back.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (head, Body::from_stream(events.map(Ok::<_, Infallible>))).into_response()
}

fn written(next: Watched, key: Option<&Bytes>) -> Bytes {
    let text = |value: Result<String, _>| {
        value.unwrap_or_else(|error: serde_json::Error| error.to_string())
    };
    let text = match next {
        Watched::Event(event) => {
            let id = event.event_id();
            let data = text(serde_json::to_string(&json::events::Event::new(
                &event, key,
            )));
            format!("id: {id}\nevent: status\ndata: {data}\n\n")
        }
        Watched::Gap => "event: gap\ndata: {}\n\n".to_owned(),
        Watched::Beat => ": beat\n\n".to_owned(),
        Watched::End(end) => format!(
            "event: end\ndata: {}\n\n",
            text(serde_json::to_string(&End::from(end)))
        ),
    };
    text.into()
}

/// Inserts tasks, and answers when they are final, or their trees have ended, or the wait is over. The
/// memory of the request's parts is given back before the wait.
pub(in crate::ingress) async fn insert_and_wait(
    call: Call,
    asked: NewTasks,
    wait: (Duration, WaitFor),
) -> Answer {
    let Call {
        state,
        caller,
        share,
        ..
    } = call;
    let NewTasks { tasks, is_single } = asked;
    let bytes = tasks.len() * WAITING_TASK;
    let (stored, room) = (
        || share.become_answer(bytes),
        |bytes| state.budget.answer(&caller.access, bytes).ok(),
    );
    let (mut awaited, room) = state
        .api
        .insert_and_wait(&caller, tasks, wait, usize::MAX, stored, room)
        .await?;
    let is_rejected = is_single
        && awaited
            .iter()
            .all(|one| one.answer.status == InsertStatus::Rejected);
    let results = awaited.iter().flat_map(|one| &one.results);
    let bytes: usize = results
        .map(|result| result.result.len() + result.worker.len())
        .sum();
    let answer = match room {
        Some(room) if bytes > LARGE => streamed(
            Entry::new(&serde_json::json!({})),
            "results",
            one_page(awaited),
            json::events::large,
            room,
        ),
        room => {
            let results = || {
                awaited
                    .iter()
                    .map(json::events::AwaitedTask::from)
                    .collect::<Vec<_>>()
            };
            let answer = within_budget(
                &state.budget,
                &caller.access,
                &HashMap::from([("results", results())]),
            );
            drop(room);
            match answer {
                Ok(answer) => answer,
                // The tasks are stored, so the caller must get an answer.
                Err(_) => {
                    awaited.iter_mut().for_each(|one| one.results.clear());
                    list(
                        "results",
                        awaited.iter().map(json::events::AwaitedTask::from),
                    )?
                }
            }
        }
    };
    Ok(if is_rejected {
        (StatusCode::UNPROCESSABLE_ENTITY, answer).into_response()
    } else {
        answer
    })
}
