//! Prints settings as a configuration file.

use std::fmt;

use super::{options::Options, origins::Origins, settings::Settings};

/// A configuration file that produces `settings`, without secrets. A comment names the origin of
/// each value that is not a default.
pub fn to_toml(settings: &Settings, origins: &Origins, is_secret: fn(&str) -> bool) -> String {
    let mut options = Options::of(settings);
    options.kafka = options.kafka.hidden(is_secret);
    let text = toml::to_string(&options)
        .expect("options are strings, numbers and lists of them under string keys");
    with_origins(&text, origins)
}

/// Like the output of `taskd check-config`, but without any value of `[kafka]`.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_toml(self, &Origins::default(), |_| true))
    }
}

fn with_origins(text: &str, origins: &Origins) -> String {
    let mut section = String::new();
    let mut shown = String::with_capacity(text.len() * 2);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            section = format!("{}.", name.replace('"', ""));
        }
        let key = line
            .split(" = ")
            .next()
            .unwrap_or_default()
            .trim_matches('"');
        let mut entry = line.to_owned();
        // A text with line breaks spans several lines, and the comment goes after the last one.
        while toml::from_str::<toml::Table>(&entry).is_err() {
            let Some(more) = lines.next() else { break };
            entry.push('\n');
            entry.push_str(more);
        }
        shown.push_str(&entry);
        if let Some(origin) = origins.describe(&format!("{section}{key}")) {
            shown.push_str(" # ");
            shown.push_str(&origin);
        }
        shown.push('\n');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_shown_without_passwords() {
        let settings = Settings {
            redis_url: Some("redis://:sesame@h".parse().unwrap()),
            ..Default::default()
        };
        assert!(!format!("{settings:?}").contains("sesame"));
    }
}
