//! librdkafka calls with their timeouts and errors.
//!
//! Some librdkafka calls block. They run on threads for blocking work, with a deadline.

use std::time::{Duration, Instant};

use rdkafka::{
    ClientContext, Offset as Position, TopicPartitionList,
    client::Client,
    consumer::{Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode},
};
use tokio::task::JoinError;

use crate::{
    bus::{Cause, Error},
    model::Offset,
};

/// How long to wait for a response from a broker.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long writing a record may take, including a change of the partition's leader. Shorter than
/// the default `stall_after`, so that a loop that fails to write to one partition still makes
/// progress in time.
pub(super) const DELIVER_WITHIN: Duration = Duration::from_secs(25);
/// Larger than any record: a record holds one task, or half a MiB of reports plus one more report.
/// A task or a report is at most `model::MAX_RECORD_BYTES` long, plus its protobuf framing.
pub(super) const MAX_RECORD_BYTES: &str = "16777216";

/// A failure of the brokers, or of librdkafka.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Kafka(#[from] KafkaError),
    #[error(transparent)]
    Panicked(#[from] JoinError),
    #[error("no answer from kafka within {0:?}")]
    Silent(Duration),
    /// librdkafka refuses to create a client with this configuration.
    #[error("kafka: {0}")]
    Client(String),
    #[error("kafka at {brokers} does not let us in: {reason}")]
    Refused { brokers: String, reason: String },
    #[error("no answer from kafka at {brokers} within {within:?}")]
    Away { brokers: String, within: Duration },
    #[error("kafka at {brokers}: {cause}")]
    At {
        brokers: String,
        #[source]
        cause: KafkaError,
    },
    #[error("kafka does not create topic {topic}: {code}")]
    NotCreated {
        topic: String,
        code: RDKafkaErrorCode,
    },
    #[error("kafka's topic {topic} is not ready after {within:?}")]
    NotReady { topic: String, within: Duration },
    #[error("kafka has no topic {topic}")]
    NotThere { topic: String },
    #[error("kafka does not change the retention of topic {topic}: {code}")]
    NotChanged {
        topic: String,
        code: RDKafkaErrorCode,
    },
    #[error("kafka gives {topic} no {count} partitions: {code}")]
    NotRaised {
        topic: String,
        count: u32,
        code: RDKafkaErrorCode,
    },
}

impl Failure {
    /// True if the brokers have refused to make a topic, or do not have one to be attached. After any
    /// other failure they may have made it.
    fn is_refusal(&self) -> bool {
        match self {
            Self::NotThere { .. } => true,
            Self::NotCreated { code, .. } => matches!(
                code,
                RDKafkaErrorCode::InvalidTopic
                    | RDKafkaErrorCode::TopicAuthorizationFailed
                    | RDKafkaErrorCode::ClusterAuthorizationFailed
                    | RDKafkaErrorCode::InvalidPartitions
                    | RDKafkaErrorCode::InvalidReplicationFactor
                    | RDKafkaErrorCode::InvalidReplicaAssignment
                    | RDKafkaErrorCode::InvalidConfig
                    | RDKafkaErrorCode::PolicyViolation
            ),
            _ => false,
        }
    }

    /// Converts a failure that occurs while the topic of a log is being made.
    pub(super) fn of_making(self) -> Error {
        if self.is_refusal() {
            return Error::NotMade(self.into());
        }
        self.into()
    }
}

/// Converts a failure that occurs while the bus is being opened.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let is_final = matches!(failure, Failure::Client(_) | Failure::Refused { .. });
        let cause = Cause::from(failure);
        if is_final {
            Self::Misconfigured(cause)
        } else {
            Self::Setup(cause)
        }
    }
}

/// Runs a blocking call on a thread for blocking work. The deadline covers calls without a timeout
/// of their own. A call that exceeds it keeps running on its thread until it returns.
pub(super) async fn blocking<T, E>(
    call: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Failure>
where
    T: Send + 'static,
    E: Send + 'static,
    Failure: From<E>,
{
    match tokio::time::timeout(ANSWER_WITHIN * 2, tokio::task::spawn_blocking(call)).await {
        Ok(done) => Ok(done??),
        Err(_) => Err(Failure::Silent(ANSWER_WITHIN * 2)),
    }
}

/// The partition number in librdkafka's type.
pub(super) fn index(partition: u32) -> i32 {
    i32::try_from(partition).unwrap_or(i32::MAX)
}

/// Converts an offset of librdkafka. Returns `None` for its special (negative) values.
pub(super) fn offset(raw: i64) -> Option<Offset> {
    u64::try_from(raw)
        .ok()
        .map(|major| Offset { major, minor: 0 })
}

/// The first offset of a partition, and the offset after its last record. Blocks.
pub(super) fn watermarks<C: ClientContext>(
    client: &Client<C>,
    topic: &str,
    partition: u32,
) -> Result<(i64, i64), KafkaError> {
    of_its_leader(|| client.fetch_watermarks(topic, index(partition), ANSWER_WITHIN))
}

/// Repeats the request while the partition is changing its leader or, because it is new, has none
/// yet. Blocks.
pub(super) fn of_its_leader<T>(
    mut ask: impl FnMut() -> Result<T, KafkaError>,
) -> Result<T, KafkaError> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    loop {
        match ask() {
            Err(KafkaError::MetadataFetch(
                RDKafkaErrorCode::NotLeaderForPartition | RDKafkaErrorCode::LeaderNotAvailable,
            )) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            answer => return answer,
        }
    }
}

/// The next offset to read after the group's commit, or 0 without a commit, for each partition.
/// Blocks.
pub(super) fn committed<C: ConsumerContext>(
    consumer: &impl Consumer<C>,
    topic: &str,
    partitions: impl IntoIterator<Item = u32>,
) -> Result<Vec<(u32, i64)>, KafkaError> {
    let mut list = TopicPartitionList::new();
    let partitions: Vec<u32> = partitions.into_iter().collect();
    for partition in &partitions {
        list.add_partition(topic, index(*partition));
    }
    let answer = consumer.committed_offsets(list, ANSWER_WITHIN)?;
    let next = |partition: u32| {
        let found = answer.find_partition(topic, index(partition));
        let found = found
            .map(|found| found.error().map(|()| found.offset()))
            .transpose()?;
        Ok((
            partition,
            if let Some(Position::Offset(next)) = found {
                next
            } else {
                0
            },
        ))
    };
    partitions.into_iter().map(next).collect()
}
