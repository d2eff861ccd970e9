//! Executions of workflows: starting, listing, showing and cancelling them.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::{
    access::who,
    error::Error,
    handle::{Api, span},
    query::{LISTED, bounded},
    reader::Reader,
    waiting::may_read,
    waits::Wait,
    workflows::LATEST,
};
use crate::{
    model::{
        Act, Caller, ECHO, ExecutionId, ExecutionList, ExecutionPages, ExecutionStatus,
        ExecutionSummary, ExecutionView, MAX_GIVEN_ID_BYTES, QueueName, TaskId, TraceContext,
        WorkflowVersion, json, shorten,
    },
    store::{ListedExecution, NewExecution, StartedExecution, StoredEntry, StoredExecution},
};

/// How many entries of a history are read at once.
const ENTRIES: u32 = 1_000;

/// The history of an execution, page by page.
pub struct HistoryPages {
    reader: Reader,
    id: ExecutionId,
    after: u64,
}

impl HistoryPages {
    /// The next entries: the number of each, and its JSON. Empty after the last one.
    pub async fn next(&mut self) -> Result<Vec<(u64, Bytes)>, Error> {
        let page = self
            .reader
            .store()
            .entries(self.id, self.after, ENTRIES)
            .await?;
        if let Some(last) = page.last() {
            self.after = last.seq;
        }
        let entries = page.into_iter();
        Ok(entries
            .map(|StoredEntry { seq, entry }| (seq, entry))
            .collect())
    }
}

/// A call that waits for the end of an execution.
struct Waiting {
    until: Instant,
    _counted: Wait,
}

impl Api {
    /// Starts an execution, and returns whether it is new. A start with the same given id again is the
    /// same execution. With `wait`, calls `stored` and returns when it has ended, or after this time.
    pub async fn start_execution(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
        (input, given): (Value, Option<String>),
        wait: Option<Duration>,
        stored: impl FnOnce(),
    ) -> Result<(ExecutionView, bool), Error> {
        let query = self.query()?;
        let start = async {
            let waiting = match wait {
                None => None,
                // Before anything is stored: the answer has the output, which only readers may see.
                Some(wait) => {
                    may_read(caller)?;
                    Some(self.waiting(caller, wait)?)
                }
            };
            let before = match &given {
                Some(given) => {
                    check_given(given)?;
                    query.started_before(caller, workflow, given).await?
                }
                None => None,
            };
            let (mut found, is_new) = match before {
                Some(before) => {
                    drop(input);
                    (before, false)
                }
                None => query.start(caller, workflow, input, given).await?,
            };
            if let Some(waiting) = waiting {
                stored();
                found = self.execution_when_ended(caller, found, waiting).await?;
            }
            let mut view = query.view(found).await?;
            // A repeat would show what others have started.
            if may_read(caller).is_err() {
                (view.input, view.output, view.error) = (None, None, None);
            }
            Ok((view, is_new))
        };
        start.instrument(span("start_execution", caller)).await
    }

    /// A page of executions, the newest first.
    pub async fn executions(
        &self,
        caller: &Caller,
        pages: Result<ExecutionPages, String>,
    ) -> Result<ExecutionList, Error> {
        let mut pages = pages.map_err(Error::Invalid)?;
        pages.limit = bounded(pages.limit, LISTED)?;
        let query = self.query()?;
        let list = async {
            let page = query.store().executions(&pages).await?;
            let next = page.last().filter(|_| page.len() >= pages.limit as usize);
            let next = next.map(|last| last.id.to_string());
            let mut executions = Vec::with_capacity(page.len());
            for listed in page {
                if query
                    .reaches_workflow(caller, &listed.workflow, &listed.hash)
                    .await?
                {
                    executions.push(listed_view(listed));
                }
            }
            Ok(ExecutionList { executions, next })
        };
        list.instrument(span("executions", caller)).await
    }

    /// One execution, by its id or by the id that was given at its start. With `wait`: when it has
    /// ended, or after this time.
    pub async fn execution(
        &self,
        caller: &Caller,
        id: &str,
        wait: Option<Duration>,
    ) -> Result<ExecutionView, Error> {
        let query = self.query()?;
        let get = async {
            let mut found = query.reached_execution(caller, id).await?;
            if let Some(wait) = wait {
                let waiting = self.waiting(caller, wait)?;
                found = self.execution_when_ended(caller, found, waiting).await?;
            }
            query.view(found).await
        };
        get.instrument(span("execution", caller)).await
    }

    /// Counts a call that waits for the end of an execution.
    fn waiting(&self, caller: &Caller, wait: Duration) -> Result<Waiting, Error> {
        let most = self.query()?.settings.limits.max_wait;
        Ok(Waiting {
            until: Instant::now() + wait.min(most),
            _counted: self.waits.call(&caller.access)?,
        })
    }

    /// Waits until an execution has ended. Returns it as it is if the time is over, or this process
    /// stops.
    async fn execution_when_ended(
        &self,
        caller: &Caller,
        found: StoredExecution,
        waiting: Waiting,
    ) -> Result<StoredExecution, Error> {
        let status = found.listed.status;
        if status.is_final() {
            return Ok(found);
        }
        let query = self.query()?;
        let id = found.listed.id;
        let mut receiver = query.execution_watches.watch(id, status);
        // An error says that the time is over, or that the execution is removed.
        let ended = timeout_at(waiting.until, receiver.wait_for(|status| status.is_final()));
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return Ok(found),
            ended = ended => drop(ended),
            denied = self.authentication.revoked(&caller.access) => return Err(denied.into()),
        }
        let found = query.store().execution(id).await?;
        found.ok_or_else(|| Error::NoSuchExecution(id.to_string()))
    }

    /// The history of an execution after the event of this number.
    pub async fn execution_history(
        &self,
        caller: &Caller,
        id: &str,
        after: u64,
    ) -> Result<HistoryPages, Error> {
        let query = self.query()?;
        let get = async {
            let stored = query.reached_execution(caller, id).await?;
            Ok(HistoryPages {
                reader: query.clone(),
                id: stored.listed.id,
                after,
            })
        };
        get.instrument(span("execution_history", caller)).await
    }

    /// Cancels an execution, soon. One that is cancelled already stays so.
    pub async fn cancel_execution(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<ExecutionView, Error> {
        let query = self.query()?;
        let cancel = async {
            let stored = query.reached_execution(caller, id).await?;
            let id = stored.listed.id;
            let target = id.to_string();
            let now = query.now_unix_ms();
            let act = Act::at_time(now, who(caller), "cancel execution", &target);
            match query.store().cancel_execution(id, &act).await? {
                None => Err(Error::NoSuchExecution(target)),
                Some(status) if status.is_final() && status != ExecutionStatus::Cancelled => Err(
                    Error::Conflict(format!("execution {target} has ended before: {status}")),
                ),
                Some(_) => {
                    query.executions.wake();
                    let stored = query.store().execution(id).await?;
                    let stored = stored.ok_or(Error::NoSuchExecution(target))?;
                    query.view(stored).await
                }
            }
        };
        cancel.instrument(span("cancel_execution", caller)).await
    }
}

impl Reader {
    /// Starts an execution, unless another start with the given id did so just now.
    async fn start(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
        input: Value,
        given: Option<String>,
    ) -> Result<(StoredExecution, bool), Error> {
        let (definition, queues) = self.reached_definition(caller, workflow).await?;
        if json::levels(&input) > json::MAX_DEPTH {
            let most = json::MAX_DEPTH;
            return Err(Error::Invalid(format!("input has more than {most} levels")));
        }
        let input = Bytes::from(input.to_string());
        let most = self.settings.workflows.max_state;
        if input.len() > most {
            return Err(Error::Invalid(format!(
                "input has {} bytes; at most {most} (workflow_max_state)",
                input.len()
            )));
        }
        if let Some(full) = self.full(&queues).await? {
            return Err(Error::Full(full));
        }
        let now = self.now_unix_ms();
        let id = new_id(now);
        let execution = NewExecution {
            id,
            given,
            workflow: definition.workflow,
            hash: definition.hash,
            input,
            traceparent: TraceContext::of_id(id.as_bytes()).to_string(),
            created_unix_ms: now,
        };
        let (id, is_new) = match self.store().start_execution(&execution).await? {
            StartedExecution::New => {
                self.open_executions.add();
                (id, true)
            }
            StartedExecution::Before(id) => (id, false),
            StartedExecution::OtherWorkflow(_) => {
                return Err(is_taken(&execution.given.unwrap_or_default()));
            }
            StartedExecution::NoDefinition => {
                return Err(Error::NoSuchWorkflow(execution.workflow.to_string()));
            }
        };
        self.executions.wake();
        let found = self.store().execution(id).await?;
        let found = found.ok_or_else(|| Error::NoSuchExecution(id.to_string()))?;
        Ok((found, is_new))
    }

    /// Why no execution can start now whose steps go to these queues.
    async fn full(&self, queues: &[QueueName]) -> Result<Option<String>, Error> {
        for queue in queues {
            let most = self.settings.queues.get(queue).max_unfinished;
            if self.occupancy.unfinished_of(queue) >= most {
                return Ok(Some(format!(
                    "queue {queue} of the workflow has {most} unfinished tasks (max_unfinished); try again later"
                )));
            }
        }
        let most = self.settings.workflows.max_open;
        let open = self.open_executions.count(self.store()).await?;
        Ok((open >= most)
            .then(|| format!("{most} executions are open (max_open_executions); try again later")))
    }

    /// The execution that an earlier start with this id created. A repeat starts nothing, also if the
    /// definition is gone or nothing else could start.
    async fn started_before(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
        given: &str,
    ) -> Result<Option<StoredExecution>, Error> {
        let Some(id) = self.store().execution_given(given).await? else {
            return Ok(None);
        };
        let Some(stored) = self.store().execution(id).await? else {
            return Ok(None);
        };
        let ListedExecution {
            workflow: of, hash, ..
        } = &stored.listed;
        let is_same = (&of.namespace, &of.name) == (&workflow.namespace, &workflow.name)
            && [of.version.as_str(), LATEST].contains(&workflow.version.as_str());
        if !is_same || !self.reaches_workflow(caller, of, hash).await? {
            return Err(is_taken(given));
        }
        Ok(Some(stored))
    }

    /// An execution with its input, which the first event has once there is one.
    async fn view(&self, stored: StoredExecution) -> Result<ExecutionView, Error> {
        let mut stored = stored;
        if stored.input.is_empty() && stored.listed.seq > 0 {
            let first = self.store().entries(stored.listed.id, 0, 1).await?;
            if let Some(StoredEntry { entry, .. }) = first.into_iter().next() {
                #[derive(Deserialize)]
                struct Started {
                    #[serde(default)]
                    input: Value,
                }
                // A later version may have written it.
                let started = serde_json::from_slice::<Started>(&entry);
                let input = started.map(|started| started.input).unwrap_or_default();
                stored.input = input.to_string().into();
            }
        }
        Ok(view(stored))
    }

    async fn reached_execution(
        &self,
        caller: &Caller,
        text: &str,
    ) -> Result<StoredExecution, Error> {
        let unknown = || Error::NoSuchExecution(shorten(text, ECHO).into_owned());
        let mut stored = match ExecutionId::parse(text) {
            Some(id) => self.store().execution(id).await?,
            None => None,
        };
        if stored.is_none()
            && !text.is_empty()
            && text.len() <= MAX_GIVEN_ID_BYTES
            && let Some(id) = self.store().execution_given(text).await?
        {
            stored = self.store().execution(id).await?;
        }
        let stored = stored.ok_or_else(unknown)?;
        // Only a caller that reaches it may know that it exists.
        let ListedExecution { workflow, hash, .. } = &stored.listed;
        match self.reaches_workflow(caller, workflow, hash).await? {
            true => Ok(stored),
            false => Err(unknown()),
        }
    }
}

fn is_taken(given: &str) -> Error {
    Error::Conflict(format!(
        "the id {:?} belongs to an execution of another workflow; choose another one",
        shorten(given, ECHO)
    ))
}

fn check_given(given: &str) -> Result<(), Error> {
    let why = if given.is_empty() {
        "id is empty; leave it out, or name the execution".to_owned()
    } else if given.len() > MAX_GIVEN_ID_BYTES {
        format!("id has {} bytes; at most {MAX_GIVEN_ID_BYTES}", given.len())
    } else if given.chars().any(char::is_control) {
        "id has a control character; use none".to_owned()
    } else if ExecutionId::parse(given).is_some() {
        "id is a UUID, as those that taskd gives; put a word before it".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::Invalid(why))
}

/// A new id, with the time of the clock that all processes share.
fn new_id(now_unix_ms: i64) -> ExecutionId {
    static PLACE: AtomicUsize = AtomicUsize::new(0);
    let place = PLACE.fetch_add(1, Ordering::Relaxed);
    let id = TaskId::at(now_unix_ms, place);
    ExecutionId::from_slice(id.as_bytes()).unwrap_or_else(|| ExecutionId::first_of(now_unix_ms))
}

fn listed_view(listed: ListedExecution) -> ExecutionView {
    let WorkflowVersion {
        namespace,
        name,
        version,
    } = listed.workflow;
    ExecutionView {
        id: listed.id.to_string(),
        given_id: listed.given.unwrap_or_default(),
        namespace,
        name,
        version,
        hash: listed.hash,
        status: listed.status,
        status_group: match listed.status {
            ExecutionStatus::Pending => "PENDING",
            ExecutionStatus::Running | ExecutionStatus::Waiting => "RUNNING",
            ExecutionStatus::Cancelled => "CANCELLED",
            ExecutionStatus::Faulted => "FAILED",
            ExecutionStatus::Completed => "COMPLETED",
        },
        events: listed.seq,
        started_at: listed.created_unix_ms,
        updated_at: listed.updated_unix_ms,
        ended_at: Some(listed.ended_unix_ms).filter(|at| *at > 0),
        input: None,
        output: None,
        error: None,
        waits: Vec::new(),
    }
}

fn view(stored: StoredExecution) -> ExecutionView {
    let StoredExecution {
        listed,
        input,
        summary,
    } = stored;
    let status = listed.status;
    // A later version may have written it.
    let summary: ExecutionSummary = serde_json::from_slice(&summary).unwrap_or_default();
    let output = summary.output.unwrap_or_default();
    ExecutionView {
        input: Some(serde_json::from_slice(&input).unwrap_or_default()),
        output: (status == ExecutionStatus::Completed).then_some(output),
        error: summary.error,
        waits: summary.waits.into_iter().map(Into::into).collect(),
        ..listed_view(listed)
    }
}
