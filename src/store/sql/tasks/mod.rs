//! Tasks: how they are stored, settled, sent again and removed, and how they are read.

pub(crate) mod again;
pub(crate) mod counts;
pub(crate) mod deadlines;
pub(crate) mod events;
pub(crate) mod groups;
pub(crate) mod idempotency;
pub(crate) mod insert;
pub(crate) mod keys;
pub(crate) mod letters;
pub(crate) mod pending;
pub(crate) mod progress;
pub(crate) mod reads;
pub(crate) mod retention;
pub(crate) mod search;
pub(crate) mod settle;
pub(crate) mod step;
pub(crate) mod steps;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    model::{KeyHash, OwnedTask, QueueName, StoredStatus, TaskId, TaskResult, TaskRow, WorkerName},
    store::{
        DueDeadlines, Inserted, ListedTask, NewRow, Place, QueueCount, Result, Settled, Settlement,
        StateFor, Stored, TaskDetail, TaskPage, TaskSearch, TaskState, Tasks,
        sql::{
            SqlStore,
            backend::Backend,
            outbox::{batches, place},
            tasks::{retention::Which, steps::Steps},
        },
    },
};

#[async_trait]
impl<DB: Backend> Tasks for SqlStore<DB> {
    async fn insert(&self, rows: &[NewRow]) -> Result<Stored<Inserted>> {
        let input = (
            rows.to_vec(),
            Arc::clone(&self.old_keys),
            self.event_queues(),
        );
        let insert = self
            .sql
            .run("insert", input, |session, (rows, old_keys, events)| {
                Box::pin(async move {
                    // Each attempt has its own batch number, which distinguishes the rows that it
                    // inserted from those of another attempt.
                    let batch = batches::new_batch();
                    let mut steps = Steps::new(events);
                    let rows: Vec<&NewRow> = rows.iter().collect();
                    let answers =
                        insert::insert(session, &rows, batch, &mut steps, old_keys).await?;
                    steps.store(session).await?;
                    Ok(Stored { answers, batch })
                })
            });
        insert.await
    }

    async fn settle(&self, reports: &[Settlement]) -> Result<Stored<Settled>> {
        let input = (
            reports.to_vec(),
            Arc::clone(&self.old_keys),
            self.event_queues(),
        );
        let settle = self
            .sql
            .run("settle", input, |session, (reports, old_keys, events)| {
                Box::pin(async move {
                    let batch = batches::new_batch();
                    let answers = settle::settle(session, reports, batch, old_keys, events).await?;
                    Ok(Stored { answers, batch })
                })
            });
        settle.await
    }

    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64> {
        let ids = self
            .sql
            .ids(
                "remove_finished",
                retention::finished::<DB::Connection>(age, limit),
            )
            .await?;
        if ids.is_empty() {
            return Ok(0);
        }
        let remove = self.sql.run(
            "remove_finished",
            (ids, age, self.event_queues()),
            |session, (ids, age, events)| {
                Box::pin(async move {
                    let mut steps = Steps::new(events);
                    let removed =
                        retention::remove(session, ids, Which::Old(*age), &mut steps).await?;
                    steps.store(session).await?;
                    Ok(removed)
                })
            },
        );
        remove.await
    }

    async fn states(&self, ids: &[TaskId]) -> Result<Vec<TaskState>> {
        reads::states(&self.sql, ids).await
    }

    async fn states_for(&self, worker: &WorkerName, ids: &[TaskId]) -> Result<Vec<StateFor>> {
        reads::states_for(&self.sql, worker, ids).await
    }

    async fn unfinished_among(&self, ids: &[TaskId]) -> Result<Vec<TaskId>> {
        reads::unfinished_among(&self.sql, ids).await
    }

    async fn rows(&self, ids: &[TaskId]) -> Result<Vec<TaskRow>> {
        reads::rows(&self.sql, ids).await
    }

    async fn task(&self, id: TaskId) -> Result<Option<TaskDetail>> {
        reads::task(&self.sql, id).await
    }

    async fn place(&self, generation: &str, id: TaskId) -> Result<Option<Place>> {
        place::of(&self.sql, generation, id).await
    }

    async fn results(&self, id: TaskId) -> Result<Vec<TaskResult>> {
        reads::results(&self.sql, id).await
    }

    async fn result_sizes(&self, id: TaskId) -> Result<Vec<(String, usize)>> {
        reads::result_sizes(&self.sql, id).await
    }

    async fn results_of(&self, id: TaskId, workers: &[String]) -> Result<Vec<TaskResult>> {
        reads::results_of(&self.sql, id, workers).await
    }

    async fn counts(&self, queues: Option<&[QueueName]>) -> Result<Vec<QueueCount>> {
        reads::counts(&self.sql, queues).await
    }

    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>> {
        reads::unfinished(&self.sql).await
    }

    async fn search(&self, search: &TaskSearch) -> Result<TaskPage> {
        search::page(&self.sql, search).await
    }

    async fn listed(&self, ids: &[TaskId]) -> Result<Vec<ListedTask>> {
        search::listed(&self.sql, ids).await
    }

    async fn key_owners(&self, keys: &[KeyHash]) -> Result<Vec<(KeyHash, TaskId, StoredStatus)>> {
        keys::owners(&self.sql, "key_owners", keys).await
    }

    async fn lately_final(&self, ids: &[TaskId], age: Duration) -> Result<Vec<TaskId>> {
        reads::lately_final(&self.sql, ids, age).await
    }

    async fn remove_expired_keys(&self, now_unix_ms: i64, limit: u32) -> Result<u64> {
        idempotency::remove_expired_keys(&self.sql, now_unix_ms, limit).await
    }

    async fn due_deadlines(
        &self,
        now_unix_ms: i64,
        again_unix_ms: i64,
        limit: u32,
    ) -> Result<DueDeadlines> {
        self.sql
            .run(
                "due_deadlines",
                (now_unix_ms, again_unix_ms, limit),
                |session, (now_ms, again_ms, limit)| {
                    Box::pin(deadlines::due(session, *now_ms, *again_ms, *limit))
                },
            )
            .await
    }

    async fn queues_of(&self, ids: &[TaskId]) -> Result<Vec<OwnedTask>> {
        reads::queues_of(&self.sql, ids).await
    }
}
