//! HTTP handlers that read tasks, queues, acts and metrics, and the one for fsck, which may also
//! repair what it finds.

use axum::{http::header, response::IntoResponse};
use futures::{StreamExt as _, stream};
use serde_json::json;

use super::{
    super::{
        json::{self, large::Entry},
        tally::Excess,
    },
    answer::{Answer, LARGE, list_within, streamed, within},
    call::Call,
    problem::Problem,
    request::{Id, Page},
};
use crate::telemetry::{OPENMETRICS, metrics};

pub(in crate::ingress) async fn list_tasks(call: Call) -> Answer {
    let list = call
        .state
        .api
        .list_tasks(&call.caller, json::search::pages_of_query(call.query()))
        .await?;
    within(&call, &list)
}

pub(in crate::ingress) async fn get_task(Id(id): Id, call: Call) -> Answer {
    // Reserve memory for the answer before building the JSON.
    let room = |bytes| {
        let room = call.state.budget.answer(&call.caller.access, bytes);
        room.map_err(|no_room| Problem::from(Excess::from(no_room)))
    };
    let (file, room) = call.state.api.task_file(&call.caller, &id, room).await?;
    let answer = within(&call, &json::history::TaskFile::from(&file))?;
    drop((file, room));
    Ok(answer)
}

pub(in crate::ingress) async fn get_results(Id(id): Id, call: Call) -> Answer {
    let mut pages = call.state.api.results(&call.caller, &id).await?;
    // Reserve memory before reading the results, which may have 100 MiB. One page is enough,
    // because the next one is read only after the client has taken the one before.
    let room = call
        .state
        .budget
        .answer(&call.caller.access, pages.largest())
        .map_err(Excess::from)?;
    let first = pages.next().await?.unwrap_or_default();
    if pages.bytes() <= LARGE && pages.is_over() {
        let answer = list_within(
            &call,
            "results",
            first.iter().map(json::read::TaskResult::from),
        )?;
        drop((first, room));
        return Ok(answer);
    }
    let rest = stream::unfold(pages, async |mut pages| {
        let page = pages.next().await.transpose()?;
        Some((page, pages))
    });
    let pages = stream::iter([Ok(first)]).chain(rest).boxed();
    Ok(streamed(
        Entry::new(&json!({})),
        "results",
        pages,
        json::read::large,
        room,
    ))
}

pub(in crate::ingress) async fn explain_task(call: Call) -> Answer {
    let question = json::explain::question(call.query())?;
    let explanation = call.state.api.explain(&call.caller, &question).await?;
    within(&call, &explanation)
}

pub(in crate::ingress) async fn get_queues(call: Call) -> Answer {
    let queues = call.state.api.queues(&call.caller).await?;
    list_within(&call, "queues", queues)
}

pub(in crate::ingress) async fn get_queue(Id(queue): Id, call: Call) -> Answer {
    let wait = json::query::wait_drained(call.query()).map_err(Problem::bad_request)?;
    let queue = call.state.api.queue(&call.caller, &queue, wait).await?;
    within(&call, &queue)
}

pub(in crate::ingress) async fn get_workers(call: Call) -> Answer {
    let queue = json::books::queue_of_query(call.query())?;
    let workers = call.state.api.workers(&call.caller, &queue).await?;
    within(&call, &workers)
}

pub(in crate::ingress) async fn get_processes(call: Call) -> Answer {
    let processes = call.state.api.processes(&call.caller).await?;
    list_within(&call, "processes", processes)
}

pub(in crate::ingress) async fn get_history(call: Call) -> Answer {
    let queue = json::books::queue_of_query(call.query())?;
    let history = call.state.api.depth_history(&call.caller, &queue).await?;
    within(&call, &history)
}

pub(in crate::ingress) async fn get_books(call: Call) -> Answer {
    let queue = json::books::queue_of_query(call.query())?;
    let books = call.state.api.books(&call.caller, &queue).await?;
    within(&call, &json::books::Books::from(&books))
}

pub(in crate::ingress) async fn get_dump(call: Call) -> Answer {
    let (queue, shard, limit) = json::fsck::dump(call.query())?;
    let shards = call
        .state
        .api
        .dump(&call.caller, &queue, shard, limit)
        .await?;
    within(&call, &json::fsck::Dump::new(&queue, shards))
}

pub(in crate::ingress) async fn fsck(mut call: Call) -> Answer {
    let request = call.json(json::fsck::request).await?;
    let page = call.state.api.fsck(&call.caller, request).await?;
    within(&call, &page)
}

pub(in crate::ingress) async fn get_acts(call: Call) -> Answer {
    let Page { before, limit } = call.fields()?;
    let acts = call
        .state
        .api
        .acts(&call.caller, before.as_deref(), limit)
        .await?;
    list_within(&call, "acts", acts)
}

pub(in crate::ingress) async fn get_metrics(call: Call) -> Answer {
    let Call {
        state,
        caller,
        headers,
        ..
    } = &call;
    state.api.may_read_metrics(caller)?;
    metrics::requests_held(state.budget.held());
    metrics::waiting_calls(state.api.waits.held());
    metrics::process();
    let accepted = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    let (kind, text) = match accepted.contains("application/openmetrics-text") {
        true => (OPENMETRICS, metrics::openmetrics(&state.metrics)),
        false => (
            "text/plain; version=0.0.4; charset=utf-8",
            state.metrics.render(),
        ),
    };
    let room = state
        .budget
        .small_answer(&caller.access, text.len())
        .map_err(Excess::from)?;
    let mut answer = ([(header::CONTENT_TYPE, kind)], text).into_response();
    answer.extensions_mut().insert(room);
    Ok(answer)
}
