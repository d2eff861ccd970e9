//! Inserts that wait until their tasks are final.

use std::time::{Duration, Instant};

use backon::BackoffBuilder as _;

use crate::{
    client::{CALL_TIMEOUT, Client, Inserted, InsertedAs, WAITS},
    error::Error,
    new_task::{NewTask, proto},
    pb::{self, TaskStatus, discovery_client::DiscoveryClient},
};

/// The most tasks of an insert that waits.
const MOST_TASKS: usize = 1000;

/// taskd's answer to one new task, at the end of the wait for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Awaited {
    /// The answer to the insert.
    pub inserted: Inserted,
    /// The status of the task. `Unspecified`: the task was rejected, or taskd did not say.
    pub status: TaskStatus,
    /// The results of a completed task, one for each worker.
    pub results: Vec<pb::TaskResult>,
}

impl Awaited {
    fn new(inserted: Inserted) -> Self {
        Self {
            inserted,
            status: TaskStatus::Unspecified,
            results: Vec::new(),
        }
    }

    /// True for a task that was not final at the end of the wait.
    pub fn is_open(&self) -> bool {
        let is_final = matches!(
            self.status,
            TaskStatus::Completed | TaskStatus::Dead | TaskStatus::Cancelled
        );
        self.inserted.status != InsertedAs::Rejected && !is_final
    }
}

impl Client {
    /// Inserts at most 1,000 tasks and waits until they are final, but no longer than `wait`. A
    /// token also needs the role `read`. A duplicate waits for the task that already has its key.
    ///
    /// Fails as [`Client::insert`] does. If taskd becomes unreachable after it has stored the
    /// tasks, the answers contain what is known so far.
    pub async fn insert_and_wait(
        &self,
        tasks: impl IntoIterator<Item = NewTask>,
        wait: Duration,
    ) -> Result<Vec<Awaited>, Error> {
        let tasks: Vec<NewTask> = tasks.into_iter().collect();
        if tasks.len() > MOST_TASKS {
            let count = tasks.len();
            return Err(Error::Options(format!(
                "{count} tasks in an insert that waits; at most {MOST_TASKS}"
            )));
        }
        let began = Instant::now();
        let inserted = self.insert(tasks.clone()).await?;
        let mut awaited: Vec<Awaited> = inserted.into_iter().map(Awaited::new).collect();
        let mut waits = WAITS.build();
        loop {
            let left = wait.saturating_sub(began.elapsed());
            let open: Vec<usize> = (0..awaited.len())
                .filter(|place| awaited[*place].is_open())
                .collect();
            if open.is_empty() {
                return Ok(awaited);
            }
            // taskd waits for a minute at most. Repeating the insert stores nothing, and continues
            // the wait.
            let request = pb::InsertTasksRequest {
                tasks: open.iter().map(|place| tasks[*place].0.clone()).collect(),
                wait: Some(proto(left)),
                ..Default::default()
            };
            let insert =
                |taskd| async move { DiscoveryClient::new(taskd).insert_tasks(request).await };
            match self
                .servers()
                .call(CALL_TIMEOUT.saturating_add(left), insert)
                .await
            {
                Ok(answer) => {
                    for (place, result) in open.into_iter().zip(answer.results) {
                        awaited[place].status = result.task_status();
                        awaited[place].results = result.results;
                    }
                }
                Err(error) if error.may_pass() => {}
                Err(error) => return Err(error),
            }
            if left.is_zero() {
                return Ok(awaited);
            }
            let pause = waits.next().unwrap_or(Duration::from_secs(1));
            tokio::time::sleep(pause.min(wait.saturating_sub(began.elapsed()))).await;
        }
    }
}
