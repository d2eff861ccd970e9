//! Inserts that wait for the ends of their tasks.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::{
    access::Denied,
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::{
    model::{AwaitedTask, Caller, InsertAnswer, NewTask, QueueName, Role, TaskId, TaskStatus},
    queue::{Interest, Told, Watch},
};

/// The tasks of one insert that waits.
const MOST: usize = 1000;
/// The tasks whose results are read at a time.
const AT_ONCE: usize = 16;

impl Api {
    /// Inserts as [`Self::insert`] does, and waits until the tasks are final, at most for `wait`. `room` gives the room
    /// for the bytes of results.
    pub async fn insert_and_wait<R, E: From<Error>>(
        &self,
        caller: &Caller,
        tasks: Vec<Result<NewTask, String>>,
        wait: Duration,
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(Vec<AwaitedTask>, R), E> {
        may_read(caller).map_err(Error::from)?;
        if tasks.len() > MOST {
            let why = format!("{} tasks in an insert that waits; at most {MOST}", tasks.len());
            return Err(Error::Invalid(why).into());
        }
        let query = self.query()?;
        let deadline = Instant::now() + wait.min(query.settings.limits.max_wait);
        let counted = query.watchers.admit(caller)?;
        let queues: Vec<Option<QueueName>> = tasks.iter().map(queue_of).collect();
        // The processes hear of the interest while SQL stores the tasks.
        let early = queues.iter().flatten().filter(|queue| caller.access.reaches(queue.as_str()));
        let early: BTreeMap<QueueName, Vec<TaskId>> = early.map(|queue| (queue.clone(), Vec::new())).collect();
        let early = query.watch_ends(early)?;
        let answers = self.insert(caller, tasks).await?;
        let mut stored: BTreeMap<QueueName, Vec<TaskId>> = BTreeMap::new();
        for (queue, answer) in queues.into_iter().zip(&answers) {
            if let (Some(queue), Some(id)) = (queue, answer.id) {
                stored.entry(queue).or_default().push(id);
            }
        }
        let ids: Vec<TaskId> = stored.values().flatten().copied().collect();
        let watch = query.watch_ends(stored)?;
        drop(early);
        let wait = query.ends(&watch, &ids, deadline, self.stop.cancelled());
        let statuses = wait.instrument(span("wait", caller)).await;
        drop((watch, counted));
        let completed = answers.iter().filter_map(|answer| answer.id);
        let completed: Vec<TaskId> = completed.filter(|id| statuses.get(id) == Some(&TaskStatus::Completed)).collect();
        query.with_results(answers, &statuses, &completed, room).await
    }
}

/// The answer has results, which only readers may see.
fn may_read(caller: &Caller) -> Result<(), Denied> {
    let token = caller.access.token().filter(|token| !token.roles.include(Role::Read));
    token.map_or(Ok(()), |token| Err(Denied::Role { token: token.name.clone(), has: token.roles, needs: Role::Read }))
}

fn queue_of(task: &Result<NewTask, String>) -> Option<QueueName> {
    task.as_ref().ok().and_then(|task| QueueName::new(&task.queue).ok())
}

impl Reader {
    fn watch_ends(&self, of: BTreeMap<QueueName, Vec<TaskId>>) -> Result<Watch, Error> {
        let of = of.into_iter().map(|(queue, ids)| (queue, Some(ids))).collect();
        Ok(self.queue.announcer().watch(of, Interest::Ends)?)
    }

    /// The statuses of tasks when all are final, or at the deadline, or at the stop.
    async fn ends(
        &self,
        watch: &Watch,
        ids: &[TaskId],
        deadline: Instant,
        stop: impl Future<Output = ()>,
    ) -> HashMap<TaskId, TaskStatus> {
        let mut statuses = HashMap::new();
        self.read_open(ids, &mut statuses).await;
        let wait = async {
            while ids.iter().any(|id| !is_final(&statuses, id)) {
                let (told, is_incomplete) = watch.told().await;
                for told in told {
                    if let Told::Hint(event) | Told::Truth(event) = told
                        && !is_final(&statuses, &event.id)
                    {
                        statuses.insert(event.id, event.status);
                    }
                }
                if is_incomplete {
                    watch.ask(ids);
                }
            }
        };
        let is_over = tokio::select! {
            ended = timeout_at(deadline, wait) => ended.is_ok(),
            () = stop => false,
        };
        if !is_over {
            self.read_open(ids, &mut statuses).await;
        }
        statuses
    }

    /// Reads the statuses of those that are not known to be final. Where it cannot, they stay as they are.
    async fn read_open(&self, ids: &[TaskId], statuses: &mut HashMap<TaskId, TaskStatus>) {
        let open: Vec<TaskId> = ids.iter().filter(|id| !is_final(statuses, id)).copied().collect();
        if open.is_empty() {
            return;
        }
        match self.statuses(&open).await {
            Ok(events) => statuses.extend(events.into_iter().map(|event| (event.id, event.status))),
            Err(error) => tracing::debug!("an insert that waits cannot read {} tasks: {error}", open.len()),
        }
    }

    async fn with_results<R, E: From<Error>>(
        &self,
        answers: Vec<InsertAnswer>,
        statuses: &HashMap<TaskId, TaskStatus>,
        completed: &[TaskId],
        room: impl FnOnce(usize) -> Result<R, E>,
    ) -> Result<(Vec<AwaitedTask>, R), E> {
        let ids = || futures::stream::iter(completed.iter().copied());
        let bytes = ids().map(|id| self.results_bytes(id)).buffer_unordered(AT_ONCE);
        let bytes = bytes.try_fold(0, async |sum, bytes| Ok(sum + bytes)).await?;
        let room = room(bytes)?;
        let read = async |id| Ok::<_, Error>((id, self.results(id).await?.unwrap_or_default()));
        let results: Vec<_> = ids().map(read).buffer_unordered(AT_ONCE).try_collect().await?;
        let results: HashMap<TaskId, _> = results.into_iter().collect();
        let awaited = |answer: InsertAnswer| {
            let status = answer.id.and_then(|id| statuses.get(&id).copied());
            // Two tasks of an insert may have one key.
            let results = answer.id.and_then(|id| results.get(&id).cloned()).unwrap_or_default();
            AwaitedTask { answer, status, results }
        };
        Ok((answers.into_iter().map(awaited).collect(), room))
    }
}

fn is_final(statuses: &HashMap<TaskId, TaskStatus>, id: &TaskId) -> bool {
    statuses.get(id).is_some_and(|status| status.is_final())
}
