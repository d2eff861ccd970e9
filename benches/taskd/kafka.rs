//! The limits of Kafka: a consumer group that only reads, and an idempotent producer that only
//! writes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::ensure;
use rdkafka::{
    ClientConfig, ClientContext, Message,
    consumer::{BaseConsumer, CommitMode, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
    producer::{BaseRecord, DeliveryResult, Producer, ProducerContext, ThreadedProducer},
};

use crate::servers::{LIMIT, Place};

const WITHIN: Duration = Duration::from_secs(120);

fn consumer(place: &Place<'_>) -> anyhow::Result<BaseConsumer> {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", place.brokers())
        .set("group.id", place.topic("limit"));
    config
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false");
    Ok(config.create()?)
}

/// Waits until the only partition of the topic has this many records.
pub(crate) async fn wait_for_records(
    place: &Place<'_>,
    topic: &str,
    count: usize,
) -> anyhow::Result<()> {
    let (consumer, topic) = (consumer(place)?, topic.to_owned());
    let wait = move || {
        let deadline = Instant::now() + WITHIN;
        loop {
            let (_, end) = consumer.fetch_watermarks(&topic, 0, Duration::from_secs(10))?;
            if usize::try_from(end)? == count {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{topic} has {end} records instead of {count}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    tokio::task::spawn_blocking(wait).await?
}

/// Reads the whole topic with a group of one member. Returns records per second, and the records.
pub(crate) fn read(
    place: &Place<'_>,
    topic: &str,
    count: usize,
) -> anyhow::Result<(f64, Vec<Vec<u8>>)> {
    let consumer = consumer(place)?;
    consumer.subscribe(&[topic])?;
    let (mut values, mut began, deadline) =
        (Vec::with_capacity(count), None, Instant::now() + WITHIN);
    while values.len() < count {
        ensure!(
            Instant::now() < deadline,
            "{} of {count} records were read",
            values.len()
        );
        let Some(message) = consumer.poll(Duration::from_millis(100)) else {
            continue;
        };
        // Start the clock here: the first record includes the wait for the group to form.
        began.get_or_insert_with(Instant::now);
        values.push(message?.payload().unwrap_or_default().to_vec());
    }
    let seconds = began.map_or(f64::NAN, |began| began.elapsed().as_secs_f64());
    consumer.commit_consumer_state(CommitMode::Sync)?;
    Ok((count as f64 / seconds, values))
}

/// Counts the acknowledged records.
#[derive(Clone, Default)]
struct Taken(Arc<AtomicUsize>);

impl ClientContext for Taken {}

impl ProducerContext for Taken {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        self.0.fetch_add(usize::from(result.is_ok()), Relaxed);
    }
}

/// Writes the records to a separate topic, with the settings of taskd's producer. Returns records
/// per second until all are acknowledged.
pub(crate) async fn write(place: &Place<'_>, values: &[Vec<u8>]) -> anyhow::Result<f64> {
    let topic = place.topic(LIMIT);
    place.create_topic(&topic).await?;
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", place.brokers())
        .set("enable.idempotence", "true")
        .set("acks", "all");
    config.set("compression.type", "zstd").set("linger.ms", "1");
    let taken = Taken::default();
    let producer: ThreadedProducer<Taken> = config.create_with_context(taken.clone())?;
    // Connect and register the producer before measuring.
    producer
        .send(BaseRecord::<(), _>::to(&topic).payload(&values[0]))
        .map_err(|(error, _)| error)?;
    tokio::task::block_in_place(|| producer.flush(WITHIN))?;

    let began = Instant::now();
    let seconds = tokio::task::block_in_place(|| {
        for value in values {
            let mut record = BaseRecord::<(), _>::to(&topic).partition(0).payload(value);
            while let Err((error, back)) = producer.send(record) {
                let full = matches!(
                    error,
                    KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
                );
                ensure!(full, "the producer: {error}");
                std::thread::sleep(Duration::from_millis(1));
                record = back;
            }
        }
        producer.flush(WITHIN)?;
        Ok(began.elapsed().as_secs_f64())
    })?;
    let taken = taken.0.load(Relaxed);
    ensure!(
        taken == values.len() + 1,
        "kafka took {taken} of {} records",
        values.len() + 1
    );
    Ok(values.len() as f64 / seconds)
}
