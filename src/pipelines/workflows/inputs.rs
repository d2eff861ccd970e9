//! What came to executions: reads their inboxes and their due timers, and how steps ended.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::ready,
};

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::error::Failure;
use crate::{
    model::{ExecutionId, StoredStatus, TaskId},
    store::{Happening, Store, TaskState},
    workflow::machine::StepEnd,
};

/// How many rows of inboxes, and how many timers, are read at once.
const ROWS: u32 = 1_000;
/// How many executions one round steps.
const EXECUTIONS: usize = 256;
/// How many steps are asked about at the same time.
const ENDS_AT_ONCE: usize = 16;

/// What came to one execution.
#[derive(Default)]
pub(super) struct Incoming {
    /// Earliest first.
    pub(super) happenings: Vec<Happening>,
    /// Numbers of timers that are due.
    pub(super) timers: Vec<u64>,
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
        loop {
            let page = store.inbox(after.as_ref(), ROWS).await?;
            for row in page.rows {
                if let Some(incoming) = arrivals.of(row.execution, held) {
                    incoming.happenings.push(row.happening);
                }
            }
            after = page.last;
            if after.is_none() || !arrivals.by_execution.is_empty() {
                arrivals.is_full |= after.is_some();
                break;
            }
        }
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
                    incoming.timers.push(timer.number);
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

/// Reads how steps ended. Those that are not final (any more) are left out. A task that is gone is
/// dead: retention keeps the tasks of steps, so somebody has removed it.
pub(super) async fn step_ends(
    store: &dyn Store,
    ids: &[TaskId],
) -> Result<HashMap<TaskId, StepEnd>, Failure> {
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let states = store.states(ids).await?;
    let mut gone: HashSet<TaskId> = ids.iter().copied().collect();
    gone.retain(|task| states.iter().all(|state| state.id != *task));
    let ends = stream::iter(states).map(|state| step_end(store, state));
    let ends = ends.buffer_unordered(ENDS_AT_ONCE);
    let ends = ends.try_filter_map(|end| ready(Ok(end)));
    let mut ends: HashMap<TaskId, StepEnd> = ends.try_collect().await?;
    ends.extend(gone.into_iter().map(|task| {
        let reason = "its task is gone".to_owned();
        (task, StepEnd::Dead { reason })
    }));
    Ok(ends)
}

async fn step_end(
    store: &dyn Store,
    state: TaskState,
) -> Result<Option<(TaskId, StepEnd)>, Failure> {
    let TaskState { id, replicas, .. } = state;
    let end = match state.status {
        StoredStatus::Unfinished => return Ok(None),
        StoredStatus::Cancelled => StepEnd::Cancelled,
        StoredStatus::Dead => {
            let task = store.brief_task(id).await?;
            let reason = task.map(|task| task.reason).unwrap_or_default();
            StepEnd::Dead { reason }
        }
        StoredStatus::Completed => {
            let mut results = store.results(id).await?;
            results.retain(|result| !result.surplus);
            results.truncate(replicas as usize);
            let results = results.iter().map(|result| StepEnd::result(&result.result));
            StepEnd::Completed {
                results: results.collect(),
            }
        }
    };
    Ok(Some((id, end)))
}
