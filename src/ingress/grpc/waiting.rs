//! Inserts over gRPC, also those that wait.

use std::time::Duration;

use tonic::{Response, Status};

use super::{Service, results};
use crate::{
    model::{Caller, NewTask},
    wire::pb,
};

impl Service {
    /// Inserts, and waits for the ends of the tasks where the request says so.
    pub(super) async fn insert(
        &self,
        caller: &Caller,
        wait: Result<Option<Duration>, String>,
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
