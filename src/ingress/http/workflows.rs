//! Workflows and their executions over HTTP.

use std::{collections::HashMap, io, mem, time::Duration};

use axum::{
    Json,
    body::Body,
    http::{StatusCode, header},
    response::IntoResponse,
};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{StreamExt as _, stream};

use super::{
    super::{
        json::{self, workflows::HistoryEvent},
        tally::Excess,
    },
    answer::{Answer, LARGE, within},
    call::Call,
    problem::Problem,
    request::{Id, ThreeIds, typed_body},
};
use crate::{api, model::WorkflowVersion, store::PAGE_BYTES};

/// The types that a definition may have. Browsers send none of them to other sites unasked.
const DEFINITION: [&str; 4] = [
    "application/json",
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
];

fn version(ThreeIds(namespace, name, version): ThreeIds) -> WorkflowVersion {
    WorkflowVersion {
        namespace,
        name,
        version,
    }
}

pub(in crate::ingress) async fn list_workflows(call: Call) -> Answer {
    let pages = json::workflows::workflow_pages(call.query()).map_err(Problem::bad_request)?;
    let api = &call.state.api;
    let list = api
        .workflows(&call.caller, &pages.namespace, &pages.cursor, pages.limit)
        .await?;
    within(&call, &list)
}

pub(in crate::ingress) async fn get_workflow(path: ThreeIds, call: Call) -> Answer {
    let workflow = call
        .state
        .api
        .workflow(&call.caller, &version(path))
        .await?;
    within(&call, &workflow)
}

pub(in crate::ingress) async fn deploy_workflow(mut call: Call) -> Answer {
    let dry_run = json::workflows::is_dry_run(call.query()).map_err(Problem::bad_request)?;
    let body = mem::take(&mut call.body);
    let expected = "application/yaml or application/json";
    let body = typed_body(&call.state, &call.headers, body, &DEFINITION, expected).await?;
    let text = String::from_utf8(body.to_vec())
        .map_err(|error| Problem::bad_request(format!("the body is not UTF-8: {error}")))?;
    let api = &call.state.api;
    match api.deploy_workflow(&call.caller, text, dry_run).await {
        Ok((workflow, true)) => Ok((StatusCode::CREATED, Json(workflow)).into_response()),
        Ok((workflow, false)) => Ok(Json(workflow).into_response()),
        Err(api::Error::WrongDefinition(mistakes)) => {
            let mistakes: Vec<json::workflows::Mistake> =
                mistakes.into_iter().map(Into::into).collect();
            let body = Json(HashMap::from([("mistakes", mistakes)]));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, body).into_response())
        }
        Err(error) => Err(error.into()),
    }
}

pub(in crate::ingress) async fn delete_workflow(path: ThreeIds, call: Call) -> Answer {
    let api = &call.state.api;
    api.delete_workflow(&call.caller, &version(path)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /v1/workflows/NAMESPACE/NAME/VERSION:start`. The router takes the whole segment for the
/// version.
pub(in crate::ingress) async fn start_execution(path: ThreeIds, mut call: Call) -> Answer {
    let mut workflow = version(path);
    let Some(version) = workflow.version.strip_suffix(":start") else {
        let why = "a workflow takes POST /v1/workflows/NAMESPACE/NAME/VERSION:start";
        return Err(Problem::new(StatusCode::NOT_FOUND, why));
    };
    workflow.version = version.to_owned();
    let json::workflows::Start { input, id, wait } = call.json(json::workflows::start).await?;
    let given = Some(id).filter(|id| !id.is_empty());
    let wait = wait.map(Duration::from);
    // The input is not in memory any more while the call waits.
    let stored = || call.share.become_answer(0);
    let api = &call.state.api;
    let (execution, is_new) = api
        .start_execution(&call.caller, &workflow, (input, given), wait, stored)
        .await?;
    let mut answer = within(&call, &execution)?;
    let is_accepted = match wait {
        Some(_) => !execution.status.is_final(),
        None => is_new,
    };
    if is_accepted {
        *answer.status_mut() = StatusCode::ACCEPTED;
    }
    Ok(answer)
}

pub(in crate::ingress) async fn list_executions(call: Call) -> Answer {
    let pages = json::workflows::execution_pages(call.query());
    let list = call.state.api.executions(&call.caller, pages).await?;
    within(&call, &list)
}

pub(in crate::ingress) async fn get_execution(Id(id): Id, call: Call) -> Answer {
    let wait = json::query::wait(call.query()).map_err(Problem::bad_request)?;
    let api = &call.state.api;
    let execution = api.execution(&call.caller, &id, wait).await?;
    within(&call, &execution)
}

/// `POST /v1/executions/ID:cancel`. The router takes the whole segment for the id.
pub(in crate::ingress) async fn cancel_execution(Id(path): Id, call: Call) -> Answer {
    let Some(id) = path.strip_suffix(":cancel") else {
        let why = "an execution takes POST /v1/executions/ID:cancel";
        return Err(Problem::new(StatusCode::NOT_FOUND, why));
    };
    let execution = call.state.api.cancel_execution(&call.caller, id).await?;
    within(&call, &execution)
}

/// Writes a line for each event, page by page while the client reads.
pub(in crate::ingress) async fn get_history(Id(id): Id, call: Call) -> Answer {
    let after = json::workflows::after(call.query()).map_err(Problem::bad_request)?;
    let api = &call.state.api;
    let mut pages = api.execution_history(&call.caller, &id, after).await?;
    let first = pages.next().await?;
    let bytes: usize = first.iter().map(|(_, entry)| entry.len()).sum();
    // One page at a time is in memory. A short history has only this one.
    let bytes = if bytes > LARGE {
        bytes.max(PAGE_BYTES)
    } else {
        bytes.max(LARGE)
    };
    let room = call.state.budget.answer(&call.caller.access, bytes);
    let room = room.map_err(Excess::from)?;
    let rest = stream::unfold(pages, async |mut pages| match pages.next().await {
        Ok(page) if page.is_empty() => None,
        Ok(page) => Some((Ok(lines(&page)), pages)),
        Err(error) => Some((Err(io::Error::other(error)), pages)),
    });
    let all = stream::iter([Ok(lines(&first))]).chain(rest);
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    let mut answer = (kind, Body::from_stream(all)).into_response();
    answer.extensions_mut().insert(room);
    Ok(answer)
}

fn lines(page: &[(u64, Bytes)]) -> Bytes {
    let mut text = BytesMut::new();
    for (seq, entry) in page {
        let written =
            HistoryEvent::read(*seq, entry).and_then(|event| serde_json::to_vec(&event).ok());
        // An entry that this version cannot read is shown as it is.
        text.put_slice(written.as_deref().unwrap_or(entry));
        text.put_u8(b'\n');
    }
    text.freeze()
}
