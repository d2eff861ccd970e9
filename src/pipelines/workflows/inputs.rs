//! What came to executions: reads their inboxes and their due timers, and how steps ended.

use std::collections::{BTreeMap, HashMap, HashSet};

use futures::future::try_join_all;

use super::error::Failure;
use crate::{
    config::Settings,
    model::{ExecutionId, StoredStatus, TaskId},
    store::{Happening, Store, TaskState, Timer},
    workflow::machine::StepEnd,
};

/// How many rows of inboxes, and how many timers, are read at once.
const ROWS: u32 = 1_000;
/// How many pages of inboxes and of timers are read in a round, and how many rows and timers of one
/// execution are taken: an execution of many steps holds up no other. With both it gets fewer rows, so
/// that its timers have their turn, too.
const PAGES: usize = 20;
const ROWS_OF_ONE: usize = 64;
pub(super) const ROWS_BESIDE_TIMERS: usize = 32;
/// How many executions one round steps, and how many of them because of their timers: neither kind
/// holds up the other.
const EXECUTIONS: usize = 256;
const FOR_TIMERS: usize = EXECUTIONS / 2;
/// How many steps are asked about at the same time, and after how many bytes of their results a
/// round reads no more.
const ENDS_AT_ONCE: usize = 16;
const BYTES_OF_ENDS: usize = 32 << 20;

/// What came to one execution.
#[derive(Default)]
pub(super) struct Incoming {
    /// Earliest first.
    pub(super) happenings: Vec<Happening>,
    /// Those that are due.
    pub(super) timers: Vec<Timer>,
}

/// What came to some executions.
#[derive(Default)]
pub(super) struct Arrivals {
    pub(super) by_execution: BTreeMap<ExecutionId, Incoming>,
    /// There may be more.
    pub(super) is_full: bool,
    /// When the next timer that was seen is due.
    pub(super) next_due_unix_ms: Option<i64>,
}

impl Arrivals {
    /// Reads what came to executions, except those in `held`. Timers that become due until
    /// `ahead_unix_ms` are seen, too.
    pub(super) async fn read(
        store: &dyn Store,
        held: &HashSet<ExecutionId>,
        now_unix_ms: i64,
        ahead_unix_ms: i64,
    ) -> Result<Self, Failure> {
        let mut arrivals = Self::default();
        arrivals
            .read_timers(store, held, now_unix_ms, ahead_unix_ms)
            .await?;
        arrivals.read_inboxes(store, held).await?;
        Ok(arrivals)
    }

    async fn read_timers(
        &mut self,
        store: &dyn Store,
        held: &HashSet<ExecutionId>,
        now_unix_ms: i64,
        ahead_unix_ms: i64,
    ) -> Result<(), Failure> {
        let mut after = None;
        let mut pages = 0;
        while pages < PAGES {
            let timers = store
                .due_timers(ahead_unix_ms, after.as_ref(), ROWS)
                .await?;
            after = timers
                .last()
                .copied()
                .filter(|_| timers.len() >= ROWS as usize);
            // A page of executions that are left alone says nothing.
            pages += usize::from(timers.iter().any(|timer| !held.contains(&timer.execution)));
            for timer in timers {
                if timer.due_unix_ms > now_unix_ms {
                    self.next_due_unix_ms.get_or_insert(timer.due_unix_ms);
                } else if !held.contains(&timer.execution)
                    && let Some(incoming) = self.of(timer.execution, FOR_TIMERS)
                {
                    match incoming.timers.len() < ROWS_OF_ONE {
                        true => incoming.timers.push(timer),
                        false => self.is_full = true,
                    }
                }
            }
            // Those that are due come first.
            if after.is_none() || self.next_due_unix_ms.is_some() {
                return Ok(());
            }
            if self.by_execution.len() >= FOR_TIMERS {
                break;
            }
        }
        self.is_full = true;
        Ok(())
    }

    async fn read_inboxes(
        &mut self,
        store: &dyn Store,
        held: &HashSet<ExecutionId>,
    ) -> Result<(), Failure> {
        let mut after = None;
        // Those of which this round takes no more. There may be many rows of one.
        let mut without: Vec<ExecutionId> = held.iter().copied().take(EXECUTIONS / 2).collect();
        for _ in 0..PAGES {
            let page = store.inbox(after.as_ref(), &without, ROWS).await?;
            for row in page
                .rows
                .iter()
                .filter(|row| !held.contains(&row.execution))
            {
                let Some(incoming) = self.of(row.execution, EXECUTIONS) else {
                    continue;
                };
                let most = match incoming.timers.is_empty() {
                    true => ROWS_OF_ONE,
                    false => ROWS_BESIDE_TIMERS,
                };
                if incoming.happenings.len() < most {
                    incoming.happenings.push(row.happening);
                    if incoming.happenings.len() == most {
                        self.is_full = true;
                        if without.len() < EXECUTIONS {
                            without.push(row.execution);
                        }
                    }
                }
            }
            after = page.last;
            if after.is_none() || self.by_execution.len() >= EXECUTIONS {
                break;
            }
        }
        self.is_full |= after.is_some();
        Ok(())
    }

    /// What came to an execution. `None` if `most` others have something already.
    fn of(&mut self, id: ExecutionId, most: usize) -> Option<&mut Incoming> {
        if self.by_execution.len() >= most && !self.by_execution.contains_key(&id) {
            self.is_full = true;
            return None;
        }
        Some(self.by_execution.entry(id).or_default())
    }
}

/// How steps ended.
pub(super) struct Ends {
    pub(super) by_task: HashMap<TaskId, StepEnd>,
    /// Not all were read.
    pub(super) is_full: bool,
}

impl Ends {
    /// Reads how steps ended, until there is enough to do. Those that are not final (any more) are
    /// left out. A task that is gone is dead: retention keeps the tasks of steps, so somebody has
    /// removed it.
    pub(super) async fn read(
        store: &dyn Store,
        ids: &[TaskId],
        settings: &Settings,
    ) -> Result<Self, Failure> {
        let mut ends = Self {
            by_task: HashMap::new(),
            is_full: false,
        };
        if ids.is_empty() {
            return Ok(ends);
        }
        let mut states = store.states(ids).await?;
        let known: HashSet<TaskId> = states.iter().map(|state| state.id).collect();
        for task in ids.iter().filter(|task| !known.contains(task)) {
            let reason = "its task is gone".to_owned();
            ends.by_task.insert(*task, StepEnd::Dead { reason });
        }
        states.retain(|state| state.status != StoredStatus::Unfinished);
        let mut bytes = 0;
        while !states.is_empty() {
            if bytes >= BYTES_OF_ENDS {
                ends.is_full = true;
                break;
            }
            let piece = states.split_off(states.len().saturating_sub(ENDS_AT_ONCE));
            let read = piece
                .into_iter()
                .map(|state| step_end(store, state, settings));
            for (task, end, of_end) in try_join_all(read).await? {
                bytes += of_end;
                ends.by_task.insert(task, end);
            }
        }
        Ok(ends)
    }
}

/// Reads how a step ended. Returns about how many bytes that has.
async fn step_end(
    store: &dyn Store,
    state: TaskState,
    settings: &Settings,
) -> Result<(TaskId, StepEnd, usize), Failure> {
    let TaskState { id, replicas, .. } = state;
    let dead = |reason: String| StepEnd::Dead { reason };
    match state.status {
        StoredStatus::Unfinished | StoredStatus::Cancelled => Ok((id, StepEnd::Cancelled, 0)),
        StoredStatus::Dead => {
            let task = store.brief_task(id).await?;
            let reason = task.map(|task| task.reason).unwrap_or_default();
            let bytes = reason.len();
            Ok((id, dead(reason), bytes))
        }
        StoredStatus::Completed => {
            let most = settings.workflows.max_state;
            let replicas = replicas as usize;
            if replicas.saturating_mul(settings.limits.max_result_bytes) > most {
                let sizes = store.result_sizes(id).await?;
                let of_first = sizes.iter().take(replicas);
                let bytes: usize = of_first.map(|(_, bytes)| bytes).sum();
                if bytes > most {
                    let reason = format!(
                        "its results have {bytes} bytes together; at most {most} (workflow_max_state)"
                    );
                    return Ok((id, dead(reason), 0));
                }
            }
            let mut results = store.results(id).await?;
            results.retain(|result| !result.surplus);
            results.truncate(replicas);
            let bytes = results.iter().map(|result| result.result.len()).sum();
            let results = results.iter().map(|result| StepEnd::result(&result.result));
            let results = results.collect();
            Ok((id, StepEnd::Completed { results }, bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Act, ExecutionStatus, WorkflowVersion},
        store::{Append, NewExecution, StoredDefinition, sqlite::SqliteStore},
    };

    const NOW: i64 = 1_700_000_000_000;

    fn workflow() -> WorkflowVersion {
        WorkflowVersion {
            namespace: "a".into(),
            name: "b".into(),
            version: "1.0.0".into(),
        }
    }

    async fn started(store: &dyn Store) -> ExecutionId {
        let id = ExecutionId::new();
        let execution = NewExecution {
            id,
            given: None,
            workflow: workflow(),
            hash: String::new(),
            input: "null".into(),
            traceparent: String::new(),
            created_unix_ms: NOW,
        };
        store.start_execution(&execution).await.unwrap();
        id
    }

    /// An execution that has begun, and waits for timers.
    async fn waiting(store: &dyn Store, due_unix_ms: i64, timers: u64) -> ExecutionId {
        let execution = started(store).await;
        let append = Append {
            execution,
            seq: 0,
            entries: vec!["1".into()],
            armed: (0..timers).map(|number| (number, due_unix_ms)).collect(),
            disarmed: vec![],
            steps: vec![],
            cancelled: vec![],
            consumed: vec![Happening::Start],
            goes_on: false,
            status: ExecutionStatus::Waiting,
            summary: None,
            at_unix_ms: NOW,
        };
        store.append(&[append]).await.unwrap();
        execution
    }

    /// Ends of many steps that wait in an inbox longer than anything else.
    fn many_ends(database: &std::path::Path, execution: ExecutionId, most: u32) {
        let database = rusqlite::Connection::open(database).unwrap();
        let insert = "WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many WHERE n < ?) \
             INSERT INTO execution_inbox (execution, task, happening, at_ms) \
             SELECT ?, CAST(printf('%016d', n) AS BLOB), ?, 1 FROM many";
        let completed = StoredStatus::Completed as i64;
        let values = (most, execution.as_bytes().to_vec(), completed);
        database.execute(insert, values).unwrap();
    }

    #[tokio::test]
    async fn timers_starts_and_long_inboxes_hold_up_none_of_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taskd.db");
        let store: &dyn Store = &SqliteStore::open(&path, None).await.unwrap();
        let definition = StoredDefinition {
            workflow: workflow(),
            hash: String::new(),
            text: String::new(),
            documents: "{}".into(),
            deployed_by: String::new(),
            deployed_unix_ms: NOW,
        };
        let act = Act::new("ops", "deploy workflow", "a/b");
        store.keep_definition(&definition, &act).await.unwrap();
        let long = waiting(store, NOW + 100_000, 1).await;
        many_ends(&path, long, ROWS * 25);
        let cancelled = waiting(store, NOW + 100_000, 1).await;
        many_ends(&path, cancelled, ROWS);
        store.cancel_execution(cancelled, &act).await.unwrap();
        let held = waiting(store, NOW, 1).await;
        many_ends(&path, held, ROWS * 25);
        let many = waiting(store, NOW, 2 * u64::from(ROWS)).await;
        for _ in 0..EXECUTIONS {
            started(store).await;
        }
        for _ in 0..FOR_TIMERS {
            waiting(store, NOW, 1).await;
        }
        let next = waiting(store, NOW + 500, 1).await;
        let of_others = HashSet::from([held]);
        let read = Arrivals::read(store, &of_others, NOW, NOW + 1_000).await;
        let arrivals = read.unwrap();
        assert!(arrivals.is_full);
        assert_eq!(arrivals.next_due_unix_ms, Some(NOW + 500));
        let of = |id| arrivals.by_execution.get(&id);
        assert!(of(held).is_none() && of(next).is_none());
        assert_eq!(of(long).unwrap().happenings.len(), ROWS_OF_ONE);
        assert_eq!(of(many).unwrap().timers.len(), ROWS_OF_ONE);
        let cancelled = &of(cancelled).unwrap().happenings;
        assert_eq!(cancelled[0], Happening::Cancel);
        let all = arrivals.by_execution.values();
        let timers = all.clone().filter(|one| !one.timers.is_empty());
        let starts = all
            .clone()
            .filter(|one| one.happenings == [Happening::Start]);
        let counts = (all.len(), timers.count(), starts.count());
        assert_eq!(
            counts,
            (EXECUTIONS, FOR_TIMERS, EXECUTIONS - FOR_TIMERS - 2)
        );
    }
}
