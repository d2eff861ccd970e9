//! Where values come from, and how messages name their origin.

use std::{collections::BTreeMap, fmt::Display, path::PathBuf};

use clap::{ArgMatches, parser::ValueSource};

use super::{error::Error, properties::Properties};

/// The origin of a value that is not a default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
    /// An environment variable that is not taskd's own.
    Variable(&'static str),
    File {
        path: PathBuf,
        line: usize,
    },
}

/// The origin of each key. The keys of a queue have the form `queues.NAME.key`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<String, Origin>);

impl Origins {
    /// The origins of options that were given as flags or in the environment.
    pub fn given(matches: &ArgMatches) -> Self {
        let source = |id: &str| match matches.value_source(id) {
            Some(ValueSource::CommandLine) => Some(Origin::Flag),
            Some(ValueSource::EnvVariable) => Some(Origin::Environment),
            _ => None,
        };
        let ids = matches.ids().map(clap::Id::as_str);
        // A group has an id, too, but no value source.
        Self(
            ids.filter(|id| matches.try_contains_id(id).is_ok())
                .filter_map(|id| Some((id.into(), source(id)?)))
                .collect(),
        )
    }

    /// Adds the `[kafka]` properties that were given in the environment.
    pub fn with_environment(mut self, kafka: &Properties) -> Self {
        let keys = kafka
            .names()
            .map(|name| (format!("kafka.{name}"), Origin::Environment));
        self.0.extend(keys);
        self
    }

    /// `--partitions`, `TASKD_PARTITIONS` or `taskd.toml:3`. `None` for a default.
    pub fn describe(&self, key: &str) -> Option<String> {
        Some(match self.0.get(key)? {
            Origin::Flag => format!("--{}", key.replace('_', "-")),
            Origin::Environment => format!("TASKD_{}", key.replace('.', "_").to_uppercase()),
            Origin::Variable(name) => (*name).to_owned(),
            Origin::File { path, line } => format!("{}:{line}", path.display()),
        })
    }

    /// The origin of a setting, formatted as a message prefix. Empty for a default.
    pub(super) fn prefix(&self, key: &str) -> String {
        self.describe(key)
            .map(|origin| format!("{origin}: "))
            .unwrap_or_default()
    }

    /// If a backend's message begins with the name of a setting, returns the origin of that setting
    /// as a prefix for the message.
    pub fn place(&self, message: &str) -> String {
        let message = message.replacen("kafka: ", "kafka.", 1);
        self.prefix(message.split([' ', ':']).next().unwrap_or_default())
    }

    /// The error for an invalid value of `key`: `partitions = 2000 (taskd.toml:3) must be …`
    pub(super) fn fault(&self, key: &str, value: impl Display, why: &str) -> Error {
        Error::Value(format!("{} {why}", self.shown(key, value)))
    }

    /// `partitions = 2000 (taskd.toml:3)`
    pub(super) fn shown(&self, key: &str, value: impl Display) -> String {
        let origin = self
            .describe(key)
            .map_or_else(|| " (the default)".into(), |origin| format!(" ({origin})"));
        format!("{key} = {value}{origin}")
    }

    /// Adds `others`, which take precedence.
    pub(super) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    pub(super) fn insert(&mut self, key: String, origin: Origin) {
        self.0.insert(key, origin);
    }
}
