//! Changes of unfinished tasks: operators cancel them, give them other values, or requeue them.

use std::collections::HashMap;

use tracing::Instrument as _;

use super::{
    access::{may_name, who},
    error::Error,
    handle::{Api, span},
    items::Named,
    query::task_id,
};
use crate::{
    model::{
        Act, BulkAction, Caller, Change, ChangeTasks, Changed, ItemAnswer, ItemStatus, QueueName,
        Requeue, RequeueTasks, TaskAct, TaskId, TasksChanged, Update, millis,
    },
    pipelines::changing::Changing,
    queue::NEVER,
};

/// The message for a NUM that is too high.
pub(super) const TOO_MANY: &str =
    "a task of its queue may not have as many replicas (max_replicas)";

impl Api {
    /// Cancels tasks: no worker does them any more. Returns an answer for each, in order.
    pub async fn cancel_tasks(
        &self,
        caller: &Caller,
        ids: Vec<String>,
    ) -> Result<Vec<ItemAnswer>, Error> {
        self.change_tasks(caller, ids, &Change::Cancel)
            .instrument(span("cancel_tasks", caller))
            .await
    }

    /// Gives tasks another priority or NUM: at once if they are named by ids, by a bulk change if
    /// by a filter.
    pub async fn update_tasks(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
        update: Result<Update, String>,
    ) -> Result<TasksChanged, Error> {
        let update = update.map_err(Error::Invalid)?;
        update.check().map_err(Error::Invalid)?;
        let change = BulkAction::Update(update);
        self.change_chosen(caller, change, request)
            .instrument(span("update_tasks", caller))
            .await
    }

    /// Requeues tasks, which ends their leases and backoffs: at once if they are named by ids, by a
    /// bulk change if by a filter.
    pub async fn requeue_tasks(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
        requeue: Result<RequeueTasks, String>,
    ) -> Result<TasksChanged, Error> {
        let requeue = match requeue.map_err(Error::Invalid)? {
            RequeueTasks::All => Requeue::All,
            RequeueTasks::AwayFrom(worker) => Requeue::AwayFrom(worker),
            RequeueTasks::To {
                worker,
                reserved_for,
            } => {
                let now = self.query()?.now_unix_ms();
                let until = reserved_for.map(millis);
                Requeue::To {
                    worker,
                    until_unix_ms: until.map(|time| now.saturating_add(time).min(NEVER - 1)),
                }
            }
        };
        if let Requeue::AwayFrom(worker) | Requeue::To { worker, .. } = &requeue {
            may_name(caller, worker)?;
        }
        let change = BulkAction::Requeue(requeue);
        self.change_chosen(caller, change, request)
            .instrument(span("requeue_tasks", caller))
            .await
    }

    /// Cancels one task. An error says why it cannot be cancelled.
    pub async fn cancel_task(&self, caller: &Caller, id: &str) -> Result<ItemAnswer, Error> {
        let id = task_id(id)?;
        let answers = self.cancel_tasks(caller, vec![id.to_string()]).await?;
        let answer = answers.into_iter().next().ok_or(Error::NoSuchTask(id))?;
        match answer.status {
            ItemStatus::Ok | ItemStatus::TryLater => Ok(answer),
            ItemStatus::UnknownTask => Err(Error::NoSuchTask(id)),
            _ => Err(Error::Final {
                id,
                why: answer.error,
            }),
        }
    }

    pub(super) async fn change_tasks(
        &self,
        caller: &Caller,
        ids: Vec<String>,
        change: &Change,
    ) -> Result<Vec<ItemAnswer>, Error> {
        // The token may have been revoked while the body was read.
        self.authentication.still_valid(caller)?;
        let named = Named::new(ids)?;
        let changed = self.change(caller, &named.tasks(), change).await?;
        // Only a caller that reaches the queue may know that the task is there.
        Ok(named.answer(|id, task| {
            answer(
                id,
                changed.get(&task).copied().unwrap_or(Changed::Unknown),
                change,
            )
        }))
    }

    /// Changes the tasks that the caller reaches.
    async fn change(
        &self,
        caller: &Caller,
        ids: &[TaskId],
        change: &Change,
    ) -> Result<HashMap<TaskId, Changed>, Error> {
        let owned = self.query()?.store().queues_of(ids).await?;
        let reached = owned
            .into_iter()
            .filter(|(_, queue)| caller.access.reaches(queue.as_str()));
        let mut ids = Vec::new();
        let mut changed = HashMap::new();
        for (id, queue) in reached {
            match self.exceeds(change, &queue)? {
                true => drop(changed.insert(id, Changed::TooManyReplicas)),
                false => ids.push(id),
            }
        }
        if ids.is_empty() {
            return Ok(changed);
        }
        let who = who(caller);
        let now = self.query()?.now_unix_ms();
        let act = |id: &TaskId| (*id, Act::at_time(now, who, &change.act(), &id.to_string()));
        let acts: Vec<TaskAct> = ids.iter().map(act).collect();
        let answers = self.changing()?.change(&ids, change, &acts).await?;
        let count = answers
            .iter()
            .filter(|changed| **changed == Changed::Done)
            .count();
        tracing::info!(%who, count, asked = ids.len(), "{who}: {}, {count} of {}", change.act(), ids.len());
        changed.extend(ids.into_iter().zip(answers));
        Ok(changed)
    }

    /// True if tasks of the queue may not have this many replicas.
    pub(super) fn exceeds(&self, change: &Change, queue: &QueueName) -> Result<bool, Error> {
        let Change::Update(Update {
            replicas: Some(replicas),
            ..
        }) = change
        else {
            return Ok(false);
        };
        let query = self.query()?;
        let stages = query.occupancy.topologies().stages();
        let most = match stages.of(queue.as_str()) {
            Some(_) => 1,
            None => query.settings.task_rules(queue.as_str()).max_replicas,
        };
        Ok(*replicas > most)
    }

    fn changing(&self) -> Result<&Changing, Error> {
        self.changing
            .as_ref()
            .ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

fn answer(id: String, changed: Changed, change: &Change) -> ItemAnswer {
    let (status, error) = match changed {
        Changed::Done => (ItemStatus::Ok, ""),
        Changed::AlreadyCompleted => (
            ItemStatus::AlreadyCompleted,
            "its workers have completed it",
        ),
        Changed::Dead => (
            ItemStatus::Invalid,
            "the task is dead: it failed for good before",
        ),
        Changed::Cancelled => (ItemStatus::Cancelled, "the task was cancelled before"),
        Changed::NotQueued => (
            ItemStatus::Invalid,
            "the task is not in its queue now, and no worker holds it",
        ),
        Changed::NotDue => (
            ItemStatus::Invalid,
            "its time has not come, and no worker holds it",
        ),
        Changed::CompletedByWorker => (
            ItemStatus::Invalid,
            "this worker has completed it, and no worker does a task twice",
        ),
        Changed::TooManyReplicas => (ItemStatus::Invalid, TOO_MANY),
        Changed::Unknown => (ItemStatus::UnknownTask, ""),
        Changed::Later if matches!(change, Change::Requeue(_)) => (
            ItemStatus::TryLater,
            "the task's shard does not answer now; the same call asks again",
        ),
        Changed::Later => (
            ItemStatus::TryLater,
            "taskd has stored the change, and makes it as soon as the task's shard answers; the same call asks again",
        ),
    };
    ItemAnswer {
        error: error.to_owned(),
        ..ItemAnswer::new(id, status)
    }
}
