//! Ordered reading: XREAD behind a position of our own, of the partitions that are ours (`lua/bus_own.lua`).
//!
//! Not a consumer group: with one, an entry that a consumer holds falls below the position that another one has committed.
//!
//! Who was held up for longer than [`LIVES`] may have lost a partition without knowing it. What it does then is refused by the queue, to
//! which the next owner comes with a higher epoch.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use redis::{Cmd, RedisResult, Value};

use super::{Streams, buffer::Buffer, consumer::Consumer, line::Line, reply};
use crate::{
    bus::{Error, Message, Result, Subscription, Topic},
    model::Offset,
    redis_pool::{Batch, scripts},
};

/// A reader that has not looked for so long is taken for dead, and its partitions go to others.
const LIVES: Duration = Duration::from_secs(3);
/// How often it looks, and so how long a read waits in Redis for something to come.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub(super) struct Ordered {
    streams: Arc<Streams>,
    topic: Topic,
    keys: Vec<String>,
    consumer: Consumer,
    /// By partition of ours.
    owned: BTreeMap<u32, Own>,
    /// Where to begin with partitions that are not ours yet, instead of behind what is committed.
    begin_at: HashMap<u32, Offset>,
    next_look: Instant,
    line: Line<()>,
    buffer: Buffer,
}

#[derive(Clone, Copy)]
struct Own {
    tenure: u64,
    /// The last record that is in the buffer or was handed out.
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
            line: Line::new(streams.redis.clone()),
            buffer: Buffer::new(keys.len()),
            streams,
            topic,
            keys,
        };
        this.look().await?;
        Ok(this)
    }

    /// Says that we live, and begins with what is ours since the last look behind what was committed. Cancel safe: nothing of ours changes
    /// before the last answer is there.
    async fn look(&mut self) -> Result<()> {
        let ours = self.streams.own(self.topic, &self.consumer.name, LIVES).await.map_err(|e| read(self.topic, &e))?;
        let had = |partition: &u32, tenure: u64| self.owned.get(partition).is_some_and(|own| own.tenure == tenure);
        let new: Vec<_> = ours.iter().filter(|(partition, tenure)| !had(partition, **tenure)).collect();
        let mut pipe = redis::pipe();
        for (partition, _) in &new {
            pipe.cmd("GET").arg(super::committed_key(&self.streams.key(self.topic, **partition)));
        }
        // Read after the positions: if it is still the one we know, they belong to it.
        pipe.add_command(self.streams.ask_generation());
        let answered = pipe.query_async(&mut self.streams.redis.conn()).await;
        let mut positions: Vec<Option<String>> = answered.map_err(|e| read(self.topic, &e))?;
        self.streams.check_generation(positions.pop().flatten().as_deref())?;
        let positions: Result<Vec<_>, _> = positions.iter().map(|id| super::position(id.as_deref())).collect();
        let positions =
            positions.map_err(|e| Error::Read { topic: self.topic, reason: format!("committed position: {e}") })?;

        let new: BTreeMap<u32, Offset> = new.into_iter().map(|(partition, _)| *partition).zip(positions).collect();
        if !new.is_empty() || ours.len() < self.owned.len() {
            // A read that is under way asks for what was ours before.
            self.line.reset();
            self.buffer
                .retain(|message| ours.contains_key(&message.partition) && !new.contains_key(&message.partition));
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

    /// Waits a moment for records.
    async fn fetch(&mut self, max: usize) -> Result<()> {
        if self.owned.is_empty() {
            tokio::time::sleep_until(self.next_look.into()).await;
            return Ok(());
        }
        let topic = self.topic;
        let count = self.buffer.count(max);
        let ask = || ((), ask(&self.keys, &self.owned, count, self.streams.ask_generation()));
        let ((), answers) = self.line.exchange(ask).await.map_err(|e| read(topic, &e))?;
        self.absorb(answers)
    }

    fn absorb(&mut self, answers: Vec<RedisResult<Value>>) -> Result<()> {
        let topic = self.topic;
        let mut answers = answers.into_iter().collect::<RedisResult<Vec<_>>>().map_err(|e| read(topic, &e))?;
        let generation: Option<String> = answers.pop().and_then(|value| redis::from_redis_value(value).ok());
        self.streams.check_generation(generation.as_deref())?;
        for (key, entries) in reply::streams(answers.pop().unwrap_or(Value::Nil)).map_err(|e| read(topic, &e))? {
            let Some(index) = self.keys.iter().position(|k| k.as_bytes() == key) else { continue };
            let own = u32::try_from(index).ok().and_then(|partition| self.owned.get_mut(&partition));
            if let (Some(own), Some(last)) = (own, entries.last()) {
                own.position = last.offset;
                self.buffer.add(super::messages(index, entries));
            }
        }
        Ok(())
    }
}

/// The generation is read behind the records: a Redis that lost everything while we waited has another one or none, and then the
/// records are not those that stand behind our positions.
fn ask(keys: &[String], owned: &BTreeMap<u32, Own>, count: usize, generation: Cmd) -> Batch {
    let (mut batch, mut read) = (Batch::default(), redis::cmd("XREAD"));
    read.arg("COUNT").arg(count).arg("BLOCK").arg(LOOK_EVERY.as_millis() as u64).arg("STREAMS");
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

fn read(topic: Topic, error: &redis::RedisError) -> Error {
    Error::Read { topic, reason: error.to_string() }
}

#[async_trait]
impl Subscription for Ordered {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        loop {
            // Also while there is something in the buffer: who works through many records slowly lives, and who lost them meanwhile must know.
            if self.next_look <= Instant::now() {
                self.look().await?;
            }
            if !self.buffer.is_empty() {
                return Ok(self.buffer.take(max));
            }
            self.fetch(max).await?;
        }
    }

    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        let topic = self.topic;
        let mut batch = Batch::default();
        for (partition, highest) in crate::bus::highest(messages) {
            let key = self.streams.key(topic, partition);
            let mut call = scripts::BUS_COMMIT.call(&[&key, &super::committed_key(&key)]);
            call.arg(highest.major).arg(highest.minor);
            batch.script(call);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let done = batch.run_all(&mut self.streams.redis.conn()).await;
        done.map(drop).map_err(|e| Error::Commit { topic, reason: e.to_string() })
    }

    fn tenure(&self, partition: u32) -> u64 {
        self.owned.get(&partition).map_or(0, |own| own.tenure)
    }

    /// What was committed is no longer there to go back to.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()> {
        if partition as usize >= self.keys.len() {
            return Err(Error::Read { topic: self.topic, reason: format!("no partition {partition}") });
        }
        let position = after.unwrap_or_default();
        match self.owned.get_mut(&partition) {
            Some(own) => own.position = position,
            None => drop(self.begin_at.insert(partition, position)),
        }
        self.buffer.retain(|message| message.partition != partition);
        // A read that is under way asks behind the old position.
        self.line.reset();
        Ok(())
    }
}
