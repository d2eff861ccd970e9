//! Lists of tasks.
//!
//! SQL gives the tasks, and Redis the exact status of the unfinished ones, with one call per shard
//! that occurs on a page.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    pin::pin,
};

use futures::{Stream, StreamExt as _, TryStreamExt as _};
use tracing::Instrument as _;

use super::{
    access::{is_scoped, may_choose},
    error::Error,
    handle::{Api, span},
    query::{LISTED, MOST_LISTED, bounded},
    reader::{Reader, view},
};
use crate::{
    model::{
        Caller, KeyHash, QueueName, Scope, ShardId, StoredStatus, TaskCursor, TaskId, TaskList,
        TaskPages,
    },
    queue::{self, Inspected},
    store::{ListedTask, TaskSearch},
};

/// The most tasks that a page looks at. Then it ends, however few it has found.
const LOOK_AT: u32 = 10_000;
/// How many tasks are read at a time if only Redis knows which of them match.
const ASKED_AT_ONCE: u32 = 500;
/// The most queues in which a key is looked up. If the caller reaches more, these are open ones.
const QUEUES_OF_KEY: usize = 10_000;
/// How many shards are asked at the same time.
const SHARDS_AT_ONCE: usize = 64;

type Records = Vec<(TaskId, Inspected)>;

/// The records of the shards that answer.
#[derive(Default)]
pub(super) struct KnownRecords {
    pub(super) records: HashMap<TaskId, Inspected>,
    pub(super) shards: HashSet<ShardId>,
    /// Why shards are missing.
    pub(super) failed: Option<queue::Error>,
}

impl Api {
    /// Returns a page of tasks without payloads, the newest first.
    pub async fn list_tasks(
        &self,
        caller: &Caller,
        pages: Result<TaskPages, String>,
    ) -> Result<TaskList, Error> {
        let mut pages = pages.map_err(Error::Invalid)?;
        pages.filter.check().map_err(Error::Invalid)?;
        pages.limit = bounded(pages.limit, LISTED)?;
        if pages.filter.is_key_alone() {
            return self
                .query()?
                .with_key(caller, pages)
                .instrument(span("list_tasks", caller))
                .await;
        }
        may_choose(caller, &pages.filter)?;
        self.query()?
            .list(pages, is_scoped(caller))
            .instrument(span("list_tasks", caller))
            .await
    }
}

impl Reader {
    async fn list(&self, pages: TaskPages, stays_in_queue: bool) -> Result<TaskList, Error> {
        let TaskPages {
            filter,
            limit,
            after,
        } = pages;
        let asks_redis = filter.asks_redis();
        let limit = limit as usize;
        let mut list = TaskList::default();
        let mut search = TaskSearch {
            filter,
            limit: 0,
            look_at: 0,
            after,
            stays_in_queue,
        };
        loop {
            let missing = u32::try_from(limit - list.tasks.len()).unwrap_or(MOST_LISTED);
            let left = LOOK_AT.saturating_sub(u32::try_from(list.looked_at).unwrap_or(LOOK_AT));
            search.limit = if asks_redis {
                ASKED_AT_ONCE.min(left)
            } else {
                missing
            };
            search.look_at = left;
            let page = self.store().search(&search).await?;
            let records = self.records(&page.tasks).await?;
            list.looked_at += u64::from(page.looked_at);
            list.next = page.next;
            let now = self.now_unix_ms();
            let last = page.tasks.last().map(|task| task.id);
            for task in page.tasks {
                let id = task.id;
                let view = view(task, records.get(&id).copied(), now);
                // Only its record says whether an unfinished task is queued, assigned or delayed.
                if asks_redis && !search.filter.statuses.contains(&view.status) {
                    continue;
                }
                list.tasks.push(view);
                if list.tasks.len() == limit {
                    // The tasks after it are for the next page.
                    if last != Some(id) {
                        list.next = Some(TaskCursor(id));
                    }
                    return Ok(list);
                }
            }
            if list.next.is_none() || list.looked_at >= u64::from(LOOK_AT) {
                return Ok(list);
            }
            search.after = list.next;
        }
    }

    /// The tasks with a key, in all queues that the caller reaches.
    async fn with_key(&self, caller: &Caller, pages: TaskPages) -> Result<TaskList, Error> {
        let TaskPages {
            filter,
            limit,
            after,
        } = pages;
        let key = filter.key.clone().unwrap_or_default();
        let mut queues = self.queues_in_scope(caller).await?;
        let partial = queues.len() > QUEUES_OF_KEY;
        if partial {
            queues = self.open_queues(caller);
        }
        let hashes: Vec<KeyHash> = queues
            .iter()
            .take(QUEUES_OF_KEY)
            .map(|queue| KeyHash::new(queue, &key))
            .collect();
        let (from, mut below) = filter.ids();
        if let Some(TaskCursor(after)) = after {
            below = below.min(after);
        }
        let owners = self.store().key_owners(&hashes).await?.into_iter();
        let mut ids: Vec<TaskId> = owners
            .map(|(_, id, _)| id)
            .filter(|id| (from..below).contains(id))
            .collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut list = TaskList {
            partial,
            ..TaskList::default()
        };
        if ids.len() > limit as usize {
            ids.truncate(limit as usize);
            list.next = ids.last().copied().map(TaskCursor);
        }
        list.looked_at = ids.len() as u64;
        // The key of a removed task may have an owner still.
        let mut tasks = self.store().listed(&ids).await?;
        tasks.sort_unstable_by_key(|task| std::cmp::Reverse(task.id));
        let records = self.records(&tasks).await?;
        let now = self.now_unix_ms();
        for task in tasks {
            let record = records.get(&task.id).copied();
            list.tasks.push(view(task, record, now));
        }
        Ok(list)
    }

    /// The queues that the caller reaches, whether or not they have tasks. If there are more than
    /// [`QUEUES_OF_KEY`], some of them.
    async fn queues_in_scope(&self, caller: &Caller) -> Result<BTreeSet<QueueName>, Error> {
        let everything = Scope::default();
        let scope = caller
            .access
            .token()
            .map_or(&everything, |token| &token.scope);
        let most = u32::try_from(QUEUES_OF_KEY + 1).unwrap_or(u32::MAX);
        let mut queues = BTreeSet::new();
        for part in scope.parts() {
            match part.strip_suffix('*') {
                Some(beginning) => {
                    queues.extend(self.store().queue_names(beginning, most).await?);
                }
                None => queues.extend(QueueName::new(part)),
            }
            if queues.len() > QUEUES_OF_KEY {
                break;
            }
        }
        Ok(queues)
    }

    /// The queues that the caller reaches and that have unfinished tasks or an open shard.
    fn open_queues(&self, caller: &Caller) -> BTreeSet<QueueName> {
        let shards = self.queue.shards().into_iter().map(|shard| shard.queue);
        let unfinished = self.occupancy.unfinished().into_keys();
        shards
            .chain(unfinished)
            .filter(|queue| caller.access.reaches(queue.as_str()))
            .collect()
    }

    /// Returns the records of the unfinished tasks, as far as Redis has them.
    async fn records(&self, tasks: &[ListedTask]) -> Result<HashMap<TaskId, Inspected>, Error> {
        let asked: Vec<Records> = self
            .ask(tasks)
            .map(|(_, records)| records)
            .try_collect()
            .await?;
        Ok(asked.into_iter().flatten().collect())
    }

    /// The records of the unfinished tasks of the shards that answer.
    pub(super) async fn known_records(&self, tasks: &[ListedTask]) -> KnownRecords {
        let mut known = KnownRecords::default();
        let mut asked = pin!(self.ask(tasks));
        while let Some((shard, records)) = asked.next().await {
            match records {
                Ok(records) => {
                    known.records.extend(records);
                    known.shards.insert(shard);
                }
                Err(error) => {
                    // If Redis is away, the other shards do not answer, either.
                    let is_of_shard = error.is_of_shard();
                    known.failed = Some(error);
                    if !is_of_shard {
                        break;
                    }
                }
            }
        }
        known
    }

    /// Reads the records of the unfinished tasks, shard by shard.
    fn ask(&self, tasks: &[ListedTask]) -> impl Stream<Item = (ShardId, queue::Result<Records>)> {
        let mut by_shard: BTreeMap<ShardId, Vec<(TaskId, u32)>> = BTreeMap::new();
        for task in tasks
            .iter()
            .filter(|task| task.status == StoredStatus::Unfinished)
        {
            by_shard
                .entry(task.shard.clone())
                .or_default()
                .push((task.id, task.epoch));
        }
        let of_shard = move |(shard, tasks): (ShardId, Vec<(TaskId, u32)>)| async move {
            let records = self.records_of(&shard, tasks).await;
            (shard, records)
        };
        futures::stream::iter(by_shard)
            .map(of_shard)
            .buffer_unordered(SHARDS_AT_ONCE)
    }

    /// Reads the records of tasks of one shard. Each task comes with its epoch in SQL.
    async fn records_of(
        &self,
        shard: &ShardId,
        tasks: Vec<(TaskId, u32)>,
    ) -> queue::Result<Records> {
        let ids: Vec<TaskId> = tasks.iter().map(|(id, _)| *id).collect();
        let records = match self.queue.inspect(shard, &ids).await {
            Ok((_, records)) => records,
            // Nothing has been enqueued there yet, or the watchdog is rebuilding the shard.
            Err(queue::Error::NoGeneration) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let of_task = |((id, epoch), record): ((TaskId, u32), Option<Inspected>)| {
            record
                // Not the end of the task from before it was sent again.
                .filter(|record| !record.is_past(epoch))
                .map(|record| (id, record))
        };
        Ok(tasks.into_iter().zip(records).filter_map(of_task).collect())
    }
}
