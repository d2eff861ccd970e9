//! The calls of workers.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::pin,
    time::{Duration, Instant},
};

use futures::{
    FutureExt as _,
    future::{self, Either},
};
use tokio::time::timeout;
use tracing::Instrument as _;

use super::{
    access,
    error::Error,
    handle::{Api, span},
    items::{merge, split},
};
use crate::{
    model::{
        Batch, Caller, Completion, Extension, GetTasks, Item, ItemAnswer, Rejection, WorkerName,
    },
    pipelines::tasks::{self, Handle, Leases},
    telemetry::metrics::{self, CallResult, Method},
};

/// How long the answers to reports wait for the tasks that the worker asked for in the same call,
/// and these for the answers.
const NEXT_WITHIN: Duration = Duration::from_secs(1);

impl Api {
    /// Leases tasks to a worker. Waits only if there are none. An invalid request (`Err`) is
    /// counted as such.
    pub async fn get(
        &self,
        caller: &Caller,
        request: Result<GetTasks, String>,
    ) -> Result<Leases, Error> {
        let tasks = self.tasks()?;
        let mut request = request;
        if let Ok(request) = &mut request {
            access::authorize_get(caller, request)?;
        }
        if let Ok(request) = &request {
            let queues = request.queues.iter().map(String::as_str);
            self.workers.hear(caller, &request.worker, queues);
        }
        let waits = request
            .as_ref()
            .is_ok_and(|request| !request.wait.is_zero());
        let _wait = waits.then(|| self.waits.call(&caller.access)).transpose()?;
        let leases = async { tasks.get(request.map_err(tasks::Error::Invalid)?).await };
        let call = counted(Method::Get, leases, |leases: &Leases| {
            leases.tasks.is_empty()
        });
        // The stop ends the wait, and so does a revoked token: the dropped call gives back what it
        // leased.
        let leases = tokio::select! {
            biased;
            () = self.stop.cancelled() => Leases::default(),
            leases = call.instrument(span("get", caller)) => leases?,
            denied = self.authentication.revoked(&caller.access), if waits => return Err(denied.into()),
        };
        // Leases that are not delivered go back.
        self.authentication.still_valid(caller)?;
        Ok(leases)
    }

    /// Reports tasks as finished, with their results and discovered tasks.
    pub async fn complete(
        &self,
        caller: &Caller,
        mut batch: Batch<Completion>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        if let Some(tasks) = &self.tasks {
            access::deny_foreign_discoveries(caller, &mut batch, &tasks.stages());
        }
        let call = async |tasks: &Handle, worker: &str, items| tasks.complete(worker, items).await;
        self.report(Method::Complete, caller, batch, call).await
    }

    /// Reports tasks as [`Self::complete`] does, and leases the worker tasks that are available
    /// now.
    ///
    /// Both go to Redis at the same time, so that they share one sync of its disk. An invalid
    /// request reports nothing. Leases that are not delivered go back, even if the reports fail.
    pub async fn complete_and_get(
        &self,
        caller: &Caller,
        batch: Batch<Completion>,
        next: Result<GetTasks, String>,
    ) -> Result<(Vec<ItemAnswer>, Leases), Error> {
        let tasks = self.tasks()?;
        let mut next = next.map_err(|error| tasks::Error::Invalid(format!("next: {error}")))?;
        if next.worker.is_empty() {
            next.worker.clone_from(&batch.worker);
        } else if !batch.worker.is_empty() && next.worker != batch.worker {
            return Err(
                tasks::Error::Invalid("next.worker is not the worker of the call".into()).into(),
            );
        }
        access::authorize_get(caller, &mut next)?;
        let wish = tasks.queue_request(&next)?;
        let get = counted(Method::Get, tasks.get_now(wish), |leases: &Leases| {
            leases.tasks.is_empty()
        });
        let complete = pin!(self.complete(caller, batch));
        let get = pin!(get.instrument(span("get", caller)));
        let (answers, leases) = match future::select(complete, get).await {
            Either::Left((answers, get)) => (answers?, timeout(NEXT_WITHIN, get).await.ok()),
            Either::Right((leases, mut complete)) => {
                match timeout(NEXT_WITHIN, &mut complete).await {
                    Ok(answers) => (answers?, Some(leases)),
                    Err(_) => {
                        drop(leases);
                        (complete.await?, None)
                    }
                }
            }
        };
        self.authentication.still_valid(caller)?;
        // If the queues cannot be asked, or not soon, the answer has no tasks.
        Ok((answers, leases.and_then(Result::ok).unwrap_or_default()))
    }

    /// Gives tasks back, to be tried again or never.
    pub async fn reject(
        &self,
        caller: &Caller,
        batch: Batch<Rejection>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        let call = async |tasks: &Handle, worker: &str, items| tasks.reject(worker, items).await;
        self.report(Method::Reject, caller, batch, call).await
    }

    /// Extends leases.
    pub async fn extend(
        &self,
        caller: &Caller,
        batch: Batch<Extension>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        let call = async |tasks: &Handle, worker: &str, items| tasks.extend(worker, items).await;
        self.report(Method::Extend, caller, batch, call).await
    }

    /// Makes a call with the readable items of a batch. Returns an answer for each item, in order.
    async fn report<T>(
        &self,
        method: Method,
        caller: &Caller,
        mut batch: Batch<T>,
        call: impl AsyncFnOnce(&Handle, &str, Vec<Item<T>>) -> Result<Vec<ItemAnswer>, tasks::Error>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        // The token may have been revoked while the body was read.
        self.authentication.still_valid(caller)?;
        access::authorize_reports(caller, &mut batch)?;
        let (items, known) = split(batch.items);
        // Every item has its answer already.
        if items.is_empty() && !known.is_empty() {
            WorkerName::new(&batch.worker)
                .map_err(|error| tasks::Error::Invalid(error.to_string()))?;
            return Ok(merge(known, Vec::new()));
        }
        let tasks = self.tasks()?;
        let queues = self.workers.hear_report(caller, &batch.worker, &items);
        let call = counted(method, call(tasks, &batch.worker, items), Vec::is_empty);
        let answers = call.instrument(span(method.as_str(), caller)).await?;
        count(method, &answers);
        match method {
            Method::Complete => queues.count(&answers, true),
            Method::Reject => queues.count(&answers, false),
            _ => {}
        }
        Ok(merge(known, answers))
    }

    pub(super) fn tasks(&self) -> Result<&Handle, Error> {
        self.tasks.as_ref().ok_or(Error::NotRunHere("tasks"))
    }
}

/// Records the end of a call. A caller that went away got no answer, and is not recorded.
pub(super) fn counted<T>(
    method: Method,
    call: impl Future<Output = Result<T, tasks::Error>>,
    is_empty: impl Fn(&T) -> bool,
) -> impl Future<Output = Result<T, tasks::Error>> {
    let started = Instant::now();
    call.inspect(move |answer| {
        let result = match answer {
            Ok(answer) if is_empty(answer) => CallResult::Empty,
            Ok(_) => CallResult::Ok,
            Err(tasks::Error::Invalid(_) | tasks::Error::NoSession(_)) => CallResult::Invalid,
            Err(tasks::Error::Full(_) | tasks::Error::Unavailable(_)) => CallResult::Unavailable,
        };
        metrics::tasks_call(method, result, started.elapsed());
    })
}

fn count(method: Method, answers: &[ItemAnswer]) {
    let mut by_status: BTreeMap<_, usize> = BTreeMap::new();
    answers
        .iter()
        .for_each(|answer| *by_status.entry(answer.status).or_default() += 1);
    by_status
        .into_iter()
        .for_each(|(status, count)| metrics::tasks_items(method, status.as_str(), count));
}
