//! Tasks: how they are stored, settled, sent again and removed, and how they are read.

pub(crate) mod again;
pub(crate) mod belongs;
pub(crate) mod counts;
pub(crate) mod deadlines;
pub(crate) mod era;
pub(crate) mod events;
pub(crate) mod groups;
pub(crate) mod idempotency;
pub(crate) mod insert;
pub(crate) mod keys;
pub(crate) mod letters;
mod made;
mod members;
pub(crate) mod new_rows;
pub(crate) mod pending;
pub(crate) mod progress;
pub(crate) mod reads;
pub(crate) mod retention;
pub(crate) mod search;
pub(crate) mod sequences;
pub(crate) mod settle;
pub(crate) mod step;
pub(crate) mod steps;
pub(crate) mod subtrees;
pub(crate) mod trees;
mod unread;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use async_trait::async_trait;

use crate::{
    model::{KeyHash, OwnedTask, QueueName, StoredStatus, TaskId, TaskResult, TaskRow, WorkerName},
    store::{
        CompletedPage, DueDeadlines, Inserted, ListedTask, NewRow, Place, QueueCount, RemovedPage,
        Result, Settled, Settlement, StateFor, Stored, TaskDetail, TaskPage, TaskSearch, TaskState,
        Tasks,
        sql::{
            SqlStore,
            backend::Backend,
            outbox::{batches, place},
            tasks::{
                retention::{Candidate, CandidateRow, Which},
                steps::Steps,
                trees::note_ends,
            },
        },
    },
    telemetry::metrics,
};

impl<DB: Backend> SqlStore<DB> {
    /// Removes those of `ids` that finished at least `age` ago.
    async fn remove(&self, name: &'static str, ids: Vec<TaskId>, age: Duration) -> Result<u64> {
        if ids.is_empty() {
            return Ok(0);
        }
        let input = (ids, age, self.event_queues());
        let remove = self
            .sql
            .run_in_era(name, input, |session, (ids, age, events)| {
                Box::pin(async move {
                    let mut steps = Steps::new(events);
                    let removed =
                        retention::remove(session, ids, Which::Old(*age), &mut steps).await?;
                    let ended = steps.store(session).await?;
                    Ok((removed, ended))
                })
            });
        let (removed, ended) = remove.await?;
        note_ends(&ended);
        Ok(removed)
    }
}

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
            .run_in_era("insert", input, |session, (rows, old_keys, events)| {
                Box::pin(async move {
                    // Each attempt has its own batch number, which distinguishes the rows that it
                    // inserted from those of another attempt.
                    let batch = batches::new_batch();
                    let mut steps = Steps::new(events);
                    let rows: Vec<&NewRow> = rows.iter().collect();
                    let (answers, behind) =
                        insert::insert(session, &rows, batch, &mut steps, old_keys, None).await?;
                    steps.store(session).await?;
                    Ok(Stored {
                        answers,
                        batch,
                        behind,
                        released: Vec::new(),
                    })
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
        let settle =
            self.sql
                .run_in_era("settle", input, |session, (reports, old_keys, events)| {
                    Box::pin(async move {
                        let batch = batches::new_batch();
                        settle::settle(session, reports, batch, old_keys, events).await
                    })
                });
        let settle::SettledInTrees { stored, ends, late } = settle.await?;
        note_ends(&ends);
        metrics::trees_late(late);
        Ok(stored)
    }

    async fn remove_finished(&self, age: Duration, limit: u32) -> Result<u64> {
        const NAME: &str = "remove_finished";
        let from = self.finished_from.load(Ordering::Relaxed);
        let statement = retention::finished::<DB::Connection>(age, from, limit);
        let rows = self.sql.read::<CandidateRow>(NAME, statement).await?;
        let mut old = Vec::new();
        let mut last_ended = 0;
        for row in &rows {
            let candidate = Candidate::read(row)?;
            last_ended = candidate.ended_unix_ms;
            if !candidate.waits {
                old.push(candidate.id);
            }
        }
        let is_full = rows.len() >= limit as usize;
        let asked = old.len() as u64;
        let removed = self.remove(NAME, old, age).await?;
        // Tasks whose records are unread must not hold up all later ones: after a full page with some
        // of them, the next page begins at its end, until one is not full.
        let next = match is_full && asked > 0 {
            true if removed == 0 => last_ended.max(from + 1),
            true if removed < asked => last_ended,
            true => from,
            false => 0,
        };
        self.finished_from.store(next, Ordering::Relaxed);
        Ok(removed)
    }

    async fn remove_completed(&self, page: &CompletedPage) -> Result<RemovedPage> {
        const NAME: &str = "remove_completed";
        let statement = retention::completed::<DB::Connection>(page);
        let rows = self.sql.read::<CandidateRow>(NAME, statement).await?;
        let mut last = None;
        let mut old = Vec::new();
        let mut waiting = 0;
        for row in &rows {
            let candidate = Candidate::read(row)?;
            last = Some(candidate.id);
            if candidate.is_old && candidate.waits {
                waiting += 1;
            } else if candidate.is_old {
                old.push(candidate.id);
            }
        }
        // Later tasks mostly finished later, so if all old ones of a page have to wait, the next pages
        // would be read in vain.
        let all_wait = waiting > 0 && old.is_empty();
        if rows.len() < page.limit as usize || all_wait {
            last = None;
        }
        let removed = self.remove(NAME, old, page.age).await?;
        Ok(RemovedPage { removed, last })
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

    async fn brief_task(&self, id: TaskId) -> Result<Option<TaskDetail>> {
        reads::brief_task(&self.sql, id).await
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

    async fn queue_names(&self, beginning: &str, limit: u32) -> Result<Vec<QueueName>> {
        reads::queue_names(&self.sql, beginning, limit).await
    }

    async fn unfinished(&self) -> Result<Vec<(QueueName, u64)>> {
        reads::unfinished(&self.sql).await
    }

    async fn search(&self, search: &TaskSearch) -> Result<TaskPage> {
        search::page(&self.sql, search).await
    }

    async fn begin_era(&self, now_unix_ms: i64) -> Result<i64> {
        self.sql
            .run("begin_era", now_unix_ms, |session, now_ms| {
                Box::pin(era::begin(session, *now_ms))
            })
            .await
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
