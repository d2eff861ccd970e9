//! librdkafka properties that the user sets in `[kafka]`. librdkafka knows their names and valid
//! values.

use std::{collections::BTreeMap, fs, io};

use rdkafka::{ClientConfig, error::KafkaError, types::RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN};

use crate::config::{Properties, Rules};

/// The rules for these properties, used when the settings are loaded.
pub const RULES: Rules = Rules { mistake, is_secret };

/// Properties, under all their names, that users cannot set because taskd's guarantees depend on
/// them or because they have a setting of their own. Each has the reason.
const TAKEN: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers stand in bus_url"),
    ("metadata.broker.list", "the brokers stand in bus_url"),
    (
        "group.id",
        "all taskd processes with one topic_prefix share a group",
    ),
    ("group.instance.id", GROUP),
    ("group.protocol", GROUP),
    ("group.remote.assignor", GROUP),
    ("partition.assignment.strategy", GROUP),
    ("enable.auto.commit", COMMITS),
    ("auto.commit.enable", COMMITS),
    ("auto.commit.interval.ms", COMMITS),
    ("enable.auto.offset.store", COMMITS),
    (
        "auto.offset.reset",
        "a reader without an offset begins at the first record, else tasks would be passed over",
    ),
    ("isolation.level", READS),
    ("enable.partition.eof", READS),
    ("topic.blacklist", READS),
    ("offset.store.method", COMMITS),
    ("enable.idempotence", WRITES),
    ("enable.gapless.guarantee", WRITES),
    ("acks", WRITES),
    ("request.required.acks", WRITES),
    ("transactional.id", WRITES),
    ("message.timeout.ms", WRITES),
    ("delivery.timeout.ms", WRITES),
    ("max.in.flight", WRITES),
    ("max.in.flight.requests.per.connection", WRITES),
    ("delivery.report.only.error", WRITES),
    ("retries", WRITES),
    ("message.send.max.retries", WRITES),
    (
        "message.max.bytes",
        "max_payload_bytes and max_result_bytes say how large a record gets",
    ),
    ("allow.auto.create.topics", "taskd makes its topics"),
    ("plugin.library.paths", "taskd loads no code"),
    (
        "statistics.interval.ms",
        "taskd does not read librdkafka's statistics",
    ),
];
const GROUP: &str = "taskd decides how partitions are shared out";
const READS: &str = "taskd decides what is read";
const COMMITS: &str = "taskd commits what it has dealt with, and nothing else";
const WRITES: &str =
    "taskd writes with acks=all and idempotence, so that what was answered is kept";

/// Properties that may also be set as `<name>.file`, which names a file with the value.
const SECRETS: &[&str] = &[
    "sasl.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
];
const FROM_FILE: &str = ".file";

/// The first invalid property, and why it is invalid.
fn mistake(properties: &Properties) -> Option<(&str, String)> {
    let taken = |name: &str| {
        TAKEN
            .iter()
            .find(|(taken, _)| *taken == name)
            .map(|(_, why)| (*why).to_owned())
    };
    let unsupported_mechanism = |name: &str| {
        let is_oauth = properties
            .get(name)
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("OAUTHBEARER"));
        let is_mechanism = matches!(name, "sasl.mechanism" | "sasl.mechanisms");
        (is_mechanism && is_oauth)
            .then(|| "cannot be set: this taskd has no way to get a token".to_owned())
    };
    let unreadable = |name: &str| {
        let path = properties.get(name).filter(|_| of_file(name).is_some())?;
        secret_in(path)
            .err()
            .map(|cause| format!("cannot be read: {cause}"))
    };
    properties.names().find_map(|name| {
        let taken = taken(name).map(|why| format!("cannot be set: {why}"));
        Some((
            name,
            taken
                .or_else(|| unsupported_mechanism(name))
                .or_else(|| unreadable(name))?,
        ))
    })
}

/// A secret whose file cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("kafka.{property} cannot be read: {cause}")]
pub struct UnreadableSecret {
    property: String,
    #[source]
    cause: io::Error,
}

/// The properties as passed to librdkafka. Each call reads the secrets from their files again.
pub fn resolved(properties: &Properties) -> Result<BTreeMap<String, String>, UnreadableSecret> {
    let resolve = |name: &str| {
        let value = properties.get(name).unwrap_or_default();
        match of_file(name) {
            Some(secret) => match secret_in(value) {
                Ok(value) => Ok((secret.to_owned(), value)),
                Err(cause) => Err(UnreadableSecret {
                    property: name.to_owned(),
                    cause,
                }),
            },
            None => Ok((name.to_owned(), value.to_owned())),
        }
    };
    properties.names().map(resolve).collect()
}

/// The property that `name` reads from a file, or `None` if `name` does not name a file.
fn of_file(name: &str) -> Option<&str> {
    name.strip_suffix(FROM_FILE)
        .filter(|secret| SECRETS.contains(secret))
}

/// The content of the file, without the trailing line break that editors add.
fn secret_in(path: &str) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Whether the value must not be shown. The path of a file with a secret may be shown.
fn is_secret(name: &str) -> bool {
    let words = [
        "password",
        "secret",
        ".pem",
        "sasl.oauthbearer.config",
        "ssl_key",
    ];
    of_file(name).is_none() && (words.iter().any(|word| name.contains(word)) || !is_known(name))
}

/// Whether librdkafka knows the property. An unknown one may be a secret under a misspelt name.
fn is_known(name: &str) -> bool {
    let tried = ClientConfig::new().set(name, "").create_native_config();
    !matches!(
        tried,
        Err(KafkaError::ClientConfig(RD_KAFKA_CONF_UNKNOWN, ..))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Properties {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn secrets_come_from_files_and_are_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        fs::write(&path, "p ss\n").unwrap();
        let mut properties = parse("sasl.password = \"old\"\nsasl.username = \"taskd\"");
        assert!(
            is_secret("sasl.password")
                && !is_secret("sasl.username")
                && !is_secret("sasl.password.file")
        );
        assert!(
            is_secret("sasl.oauthbearer.client.secret")
                && is_secret("sasl.oauthbearer.client.secret.file")
        );
        assert!(is_secret("sasl.passwort") && !is_secret("acks") && !is_secret("compression.type"));

        properties.set("sasl.password.file".into(), path.to_str().unwrap().into());
        assert_eq!(resolved(&properties).unwrap()["sasl.password"], "p ss");
        assert!(
            !resolved(&properties)
                .unwrap()
                .contains_key("sasl.password.file")
        );
        assert!(mistake(&properties).is_none());
        fs::remove_file(path).unwrap();
        let (name, why) = mistake(&properties).unwrap();
        assert_eq!(
            (name, &*why),
            (
                "sasl.password.file",
                "cannot be read: No such file or directory (os error 2)"
            )
        );
        properties.set("sasl.password".into(), "new".into());
        assert_eq!(resolved(&properties).unwrap()["sasl.password"], "new");
    }

    #[test]
    fn what_the_promises_rest_on_cannot_be_set() {
        for (name, _) in TAKEN {
            let mut properties = Properties::default();
            properties.set((*name).to_owned(), "x".into());
            assert_eq!(mistake(&properties).unwrap().0, *name);
        }
        let one = parse("acks = 1");
        let said = "cannot be set: taskd writes with acks=all and idempotence, so that what was answered is kept";
        assert_eq!(mistake(&one), Some(("acks", said.to_owned())));
        for name in ["sasl.mechanism", "sasl.mechanisms"] {
            let text = format!("{name} = \"OAuthBearer\"");
            let said = "cannot be set: this taskd has no way to get a token";
            assert_eq!(mistake(&parse(&text)), Some((name, said.to_owned())));
        }
        assert_eq!(mistake(&parse("sasl.mechanism = \"PLAIN\"")), None);
    }
}
