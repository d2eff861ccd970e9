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
/// How many pages of inboxes are read in a round, and how many rows of one execution are taken: an
/// execution of many steps holds up no other.
const PAGES: usize = 20;
const ROWS_OF_ONE: usize = 64;
/// How many executions one round steps.
const EXECUTIONS: usize = 256;
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
        let mut after = None;
        for _ in 0..PAGES {
            let page = store.inbox(after.as_ref(), ROWS).await?;
            for row in page.rows {
                let Some(incoming) = arrivals.of(row.execution, held) else {
                    continue;
                };
                if incoming.happenings.len() < ROWS_OF_ONE {
                    incoming.happenings.push(row.happening);
                } else {
                    arrivals.is_full = true;
                }
            }
            after = page.last;
            if after.is_none() || arrivals.by_execution.len() >= EXECUTIONS {
                break;
            }
        }
        arrivals.is_full |= after.is_some();
        let mut after = None;
        loop {
            let timers = store
                .due_timers(ahead_unix_ms, after.as_ref(), ROWS)
                .await?;
            after = timers
                .last()
                .copied()
                .filter(|_| timers.len() >= ROWS as usize);
            for timer in timers {
                if timer.due_unix_ms > now_unix_ms {
                    arrivals.next_due_unix_ms.get_or_insert(timer.due_unix_ms);
                } else if let Some(incoming) = arrivals.of(timer.execution, held) {
                    incoming.timers.push(timer);
                }
            }
            // Those that are due come first. All executions of a page may be held.
            let is_last = after.is_none() || arrivals.next_due_unix_ms.is_some();
            if is_last || !arrivals.by_execution.is_empty() {
                arrivals.is_full |= !is_last;
                break;
            }
        }
        Ok(arrivals)
    }

    fn of(&mut self, id: ExecutionId, held: &HashSet<ExecutionId>) -> Option<&mut Incoming> {
        if held.contains(&id) {
            return None;
        }
        if self.by_execution.len() >= EXECUTIONS && !self.by_execution.contains_key(&id) {
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
                let bytes: usize = sizes.iter().map(|(_, bytes)| bytes).sum();
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
