//! Changes of live work: operators cancel tasks.

use std::collections::HashMap;

use tracing::Instrument as _;

use super::{
    error::Error,
    handle::{Api, span},
    text::{ECHO, shorten},
};
use crate::{
    model::{Act, Caller, Change, Changed, ItemAnswer, ItemStatus, TaskAct, TaskId},
    pipelines::changing::{Changing, MOST},
};

impl Api {
    /// Cancels tasks: no worker does them any more. Answers each, in order.
    pub async fn cancel_tasks(&self, caller: &Caller, ids: Vec<String>) -> Result<Vec<ItemAnswer>, Error> {
        self.change_tasks(caller, ids, &Change::Cancel).instrument(span("cancel_tasks", caller)).await
    }

    /// Cancels one task. An error says why it cannot be cancelled.
    pub async fn cancel_task(&self, caller: &Caller, id: &str) -> Result<ItemAnswer, Error> {
        let id: TaskId = id.parse().map_err(|_| Error::NotATaskId(shorten(id, ECHO).into_owned()))?;
        let answers = self.cancel_tasks(caller, vec![id.to_string()]).await?;
        let answer = answers.into_iter().next().ok_or(Error::NoSuchTask(id))?;
        match answer.status {
            ItemStatus::Ok | ItemStatus::TryLater => Ok(answer),
            ItemStatus::UnknownTask => Err(Error::NoSuchTask(id)),
            _ => Err(Error::Final { id, why: answer.error }),
        }
    }

    async fn change_tasks(&self, caller: &Caller, ids: Vec<String>, change: &Change) -> Result<Vec<ItemAnswer>, Error> {
        // The body may have taken long.
        self.authentication.still_valid(caller)?;
        if ids.len() > MOST {
            return Err(Error::Invalid(format!("{} ids in one call; at most {MOST}", ids.len())));
        }
        let parsed: Vec<Option<TaskId>> = ids.iter().map(|id| id.parse().ok()).collect();
        let mut named: Vec<TaskId> = parsed.iter().flatten().copied().collect();
        named.sort_unstable();
        named.dedup();
        let changed = if named.is_empty() { HashMap::new() } else { self.change(caller, &named, change).await? };
        let answer = |(id, parsed): (String, Option<TaskId>)| match parsed {
            // Only a caller that reaches the queue may know that the task is there.
            Some(task) => answer(id, changed.get(&task).copied().unwrap_or(Changed::Unknown)),
            None => {
                let id = shorten(&id, ECHO).into_owned();
                let error = format!("{id:?} is not a task id; ids are UUIDs, as an insert answers them");
                ItemAnswer::invalid(id, error)
            }
        };
        Ok(ids.into_iter().zip(parsed).map(answer).collect())
    }

    /// Changes the tasks that the caller reaches.
    async fn change(
        &self,
        caller: &Caller,
        ids: &[TaskId],
        change: &Change,
    ) -> Result<HashMap<TaskId, Changed>, Error> {
        let owned = self.query()?.store().queues_of(ids).await?;
        let reached = owned.into_iter().filter(|(_, queue)| caller.access.reaches(queue.as_str()));
        let ids: Vec<TaskId> = reached.map(|(id, _)| id).collect();
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let who = caller.access.token().map_or("anybody", |token| &token.name);
        let act = |id: &TaskId| (*id, Act::new(who, &change.act(), &id.to_string()));
        let acts: Vec<TaskAct> = ids.iter().map(act).collect();
        let changed = self.changing()?.change(&ids, change, &acts).await?;
        let count = changed.iter().filter(|changed| **changed == Changed::Done).count();
        tracing::info!(%who, count, asked = ids.len(), "{who}: {}, {count} of {}", change.act(), ids.len());
        Ok(ids.into_iter().zip(changed).collect())
    }

    fn changing(&self) -> Result<&Changing, Error> {
        self.changing.as_ref().ok_or(Error::NotRunHere("discovery or tasks"))
    }
}

fn answer(id: String, changed: Changed) -> ItemAnswer {
    let (status, error) = match changed {
        Changed::Done => (ItemStatus::Ok, ""),
        Changed::AlreadyCompleted => (ItemStatus::AlreadyCompleted, "its workers have completed it"),
        Changed::Dead => (ItemStatus::Invalid, "the task is dead: it failed for good before"),
        Changed::Cancelled => (ItemStatus::Cancelled, "the task was cancelled before"),
        Changed::Unknown => (ItemStatus::UnknownTask, ""),
        Changed::Later => (
            ItemStatus::TryLater,
            "taskd has stored the change, and makes it as soon as the task's shard answers; the same call asks again",
        ),
    };
    ItemAnswer { error: error.to_owned(), ..ItemAnswer::new(id, status) }
}
