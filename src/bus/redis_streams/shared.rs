//! Shared reading: one consumer group, whose entries go to any consumer that asks.
//!
//! A delivered entry stays in its consumer's pending list until it is acknowledged. So nothing is
//! lost when a consumer dies (others take over its entries after its deadline) or when a response
//! does not arrive (the reader reads its own pending list again). Acknowledged entries are deleted,
//! so the stream contains only entries that are still to be processed.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use redis::{Cmd, RedisError, RedisResult, Value};

use super::{
    blocking::{BLOCK, BlockingConnection},
    buffer::Buffer,
    consumer::Consumer,
    failure::Failure,
    reply::{self, Entry},
    streams::{Streams, messages},
};
use crate::{
    bus::{Error, Message, Reader, Result, Topic},
    model::Offset,
    redis_pool::{Batch, scripts},
};

const GROUP: &str = "taskd";
/// How often to check for entries of dead consumers.
const TAKE_OVER_EVERY: Duration = Duration::from_secs(5);
/// The maximum number of entries to take over from each partition at once.
const TAKEN_OVER: usize = 100;

/// The purpose of a read.
#[derive(Clone, Copy)]
enum Step {
    /// Entries that this consumer received before and has not acknowledged.
    Own,
    /// Entries that dead consumers hold.
    TakeOver,
    /// Entries that no consumer has received yet.
    New,
}

pub(super) struct Shared {
    streams: Arc<Streams>,
    topic: Topic,
    keys: Vec<String>,
    consumer: Consumer,
    /// How far this consumer's own pending list has been read again, by partition. `None` once it
    /// was read to its end.
    own: Option<Vec<Offset>>,
    /// A reader counts as dead if it has not checked for entries of others for this long.
    take_over_after: Duration,
    next_take_over: Instant,
    /// Unacknowledged entries that are in `buffer` or have been returned. If a pending list
    /// contains them again, they must not be returned twice.
    held: HashSet<(u32, Offset)>,
    conn: BlockingConnection<Step>,
    buffer: Buffer,
}

impl Shared {
    pub(super) async fn open(
        streams: Arc<Streams>,
        topic: Topic,
        process: &str,
        take_over_after: Duration,
    ) -> Result<Self> {
        let keys = streams.keys(topic);
        let none = vec![Offset::default(); keys.len()];
        let this = Self {
            consumer: Consumer::new(streams.clone(), topic, process),
            own: Some(none),
            take_over_after,
            next_take_over: Instant::now(),
            held: HashSet::new(),
            conn: BlockingConnection::new(streams.redis.clone()),
            buffer: Buffer::new(keys.len()),
            streams,
            topic,
            keys,
        };
        create_group(&this.streams, &this.keys)
            .await
            .map_err(Error::read(topic))?;
        this.streams.note_reader(topic, &this.consumer.name);
        Ok(this)
    }

    /// Reads once. May find no records.
    async fn fetch(&mut self, max: usize) -> Result<()> {
        let count = self.buffer.count(max);
        let ask = || {
            let ask = Ask {
                keys: &self.keys,
                consumer: &self.consumer.name,
                count,
            };
            match &self.own {
                Some(behind) => (Step::Own, alone(ask.own(behind))),
                None if self.next_take_over <= Instant::now() => {
                    let readers = self.streams.readers_key(self.topic);
                    (
                        Step::TakeOver,
                        ask.take_over(
                            &readers,
                            self.take_over_after,
                            self.streams.clock.moved_unix_ms(),
                        ),
                    )
                }
                None => (Step::New, alone(ask.new_entries())),
            }
        };
        let absorbed = match self.conn.exchange(ask).await {
            Ok((step, answers)) => self.absorb(step, answers),
            Err(error) => Err(error),
        };
        match absorbed {
            Err(error) if group_is_gone(&error) => {
                let created = create_group(&self.streams, &self.keys).await;
                self.held.clear();
                created.map_err(Error::read(self.topic))
            }
            Err(error) => {
                // Redis may count entries as delivered although the response never arrived.
                self.read_own_again();
                Err(Error::read(self.topic)(error))
            }
            Ok(()) => Ok(()),
        }
    }

    fn absorb(&mut self, step: Step, answers: Vec<RedisResult<Value>>) -> RedisResult<()> {
        let mut answers = answers.into_iter();
        let mut first = || answers.next().unwrap_or(Ok(Value::Nil));
        match step {
            Step::Own => self.absorb_own(first()?),
            Step::New => {
                for (key, entries) in reply::streams(first()?)? {
                    self.add(&key, entries);
                }
                Ok(())
            }
            Step::TakeOver => self.absorb_taken_over(answers.collect::<RedisResult<_>>()?),
        }
    }

    fn absorb_own(&mut self, answer: Value) -> RedisResult<()> {
        let mut behind = self.own.take().unwrap_or_else(|| self.no_offsets());
        let mut more = false;
        for (key, entries) in reply::streams(answer)? {
            if let (Some(index), Some(last)) = (self.index(&key), entries.last()) {
                behind[index] = last.offset;
                more = true;
            }
            self.add(&key, entries);
        }
        self.own = more.then_some(behind);
        Ok(())
    }

    fn absorb_taken_over(&mut self, answers: Vec<Value>) -> RedisResult<()> {
        let mut is_more = false;
        for (index, answer) in answers.into_iter().enumerate() {
            let (more, entries) = reply::taken_over(answer)?;
            is_more |= more;
            self.add_to(index, entries);
        }
        if !is_more {
            self.next_take_over = Instant::now() + TAKE_OVER_EVERY.min(self.take_over_after / 2);
            // A blocked read of an earlier reader with this name may still have been waiting, and
            // Redis may have delivered entries to it.
            self.read_own_again();
        }
        Ok(())
    }

    fn add(&mut self, key: &[u8], entries: Vec<Entry>) {
        if let Some(index) = self.index(key) {
            self.add_to(index, entries);
        }
    }

    fn add_to(&mut self, index: usize, entries: Vec<Entry>) {
        let mut messages = messages(index, entries);
        messages.retain(|message| self.held.insert((message.partition, message.offset)));
        self.buffer.add(messages);
    }

    fn read_own_again(&mut self) {
        self.own = Some(self.no_offsets());
    }

    fn no_offsets(&self) -> Vec<Offset> {
        vec![Offset::default(); self.keys.len()]
    }

    fn index(&self, key: &[u8]) -> Option<usize> {
        self.keys.iter().position(|k| k.as_bytes() == key)
    }
}

/// Creates the group in each partition where it is missing, starting at the first entry.
async fn create_group(streams: &Streams, keys: &[String]) -> RedisResult<()> {
    let mut create = scripts::BUS_GROUP.call(keys);
    create.arg(GROUP);
    create.run(&mut streams.redis.conn()).await.map(drop)
}

/// True if Redis was emptied. Redis 7.0 answers NOGROUP to the next read; later versions also
/// answer UNBLOCKED to a read that is waiting.
fn group_is_gone(error: &RedisError) -> bool {
    matches!(error.code(), Some("NOGROUP" | "UNBLOCKED"))
}

/// The commands of a read.
struct Ask<'a> {
    keys: &'a [String],
    consumer: &'a str,
    count: usize,
}

impl Ask<'_> {
    fn own(&self, behind: &[Offset]) -> Cmd {
        let mut read = self.read_group();
        read.arg("STREAMS").arg(self.keys);
        for offset in behind {
            read.arg(offset.to_string());
        }
        read
    }

    fn new_entries(&self) -> Cmd {
        let mut read = self.read_group();
        read.arg("BLOCK")
            .arg(BLOCK.as_millis() as u64)
            .arg("STREAMS")
            .arg(self.keys);
        for _ in self.keys {
            read.arg(">");
        }
        read
    }

    fn read_group(&self) -> Cmd {
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP")
            .arg(GROUP)
            .arg(self.consumer)
            .arg("COUNT")
            .arg(self.count);
        read
    }

    fn take_over(&self, readers: &str, lives: Duration, now: Option<i64>) -> Batch {
        let mut batch = Batch::default();
        for key in self.keys {
            let mut call = scripts::BUS_TAKE_OVER
                .call(&[key.as_str(), readers])
                .now(now);
            call.arg(GROUP)
                .arg(self.consumer)
                .arg(lives.as_millis() as u64)
                .arg(self.count.min(TAKEN_OVER));
            batch.script(call);
        }
        batch
    }
}

fn alone(command: Cmd) -> Batch {
    let mut batch = Batch::default();
    batch.command(command);
    batch
}

#[async_trait]
impl Reader for Shared {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        while self.buffer.is_empty() {
            self.fetch(max).await?;
        }
        Ok(self.buffer.take(max))
    }

    async fn stay(&mut self) -> Result<()> {
        Err(Error::read(self.topic)(Failure::NoPosition))
    }

    /// After an `Err`, all unacknowledged records are delivered again.
    async fn commit(&mut self, messages: &[Message]) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let mut pipe = redis::pipe();
        for (partition, ids) in by_partition(messages) {
            let key = self.streams.key(self.topic, partition);
            // XDEL first: if only XDEL is executed, the pending list keeps an id without an entry,
            // which XAUTOCLAIM removes. In the other order an entry could remain that no consumer
            // ever gets.
            pipe.cmd("XDEL").arg(&key).arg(&ids).ignore();
            pipe.cmd("XACK").arg(&key).arg(GROUP).arg(&ids).ignore();
        }
        let done: RedisResult<()> = pipe.query_async(&mut self.streams.redis.conn()).await;
        if let Err(error) = done {
            self.held.clear();
            self.buffer.clear();
            // The response of a read in flight may cover a later part of the own pending list. It
            // must not be taken for the start of the list.
            self.conn.reset();
            self.read_own_again();
            return Err(Error::commit(self.topic)(error));
        }
        for message in messages {
            self.held.remove(&(message.partition, message.offset));
        }
        Ok(())
    }

    fn tenure(&self, _partition: u32) -> u64 {
        0
    }

    async fn seek(&mut self, _partition: u32, _after: Option<Offset>) -> Result<()> {
        Err(Error::read(self.topic)(Failure::NoPosition))
    }
}

fn by_partition(messages: &[Message]) -> HashMap<u32, Vec<String>> {
    let mut ids: HashMap<u32, Vec<String>> = HashMap::new();
    for message in messages {
        ids.entry(message.partition)
            .or_default()
            .push(message.offset.to_string());
    }
    ids
}
