//! Reading tasks, results and queues.

use tracing::Instrument as _;

use super::{
    error::Error,
    handle::{Api, span},
    reader::Reader,
    text::{ECHO, shorten},
};
use crate::model::{Caller, QueueView, TaskId, TaskResult, TaskView};

impl Api {
    /// A task with its status.
    pub async fn task(&self, caller: &Caller, id: &str) -> Result<TaskView, Error> {
        let id = task_id(id)?;
        let task = self.query()?.task(id).instrument(span("task", caller)).await?;
        task.ok_or(Error::NoSuchTask(id))
    }

    /// The results of a task, and the room that `room` gives for their bytes before they are read.
    pub async fn results<R, E: From<Error>>(
        &self,
        caller: &Caller,
        id: &str,
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(Vec<TaskResult>, R), E> {
        let id = task_id(id)?;
        let query = self.query()?;
        let read = async {
            let room = room(query.results_bytes(id).await?)?;
            let results = query.results(id).await?.ok_or(Error::NoSuchTask(id))?;
            Ok((results, room))
        };
        read.instrument(span("results", caller)).await
    }

    /// The queues that have unfinished tasks or an open shard.
    pub async fn queues(&self, caller: &Caller) -> Result<Vec<QueueView>, Error> {
        self.query()?.queues().instrument(span("queues", caller)).await
    }

    pub(super) fn query(&self) -> Result<&Reader, Error> {
        self.query.as_ref().ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

fn task_id(text: &str) -> Result<TaskId, Error> {
    text.parse().map_err(|_| Error::NotATaskId(shorten(text, ECHO).into_owned()))
}
