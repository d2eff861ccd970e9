//! Ordered reading: XREAD behind a position of our own.
//!
//! Not a consumer group: with one, an entry that a consumer holds falls below the position that another one has committed.

use std::sync::Arc;

use async_trait::async_trait;
use redis::{RedisResult, Value};

use super::{
    Streams,
    buffer::Buffer,
    line::{BLOCK, Line},
    reply,
};
use crate::{
    bus::{Error, Message, Result, Subscription, Topic},
    model::Offset,
};

pub(super) struct Ordered {
    streams: Arc<Streams>,
    topic: Topic,
    keys: Vec<String>,
    /// By partition: the last record that is in `buffer` or was handed out.
    positions: Vec<Offset>,
    line: Line<()>,
    buffer: Buffer,
}

impl Ordered {
    /// Begins behind what was committed.
    pub(super) async fn open(streams: Arc<Streams>, topic: Topic) -> Result<Self> {
        let keys = streams.keys(topic);
        let mut pipe = redis::pipe();
        for key in &keys {
            pipe.cmd("GET").arg(super::committed_key(key));
        }
        // Read after the positions: if it is still the one we know, they belong to it.
        pipe.cmd("GET").arg(streams.generation_key());
        let mut answers: Vec<Option<String>> =
            pipe.query_async(&mut streams.redis.conn()).await.map_err(|e| read(topic, &e))?;
        streams.check_generation(answers.pop().flatten().as_deref())?;
        let positions = answers.iter().map(|id| super::position(id.as_deref())).collect::<Result<_, _>>();
        let positions = positions.map_err(|e| Error::Read { topic, reason: format!("committed position: {e}") })?;
        let (line, buffer) = (Line::new(streams.redis.clone()), Buffer::new(keys.len()));
        Ok(Self { streams, topic, keys, positions, line, buffer })
    }

    /// Waits up to [`BLOCK`] for records.
    async fn fetch(&mut self, max: usize) -> Result<()> {
        let topic = self.topic;
        let count = self.buffer.count(max);
        let ask = || ((), ask(&self.keys, &self.positions, count, &self.streams.generation_key()));
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
            if let Some(last) = entries.last() {
                self.positions[index] = last.offset;
            }
            self.buffer.add(super::messages(index, entries));
        }
        Ok(())
    }
}

/// The generation is read behind the records: a Redis that lost everything while we waited has another one or none, and then the
/// records are not those that stand behind our positions.
fn ask(keys: &[String], positions: &[Offset], count: usize, generation_key: &str) -> redis::Pipeline {
    let mut pipe = redis::pipe();
    pipe.cmd("XREAD").arg("COUNT").arg(count).arg("BLOCK").arg(BLOCK.as_millis() as u64).arg("STREAMS").arg(keys);
    for position in positions {
        pipe.arg(position.to_string());
    }
    pipe.cmd("GET").arg(generation_key);
    pipe
}

fn read(topic: Topic, error: &redis::RedisError) -> Error {
    Error::Read { topic, reason: error.to_string() }
}

#[async_trait]
impl Subscription for Ordered {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        while self.buffer.is_empty() {
            self.fetch(max).await?;
        }
        Ok(self.buffer.take(max))
    }

    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        let topic = self.topic;
        let mut pipe = redis::pipe();
        for (partition, highest) in crate::bus::highest(messages) {
            let key = self.streams.key(topic, partition);
            pipe.cmd("EVAL").arg(include_str!("../../../lua/bus_commit.lua")).arg(2);
            pipe.arg(&key).arg(super::committed_key(&key)).arg(highest.major).arg(highest.minor).ignore();
        }
        if pipe.is_empty() {
            return Ok(());
        }
        let done = pipe.query_async(&mut self.streams.redis.conn()).await;
        done.map_err(|e| Error::Commit { topic, reason: e.to_string() })
    }

    /// What was committed is no longer there to go back to.
    async fn seek(&mut self, partition: u32, after: Option<Offset>) -> Result<()> {
        let position = self.positions.get_mut(partition as usize);
        let topic = self.topic;
        let position = position.ok_or_else(|| Error::Read { topic, reason: format!("no partition {partition}") })?;
        *position = after.unwrap_or_default();
        self.buffer.retain(|message| message.partition != partition);
        // A read that is under way asks behind the old position.
        self.line.reset();
        Ok(())
    }
}
