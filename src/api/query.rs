//! Reading tasks, results and queues.

use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    access::{as_worker, reaches, reaches_everything},
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::model::{
    Act, Caller, ECHO, ExplainTask, Explanation, QueueName, QueueView, TaskId, TaskResult, WorkerName, shorten,
};

/// The entries of a list, where the caller does not say, and at most.
pub(super) const LISTED: u32 = 100;
pub(super) const MOST_LISTED: u32 = 1000;

impl Api {
    /// Where a task is, and what keeps it from a worker.
    pub async fn explain(&self, caller: &Caller, request: &ExplainTask) -> Result<Explanation, Error> {
        let (id, queue, key) = (&request.id[..], &request.queue[..], &request.key);
        let named = match (id.is_empty(), queue.is_empty(), key.is_empty()) {
            (false, true, true) => Ok(task_id(id)?),
            (true, false, false) => Err(QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?),
            _ => return Err(Error::Invalid("name one task: by its id, or by its queue and its key".into())),
        };
        if !request.worker.is_empty() {
            as_worker(caller, &mut request.worker.clone())?;
        }
        let worker = Some(&request.worker[..]).filter(|name| !name.is_empty()).map(WorkerName::new).transpose();
        let worker = worker.map_err(|error| Error::Invalid(error.to_string()))?;
        let query = self.query()?;
        let explain = async {
            let id = match named {
                Ok(id) => id,
                Err(queue) => {
                    reaches(caller, queue.as_str())?;
                    query.owner(queue, key).await?
                }
            };
            let explanation = query.explain(id, worker.as_ref()).await?;
            let reached = explanation.filter(|found| caller.access.reaches(found.task.queue.as_str()));
            reached.ok_or(Error::NoSuchTask(id))
        };
        explain.instrument(span("explain", caller)).await
    }

    /// The results of a task, and the room that `room` gives for their bytes before they are read.
    pub async fn results<R, E: From<Error>>(
        &self,
        caller: &Caller,
        id: &str,
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(Vec<TaskResult>, R), E> {
        let (id, query) = (task_id(id)?, self.query()?);
        let read = async {
            if !caller.access.reaches_everything() {
                query.queue_of(caller, id).await?;
            }
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
        // They name queues and tokens.
        reaches_everything(caller)?;
        let limit = bounded(limit, LISTED)?;
        let before = before.filter(|id| !id.is_empty()).map(|id| Uuid::parse_str(id).map_err(|_| not_an_act(id)));
        let acts = self.query()?.acts(before.transpose()?, limit);
        acts.instrument(span("acts", caller)).await
    }

    pub(super) fn query(&self) -> Result<&Reader, Error> {
        self.query.as_ref().ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

/// The entries of a list for which a caller asks; 0: as many as usual.
pub(super) fn bounded(limit: u32, usual: u32) -> Result<u32, Error> {
    match limit {
        0 => Ok(usual),
        1..=MOST_LISTED => Ok(limit),
        _ => Err(Error::Invalid(format!("limit is {limit}; must be 1 to {MOST_LISTED}"))),
    }
}

fn not_an_act(id: &str) -> Error {
    let id = shorten(id, ECHO);
    Error::Invalid(format!("{id:?} is not the id of an act; ids are UUIDs, as a list of acts shows them"))
}

pub(super) fn task_id(text: &str) -> Result<TaskId, Error> {
    text.parse().map_err(|_| Error::NotATaskId(shorten(text, ECHO).into_owned()))
}
