//! Messages of serde in the words of people who write JSON or TOML.

use serde_path_to_error::Path;

/// `replicas: … expected a whole number from 0 to 4294967295`
pub fn in_field(field: &Path, message: &str) -> String {
    let message = plainly(message);
    // The whole document has no name, and the message names an unknown field.
    if field.iter().len() == 0 || message.starts_with("unknown field ") {
        return message;
    }
    format!("{field}: {message}")
}

/// The message without names of Rust types.
fn plainly(message: &str) -> String {
    let Some((given, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let expected = match expected {
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => format!("a whole number from 0 to {}", u64::MAX),
        "i64" => format!("a whole number from {} to {}", i64::MIN, i64::MAX),
        "a sequence" => "a list".into(),
        "a boolean" => "true or false".into(),
        other => other.into(),
    };
    format!("{}, expected {expected}", given.replace("invalid type: sequence", "invalid type: list"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_called_what_they_are_in_json_and_toml() {
        let cases = [
            ("invalid value: integer `-1`, expected u32", "expected a whole number from 0 to 4294967295"),
            ("invalid type: string \"x\", expected usize", "expected a whole number from 0 to 18446744073709551615"),
            ("invalid type: string \"a, expected b\", expected a sequence", "\"a, expected b\", expected a list"),
            ("invalid type: sequence, expected a string", "invalid type: list, expected a string"),
            ("missing field `id`", "missing field `id`"),
        ];
        for (said, want) in cases {
            assert!(plainly(said).ends_with(want), "{:?} should end with {want:?}", plainly(said));
        }
    }
}
