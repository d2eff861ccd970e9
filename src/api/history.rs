//! A task with its payload and its history. Attempts that have ended are in SQL, those in progress
//! in Redis.

use tracing::Instrument as _;

use super::{
    error::Error,
    handle::{Api, span},
    query::task_id,
    reader::{Reader, view},
};
use crate::{
    model::{Attempt, AttemptState, Caller, DeadLetter, Failure, TaskFile, TaskId},
    queue::Explained,
    store::{Attempts, TaskDetail},
};

/// How many completed attempts and acts a reader gets at most: the latest ones.
const COMPLETED_SHOWN: u32 = 1000;
const ACTS_SHOWN: u32 = 100;

impl Api {
    /// Returns a task with its payload and its history, and the memory that `room` has reserved for
    /// them; it is given their size in bytes.
    pub async fn task_file<R, E: From<Error>>(
        &self,
        caller: &Caller,
        id: &str,
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(TaskFile, R), E> {
        let id = task_id(id)?;
        let query = self.query()?;
        let read = async {
            let detail = query.store().task(id).await.map_err(Error::from)?;
            // Only a caller that reaches the queue may know that the task is there.
            let reached = detail.filter(|detail| caller.access.reaches(detail.task.queue.as_str()));
            let file = query.file(reached.ok_or(Error::NoSuchTask(id))?).await?;
            let room = room(file.weight())?;
            Ok((file, room))
        };
        read.instrument(span("task", caller)).await
    }

    /// Returns a task with its history, without its payload and its headers.
    pub async fn brief_task_file(&self, caller: &Caller, id: &str) -> Result<TaskFile, Error> {
        let id = task_id(id)?;
        let query = self.query()?;
        let read = async {
            let detail = query.store().brief_task(id).await?;
            let reached = detail.filter(|detail| caller.access.reaches(detail.task.queue.as_str()));
            query.file(reached.ok_or(Error::NoSuchTask(id))?).await
        };
        read.instrument(span("brief_task", caller)).await
    }
}

impl Reader {
    /// Reads Redis before SQL, so that an attempt that ends in between is found in both, rather
    /// than in neither. Its end counts.
    async fn file(&self, detail: TaskDetail) -> Result<TaskFile, Error> {
        let id = detail.task.id;
        let shard = if detail.status.is_final() {
            None
        } else {
            self.explained(&detail, None).await?
        };
        let Attempts {
            failed,
            completed,
            results,
        } = self.store().attempts(id, COMPLETED_SHOWN).await?;
        let acts = self.store().acts_on(&id.to_string(), ACTS_SHOWN).await?;
        let mut history = [failed, completed].concat();
        history.sort_by_key(|attempt| attempt.until_unix_ms);
        if let Some(shard) = &shard {
            let leased = leased(shard, &history);
            history.extend(leased);
        }
        let record = shard
            .and_then(|shard| shard.record)
            .map(|record| record.inspected());
        let payload = detail.task.payload.clone();
        let headers = detail.task.headers.iter().cloned().collect();
        let payload_encoding = detail.task.payload_encoding;
        let traceparent = detail.task.context().into_owned();
        let backoff = detail.task.backoff.map(Into::into);
        let task = view(detail.into(), record, self.now_unix_ms());
        Ok(TaskFile {
            task,
            payload,
            payload_encoding,
            headers,
            traceparent,
            backoff,
            history,
            acts,
            results,
        })
    }

    /// Replaces the history of a letter, which has only the last few failures, with all failures of
    /// its task that SQL has.
    pub(super) async fn complete_history(
        &self,
        id: TaskId,
        letter: &mut DeadLetter,
    ) -> Result<(), Error> {
        let Attempts { failed, .. } = self.store().attempts(id, 0).await?;
        if failed.len() > letter.history.len() {
            let failure = |attempt: Attempt| Failure {
                at_unix_ms: attempt.until_unix_ms.unwrap_or_default(),
                worker: attempt.worker,
                reason: attempt.reason,
            };
            letter.history = failed.into_iter().map(failure).collect();
        }
        Ok(())
    }
}

/// The attempts in progress: leases whose end is not in SQL.
fn leased(shard: &Explained, ended: &[Attempt]) -> Vec<Attempt> {
    let held = shard.record.iter().flat_map(|record| &record.held);
    let has_ended = |worker: &str| {
        let mut ends = ended.iter().filter(|attempt| attempt.worker == worker);
        ends.any(|end| {
            end.state == AttemptState::Completed || end.until_unix_ms >= Some(shard.now_unix_ms)
        })
    };
    let goes_on = held
        .filter(|held| !has_ended(&held.worker))
        .map(|held| Attempt {
            worker: held.worker.clone(),
            state: AttemptState::Leased,
            from_unix_ms: held.since_unix_ms,
            until_unix_ms: None,
            expires_unix_ms: held.expires_unix_ms,
            attempt: 0,
            reason: String::new(),
            surplus: false,
        });
    goes_on.collect()
}
