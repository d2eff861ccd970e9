//! Logs on Kafka: plain topics with keys and headers, read without a group.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use parking_lot::Mutex;
use rdkafka::{
    Message as _, Offset as Position, TopicPartitionList,
    admin::AdminOptions,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::{BorrowedMessage, Headers},
    producer::FutureProducer,
};
use tokio::sync::Semaphore;

use super::{
    calls::{ANSWER_WITHIN, Failure, blocking, index, offset, watermarks},
    clients::Clients,
    configs::create,
    consumer::is_passing,
    detached::Detached,
    events::ClientEvents,
    publish::Sent,
    topics::{self, TopicMetadata, Wanted},
    trim,
};
use crate::{
    bus::{Error, Keep, Log, LogEnd, LogMessage, LogRecord, Logs, PAGE_BYTES, Result, Retention},
    model::Offset,
};

/// The header with the id of a record.
const ID: &str = "taskd-id";
/// How many pages are read at once, each by a client of its own, and how many clients are kept.
const READERS: usize = 8;
/// How long a page waits for records that are there according to the broker.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// How often to look whether a deleted topic is gone.
const DELETED_EVERY: Duration = Duration::from_millis(50);

pub(super) struct KafkaLogs {
    clients: Arc<Clients>,
    /// How long new topics keep reports.
    retention: Duration,
    /// The topics that exist, with their partitions.
    made: Mutex<HashMap<String, u32>>,
    /// Clients that read nothing at the moment. They fetch nothing, because nothing is assigned to
    /// them.
    idle: Arc<Mutex<Vec<Reader>>>,
    turns: Arc<Semaphore>,
}

type Reader = Detached<BaseConsumer<ClientEvents>>;

impl KafkaLogs {
    pub(super) fn new(clients: Arc<Clients>, retention: Duration) -> Self {
        Self {
            clients,
            retention,
            made: Mutex::default(),
            idle: Arc::default(),
            turns: Arc::new(Semaphore::new(READERS)),
        }
    }

    /// The settings of the topic. Of reports other than events, taskd deletes old ones itself.
    pub(super) fn wanted(&self, log: &Log) -> Wanted {
        let is_report = log.is_report;
        Wanted {
            name: log.name.clone().into_owned(),
            partitions: log.partitions,
            age: Some(if is_report {
                self.retention
            } else {
                log.keep.age
            }),
            bytes: (!is_report).then(|| log.keep.of_each(log.partitions).bytes),
            is_left_to_broker: !is_report || *log == Log::EVENTS,
        }
    }

    pub(super) fn note_made(&self, found: &HashMap<String, u32>) {
        let found = found.iter().map(|(name, count)| (name.clone(), *count));
        self.made.lock().extend(found);
    }

    /// Runs `read` on a thread for blocking work, with a client of its own and the topic's name.
    async fn with_reader<T: Send + 'static>(
        &self,
        log: &Log,
        read: impl FnOnce(&BaseConsumer<ClientEvents>, &str) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T, Failure> {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.expect("it is never closed");
        let idle = Arc::clone(&self.idle);
        let clients = Arc::clone(&self.clients);
        let name = clients.configs.name(&log.name);
        // The thread reads on if nobody waits for it any more, so it keeps the turn and the client.
        let done = blocking(move || {
            let _turn = turn;
            let kept = idle.lock().pop();
            let reader: Reader = match kept {
                Some(reader) => reader,
                None => {
                    let events = ClientEvents::default();
                    Detached::new(create(&clients.configs.log_reader(), events)?)
                }
            };
            let done = read(&reader, &name)?;
            idle.lock().push(reader);
            Ok::<_, Failure>(done)
        })
        .await;
        if done.is_err() {
            self.forget(log);
        }
        done
    }

    fn look<'a>(
        &'a self,
        producer: &'a FutureProducer<ClientEvents>,
        wanted: &'a [Wanted],
    ) -> TopicMetadata<'a> {
        TopicMetadata {
            configs: &self.clients.configs,
            producer,
            events: &self.clients.events,
            wanted,
        }
    }

    /// The partitions of a log. Nobody makes a topic of users by reading it: it may have just been
    /// deleted. `None`: it does not exist.
    async fn partitions(&self, log: &Log) -> Result<Option<u32>> {
        let is_known = self.made.lock().contains_key(&*log.name);
        if log.is_report || is_known || self.exists(log).await? {
            return self.make(log).await.map(Some);
        }
        Ok(None)
    }

    async fn extents(&self, log: &Log) -> Result<Vec<Option<(Offset, Offset)>>> {
        let Some(partitions) = self.partitions(log).await? else {
            return Ok(vec![None; log.partitions as usize]);
        };
        let name = self.clients.configs.name(&log.name);
        let extents = self.clients.extents(name, partitions).await;
        if extents.is_err() {
            self.forget(log);
        }
        extents.map_err(Error::read(log.name.clone()))
    }

    /// After an error: the topic may have been deleted. In that case the next call makes it again.
    fn forget(&self, log: &Log) {
        self.made.lock().remove(&*log.name);
    }
}

#[async_trait]
impl Logs for KafkaLogs {
    async fn exists(&self, log: &Log) -> Result<bool> {
        let producer = self.clients.producer();
        let wanted = [self.wanted(log)];
        let missing = self.look(&producer, &wanted).missing().await?;
        Ok(missing.is_empty())
    }

    async fn make(&self, log: &Log) -> Result<u32> {
        let known = self.made.lock().get(&*log.name).copied();
        if let Some(count) = known.filter(|count| *count >= log.partitions) {
            return Ok(count);
        }
        let producer = self.clients.producer();
        let wanted = [self.wanted(log)];
        let look = self.look(&producer, &wanted);
        if log.is_attached {
            let (_, found) = look.look().await?;
            let topic = self.clients.configs.name(&log.name);
            let count = found.get(&*log.name).copied();
            let count = count.ok_or_else(|| Failure::NotThere { topic }.of_making())?;
            self.note_made(&found);
            return Ok(count);
        }
        let found = look.find_or_create(&self.clients.admin).await;
        let (_, mut found) = found.map_err(Failure::of_making)?;
        if found[&*log.name] < log.partitions {
            let name = self.clients.configs.name(&log.name);
            topics::raise(
                &self.clients.configs,
                &self.clients.admin,
                &name,
                log.partitions,
            )
            .await?;
            found.insert(log.name.clone().into_owned(), log.partitions);
        }
        self.note_made(&found);
        Ok(found[&*log.name])
    }

    async fn change(&self, log: &Log) -> Result<()> {
        if log.is_attached {
            return Ok(());
        }
        let wanted = self.wanted(log);
        topics::change(&self.clients.configs, &self.clients.admin, &wanted).await?;
        Ok(())
    }

    async fn delete(&self, log: &Log) -> Result<()> {
        if log.is_attached {
            return Ok(());
        }
        let name = self.clients.configs.name(&log.name);
        let failed = Error::trim::<KafkaError>(log.name.clone());
        let options = AdminOptions::new()
            .request_timeout(Some(ANSWER_WITHIN))
            .operation_timeout(Some(ANSWER_WITHIN));
        let deleted = self.clients.admin.delete_topics(&[&name], &options).await;
        for one in deleted.map_err(&failed)? {
            match one {
                Ok(_) | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition)) => {}
                Err((_, code)) => return Err(failed(KafkaError::AdminOp(code))),
            }
        }
        self.forget(log);
        // Brokers know the topic for a moment, and would still take records for it.
        let deadline = Instant::now() + ANSWER_WITHIN;
        while self.exists(log).await? {
            if Instant::now() >= deadline {
                return Err(failed(KafkaError::AdminOp(
                    RDKafkaErrorCode::RequestTimedOut,
                )));
            }
            tokio::time::sleep(DELETED_EVERY).await;
        }
        Ok(())
    }

    async fn append(&self, log: &Log, records: &[LogRecord]) -> Result<Vec<Offset>> {
        let partitions = self.make(log).await?;
        let asked = records.iter().map(|record| record.partition);
        crate::bus::check_partitions(log.name.clone(), asked, partitions)?;
        let sent = records.iter().map(sent).collect();
        let appended = self.clients.publish(log.name.clone(), sent).await;
        if appended.is_err() {
            self.forget(log);
        }
        appended
    }

    async fn read(
        &self,
        log: &Log,
        partition: u32,
        after: Option<Offset>,
        max: usize,
    ) -> Result<Vec<LogMessage>> {
        if self.partitions(log).await?.is_none() {
            return Ok(Vec::new());
        }
        let page = self.with_reader(log, move |reader, name| {
            page(reader, name, partition, after, max)
        });
        page.await.map_err(Error::read(log.name.clone()))
    }

    async fn first(&self, log: &Log) -> Result<Vec<Option<Offset>>> {
        let extents = self.extents(log).await?;
        Ok(extents
            .into_iter()
            .map(|extent| extent.map(|(first, _)| first))
            .collect())
    }

    async fn ends(&self, log: &Log) -> Result<Vec<Option<Offset>>> {
        let extents = self.extents(log).await?;
        Ok(extents
            .into_iter()
            .map(|extent| extent.map(|(_, last)| last))
            .collect())
    }

    async fn counted_end(&self, log: &Log, partition: u32) -> Result<LogEnd> {
        if self.partitions(log).await?.is_none() {
            return Ok(LogEnd::default());
        }
        let next = self.with_reader(log, move |reader, name| {
            Ok(watermarks(reader.client(), name, partition)?.1)
        });
        let next = next
            .await
            .map_err(Error::read::<Failure>(log.name.clone()))?;
        Ok(end(next))
    }

    async fn counted_ends(&self, log: &Log) -> Result<Vec<LogEnd>> {
        let Some(partitions) = self.partitions(log).await? else {
            return Ok(vec![LogEnd::default(); log.partitions as usize]);
        };
        let nexts = self.with_reader(log, move |reader, name| {
            let next = |partition| Ok(watermarks(reader.client(), name, partition)?.1);
            (0..partitions)
                .map(next)
                .collect::<Result<Vec<i64>, KafkaError>>()
        });
        let nexts = nexts
            .await
            .map_err(Error::read::<Failure>(log.name.clone()))?;
        Ok(nexts.into_iter().map(end).collect())
    }

    async fn at_time(&self, log: &Log, unix_ms: i64) -> Result<Vec<Option<Offset>>> {
        let ends = self.ends(log).await?;
        let Some(partitions) = self.partitions(log).await? else {
            return Ok(ends);
        };
        let places = self.with_reader(log, move |reader, name| {
            trim::places_at(reader, name, partitions, unix_ms)
        });
        let places = places.await.map_err(Error::read(log.name.clone()))?;
        let before = |(place, end): (Option<i64>, Option<Offset>)| match place {
            Some(place) => offset(place - 1),
            None => end,
        };
        Ok(places.into_iter().zip(ends).map(before).collect())
    }

    async fn trim(&self, log: &Log, keep: Retention) -> Result<u64> {
        if *log == Log::EVENTS || log.is_attached {
            return Ok(0);
        }
        let Some(partitions) = self.partitions(log).await? else {
            return Ok(0);
        };
        let keep = keep.of_each(partitions);
        let keep = Keep {
            age: keep.age,
            records: keep.records,
        };
        let cuts = self.with_reader(log, move |reader, name| {
            trim::cuts(reader, name, partitions, keep, None)
        });
        let failed = Error::trim::<Failure>(log.name.clone());
        let cuts = cuts.await.map_err(&failed)?;
        let name = self.clients.configs.name(&log.name);
        let trimmed = trim::delete(&self.clients.admin, &name, &cuts).await;
        trimmed.map_err(|error| failed(error.into()))
    }
}

/// The end of a partition whose next record gets this offset. Offsets count the records.
fn end(next: i64) -> LogEnd {
    LogEnd {
        last: offset(next - 1),
        count: u64::try_from(next).unwrap_or_default(),
    }
}

fn sent(record: &LogRecord) -> Sent {
    let mut sent = Sent::new(record.partition, record.value.clone());
    sent.key = record.key.clone();
    for (name, value) in &record.attributes {
        sent = sent.with_header(name, value);
    }
    if !record.id.is_empty() {
        sent = sent.with_header(ID, &record.id);
    }
    sent
}

/// Reads records that are there. Blocks.
fn page(
    reader: &BaseConsumer<ClientEvents>,
    name: &str,
    partition: u32,
    after: Option<Offset>,
    max: usize,
) -> Result<Vec<LogMessage>, KafkaError> {
    let (low, high) = watermarks(reader.client(), name, partition)?;
    let next = after.and_then(|after| i64::try_from(after.major).ok());
    let from = next.map_or(low, |after| after.saturating_add(1).max(low));
    let mut read = Vec::new();
    if from >= high {
        return Ok(read);
    }
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(name, index(partition), Position::Offset(from))?;
    reader.assign(&list)?;
    let deadline = Instant::now() + READ_WITHIN;
    let mut bytes = 0;
    while read.len() < max && bytes < PAGE_BYTES {
        match reader.poll(deadline.saturating_duration_since(Instant::now())) {
            Some(Ok(record)) => {
                let Some(message) = message(&record) else {
                    continue;
                };
                let is_last = record.offset() + 1 >= high;
                bytes += message.record.bytes();
                read.push(message);
                if is_last {
                    break;
                }
            }
            Some(Err(KafkaError::PartitionEOF(_))) => break,
            // The broker is slow. An empty page would say that there are no more records.
            None if read.is_empty() => {
                let code = RDKafkaErrorCode::OperationTimedOut;
                return Err(KafkaError::MessageConsumption(code));
            }
            None => break,
            Some(Err(error)) if is_passing(&error) && Instant::now() < deadline => {}
            Some(Err(error)) => return Err(error),
        }
    }
    reader.unassign()?;
    Ok(read)
}

fn message(message: &BorrowedMessage<'_>) -> Option<LogMessage> {
    let mut attributes = Vec::new();
    let mut id = String::new();
    for header in message.headers().iter().flat_map(|headers| headers.iter()) {
        let value = header.value.unwrap_or_default();
        match std::str::from_utf8(value) {
            Ok(text) if header.key == ID => id = text.to_owned(),
            Ok(text) => attributes.push((header.key.to_owned(), text.to_owned())),
            Err(_) => attributes.push((format!("{}_base64", header.key), BASE64.encode(value))),
        }
    }
    Some(LogMessage {
        offset: offset(message.offset())?,
        number: u64::try_from(message.offset()).ok()?,
        published_unix_ms: message.timestamp().to_millis().unwrap_or_default(),
        record: LogRecord {
            partition: u32::try_from(message.partition()).ok()?,
            value: Bytes::copy_from_slice(message.payload().unwrap_or_default()),
            key: Bytes::copy_from_slice(message.key().unwrap_or_default()),
            attributes,
            id,
        },
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::bus::kafka::configs::ClientConfigs;

    #[tokio::test]
    async fn a_reader_whose_caller_went_away_keeps_its_turn() {
        let configs = ClientConfigs {
            brokers: "127.0.0.1:1".to_owned(),
            topic_prefix: String::new(),
            properties: Default::default(),
        };
        let events = ClientEvents::default();
        let producer = configs.producer(&events).unwrap();
        let clients = Arc::new(Clients {
            producer: Mutex::new(Detached::new(producer)),
            admin: Detached::new(configs.admin(&events).unwrap()),
            observers: Detached::new(Mutex::default()),
            configs,
            events,
        });
        let logs = KafkaLogs::new(clients, Duration::from_secs(1));
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let log = Log::EVENTS;
        let call = logs.with_reader(&log, move |_, _| {
            begin.send(()).unwrap();
            ends.recv().ok();
            Ok(())
        });
        tokio::select! {
            _ = call => panic!("it waits"),
            begun = begun => begun.unwrap(),
        }
        assert_eq!(logs.turns.available_permits(), READERS - 1);
        drop(end);
        let all = u32::try_from(READERS).unwrap();
        drop(logs.turns.acquire_many(all).await.unwrap());
        assert_eq!(logs.idle.lock().len(), 1);
    }
}
