//! The filter of keys seen before: one hash per queue in Redis (so each is on one node of a
//! cluster), from the hash of a key to its task id. It is a hint: the filter reports a key as seen
//! only if its task is stored, and SQL decides about all others. So an entry may be missing at any
//! time, and a crash loses nothing.
//!
//! A database that is set back (a restored backup, or a replica that took over without the latest
//! writes) loses stored tasks that the filter still knows. So Redis also *names* the last task of
//! each of the last [`BATCHES`] batches; if a process marks many at once, of the last
//! [`NAMED_AT_ONCE`] of them. While SQL has all named tasks, nothing is lost. If SQL lacks one, a
//! new *era* begins, and filters of the old era are ignored.
//!
//! A key that SQL calls a duplicate is marked again. Its task is named only if it is later than all
//! named ones: otherwise old tasks would push out the names by which a loss is found.
//!
//! Marks lag behind: one loop writes those that have gathered, at the next
//! [tick](crate::runtime::tick). A process that dies before that loses them, and SQL answers for
//! those keys.

pub mod bits;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use redis::{RedisError, RedisResult};
use tokio::sync::Notify;

use crate::{
    model::{KeyHash, QueueName, TaskId},
    redis_pool::{Batch, Call, Redis, scripts},
    runtime::{Loop, LoopError, tick},
};

/// How many bytes of the SHA-256 of a key the filter keeps, enough that no two keys of a queue
/// share them.
const HASH_BYTES: usize = 16;
/// The field of a filter that names its era.
const ERA: &str = "era";
/// How many batches Redis names. This is more than five processes name in the two seconds between
/// two checks, however many batches they store: otherwise new batches could push out the name that
/// SQL lacks.
const BATCHES: isize = 1000;
/// How many of the batches that a process marks in one tick are named: the last ones, since a
/// database that is set back loses what was stored last, by inserts or by reports.
const NAMED_AT_ONCE: usize = 2;
/// How many keys and ids go into one script call, since Lua's stack is limited.
const MARKED_AT_ONCE: usize = 1000;
/// The most marks that wait for the next tick. The batch that reaches this number is written at
/// once, and its caller waits.
const WAITING_MAX: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A stored task with its queue and its key.
pub type Stored = (QueueName, KeyHash, TaskId);

/// The filter of all queues. Clones share the era, and the marks that wait.
#[derive(Clone)]
pub struct Filter {
    redis: Redis,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    era: AtomicU64,
    waiting: Mutex<Waiting>,
    /// Notified when marks wait.
    marked: Notify,
}

#[derive(Default)]
struct Waiting {
    marks: Marks,
    /// True while a loop writes the marks. Without one, none wait.
    has_writer: bool,
    /// The latest task that Redis names, as far as this process knows.
    named: Option<TaskId>,
}

/// Marks of some batches.
#[derive(Default)]
struct Marks {
    /// The era in which the tasks were stored. Tasks of an earlier era may be lost.
    era: u64,
    tasks: Vec<Stored>,
    /// The key and the id of the last task of each of the last batches.
    last: VecDeque<Vec<u8>>,
}

/// The tasks that were stored last, as Redis remembers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastStored {
    era: u64,
    pub tasks: Vec<(KeyHash, TaskId)>,
}

impl Filter {
    /// A filter in its first era, until [`Self::last_stored`] learns the present one.
    pub fn new(redis: Redis) -> Self {
        Self {
            redis,
            shared: Arc::default(),
        }
    }

    fn key(&self, queue: &QueueName) -> String {
        format!("{}:{{{queue}}}:seen", self.redis.prefix())
    }

    fn era_key(&self) -> String {
        format!("{}:{{filter}}:era", self.redis.prefix())
    }

    fn stored_key(&self) -> String {
        format!("{}:{{filter}}:stored", self.redis.prefix())
    }

    async fn run(&self, call: Call) -> Result<u64> {
        Ok(
            redis::from_redis_value(call.run(&mut self.redis.conn()).await?)
                .map_err(RedisError::from)?,
        )
    }

    /// The present era, as far as this process knows.
    pub fn era(&self) -> u64 {
        self.shared.era.load(Ordering::Relaxed)
    }

    /// Returns the task of each key that the filter knows, in the order of `keys`.
    pub async fn seen(&self, keys: &[(QueueName, KeyHash)]) -> Result<Vec<Option<TaskId>>> {
        let mut seen = vec![None; keys.len()];
        let mut batch = Batch::default();
        let by_queue = by_queue(keys.iter().map(|(queue, _)| queue));
        for (queue, places) in &by_queue {
            let mut command = redis::cmd("HMGET");
            command.arg(self.key(queue)).arg(ERA);
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            batch.command(command);
        }
        let answers = self.redis.run_apart(batch).await;
        let era = self.era().to_string();
        for (places, answer) in by_queue.into_values().zip(answers) {
            let mut values: Vec<Option<Vec<u8>>> =
                redis::from_redis_value(answer?).map_err(RedisError::from)?;
            let ids = values.split_off(1);
            if values
                .pop()
                .flatten()
                .is_some_and(|of| of == era.as_bytes())
            {
                for (place, id) in places.into_iter().zip(ids) {
                    seen[place] = id.and_then(|id| TaskId::from_slice(&id));
                }
            }
        }
        Ok(seen)
    }

    /// Remembers a batch of tasks soon. Forgets other keys of a queue if it then has more than
    /// `limit(queue)`.
    ///
    /// SQL has stored the tasks since the caller took `era` from [`Self::era`]. If a later era has
    /// begun, perhaps because SQL lost them, they are left out. [`Self::write_marks`] writes the
    /// marks if it runs; otherwise they are written at once.
    pub async fn mark(
        &self,
        tasks: &[Stored],
        era: u64,
        limit: impl Fn(&QueueName) -> u64,
    ) -> Result<()> {
        match self.add(tasks, tasks.last(), era) {
            Some(marks) => self.write(marks, limit).await,
            None => Ok(()),
        }
    }

    /// Like [`Self::mark`], for tasks that were stored earlier. SQL has reported them since the
    /// caller took the era.
    pub async fn mark_known(
        &self,
        tasks: &[Stored],
        era: u64,
        limit: impl Fn(&QueueName) -> u64,
    ) -> Result<()> {
        let named = self.shared.waiting.lock().named;
        let latest = tasks
            .iter()
            .max_by_key(|(.., id)| *id)
            .filter(|(.., id)| Some(*id) > named);
        match self.add(tasks, latest, era) {
            Some(marks) => self.write(marks, limit).await,
            None => Ok(()),
        }
    }

    /// Adds tasks of the present era to the marks that wait; Redis will name `to_name`. If the
    /// marks must be written now, takes and returns all of them.
    fn add(&self, tasks: &[Stored], to_name: Option<&Stored>, era: u64) -> Option<Marks> {
        if tasks.is_empty() || era != self.era() {
            return None;
        }
        let mut waiting = self.shared.waiting.lock();
        let Waiting {
            marks,
            has_writer,
            named,
        } = &mut *waiting;
        if marks.era != era {
            *marks = Marks {
                era,
                ..Marks::default()
            };
        }
        if let Some((_, hash, id)) = to_name {
            if marks.last.len() == NAMED_AT_ONCE {
                marks.last.pop_front();
            }
            marks.last.push_back([&hash.0[..], id.as_bytes()].concat());
            *named = (*named).max(Some(*id));
        }
        marks.tasks.extend_from_slice(tasks);
        if *has_writer && marks.tasks.len() < WAITING_MAX {
            self.shared.marked.notify_one();
            return None;
        }
        Some(std::mem::take(marks))
    }

    /// Writes the marks that have gathered, once a tick, until the stop. After that, [`Self::mark`]
    /// writes at once. Only one loop of a process runs this.
    pub async fn write_marks(&self, limit: impl Fn(&QueueName) -> u64, cx: Loop) {
        self.shared.waiting.lock().has_writer = true;
        loop {
            let is_stopping = tokio::select! {
                () = cx.idle(self.shared.marked.notified()) => cx.stop.run_until_cancelled(tick()).await.is_none(),
                () = cx.stop.cancelled() => true,
            };
            let marks = {
                let mut waiting = self.shared.waiting.lock();
                waiting.has_writer = !is_stopping;
                std::mem::take(&mut waiting.marks)
            };
            let count = marks.tasks.len();
            if let Err(error) = self.write(marks, &limit).await {
                tracing::debug!("could not mark {count} keys, SQL knows them: {error}");
            }
            if is_stopping {
                return;
            }
            cx.beat();
        }
    }

    /// First names the last batches, then marks the keys of all, so that the filter knows no key
    /// before Redis names a batch that was stored at about the same time.
    async fn write(&self, marks: Marks, limit: impl Fn(&QueueName) -> u64) -> Result<()> {
        let Marks { era, tasks, last } = marks;
        if tasks.is_empty() && last.is_empty() {
            return Ok(());
        }
        let mut naming = Vec::new();
        if !last.is_empty() {
            let mut push = redis::cmd("LPUSH");
            let mut trim = redis::cmd("LTRIM");
            push.arg(self.stored_key()).arg(Vec::from(last));
            trim.arg(self.stored_key()).arg(0).arg(BATCHES - 1);
            naming = vec![push, trim];
        }
        let by_queue = by_queue(tasks.iter().map(|(queue, ..)| queue));
        let pieces = by_queue.iter().flat_map(|(queue, places)| {
            let pieces = places.chunks(MARKED_AT_ONCE);
            pieces.map(|places| {
                (
                    *queue,
                    self.marking(queue, era, places.iter().map(|place| &tasks[*place])),
                )
            })
        });
        let (queues, calls): (Vec<_>, Vec<_>) = pieces.unzip();
        let mut conn = self.redis.conn();
        let answers = if self.redis.is_cluster() {
            if !naming.is_empty() {
                let mut pipe = redis::pipe();
                for command in naming {
                    pipe.add_command(command);
                }
                let () = pipe.query_async(&mut conn).await?;
            }
            let mut batch = Batch::default();
            calls.into_iter().for_each(|call| batch.script(call));
            self.redis.run_apart(batch).await
        } else {
            let mut batch = Batch::default();
            let names = naming.len();
            naming
                .into_iter()
                .for_each(|command| batch.command(command));
            calls.into_iter().for_each(|call| batch.script(call));
            let mut answers = batch.run(&mut conn).await?;
            let marked = answers.split_off(names);
            if let Some(Err(error)) = answers.into_iter().next() {
                let keys: Vec<_> = tasks
                    .iter()
                    .map(|(queue, hash, _)| (queue.clone(), *hash))
                    .collect();
                self.forget(&keys).await?;
                return Err(error.into());
            }
            marked
        };
        let known = answers
            .into_iter()
            .map(|known| Ok(redis::from_redis_value(known?)?));
        let known = known.collect::<RedisResult<Vec<i64>>>()?;
        let mut later = Vec::new();
        // If a queue has several pieces, the answer to the last one counts.
        for (queue, known) in queues.into_iter().zip(known).collect::<BTreeMap<_, _>>() {
            match u64::try_from(known) {
                Ok(known) => {
                    self.forget_some(queue, known.saturating_sub(limit(queue)).min(10_000))
                        .await?
                }
                Err(_) => later.push((queue, known.unsigned_abs())),
            }
        }
        self.drop_orphans(later).await
    }

    /// Drops filters whose era is later than the one in Redis: Redis has lost its data, and a
    /// process that did not know this yet marked them. They would refuse all marks.
    async fn drop_orphans(&self, filters: Vec<(&QueueName, u64)>) -> Result<()> {
        if filters.is_empty() {
            return Ok(());
        }
        let mut conn = self.redis.conn();
        let era: Option<u64> = redis::cmd("GET")
            .arg(self.era_key())
            .query_async(&mut conn)
            .await?;
        for (queue, _) in filters
            .into_iter()
            .filter(|(_, of)| *of > era.unwrap_or_default())
        {
            let () = redis::cmd("UNLINK")
                .arg(self.key(queue))
                .query_async(&mut conn)
                .await?;
        }
        Ok(())
    }

    fn marking<'a>(
        &self,
        queue: &QueueName,
        era: u64,
        tasks: impl ExactSizeIterator<Item = &'a Stored>,
    ) -> Call {
        let mut call = scripts::FILTER_MARK
            .call(&[self.key(queue)])
            .of_items(tasks.len());
        call.arg(era);
        for (_, hash, id) in tasks {
            call.arg(&hash.0[..HASH_BYTES]).arg(id.as_bytes());
        }
        call
    }

    /// Forgets this many keys of a queue, chosen at random.
    async fn forget_some(&self, queue: &QueueName, excess: u64) -> Result<()> {
        if excess == 0 {
            return Ok(());
        }
        let key = self.key(queue);
        let mut command = redis::cmd("HRANDFIELD");
        let mut fields: Vec<Vec<u8>> = command
            .arg(&key)
            .arg(excess + 1)
            .query_async(&mut self.redis.conn())
            .await?;
        fields.retain(|field| field != ERA.as_bytes());
        fields.truncate(usize::try_from(excess).unwrap_or(usize::MAX));
        let () = redis::cmd("HDEL")
            .arg(&key)
            .arg(fields)
            .query_async(&mut self.redis.conn())
            .await?;
        Ok(())
    }

    /// Asks Redis which tasks were stored last, and learns the era.
    pub async fn last_stored(&self) -> Result<LastStored> {
        let mut pipe = redis::pipe();
        pipe.get(self.era_key()).lrange(self.stored_key(), 0, -1);
        let (era, tasks): (Option<u64>, Vec<Vec<u8>>) =
            pipe.query_async(&mut self.redis.conn()).await?;
        let era = era.unwrap_or_default();
        self.shared.era.store(era, Ordering::Relaxed);
        let task = |entry: Vec<u8>| {
            let (hash, id) = entry.split_at_checked(32)?;
            Some((KeyHash(hash.try_into().ok()?), TaskId::from_slice(id)?))
        };
        let tasks: Vec<_> = tasks.into_iter().filter_map(task).collect();
        self.shared.waiting.lock().named = tasks.iter().map(|(_, id)| *id).max();
        Ok(LastStored { era, tasks })
    }

    /// Drops all filters, because SQL lacks one of the tasks that were stored last. Returns false
    /// if another process was faster.
    pub async fn drop_all(&self, last: &LastStored) -> Result<bool> {
        let mut call = scripts::FILTER_DROP.call(&[self.era_key(), self.stored_key()]);
        call.arg(last.era);
        let dropped = self.run(call).await? == 1;
        self.last_stored().await?;
        Ok(dropped)
    }

    /// Forgets all keys of a queue. SQL still knows them.
    pub async fn forget_queue(&self, queue: &QueueName) -> Result<()> {
        self.shared
            .waiting
            .lock()
            .marks
            .tasks
            .retain(|(of, ..)| of != queue);
        let () = redis::cmd("UNLINK")
            .arg(self.key(queue))
            .query_async(&mut self.redis.conn())
            .await?;
        self.forget_numbers(queue).await
    }

    /// Forgets keys of tasks that are dead or cancelled, so that SQL answers when they are sent
    /// again.
    pub async fn forget(&self, keys: &[(QueueName, KeyHash)]) -> Result<()> {
        let hashes: HashSet<_> = keys.iter().map(|(_, hash)| hash).collect();
        self.shared
            .waiting
            .lock()
            .marks
            .tasks
            .retain(|(_, hash, _)| !hashes.contains(hash));
        let mut batch = Batch::default();
        for (queue, places) in by_queue(keys.iter().map(|(queue, _)| queue)) {
            let mut command = redis::cmd("HDEL");
            command.arg(self.key(queue));
            places.iter().for_each(|place| {
                command.arg(&keys[*place].1.0[..HASH_BYTES]);
            });
            batch.command(command);
        }
        for answer in self.redis.run_apart(batch).await {
            answer?;
        }
        Ok(())
    }
}

/// Returns the indexes at which each queue is in a list.
fn by_queue<'a>(
    queues: impl Iterator<Item = &'a QueueName>,
) -> BTreeMap<&'a QueueName, Vec<usize>> {
    let mut places: BTreeMap<&QueueName, Vec<usize>> = BTreeMap::new();
    queues
        .enumerate()
        .for_each(|(place, queue)| places.entry(queue).or_default().push(place));
    places
}
