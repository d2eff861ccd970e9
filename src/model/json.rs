//! Checks that JSON can be read by all common parsers.

use std::str::Bytes;

use serde::de::IgnoredAny;
use serde_json::Value;

/// The maximum nesting depth of arrays and objects. taskd's answers nest a payload a few levels
/// deeper, and some parsers reject 128.
pub const MAX_DEPTH: usize = 120;

/// How deep the arrays and objects of a value are in each other.
pub fn levels(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(levels).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(levels).max().unwrap_or(0),
        _ => 0,
    }
}

/// Why a text was rejected as JSON.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    NotJson(String),
    TooDeep,
}

/// Checks that a text is JSON, that it is not nested too deeply, and that its escapes are valid
/// characters.
pub fn check(text: &str) -> Result<(), Fault> {
    let _: IgnoredAny =
        serde_json::from_str(text).map_err(|error| Fault::NotJson(error.to_string()))?;
    // `IgnoredAny` does not check the depth or surrogates.
    let mut depth = 0_usize;
    let mut is_string = false;
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => is_string = !is_string,
            b'\\' => escape(&mut bytes)
                .ok_or_else(|| Fault::NotJson("an escape is half of a character".to_owned()))?,
            b'[' | b'{' if !is_string => depth += 1,
            b']' | b'}' if !is_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(Fault::TooDeep);
        }
    }
    Ok(())
}

/// Skips an escape after its backslash. Returns `None` for a surrogate without its other half.
fn escape(bytes: &mut Bytes<'_>) -> Option<()> {
    if bytes.next()? != b'u' {
        return Some(());
    }
    match unit(bytes)? {
        0xD800..=0xDBFF => {
            let is_escape = bytes.next()? == b'\\' && bytes.next()? == b'u';
            (is_escape && matches!(unit(bytes)?, 0xDC00..=0xDFFF)).then_some(())
        }
        0xDC00..=0xDFFF => None,
        _ => Some(()),
    }
}

/// Reads the four digits of an escape.
fn unit(bytes: &mut Bytes<'_>) -> Option<u32> {
    (0..4).try_fold(0, |unit, _| {
        Some((unit << 4) | char::from(bytes.next()?).to_digit(16)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_no_deeper_than_readers_read() {
        let nested = |open: &str, close: &str, depth| {
            format!("{}1{}", open.repeat(depth), close.repeat(depth))
        };
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            check(&nested(open, close, MAX_DEPTH)).unwrap();
            assert_eq!(
                check(&nested(open, close, MAX_DEPTH + 1)),
                Err(Fault::TooDeep)
            );
            assert_eq!(check(&nested(open, close, 100_000)), Err(Fault::TooDeep));
        }
        check(&format!("[{}1]", "[],{},".repeat(1000))).unwrap();
        check(&format!(
            "[\"{}\\\"{}\"]",
            "[".repeat(1000),
            "{".repeat(1000)
        ))
        .unwrap();
    }

    #[test]
    fn escapes_are_characters() {
        for text in [
            r#"{"a":"\n\\\"\u00e9\ud83D\uDE00"}"#,
            r#"["\\ud800", "\ue000\ud7ff"]"#,
        ] {
            check(text).unwrap();
        }
        for text in [
            r#"{"a":"\ud800"}"#,
            r#"{"\ud83d":1}"#,
            r#"["\ude00\ud83d"]"#,
            r#"["\ud83dx"]"#,
            r#"["\ud83d\n"]"#,
            r#"["\ud83d\ud83d\ude00"]"#,
        ] {
            assert_eq!(
                check(text),
                Err(Fault::NotJson(
                    "an escape is half of a character".to_owned()
                )),
                "{text}"
            );
        }
    }
}
