//! Shards whose calls fail. Their records wait here, so that the other shards of the partition go
//! on.
//!
//! A shard is held from its first failed call until it has taken all its records. Later ones join
//! them, so the order stays. One task for each shard tries the first of them from time to time. It
//! reads them as if they had just come: their tasks may be cancelled since.
//!
//! Nothing of such a partition is committed meanwhile. So whatever ends the reader or takes the
//! partition from it, the records come again, and the shards know those that they have. A try of
//! before may still reach Redis then. It has the epoch of before, and begins with the same record.
//!
//! A reader that would leave too much uncommitted reads no more until it may commit, and shows no
//! progress. It stays in its group: other readers would fill up with the same records.

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
    bus::{Message, Subscription, Uncommitted},
    model::{Offset, ShardId},
    pipelines::shortcut::HeldBack,
    queue,
    runtime::{LastSaid, tick_after},
    wire,
};

/// The most that a reader leaves uncommitted because of held shards, also of the other shards of
/// their partitions. Redis Streams keep it in memory, and a new reader gets it again.
const RECORDS: usize = 100_000;
const BYTES: usize = 64 << 20;
/// Tries that call Redis at a time.
const AT_ONCE: usize = 64;
/// Roughly the most bytes of a try.
const CALL_BYTES: usize = 4 << 20;
/// The pauses before the tries of a shard double within these bounds.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The held shards of a reader, by partition.
pub(super) struct HeldShards {
    partitions: BTreeMap<u32, Partition>,
    tries: JoinSet<Tried>,
    slots: Arc<Semaphore>,
    /// Tries that have ended, and when they are dealt with.
    ended: Vec<Tried>,
    due: Instant,
    /// Shards that were ever held.
    count: u64,
}

struct Partition {
    tenure: u64,
    /// The first record that is not committed.
    first: Offset,
    /// The last record that was read, of any shard.
    last: Offset,
    /// Records since the first, without those that held shards have taken since.
    records: usize,
    bytes: usize,
    shards: BTreeMap<ShardId, Waiting>,
}

struct Waiting {
    number: u64,
    messages: VecDeque<Message>,
    cause: queue::Error,
    /// Before the next try; none behind one that Redis took.
    pause: Duration,
    _held_back: Option<HeldBack>,
}

/// The end of a try.
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

    /// Holds the batch's records of held shards.
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

    /// False while the reader has no room, or a shard takes its records again. Later ones would
    /// join those, so that the hold would not end, and nothing would be committed, for as long as
    /// records come.
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

    /// Forgets what is held of a partition. Answers the record from which on all have to come
    /// again.
    pub(super) fn forget(&mut self, partition: u32) -> Option<Offset> {
        self.partitions
            .remove(&partition)
            .map(|partition| partition.first)
    }

    /// Forgets partitions that this reader has lost, even if it has got them again: their records
    /// come again.
    pub(super) fn forget_lost(&mut self, subscription: &dyn Subscription) {
        self.partitions
            .retain(|number, partition| subscription.tenure(*number) == partition.tenure);
    }

    /// The tries that have ended at a [tick](crate::runtime::tick); never where nothing is held.
    ///
    /// Each end interrupts the reader's read, and thousands of shards may be held: one by one they
    /// would leave it no time. Cancel safe.
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

    /// Ends the tries.
    pub(super) async fn end(mut self) {
        self.tries.shutdown().await;
    }
}

/// The end of a try. The runtime cancels tries when the process ends.
fn end(joined: Result<Tried, JoinError>) -> Option<Tried> {
    match joined.map_err(JoinError::try_into_panic) {
        Ok(tried) => Some(tried),
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => None,
    }
}

/// The log's lines about a partition. Readers come and go while its shards refuse calls.
struct Said {
    refusal: LastSaid,
    /// The log named a refusal, and not its end.
    is_open: bool,
}

static SAID: Mutex<BTreeMap<u32, Said>> = Mutex::new(BTreeMap::new());

impl HeldShards {
    /// Says once a minute which shards of the partition are held. Another cause is news.
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

    /// Says once a minute that the reader reads no more.
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

/// Says that a partition has no held shard any more.
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
    /// Begins to hold shards that have refused their records of this batch, and holds those of all
    /// held shards.
    ///
    /// `has_done`: Redis took other groups of the batch. If it takes no write at all, the shards
    /// are not the cause.
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

    /// Begins a try of a held shard.
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

    /// Goes on behind a try. Ends the reader with an error that is not of this shard alone.
    pub(super) async fn tried(
        &self,
        Tried {
            shard,
            number,
            records,
            outcome,
        }: Tried,
        subscription: &mut dyn Subscription,
        owned: &mut Owned,
        held: &mut HeldShards,
        uncommitted: &mut Uncommitted,
    ) -> Result<(), Error> {
        let Some(partition) = held.partitions.get_mut(&shard.number) else {
            return Ok(());
        };
        let waiting = partition.shards.get_mut(&shard);
        // Of a partition that was forgotten since.
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
                    // The end of the hold took this back.
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
                self.seek_back(shard.number, subscription, owned, held)
                    .await?;
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
