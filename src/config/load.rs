//! Builds [`Settings`] from flags, environment and file.

use std::{collections::BTreeMap, fs, path::Path};

use toml::de::{DeTable, DeValue};

use super::{
    check::check,
    error::Error,
    options::{Options, QueueOptions, SubscriptionOptions, TopicOptions},
    origins::{Origin, Origins},
    otel,
    properties::Rules,
    settings::Settings,
    urls,
    wording::{in_backticks, in_field},
};
use crate::model::{
    Matching, QueueName, SubscriptionName, TopicPattern, TopicSettings, nearest, topic_of_users,
};

/// A checked configuration.
#[derive(Debug)]
pub struct Loaded {
    pub settings: Settings,
    pub origins: Origins,
}

/// Completes `flags` (which include the environment) with the values of their `config` file and the
/// defaults.
///
/// `given` has the origins of the flags, and `rules` apply to the properties in `[kafka]`.
/// `variable` reads an OpenTelemetry environment variable.
pub fn load(
    flags: Options,
    given: Origins,
    rules: Rules,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Loaded, Error> {
    let mut settings = Settings::default();
    let mut origins = Origins::default();
    let mut options = flags;
    if let Some(path) = options.config.clone() {
        let text = fs::read_to_string(&path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        origins = origins_in(&path, &text)?;
        let document =
            toml::Deserializer::parse(&text).map_err(|error| located(&path, &text, &error))?;
        let mut of_file: Options = serde_path_to_error::deserialize(document).map_err(|error| {
            let message = in_field(error.path(), error.inner().message());
            located_as(&path, &text, error.inner(), &message)
        })?;
        apply_queues(std::mem::take(&mut of_file.queues), &mut settings, &origins)?;
        apply_topics(std::mem::take(&mut of_file.topics), &mut settings, &origins)?;
        let subscriptions = std::mem::take(&mut of_file.subscriptions);
        apply_subscriptions(subscriptions, &mut settings, &origins)?;
        options = options.over(of_file);
    }
    origins.extend(given);
    settings.traces.resource = otel::fill(&mut options, &mut origins, variable)?;
    settings.redis_url = urls::given("redis_url", options.redis_url.take(), &origins)?;
    settings.database_url = urls::given("database_url", options.database_url.take(), &origins)?;
    settings.bus_url = urls::given("bus_url", options.bus_url.take(), &origins)?;
    options.apply(&mut settings);
    check(&settings, &origins, rules)?;
    Ok(Loaded { settings, origins })
}

/// Named queues start from `[queues.default]`, which starts from taskd's defaults.
fn apply_queues(
    mut queues: BTreeMap<String, QueueOptions>,
    settings: &mut Settings,
    origins: &Origins,
) -> Result<(), Error> {
    if let Some(default) = queues.remove("default") {
        default.apply(&mut settings.queues.default);
    }
    for (name, options) in queues {
        let queue = QueueName::new(&name).map_err(|error| {
            let key = format!("queues.{name}");
            Error::Value(format!("{}{error}", origins.prefix(&key)))
        })?;
        let mut queue_settings = settings.queues.default.clone();
        options.apply(&mut queue_settings);
        settings.queues.named.insert(queue, queue_settings);
    }
    Ok(())
}

fn apply_topics(
    topics: BTreeMap<String, TopicOptions>,
    settings: &mut Settings,
    origins: &Origins,
) -> Result<(), Error> {
    for (name, options) in topics {
        let topic = topic_of_users(&name).map_err(|error| {
            let key = format!("topics.{name}");
            Error::Value(format!("{}{error}", origins.prefix(&key)))
        })?;
        let mut topic_settings = TopicSettings::default();
        options.apply(&mut topic_settings);
        settings.topics.insert(topic, topic_settings);
    }
    Ok(())
}

/// Whether topics exist, and where a place is, is checked when the subscription is made.
fn apply_subscriptions(
    subscriptions: BTreeMap<String, SubscriptionOptions>,
    settings: &mut Settings,
    origins: &Origins,
) -> Result<(), Error> {
    for (name, options) in subscriptions {
        let put = options.read();
        let key = format!("subscriptions.{name}");
        let wrong = |error: String| Error::Value(format!("{}{error}", origins.prefix(&key)));
        let name = SubscriptionName::new(&name).map_err(|error| wrong(error.to_string()))?;
        if let Some(topic) = &put.topic {
            TopicPattern::new(topic).map_err(wrong)?;
        }
        if let Some(queue) = &put.queue {
            QueueName::new(queue).map_err(|error| wrong(error.to_string()))?;
        }
        if let Some(matching) = &put.matching {
            Matching::read(matching).map_err(wrong)?;
        }
        settings.subscriptions.insert(name, put);
    }
    Ok(())
}

/// Finds the line of each key in the file.
fn origins_in(path: &Path, text: &str) -> Result<Origins, Error> {
    let table = DeTable::parse(text).map_err(|error| located(path, text, &error))?;
    let mut origins = Origins::default();
    note(table.get_ref(), "", &mut |key, at| {
        origins.insert(
            key,
            Origin::File {
                path: path.to_owned(),
                line: line_of(text, at),
            },
        );
    });
    Ok(origins)
}

fn note(table: &DeTable<'_>, prefix: &str, found: &mut impl FnMut(String, usize)) {
    for (key, value) in table {
        let path = format!("{prefix}{}", key.get_ref());
        found(path.clone(), key.span().start);
        if let DeValue::Table(inner) = value.get_ref() {
            note(inner, &format!("{path}."), found);
        }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()
        .iter()
        .take(at)
        .filter(|byte| **byte == b'\n')
        .count()
        + 1
}

fn located(path: &Path, text: &str, error: &toml::de::Error) -> Error {
    located_as(path, text, error, error.message())
}

fn located_as(path: &Path, text: &str, error: &toml::de::Error, message: &str) -> Error {
    let line = line_of(text, error.span().map_or(0, |span| span.start));
    Error::File {
        path: path.to_owned(),
        line,
        message: in_one_line(message),
    }
}

/// Rewords a serde message in TOML's terms: "key" instead of "field", quoted as in all other
/// messages.
fn in_one_line(message: &str) -> String {
    let message = message.lines().collect::<Vec<_>>().join("; ");
    match message
        .strip_prefix("unknown field `")
        .and_then(|rest| rest.split_once("`, expected "))
    {
        Some((key, expected))
            if expected.starts_with("one of `pipelines`") && is_of_queues(key) =>
        {
            format!(
                "{key} is a setting of queues; write it below [queues.default], or [queues.NAME] for one queue"
            )
        }
        Some((key, expected)) => {
            let guess =
                nearest(key, in_backticks(expected)).map(|near| format!("did you mean {near}? "));
            format!(
                "unknown key {key:?}; {}taskd.toml lists all",
                guess.unwrap_or_default()
            )
        }
        None => message,
    }
}

/// True if there is a queue setting of this name.
fn is_of_queues(key: &str) -> bool {
    let read = toml::from_str::<QueueOptions>(&format!("{key} = []"));
    read.err()
        .is_none_or(|error| !error.message().starts_with("unknown field"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::{Args, Command, FromArgMatches};

    use super::*;
    use crate::{
        config::{settings::Pipeline, show::to_toml},
        model::Priority,
    };

    const RULES: Rules = Rules {
        mistake: |_| None,
        is_secret: |_| false,
    };

    fn parse(args: &[&str]) -> (Options, Origins) {
        let command = Options::augment_args(Command::new("taskd").no_binary_name(true));
        let matches = command.try_get_matches_from(args).unwrap();
        (
            Options::from_arg_matches(&matches).unwrap(),
            Origins::given(&matches),
        )
    }

    fn load_with(file: &str, args: &[&str]) -> Result<Loaded, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.toml");
        fs::write(&path, file).unwrap();
        let (mut flags, given) = parse(args);
        flags.config = Some(path);
        let shown = format!("{}/", dir.path().display());
        load(flags, given, RULES, |_| None).map_err(|error| error.to_string().replace(&shown, ""))
    }

    fn load_file(file: &str) -> Result<Settings, String> {
        load_with(file, &[]).map(|loaded| loaded.settings)
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let file = "partitions = 8\ngrace_period = \"3s\"\n";
        let loaded = load_with(file, &["--partitions", "16"]).unwrap();
        assert_eq!(loaded.settings.partitions, 16);
        assert_eq!(loaded.settings.grace_period, Duration::from_secs(3));
        assert_eq!(loaded.settings.stall_after, Settings::default().stall_after);
        assert_eq!(
            loaded.origins.describe("partitions").unwrap(),
            "--partitions"
        );
        assert!(
            loaded
                .origins
                .describe("grace_period")
                .unwrap()
                .ends_with("t.toml:2")
        );
        assert_eq!(loaded.origins.describe("stall_after"), None);
    }

    #[test]
    fn a_named_queue_inherits_from_the_default_section() {
        let settings = load_file(
            "[queues.crawl]\nreplicas = 3\n[queues.default]\nlease = \"1m\"\npriority = \"low\"\nbackoff = [\"2s\"]\n",
        )
        .unwrap();
        let crawl = settings.queues.get(&QueueName::new("crawl").unwrap());
        assert_eq!(
            (crawl.replicas, crawl.lease, crawl.priority),
            (3, Duration::from_secs(60), Priority::Low)
        );
        let other = settings.queues.get(&QueueName::new("other").unwrap());
        assert_eq!(
            (other.replicas, &other.backoff),
            (1, &vec![Duration::from_secs(2)])
        );
    }

    #[test]
    fn an_empty_url_means_the_embedded_default() {
        assert_eq!(load_file("redis_url = \"\"").unwrap().redis_url, None);
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line_with_its_place_and_the_alternatives() {
        let cases = [
            (
                "a = 1\n",
                "t.toml:1: unknown key \"a\"; taskd.toml lists all",
            ),
            (
                "lease = \"5s\"\n",
                "t.toml:1: lease is a setting of queues; write it below [queues.default], or [queues.",
            ),
            (
                "partitions = 4\npartitons = 3\n",
                "t.toml:2: unknown key \"partitons\"; did you mean partitions? taskd.toml lists all",
            ),
            (
                "[queue.crawl]\n",
                "t.toml:1: unknown key \"queue\"; did you mean queues? taskd.toml lists all",
            ),
            (
                "[queues.q]\nreplica = 1\n",
                "t.toml:2: unknown key \"replica\"; did you mean replicas? taskd.toml lists all",
            ),
            (
                "partitions = \"3\"",
                "t.toml:1: partitions: invalid type: string \"3\", expected a whole number",
            ),
            (
                "[queues.q]\npriority = \"urgent\"",
                "queues.q.priority: unknown value \"urgent\"; expected high, medium, low",
            ),
            (
                "[queues.q]\nidempotency_window = \"31days\"",
                "queues.q.idempotency_window = 31days (t.toml:2) must be 1s to 30days",
            ),
            (
                "pipelines = \"fnout\"",
                "t.toml:1: pipelines: unknown pipeline \"fnout\"; expected all, discovery, fanout, watchdog, tasks, workflow",
            ),
            (
                "grace_period = \"5\"",
                "t.toml:1: grace_period: \"5\" is not a duration",
            ),
            (
                "http_listen = \"localhost:7600\"",
                "t.toml:1: http_listen: \"localhost:7600\" is not an address; write IP:PORT, for example \
                 127.0.0.1:7600",
            ),
            ("grace_period = 5", "expected a duration such as \"30s\""),
            (
                "max_payload_bytes = \"1 lot\"",
                "t.toml:1: max_payload_bytes: \"1 lot\" is not a size",
            ),
            (
                "\npartitions = -1",
                "t.toml:2: partitions: invalid value: integer `-1`, expected no negative number",
            ),
            (
                "max_items = \"x\"",
                "t.toml:1: max_items: invalid type: string \"x\", expected a whole number",
            ),
            (
                "[queues.q]\nbackoff = \"1s\"",
                "t.toml:2: queues.q.backoff: invalid type: string \"1s\", expected a list",
            ),
            (
                "[queues]\nq = 3",
                "t.toml:2: queues.q: invalid type: integer `3`, expected a section [queues.NAME]",
            ),
            ("\n\npartitions =\n", "t.toml:3: "),
            (
                "log_format = \"xml\"",
                "t.toml:1: log_format: unknown value \"xml\"; expected auto, pretty, json",
            ),
            (
                "[topics.t]\npartitions = 257",
                "topics.t.partitions = 257 (t.toml:2) must be 1 to 256",
            ),
            (
                "[topics.events]\n",
                "t.toml:1: topic \"events\" is one of taskd's own; choose another name",
            ),
            (
                "[subscriptions.s]\ntopic = \"t\"\nmatch = {a = 1}",
                "t.toml:1: match: \"a\" has a value that is no text",
            ),
            (
                "[queues.\"a b\"]\n",
                "t.toml:1: queue \"a b\" contains ' '; use A-Z a-z 0-9 . _ -",
            ),
        ];
        for (file, want) in cases {
            let error = load_file(file).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let flags = Options {
            config: Some("/no/such.toml".into()),
            ..Default::default()
        };
        let error = load(flags, Origins::default(), RULES, |_| None)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cannot read the configuration file /no/such.toml: "),
            "{error}"
        );
    }

    #[test]
    fn every_flag_has_its_environment_variable_and_its_key() {
        let command = Options::augment_args(Command::new("taskd"));
        let table = toml::Table::try_from(Options::of(&Settings {
            pipelines: Pipeline::ALL.to_vec(),
            ..Default::default()
        }))
        .unwrap();
        for arg in command.get_arguments() {
            let key = arg.get_id().as_str();
            assert_eq!(
                arg.get_env().unwrap(),
                format!("TASKD_{}", key.to_uppercase()).as_str()
            );
            assert_eq!(arg.get_long().unwrap(), key.replace('_', "-"));
            assert!(
                key == "config" || table.contains_key(key),
                "{key} cannot be printed"
            );
        }
        assert_eq!(
            table.len(),
            command.get_arguments().count() - 1 + 1,
            "all but --config, and the queues"
        );
    }

    #[test]
    fn the_sample_documents_every_key_with_its_default() {
        let sample = include_str!("../../taskd.toml");
        let settings = load_file(sample).unwrap();
        let everything = Settings {
            pipelines: Pipeline::ALL.to_vec(),
            ..Default::default()
        };
        assert_eq!(settings, everything);
        let documented: toml::Table = sample.parse().unwrap();
        let all: toml::Table = to_toml(&everything, &Origins::default(), RULES.is_secret)
            .parse()
            .unwrap();
        assert_eq!(
            documented.keys().collect::<Vec<_>>(),
            all.keys().collect::<Vec<_>>()
        );
        let keys = |table: &toml::Table| {
            table["queues"]["default"]
                .as_table()
                .unwrap()
                .keys()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(keys(&documented), keys(&all));
    }

    #[test]
    fn what_is_printed_reads_back_as_the_same() {
        let file = "pipelines = \"tasks\"\nmax_items = 7\nbus_url = \"kafka://h:9092\"\n[queues.crawl]\nlease = \"1500ms\"\n";
        let loaded = load_with(file, &["--partitions", "16"]).unwrap();
        let printed = to_toml(&loaded.settings, &loaded.origins, RULES.is_secret);
        assert_eq!(load_file(&printed).unwrap(), loaded.settings);
        assert!(
            printed.contains("partitions = 16 # --partitions\n"),
            "{printed}"
        );
        assert!(printed.contains("t.toml:2\n"), "{printed}");
        assert!(printed.contains("t.toml:5\n"), "{printed}");
    }

    #[test]
    fn a_text_with_line_breaks_is_printed_with_its_origin_behind_it() {
        let loaded = load_with("data_dir = \"a\\nb = 'c\\n[d]\"\npartitions = 16\n", &[]).unwrap();
        let printed = to_toml(&loaded.settings, &loaded.origins, RULES.is_secret);
        assert_eq!(load_file(&printed).unwrap(), loaded.settings);
        assert_eq!(printed.matches("t.toml:").count(), 2, "{printed}");
    }
}
