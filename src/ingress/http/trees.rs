//! Trees over HTTP.

use axum::{Json, http::StatusCode, response::IntoResponse};
use bytes::Bytes;
use futures::stream;

use super::{
    super::json::{self, events::End},
    answer::{Answer, within},
    call::Call,
    events::{event_stream, last_event},
    problem::Problem,
    request::Id,
};
use crate::{api::NextOfTree, model::TreeView};

pub(in crate::ingress) async fn list_trees(call: Call) -> Answer {
    let pages = json::trees::pages_of_query(call.query());
    let trees = call.state.api.trees(&call.caller, pages).await?;
    within(&call, &trees)
}

pub(in crate::ingress) async fn get_tree(Id(id): Id, call: Call) -> Answer {
    let wait = json::query::wait(call.query()).map_err(Problem::bad_request)?;
    let tree = call.state.api.tree(&call.caller, &id, wait).await?;
    within(&call, &tree)
}

pub(in crate::ingress) async fn watch_tree(Id(id): Id, call: Call) -> Answer {
    let last = last_event(&call.headers, None)?;
    let watching = call.state.api.watch_tree(&call.caller, &id).await?;
    // A browser that gets 204 does not connect again.
    if last.is_some_and(|last| watching.ended_as().is_some_and(|end| id_of(end) == last)) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let events = stream::unfold(watching, async |mut watching| {
        let next = watching.next().await?;
        Some((written(next), watching))
    });
    Ok(event_stream(events))
}

/// The id of an event, which a browser sends when it connects again.
fn id_of(tree: &TreeView) -> String {
    format!("{}-{}", tree.epoch, tree.state)
}

fn written(next: NextOfTree) -> Bytes {
    let text = match next {
        NextOfTree::Tree(tree) => {
            let data = serde_json::to_string(&tree).unwrap_or_else(|error| error.to_string());
            format!("id: {}\nevent: tree\ndata: {data}\n\n", id_of(&tree))
        }
        NextOfTree::Beat => ": beat\n\n".to_owned(),
        NextOfTree::End(end) => {
            let data =
                serde_json::to_string(&End::from(end)).unwrap_or_else(|error| error.to_string());
            format!("event: end\ndata: {data}\n\n")
        }
        NextOfTree::Removed => {
            let data =
                serde_json::json!({"reason": "REMOVED", "detail": "the tree is not kept any more"});
            format!("event: end\ndata: {data}\n\n")
        }
    };
    text.into()
}

/// `POST /v1/trees/ID:cancel` and `:retry`. The router takes the whole segment for the id.
pub(in crate::ingress) async fn cancel_or_retry(Id(path): Id, call: Call) -> Answer {
    let api = &call.state.api;
    let bulk = match path.rsplit_once(':') {
        Some((id, "cancel")) => api.cancel_tree(&call.caller, id).await?,
        Some((id, "retry")) => api.retry_tree(&call.caller, id).await?,
        _ => {
            let why = "a tree takes POST /v1/trees/ID:cancel or POST /v1/trees/ID:retry";
            return Err(Problem::new(StatusCode::NOT_FOUND, why));
        }
    };
    Ok(Json(bulk).into_response())
}
