//! Reads what SQL and Redis say about watched tasks, for all watchers of a process together.
//!
//! Notifications are hints. Watched tasks are read once a second, so that a lost hint delays an
//! event by at most that. A task whose hint has no status is read at the next tick.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::time::timeout;

use super::{
    error::Error,
    reader::{Reader, view},
    search::KnownRecords,
};
use crate::{
    model::{TaskEvent, TaskId},
    queue::{self, RecordStatus},
    runtime::{Loop, Supervisor, tick},
    store::ListedTask,
};

/// How often all watched tasks are read.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many tasks are read at a time.
const AT_ONCE: usize = 500;
/// How long events wait for the keys of their tasks.
const KEYS_WITHIN: Duration = Duration::from_secs(1);

/// A task, as SQL and Redis have it now.
pub(super) struct WatchedTask {
    pub(super) event: TaskEvent,
    /// Its end is on the way to SQL. Until then the event says `ASSIGNED`, even if no worker has
    /// had the task.
    pub(super) is_ending: bool,
}

/// The tasks that SQL has. Unfinished ones of shards that do not answer are left out.
pub(super) struct Statuses {
    pub(super) looks: Vec<WatchedTask>,
    /// Why some are left out.
    pub(super) failed: Option<queue::Error>,
}

impl Reader {
    /// Reads watched tasks for the watchers of this process, until the stop.
    pub fn inform_watchers(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("watchers", self.clone(), |reader, cx| async move {
            reader.inform(&cx).await
        });
    }

    async fn inform(&self, cx: &Loop) {
        let announcer = self.queue.announcer();
        let mut looked = Instant::now();
        loop {
            tokio::select! {
                () = announcer.asked() => tick().await,
                more = cx.pause(LOOK_EVERY) => if !more { return },
                () = cx.stop.cancelled() => return,
            }
            let all = looked.elapsed() >= LOOK_EVERY;
            if all {
                looked = Instant::now();
            }
            for ids in announcer.take_asked(all).chunks(AT_ONCE) {
                let failed = match self.statuses(ids).await {
                    // If a task is ending, its next event is the end itself.
                    Ok(Statuses { looks, failed }) => {
                        let stay = looks.into_iter().filter(|look| !look.is_ending);
                        announcer.tell(stay.map(|look| look.event).collect());
                        failed.map(Error::from)
                    }
                    Err(error) => Some(error),
                };
                // They are read again the next time.
                if let Some(error) = failed {
                    tracing::debug!(
                        "cannot read all of {} tasks that are watched: {error}",
                        ids.len()
                    );
                }
                cx.beat();
            }
            cx.beat();
        }
    }

    /// The keys of tasks, for watchers; without those that SQL does not have, or not now.
    pub(super) async fn keys(&self, ids: &[TaskId]) -> HashMap<TaskId, Bytes> {
        let mut keys = self.known_keys.get(ids);
        let unknown: Vec<TaskId> = ids
            .iter()
            .filter(|id| !keys.contains_key(id))
            .copied()
            .collect();
        if unknown.is_empty() {
            return keys;
        }
        // Events do not wait for a database that does not answer.
        let Ok(read) = timeout(KEYS_WITHIN, self.store().listed(&unknown)).await else {
            return keys;
        };
        match read {
            Ok(tasks) => {
                for task in tasks {
                    self.known_keys.add(task.id, &task.key);
                    keys.insert(task.id, task.key);
                }
            }
            Err(error) => tracing::debug!("cannot read the keys of watched tasks: {error}"),
        }
        keys
    }

    /// The statuses of tasks, for watchers: a task is final when SQL has its end, and the results
    /// with it.
    pub(super) async fn statuses(&self, ids: &[TaskId]) -> Result<Statuses, Error> {
        let now = self.now_unix_ms();
        let tasks = self.store().listed(ids).await?;
        let KnownRecords {
            records,
            shards,
            failed,
        } = self.known_records(&tasks).await;
        let look = |task: ListedTask| {
            let record = records.get(&task.id).copied();
            let is_final = task.status.is_final();
            let view = view(task, record, now);
            let is_ending =
                !is_final && record.is_some_and(|record| record.status != RecordStatus::Live);
            let at_unix_ms = if is_final { view.updated_unix_ms } else { now };
            let event = TaskEvent {
                id: view.id,
                queue: view.queue,
                status: view.status,
                at_unix_ms,
            };
            WatchedTask { event, is_ending }
        };
        let known = tasks
            .into_iter()
            .filter(|task| task.status.is_final() || shards.contains(&task.shard));
        Ok(Statuses {
            looks: known.map(look).collect(),
            failed,
        })
    }
}
