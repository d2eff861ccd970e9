//! `[kafka]`: properties of the bus clients, by name. The bus knows what they mean: see [`Rules`].

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, de};

/// The suffix of a property that names a file containing the value.
const FROM_FILE: &str = ".file";
const HIDDEN: &str = "***";

/// What the bus knows about properties.
#[derive(Clone, Copy)]
pub struct Rules {
    /// The first invalid property, and why it is invalid.
    pub mistake: fn(&Properties) -> Option<(&str, String)>,
    /// True if the value of the property must not be shown.
    pub is_secret: fn(&str) -> bool,
}

/// Properties by name. `"sasl.username" = "taskd"` and `sasl.username = "taskd"` are the same.
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

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of `name`, or asterisks if it is secret.
    pub(super) fn shown(&self, name: &str, rules: Rules) -> &str {
        if (rules.is_secret)(name) {
            HIDDEN
        } else {
            self.get(name).unwrap_or_default()
        }
    }

    /// The properties, with secret values replaced by asterisks.
    pub(super) fn hidden(&self, is_secret: fn(&str) -> bool) -> Self {
        let hide = |(name, value): (&String, &String)| {
            (
                name.clone(),
                if is_secret(name) {
                    HIDDEN.to_owned()
                } else {
                    value.clone()
                },
            )
        };
        Self(self.0.iter().map(hide).collect())
    }

    /// Sets a property. Setting a value removes the property that names a file with the value, and
    /// vice versa.
    pub fn set(&mut self, name: String, value: String) {
        match name.strip_suffix(FROM_FILE) {
            Some(secret) => self.0.remove(secret),
            None => self.0.remove(&format!("{name}{FROM_FILE}")),
        };
        self.0.insert(name, value);
    }

    pub(super) fn extend(&mut self, others: Self) {
        others
            .0
            .into_iter()
            .for_each(|(name, value)| self.set(name, value));
    }
}

/// Shows only names, because a value may be secret.
impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

impl<'de> Deserialize<'de> for Properties {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut properties = BTreeMap::new();
        match Node::deserialize(deserializer)? {
            Node::Leaf(_) => {
                return Err(de::Error::custom(
                    "expected a section [kafka] of librdkafka's properties",
                ));
            }
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

/// A value or a table. TOML parses an unquoted dotted key as nested tables.
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
        let quoted = parse(
            "\"security.protocol\" = \"SASL_SSL\"\n\"sasl.username\" = \"taskd\"\n\"linger.ms\" = 5",
        );
        let bare =
            parse("security.protocol = \"SASL_SSL\"\nsasl.username = \"taskd\"\nlinger.ms = 5");
        assert_eq!(quoted, bare);
        assert_eq!(quoted.get("linger.ms"), Some("5"));
        let bool = parse("enable.ssl.certificate.verification = false");
        assert_eq!(
            bool.get("enable.ssl.certificate.verification"),
            Some("false")
        );
    }

    #[test]
    fn secrets_are_not_shown() {
        let is_secret = |name: &str| name.contains("password");
        let properties = parse("sasl.password = \"old\"\nsasl.username = \"taskd\"");
        assert_eq!(
            properties.hidden(is_secret).get("sasl.password"),
            Some("***")
        );
        let rules = Rules {
            mistake: |_| None,
            is_secret,
        };
        assert_eq!(properties.shown("sasl.username", rules), "taskd");
        assert!(!format!("{properties:?}").contains("old"));
    }
}
