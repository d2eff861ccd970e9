//! Which results are the same: equal bytes, or JSON that is equal as a tree. Numbers are compared as
//! they are written, because they may have more digits than any number here.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

/// Larger results are compared byte by byte, and so is JSON that is deeper.
const LARGEST: usize = 1 << 20;
const DEEPEST: usize = 64;

/// A fingerprint that equal contents share.
pub(super) fn fingerprint(content: &[u8]) -> [u8; 32] {
    let text = std::str::from_utf8(content).ok();
    let tree = text
        .filter(|text| text.len() <= LARGEST)
        .and_then(|text| serde_json::from_str::<&RawValue>(text).ok())
        .and_then(|value| {
            let mut tree = String::with_capacity(content.len());
            write(value, &mut tree, 0).then_some(tree)
        });
    match tree {
        Some(tree) => Sha256::digest(format!("json {tree}")).into(),
        None => Sha256::new()
            .chain_update("bytes ")
            .chain_update(content)
            .finalize()
            .into(),
    }
}

/// Writes a value without spaces and with sorted names. Returns false if it is too deep.
fn write(value: &RawValue, tree: &mut String, depth: usize) -> bool {
    if depth > DEEPEST {
        return false;
    }
    let text = value.get();
    match text.as_bytes().first() {
        Some(b'{') => {
            let Ok(fields) = serde_json::from_str::<BTreeMap<String, &RawValue>>(text) else {
                return false;
            };
            tree.push('{');
            for (name, value) in fields {
                tree.push_str(&serde_json::Value::String(name).to_string());
                tree.push(':');
                if !write(value, tree, depth + 1) {
                    return false;
                }
                tree.push(',');
            }
            tree.push('}');
            true
        }
        Some(b'[') => {
            let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(text) else {
                return false;
            };
            tree.push('[');
            for value in items {
                if !write(value, tree, depth + 1) {
                    return false;
                }
                tree.push(',');
            }
            tree.push(']');
            true
        }
        Some(b'"') => match serde_json::from_str::<String>(text) {
            Ok(text) => {
                tree.push_str(&serde_json::Value::String(text).to_string());
                true
            }
            Err(_) => false,
        },
        _ => {
            tree.push_str(text);
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_equal_as_a_tree_and_numbers_as_text() {
        let same = |a: &str, b: &str| fingerprint(a.as_bytes()) == fingerprint(b.as_bytes());
        assert!(same(
            r#"{"a":1,"b":[ "x" ]}"#,
            r#" {"b":["\u0078"], "a":1}"#
        ));
        assert!(!same("1970670598291982290", "1970670598291982291"));
        assert!(!same("1.0", "1"));
        assert!(!same("{\"a\":1}", "{\"a\":\"1\"}"));
        assert!(!same("[1,2]", "[2,1]"));
        assert!(same("plain", "plain") && !same("plain", "plain "));
        let deep = "[".repeat(100) + &"]".repeat(100);
        assert!(same(&deep, &deep));
        assert_ne!(fingerprint(b"\xff"), fingerprint(b"\xfe"));
    }
}
