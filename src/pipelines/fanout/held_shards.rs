//! Shards whose calls fail. Their records wait here, so that the other shards of the partition can
//! go on.
//!
//! A shard is held from its first failed call until it has taken all its waiting records. Records
//! that are read in the meantime join the end, so the order is kept. For each shard one task
//! retries the first records from time to time. It handles them as if they had just been read,
//! because their tasks may have been cancelled since.
//!
//! While a partition has held shards, nothing of it is committed. If the reader ends or loses the
//! partition, the records are therefore delivered again, and the shards recognise those that they
//! already have. A retry of the earlier reader may still reach Redis then. It does no harm, because
//! it carries the earlier epoch and begins with the same record.
//!
//! A reader that would leave too much uncommitted stops reading until it may commit again, and
//! reports no progress. It stays in its group, because any other reader would fill up with the same
//! records.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinSet},
    time::Instant,
};

use super::{
    enqueue::{Enqueuing, is_of_shard},
    error::Error,
    owned::Owned,
    reader::Fanout,
};
use crate::{
    bus::{Message, Reader, Uncommitted},
    model::{Offset, ShardId},
    pipelines::shortcut::HeldBack,
    queue,
    runtime::{LastSaid, tick_after},
    wire,
};

/// The most records and bytes that a reader leaves uncommitted because of held shards, including
/// those of the other shards in their partitions. Redis Streams keep them in memory, and a new
/// reader gets them again.
const RECORDS: usize = 100_000;
const BYTES: usize = 64 << 20;
/// The most retries that call Redis at a time.
const AT_ONCE: usize = 64;
/// Roughly the most bytes of a retry.
const CALL_BYTES: usize = 4 << 20;
/// The pause before the next retry of a shard doubles each time, within these bounds.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The held shards of a reader, by partition.
pub(super) struct HeldShards {
    partitions: BTreeMap<u32, Partition>,
    tries: JoinSet<Tried>,
    slots: Arc<Semaphore>,
    /// Retries that have ended, and when to handle them.
    ended: Vec<Tried>,
    due: Instant,
    /// How often a shard was held so far. Numbers the holds.
    count: u64,
}

struct Partition {
    tenure: u64,
    /// The first record that is not committed.
    first: Offset,
    /// The last record that was read, of any shard.
    last: Offset,
    /// The number of records from `first` on, minus those that held shards have taken since.
    records: usize,
    bytes: usize,
    shards: BTreeMap<ShardId, Waiting>,
}

struct Waiting {
    number: u64,
    messages: VecDeque<Message>,
    cause: queue::Error,
    /// The pause before the next retry; zero after one that succeeded.
    pause: Duration,
    _held_back: Option<HeldBack>,
}

/// The result of a retry.
pub(super) struct Tried {
    shard: ShardId,
    number: u64,
    records: usize,
    outcome: Result<Enqueuing, Error>,
}

impl HeldShards {
    pub(super) fn new() -> Self {
        Self {
            partitions: Default::default(),
            tries: Default::default(),
            slots: Arc::new(Semaphore::new(AT_ONCE)),
            ended: Default::default(),
            due: Instant::now(),
            count: Default::default(),
        }
    }

    pub(super) fn has(&self, shard: &ShardId) -> bool {
        self.partitions
            .get(&shard.number)
            .is_some_and(|partition| partition.shards.contains_key(shard))
    }

    pub(super) fn has_of(&self, partition: u32) -> bool {
        self.partitions.contains_key(&partition)
    }

    /// Adds the records of a batch to the held shards that they belong to.
    fn join(&mut self, messages: &[Message]) {
        for message in messages {
            let Some(partition) = self.partitions.get_mut(&message.partition) else {
                continue;
            };
            partition.last = message.offset;
            partition.records += 1;
            partition.bytes += message.value.len();
            if let Ok(task) = wire::read_pipeline_record(&message.value) {
                let shard = ShardId {
                    queue: task.queue,
                    number: message.partition,
                };
                if let Some(waiting) = partition.shards.get_mut(&shard) {
                    waiting.messages.push_back(message.clone());
                }
            }
        }
    }

    /// False while the reader is full, or while a shard that works again catches up. New records
    /// would join the waiting ones, so as long as records arrive the hold would not end and nothing
    /// would be committed.
    pub(super) fn may_read(&self) -> bool {
        let mut shards = self
            .partitions
            .values()
            .flat_map(|partition| partition.shards.values());
        !self.is_full() && shards.all(|waiting| !waiting.pause.is_zero())
    }

    /// True if too much is not committed.
    pub(super) fn is_full(&self) -> bool {
        let sum = |of: fn(&Partition) -> usize| self.partitions.values().map(of).sum::<usize>();
        sum(|partition| partition.records) > RECORDS || sum(|partition| partition.bytes) > BYTES
    }

    /// Forgets what is held of a partition. Returns the offset from which its records have to be
    /// read again.
    pub(super) fn forget(&mut self, partition: u32) -> Option<Offset> {
        self.partitions
            .remove(&partition)
            .map(|partition| partition.first)
    }

    /// Forgets partitions that this reader has lost, even if it has been assigned them again: their
    /// records are delivered again.
    pub(super) fn forget_lost(&mut self, reader: &dyn Reader) {
        self.partitions
            .retain(|number, partition| reader.tenure(*number) == partition.tenure);
    }

    /// Waits until a retry ends, and returns all that have ended by the next
    /// [tick](crate::runtime::tick). Never returns if nothing is held.
    ///
    /// Each return interrupts the reader's read. Thousands of shards may be held, so returning the
    /// retries one by one would leave no time for reading. Cancel safe.
    pub(super) async fn tried(&mut self) -> Vec<Tried> {
        if self.ended.is_empty() {
            match self.tries.join_next().await {
                Some(first) => self.ended.extend(end(first)),
                None => std::future::pending().await,
            }
            self.due = tick_after(Instant::now());
        }
        tokio::time::sleep_until(self.due).await;
        while let Some(next) = self.tries.try_join_next() {
            self.ended.extend(end(next));
        }
        std::mem::take(&mut self.ended)
    }

    /// Aborts the retries, and waits until they have ended.
    pub(super) async fn end(mut self) {
        self.tries.shutdown().await;
    }
}

/// Returns the result of a retry; `None` if the runtime has cancelled it, as it does when the
/// process ends. Passes a panic on.
fn end(joined: Result<Tried, JoinError>) -> Option<Tried> {
    match joined.map_err(JoinError::try_into_panic) {
        Ok(tried) => Some(tried),
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => None,
    }
}

/// What the log has said about a partition. This outlives the readers, which come and go while the
/// shards refuse calls.
struct Said {
    refusal: LastSaid,
    /// The log has reported a refusal, but not its end yet.
    is_open: bool,
}

static SAID: Mutex<BTreeMap<u32, Said>> = Mutex::new(BTreeMap::new());

impl HeldShards {
    /// Logs once a minute that shards of the partition are held, and at once if the cause changes.
    fn say_held(&self, number: u32) {
        let shards = self
            .partitions
            .get(&number)
            .map(|partition| &partition.shards);
        let Some((shard, Waiting { cause, .. })) = shards.and_then(BTreeMap::first_key_value)
        else {
            return;
        };
        let others = shards.map_or(0, BTreeMap::len) - 1;
        let mut said = SAID.lock();
        let said = said.entry(number).or_insert(Said {
            refusal: LastSaid::nothing(),
            is_open: false,
        });
        if said.refusal.is_news(&cause.to_string()) {
            said.is_open = true;
            tracing::warn!(%shard, others, "cannot enqueue to {shard}: its tasks wait on the bus: {cause}");
        }
    }

    /// Logs once a minute that the reader has stopped reading.
    fn say_full(&self) {
        static SAID: Mutex<LastSaid> = Mutex::new(LastSaid::nothing());
        let shard = self
            .partitions
            .values()
            .find_map(|partition| partition.shards.keys().next());
        if let Some(shard) = shard.filter(|_| self.is_full() && SAID.lock().is_news("full")) {
            let records: usize = self
                .partitions
                .values()
                .map(|partition| partition.records)
                .sum();
            tracing::warn!(%shard, records, "the fanout reads no more before {shard} takes its tasks");
        }
    }
}

/// Logs that a partition has no held shards any more.
fn say_taken(number: u32) {
    let is_open = SAID
        .lock()
        .get_mut(&number)
        .is_some_and(|said| std::mem::take(&mut said.is_open));
    if is_open {
        tracing::info!(
            partition = number,
            "all shards of pipeline/{number} take tasks again"
        );
    }
}

impl Fanout {
    /// Starts to hold the shards that refused their records of this batch, and keeps the batch's
    /// records of all held shards.
    ///
    /// `has_done`: Redis took other groups of the batch. If it took none, first checks that Redis
    /// accepts writes and this reader still owns the partition: otherwise the shards are not the
    /// cause.
    pub(super) async fn hold(
        &self,
        (refused, has_done): (Vec<(ShardId, queue::Error)>, bool),
        messages: &[Message],
        owned: &mut Owned,
        held: &mut HeldShards,
    ) -> Result<(), Error> {
        if let Some((shard, cause)) = refused.first().filter(|_| !has_done) {
            let epoch = owned.epoch(shard.number);
            match self.0.coordination.present_epoch(shard.number).await {
                Ok(present) if present > epoch => {
                    return Err(self.fenced(shard.number, epoch, present).await);
                }
                Ok(_) => {}
                Err(_) => {
                    return Err(Error::Enqueue {
                        shard: shard.clone(),
                        cause: cause.clone(),
                    });
                }
            }
        }
        let shards: Vec<_> = refused.iter().map(|(shard, _)| shard.clone()).collect();
        for (shard, cause) in refused {
            held.count += 1;
            let of_partition = |message: &&Message| message.partition == shard.number;
            let first = messages
                .iter()
                .find(of_partition)
                .map(|message| message.offset)
                .unwrap_or_default();
            let tenure = owned.tenure(shard.number);
            let partition = Partition {
                tenure,
                first,
                last: Default::default(),
                records: Default::default(),
                bytes: Default::default(),
                shards: Default::default(),
            };
            let partition = held.partitions.entry(shard.number).or_insert(partition);
            let _held_back = self
                .0
                .shortcut
                .as_ref()
                .map(|shortcut| shortcut.hold_back(&shard));
            let number = held.count;
            let messages = VecDeque::new();
            let pause = SHORTEST;
            partition.shards.insert(
                shard,
                Waiting {
                    number,
                    messages,
                    cause,
                    pause,
                    _held_back,
                },
            );
        }
        held.join(messages);
        for shard in &shards {
            held.say_held(shard.number);
            self.try_again(shard, owned, held);
        }
        held.say_full();
        Ok(())
    }

    /// Starts a retry of a held shard.
    fn try_again(&self, shard: &ShardId, owned: &Owned, held: &mut HeldShards) {
        let partition = held.partitions.get(&shard.number);
        let Some(waiting) = partition.and_then(|partition| partition.shards.get(shard)) else {
            return;
        };
        let mut bytes = 0;
        let fits = waiting
            .messages
            .iter()
            .take(self.0.settings.fanout.batch_max)
            .take_while(|message| {
                bytes += message.value.len();
                bytes <= CALL_BYTES
            });
        let count = fits.count().max(1);
        let messages: Vec<_> = waiting.messages.iter().take(count).cloned().collect();
        let fanout = self.clone();
        let shard = shard.clone();
        let number = waiting.number;
        let pause = waiting.pause;
        let epoch = owned.epoch(shard.number);
        let predecessor = owned.last.get(&shard).copied();
        let slots = Arc::clone(&held.slots);
        held.tries.spawn(async move {
            tokio::time::sleep(pause).await;
            let _slot = slots.acquire_owned().await.expect("nobody closes it");
            let outcome = fanout
                .enqueue_again(&shard, &messages, epoch, predecessor)
                .await;
            Tried {
                shard,
                number,
                records: messages.len(),
                outcome,
            }
        });
    }

    /// Handles the result of a retry. Returns an error, which ends the reader, if the cause is not
    /// this shard alone.
    pub(super) async fn tried(
        &self,
        Tried {
            shard,
            number,
            records,
            outcome,
        }: Tried,
        reader: &mut dyn Reader,
        owned: &mut Owned,
        held: &mut HeldShards,
        uncommitted: &mut Uncommitted,
    ) -> Result<(), Error> {
        let Some(partition) = held.partitions.get_mut(&shard.number) else {
            return Ok(());
        };
        let waiting = partition.shards.get_mut(&shard);
        // There is none if the partition was forgotten since.
        let Some(waiting) = waiting.filter(|waiting| waiting.number == number) else {
            return Ok(());
        };
        match outcome {
            Ok(Enqueuing::Done { .. }) => {
                for message in waiting.messages.drain(..records) {
                    partition.records -= 1;
                    partition.bytes -= message.value.len();
                    owned.last.insert(shard.clone(), message.offset);
                }
                waiting.pause = Duration::ZERO;
                if waiting.messages.is_empty() {
                    tracing::debug!(%shard, "{shard} takes tasks again");
                    partition.shards.remove(&shard);
                    // The end of the hold has reset the shortcut's progress in this partition.
                    if let Some(shortcut) = &self.0.shortcut {
                        shortcut.note_read(shard.number, partition.last);
                    }
                }
                if partition.shards.is_empty() {
                    let offset = partition.last;
                    let partition = shard.number;
                    held.forget(partition);
                    uncommitted.add(vec![Message {
                        partition,
                        offset,
                        value: Default::default(),
                    }]);
                    say_taken(partition);
                }
            }
            Ok(Enqueuing::Behind) => {
                uncommitted.retain(|message| message.partition != shard.number);
                self.seek_back(shard.number, reader, owned, held).await?;
            }
            Ok(Enqueuing::Gone) => return Err(self.lost(shard).await),
            Err(Error::Enqueue { cause, .. }) if is_of_shard(&cause) => {
                tracing::debug!(%shard, "{shard} still takes no tasks: {cause}");
                waiting.pause = (2 * waiting.pause).clamp(SHORTEST, LONGEST);
                waiting.cause = cause;
                held.say_held(shard.number);
            }
            Err(error) => return Err(error),
        }
        self.try_again(&shard, owned, held);
        Ok(())
    }
}
