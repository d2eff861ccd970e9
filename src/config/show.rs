//! Settings as a configuration file.

use super::{Options, Origins, Settings, without_password};

/// A file that gives `settings`, passwords hidden; behind each value that is not a default, where it came from.
pub fn to_toml(settings: &Settings, origins: &Origins) -> String {
    let mut options = Options::of(settings);
    for url in [&mut options.redis_url, &mut options.database_url, &mut options.bus_url].into_iter().flatten() {
        *url = without_password(url);
    }
    options.kafka = options.kafka.hidden();
    let text = toml::to_string(&options).expect("options are strings, numbers and lists of them under string keys");
    with_origins(&text, origins)
}

fn with_origins(text: &str, origins: &Origins) -> String {
    let mut section = String::new();
    let mut shown = String::with_capacity(text.len() * 2);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = format!("{}.", name.replace('"', ""));
        }
        let key = line.split(" = ").next().unwrap_or_default().trim_matches('"');
        shown.push_str(line);
        if let Some(origin) = origins.describe(&format!("{section}{key}")) {
            shown.push_str(" # ");
            shown.push_str(&origin);
        }
        shown.push('\n');
    }
    shown
}
