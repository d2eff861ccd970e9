//! Rewords serde's messages for people who write JSON or TOML.

use serde_path_to_error::Path;

/// `replicas: … expected a whole number from 0 to 4294967295`
pub fn in_field(field: &Path, message: &str) -> String {
    let message = plainly(message);
    // The document itself has no name, and a message about an unknown field already names the
    // field.
    if field.iter().len() == 0 || message.starts_with("unknown field ") {
        return message;
    }
    format!("{field}: {message}")
}

/// The names in backticks, which is how serde lists what it expects.
pub(super) fn in_backticks(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The message without names of Rust types.
fn plainly(message: &str) -> String {
    if let Some((given, known)) = message
        .strip_prefix("unknown variant `")
        .and_then(|rest| rest.split_once("`, expected "))
    {
        let known = in_backticks(known).collect::<Vec<_>>().join(", ");
        return format!("unknown value {given:?}; expected {known}");
    }
    let Some((given, expected)) = message.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    let expected = match expected {
        "u32" | "u64" | "usize" if given.starts_with("invalid type") => "a whole number".into(),
        "u32" | "u64" | "usize" if given.contains("integer `-") => "no negative number".into(),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => format!("a whole number from 0 to {}", u64::MAX),
        "i64" => format!("a whole number from {} to {}", i64::MIN, i64::MAX),
        "a sequence" => "a list".into(),
        "a boolean" => "true or false".into(),
        other => other.into(),
    };
    format!(
        "{}, expected {expected}",
        given.replace("invalid type: sequence", "invalid type: list")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_called_what_they_are_in_json_and_toml() {
        let cases = [
            (
                "invalid value: integer `-1`, expected u32",
                "expected no negative number",
            ),
            (
                "invalid value: integer `5000000000`, expected u32",
                "expected a whole number from 0 to 4294967295",
            ),
            (
                "invalid type: string \"x\", expected usize",
                "expected a whole number",
            ),
            (
                "unknown variant `xml`, expected one of `auto`, `json`",
                "unknown value \"xml\"; expected auto, json",
            ),
            (
                "unknown variant `x`, expected `a` or `b`",
                "unknown value \"x\"; expected a, b",
            ),
            (
                "invalid type: string \"a, expected b\", expected a sequence",
                "\"a, expected b\", expected a list",
            ),
            (
                "invalid type: sequence, expected a string",
                "invalid type: list, expected a string",
            ),
            ("missing field `id`", "missing field `id`"),
        ];
        for (said, want) in cases {
            assert!(
                plainly(said).ends_with(want),
                "{:?} should end with {want:?}",
                plainly(said)
            );
        }
    }
}
