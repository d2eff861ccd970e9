//! Watching tasks and queues over gRPC, and inserts that wait.

use std::pin::Pin;

use futures::{Stream, stream};
use tonic::{Response, Status};

use super::{Service, results};
use crate::{
    api::Watching,
    model::{Caller, NewTask, WatchEnd, Watched},
    wire::pb,
};

/// The events of a watch.
pub(super) type Events = Pin<Box<dyn Stream<Item = Result<pb::TaskEvent, Status>> + Send>>;

/// The last message of a watch that ended before its task did is its status.
pub(super) fn events(watching: Watching) -> Events {
    Box::pin(stream::unfold(watching, async |mut watching| {
        loop {
            let next = match watching.next().await? {
                Watched::Event(event) => Ok(event.into()),
                Watched::Gap => Ok(pb::TaskEvent { gap: true, ..Default::default() }),
                // HTTP/2 has pings of its own.
                Watched::Beat => continue,
                Watched::End(end) => Err(status(end)),
            };
            return Some((next, watching));
        }
    }))
}

fn status(end: WatchEnd) -> Status {
    match end {
        WatchEnd::Stopping => Status::unavailable(end.says()),
        WatchEnd::Unauthenticated => Status::unauthenticated(end.says()),
        WatchEnd::TooSlow => Status::resource_exhausted(end.says()),
    }
}

impl Service {
    /// Inserts, and waits for the ends of the tasks where the request says so.
    pub(super) async fn insert(
        &self,
        caller: &Caller,
        wait: Result<Option<std::time::Duration>, String>,
        tasks: Vec<Result<NewTask, String>>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let Some(wait) = wait.map_err(Status::invalid_argument)? else {
            let answers = self.0.api.insert(caller, tasks).await?;
            return Ok(Response::new(pb::InsertTasksResponse { results: results(answers) }));
        };
        let room = |bytes| {
            let room = self.0.budget.answer(bytes);
            room.map_err(|error| Status::resource_exhausted(error.to_string()))
        };
        let (awaited, _room) = self.0.api.insert_and_wait(caller, tasks, wait, room).await?;
        self.within(pb::InsertTasksResponse { results: results(awaited) })
    }
}
