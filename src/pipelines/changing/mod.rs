//! Changes of live work: an operator cancels tasks, gives them another priority or NUM, or offers
//! them again.
//!
//! First SQL stores the pending change (*wish* in code). Then the queue decides in one script,
//! whatever else happens to the task. Then SQL takes over the decision and deletes the pending
//! change. A lost shard is rebuilt from SQL, so the rebuild knows the pending changes.
//!
//! Crash windows:
//!
//! - Killed after the pending change was stored: the watchdog carries it out. The caller gets no
//!   answer.
//! - Killed after the script: the same. The script repeats what it has decided.
//! - The queue has decided, and the pending change is gone (the database was set back): the final
//!   record shows the decision, and the watchdog tells SQL ([`Changing::adopt`]).
//! - A requeue has no pending change, because a rebuilt shard has no leases. Only the end of a
//!   reservation is stored, before the script. Of two ends the earlier one is stored. When it has
//!   come, the queue is asked, and if its reservation ends later, the row moves to that time.
//! - Two changes of one task at once: the values of the earlier may reach the queue after those of
//!   the later. So each compares what it has sent with what SQL has afterwards. If the earlier one
//!   is killed in between, the row of the later is still there for the watchdog.
//! - Redis loses the shard between the script and SQL: SQL refuses a decision of an earlier
//!   generation, and the pending change stays.

mod deadlines;
mod error;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};

pub use self::error::Error;
use crate::{
    bus::Bus,
    config,
    dedup::Filter,
    model::{
        Change, ChangeKind, Changed, ChangingTask, Requeue, ShardId, StoredStatus, TaskAct, TaskId,
        TaskStatus, millis,
    },
    queue::{self, Arbitrated, ArbitratedTasks, Changer, NEVER, RecordStatus},
    runtime::Clock,
    store::{Decided, EndedChange, KeptChange, KeptChanges, KeptPages, Store, Turn, Wanted},
    telemetry::metrics,
};

/// The most tasks of one call.
pub const MOST: usize = 1000;
/// The most tasks whose bodies one script rewrites. A body has up to 1 MiB, unless a setting says
/// otherwise.
const MOST_BODIES: usize = 16;
/// The age of a pending change at which the process that stored it is presumed dead. It does no
/// harm if two processes carry it out.
pub const STAYED_MS: i64 = 2000;
/// The most shards that are called concurrently.
const AT_ONCE: usize = 64;
/// How many times a call asks a shard that is just being opened, and the wait before each time.
const OPENING_LOOKS: u32 = 25;
const OPENING: Duration = Duration::from_millis(20);
/// How many times to carry out a pending change, if its shard gets another generation each time.
const ROUNDS: usize = 3;

/// Changes live work. Cheap to clone.
#[derive(Clone)]
pub struct Changing {
    store: Arc<dyn Store>,
    queue: Changer,
    filter: Filter,
    bus: Arc<dyn Bus>,
    clock: Clock,
    /// For how long after a change a record that was published before it may still arrive.
    arrives_within_ms: i64,
}

/// The outcomes of pending changes, and the first error of those that stay pending.
#[derive(Debug, Default)]
pub struct CarriedOut {
    pub changed: HashMap<TaskId, Changed>,
    /// The number of pending changes that are over. The others stay.
    pub over: usize,
    /// The changes that stay pending because their tasks have not arrived in the queue.
    pub absent: Vec<(TaskId, Turn)>,
    pub error: Option<Error>,
}

impl Changing {
    pub fn new(
        store: Arc<dyn Store>,
        queue: Changer,
        filter: Filter,
        bus: Arc<dyn Bus>,
        clock: Clock,
        settings: &config::Watchdog,
    ) -> Self {
        let arrives_within = settings.grace + settings.republish_after;
        let arrives_within_ms = millis(arrives_within);
        Self {
            store,
            queue,
            filter,
            bus,
            clock,
            arrives_within_ms,
        }
    }

    /// Changes at most [`MOST`] tasks, and records the acts. Returns one outcome per id, in order.
    ///
    /// An error means that SQL has stored no pending change. If one is stored but could not be
    /// carried out now, its outcome is [`Changed::Later`].
    pub async fn change(
        &self,
        ids: &[TaskId],
        change: &Change,
        acts: &[TaskAct],
    ) -> Result<Vec<Changed>, Error> {
        self.change_as_of(ids, change, acts, None).await
    }

    /// The same. With a time that a count began with, a task that has changed since is
    /// [`Changed::Unknown`].
    pub async fn change_as_of(
        &self,
        ids: &[TaskId],
        change: &Change,
        acts: &[TaskAct],
        as_of_unix_ms: Option<i64>,
    ) -> Result<Vec<Changed>, Error> {
        let now = self.clock.now_unix_ms();
        let wanted = self
            .store
            .want_as_of(ids, change, now, acts, as_of_unix_ms)
            .await?;
        let kept = wanted.iter().filter_map(|wanted| match wanted {
            Wanted::Kept(kept) => Some((kept.task.id, kept.clone())),
            Wanted::Final(_) | Wanted::Reopened | Wanted::Unknown => None,
        });
        // An id may be named twice.
        let kept: HashMap<TaskId, KeptChange> = kept.collect();
        let CarriedOut { changed, error, .. } =
            self.carry_out(kept.into_values().collect(), change).await;
        if let Some(error) = error {
            tracing::warn!("the watchdog carries out changes of tasks later: {error}");
        }
        let answer = |(id, wanted): (&TaskId, Wanted)| match wanted {
            Wanted::Unknown => Changed::Unknown,
            Wanted::Final(status) => final_before(status, change),
            Wanted::Reopened => Changed::Done,
            Wanted::Kept(_) => changed.get(id).copied().unwrap_or(Changed::Later),
        };
        Ok(ids.iter().zip(wanted).map(answer).collect())
    }

    /// Reads pending changes that were left over, the earliest first.
    pub async fn kept(&self, pages: &KeptPages) -> Result<KeptChanges, Error> {
        Ok(self.store.kept_changes(pages).await?)
    }

    /// Carries out pending changes of one kind. Those without an outcome stay in SQL.
    pub async fn carry_out(&self, wishes: Vec<KeptChange>, change: &Change) -> CarriedOut {
        let mut out = CarriedOut::default();
        let mut rest = wishes;
        for _ in 0..ROUNDS {
            if rest.is_empty() {
                break;
            }
            rest = self.round(rest, change, &mut out).await;
        }
        out
    }

    /// Asks each shard once. Returns the pending changes whose shard has another generation since.
    async fn round(
        &self,
        wishes: Vec<KeptChange>,
        change: &Change,
        out: &mut CarriedOut,
    ) -> Vec<KeptChange> {
        let mut by_shard: BTreeMap<ShardId, Vec<KeptChange>> = BTreeMap::new();
        for wish in wishes {
            by_shard
                .entry(wish.task.shard.clone())
                .or_default()
                .push(wish);
        }
        let calls = by_shard.into_iter().flat_map(|(shard, wishes)| {
            let parts: Vec<Vec<KeptChange>> = wishes
                .chunks(at_once(change))
                .map(<[KeptChange]>::to_vec)
                .collect();
            parts.into_iter().map(move |wishes| (shard.clone(), wishes))
        });
        let calls = calls.map(|(shard, wishes)| async move {
            let decided = self.decide(&shard, &wishes, change).await;
            (wishes, decided)
        });
        let decided: Vec<_> = stream::iter(calls)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut asked = Vec::new();
        let mut ends = Vec::new();
        for (wishes, decided) in decided {
            match decided {
                Ok(ArbitratedTasks {
                    generation,
                    answers,
                }) => {
                    for (wish, answer) in wishes.into_iter().zip(answers) {
                        ends.push(self.end_of(&wish, answer, generation, change));
                        asked.push((wish, answer));
                    }
                }
                Err(error) => out.fail(error),
            }
        }
        let ended = match self.end(&ends).await {
            Ok(ended) => ended,
            Err(error) => {
                out.fail(error);
                return Vec::new();
            }
        };
        let mut again = Vec::new();
        for (((wish, answer), status), end) in asked.into_iter().zip(ended).zip(ends) {
            let Some(changed) = outcome(&wish, answer, status, change) else {
                again.push(wish);
                continue;
            };
            self.announce_end(&wish.task.shard, wish.task.id, status);
            let is_over = end.turn.is_some();
            out.over += usize::from(is_over);
            if wish.kind == ChangeKind::Update && answer == Arbitrated::Absent && !is_over {
                out.absent.push((wish.task.id, wish.turn));
            }
            // A change that stays pending is carried out again, and counted when it ends. A
            // reservation is counted at once, because it ends much later.
            if is_over
                || wish.kind == ChangeKind::Reservation && *change != Change::Requeue(Requeue::Free)
            {
                metrics::task_changed(wish.kind.as_str(), changed.as_str());
            }
            out.changed.insert(wish.task.id, changed);
        }
        again
    }

    async fn decide(
        &self,
        shard: &ShardId,
        wishes: &[KeptChange],
        change: &Change,
    ) -> Result<ArbitratedTasks, Error> {
        let tasks: Vec<&ChangingTask> = wishes.iter().map(|wish| &wish.task).collect();
        let answer = match change {
            Change::Cancel => {
                return self
                    .when_open(shard, || self.queue.cancel(shard, &tasks))
                    .await;
            }
            Change::Update(_) => self.queue.update(shard, &tasks).await,
            Change::Requeue(requeue) => self.queue.requeue(shard, &tasks, requeue).await,
        };
        match answer {
            // Redis has lost the shard. It gets its tasks from SQL, without leases.
            Err(queue::Error::NoGeneration) => Ok(ArbitratedTasks {
                generation: 0,
                answers: vec![Arbitrated::Absent; tasks.len()],
            }),
            other => Ok(other?),
        }
    }

    /// Asks a shard, after opening it if it is new or closed: the script stores a final record
    /// there even if the task's record on the bus comes only later.
    async fn when_open<Asked>(
        &self,
        shard: &ShardId,
        ask: impl Fn() -> Asked,
    ) -> Result<ArbitratedTasks, Error>
    where
        Asked: Future<Output = queue::Result<ArbitratedTasks>>,
    {
        match ask().await {
            Err(queue::Error::NoGeneration) => {}
            other => return Ok(other?),
        }
        let opening = self.store.open_shards(std::slice::from_ref(shard)).await?;
        let Some(opening) = opening.first().filter(|opening| opening.is_new) else {
            return wait_until_open(ask).await;
        };
        self.queue
            .open_shards(
                &[(shard.clone(), opening.generation)],
                self.bus.generation(),
            )
            .await?;
        self.queue.add_shard(shard);
        Ok(ask().await?)
    }

    /// Returns how a pending change ends, given the queue's answer. Without a turn it stays
    /// pending.
    fn end_of(
        &self,
        wish: &KeptChange,
        answer: Arbitrated,
        generation: u64,
        change: &Change,
    ) -> EndedChange {
        let is_end = *change == Change::Requeue(Requeue::Free);
        let task = &wish.task;
        let now = self.clock.now_unix_ms();
        let mut turn = Some(wish.turn);
        let mut end = Decided::Over;
        let updated = Decided::Updated {
            replicas: task.replicas,
            priority: task.priority,
        };
        if wish.kind == ChangeKind::Update && wish.is_second {
            // The caller of the earlier change may send its values to the queue after this one, and
            // be killed before SQL compares them. So this change stays for the watchdog.
            turn = None;
        }
        match (wish.kind, answer) {
            (ChangeKind::Cancel, Arbitrated::Done) => {
                end = Decided::Cancelled {
                    epoch: task.epoch,
                    generation,
                }
            }
            (ChangeKind::Update, Arbitrated::Completed { credited })
                if credited < task.replicas =>
            {
                end = Decided::CompletedBefore {
                    epoch: task.epoch,
                    credited,
                };
            }
            (ChangeKind::Update, Arbitrated::Done | Arbitrated::Completed { .. }) => end = updated,
            (ChangeKind::Update, Arbitrated::Absent) => {
                // With a lower NUM, the credits in SQL may be enough: then no queue will ever
                // report the end.
                end = updated;
                // A record that was published before the change may still arrive. Of older records
                // the fanout asks SQL.
                if (0..self.arrives_within_ms).contains(&(now - wish.at_unix_ms)) {
                    turn = None;
                }
            }
            // SQL keeps the end of a reservation until the queue has ended it.
            (ChangeKind::Reservation, Arbitrated::Done) if !is_end => turn = None,
            // Nothing was changed, and an earlier reservation may stand.
            (ChangeKind::Reservation, Arbitrated::CompletedByWorker) if !is_end => turn = None,
            // The process that stored this row may be about to reserve the task.
            (ChangeKind::Reservation, _)
                if is_end && (0..STAYED_MS).contains(&(now - wish.at_unix_ms)) =>
            {
                turn = None
            }
            // The row is only a reminder: the queue knows whether there is a reservation, and its
            // end.
            (ChangeKind::Reservation, Arbitrated::Reserved { until_unix_ms })
                if until_unix_ms < NEVER =>
            {
                end = Decided::ReservedUntil(until_unix_ms);
            }
            _ => {}
        }
        EndedChange {
            id: task.id,
            turn,
            end,
        }
    }

    /// Stores decisions in SQL. Returns the status of each task.
    async fn end(&self, ends: &[EndedChange]) -> Result<Vec<Option<StoredStatus>>, Error> {
        if ends.is_empty() {
            return Ok(Vec::new());
        }
        let ended = self
            .store
            .end_changes(ends, self.clock.now_unix_ms())
            .await?;
        let keys: Vec<_> = ended.iter().filter_map(|end| end.key.clone()).collect();
        if let Err(error) = self.filter.forget(&keys).await {
            tracing::debug!(
                "could not take {} keys out of the filter: {error}",
                keys.len()
            );
        }
        Ok(ended.into_iter().map(|end| end.status).collect())
    }

    /// Notifies those that watch a task of its end.
    fn announce_end(&self, shard: &ShardId, id: TaskId, status: Option<StoredStatus>) {
        let announcer = self.queue.announcer();
        let end = status
            .and_then(TaskStatus::of_end)
            .map(|end| (id, Some(end)));
        announcer.announce(&shard.queue, announcer.now_unix_ms(), end.into_iter());
    }

    /// Tells SQL of tasks that, by their records, were cancelled in the queue, but that SQL does
    /// not show as final. Returns those that were cancelled.
    ///
    /// Otherwise the watchdog would consider their reports lost, and workers would do them again.
    pub async fn adopt(
        &self,
        shard: &ShardId,
        ids: &HashSet<TaskId>,
    ) -> Result<HashSet<TaskId>, Error> {
        let ids: Vec<TaskId> = ids.iter().copied().collect();
        // Read the generation first, so that a record of a later one is not taken for one of this.
        let generation = self.queue.generation(shard).await?;
        let (_, records) = self.queue.inspect(shard, &ids).await?;
        let records = ids
            .into_iter()
            .zip(records)
            .filter_map(|(id, record)| Some((id, record?)));
        let cancelled = records.filter(|(_, record)| record.status == RecordStatus::Cancelled);
        let end = |(id, record): (TaskId, queue::Inspected)| {
            let end = Decided::Cancelled {
                epoch: record.epoch,
                generation,
            };
            EndedChange {
                id,
                turn: None,
                end,
            }
        };
        let ends: Vec<EndedChange> = cancelled.map(end).collect();
        let ended = self.end(&ends).await?;
        ends.iter()
            .zip(&ended)
            .for_each(|(end, status)| self.announce_end(shard, end.id, *status));
        let cancelled = ends
            .iter()
            .zip(ended)
            .filter(|(_, status)| *status == Some(StoredStatus::Cancelled));
        Ok(cancelled.map(|(end, _)| end.id).collect())
    }
}

impl CarriedOut {
    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }
}

/// Asks a shard that is open in SQL: the fanout is about to open it in Redis, or Redis lost it.
async fn wait_until_open<Asked>(ask: impl Fn() -> Asked) -> Result<ArbitratedTasks, Error>
where
    Asked: Future<Output = queue::Result<ArbitratedTasks>>,
{
    for _ in 0..OPENING_LOOKS {
        tokio::time::sleep(OPENING).await;
        match ask().await {
            Err(queue::Error::NoGeneration) => {}
            other => return Ok(other?),
        }
    }
    Err(queue::Error::NoGeneration.into())
}

/// The most tasks in one call of the script.
fn at_once(change: &Change) -> usize {
    match change {
        Change::Update(_) => MOST_BODIES,
        Change::Cancel | Change::Requeue(_) => MOST,
    }
}

/// Returns the outcome of a pending change, given the queue's answer and the status in SQL
/// afterwards; `None` if the decision was void.
fn outcome(
    wish: &KeptChange,
    answer: Arbitrated,
    status: Option<StoredStatus>,
    change: &Change,
) -> Option<Changed> {
    let Some(status) = status else {
        return Some(Changed::Unknown);
    };
    Some(match (wish.kind, answer) {
        (ChangeKind::Cancel, Arbitrated::Done) if status == StoredStatus::Unfinished => {
            return None;
        }
        (ChangeKind::Cancel, Arbitrated::Done) => final_before(status, change),
        (_, Arbitrated::Done) => Changed::Done,
        // A lower NUM completed it, or it is about to be reopened.
        (ChangeKind::Update, Arbitrated::Completed { .. }) => Changed::Done,
        (_, Arbitrated::Completed { .. }) => Changed::AlreadyCompleted,
        (_, Arbitrated::Dead) => Changed::Dead,
        (_, Arbitrated::Cancelled) => Changed::Cancelled,
        // The change is older than the task's present epoch, or the bus accepts no reports.
        (_, Arbitrated::SentAgain | Arbitrated::OutboxFull) => Changed::Later,
        // SQL has the new values, and the task will arrive in the queue with them.
        (ChangeKind::Update, Arbitrated::Absent) => Changed::Done,
        (_, Arbitrated::Absent) => Changed::NotQueued,
        (_, Arbitrated::NotDue | Arbitrated::Reserved { .. }) => Changed::NotDue,
        (_, Arbitrated::CompletedByWorker) => Changed::CompletedByWorker,
    })
}

/// The answer to a change of a task that is final in SQL.
fn final_before(status: StoredStatus, change: &Change) -> Changed {
    match (status, change) {
        (StoredStatus::Cancelled, Change::Cancel) => Changed::Done,
        (other, _) => ended_otherwise(other),
    }
}

fn ended_otherwise(status: StoredStatus) -> Changed {
    match status {
        StoredStatus::Unfinished => Changed::Later,
        StoredStatus::Completed => Changed::AlreadyCompleted,
        StoredStatus::Dead => Changed::Dead,
        StoredStatus::Cancelled => Changed::Cancelled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Update;

    #[test]
    fn a_script_that_writes_bodies_gets_few_of_them() {
        let largest = config::Settings::default().limits.max_payload_bytes;
        let update = at_once(&Change::Update(Update::default()));
        assert!(
            update as u64 * largest as u64 <= 32 << 20,
            "{update} bodies of {largest} bytes"
        );
        assert_eq!(at_once(&Change::Cancel), MOST);
    }
}
