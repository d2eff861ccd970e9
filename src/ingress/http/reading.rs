//! Tasks, queues and acts over HTTP, as they are now; fsck, which may also mend them.

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

pub(super) async fn list_tasks(call: Call) -> Answer {
    let list = call
        .state
        .api
        .list_tasks(&call.caller, json::search::pages_of_query(call.query()))
        .await?;
    within(&call, &json::search::List::from(&list))
}

pub(super) async fn get_task(Id(id): Id, call: Call) -> Answer {
    // The room comes before the JSON.
    let room = |bytes| {
        let room = call.state.budget.answer(&call.caller.access, bytes);
        room.map_err(|no_room| Problem::from(Excess::from(no_room)))
    };
    let (file, room) = call.state.api.task_file(&call.caller, &id, room).await?;
    let answer = within(&call, &json::history::TaskFile::from(&file))?;
    drop((file, room));
    Ok(answer)
}

pub(super) async fn get_results(Id(id): Id, call: Call) -> Answer {
    let mut pages = call.state.api.results(&call.caller, &id).await?;
    // The room comes before the results: they may have 100 MiB. It is that of a page, because the
    // next one is read when the client has taken the one before.
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

pub(super) async fn explain_task(call: Call) -> Answer {
    let question = json::explain::question(call.query())?;
    let explanation = call.state.api.explain(&call.caller, &question).await?;
    within(&call, &json::explain::Explanation::from(&explanation))
}

pub(super) async fn get_queues(call: Call) -> Answer {
    let queues = call.state.api.queues(&call.caller).await?;
    list_within(&call, "queues", queues)
}

pub(super) async fn get_books(call: Call) -> Answer {
    let queue = json::books::queue_of_query(call.query())?;
    let books = call.state.api.books(&call.caller, &queue).await?;
    within(&call, &json::books::Books::from(&books))
}

pub(super) async fn get_dump(call: Call) -> Answer {
    let (queue, shard, limit) = json::fsck::dump(call.query())?;
    let shards = call
        .state
        .api
        .dump(&call.caller, &queue, shard, limit)
        .await?;
    within(&call, &json::fsck::Dump::new(&queue, shards))
}

pub(super) async fn fsck(mut call: Call) -> Answer {
    let request = call.json(json::fsck::request).await?;
    let page = call.state.api.fsck(&call.caller, request).await?;
    within(&call, &json::fsck::Page::from(&page))
}

pub(super) async fn get_acts(call: Call) -> Answer {
    let Page { before, limit } = call.fields()?;
    let acts = call
        .state
        .api
        .acts(&call.caller, before.as_deref(), limit)
        .await?;
    list_within(&call, "acts", acts.iter().map(json::read::Act::from))
}
