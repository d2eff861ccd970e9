//! A reader that is in no group: it assigns all partitions to itself.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use rdkafka::{
    Offset as Position, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
};

use super::{
    calls::{blocking, index},
    configs::{ClientConfigs, create},
    consumer::{is_passing, message},
    events::ClientEvents,
};
use crate::{
    bus::{Apart, Error, Message, Result, Topic},
    model::Offset,
};

/// How long a call waits for a record.
const WITHIN: Duration = Duration::from_secs(1);

pub(super) struct ApartReader {
    topic: Topic,
    consumer: Arc<BaseConsumer<ClientEvents>>,
}

impl ApartReader {
    pub(super) fn new(
        configs: &ClientConfigs,
        topic: Topic,
        after: &[Option<Offset>],
    ) -> Result<Self> {
        let consumer = create(&configs.observer(topic), ClientEvents::default());
        let consumer: BaseConsumer<ClientEvents> = consumer.map_err(Error::read(topic))?;
        let name = configs.topic(topic);
        let mut list = TopicPartitionList::new();
        for (partition, after) in (0..).zip(after) {
            let from = match after.and_then(|after| i64::try_from(after.major).ok()) {
                Some(after) => Position::Offset(after.saturating_add(1)),
                None => Position::Beginning,
            };
            list.add_partition_offset(&name, index(partition), from)
                .map_err(Error::read::<KafkaError>(topic))?;
        }
        consumer.assign(&list).map_err(Error::read(topic))?;
        Ok(Self {
            topic,
            consumer: Arc::new(consumer),
        })
    }
}

#[async_trait]
impl Apart for ApartReader {
    async fn next(&mut self, max: usize) -> Result<Vec<Message>> {
        let consumer = Arc::clone(&self.consumer);
        let read = blocking(move || {
            let mut read = Vec::new();
            let mut within = WITHIN;
            while read.len() < max {
                match consumer.poll(within) {
                    Some(Ok(record)) => read.extend(message(&record)),
                    Some(Err(error)) if is_passing(&error) => {}
                    Some(Err(error)) => return Err(error),
                    None => break,
                }
                within = Duration::ZERO;
            }
            Ok(read)
        });
        read.await.map_err(Error::read(self.topic))
    }
}
