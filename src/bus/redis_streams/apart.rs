//! A reader that is in no group: it reads the streams as they are.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use redis::{RedisError, Value};

use super::{
    reply,
    streams::{Streams, messages},
};
use crate::{
    bus::{Apart, Error, Message, Result, Topic},
    model::Offset,
    redis_pool::Batch,
};

/// How often a reader at the end of all partitions asks for more, and how often before it answers.
const ASK_EVERY: Duration = Duration::from_millis(200);
const ASKED: usize = 5;

pub(super) struct ApartReader {
    streams: Arc<Streams>,
    topic: Topic,
    after: Vec<Option<Offset>>,
}

impl ApartReader {
    pub(super) fn new(streams: Arc<Streams>, topic: Topic, after: Vec<Option<Offset>>) -> Self {
        Self {
            streams,
            topic,
            after,
        }
    }

    async fn read(&mut self, max: usize) -> Result<Vec<Message>> {
        let mut batch = Batch::default();
        for (key, after) in self.streams.keys(self.topic).iter().zip(&self.after) {
            let mut range = redis::cmd("XRANGE");
            let from = after.map_or_else(|| "-".to_owned(), |after| format!("({after}"));
            range.arg(key).arg(from).arg("+").arg("COUNT").arg(max);
            batch.command(range);
        }
        // Read behind them, so that offsets of another generation are recognized.
        batch.command(self.streams.ask_generation());
        let answered = batch.run_all(&mut self.streams.redis.conn()).await;
        let mut answers: Vec<Value> = answered.map_err(Error::read::<RedisError>(self.topic))?;
        let generation: Option<String> = answers
            .pop()
            .and_then(|value| redis::from_redis_value(value).ok());
        self.streams.check_generation(generation.as_deref())?;
        let mut read = Vec::new();
        for (partition, answer) in answers.into_iter().enumerate() {
            let entries = reply::entries(answer).map_err(Error::read(self.topic))?;
            let messages = messages(partition, entries);
            if let Some(last) = messages.last() {
                self.after[partition] = Some(last.offset);
            }
            read.extend(messages);
        }
        Ok(read)
    }
}

#[async_trait]
impl Apart for ApartReader {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        for _ in 0..ASKED {
            let read = self.read(max).await?;
            if !read.is_empty() {
                return Ok(read);
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
        Ok(Vec::new())
    }
}
