//! Reading tasks, results and queues.

use std::collections::VecDeque;

use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    access::{as_worker, reaches, reaches_everything},
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::model::{
    Act, Caller, ECHO, ExplainTask, Explanation, QueueName, QueueView, TaskId, TaskResult,
    WorkerName, shorten,
};

/// How many entries a list has: by default, and at most.
pub(super) const LISTED: u32 = 100;
pub(super) const MOST_LISTED: u32 = 1000;

impl Api {
    /// Explains where a task is, and what keeps it from a worker.
    pub async fn explain(
        &self,
        caller: &Caller,
        request: &ExplainTask,
    ) -> Result<Explanation, Error> {
        let id = &request.id[..];
        let queue = &request.queue[..];
        let key = &request.key;
        let named = match (id.is_empty(), queue.is_empty(), key.is_empty()) {
            (false, true, true) => Ok(task_id(id)?),
            (true, false, false) => {
                Err(QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?)
            }
            _ => {
                return Err(Error::Invalid(
                    "name one task: by its id, or by its queue and its key".into(),
                ));
            }
        };
        if !request.worker.is_empty() {
            as_worker(caller, &mut request.worker.clone())?;
        }
        let worker = Some(&request.worker[..])
            .filter(|name| !name.is_empty())
            .map(WorkerName::new)
            .transpose();
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
            let explanation = query
                .explain(id, worker.as_ref(), Some(&caller.access))
                .await?;
            let reached =
                explanation.filter(|found| caller.access.reaches(found.task.queue.as_str()));
            reached.ok_or(Error::NoSuchTask(id))
        };
        explain.instrument(span("explain", caller)).await
    }

    /// Returns the results of a task, which are read page by page.
    pub async fn results(&self, caller: &Caller, id: &str) -> Result<ResultPages, Error> {
        let id = task_id(id)?;
        let query = self.query()?;
        let read = async {
            if !caller.access.reaches_everything() {
                query.queue_of(caller, id).await?;
            }
            let sizes = query.store().result_sizes(id).await?;
            if sizes.is_empty() && query.store().task(id).await?.is_none() {
                return Err(Error::NoSuchTask(id));
            }
            Ok(ResultPages::new(query.clone(), id, sizes))
        };
        read.instrument(span("results", caller)).await
    }

    /// The queues that have unfinished tasks or an open shard, among those that the caller reaches.
    pub async fn queues(&self, caller: &Caller) -> Result<Vec<QueueView>, Error> {
        let mut queues = self
            .query()?
            .queues()
            .instrument(span("queues", caller))
            .await?;
        queues.retain(|view| caller.access.reaches(view.queue.as_str()));
        Ok(queues)
    }

    /// Fails for a caller that reaches only some queues, because metrics name all of them.
    pub fn may_read_metrics(&self, caller: &Caller) -> Result<(), Error> {
        Ok(reaches_everything(caller)?)
    }

    /// Returns the acts of operators older than the act `before`, the latest first.
    pub async fn acts(
        &self,
        caller: &Caller,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<Act>, Error> {
        // Acts name queues and tokens.
        reaches_everything(caller)?;
        let limit = bounded(limit, LISTED)?;
        let before = before
            .filter(|id| !id.is_empty())
            .map(|id| Uuid::parse_str(id).map_err(|_| not_an_act(id)));
        let acts = self.query()?.acts(before.transpose()?, limit);
        acts.instrument(span("acts", caller)).await
    }

    pub(super) fn query(&self) -> Result<&Reader, Error> {
        self.query
            .as_ref()
            .ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

/// The results of a task, the earliest first. A page has one result, or several that are small.
pub struct ResultPages {
    reader: Reader,
    id: TaskId,
    pages: VecDeque<Vec<String>>,
    largest: usize,
    bytes: usize,
}

impl ResultPages {
    /// The most bytes of a page with several results.
    const PAGE_BYTES: usize = 1 << 20;
    const MOST_ON_PAGE: usize = 100;
    /// The approximate overhead of a result, in bytes, in addition to its content and its worker.
    const BESIDE: usize = 128;

    fn new(reader: Reader, id: TaskId, sizes: Vec<(String, usize)>) -> Self {
        let mut pages: VecDeque<Vec<String>> = VecDeque::new();
        let mut of_page = 0;
        let mut largest = 0;
        let mut bytes = 0;
        for (worker, size) in sizes {
            let size = size + worker.len() + Self::BESIDE;
            let fits = of_page + size <= Self::PAGE_BYTES;
            match pages
                .back_mut()
                .filter(|page| fits && page.len() < Self::MOST_ON_PAGE)
            {
                Some(page) => {
                    page.push(worker);
                    of_page += size;
                }
                None => {
                    pages.push_back(vec![worker]);
                    of_page = size;
                }
            }
            largest = largest.max(of_page);
            bytes += size;
        }
        Self {
            reader,
            id,
            pages,
            largest,
            bytes,
        }
    }

    /// The approximate size of the largest page, in bytes.
    pub fn largest(&self) -> usize {
        self.largest
    }

    /// The approximate size of all pages, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_over(&self) -> bool {
        self.pages.is_empty()
    }

    /// Reads the next page. A result that was removed meanwhile is left out.
    pub async fn next(&mut self) -> Result<Option<Vec<TaskResult>>, Error> {
        let Some(workers) = self.pages.pop_front() else {
            return Ok(None);
        };
        Ok(Some(
            self.reader.store().results_of(self.id, &workers).await?,
        ))
    }
}

/// Returns the number of entries that a caller asked for; 0 stands for `usual`.
pub(super) fn bounded(limit: u32, usual: u32) -> Result<u32, Error> {
    match limit {
        0 => Ok(usual),
        1..=MOST_LISTED => Ok(limit),
        _ => Err(Error::Invalid(format!(
            "limit is {limit}; must be 1 to {MOST_LISTED}"
        ))),
    }
}

fn not_an_act(id: &str) -> Error {
    let id = shorten(id, ECHO);
    Error::Invalid(format!(
        "{id:?} is not the id of an act; ids are UUIDs, as a list of acts shows them"
    ))
}

pub(super) fn task_id(text: &str) -> Result<TaskId, Error> {
    text.parse()
        .map_err(|_| Error::NotATaskId(shorten(text, ECHO).into_owned()))
}
