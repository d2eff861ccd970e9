//! Changes of many tasks: by their ids at once, and by a filter as a job of the watchdog.

use std::collections::HashMap;

use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    access::{is_scoped, may_choose, reaches_all_of, who},
    changes::TOO_MANY,
    error::Error,
    handle::{Api, span},
    items::Named,
    query::{LISTED, MOST_LISTED, bounded},
};
use crate::{
    model::{
        Act, Caller, ChangeTasks, ChosenTasks, ECHO, ItemAnswer, ItemStatus, Job, JobChange,
        JobProgress, JobState, Scope, StoredStatus, TaskCount, TaskFilter, TaskId, TasksChanged,
        shorten,
    },
    store::{AddedJob, ListedTask, MOST_JOBS, TaskSearch},
};

/// The tasks that a count looks at, in all and at once.
const COUNTED: u64 = 100_000;
const COUNTED_AT_ONCE: u32 = 1000;
/// The pages that an answer reads, at most. A caller may not reach the queues of most jobs.
const MOST_PAGES: usize = 20;

impl Api {
    /// Sends dead and cancelled tasks again.
    pub async fn retry_tasks(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        self.change_chosen(caller, JobChange::Retry, request)
            .instrument(span("retry_tasks", caller))
            .await
    }

    /// Cancels unfinished tasks: no worker does them any more.
    pub async fn cancel_chosen(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        self.change_chosen(caller, JobChange::Cancel, request)
            .instrument(span("cancel_chosen", caller))
            .await
    }

    pub(super) async fn change_chosen(
        &self,
        caller: &Caller,
        change: JobChange,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        // The body may have taken long.
        self.authentication.still_valid(caller)?;
        let ChangeTasks {
            chosen,
            dry_run,
            yes,
        } = request.map_err(Error::Invalid)?;
        let filter = match chosen {
            ChosenTasks::Ids(ids) => return self.change_ids(caller, &change, ids, dry_run).await,
            ChosenTasks::Filter(filter) => change.filter(*filter).map_err(Error::Invalid)?,
        };
        may_choose(caller, &filter)?;
        if let (Some(live), Some(queue)) = (change.live(), &filter.queue)
            && self.exceeds(&live, queue)?
        {
            return Err(Error::Invalid(TOO_MANY.into()));
        }
        match (dry_run, yes) {
            (true, _) => Ok(TasksChanged::Counted(self.count(caller, filter).await?)),
            (false, true) => Ok(TasksChanged::Started(Box::new(
                self.start_job(caller, change, filter).await?,
            ))),
            (false, false) => {
                let why = "a filter may mean many tasks: send dry_run = true to count them, or yes = true to go on";
                Err(Error::Invalid(why.into()))
            }
        }
    }

    /// Changes the tasks of these ids. Each has an answer, in order.
    async fn change_ids(
        &self,
        caller: &Caller,
        change: &JobChange,
        ids: Vec<String>,
        dry_run: bool,
    ) -> Result<TasksChanged, Error> {
        if let Some(live) = change.live().filter(|_| !dry_run) {
            return Ok(TasksChanged::Items(
                self.change_tasks(caller, ids, &live).await?,
            ));
        }
        let query = self.query()?;
        let count = ids.len();
        let named = Named::new(ids)?;
        let mut tasks = query.store().listed(&named.tasks()).await?;
        // Only a caller that reaches the queue may know that the task is there.
        tasks.retain(|task| caller.access.reaches(task.shard.queue.as_str()));
        let may_change = change.may_change();
        let may = |task: &&ListedTask| {
            may_change
                .iter()
                .any(|status| status.stored() == task.status)
        };
        let ended: Vec<TaskId> = tasks.iter().filter(may).map(|task| task.id).collect();
        if dry_run {
            let matched = ended.len() as u64;
            let looked_at = tasks.len() as u64;
            return Ok(TasksChanged::Counted(TaskCount {
                matched,
                looked_at,
                at_least: false,
            }));
        }
        let mut answers: HashMap<TaskId, (ItemStatus, &str)> = tasks
            .iter()
            .map(|task| (task.id, refusal(task.status)))
            .collect();
        if !ended.is_empty() {
            let now = query.now_unix_ms();
            let who = who(caller);
            let retried = query
                .store()
                .retry_with_acts(&ended, now, who, &change.act())
                .await?;
            tracing::info!(%who, "{who}: {}, {} of {count} ids", change.of_tasks(), retried.len());
            answers.extend(
                retried
                    .into_iter()
                    .map(|retried| (retried.id, (ItemStatus::Ok, ""))),
            );
        }
        let answer = |id: String, task: TaskId| {
            let (status, error) = answers
                .get(&task)
                .copied()
                .unwrap_or((ItemStatus::UnknownTask, ""));
            ItemAnswer {
                error: error.to_owned(),
                ..ItemAnswer::new(id, status)
            }
        };
        Ok(TasksChanged::Items(named.answer(answer)))
    }

    /// Counts the tasks of a filter, up to a bound.
    async fn count(&self, caller: &Caller, filter: TaskFilter) -> Result<TaskCount, Error> {
        let store = self.query()?.store();
        let limit = COUNTED_AT_ONCE;
        let look_at = COUNTED_AT_ONCE;
        let stays_in_queue = is_scoped(caller);
        let mut search = TaskSearch {
            filter,
            limit,
            look_at,
            after: None,
            stays_in_queue,
        };
        let mut count = TaskCount::default();
        loop {
            let page = store.search(&search).await?;
            count.matched += page.tasks.len() as u64;
            count.looked_at += u64::from(page.looked_at);
            count.at_least = page.next.is_some();
            search.after = page.next;
            if !count.at_least || count.looked_at >= COUNTED {
                return Ok(count);
            }
        }
    }

    /// Stores a job, which the watchdog runs. It changes no task that is inserted from now on.
    async fn start_job(
        &self,
        caller: &Caller,
        change: JobChange,
        mut filter: TaskFilter,
    ) -> Result<Job, Error> {
        let query = self.query()?;
        let now = query.now_unix_ms();
        filter.until_unix_ms = Some(filter.until_unix_ms.map_or(now, |until| until.min(now)));
        let job = Job {
            id: TaskId::at(now, 0).0,
            change,
            filter,
            who: who(caller).to_owned(),
            scope: caller
                .access
                .token()
                .map_or_else(Scope::default, |token| token.scope.clone()),
            token: caller.access.hash(),
            state: JobState::Running,
            progress: JobProgress::default(),
            created_unix_ms: now,
            updated_unix_ms: now,
        };
        let queue = job
            .filter
            .queue
            .as_ref()
            .map_or_else(|| "all queues".to_owned(), ToString::to_string);
        let words = job.change.of_tasks();
        let act = Act::at_time(
            now,
            &job.who,
            &format!("start job: {words}"),
            &format!("{} of {queue}", job.id),
        );
        // A restricted token leaves half of the jobs to others.
        let most_of_token = if caller.access.restricted().is_some() {
            MOST_JOBS / 2
        } else {
            MOST_JOBS
        };
        match query.store().add_job(&job, most_of_token, &act).await? {
            AddedJob::Yes => {}
            AddedJob::NoRoom => return Err(Error::ManyJobs),
            AddedJob::NoRoomForToken => return Err(Error::ManyJobsOfToken),
        }
        tracing::info!(job = %job.id, who = %job.who, "{}: the job {} will {words} of {queue}", job.who, job.id);
        Ok(job)
    }

    /// Jobs before the job `before`, the latest first, of queues that the caller reaches.
    pub async fn jobs(
        &self,
        caller: &Caller,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<Job>, Error> {
        let mut before = before.filter(|id| !id.is_empty()).map(job_id).transpose()?;
        let limit = bounded(limit, LISTED)? as usize;
        let query = self.query()?;
        let mut jobs = Vec::new();
        for _ in 0..MOST_PAGES {
            let page = query
                .store()
                .jobs(before, MOST_LISTED)
                .instrument(span("jobs", caller))
                .await?;
            before = page.last().map(|job| job.id);
            // A page leaves out the jobs of a later taskd, so a short one may not be the last.
            let is_last = page.is_empty();
            jobs.extend(page.into_iter().filter(|job| reaches_job(caller, job)));
            if is_last || jobs.len() >= limit {
                break;
            }
        }
        jobs.truncate(limit);
        Ok(jobs)
    }

    pub async fn job(&self, caller: &Caller, id: &str) -> Result<Job, Error> {
        let id = job_id(id)?;
        let job = self
            .query()?
            .store()
            .job(id)
            .instrument(span("job", caller))
            .await?;
        job.filter(|job| reaches_job(caller, job))
            .ok_or(Error::NoSuchJob(id))
    }

    /// Stops a job. The tasks that it has changed stay changed. A job that has ended stays as it
    /// is.
    pub async fn stop_job(&self, caller: &Caller, id: &str) -> Result<Job, Error> {
        self.job(caller, id).await?;
        let id = job_id(id)?;
        let query = self.query()?;
        let now = query.now_unix_ms();
        let act = Act::at_time(now, who(caller), "stop job", &id.to_string());
        let stop = query
            .store()
            .stop_job(id, now, None, &act)
            .instrument(span("stop_job", caller));
        stop.await?.ok_or(Error::NoSuchJob(id))
    }
}

fn reaches_job(caller: &Caller, job: &Job) -> bool {
    reaches_all_of(caller, job.filter.queue.as_ref()).is_ok()
}

fn job_id(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|_| {
        let text = shorten(text, ECHO);
        Error::Invalid(format!(
            "{text:?} is not the id of a job; ids are UUIDs, as a list of jobs shows them"
        ))
    })
}

/// The answer about a task that was not sent again.
fn refusal(status: StoredStatus) -> (ItemStatus, &'static str) {
    match status {
        StoredStatus::Unfinished => (
            ItemStatus::Invalid,
            "the task is unfinished: it goes on by itself",
        ),
        StoredStatus::Completed => (
            ItemStatus::AlreadyCompleted,
            "its workers have completed it",
        ),
        // Somebody has sent it again meanwhile, or removed it.
        StoredStatus::Dead | StoredStatus::Cancelled => {
            (ItemStatus::Invalid, "the task has changed meanwhile")
        }
    }
}
