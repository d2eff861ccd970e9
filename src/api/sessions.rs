//! Sessions without streams: any process can serve any of their calls.

use tracing::Instrument as _;

use super::{
    access,
    error::Error,
    handle::{Api, span},
    stream::answers,
    tasks::counted,
};
use crate::{
    model::{
        Caller, OpenSession, Pending, ReportTasks, SessionCall, SessionClosed, SessionOpened,
        TasksReported, WantTasks,
    },
    pipelines::tasks::{self, Reports, SharedTasks},
    telemetry::metrics::Method,
};

impl Api {
    /// Opens a session, or resumes one.
    pub async fn open_session(
        &self,
        caller: &Caller,
        open: Result<OpenSession, String>,
    ) -> Result<SessionOpened, Error> {
        let mut open = open.map_err(Error::Invalid)?;
        self.tasks()?.few_ids("holding", &open.holding)?;
        access::authorize_open(caller, &mut open)?;
        let queues = open.queues.iter().map(String::as_str);
        self.workers.hear(caller, &open.worker, queues);
        if !open.session.is_empty() {
            let mut call = SessionCall {
                worker: open.worker.clone(),
                session: open.session.clone(),
            };
            self.authorize_call(caller, &mut call).await?;
        }
        Ok(self
            .tasks()?
            .open_shared(open, access::is_one_worker(caller))
            .await?)
    }

    /// Adds to the demand of a session, and waits for tasks. `room` reserves memory for that many
    /// bytes of tasks.
    pub async fn want_tasks<R>(
        &self,
        caller: &Caller,
        want: Result<WantTasks, String>,
        room: impl Fn(usize) -> Result<R, String>,
    ) -> Result<(SharedTasks, Option<R>), Error> {
        let tasks = self.tasks()?;
        let WantTasks {
            mut call,
            want,
            wait,
        } = want.map_err(Error::Invalid)?;
        self.authorize_call(caller, &mut call).await?;
        // Counted before the session wants anything, because this may be refused.
        let _wait = (!wait.is_zero())
            .then(|| self.waits.call(&caller.access))
            .transpose()?;
        let shared = tasks.want_shared(&call, want).await?;
        // The queues of the session may have changed a moment ago.
        access::reaches_session(caller, shared.queues())?;
        let (granted, pending) = shared.granted();
        // Tasks that cannot be sent to the worker must not get into its session book.
        let room = |bytes| {
            let valid = self
                .authentication
                .still_valid(caller)
                .map_err(|denied| denied.to_string());
            valid.and_then(|()| room(bytes)).map_err(tasks::Error::Full)
        };
        let next = tasks.next_shared(shared, wait, room);
        let next = counted(Method::Get, next, |(next, _)| next.leases.tasks.is_empty());
        // The stop ends the wait, and so does a revoked token: the dropped call gives back what it
        // leased.
        let next = tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            next = next.instrument(span("want", caller)) => Some(next),
            denied = self.authentication.revoked(&caller.access), if !wait.is_zero() => return Err(denied.into()),
        };
        // Leases that are not delivered go back.
        self.authentication.still_valid(caller)?;
        Ok(next.unwrap_or_else(|| {
            Ok((
                SharedTasks {
                    granted,
                    pending,
                    ..SharedTasks::default()
                },
                None,
            ))
        })?)
    }

    /// Sets the demand of a session to 0. Returns what it was, and the number of tasks in hand.
    pub async fn surrender_tasks(
        &self,
        caller: &Caller,
        mut call: SessionCall,
    ) -> Result<(u32, u32), Error> {
        self.authorize_call(caller, &mut call).await?;
        Ok(self.tasks()?.surrender_shared(&call).await?)
    }

    /// Returns how many tasks a session wants, and how many it has.
    pub async fn pending_count(
        &self,
        caller: &Caller,
        mut call: SessionCall,
    ) -> Result<Pending, Error> {
        self.authorize_call(caller, &mut call).await?;
        Ok(self.tasks()?.live_shared(&call, &[]).await?.1)
    }

    /// Ends a session.
    pub async fn close_session(
        &self,
        caller: &Caller,
        mut call: SessionCall,
    ) -> Result<SessionClosed, Error> {
        self.authorize_call(caller, &mut call).await?;
        Ok(self.tasks()?.close_shared(&call).await?)
    }

    /// Reports tasks of a session. If the answer was lost, the report may be repeated: it counts
    /// only once.
    pub async fn report_tasks(
        &self,
        caller: &Caller,
        report: ReportTasks,
    ) -> Result<TasksReported, Error> {
        let tasks = self.tasks()?;
        let count = report.items();
        let max = tasks.max_items();
        if count > max {
            return Err(Error::Invalid(format!(
                "{count} items in one call; at most {max}"
            )));
        }
        let ReportTasks {
            mut call,
            completions,
            rejections,
            extensions,
            started,
        } = report;
        tasks.few_ids("started", &started)?;
        self.authorize_call(caller, &mut call).await?;
        let (shared, pending) = tasks.live_shared(&call, &started).await?;
        let mut answer = TasksReported {
            pending,
            ..TasksReported::default()
        };
        if count == 0 {
            return Ok(answer);
        }
        let reports = Reports::of(&completions, &rejections, &extensions);
        let worker = &call.worker;
        answer.completions = answers(worker, completions, async |batch| {
            self.complete(caller, batch).await
        })
        .await?;
        answer.rejections = answers(worker, rejections, async |batch| {
            self.reject(caller, batch).await
        })
        .await?;
        answer.extensions = answers(worker, extensions, async |batch| {
            self.extend(caller, batch).await
        })
        .await?;
        Ok(tasks
            .reported_shared(&shared, &reports, &started, answer)
            .await?)
    }

    /// Checks the worker of a call, and refuses a caller that does not reach the queues of the
    /// session, before the call changes anything.
    async fn authorize_call(&self, caller: &Caller, call: &mut SessionCall) -> Result<(), Error> {
        access::as_worker(caller, &mut call.worker)?;
        self.workers.hear(caller, &call.worker, []);
        if access::is_scoped(caller) {
            let queues = self.tasks()?.queues_of_shared(call).await?;
            access::reaches_session(caller, &queues)?;
        }
        Ok(())
    }
}
