//! Ordered reading: XREAD from the reader's own positions in the partitions that it owns
//! (`lua/bus_own.lua`).
//!
//! A consumer group would not work: an entry that one consumer still holds could be below the
//! position that another consumer has committed.
//!
//! A reader that is delayed for longer than [`LIVES`] may have lost a partition without noticing.
//! The queue then refuses its records, because the next owner has a higher epoch.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use redis::{Cmd, RedisError, RedisResult, Value};

use super::{
    blocking::BlockingConnection,
    buffer::Buffer,
    consumer::Consumer,
    failure::Failure,
    reply,
    streams::{Streams, committed_key, messages, position},
};
use crate::{
    bus::{Error, Message, Reader, Result, Topic},
    model::Offset,
    redis_pool::{Batch, scripts},
};

/// If a reader does not renew its deadline for this long, it counts as dead, and its partitions go
/// to others.
const LIVES: Duration = Duration::from_secs(3);
/// How often a reader renews its deadline. This is also the longest that a read waits in Redis for
/// records.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub(super) struct Ordered {
    streams: Arc<Streams>,
    topic: Topic,
    keys: Vec<String>,
    consumer: Consumer,
    /// The partitions that this reader owns.
    owned: BTreeMap<u32, Own>,
    /// Where to start reading partitions that are not owned yet, instead of after the committed
    /// offset.
    begin_at: HashMap<u32, Offset>,
    next_look: Instant,
    conn: BlockingConnection<()>,
    buffer: Buffer,
}

#[derive(Clone, Copy)]
struct Own {
    tenure: u64,
    /// The last record that is in the buffer or has been returned.
    position: Offset,
}

impl Ordered {
    pub(super) async fn open(streams: Arc<Streams>, topic: Topic, process: &str) -> Result<Self> {
        let keys = streams.keys(topic);
        let mut this = Self {
            consumer: Consumer::new(streams.clone(), topic, process),
            owned: BTreeMap::new(),
            begin_at: HashMap::new(),
            next_look: Instant::now(),
            conn: BlockingConnection::new(streams.redis.clone()),
            buffer: Buffer::new(keys.len()),
            streams,
            topic,
            keys,
        };
        this.look().await?;
        Ok(this)
    }

    /// Renews the reader's deadline, and starts reading newly owned partitions after their
    /// committed offsets.
    ///
    /// Cancel safe: no field changes before the last response has arrived.
    async fn look(&mut self) -> Result<()> {
        let ours = self
            .streams
            .own(self.topic, &self.consumer.name, LIVES)
            .await
            .map_err(Error::read(self.topic))?;
        let had = |partition: &u32, tenure: u64| {
            self.owned
                .get(partition)
                .is_some_and(|own| own.tenure == tenure)
        };
        let new: Vec<_> = ours
            .iter()
            .filter(|(partition, tenure)| !had(partition, **tenure))
            .collect();
        let mut pipe = redis::pipe();
        for (partition, _) in &new {
            pipe.cmd("GET")
                .arg(committed_key(&self.streams.key(self.topic, **partition)));
        }
        // Read after the positions: if the generation is unchanged, the positions belong to it.
        pipe.add_command(self.streams.ask_generation());
        let answered = pipe.query_async(&mut self.streams.redis.conn()).await;
        let mut positions: Vec<Option<String>> =
            answered.map_err(Error::read::<RedisError>(self.topic))?;
        self.streams
            .check_generation(positions.pop().flatten().as_deref())?;
        let positions: Result<Vec<_>, _> =
            positions.iter().map(|id| position(id.as_deref())).collect();
        let positions = positions.map_err(|e| Error::read(self.topic)(Failure::Committed(e)))?;

        let new: BTreeMap<u32, Offset> = new
            .into_iter()
            .map(|(partition, _)| *partition)
            .zip(positions)
            .collect();
        if !new.is_empty() || ours.len() < self.owned.len() {
            // A read in flight was for the previous set of partitions.
            self.conn.reset();
            self.buffer.retain(|message| {
                ours.contains_key(&message.partition) && !new.contains_key(&message.partition)
            });
        }
        let own = |(partition, tenure)| {
            let position = match (new.get(&partition), self.owned.get(&partition)) {
                (Some(committed), _) => self.begin_at.remove(&partition).unwrap_or(*committed),
                (None, had) => had.map(|own| own.position).unwrap_or_default(),
            };
            (partition, Own { tenure, position })
        };
        self.owned = ours.into_iter().map(own).collect();
        self.next_look = Instant::now() + LOOK_EVERY;
        Ok(())
    }

    /// Waits up to [`LOOK_EVERY`] for records.
    async fn fetch(&mut self, max: usize) -> Result<()> {
        if self.owned.is_empty() {
            tokio::time::sleep_until(self.next_look.into()).await;
            return Ok(());
        }
        let topic = self.topic;
        let count = self.buffer.count(max);
        let ask = || {
            (
                (),
                ask(
                    &self.keys,
                    &self.owned,
                    count,
                    self.streams.ask_generation(),
                ),
            )
        };
        let ((), answers) = self.conn.exchange(ask).await.map_err(Error::read(topic))?;
        self.absorb(answers)
    }

    fn absorb(&mut self, answers: Vec<RedisResult<Value>>) -> Result<()> {
        let topic = self.topic;
        let mut answers = answers
            .into_iter()
            .collect::<RedisResult<Vec<_>>>()
            .map_err(Error::read(topic))?;
        let generation: Option<String> = answers
            .pop()
            .and_then(|value| redis::from_redis_value(value).ok());
        self.streams.check_generation(generation.as_deref())?;
        for (key, entries) in
            reply::streams(answers.pop().unwrap_or(Value::Nil)).map_err(Error::read(topic))?
        {
            let Some(index) = self.keys.iter().position(|k| k.as_bytes() == key) else {
                continue;
            };
            let own = u32::try_from(index)
                .ok()
                .and_then(|partition| self.owned.get_mut(&partition));
            if let (Some(own), Some(last)) = (own, entries.last()) {
                own.position = last.offset;
                self.buffer.add(messages(index, entries));
            }
        }
        Ok(())
    }
}

/// The commands of a read.
///
/// The generation is read after the records: if Redis loses its data during the wait, the
/// generation is different or absent, and the records do not continue from the reader's positions.
fn ask(keys: &[String], owned: &BTreeMap<u32, Own>, count: usize, generation: Cmd) -> Batch {
    let mut batch = Batch::default();
    let mut read = redis::cmd("XREAD");
    read.arg("COUNT")
        .arg(count)
        .arg("BLOCK")
        .arg(LOOK_EVERY.as_millis() as u64)
        .arg("STREAMS");
    for partition in owned.keys() {
        read.arg(&keys[*partition as usize]);
    }
    for own in owned.values() {
        read.arg(own.position.to_string());
    }
    batch.command(read);
    batch.command(generation);
    batch
}

#[async_trait]
impl Reader for Ordered {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        loop {
            // Renew the deadline even while the buffer has records: a slow reader must keep its
            // partitions, and must notice those that it has lost.
            if self.next_look <= Instant::now() {
                self.look().await?;
            }
            if !self.buffer.is_empty() {
                return Ok(self.buffer.take(max));
            }
            self.fetch(max).await?;
        }
    }

    async fn stay(&mut self) -> Result<()> {
        tokio::time::sleep_until(self.next_look.into()).await;
        self.look().await
    }

    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        let topic = self.topic;
        let mut batch = Batch::default();
        for (partition, highest) in crate::bus::highest(messages) {
            let key = self.streams.key(topic, partition);
            let mut call = scripts::BUS_COMMIT.call(&[&key, &committed_key(&key)]);
            call.arg(highest.major).arg(highest.minor);
            batch.script(call);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let done = batch.run_all(&mut self.streams.redis.conn()).await;
        done.map(drop).map_err(Error::commit::<RedisError>(topic))
    }

    fn tenure(&self, partition: u32) -> u64 {
        self.owned.get(&partition).map_or(0, |own| own.tenure)
    }

    /// Continues after `after`. Committed records no longer exist.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()> {
        if partition as usize >= self.keys.len() {
            return Err(Error::read(self.topic)(Failure::NoPartition(partition)));
        }
        let position = after.unwrap_or_default();
        match self.owned.get_mut(&partition) {
            Some(own) => own.position = position,
            None => drop(self.begin_at.insert(partition, position)),
        }
        self.buffer.retain(|message| message.partition != partition);
        // A read in flight starts from the old position.
        self.conn.reset();
        Ok(())
    }
}
