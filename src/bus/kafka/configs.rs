//! The configuration of each client.

use std::collections::BTreeMap;

use rdkafka::{
    ClientConfig, ClientContext,
    admin::AdminClient,
    config::{FromClientConfigAndContext, RDKafkaLogLevel},
    consumer::BaseConsumer,
    error::KafkaError,
    producer::FutureProducer,
};

use super::{
    calls::{ANSWER_WITHIN, DELIVER_WITHIN, Failure, MAX_RECORD_BYTES},
    events::ClientEvents,
};
use crate::bus::Topic;

/// Our defaults for clients that name a group. The observer uses them, too, so that librdkafka
/// rejects the same settings for members and observers.
const OF_GROUP: [(&str, &str); 4] = [
    ("session.timeout.ms", "6000"),
    ("heartbeat.interval.ms", "500"),
    // Limits the memory for prefetched records. Once below the limit, fetching continues after this
    // backoff instead of after a second.
    ("queued.max.messages.kbytes", "32768"),
    ("fetch.queue.backoff.ms", "10"),
];

/// The brokers, the properties of the clients, and the names of topics and groups.
#[derive(Clone)]
pub(super) struct ClientConfigs {
    pub(super) brokers: String,
    pub(super) topic_prefix: String,
    /// The user's properties, under librdkafka's names.
    pub(super) properties: BTreeMap<String, String>,
}

impl ClientConfigs {
    pub(super) fn topic(&self, topic: Topic) -> String {
        self.name(topic.as_str())
    }

    /// The name of a topic on the brokers.
    pub(super) fn name(&self, topic: &str) -> String {
        format!("{}{topic}", self.topic_prefix)
    }

    /// Applies taskd's defaults, then the user's properties, then the fixed properties that taskd's
    /// guarantees depend on.
    fn config(&self, defaults: &[(&str, &str)], fixed: &[(&str, &str)]) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("client.id", "taskd");
        // librdkafka replaces a connection if a request gets no response for this long.
        config.set("socket.timeout.ms", ANSWER_WITHIN.as_millis().to_string());
        config.set("socket.keepalive.enable", "true");
        // Upper bound for how long librdkafka takes to notice that a broker is back.
        config.set("reconnect.backoff.max.ms", "2000");
        config.extend(
            defaults
                .iter()
                .map(|(property, value)| (property.to_string(), value.to_string())),
        );
        config.extend(self.properties.clone());
        config
            .set("bootstrap.servers", &self.brokers)
            .set("message.max.bytes", MAX_RECORD_BYTES)
            // A producer allows it by default: its next look at the cluster would bring a deleted
            // topic back if the brokers create topics on demand.
            .set("allow.auto.create.topics", "false");
        config.extend(
            fixed
                .iter()
                .map(|(property, value)| (property.to_string(), value.to_string())),
        );
        config
    }

    pub(super) fn client(&self) -> ClientConfig {
        self.config(&[], &[])
    }

    /// A member of the group that all taskd processes share for the topic.
    pub(super) fn member(&self, topic: Topic) -> ClientConfig {
        let group = self.group(topic);
        let fixed = [
            ("group.id", group.as_str()),
            ("auto.offset.reset", "earliest"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
        ];
        self.config(&OF_GROUP, &fixed)
    }

    /// A client that never joins the group and only reads its committed offsets.
    pub(super) fn observer(&self, topic: Topic) -> ClientConfig {
        self.apart(&self.group(topic))
    }

    /// A client that reads logs. It has the name of a group, as librdkafka demands, and never joins
    /// it.
    pub(super) fn log_reader(&self) -> ClientConfig {
        let mut config = self.apart(&format!("{}taskd-logs", self.topic_prefix));
        // A page ends there. The last offsets of a partition may be no records: a transaction ends
        // with a marker.
        config.set("enable.partition.eof", "true");
        config
    }

    fn apart(&self, group: &str) -> ClientConfig {
        let fixed = [
            ("group.id", group),
            ("auto.offset.reset", "earliest"),
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
        ];
        quiet(self.config(&OF_GROUP, &fixed))
    }

    fn group(&self, topic: Topic) -> String {
        format!("{}taskd-{topic}", self.topic_prefix)
    }

    pub(super) fn producer(
        &self,
        events: &ClientEvents,
    ) -> Result<FutureProducer<ClientEvents>, Failure> {
        let within = DELIVER_WITHIN.as_millis().to_string();
        let defaults = [
            ("compression.type", "zstd"),
            ("linger.ms", "1"),
            // A new producer waits this long before it reports a topic as missing. taskd has
            // already seen its topics, so a missing one was deleted.
            ("topic.metadata.propagation.max.ms", "5000"),
        ];
        // Idempotent: a retry after an error neither writes a record twice nor reorders records.
        let fixed = [
            ("enable.idempotence", "true"),
            ("acks", "all"),
            ("message.timeout.ms", within.as_str()),
        ];
        create(&self.config(&defaults, &fixed), events.clone())
    }

    pub(super) fn admin(
        &self,
        events: &ClientEvents,
    ) -> Result<AdminClient<ClientEvents>, Failure> {
        create(&quiet(self.client()), events.clone())
    }

    /// Finds configuration errors that librdkafka detects without a broker: an unknown property, an
    /// invalid value, or values that contradict each other. It rejects some of them only for group
    /// members, which join after the start, so this also creates a member.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let known = self.client().create_native_config();
        known.map_err(|error| refused(&error))?;
        let mut member = self.member(Topic::Pipeline);
        // Without these properties the client contacts no broker and closes immediately.
        member.remove("bootstrap.servers");
        member.remove("group.id");
        create::<_, BaseConsumer<ClientEvents>>(&member, ClientEvents::default()).map(drop)
    }
}

/// Turns logging off for a client that nobody polls, because its log events would accumulate.
fn quiet(mut config: ClientConfig) -> ClientConfig {
    config.set_log_level(RDKafkaLogLevel::Emerg);
    config
}

/// Creates a client, or returns what is wrong with its configuration.
pub(super) fn create<C, T>(config: &ClientConfig, context: C) -> Result<T, Failure>
where
    C: ClientContext,
    T: FromClientConfigAndContext<C>,
{
    config
        .create_with_context(context)
        .map_err(|error| refused(&error))
}

/// librdkafka's error message on one line, without the value, which may be a secret.
fn refused(error: &KafkaError) -> Failure {
    let said = match error {
        KafkaError::ClientConfig(_, reason, property, _value) => format!("{property}: {reason}"),
        KafkaError::ClientCreation(reason) => reason.clone(),
        other => other.to_string(),
    };
    Failure::Client(said.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configs(properties: &[(&str, &str)]) -> ClientConfigs {
        let properties = properties
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect();
        ClientConfigs {
            brokers: "h:1".into(),
            topic_prefix: "p.".into(),
            properties,
        }
    }

    #[test]
    fn the_users_properties_win_over_our_choices_and_not_over_our_promises() {
        let configs = configs(&[
            ("linger.ms", "7"),
            ("acks", "1"),
            ("bootstrap.servers", "elsewhere"),
            ("group.id", "g"),
        ]);
        let member = configs.member(Topic::Pipeline);
        assert_eq!(
            (member.get("linger.ms"), member.get("group.id")),
            (Some("7"), Some("p.taskd-pipeline"))
        );
        assert_eq!(member.get("bootstrap.servers"), Some("h:1"));
        assert_eq!(member.get("session.timeout.ms"), Some("6000"));
    }

    #[test]
    fn a_property_that_librdkafka_does_not_take_is_named_without_its_value() {
        let error =
            |properties: &[(&str, &str)]| configs(properties).check().unwrap_err().to_string();
        let unknown = error(&[("sasl.pasword", "secret")]);
        assert_eq!(
            unknown,
            "kafka: sasl.pasword: No such configuration property: \"sasl.pasword\""
        );
        let wrong = error(&[("security.protocol", "secret")]);
        assert!(
            wrong.starts_with("kafka: security.protocol: Invalid value"),
            "{wrong}"
        );
        assert_eq!(wrong.lines().count(), 1);
        let sasl = [
            ("sasl.mechanism", "PLAIN"),
            ("sasl.username", "u"),
            ("sasl.password", "secret"),
        ];
        let right = [
            ("security.protocol", "SASL_SSL"),
            ("session.timeout.ms", "7000"),
        ];
        configs(&[&sasl[..], &right].concat()).check().unwrap();
    }

    #[test]
    fn what_only_readers_refuse_is_found_before_they_join() {
        let cases = [
            ("fetch.max.bytes", "1048576"),
            ("receive.message.max.bytes", "20000000"),
            ("session.timeout.ms", "400000"),
            ("max.poll.interval.ms", "5000"),
        ];
        for property in cases {
            let configs = configs(&[property]);
            let said = configs.check().unwrap_err().to_string();
            assert!(
                said.contains(property.0) && said.lines().count() == 1,
                "{said}"
            );
        }
        // An observer accepts every configuration that a member accepts.
        for property in [
            ("max.poll.interval.ms", "30000"),
            ("receive.message.max.bytes", "40000000"),
        ] {
            let configs = configs(&[property]);
            configs.check().unwrap();
            create::<_, BaseConsumer<_>>(
                &configs.observer(Topic::Pipeline),
                ClientEvents::default(),
            )
            .unwrap();
        }
    }
}
