//! Tasks, queues and acts over HTTP, as they are now; fsck, which may also mend them.

use axum::{Json, response::IntoResponse};

use super::{
    super::{json, tally::Excess},
    answer::{Answer, list, within},
    call::Call,
    problem::Problem,
    request::{Id, Page},
};

pub(super) async fn list_tasks(call: Call) -> Answer {
    let list = call.state.api.list_tasks(&call.caller, json::search::pages_of_query(call.query())).await?;
    within(&call.state.budget, Json(json::search::List::from(&list)).into_response())
}

pub(super) async fn get_task(Id(id): Id, call: Call) -> Answer {
    // The room comes before the JSON.
    let room = |bytes| call.state.budget.answer(bytes).map_err(|no_room| Problem::from(Excess::from(no_room)));
    let (file, room) = call.state.api.task_file(&call.caller, &id, room).await?;
    let answer = Json(json::history::TaskFile::from(&file)).into_response();
    drop((file, room));
    within(&call.state.budget, answer)
}

pub(super) async fn get_results(Id(id): Id, call: Call) -> Answer {
    // The room comes before the results: they may have 100 MiB.
    let room = |bytes| call.state.budget.answer(bytes).map_err(|no_room| Problem::from(Excess::from(no_room)));
    let (results, room) = call.state.api.results(&call.caller, &id, room).await?;
    let answer = list("results", results.iter().map(json::read::TaskResult::from))?;
    drop((results, room));
    within(&call.state.budget, answer)
}

pub(super) async fn explain_task(call: Call) -> Answer {
    let question = json::explain::question(call.query())?;
    let explanation = call.state.api.explain(&call.caller, &question).await?;
    within(&call.state.budget, Json(json::explain::Explanation::from(&explanation)).into_response())
}

pub(super) async fn get_queues(call: Call) -> Answer {
    within(&call.state.budget, list("queues", call.state.api.queues(&call.caller).await?)?)
}

pub(super) async fn get_books(call: Call) -> Answer {
    let queue = json::books::queue_of_query(call.query())?;
    let books = call.state.api.books(&call.caller, &queue).await?;
    within(&call.state.budget, Json(json::books::Books::from(&books)).into_response())
}

pub(super) async fn get_dump(call: Call) -> Answer {
    let (queue, shard, limit) = json::fsck::dump(call.query())?;
    let shards = call.state.api.dump(&call.caller, &queue, shard, limit).await?;
    within(&call.state.budget, Json(json::fsck::Dump::new(&queue, shards)).into_response())
}

pub(super) async fn fsck(mut call: Call) -> Answer {
    let request = call.json(json::fsck::request).await?;
    let page = call.state.api.fsck(&call.caller, request).await?;
    within(&call.state.budget, Json(json::fsck::Page::from(&page)).into_response())
}

pub(super) async fn get_acts(call: Call) -> Answer {
    let Page { before, limit } = call.fields()?;
    let acts = call.state.api.acts(&call.caller, before.as_deref(), limit).await?;
    within(&call.state.budget, list("acts", acts.iter().map(json::read::Act::from))?)
}
