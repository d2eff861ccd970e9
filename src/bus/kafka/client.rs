//! How we come to the brokers: what each client is told, and what librdkafka says by itself.

use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, ClientContext,
    admin::AdminClient,
    config::{FromClientConfigAndContext, RDKafkaLogLevel},
    consumer::ConsumerContext,
    error::{KafkaError, RDKafkaErrorCode},
    producer::FutureProducer,
};

use super::{ANSWER_WITHIN, DELIVER_WITHIN, MAX_RECORD_BYTES};
use crate::bus::{Error, Result, Topic};

/// Where the brokers are and what things are called there.
#[derive(Clone)]
pub(super) struct Names {
    pub(super) brokers: String,
    pub(super) topic_prefix: String,
    /// librdkafka's, as the user gave them.
    pub(super) properties: BTreeMap<String, String>,
}

impl Names {
    pub(super) fn topic(&self, topic: Topic) -> String {
        format!("{}{topic}", self.topic_prefix)
    }

    /// Ours where the user says nothing, then the user's, then what our promises rest on (which the settings let nobody change).
    fn config(&self, ours: &[(&str, &str)], fixed: &[(&str, &str)]) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("client.id", "taskd");
        // librdkafka drops a connection whose request gets no answer within this time, and makes a new one.
        config.set("socket.timeout.ms", ANSWER_WITHIN.as_millis().to_string());
        config.set("socket.keepalive.enable", "true");
        // So long a broker that comes back waits for us at most.
        config.set("reconnect.backoff.max.ms", "2000");
        config.extend(ours.iter().map(|(property, value)| (property.to_string(), value.to_string())));
        config.extend(self.properties.clone());
        config.set("bootstrap.servers", &self.brokers).set("message.max.bytes", MAX_RECORD_BYTES);
        config.extend(fixed.iter().map(|(property, value)| (property.to_string(), value.to_string())));
        config
    }

    pub(super) fn client(&self) -> ClientConfig {
        self.config(&[], &[])
    }

    /// A member of the group that all taskd processes share for the topic.
    pub(super) fn member(&self, topic: Topic) -> ClientConfig {
        let ours = [
            ("session.timeout.ms", "6000"),
            ("heartbeat.interval.ms", "500"),
            // What is fetched ahead is bounded; and when it was full, fetching goes on soon instead of after a second.
            ("queued.max.messages.kbytes", "32768"),
            ("fetch.queue.backoff.ms", "10"),
        ];
        let group = self.group(topic);
        let fixed = [
            ("group.id", group.as_str()),
            ("auto.offset.reset", "earliest"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
        ];
        self.config(&ours, &fixed)
    }

    /// Only asks what the group has committed.
    pub(super) fn observer(&self, topic: Topic) -> ClientConfig {
        let group = self.group(topic);
        let fixed =
            [("group.id", group.as_str()), ("enable.auto.commit", "false"), ("enable.auto.offset.store", "false")];
        self.config(&[], &fixed)
    }

    fn group(&self, topic: Topic) -> String {
        format!("{}taskd-{topic}", self.topic_prefix)
    }

    pub(super) fn producer(&self, voice: &Voice) -> Result<FutureProducer<Voice>> {
        let within = DELIVER_WITHIN.as_millis().to_string();
        let ours = [("compression.type", "zstd"), ("linger.ms", "1")];
        // Idempotent: what the client sends again after an error is neither written twice nor out of order.
        let fixed = [("enable.idempotence", "true"), ("acks", "all"), ("message.timeout.ms", within.as_str())];
        create(&self.config(&ours, &fixed), voice.clone()).map_err(Error::Misconfigured)
    }

    pub(super) fn admin(&self, voice: &Voice) -> Result<AdminClient<Voice>> {
        create(&self.client(), voice.clone()).map_err(Error::Misconfigured)
    }

    /// What librdkafka refuses without asking a broker: a property that it does not know, or a value that it does not take.
    pub(super) fn check(&self) -> Result<()> {
        let known = self.client().create_native_config();
        known.map(drop).map_err(|error| Error::Misconfigured(in_one_line(&error)))
    }

    pub(super) fn setup(&self, error: &KafkaError) -> Error {
        Error::Setup(format!("kafka at {}: {error}", self.brokers))
    }
}

/// Ends on a thread of its own, for which nobody waits: librdkafka joins threads that sleep until a time of day, so that a clock which was set
/// back could hold up a stop for as long.
pub(super) struct Detached<T: Send + 'static>(Option<T>);

impl<T: Send> Detached<T> {
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("is there until the drop")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let client = self.0.take();
        std::thread::spawn(move || drop(client));
    }
}

/// A client; otherwise what is wrong with its configuration, without the values, which may be secrets.
pub(super) fn create<C, T>(config: &ClientConfig, context: C) -> Result<T, String>
where
    C: ClientContext,
    T: FromClientConfigAndContext<C>,
{
    config.create_with_context(context).map_err(|error| in_one_line(&error))
}

fn in_one_line(error: &KafkaError) -> String {
    let said = match error {
        KafkaError::ClientConfig(_, reason, property, _value) => format!("{property}: {reason}"),
        KafkaError::ClientCreation(reason) => reason.clone(),
        other => other.to_string(),
    };
    format!("kafka: {}", said.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What librdkafka says by itself, of all clients of one opening. It names every connection that fails, again and again: that is for
/// debugging. That all brokers are away and why one refuses us is told, at most once a minute.
#[derive(Clone, Default)]
pub(super) struct Voice(Arc<Mutex<Said>>);

#[derive(Default)]
struct Said {
    refusals: u32,
    last_refusal: Option<String>,
    warned: Option<Instant>,
    /// Before, whoever opens is told by the error.
    is_open: bool,
}

impl Said {
    fn warn(&mut self, text: &str) {
        if self.is_open && self.warned.is_none_or(|at| at.elapsed() >= WARN_AGAIN_AFTER) {
            self.warned = Some(Instant::now());
            tracing::warn!("{text}");
        }
    }
}

const WARN_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// A broker that refuses us so often in a row means it; one that is just coming up may do it once.
const REFUSALS: u32 = 3;

impl Voice {
    /// Why the brokers do not let us in, when they have said so repeatedly.
    pub(super) fn refusal(&self) -> Option<String> {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.last_refusal.clone().filter(|_| said.refusals >= REFUSALS)
    }

    fn refused(&self, reason: &str) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.refusals = said.refusals.saturating_add(1);
        said.last_refusal = Some(reason.to_owned());
        if said.refusals >= REFUSALS {
            said.warn(&format!("kafka does not let us in: {reason}"));
        }
    }

    pub(super) fn opened(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_open = true;
    }

    fn away(&self) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.warn("kafka is away: no broker can be reached; going on when one is there");
    }
}

impl ClientContext for Voice {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!("librdkafka: {facility} {message}");
            }
            _ => tracing::debug!("librdkafka: {facility} {message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let code = error.rdkafka_error_code();
        if matches!(code, Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL)) {
            self.refused(reason);
        }
        if code == Some(RDKafkaErrorCode::AllBrokersDown) {
            self.away();
        }
        tracing::debug!("librdkafka: {error}: {reason}");
    }
}

impl ConsumerContext for Voice {}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(properties: &[(&str, &str)]) -> Names {
        let properties = properties.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Names { brokers: "h:1".into(), topic_prefix: "p.".into(), properties }
    }

    #[test]
    fn the_users_properties_win_over_our_choices_and_not_over_our_promises() {
        let names = names(&[("linger.ms", "7"), ("acks", "1"), ("bootstrap.servers", "elsewhere"), ("group.id", "g")]);
        let member = names.member(Topic::Pipeline);
        assert_eq!((member.get("linger.ms"), member.get("group.id")), (Some("7"), Some("p.taskd-pipeline")));
        assert_eq!(member.get("bootstrap.servers"), Some("h:1"));
        assert_eq!(member.get("session.timeout.ms"), Some("6000"));
    }

    #[test]
    fn a_property_that_librdkafka_does_not_take_is_named_without_its_value() {
        let error = |properties: &[(&str, &str)]| names(properties).check().unwrap_err().to_string();
        let unknown = error(&[("sasl.pasword", "secret")]);
        assert_eq!(unknown, "kafka: sasl.pasword: No such configuration property: \"sasl.pasword\"");
        let wrong = error(&[("security.protocol", "secret")]);
        assert!(wrong.starts_with("kafka: security.protocol: Invalid value"), "{wrong}");
        assert_eq!(wrong.lines().count(), 1);
        names(&[("security.protocol", "SASL_SSL"), ("session.timeout.ms", "7000")]).check().unwrap();
    }
}
