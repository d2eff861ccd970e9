//! Inserts over gRPC, also those that wait.

use std::time::Duration;

use prost::Message as _;
use tonic::{Response, Status};

use super::{Service, results};
use crate::{
    ingress::budget::{Share, WAITING_TASK},
    model::{Caller, NewTask},
    wire::pb,
};

impl Service {
    /// Inserts, and waits for the ends of the tasks where the request says so. The room of the request's parts returns
    /// before the wait.
    pub(super) async fn insert(
        &self,
        caller: &Caller,
        share: &Share,
        wait: Result<Option<Duration>, String>,
        tasks: Vec<Result<NewTask, String>>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let Some(wait) = wait.map_err(Status::invalid_argument)? else {
            let answers = self.0.api.insert(caller, tasks).await?;
            return Ok(Response::new(pb::InsertTasksResponse { results: results(answers) }));
        };
        let bytes = tasks.len() * WAITING_TASK;
        let (stored, room) = (|| share.become_answer(bytes), |bytes| self.0.budget.answer(bytes).ok());
        let (awaited, room) = self.0.api.insert_and_wait(caller, tasks, wait, stored, room).await?;
        let mut answer = pb::InsertTasksResponse { results: results(awaited) };
        drop(room);
        let room = self.0.budget.answer(answer.encoded_len());
        if room.is_err() {
            // The tasks are stored: the caller hears so.
            answer.results.iter_mut().for_each(|one| one.results.clear());
        }
        let mut response = Response::new(answer);
        if let Ok(room) = room {
            response.extensions_mut().insert(room);
        }
        Ok(response)
    }
}
