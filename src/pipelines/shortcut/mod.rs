//! The shortcut: tasks that this process has just stored go straight into the queue, without the
//! bus.
//!
//! If the fanout runs in the same process and nobody else reads `pipeline`, a record there only
//! costs a write, a read and a wait for the disk: the batch in SQL already says what is not in the
//! queue yet. See ADR 48.
//!
//! Crash windows:
//!
//! - Before the script: the watchdog publishes the batch, like any batch that nobody published.
//! - After the script, before the batch is marked: the watchdog publishes it, and the queue knows
//!   the tasks.
//! - A task whose limit key has enough tasks in the queue is put into the outbox before the batch is
//!   marked. Until then it belongs to its batch.
//! - The process is held up before the script, for longer than the watchdog waits: by then the
//!   tasks may be done and forgotten. The fence has moved, and the script refuses them.
//! - The answer is lost: the tasks go to the bus, flagged `again`.
//!
//! A record flagged `again` moves the fence. So the process forgets a fence that has moved or will
//! move, and asks Redis for it again after the fanout has read those tasks.

mod release;
mod traced;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

pub use self::{
    release::{Fences, Released},
    traced::Enqueues,
};
use crate::{
    config::Settings,
    model::{Offset, ShardId, TaskId, TaskRow},
    pipelines::admission::Gates,
    queue::{self, Enqueue, EnqueueTask, Enqueued, Enqueuer, Fence, Source},
    store::{Published, Turn},
    telemetry::{metrics, traces},
    wire,
};

/// The most shards that are called concurrently.
const AT_ONCE: usize = 256;
/// The most tasks of a call that releases them from SQL. Only one such call goes by a fence.
const RELEASED_AT_ONCE: usize = 2048;
/// About how many bytes of tasks go in one call.
const CALL_BYTES: usize = 4 << 20;
/// How long tasks wait for the fanout to make progress, if earlier tasks went by the bus.
const PATIENCE: Duration = Duration::from_millis(200);
/// The longest that tasks wait while the fanout makes progress.
const WAIT_AT_MOST: Duration = Duration::from_secs(1);
/// For how long all tasks go by the bus after such a wait has timed out, or after a call was
/// refused or failed.
const PAUSE: Duration = Duration::from_secs(1);
/// How many times the pause may double, if the fanout of another process reads the partition, or if
/// calls fail one after another.
const DOUBLED: u32 = 6;
/// The fewest known shards at which closed ones are forgotten.
const FEW: usize = 1024;

/// The way from SQL into the queue. Clones share their state.
#[derive(Clone)]
pub struct Shortcut(Arc<Inner>);

struct Inner {
    queue: Enqueuer,
    gates: Gates,
    settings: Arc<Settings>,
    known: Mutex<QueueProgress>,
    /// Notified when the fanout has read more.
    read_on: Notify,
}

/// A point in the order of what this process learned of fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

#[derive(Default)]
struct QueueProgress {
    learned: u64,
    shards: HashMap<ShardId, ShardFence>,
    /// The number of shards at which closed ones are next forgotten.
    many: usize,
    partitions: HashMap<u32, Progress>,
    /// Shards with tasks that the fanout holds. Later ones must not overtake them.
    held_back: HashSet<ShardId>,
}

#[derive(Default)]
struct ShardFence {
    /// The fence, and the moment since which it is known.
    fence: Option<(Fence, Moment)>,
    /// How many calls have failed one after another.
    failed: u32,
    paused_until: Option<Instant>,
}

/// How far the tasks that went by the bus have come in a partition.
#[derive(Default)]
struct Progress {
    published: Offset,
    /// What the fanout of this process has read.
    read: Offset,
    /// How many waits for the fanout have timed out.
    waits: u32,
    paused_until: Option<Instant>,
}

/// The outcome of [`Shortcut::send`].
#[derive(Default)]
pub struct Sent<'a> {
    /// The tasks that are in the queue, and the crowded ones.
    pub published: Vec<Published>,
    /// The tasks that the caller has to keep in SQL before it marks what was published: enough
    /// tasks of their limit keys are in the queue.
    pub crowded: Vec<TaskId>,
    /// The tasks that have to go by the bus.
    pub rest: Vec<(&'a TaskRow, Turn)>,
    /// The tasks that have to go by the bus, and may be in the queue already.
    pub again: Vec<(&'a TaskRow, Turn)>,
}

/// The outcome for the tasks of one shard.
#[derive(Default)]
struct Taken {
    /// How many are in the queue or crowded, counted from the first.
    count: usize,
    crowded: Vec<TaskId>,
    again: bool,
}

/// The outcome of calls with rows of one shard.
#[derive(Default)]
struct Put {
    /// How many rows the queue has taken or found crowded, counted from the first.
    count: usize,
    crowded: Vec<TaskId>,
    /// The outcome of a call that was refused or failed. If there is none but rows are left, the
    /// queue is full.
    refused: Option<queue::Result<Enqueued>>,
}

impl Shortcut {
    pub fn new(queue: Enqueuer, gates: Gates, settings: Arc<Settings>) -> Self {
        Self(Arc::new(Inner {
            queue,
            gates,
            settings,
            known: Default::default(),
            read_on: Default::default(),
        }))
    }

    /// Returns the present moment. Tasks that are stored from now on may be enqueued by the fences
    /// that are known now.
    pub fn moment(&self) -> Moment {
        Moment(self.0.known.lock().learned)
    }

    /// Enqueues tasks that were stored after a moment, as far as possible.
    pub async fn send<'a>(&self, rows: &[(&'a TaskRow, Turn)], stored_behind: Moment) -> Sent<'a> {
        let mut groups: BTreeMap<ShardId, Vec<(&'a TaskRow, Turn)>> = BTreeMap::new();
        for row in rows {
            let shard = ShardId {
                queue: row.0.queue.clone(),
                number: row.0.partition,
            };
            groups.entry(shard).or_default().push(*row);
        }
        let calls: Vec<_> = groups
            .into_iter()
            .map(|(shard, rows)| self.group(shard, rows, stored_behind))
            .collect();
        let mut calls = stream::iter(calls).buffer_unordered(AT_ONCE);
        let mut sent = Sent::default();
        while let Some((partition, taken, mut rows)) = calls.next().await {
            let Taken {
                count,
                crowded,
                again,
            } = taken;
            sent.crowded.extend(crowded);
            if again {
                &mut sent.again
            } else {
                &mut sent.rest
            }
            .extend(rows.split_off(count));
            if count > 0 {
                let tasks = rows.into_iter().map(|(row, turn)| (row.id, turn)).collect();
                // The lowest offset: if the queue has no record of such a task, none will come.
                sent.published.push(Published {
                    partition,
                    offset: Offset::default(),
                    tasks,
                });
            }
        }
        sent
    }

    /// Records that tasks went by the bus, so that later ones do not overtake them.
    pub fn went_by_bus(&self, published: &[Published]) {
        let mut known = self.0.known.lock();
        for Published {
            partition, offset, ..
        } in published
        {
            let progress = known.partitions.entry(*partition).or_default();
            progress.published = progress.published.max(*offset);
        }
    }

    /// Sends all tasks of the shard by the bus until the returned value is dropped.
    pub fn hold_back(&self, shard: &ShardId) -> HeldBack {
        self.0.known.lock().held_back.insert(shard.clone());
        HeldBack(self.clone(), shard.clone())
    }

    /// Records that the tasks up to this offset are in the queue, unless their shard is held back.
    pub fn note_read(&self, partition: u32, offset: Offset) {
        let mut known = self.0.known.lock();
        let progress = known.partitions.entry(partition).or_default();
        progress.read = progress.read.max(offset);
        drop(known);
        self.0.read_on.notify_waiters();
    }

    async fn group<'a>(
        &self,
        shard: ShardId,
        rows: Vec<(&'a TaskRow, Turn)>,
        stored_behind: Moment,
    ) -> (u32, Taken, Vec<(&'a TaskRow, Turn)>) {
        (
            shard.number,
            self.enqueue(&shard, &rows, stored_behind).await,
            rows,
        )
    }

    async fn enqueue(
        &self,
        shard: &ShardId,
        rows: &[(&TaskRow, Turn)],
        stored_behind: Moment,
    ) -> Taken {
        let mut taken = Taken::default();
        if !self.0.queue.knows(shard) {
            self.0.known.lock().shards.remove(shard);
            return taken;
        }
        if self.is_paused(shard)
            || self.0.gates.is_closed(&shard.queue)
            || !self.wait_until_read(shard).await
        {
            return taken;
        }
        let Some(fence) = self.fence(shard, stored_behind).await else {
            return taken;
        };
        let put = self.put(shard, rows, Source::Store(&fence)).await;
        taken.count = put.count;
        taken.crowded = put.crowded;
        // Without a refusal the queue is full: the rest goes to the fanout, which parks it.
        if let Some(outcome) = put.refused {
            tracing::debug!(
                "{} new tasks of {shard} go by the bus: {outcome:?}",
                rows.len() - put.count
            );
            self.pause(shard, matches!(outcome, Ok(Enqueued::Moved(_))));
            taken.again = true;
        }
        taken
    }

    /// Enqueues rows of one shard.
    async fn put(&self, shard: &ShardId, rows: &[(&TaskRow, Turn)], source: Source<'_>) -> Put {
        let mut put = Put::default();
        let most = match source {
            Source::Waiting(_) => RELEASED_AT_ONCE,
            _ => self.0.settings.fanout.batch_max,
        };
        while put.count < rows.len() {
            let since = traces::now();
            let rows = call(&rows[put.count..], most);
            let mut traced = Enqueues::default();
            rows.iter()
                .enumerate()
                .for_each(|(place, (row, _))| traced.add(place, &row.traceparent));
            let tasks: Vec<EnqueueTask> = rows.iter().map(|(row, _)| task(row)).collect();
            match self
                .0
                .queue
                .enqueue(shard, &self.batch(shard, source, &tasks))
                .await
            {
                Ok(Enqueued::Done {
                    dealt_with,
                    added,
                    crowded,
                }) => {
                    traced.end(shard, &tasks, dealt_with, added, since);
                    metrics::fanout_took(added, dealt_with - added - crowded.len(), crowded.len());
                    put.count += dealt_with;
                    if !crowded.is_empty() {
                        let crowded = crowded.iter().map(|place| &tasks[*place]);
                        put.crowded.extend(crowded.clone().map(|task| task.id));
                        let keys = crowded.filter_map(|task| wire::limit_hash_in(&task.body));
                        self.0.gates.note_crowded(keys);
                    }
                    if dealt_with < tasks.len() {
                        break;
                    }
                }
                outcome => {
                    put.refused = Some(outcome);
                    break;
                }
            }
        }
        put
    }

    fn batch<'t>(
        &self,
        shard: &ShardId,
        source: Source<'t>,
        tasks: &'t [EnqueueTask],
    ) -> Enqueue<'t> {
        let settings = self.0.settings.queues.get(&shard.queue);
        Enqueue {
            source,
            tasks,
            high_water_tasks: settings.high_water_tasks,
            high_water_bytes: settings.high_water_bytes,
            live_tasks_max: settings.live_tasks_max(),
        }
    }

    /// Returns the shard's fence, if it was known at the moment.
    ///
    /// If none is known, asks Redis for it, for the sake of later tasks.
    async fn fence(&self, shard: &ShardId, at: Moment) -> Option<Fence> {
        if let Some((fence, since)) = self
            .0
            .known
            .lock()
            .shards
            .get(shard)
            .and_then(|known| known.fence.as_ref())
        {
            return (*since <= at).then(|| fence.clone());
        }
        match self.look(shard).await {
            Ok(fence) => self.learn(shard, fence),
            Err(outcome) => {
                tracing::debug!("the fence of {shard} is not known: {outcome:?}");
                self.pause(shard, false);
            }
        }
        None
    }

    /// Asks Redis for the fence of a shard.
    async fn look(&self, shard: &ShardId) -> Result<Fence, queue::Result<Enqueued>> {
        match self
            .0
            .queue
            .enqueue(
                shard,
                &self.batch(shard, Source::Store(&Fence::default()), &[]),
            )
            .await
        {
            Ok(Enqueued::Moved(fence)) => Ok(fence),
            outcome => Err(outcome),
        }
    }

    fn learn(&self, shard: &ShardId, fence: Fence) {
        let mut known = self.0.known.lock();
        known.learned += 1;
        let since = Moment(known.learned);
        known.shards.insert(
            shard.clone(),
            ShardFence {
                fence: Some((fence, since)),
                ..ShardFence::default()
            },
        );
        if known.shards.len() > known.many.max(FEW) {
            known.shards.retain(|shard, _| self.0.queue.knows(shard));
            known.many = 2 * known.shards.len();
        }
    }

    /// Forgets the fence, because it has moved or will move, and sends nothing to this shard for a
    /// while. The pause doubles with each failure, because all tasks that are published together
    /// wait for a call that fails.
    fn pause(&self, shard: &ShardId, has_moved: bool) {
        let mut known = self.0.known.lock();
        let shard = known.shards.entry(shard.clone()).or_default();
        shard.fence = None;
        shard.paused_until = Some(Instant::now() + PAUSE * (1 << shard.failed));
        shard.failed = if has_moved {
            0
        } else {
            DOUBLED.min(shard.failed + 1)
        };
    }

    fn is_paused(&self, shard: &ShardId) -> bool {
        let known = self.0.known.lock();
        known
            .shards
            .get(shard)
            .and_then(|shard| shard.paused_until)
            .is_some_and(|until| Instant::now() < until)
    }

    /// Waits for a short time until the fanout has read what went by the bus before. Returns
    /// whether the shard has it.
    async fn wait_until_read(&self, shard: &ShardId) -> bool {
        self.wait_until_partition_read(shard.number).await
            && !self.0.known.lock().held_back.contains(shard)
    }

    async fn wait_until_partition_read(&self, partition: u32) -> bool {
        let began = Instant::now();
        let mut until = began + PATIENCE;
        let mut read = None;
        loop {
            let read_on = self.0.read_on.notified();
            tokio::pin!(read_on);
            read_on.as_mut().enable();
            {
                let mut known = self.0.known.lock();
                let Some(progress) = known.partitions.get_mut(&partition) else {
                    return true;
                };
                if progress.read >= progress.published {
                    progress.waits = 0;
                    return true;
                }
                let now = Instant::now();
                if read
                    .replace(progress.read)
                    .is_some_and(|read| read < progress.read)
                {
                    until = (now + PATIENCE).min(began + WAIT_AT_MOST);
                }
                if progress.paused_until.is_some_and(|until| now < until) {
                    return false;
                }
                if now >= until {
                    progress.paused_until = Some(now + PAUSE * (1 << progress.waits));
                    progress.waits = DOUBLED.min(progress.waits + 1);
                    return false;
                }
            }
            // Check again, whether notified or not.
            drop(tokio::time::timeout_at(until, read_on).await);
        }
    }
}

/// A shard whose tasks all go by the bus.
pub struct HeldBack(Shortcut, ShardId);

impl Drop for HeldBack {
    fn drop(&mut self) {
        let mut known = self.0.0.known.lock();
        known.held_back.remove(&self.1);
        // The fanout may have dropped the tasks and be reading them again.
        if let Some(progress) = known.partitions.get_mut(&self.1.number) {
            progress.read = Offset::default();
        }
    }
}

/// Returns the first rows, `most` at most, as many as fit into one call.
fn call<'r, 'a>(rows: &'r [(&'a TaskRow, Turn)], most: usize) -> &'r [(&'a TaskRow, Turn)] {
    let mut bytes = 0;
    let fits = rows.iter().take(most).take_while(|(row, _)| {
        bytes += row.weight();
        bytes <= CALL_BYTES
    });
    &rows[..fits.count().max(1)]
}

fn task(row: &TaskRow) -> EnqueueTask {
    EnqueueTask {
        offset: Offset::default(),
        id: row.id,
        replicas: row.replicas,
        not_before_unix_ms: row.not_before_unix_ms,
        body: wire::blob_of_row(row),
        credited: Vec::new(),
        epoch: 0,
    }
}
