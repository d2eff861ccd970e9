//! Sequences: tasks of a queue that go one after the other.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The longest name of a sequence.
pub const MAX_SEQUENCE_BYTES: usize = 255;

/// The bytes of the hash by which SQL finds a sequence.
pub const SEQUENCE_HASH_BYTES: usize = 16;

/// Identifies a sequence of a queue.
pub type SequenceHash = [u8; SEQUENCE_HASH_BYTES];

/// What the death of a task means for the next ones of its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnDead {
    /// They go on.
    #[default]
    Next,
    /// They wait until the task is sent again or purged.
    Hold,
}

/// The sequence of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub name: String,
    /// What the death of this task means for the ones after it.
    pub on_dead: OnDead,
}

impl Sequence {
    /// Checks the name that an insert gives; an empty one means that there is no sequence.
    pub fn new(name: &str, on_dead: OnDead) -> Result<Option<Self>, String> {
        if name.is_empty() {
            return match on_dead {
                OnDead::Next => Ok(None),
                OnDead::Hold => Err(
                    "on_dead is hold, and the task has no sequence: give one, or leave out on_dead"
                        .into(),
                ),
            };
        }
        if name.len() > MAX_SEQUENCE_BYTES {
            return Err(format!(
                "sequence has {} bytes; at most {MAX_SEQUENCE_BYTES}",
                name.len()
            ));
        }
        if name.chars().any(char::is_control) {
            return Err("sequence contains a control character".into());
        }
        Ok(Some(Self {
            name: name.to_owned(),
            on_dead,
        }))
    }
}

/// The name of the sequence of all records with this key: the key, or `sha256:` and its hash if a
/// sequence cannot have the key as its name.
pub fn sequence_of_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if Sequence::new(text, OnDead::Next).is_ok() => text.to_owned(),
        _ => {
            let hash = Sha256::digest(key);
            let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("sha256:{hex}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_has_a_short_name_without_control_characters() {
        let named = |name: &str| Sequence::new(name, OnDead::Hold);
        let longest = "x".repeat(MAX_SEQUENCE_BYTES);
        assert_eq!(named(&longest).unwrap().unwrap().name, longest);
        assert_eq!(Sequence::new("", OnDead::Next), Ok(None));
        for (name, says) in [
            (format!("{longest}x"), "sequence has 256 bytes; at most 255"),
            ("a\nb".to_owned(), "sequence contains a control character"),
            (
                String::new(),
                "on_dead is hold, and the task has no sequence",
            ),
        ] {
            let error = named(&name).unwrap_err();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn each_key_of_a_record_has_a_sequence() {
        assert_eq!(sequence_of_key(b"a key"), "a key");
        assert_eq!(sequence_of_key(b""), "");
        for key in [&[0xff][..], b"a\nb", &[b'x'; 4096]] {
            let name = sequence_of_key(key);
            assert!(name.starts_with("sha256:"), "{name}");
            assert!(Sequence::new(&name, OnDead::Next).unwrap().is_some());
        }
    }
}
