//! The source that polls: long polls for tasks, and calls that report in batches. If the worker can
//! take more tasks, a report also fetches the next ones (`next`), which saves a call.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use crate::{
    address::LARGEST_ANSWER,
    client::{CALL_TIMEOUT, Client},
    error::Error,
    new_task::proto,
    pb::{self, tasks_client::TasksClient},
    source::Source,
};

/// The most tasks that taskd returns in one answer, unless its setting `max_items` is lower.
const MOST_TASKS: u32 = 1000;

/// Gets tasks by long polls from a running taskd, for one worker.
pub struct Unary {
    client: Client,
    worker: String,
    queues: Vec<String>,
    weights: HashMap<String, u32>,
    wait: Duration,
    lease: Duration,
    /// The most tasks that taskd returns in one call, as far as known.
    most_tasks: AtomicU32,
}

impl Unary {
    /// `wait` is how long taskd holds a call that finds no tasks.
    pub fn new(
        client: &Client,
        worker: &str,
        queues: &[String],
        wait: Duration,
        lease: Duration,
    ) -> Self {
        let most_tasks = MOST_TASKS.into();
        Self {
            client: client.clone(),
            worker: worker.to_owned(),
            queues: queues.to_vec(),
            weights: HashMap::new(),
            wait,
            lease,
            most_tasks,
        }
    }

    /// How the queues share the tasks, by name.
    pub(crate) fn weights(mut self, weights: &HashMap<String, u32>) -> Self {
        self.weights.clone_from(weights);
        self
    }

    fn request(&self, max_tasks: u32, wait: Duration) -> pb::GetTasksRequest {
        pb::GetTasksRequest {
            worker: self.worker.clone(),
            queues: self.queues.clone(),
            weights: self.weights.clone(),
            max_tasks,
            wait: Some(proto(wait)),
            lease_duration: Some(proto(self.lease)),
            ..Default::default()
        }
    }

    fn max_tasks(&self, most: usize) -> u32 {
        u32::try_from(most)
            .unwrap_or(u32::MAX)
            .min(self.most_tasks.load(Ordering::Relaxed))
    }

    async fn report(
        &self,
        completions: Vec<pb::Completion>,
        next: Option<pb::GetTasksRequest>,
    ) -> Result<pb::CompleteTasksResponse, Error> {
        let request = pb::CompleteTasksRequest {
            worker: self.worker.clone(),
            completions,
            next,
        };
        let complete = |taskd| async move {
            TasksClient::new(taskd)
                .max_decoding_message_size(LARGEST_ANSWER)
                .complete_tasks(request)
                .await
        };
        self.client.servers().call(CALL_TIMEOUT, complete).await
    }
}

impl Source for Unary {
    async fn get(&self, most: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        loop {
            let max_tasks = self.max_tasks(most);
            let request = self.request(max_tasks, self.wait);
            let get = |taskd| async move {
                TasksClient::new(taskd)
                    .max_decoding_message_size(LARGEST_ANSWER)
                    .get_tasks(request)
                    .await
            };
            match self
                .client
                .servers()
                .call(self.wait + CALL_TIMEOUT, get)
                .await
            {
                // If the number is not what is invalid, the call fails even with the smallest
                // number.
                Err(error) if error.is_of_items() && max_tasks > 1 => {
                    self.most_tasks.store(max_tasks / 2, Ordering::Relaxed);
                }
                answer => return answer.map(|answer| Some(answer.tasks)),
            }
        }
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        self.report(all, None).await.map(|answer| answer.results)
    }

    fn brings_tasks(&self) -> bool {
        true
    }

    async fn complete_and_get(
        &self,
        all: Vec<pb::Completion>,
        most: usize,
    ) -> Result<(Vec<pb::ItemResult>, Vec<pb::LeasedTask>), Error> {
        let next = self.request(self.max_tasks(most), Duration::ZERO);
        self.report(all, Some(next))
            .await
            .map(|answer| (answer.results, answer.tasks))
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        let request = pb::RejectTasksRequest {
            worker: self.worker.clone(),
            rejections: all,
        };
        let reject = |taskd| async move { TasksClient::new(taskd).reject_tasks(request).await };
        self.client
            .servers()
            .call(CALL_TIMEOUT, reject)
            .await
            .map(|answer| answer.results)
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        let request = pb::ExtendTasksRequest {
            worker: self.worker.clone(),
            extensions: all,
        };
        let extend = |taskd| async move { TasksClient::new(taskd).extend_tasks(request).await };
        self.client
            .servers()
            .call(extend_within(self.lease), extend)
            .await
            .map(|answer| answer.results)
    }
}

/// The timeout for extending leases of this duration: if it expires, there is still time to retry.
pub(crate) fn extend_within(lease: Duration) -> Duration {
    (lease / 4).clamp(Duration::from_millis(500), CALL_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extension_leaves_time_for_another_one() {
        let ms = |lease| extend_within(Duration::from_millis(lease)).as_millis();
        assert_eq!(
            [ms(300), ms(2000), ms(10_000), ms(30_000), ms(600_000)],
            [500, 500, 2500, 7500, 30_000]
        );
    }
}
