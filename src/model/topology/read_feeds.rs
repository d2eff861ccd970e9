//! Reads the feeds of a topology.

use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::{
    feed::{
        FeedAck, FeedSettings, FeedSource, MOST_FEEDS, MoveTo, PendingAct, PendingRule, RedisList,
        RedisStream,
    },
    read::{Draft, File, Located, at, json_of},
};
use crate::model::{
    ECHO, Matching, Offset, QueueName, SubscriptionName, TopicPattern, TopologyName, shorten,
};

const KINDS: [&str; 3] = ["topic", "redis_stream", "redis_list"];
const KEYS: [&str; 5] = ["type", "into", "ack", "ack_batch", "ack_interval"];
const TOPIC_KEYS: [&str; 5] = ["type", "into", "topic", "start", "match"];
const STREAM_KEYS: [&str; 9] = [
    "url", "key", "group", "start", "count", "block", "delete", "payload", "pending",
];
const LIST_KEYS: [&str; 4] = ["url", "key", "pop", "count"];
const RULE_KEYS: [&str; 4] = ["idle", "deliveries", "do", "to"];
/// The most rules of a feed.
const MOST_RULES: usize = 16;

/// The most entries that are read at once.
const MOST_AT_ONCE: u32 = 1000;
/// A stop waits for a read.
const LONGEST_BLOCK: Duration = Duration::from_secs(5);
const LONGEST_IDLE: Duration = Duration::from_secs(30 * 24 * 3600);
const LONGEST_INTERVAL: Duration = Duration::from_secs(3600);
/// The longest key, group or field.
const MAX_NAME: usize = 512;

impl File<'_> {
    /// Reads the feeds, in the order of the file.
    pub(super) fn feeds(
        &mut self,
        table: &DeTable<'_>,
        topology: Option<&TopologyName>,
        drafts: &[Draft],
    ) -> Vec<FeedSettings> {
        let Some(value) = table.get("feed") else {
            return Vec::new();
        };
        let Some(feeds) = self.table("feed", value) else {
            return Vec::new();
        };
        let mut feeds: Vec<_> = feeds.iter().collect();
        feeds.sort_by_key(|(name, _)| name.span().start);
        if feeds.len() > MOST_FEEDS {
            let says = format!(
                "the topology has {} feeds; at most {MOST_FEEDS}",
                feeds.len()
            );
            self.wrong(feeds[MOST_FEEDS].0.span().start, says);
            feeds.truncate(MOST_FEEDS);
        }
        let mut read = Vec::new();
        for (name, value) in feeds {
            let at = name.span().start;
            let Some(table) = self.table("a feed", value) else {
                continue;
            };
            self.part("feed", at, name.get_ref());
            let named = topology.map_or("topology", TopologyName::as_str);
            match SubscriptionName::new(&format!("{named}.{}", name.get_ref())) {
                Ok(name) => read.extend(self.feed(at, name, table, drafts)),
                Err(error) => self.wrong(at, error.to_string()),
            }
        }
        read
    }

    fn feed(
        &mut self,
        place: usize,
        name: SubscriptionName,
        table: &DeTable<'_>,
        drafts: &[Draft],
    ) -> Option<FeedSettings> {
        let into = self.stage_of(place, table, drafts);
        let kind = match table.get("type") {
            Some(value) => self.text("type", value).map(|kind| (at(value), kind)),
            None => {
                let says = format!("type is missing; expected {}", KINDS.join(", "));
                self.wrong(place, says);
                None
            }
        };
        let (kind_at, kind) = kind?;
        let known: Vec<&str> = match kind.as_str() {
            "topic" => TOPIC_KEYS.to_vec(),
            "redis_stream" => [&KEYS[..], &STREAM_KEYS].concat(),
            "redis_list" => [&KEYS[..], &LIST_KEYS].concat(),
            other => {
                let other = shorten(other, ECHO);
                let says = format!("type is {other:?}; expected {}", KINDS.join(", "));
                self.wrong(kind_at, says);
                return None;
            }
        };
        for (key, _) in table {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                self.unknown(key.span().start, name, &known);
            }
        }
        let source = match kind.as_str() {
            "topic" => self.topic(place, table),
            "redis_stream" => self.redis_stream(place, table),
            _ => self.redis_list(place, table),
        };
        let ack = table.get("ack").and_then(|value| self.ack(value));
        if ack == Some(FeedAck::None)
            && let Some(rules) = table.get("pending")
        {
            let says =
                "pending needs an ack other than none: entries that are claimed would stay pending";
            self.wrong(at(rules), says.to_owned());
        }
        let ack_batch = self.some_number("ack_batch", table, 1, MOST_AT_ONCE, 100);
        let ack_interval = match table.get("ack_interval") {
            Some(value) => self.bounded_time("ack_interval", value, LONGEST_INTERVAL),
            None => Some(Duration::from_secs(1)),
        };
        Some(FeedSettings {
            name,
            into: into?,
            source: source?,
            ack: ack.unwrap_or_default(),
            ack_batch: ack_batch?,
            ack_interval: ack_interval?,
        })
    }

    /// The stage that gets the records: one where trees begin.
    fn stage_of(&mut self, place: usize, table: &DeTable<'_>, drafts: &[Draft]) -> Option<usize> {
        let Some(value) = table.get("into") else {
            self.wrong(place, "into is missing: into = \"STAGE\"".to_owned());
            return None;
        };
        let stage = self.text("into", value)?;
        let found = drafts.iter().position(|draft| draft.stage.name == stage);
        match found {
            None => {
                let stage = shorten(&stage, ECHO);
                self.wrong(at(value), format!("there is no stage {stage:?}"));
            }
            Some(found) if !drafts[found].stage.is_start => {
                let says = format!("no tree begins in stage {stage}: say start = true there");
                self.wrong(at(value), says);
            }
            Some(_) => {}
        }
        found
    }

    fn topic(&mut self, place: usize, table: &DeTable<'_>) -> Option<FeedSource> {
        let topic = self.needed("topic", place, table);
        let topic = topic.and_then(|(at, topic)| {
            let read = TopicPattern::new(&topic);
            read.map_err(|error| self.wrong(at, error)).ok()
        });
        let start = match table.get("start") {
            Some(value) => self.text("start", value),
            None => Some("0".to_owned()),
        };
        let matching = match table.get("match") {
            Some(value) => {
                let read = Matching::read(&json_of(value.get_ref()));
                read.map_err(|error| self.wrong(at(value), error)).ok()
            }
            None => Some(Matching::default()),
        };
        Some(FeedSource::Topic {
            topic: topic?,
            start: start?,
            matching: matching?,
        })
    }

    fn redis_stream(&mut self, place: usize, table: &DeTable<'_>) -> Option<FeedSource> {
        let url = self.url(place, table);
        let key = self.named("key", place, table, None);
        let group = self.named("group", place, table, Some("taskd"));
        let start = match table.get("start") {
            Some(value) => self.start(value),
            None => Some("0".to_owned()),
        };
        let count = self.some_number("count", table, 1, MOST_AT_ONCE, 100);
        let block = match table.get("block") {
            Some(value) => self.bounded_time("block", value, LONGEST_BLOCK),
            None => Some(Duration::from_secs(1)),
        };
        let delete = table
            .get("delete")
            .is_some_and(|value| self.flag("delete", value));
        let payload = self.named("payload", place, table, Some(""));
        let pending = match table.get("pending") {
            Some(value) => self.pending(value),
            None => Vec::new(),
        };
        Some(FeedSource::RedisStream(RedisStream {
            url: url?,
            key: key?,
            group: group?,
            start: start?,
            count: count?,
            block: block?,
            delete,
            payload: payload?,
            pending,
        }))
    }

    fn redis_list(&mut self, place: usize, table: &DeTable<'_>) -> Option<FeedSource> {
        let url = self.url(place, table);
        let key = self.named("key", place, table, None);
        let count = self.some_number("count", table, 1, MOST_AT_ONCE, 100);
        let from_right = match table.get("pop") {
            None => false,
            Some(value) => match self.text("pop", value)?.as_str() {
                "left" => false,
                "right" => true,
                other => {
                    let says = format!("pop is {:?}; expected left or right", shorten(other, ECHO));
                    self.wrong(at(value), says);
                    false
                }
            },
        };
        Some(FeedSource::RedisList(RedisList {
            url: url?,
            key: key?,
            from_right,
            count: count?,
        }))
    }

    /// The rules for entries that others have.
    fn pending(&mut self, value: &Located<'_>) -> Vec<PendingRule> {
        let DeValue::Array(values) = value.get_ref() else {
            let says = "pending must be a list of tables: [{ idle = \"1m\", do = \"claim\" }]";
            self.wrong(at(value), says.to_owned());
            return Vec::new();
        };
        if values.len() > MOST_RULES {
            let says = format!("pending has {} rules; at most {MOST_RULES}", values.len());
            self.wrong(at(value), says);
        }
        let rules = values.iter().take(MOST_RULES);
        rules.filter_map(|value| self.rule(value)).collect()
    }

    fn rule(&mut self, value: &Located<'_>) -> Option<PendingRule> {
        let place = at(value);
        let table = self.table("a rule of pending", value)?;
        for (key, _) in table {
            if !RULE_KEYS.contains(&&**key.get_ref()) {
                self.unknown(key.span().start, key.get_ref(), &RULE_KEYS);
            }
        }
        let idle = match table.get("idle") {
            Some(value) => self.bounded_time("idle", value, LONGEST_IDLE),
            None => {
                self.wrong(place, "idle is missing: idle = \"1m\"".to_owned());
                None
            }
        };
        let deliveries = self.some_number("deliveries", table, 1, u32::MAX, 1);
        let to = match table.get("to") {
            Some(value) => Some((at(value), self.move_to(value)?)),
            None => None,
        };
        let (at, does) = self.needed("do", place, table)?;
        let act = match (does.as_str(), to) {
            ("claim", None) => PendingAct::Claim,
            ("ack", None) => PendingAct::Ack,
            ("delete", None) => PendingAct::Delete,
            ("move", Some((_, to))) => PendingAct::Move(to),
            ("move", None) => {
                self.wrong(at, "do is move; say where: to = \"list:dead\"".to_owned());
                return None;
            }
            ("claim" | "ack" | "delete", Some((at, _))) => {
                self.wrong(at, format!("to is for do = \"move\", and not for {does}"));
                return None;
            }
            (other, _) => {
                let other = shorten(other, ECHO);
                let says = format!("do is {other:?}; expected claim, ack, delete or move");
                self.wrong(at, says);
                return None;
            }
        };
        Some(PendingRule {
            idle: idle?,
            deliveries: deliveries?,
            act,
        })
    }

    fn move_to(&mut self, value: &Located<'_>) -> Option<MoveTo> {
        let text = self.text("to", value)?;
        let (kind, name) = text.split_once(':').unwrap_or((&text, ""));
        let fits = !name.is_empty() && name.len() <= MAX_NAME;
        let to = match kind {
            "stream" if fits => Ok(MoveTo::Stream(name.to_owned())),
            "list" if fits => Ok(MoveTo::List(name.to_owned())),
            "sorted_set" if fits => Ok(MoveTo::SortedSet(name.to_owned())),
            "queue" => QueueName::new(name)
                .map(MoveTo::Queue)
                .map_err(|error| error.to_string()),
            _ => Err(format!(
                "to is {:?}; expected stream:KEY, list:KEY, sorted_set:KEY or queue:QUEUE",
                shorten(&text, ECHO)
            )),
        };
        to.map_err(|says| self.wrong(at(value), says)).ok()
    }

    /// Where a group begins: `0`, `$`, an id, or a time.
    fn start(&mut self, value: &Located<'_>) -> Option<String> {
        let text = self.text("start", value)?;
        if text == "$" || text.parse::<u64>().is_ok() || text.parse::<Offset>().is_ok() {
            return Some(text);
        }
        if let Ok(time) = humantime::parse_rfc3339_weak(&text)
            && let Ok(since) = time.duration_since(std::time::UNIX_EPOCH)
        {
            return Some(since.as_millis().to_string());
        }
        let says = "start must be \"0\", \"$\", the id of an entry, or a time such as \"2026-01-31T12:00:00Z\"";
        self.wrong(at(value), says.to_owned());
        None
    }

    fn ack(&mut self, value: &Located<'_>) -> Option<FeedAck> {
        let text = self.text("ack", value)?;
        let known = FeedAck::ALL
            .into_iter()
            .find(|known| known.as_str() == text);
        if known.is_none() {
            let text = shorten(&text, ECHO);
            let says = format!("ack is {text:?}; expected stored, done or none");
            self.wrong(at(value), says);
        }
        known
    }

    /// The address of one Redis.
    fn url(&mut self, place: usize, table: &DeTable<'_>) -> Option<String> {
        let (at, url) = self.needed("url", place, table)?;
        let rest = ["redis://", "rediss://", "unix://"]
            .into_iter()
            .find_map(|scheme| url.strip_prefix(scheme));
        // The URL itself may have a password.
        if rest.is_none_or(str::is_empty) || url.contains('#') {
            let says =
                "url must name one Redis: redis://HOST:PORT, rediss://HOST:PORT or unix:///SOCKET";
            self.wrong(at, says.to_owned());
            return None;
        }
        Some(url)
    }

    /// A text that the feed must have.
    fn needed(&mut self, what: &str, place: usize, table: &DeTable<'_>) -> Option<(usize, String)> {
        let Some(value) = table.get(what) else {
            self.wrong(place, format!("{what} is missing: {what} = \"…\""));
            return None;
        };
        Some((at(value), self.text(what, value)?))
    }

    /// The name of something in Redis.
    fn named(
        &mut self,
        what: &str,
        place: usize,
        table: &DeTable<'_>,
        default: Option<&str>,
    ) -> Option<String> {
        if let Some(default) = default
            && !table.contains_key(what)
        {
            return Some(default.to_owned());
        }
        let (at, name) = self.needed(what, place, table)?;
        if name.is_empty() || name.len() > MAX_NAME {
            self.wrong(at, format!("{what} must have 1 to {MAX_NAME} bytes"));
        }
        Some(name)
    }

    fn some_number(
        &mut self,
        what: &str,
        table: &DeTable<'_>,
        least: u32,
        most: u32,
        default: u32,
    ) -> Option<u32> {
        match table.get(what) {
            Some(value) => self.number(what, value, least, most),
            None => Some(default),
        }
    }

    fn bounded_time(
        &mut self,
        what: &str,
        value: &Located<'_>,
        most: Duration,
    ) -> Option<Duration> {
        let time = self.time(what, value)?;
        if time < Duration::from_millis(1) || time > most {
            let most = humantime::format_duration(most);
            self.wrong(at(value), format!("{what} must be 1ms to {most}"));
        }
        Some(time)
    }
}
