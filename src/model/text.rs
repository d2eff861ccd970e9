//! Texts of callers in messages about them.

use std::borrow::Cow;

/// The bytes of a sent text in a message about it.
pub const ECHO: usize = 100;

/// The beginning of a text that may have megabytes.
pub fn shorten(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    format!("{}…", &text[..end]).into()
}
