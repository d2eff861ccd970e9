//! `[kafka]`: what the clients of the bus are told beside what taskd tells them. librdkafka knows the names and the values.

use std::{collections::BTreeMap, fmt, fs};

use serde::{Deserialize, Deserializer, Serialize, de};

/// What taskd's promises rest on, and what has a setting of its own, by each of librdkafka's names for it.
const TAKEN: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers stand in bus_url"),
    ("metadata.broker.list", "the brokers stand in bus_url"),
    ("group.id", "all taskd processes with one topic_prefix share a group"),
    ("group.instance.id", GROUP),
    ("group.protocol", GROUP),
    ("group.remote.assignor", GROUP),
    ("partition.assignment.strategy", GROUP),
    ("enable.auto.commit", COMMITS),
    ("auto.commit.enable", COMMITS),
    ("auto.commit.interval.ms", COMMITS),
    ("enable.auto.offset.store", COMMITS),
    ("auto.offset.reset", "a reader without an offset begins at the first record, else tasks would be passed over"),
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
    ("message.max.bytes", "max_payload_bytes and max_result_bytes say how large a record gets"),
    ("allow.auto.create.topics", "taskd makes its topics"),
    ("plugin.library.paths", "taskd loads no code"),
];
const GROUP: &str = "taskd decides how partitions are shared out";
const READS: &str = "taskd decides what is read";
const COMMITS: &str = "taskd commits what it has dealt with, and nothing else";
const WRITES: &str = "taskd writes with acks=all and idempotence, so that what was answered is kept";

/// May be given as `<name>.file` too: the value is what that file holds.
const SECRETS: &[&str] =
    &["sasl.password", "ssl.key.password", "ssl.key.pem", "ssl.keystore.password", "sasl.oauthbearer.client.secret"];
const FROM_FILE: &str = ".file";
const HIDDEN: &str = "***";

/// Properties by name. Both forms of a TOML file give the same: `"sasl.username" = "taskd"` and `sasl.username = "taskd"`.
#[derive(Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Properties(BTreeMap<String, String>);

impl Properties {
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of `name` if it may be shown.
    pub(super) fn shown(&self, name: &str) -> &str {
        if is_secret(name) { HIDDEN } else { self.0.get(name).map_or("", String::as_str) }
    }

    /// With every secret replaced.
    pub(super) fn hidden(&self) -> Self {
        Self(self.0.keys().map(|name| (name.clone(), self.shown(name).to_owned())).collect())
    }

    /// A value and the file that holds it replace each other.
    pub fn set(&mut self, name: String, value: String) {
        match name.strip_suffix(FROM_FILE) {
            Some(secret) => self.0.remove(secret),
            None => self.0.remove(&format!("{name}{FROM_FILE}")),
        };
        self.0.insert(name, value);
    }

    pub(super) fn extend(&mut self, others: Self) {
        others.0.into_iter().for_each(|(name, value)| self.set(name, value));
    }

    /// What is wrong with a property, for the user.
    pub(super) fn mistake(&self) -> Option<(&str, String)> {
        let taken = |name: &str| TAKEN.iter().find(|(taken, _)| *taken == name).map(|(_, why)| (*why).to_owned());
        let unreadable = |name: &str| {
            let path = self.0.get(name).filter(|_| of_file(name).is_some())?;
            secret_in(path).err()
        };
        self.names().find_map(|name| {
            let taken = taken(name).map(|why| format!("cannot be set: {why}"));
            Some((name, taken.or_else(|| unreadable(name))?))
        })
    }

    /// As librdkafka takes them: secrets are read from their files, anew with each call. On `Err` the user is told which cannot be.
    pub fn resolved(&self) -> Result<BTreeMap<String, String>, String> {
        let resolve = |(name, value): (&String, &String)| match of_file(name) {
            Some(secret) => Ok((secret.to_owned(), secret_in(value).map_err(|why| format!("kafka.{name} {why}"))?)),
            None => Ok((name.clone(), value.clone())),
        };
        self.0.iter().map(resolve).collect()
    }
}

/// The secret that `name` says where to find.
fn of_file(name: &str) -> Option<&str> {
    name.strip_suffix(FROM_FILE).filter(|secret| SECRETS.contains(secret))
}

/// Without the line's end that editors put there.
fn secret_in(path: &str) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

fn is_secret(name: &str) -> bool {
    let words = ["password", "secret", ".pem", "sasl.oauthbearer.config", "ssl_key"];
    of_file(name).is_none() && words.iter().any(|word| name.contains(word))
}

impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.names().map(|name| (name, self.shown(name)))).finish()
    }
}

impl<'de> Deserialize<'de> for Properties {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut properties = BTreeMap::new();
        match Node::deserialize(deserializer)? {
            Node::Leaf(_) => return Err(de::Error::custom("expected a section [kafka] of librdkafka's properties")),
            Node::Table(table) => flatten(table, "", &mut properties),
        }
        Ok(Self(properties))
    }
}

fn flatten(table: BTreeMap<String, Node>, prefix: &str, properties: &mut BTreeMap<String, String>) {
    for (key, node) in table {
        let name = format!("{prefix}{key}");
        match node {
            Node::Leaf(value) => drop(properties.insert(name, value)),
            Node::Table(inner) => flatten(inner, &format!("{name}."), properties),
        }
    }
}

/// What TOML makes of a dotted key without quotes is a table in a table.
enum Node {
    Leaf(String),
    Table(BTreeMap<String, Self>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> de::Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a number, or true or false")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Leaf(value.to_owned()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Leaf(value.to_string()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Leaf(value.to_string()))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Leaf(value.to_string()))
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut table = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            table.insert(key, value);
        }
        Ok(Node::Table(table))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Properties {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn dotted_keys_with_and_without_quotes_are_the_same() {
        let quoted = parse("\"security.protocol\" = \"SASL_SSL\"\n\"sasl.username\" = \"taskd\"\n\"linger.ms\" = 5");
        let bare = parse("security.protocol = \"SASL_SSL\"\nsasl.username = \"taskd\"\nlinger.ms = 5");
        assert_eq!(quoted, bare);
        assert_eq!(quoted.resolved().unwrap()["linger.ms"], "5");
        assert_eq!(
            parse("enable.ssl.certificate.verification = false").0["enable.ssl.certificate.verification"],
            "false"
        );
    }

    #[test]
    fn secrets_come_from_files_and_are_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        fs::write(&path, "p ss\n").unwrap();
        let mut properties = parse("sasl.password = \"old\"\nsasl.username = \"taskd\"");
        assert_eq!(properties.hidden().0["sasl.password"], "***");
        assert_eq!(properties.shown("sasl.username"), "taskd");

        properties.set("sasl.password.file".into(), path.to_str().unwrap().into());
        assert_eq!(properties.resolved().unwrap()["sasl.password"], "p ss");
        assert!(!properties.resolved().unwrap().contains_key("sasl.password.file"));
        assert_eq!(properties.hidden().0["sasl.password.file"], path.to_str().unwrap());
        assert!(properties.mistake().is_none());
        fs::remove_file(path).unwrap();
        let (name, why) = properties.mistake().unwrap();
        assert_eq!((name, &*why), ("sasl.password.file", "cannot be read: No such file or directory (os error 2)"));
        properties.set("sasl.password".into(), "new".into());
        assert_eq!(properties.resolved().unwrap()["sasl.password"], "new");
    }

    #[test]
    fn what_the_promises_rest_on_cannot_be_set() {
        for (name, _) in TAKEN {
            let mut properties = Properties::default();
            properties.set((*name).to_owned(), "x".into());
            assert_eq!(properties.mistake().unwrap().0, *name);
        }
        let one = parse("acks = 1");
        let said = "cannot be set: taskd writes with acks=all and idempotence, so that what was answered is kept";
        assert_eq!(one.mistake(), Some(("acks", said.to_owned())));
    }
}
