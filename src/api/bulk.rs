//! Changes of many tasks: by ids at once, by a filter as a bulk change, which the watchdog runs.

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
        Act, BulkAction, BulkChange, BulkProgress, BulkState, Caller, ChangeTasks, ChosenTasks,
        ECHO, ItemAnswer, ItemStatus, Scope, StoredStatus, TaskCount, TaskFilter, TaskId,
        TasksChanged, shorten,
    },
    store::{AddedBulk, ListedTask, MOST_BULK_CHANGES, TaskSearch},
};

/// How many tasks a count looks at, in all and at a time.
const COUNTED: u64 = 100_000;
const COUNTED_AT_ONCE: u32 = 1000;
/// The most pages that are read for one answer. Most bulk changes may be of queues that the caller
/// does not reach.
const MOST_PAGES: usize = 20;

impl Api {
    /// Sends dead and cancelled tasks again.
    pub async fn retry_tasks(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        self.change_chosen(caller, BulkAction::Retry, request)
            .instrument(span("retry_tasks", caller))
            .await
    }

    /// Cancels unfinished tasks: no worker does them any more.
    pub async fn cancel_chosen(
        &self,
        caller: &Caller,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        self.change_chosen(caller, BulkAction::Cancel, request)
            .instrument(span("cancel_chosen", caller))
            .await
    }

    pub(super) async fn change_chosen(
        &self,
        caller: &Caller,
        change: BulkAction,
        request: Result<ChangeTasks, String>,
    ) -> Result<TasksChanged, Error> {
        // The token may have been revoked while the body was read.
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
        // A new NUM may be too high for the queue. Without a queue, each task is checked by itself.
        if let (Some(live), Some(queue)) = (change.live(), &filter.queue)
            && self.exceeds(&live, queue)?
        {
            return Err(Error::Invalid(TOO_MANY.into()));
        }
        match (dry_run, yes) {
            (true, _) => Ok(TasksChanged::Counted(self.count(caller, filter).await?)),
            (false, true) => Ok(TasksChanged::Started(Box::new(
                self.start_bulk_change(caller, change, filter).await?,
            ))),
            (false, false) => {
                let why = "a filter may mean many tasks: send dry_run = true to count them, or yes = true to go on";
                Err(Error::Invalid(why.into()))
            }
        }
    }

    /// Changes the tasks with these ids. Returns an answer for each, in order.
    async fn change_ids(
        &self,
        caller: &Caller,
        change: &BulkAction,
        ids: Vec<String>,
        dry_run: bool,
    ) -> Result<TasksChanged, Error> {
        // The rest of this function is for retries, and for a dry run of any change.
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
        let changeable: Vec<TaskId> = tasks.iter().filter(may).map(|task| task.id).collect();
        if dry_run {
            let matched = changeable.len() as u64;
            let looked_at = tasks.len() as u64;
            return Ok(TasksChanged::Counted(TaskCount {
                matched,
                looked_at,
                at_least: false,
                as_of_unix_ms: query.now_unix_ms(),
            }));
        }
        let mut answers: HashMap<TaskId, (ItemStatus, &str)> = tasks
            .iter()
            .map(|task| (task.id, refusal(task.status)))
            .collect();
        if !changeable.is_empty() {
            let now = query.now_unix_ms();
            let who = who(caller);
            let retried = query
                .store()
                .retry_with_acts(&changeable, now, who, &change.act())
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

    /// Counts the tasks of a filter. Stops after it has looked at [`COUNTED`] tasks.
    async fn count(&self, caller: &Caller, filter: TaskFilter) -> Result<TaskCount, Error> {
        let query = self.query()?;
        let store = query.store();
        let as_of_unix_ms = match filter.as_of_unix_ms {
            Some(as_of) => as_of,
            None => store.begin_era(query.now_unix_ms()).await?,
        };
        let filter = TaskFilter {
            as_of_unix_ms: Some(as_of_unix_ms),
            ..filter
        };
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
        let mut count = TaskCount {
            as_of_unix_ms,
            ..TaskCount::default()
        };
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

    /// Stores a bulk change for the watchdog to run. It does not change tasks that are inserted
    /// from now on.
    pub(super) async fn start_bulk_change(
        &self,
        caller: &Caller,
        change: BulkAction,
        mut filter: TaskFilter,
    ) -> Result<BulkChange, Error> {
        let now = self.query()?.now_unix_ms();
        filter.until_unix_ms = Some(filter.until_unix_ms.map_or(now, |until| until.min(now)));
        let new = self.new_bulk_change(caller, change, filter)?;
        let store = self.query()?.store();
        let added = store
            .add_bulk_change(&new.bulk, new.most_of_token, &new.act)
            .await?;
        new.started(added)
    }

    /// A bulk change to add. It takes the filter as it is.
    pub(super) fn new_bulk_change(
        &self,
        caller: &Caller,
        change: BulkAction,
        filter: TaskFilter,
    ) -> Result<NewBulkChange, Error> {
        let now = self.query()?.now_unix_ms();
        let bulk = BulkChange {
            id: TaskId::at(now, 0).0,
            change,
            filter,
            who: who(caller).to_owned(),
            scope: caller
                .access
                .token()
                .map_or_else(Scope::default, |token| token.scope.clone()),
            token: caller.access.hash(),
            state: BulkState::Running,
            progress: BulkProgress::default(),
            created_unix_ms: now,
            updated_unix_ms: now,
        };
        let queue = bulk
            .filter
            .queue
            .as_ref()
            .map_or_else(|| of_tree_or_all(&bulk.filter), ToString::to_string);
        let words = bulk.change.of_tasks();
        let act = Act::at_time(
            now,
            &bulk.who,
            &format!("start bulk change: {words}"),
            &format!("{} of {queue}", bulk.id),
        );
        // A restricted token leaves half of the bulk changes to others.
        let most_of_token = if caller.access.restricted().is_some() {
            MOST_BULK_CHANGES / 2
        } else {
            MOST_BULK_CHANGES
        };
        Ok(NewBulkChange {
            says: format!("will {words} of {queue}"),
            bulk,
            most_of_token,
            act,
        })
    }

    /// Returns the bulk changes older than `before`, the latest first, of queues that the caller
    /// reaches.
    pub async fn bulk_changes(
        &self,
        caller: &Caller,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BulkChange>, Error> {
        let mut before = before
            .filter(|id| !id.is_empty())
            .map(bulk_id)
            .transpose()?;
        let limit = bounded(limit, LISTED)? as usize;
        let query = self.query()?;
        let mut bulk_changes = Vec::new();
        for _ in 0..MOST_PAGES {
            let page = query
                .store()
                .bulk_changes(before, MOST_LISTED)
                .instrument(span("bulk", caller))
                .await?;
            before = page.last().map(|bulk| bulk.id);
            // A page leaves out bulk changes that only a later version can read, so a short page
            // may not be the last one.
            let is_last = page.is_empty();
            bulk_changes.extend(
                page.into_iter()
                    .filter(|bulk| reaches_bulk_change(caller, bulk)),
            );
            if is_last || bulk_changes.len() >= limit {
                break;
            }
        }
        bulk_changes.truncate(limit);
        Ok(bulk_changes)
    }

    pub async fn bulk_change(&self, caller: &Caller, id: &str) -> Result<BulkChange, Error> {
        let id = bulk_id(id)?;
        let bulk = self
            .query()?
            .store()
            .bulk_change(id)
            .instrument(span("bulk", caller))
            .await?;
        bulk.filter(|bulk| reaches_bulk_change(caller, bulk))
            .ok_or(Error::NoSuchBulkChange(id))
    }

    /// Stops a bulk change. The tasks that it has changed stay changed. A bulk change that has
    /// ended is not affected.
    pub async fn stop_bulk_change(&self, caller: &Caller, id: &str) -> Result<BulkChange, Error> {
        self.bulk_change(caller, id).await?;
        let id = bulk_id(id)?;
        let query = self.query()?;
        let now = query.now_unix_ms();
        let act = Act::at_time(now, who(caller), "stop bulk change", &id.to_string());
        let stop = query
            .store()
            .stop_bulk_change(id, now, None, &act)
            .instrument(span("stop_bulk_change", caller));
        stop.await?.ok_or(Error::NoSuchBulkChange(id))
    }
}

/// A bulk change that is to be added.
pub(super) struct NewBulkChange {
    pub(super) bulk: BulkChange,
    /// How many of its token may run.
    pub(super) most_of_token: u32,
    pub(super) act: Act,
    says: String,
}

impl NewBulkChange {
    /// The bulk change, if the store has added it.
    pub(super) fn started(self, added: AddedBulk) -> Result<BulkChange, Error> {
        match added {
            AddedBulk::Yes => {}
            AddedBulk::NoRoom => return Err(Error::ManyBulkChanges),
            AddedBulk::NoRoomForToken => return Err(Error::ManyBulkChangesOfToken),
        }
        let Self { bulk, says, .. } = self;
        tracing::info!(bulk = %bulk.id, who = %bulk.who, "{}: the bulk change {} {says}", bulk.who, bulk.id);
        Ok(bulk)
    }
}

/// What a bulk change without a queue is about.
fn of_tree_or_all(filter: &TaskFilter) -> String {
    match filter.tree {
        Some(tree) => format!("tree {tree}"),
        None => "all queues".to_owned(),
    }
}

/// A token for some queues sees the bulk changes of a whole tree that it has started itself.
fn reaches_bulk_change(caller: &Caller, bulk: &BulkChange) -> bool {
    let is_own =
        bulk.filter.tree.is_some() && bulk.token.is_some() && bulk.token == caller.access.hash();
    is_own || reaches_all_of(caller, bulk.filter.queue.as_ref()).is_ok()
}

fn bulk_id(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|_| {
        let text = shorten(text, ECHO);
        Error::Invalid(format!(
            "{text:?} is not the id of a bulk change; ids are UUIDs, as a list of bulk changes shows them"
        ))
    })
}

/// Why a task was not sent again.
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
        // Somebody else has sent it again, or removed it.
        StoredStatus::Dead | StoredStatus::Cancelled => {
            (ItemStatus::Invalid, "the task has changed meanwhile")
        }
    }
}
