//! The form of a definition that does not depend on how it was written.

use serde_json::Value;
use sha2::{Digest, Sha256};

/// A definition in canonical JSON, and its hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canonical {
    /// Without spaces, the names of each object in the order of their bytes.
    pub text: String,
    pub hash: [u8; 32],
}

impl Canonical {
    /// Brings a value into the form.
    pub fn of(value: &Value) -> Self {
        let mut text = String::new();
        write(&mut text, value);
        let hash = Sha256::digest(&text).into();
        Self { text, hash }
    }

    /// The hash in hex.
    pub fn hex(&self) -> String {
        self.hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn write(text: &mut String, value: &Value) {
    match value {
        Value::Array(values) => {
            text.push('[');
            for (place, value) in values.iter().enumerate() {
                if place > 0 {
                    text.push(',');
                }
                write(text, value);
            }
            text.push(']');
        }
        Value::Object(names) => {
            let mut names: Vec<_> = names.iter().collect();
            names.sort_by_key(|(name, _)| *name);
            text.push('{');
            for (place, (name, value)) in names.into_iter().enumerate() {
                if place > 0 {
                    text.push(',');
                }
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push(':');
                write(text, value);
            }
            text.push('}');
        }
        other => text.push_str(&other.to_string()),
    }
}
