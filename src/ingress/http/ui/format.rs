//! Numbers, times and strangers' texts, as the pages show them. The templates escape markup; this
//! file takes care of the characters that change how others are shown.

use crate::model::{is_hidden, printable, to_rfc_3339};

/// Numbers from here on are shortened.
const EXACT_BELOW: u64 = 10_000_000;

/// A number with separators, exact below ten million.
pub(super) fn count(number: u64) -> String {
    if number >= EXACT_BELOW {
        return match number {
            ..1_000_000_000 => format!("{:.1} M", number as f64 / 1e6),
            _ => format!("{:.1} G", number as f64 / 1e9),
        };
    }
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + 2);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number that may be negative.
pub(super) fn signed(number: i64) -> String {
    let sign = if number < 0 { "−" } else { "" };
    format!("{sign}{}", count(number.unsigned_abs()))
}

/// A rate per second; `None` is unknown.
pub(super) fn rate(per_second: Option<f64>) -> String {
    match per_second {
        None => "–".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(rate) if rate < 10.0 => format!("{rate:.1}"),
        Some(rate) => count(rate.round() as u64),
    }
}

/// An age in its largest unit: `14 min`.
pub(super) fn age(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0 if ms > 0 => "< 1 s".to_owned(),
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// The age of a time, or how long it is until then.
pub(super) fn distance(unix_ms: i64, now_unix_ms: i64) -> String {
    let ago = now_unix_ms.saturating_sub(unix_ms);
    let text = age(ago.unsigned_abs());
    if ago < 0 {
        format!("in {text}")
    } else {
        format!("{text} ago")
    }
}

/// A size in bytes.
pub(super) fn size(bytes: usize) -> String {
    match bytes {
        ..1024 => format!("{bytes} bytes"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}

/// A time for `<time datetime="…">`, and how people read it without a script.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    pub(super) iso: String,
    pub(super) text: String,
}

impl Moment {
    pub(super) fn new(unix_ms: i64) -> Self {
        let iso = to_rfc_3339(unix_ms);
        let text = to_rfc_3339(unix_ms.div_euclid(1000) * 1000);
        let text = text.replace('T', " ").replace('Z', " UTC");
        Self { iso, text }
    }

    pub(super) fn some(unix_ms: Option<i64>) -> Option<Self> {
        unix_ms.map(Self::new)
    }
}

/// A name and a text, or a time.
#[derive(Debug)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) text: String,
    pub(super) at: Option<Moment>,
}

impl Fact {
    pub(super) fn new(name: &'static str, text: impl Into<String>) -> Self {
        Self {
            name,
            text: text.into(),
            at: None,
        }
    }

    pub(super) fn at(name: &'static str, unix_ms: i64) -> Self {
        Self {
            name,
            text: String::new(),
            at: Some(Moment::new(unix_ms)),
        }
    }
}

/// A stranger's text on one line. Characters that nobody sees are written out.
pub(super) fn line(text: &str) -> String {
    printable(text)
}

/// A text with a capital at its beginning and a full stop at its end.
pub(super) fn sentence(text: &str) -> String {
    let text = end(text);
    let mut rest = text.chars();
    match rest.next() {
        Some(first) => first.to_uppercase().chain(rest).collect(),
        None => text,
    }
}

/// A text with a full stop at its end.
pub(super) fn end(text: &str) -> String {
    let mut text = line(text);
    if !text.is_empty() && !text.ends_with(['.', '!', '?']) {
        text.push('.');
    }
    text
}

/// A key, or other bytes, on one line. Bytes that are not UTF-8 are written as `\xff`.
pub(super) fn bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(&printable(chunk.valid()));
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// A text of several lines, such as a payload: line breaks and tabs stay, hidden characters and
/// bytes that are not UTF-8 are written out.
pub(super) fn lines(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if matches!(c, '\n' | '\t') {
                text.push(c);
            } else if c.is_control() || is_hidden(c) {
                text.extend(c.escape_default());
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// Encodes a text as a part of a URL.
pub(super) fn encoded(text: &str) -> String {
    let mut url = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                url.push(char::from(byte));
            }
            _ => url.push_str(&format!("%{byte:02X}")),
        }
    }
    url
}

/// A query of these parameters, without the empty ones: `?a=1&b=2`, or nothing.
pub(super) fn query(parameters: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in parameters {
        if value.is_empty() {
            continue;
        }
        text.push(if text.is_empty() { '?' } else { '&' });
        text.push_str(&encoded(name));
        text.push('=');
        text.push_str(&encoded(value));
    }
    text
}

/// Indents JSON without reading its numbers, which may have more digits than any number here.
/// Returns `None` if the text is not JSON.
pub(super) fn indented(json: &str) -> Option<String> {
    serde_json::from_str::<&serde_json::value::RawValue>(json).ok()?;
    let mut text = String::with_capacity(json.len() * 2);
    let mut depth = 0_usize;
    let mut rest = json.trim().chars().peekable();
    let new_line = |text: &mut String, depth: usize| {
        text.push('\n');
        text.extend(std::iter::repeat_n("  ", depth.min(MOST_INDENTED)));
    };
    while let Some(c) = rest.next() {
        match c {
            '"' => {
                text.push(c);
                while let Some(c) = rest.next() {
                    text.push(c);
                    match c {
                        '\\' => text.extend(rest.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            '{' | '[' => {
                text.push(c);
                while rest.next_if(|c| c.is_ascii_whitespace()).is_some() {}
                if let Some(end) = rest.next_if(|c| matches!(c, '}' | ']')) {
                    text.push(end);
                    continue;
                }
                depth += 1;
                new_line(&mut text, depth);
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut text, depth);
                text.push(c);
            }
            ',' => {
                text.push(c);
                new_line(&mut text, depth);
            }
            ':' => text.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => text.push(c),
        }
    }
    Some(text)
}

/// Deeper levels are not indented further, so that hostile JSON does not grow with its square.
const MOST_INDENTED: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_exact_below_ten_million() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
            (9_999_999, "9,999,999"),
            (12_345_678, "12.3 M"),
            (7_000_000_000, "7.0 G"),
        ] {
            assert_eq!(count(number), text);
        }
        assert_eq!(signed(-1204), "−1,204");
        assert_eq!(
            [rate(None), rate(Some(0.0)), rate(Some(0.25))],
            ["–", "0", "0.2"]
        );
        assert_eq!(rate(Some(900.4)), "900");
    }

    #[test]
    fn ages_have_one_unit() {
        let ages = [0, 300, 14_000, 840_000, 7_200_000, 172_800_000].map(age);
        assert_eq!(ages, ["0 s", "< 1 s", "14 s", "14 min", "2 h", "2 days"]);
        assert_eq!(distance(1000, 61_000), "60 s ago");
        assert_eq!(distance(61_000, 1000), "in 60 s");
    }

    #[test]
    fn hidden_characters_and_other_bytes_are_written_out() {
        assert_eq!(bytes(b"a\xff\xe2\x80\xae\n"), "a\\xff\\u{202e}\\n");
        assert_eq!(lines(b"a\n\tb\x00\xfe"), "a\n\tb\\u{0}\\xfe");
    }

    #[test]
    fn a_sentence_begins_and_ends() {
        assert_eq!(sentence("it is completed"), "It is completed.");
        assert_eq!([sentence(""), sentence("Done.")], ["", "Done."]);
        assert_eq!(end("w1 completes it"), "w1 completes it.");
    }

    #[test]
    fn parts_of_urls_are_encoded() {
        assert_eq!(encoded("a b/ü?&#"), "a%20b%2F%C3%BC%3F%26%23");
        assert_eq!(
            query(&[("a", ""), ("b", "x=y"), ("c", "1")]),
            "?b=x%3Dy&c=1"
        );
        assert_eq!(query(&[]), "");
    }

    #[test]
    fn json_is_indented_and_its_numbers_stay() {
        let json = r#"{"id":1970670598291982290.10,"a":[ ],"b":["x,{\"y",1e400]}"#;
        let want = "{\n  \"id\": 1970670598291982290.10,\n  \"a\": [],\n  \"b\": [\n    \"x,{\\\"y\",\n    1e400\n  ]\n}";
        assert_eq!(indented(json).as_deref(), Some(want));
        assert_eq!(indented("{\"a\":"), None);
        assert_eq!(indented("plain"), None);
    }
}
