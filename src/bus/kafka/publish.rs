//! Publishing to any topic.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka::{
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord},
};

use super::{
    calls::{DELIVER_WITHIN, index, offset},
    clients::Clients,
    events::ClientEvents,
};
use crate::{
    bus::{Error, Result, TopicName},
    model::Offset,
};

/// A record with its parts as Kafka has them.
pub(super) struct Sent {
    partition: u32,
    value: Bytes,
    /// Empty: none.
    pub(super) key: Bytes,
    headers: Option<OwnedHeaders>,
}

impl Sent {
    pub(super) fn new(partition: u32, value: Bytes) -> Self {
        Self {
            partition,
            value,
            key: Bytes::new(),
            headers: None,
        }
    }

    pub(super) fn with_header(mut self, key: &str, value: &str) -> Self {
        let header = Header {
            key,
            value: Some(value),
        };
        self.headers = Some(self.headers.unwrap_or_default().insert(header));
        self
    }
}

impl Clients {
    /// Publishes to a topic whose name has no prefix yet.
    pub(super) async fn publish(
        &self,
        topic: TopicName,
        records: Vec<Sent>,
    ) -> Result<Vec<Offset>> {
        let name = self.configs.name(&topic);
        let published = publish(&self.producer(), &name, records).await;
        published.map_err(|error| {
            self.replace_producer_if_broken();
            match error {
                KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge) => {
                    Error::TooLarge {
                        topic,
                        cause: error.into(),
                    }
                }
                _ => Error::publish(topic)(error),
            }
        })
    }
}

/// Puts the record into the producer's queue, waiting while the queue is full.
async fn enqueue(
    producer: &FutureProducer<ClientEvents>,
    topic: &str,
    record: Sent,
) -> Result<DeliveryFuture, KafkaError> {
    let deadline = Instant::now() + DELIVER_WITHIN;
    let mut sent = FutureRecord::<[u8], [u8]>::to(topic)
        .partition(index(record.partition))
        .payload(&record.value);
    if !record.key.is_empty() {
        sent = sent.key(&record.key);
    }
    sent.headers = record.headers;
    loop {
        match producer.send_result(sent) {
            Ok(delivery) => return Ok(delivery),
            Err((error, _)) if !is_queue_full(&error) || Instant::now() > deadline => {
                return Err(error);
            }
            Err((_, refused)) => sent = refused,
        }
        // librdkafka does not notify us when its queue has room. Sending a full queue takes many
        // milliseconds.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn is_queue_full(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
    )
}

/// Waits for all deliveries even after a failure, so that no record of the first attempt is in
/// flight during a retry.
async fn delivered(deliveries: Vec<DeliveryFuture>) -> Result<Vec<Offset>, KafkaError> {
    let mut offsets = Ok(Vec::with_capacity(deliveries.len()));
    for delivery in deliveries {
        let place = match delivery.await {
            Ok(Ok(delivery)) => {
                offset(delivery.offset).ok_or(KafkaError::MessageProduction(RDKafkaErrorCode::Fail))
            }
            Ok(Err((error, _))) => Err(error),
            Err(_) => Err(KafkaError::Canceled),
        };
        match (place, &mut offsets) {
            (Ok(place), Ok(offsets)) => offsets.push(place),
            (Err(error), Ok(_)) => offsets = Err(error),
            (_, Err(_)) => {}
        }
    }
    offsets
}

async fn publish(
    producer: &FutureProducer<ClientEvents>,
    topic: &str,
    records: Vec<Sent>,
) -> Result<Vec<Offset>, KafkaError> {
    let mut deliveries = Vec::with_capacity(records.len());
    let mut refused = None;
    for record in records {
        match enqueue(producer, topic, record).await {
            Ok(delivery) => deliveries.push(delivery),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let offsets = delivered(deliveries).await;
    refused.map_or(offsets, Err)
}
