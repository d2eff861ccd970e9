//! Texts of callers, made safe for messages and terminals.

use std::borrow::Cow;

/// The maximum length of a caller's text in a message about it, in bytes.
pub const ECHO: usize = 100;

/// Truncates a text that may be megabytes long.
pub fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    let end = (0..=max)
        .rev()
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or_default();
    format!("{}…", &text[..end]).into()
}

/// The known name that `given` was most likely meant to be. At most a third of its characters may
/// be wrong.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distances = known
        .into_iter()
        .map(|known| (strsim::damerau_levenshtein(known, given), known));
    let (distance, known) = distances.min()?;
    (3 * distance <= given.chars().count()).then_some(known)
}

/// True for a character that is invisible or changes how others are shown: Unicode's categories Cf
/// (direction marks, zero width), Zl and Zp, and fillers. With such characters, a text can look
/// like another one.
pub fn is_hidden(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{34f}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{890}'..='\u{891}'
            | '\u{8e2}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{110bd}'
            | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// Escapes control characters and hidden ones, so that the text takes one line on a terminal.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_hidden(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Escapes hidden characters in the way of JSON, and also those control characters that JSON allows
/// unescaped (U+007F to U+009F). JSON keeps its value, because such characters occur only inside
/// its strings.
pub fn escape_hidden(text: &str) -> Cow<'_, str> {
    let is_escaped = |c: char| matches!(c, '\u{7f}'..='\u{9f}') || is_hidden(c);
    if !text.contains(is_escaped) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                shown.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            shown.push(c);
        }
    }
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first and the last character of each range of Cf, Zl and Zp in Unicode 16, and some
    /// others.
    const HIDDEN: &str = "\u{ad}\u{600}\u{605}\u{61c}\u{6dd}\u{70f}\u{890}\u{891}\u{8e2}\u{180e}\u{200b}\u{200c}\u{200d}\u{200e}\
        \u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2060}\u{2064}\u{2066}\u{2067}\u{2068}\u{2069}\u{206a}\
        \u{206f}\u{feff}\u{fff9}\u{fffb}\u{110bd}\u{110cd}\u{13430}\u{1343f}\u{1bca0}\u{1bca3}\u{1d173}\u{1d17a}\u{e0001}\u{e0020}\
        \u{e007f}";

    #[test]
    fn hidden_characters_are_escaped() {
        for c in HIDDEN.chars().chain('\u{7f}'..='\u{9f}') {
            let text = format!("a{c}b");
            assert_eq!(printable(&text), format!("a{}b", c.escape_default()));
            let json = serde_json::to_string(&text).unwrap();
            let escaped = escape_hidden(&json);
            assert!(escaped.is_ascii(), "{escaped}");
            assert_eq!(
                serde_json::from_str::<String>(&escaped).unwrap(),
                text,
                "{escaped}"
            );
        }
    }

    #[test]
    fn texts_of_any_language_stay() {
        for text in [
            "",
            "a b",
            "Straße 日本 привет العربية 🦀\n\t\"x\"",
            "e\u{301}",
        ] {
            assert_eq!(escape_hidden(text), text);
        }
        assert_eq!(printable("Straße 日本\n\u{1b}["), "Straße 日本\\n\\u{1b}[");
    }

    #[test]
    fn only_a_name_that_is_near_is_named() {
        let near = |given| nearest(given, ["queues", "partitions", "log"]);
        assert_eq!(
            (near("queue"), near("partitons")),
            (Some("queues"), Some("partitions"))
        );
        assert_eq!((near("foo"), near("a"), near("")), (None, None, None));
    }
}
