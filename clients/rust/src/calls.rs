//! Calls that read tasks, wait for them, and cancel them.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use backon::BackoffBuilder as _;
use tokio::time::{sleep, timeout};
use tonic::{Response, Status};

use crate::{
    address::Taskd,
    client::{CALL_TIMEOUT, Client, WAITS},
    error::Error,
    pb::{self, TaskStatus, discovery_client::DiscoveryClient},
};

/// The ids of one call.
const MOST_IDS: usize = 1000;

impl Client {
    /// Reads a task with its payload and its history. [`Error::Refused`] with `NotFound` if there
    /// is no such task.
    ///
    /// This and the following calls are repeated while taskd is away, up to
    /// [`ClientBuilder::give_up_after`](crate::ClientBuilder::give_up_after). A token needs the role
    /// `read`.
    pub async fn get(&self, id: &str) -> Result<pb::Task, Error> {
        self.call(|taskd| {
            let request = pb::GetTaskRequest { id: id.to_owned() };
            async move { DiscoveryClient::new(taskd).get_task(request).await }
        })
        .await
    }

    /// Lists tasks without their payloads, the newest first: one page. The next page needs the
    /// cursor of its answer, which is empty after the last one.
    pub async fn list(
        &self,
        request: pb::ListTasksRequest,
    ) -> Result<pb::ListTasksResponse, Error> {
        self.call(|taskd| {
            let request = request.clone();
            async move { DiscoveryClient::new(taskd).list_tasks(request).await }
        })
        .await
    }

    /// Says where a task is, what happens to it next, and, if the request names a worker, why that
    /// one does not get it. The request names the task by its id, or by its queue and key.
    pub async fn explain(
        &self,
        request: pb::ExplainTaskRequest,
    ) -> Result<pb::TaskExplanation, Error> {
        self.call(|taskd| {
            let request = request.clone();
            async move { DiscoveryClient::new(taskd).explain_task(request).await }
        })
        .await
    }

    /// Cancels tasks, and answers id by id, in order. `TryLater`: taskd cancels the task as soon as
    /// it can. A token needs the role `admin`.
    pub async fn cancel(
        &self,
        ids: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Vec<pb::ItemResult>, Error> {
        let ids: Vec<String> = ids.into_iter().map(Into::into).collect();
        let mut results = Vec::with_capacity(ids.len());
        for part in ids.chunks(MOST_IDS) {
            let answer = self
                .call(|taskd| {
                    let request = pb::CancelTasksRequest {
                        ids: part.to_vec(),
                        ..Default::default()
                    };
                    async move { DiscoveryClient::new(taskd).cancel_tasks(request).await }
                })
                .await?;
            results.extend(answer.results);
        }
        Ok(results)
    }

    /// Waits until a task is completed, dead or cancelled, at the longest for this time, and returns
    /// it as it is then.
    pub async fn wait(&self, id: &str, wait: Duration) -> Result<pb::Task, Error> {
        let began = Instant::now();
        let mut waits = WAITS.build();
        loop {
            let task = self.get(id).await?;
            let left = wait.saturating_sub(began.elapsed());
            let is_final = matches!(
                task.status(),
                TaskStatus::Completed | TaskStatus::Dead | TaskStatus::Cancelled
            );
            if is_final || left.is_zero() {
                return Ok(task);
            }
            // The store learns of a final status a moment after the watcher.
            if let Ok(true) = timeout(left, self.watch(id)).await {
                waits = WAITS.build();
            }
            let left = wait.saturating_sub(began.elapsed());
            sleep(waits.next().unwrap_or_default().min(left)).await;
        }
    }

    /// True at the final status of a task, false if the stream ends before.
    async fn watch(&self, id: &str) -> bool {
        let (_, _, taskd) = self.servers().pick();
        let request = pb::WatchTaskRequest {
            id: id.to_owned(),
            ..Default::default()
        };
        let Ok(answer) = DiscoveryClient::new(taskd).watch_task(request).await else {
            return false;
        };
        let mut events = answer.into_inner();
        loop {
            match events.message().await {
                // The final status ends the stream.
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Repeats a call while taskd is away.
    async fn call<T, F>(&self, call: impl Fn(Taskd) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut waits = WAITS.build();
        let since = Instant::now();
        loop {
            match self.servers().call(CALL_TIMEOUT, &call).await {
                Err(error) if error.may_pass() && since.elapsed() < self.give_up_after() => {}
                answer => return answer,
            }
            sleep(waits.next().unwrap_or_default()).await;
        }
    }
}
