//! Reading tasks, results and queues.

use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    access::reaches_everything,
    error::Error,
    handle::{Api, span},
    reader::Reader,
    text::{ECHO, shorten},
};
use crate::model::{Act, Caller, QueueView, TaskId, TaskResult, TaskView};

/// The most acts of an answer.
const MOST_ACTS: u32 = 1000;

impl Api {
    /// A task with its status.
    pub async fn task(&self, caller: &Caller, id: &str) -> Result<TaskView, Error> {
        let id = task_id(id)?;
        let task = self.query()?.task(id).instrument(span("task", caller)).await?;
        // Whether a task is there, only who reaches its queue may know.
        task.filter(|task| caller.access.reaches(task.queue.as_str())).ok_or(Error::NoSuchTask(id))
    }

    /// The results of a task, and the room that `room` gives for their bytes before they are read.
    pub async fn results<R, E: From<Error>>(
        &self,
        caller: &Caller,
        id: &str,
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(Vec<TaskResult>, R), E> {
        if !caller.access.reaches_everything() {
            self.task(caller, id).await?;
        }
        let id = task_id(id)?;
        let query = self.query()?;
        let read = async {
            let room = room(query.results_bytes(id).await?)?;
            let results = query.results(id).await?.ok_or(Error::NoSuchTask(id))?;
            Ok((results, room))
        };
        read.instrument(span("results", caller)).await
    }

    /// The queues that have unfinished tasks or an open shard, among those that the caller reaches.
    pub async fn queues(&self, caller: &Caller) -> Result<Vec<QueueView>, Error> {
        let mut queues = self.query()?.queues().instrument(span("queues", caller)).await?;
        queues.retain(|view| caller.access.reaches(view.queue.as_str()));
        Ok(queues)
    }

    /// An error for a caller that reaches only some queues: metrics name all of them.
    pub fn may_read_metrics(&self, caller: &Caller) -> Result<(), Error> {
        Ok(reaches_everything(caller)?)
    }

    /// The acts of operators before the act `before`, the latest first.
    pub async fn acts(&self, caller: &Caller, before: Option<&str>, limit: u32) -> Result<Vec<Act>, Error> {
        let before =
            before.map(|id| Uuid::parse_str(id).map_err(|_| Error::NotAnActId(shorten(id, ECHO).into_owned())));
        let acts = self.query()?.acts(before.transpose()?, limit.clamp(1, MOST_ACTS));
        acts.instrument(span("acts", caller)).await
    }

    fn query(&self) -> Result<&Reader, Error> {
        self.query.as_ref().ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

fn task_id(text: &str) -> Result<TaskId, Error> {
    text.parse().map_err(|_| Error::NotATaskId(shorten(text, ECHO).into_owned()))
}
