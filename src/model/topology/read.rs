//! Reads a topology from its file, and names all mistakes with their places.

use std::{collections::HashMap, time::Duration};

use serde_json::{Map, Value};
use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

use super::{
    Edge, MAX_TOPOLOGY_BYTES, MOST_EDGES, MOST_OPEN, MOST_STAGES, Mistake, OUT, Stage, Topology,
    levels,
};
use crate::model::{
    Backoff, BackoffKind, ECHO, Matching, NewBackoff, NewTree, Priority, QueueName, TopicName,
    TopologyName, TreeOnDead, Way, shorten, topic_of_users,
};

/// The most mistakes that are named.
const MOST_MISTAKES: usize = 100;

const KEYS: [&str; 8] = [
    "name", "on_dead", "timeout", "then", "max_open", "feed", "stage", "test",
];
const STAGE_KEYS: [&str; 13] = [
    "from",
    "join",
    "topic",
    "start",
    "loop",
    "lease",
    "max_attempts",
    "backoff",
    "priority",
    "ports",
    "command",
    "on_start",
    "on_stop",
];
const BACKOFF_KEYS: [&str; 5] = ["kind", "initial", "maximum", "jitter", "give_up_after"];

/// What is for the workers of a stage.
const WORKERS_KEYS: [&str; 4] = ["ports", "command", "on_start", "on_stop"];

const NO_STAGE: &str = "there is no stage: write [stage.NAME] for each";

/// A value with its place in the file.
pub(super) type Located<'i> = Spanned<DeValue<'i>>;

impl Topology {
    /// Reads a file. Returns all mistakes, in the order of the file.
    pub fn read(text: &str) -> Result<Self, Vec<Mistake>> {
        let mut file = File {
            text,
            mistakes: Vec::new(),
        };
        if text.len() > MAX_TOPOLOGY_BYTES {
            let bytes = text.len();
            file.wrong(
                0,
                format!("the file has {bytes} bytes; at most {MAX_TOPOLOGY_BYTES}"),
            );
            return Err(file.mistakes());
        }
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut is_readable = true;
        for error in &errors {
            let at = error.span().map_or(0, |span| span.start);
            let says = error.message().lines().collect::<Vec<_>>().join("; ");
            // The rest of the file is as it seems only if nothing else is wrong with it.
            if says.contains("duplicate key") {
                file.wrong(at, "this name is there already: two of one name".to_owned());
            } else {
                is_readable = false;
                file.wrong(at, says);
            }
        }
        if !is_readable {
            return Err(file.mistakes());
        }
        let topology = file.topology(table.get_ref());
        match topology {
            Some(topology) if file.mistakes.is_empty() => Ok(topology),
            _ => Err(file.mistakes()),
        }
    }
}

/// A stage as the file has it.
pub(super) struct Draft {
    at: usize,
    pub(super) stage: Stage,
    from: Vec<FromDraft>,
    join: Option<(usize, String)>,
    has_start: bool,
    loops: Option<usize>,
    ports: Vec<(usize, String)>,
}

/// An entry of `from`.
struct FromDraft {
    at: usize,
    stage: String,
    port: String,
    matching: Matching,
}

/// A file with the mistakes found so far.
pub(super) struct File<'t> {
    text: &'t str,
    mistakes: Vec<(usize, String)>,
}

impl File<'_> {
    pub(super) fn wrong(&mut self, at: usize, says: String) {
        self.mistakes.push((at, says));
    }

    fn mistakes(mut self) -> Vec<Mistake> {
        self.mistakes.sort();
        self.mistakes.dedup();
        self.mistakes.truncate(MOST_MISTAKES);
        let mistakes = std::mem::take(&mut self.mistakes);
        mistakes
            .into_iter()
            .map(|(at, says)| self.located(at, says))
            .collect()
    }

    fn located(&self, at: usize, says: String) -> Mistake {
        let before = self.text.get(..at).unwrap_or_default();
        let line = before.rsplit('\n').next().unwrap_or_default();
        Mistake {
            line: before.matches('\n').count() + 1,
            column: line.chars().count() + 1,
            says,
        }
    }

    fn topology(&mut self, table: &DeTable<'_>) -> Option<Topology> {
        for (key, _) in table {
            let at = key.span().start;
            let name: &str = key.get_ref();
            if !KEYS.contains(&name) {
                self.unknown(at, name, &KEYS);
            }
        }
        let name = match table.get("name") {
            Some(value) => self.name(value),
            None => {
                self.wrong(0, "name is missing: name = \"crawl\"".to_owned());
                None
            }
        };
        let on_dead = table.get("on_dead").and_then(|value| self.on_dead(value));
        let timeout = table.get("timeout").and_then(|value| {
            let timeout = self.time("timeout", value)?;
            let tree = NewTree {
                timeout: Some(timeout),
                ..NewTree::default()
            };
            if tree.deadline_unix_ms(0).is_err() {
                self.wrong(at(value), "timeout must be 1ms to 3650days".to_owned());
            }
            Some(timeout)
        });
        let then = table
            .get("then")
            .and_then(|value| Some((at(value), self.text("then", value)?)));
        let max_open = table
            .get("max_open")
            .and_then(|value| self.number("max_open", value, 0, MOST_OPEN));
        let mut drafts = self.stages(table, name.as_ref());
        if let Some((at, then)) = &then {
            if let Err(error) = QueueName::new(then) {
                self.wrong(*at, format!("then: {error}"));
            }
            if drafts.iter().any(|one| one.stage.queue.as_str() == then) {
                let says =
                    format!("then is {then:?}, a stage of this topology; name another queue");
                self.wrong(*at, says);
            }
        }
        let feeds = self.feeds(table, name.as_ref(), &drafts);
        self.connect(&mut drafts);
        let backward = self.find_cycles(&drafts);
        self.find_unreachable(&drafts);
        self.find_levels(&mut drafts);
        let tests = self.tests(table, &drafts);
        let mut notes = Vec::new();
        for (at, from, to) in backward {
            let edge = drafts[from]
                .stage
                .edges
                .iter_mut()
                .filter(|edge| edge.to == to);
            edge.for_each(|edge| edge.goes_back = true);
            let says = "this edge goes back: it ends only because a key that the stage had goes no further, so give the outputs keys";
            notes.push(self.located(at, says.to_owned()));
        }
        Some(Topology {
            name: name?,
            on_dead: on_dead.unwrap_or_default(),
            timeout,
            then: then.map(|(_, then)| then).unwrap_or_default(),
            max_open: max_open.unwrap_or_default(),
            stages: drafts.into_iter().map(|draft| draft.stage).collect(),
            tests,
            feeds,
            notes,
        })
    }

    pub(super) fn unknown(&mut self, at: usize, name: &str, known: &[&str]) {
        let name = shorten(name, ECHO);
        self.wrong(
            at,
            format!("unknown key {name:?}; expected {}", known.join(", ")),
        );
    }

    fn name(&mut self, value: &Located<'_>) -> Option<TopologyName> {
        let name = self.text("name", value)?;
        match TopologyName::new(&name) {
            Ok(name) => Some(name),
            Err(error) => {
                self.wrong(at(value), error.to_string());
                None
            }
        }
    }

    fn on_dead(&mut self, value: &Located<'_>) -> Option<TreeOnDead> {
        let text = self.text("on_dead", value)?;
        let known = TreeOnDead::ALL
            .into_iter()
            .find(|known| known.as_str() == text);
        if known.is_none() {
            let says = format!("on_dead is {text:?}; expected count, ignore or hold");
            self.wrong(at(value), says);
        }
        known
    }

    /// Reads the stages, in the order of the file.
    fn stages(&mut self, table: &DeTable<'_>, topology: Option<&TopologyName>) -> Vec<Draft> {
        let Some(value) = table.get("stage") else {
            self.wrong(0, NO_STAGE.to_owned());
            return Vec::new();
        };
        let Some(stages) = self.table("stage", value) else {
            return Vec::new();
        };
        let mut stages: Vec<_> = stages.iter().collect();
        stages.sort_by_key(|(name, _)| name.span().start);
        if stages.is_empty() {
            self.wrong(0, NO_STAGE.to_owned());
        }
        if stages.len() > MOST_STAGES {
            let at = stages[MOST_STAGES].0.span().start;
            let count = stages.len();
            self.wrong(
                at,
                format!("the topology has {count} stages; at most {MOST_STAGES}"),
            );
            stages.truncate(MOST_STAGES);
        }
        let mut drafts = Vec::new();
        for (name, value) in stages {
            let at = name.span().start;
            let Some(table) = self.table("a stage", value) else {
                continue;
            };
            self.part("stage", at, name.get_ref());
            let named = topology.map_or("topology", TopologyName::as_str);
            let queue = match QueueName::new(&format!("{named}.{}", name.get_ref())) {
                Ok(queue) => queue,
                Err(error) => {
                    self.wrong(at, error.to_string());
                    continue;
                }
            };
            drafts.push(self.stage(at, name.get_ref(), queue, table));
        }
        drafts
    }

    /// Checks the name of a stage or of a port: the full stop separates them.
    pub(super) fn part(&mut self, kind: &str, at: usize, name: &str) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
            let name = shorten(name, ECHO);
            let says = format!("{kind} {name:?}: a name has 1 to 64 characters of A-Z a-z 0-9 _ -");
            self.wrong(at, says);
        }
    }

    fn stage(&mut self, place: usize, name: &str, queue: QueueName, table: &DeTable<'_>) -> Draft {
        let mut draft = Draft {
            at: place,
            stage: Stage {
                name: name.to_owned(),
                queue,
                is_start: false,
                join: None,
                lease: None,
                max_attempts: None,
                backoff: None,
                priority: None,
                command: Vec::new(),
                on_start: Vec::new(),
                on_stop: Vec::new(),
                topic: None,
                ports: Vec::new(),
                edges: Vec::new(),
            },
            from: Vec::new(),
            join: None,
            has_start: false,
            loops: None,
            ports: Vec::new(),
        };
        let stage = &mut draft.stage;
        for (key, value) in table {
            match &**key.get_ref() {
                "from" => draft.from = self.from(value),
                "join" => draft.join = self.text("join", value).map(|fork| (at(value), fork)),
                "start" => draft.has_start = self.flag("start", value),
                "loop" => draft.loops = self.flag("loop", value).then_some(key.span().start),
                "lease" => stage.lease = self.lease(value),
                "max_attempts" => stage.max_attempts = self.max_attempts(value),
                "backoff" => stage.backoff = self.backoff(value),
                "priority" => stage.priority = self.priority(value),
                "ports" => draft.ports = self.ports(value),
                "command" => stage.command = self.command("command", value),
                "on_start" => stage.on_start = self.command("on_start", value),
                "on_stop" => stage.on_stop = self.command("on_stop", value),
                "topic" => stage.topic = self.topic_name(value),
                unknown => self.unknown(key.span().start, unknown, &STAGE_KEYS),
            }
        }
        // `start = false` says nothing: without `from` nothing else could reach it.
        draft.stage.is_start = draft.has_start || !table.contains_key("from");
        draft.stage.ports = match (&draft.stage.topic, table.contains_key("ports")) {
            (Some(_), _) => Vec::new(),
            (None, true) => draft.ports.iter().map(|(_, port)| port.clone()).collect(),
            (None, false) => vec![OUT.to_owned()],
        };
        if draft.stage.topic.is_some() {
            for (key, _) in table {
                let name: &str = key.get_ref();
                if WORKERS_KEYS.contains(&name) {
                    let says =
                        format!("taskd itself works on a stage with a topic: leave out {name}");
                    self.wrong(key.span().start, says);
                }
            }
        }
        draft
    }

    fn from(&mut self, value: &Located<'_>) -> Vec<FromDraft> {
        let mut entries = Vec::new();
        match value.get_ref() {
            DeValue::Array(values) => {
                if values.is_empty() {
                    let says = "from is empty; leave it out if the stage begins the topology";
                    self.wrong(at(value), says.to_owned());
                }
                for value in values {
                    entries.extend(self.entry(value));
                }
            }
            _ => entries.extend(self.entry(value)),
        }
        entries
    }

    fn entry(&mut self, value: &Located<'_>) -> Option<FromDraft> {
        let place = at(value);
        let mut matching = Matching::default();
        let source = match value.get_ref() {
            DeValue::String(text) => text.clone().into_owned(),
            DeValue::Table(table) => {
                for (key, _) in table {
                    if !["stage", "match"].contains(&&**key.get_ref()) {
                        self.unknown(key.span().start, key.get_ref(), &["stage", "match"]);
                    }
                }
                if let Some(value) = table.get("match") {
                    match Matching::read(&json_of(value.get_ref())) {
                        Ok(read) => matching = read,
                        Err(error) => self.wrong(at(value), error),
                    }
                }
                let Some(stage) = table.get("stage") else {
                    self.wrong(
                        place,
                        "stage is missing: { stage = \"NAME.PORT\", … }".to_owned(),
                    );
                    return None;
                };
                self.text("stage", stage)?
            }
            _ => {
                let says = "from must be \"STAGE\", \"STAGE.PORT\", { stage = …, match = … }, or a list of these";
                self.wrong(place, says.to_owned());
                return None;
            }
        };
        let (stage, port) = source.split_once('.').unwrap_or((source.as_str(), OUT));
        Some(FromDraft {
            at: place,
            stage: stage.to_owned(),
            port: port.to_owned(),
            matching,
        })
    }

    fn ports(&mut self, value: &Located<'_>) -> Vec<(usize, String)> {
        let mut ports: Vec<(usize, String)> = Vec::new();
        for (at, port) in self.texts("ports", value) {
            self.part("port", at, &port);
            if ports.iter().any(|(_, known)| *known == port) {
                self.wrong(
                    at,
                    format!("port {port:?} is there already: two of one name"),
                );
            } else {
                ports.push((at, port));
            }
        }
        ports
    }

    fn command(&mut self, what: &str, value: &Located<'_>) -> Vec<String> {
        let words = self.texts(what, value);
        words.into_iter().map(|(_, word)| word).collect()
    }

    fn lease(&mut self, value: &Located<'_>) -> Option<Duration> {
        let lease = self.time("lease", value)?;
        if lease < Duration::from_millis(100) {
            self.wrong(at(value), "lease must be at least 100ms".to_owned());
        }
        Some(lease)
    }

    fn topic_name(&mut self, value: &Located<'_>) -> Option<TopicName> {
        let name = self.text("topic", value)?;
        match topic_of_users(&name) {
            Ok(name) => Some(name),
            Err(error) => {
                self.wrong(at(value), error);
                None
            }
        }
    }

    fn max_attempts(&mut self, value: &Located<'_>) -> Option<u32> {
        self.number("max_attempts", value, 1, 1000)
    }

    pub(super) fn number(
        &mut self,
        what: &str,
        value: &Located<'_>,
        least: u32,
        most: u32,
    ) -> Option<u32> {
        let number = match value.get_ref() {
            DeValue::Integer(number) => number.to_string().parse().ok(),
            _ => None,
        };
        let number = number.filter(|number| (least..=most).contains(number));
        if number.is_none() {
            let says = format!("{what} must be a number from {least} to {most}");
            self.wrong(at(value), says);
        }
        number
    }

    fn priority(&mut self, value: &Located<'_>) -> Option<Priority> {
        let text = self.text("priority", value)?;
        let known = Priority::ALL
            .into_iter()
            .find(|known| known.as_str() == text);
        if known.is_none() {
            let says = format!("priority is {text:?}; expected high, medium or low");
            self.wrong(at(value), says);
        }
        known
    }

    fn backoff(&mut self, value: &Located<'_>) -> Option<NewBackoff> {
        let table = self.table("backoff", value)?;
        let mut backoff = NewBackoff::default();
        for (key, value) in table {
            match &**key.get_ref() {
                "kind" => {
                    let text = self.text("kind", value)?;
                    let known = BackoffKind::OWN
                        .into_iter()
                        .find(|kind| kind.as_str() == text);
                    let Some(kind) = known else {
                        let says =
                            format!("kind is {text:?}; expected constant, linear or exponential");
                        self.wrong(at(value), says);
                        return None;
                    };
                    backoff.kind = kind;
                }
                "initial" => backoff.initial = self.time("initial", value),
                "maximum" => backoff.maximum = self.time("maximum", value),
                "give_up_after" => backoff.give_up_after = self.time("give_up_after", value),
                "jitter" => {
                    let number = match value.get_ref() {
                        DeValue::Float(number) => number.as_str().parse().ok(),
                        DeValue::Integer(number) => number.to_string().parse().ok(),
                        _ => None,
                    };
                    if number.is_none() {
                        self.wrong(at(value), "jitter must be a number from 0 to 1".to_owned());
                    }
                    backoff.jitter = number;
                }
                unknown => self.unknown(key.span().start, unknown, &BACKOFF_KEYS),
            }
        }
        if let Err(error) = Backoff::new(&backoff) {
            self.wrong(at(value), error);
        }
        Some(backoff)
    }

    pub(super) fn text(&mut self, what: &str, value: &Located<'_>) -> Option<String> {
        let text = value.get_ref().as_str().map(ToOwned::to_owned);
        if text.is_none() {
            self.wrong(at(value), format!("{what} must be a text: {what} = \"…\""));
        }
        text
    }

    pub(super) fn time(&mut self, what: &str, value: &Located<'_>) -> Option<Duration> {
        let time = value.get_ref().as_str().map(humantime::parse_duration);
        let time = time.and_then(Result::ok);
        if time.is_none() {
            let says = format!("{what} must be a duration: {what} = \"30s\"");
            self.wrong(at(value), says);
        }
        time
    }

    pub(super) fn flag(&mut self, what: &str, value: &Located<'_>) -> bool {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            self.wrong(at(value), format!("{what} must be true or false"));
        }
        flag.unwrap_or_default()
    }

    pub(super) fn table<'v, 'i>(
        &mut self,
        what: &str,
        value: &'v Located<'i>,
    ) -> Option<&'v DeTable<'i>> {
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => {
                self.wrong(at(value), format!("{what} must be a table"));
                None
            }
        }
    }

    /// A list of texts, of which there is at least one.
    fn texts(&mut self, what: &str, value: &Located<'_>) -> Vec<(usize, String)> {
        let mut texts = Vec::new();
        let empty = DeArray::new();
        let values = match value.get_ref() {
            DeValue::Array(values) => values,
            _ => &empty,
        };
        for value in values {
            texts.extend(self.text(what, value).map(|text| (at(value), text)));
        }
        if values.is_empty() {
            self.wrong(
                at(value),
                format!("{what} must be a list of texts: [\"…\", \"…\"]"),
            );
        }
        texts
    }

    /// Makes the edges, and checks that there are the stages and the ports of all.
    fn connect(&mut self, drafts: &mut [Draft]) {
        let places: HashMap<String, usize> = drafts
            .iter()
            .enumerate()
            .map(|(place, draft)| (draft.stage.name.clone(), place))
            .collect();
        let mut count = 0;
        for to in 0..drafts.len() {
            for from in std::mem::take(&mut drafts[to].from) {
                count += 1;
                if count == MOST_EDGES + 1 {
                    let says = format!("the topology has more than {MOST_EDGES} edges");
                    self.wrong(from.at, says);
                }
                let Some(place) = places.get(&from.stage) else {
                    let stage = shorten(&from.stage, ECHO);
                    self.wrong(from.at, format!("there is no stage {stage:?}"));
                    continue;
                };
                let source = &mut drafts[*place].stage;
                if !source.has_port(&from.port) {
                    let says = source.no_port(&from.port);
                    self.wrong(from.at, says);
                    continue;
                }
                let is_same = |edge: &Edge| edge.to == to && edge.port == from.port;
                if source.edges.iter().any(is_same) {
                    let says = format!("{}.{} is there already", from.stage, from.port);
                    self.wrong(from.at, says);
                    continue;
                }
                source.edges.push(Edge {
                    port: from.port.clone(),
                    to,
                    matching: from.matching.clone(),
                    goes_back: false,
                    way: Way::default(),
                });
                drafts[to].from.push(from);
            }
        }
        for draft in drafts.iter() {
            for (at, port) in &draft.ports {
                if !draft.stage.edges.iter().any(|edge| edge.port == *port) {
                    let stage = &draft.stage.name;
                    let says = format!(
                        "nobody takes port {port} of stage {stage}: add from = \"{stage}.{port}\" to a stage"
                    );
                    self.wrong(*at, says);
                }
            }
        }
    }

    /// Finds cycles in which no stage says `loop`. Returns the edges that close the others: the place
    /// in the file, and the stages.
    fn find_cycles(&mut self, drafts: &[Draft]) -> Vec<(usize, usize, usize)> {
        let reach = reach(drafts, |_| true);
        // Without the edges into stages that may close a cycle.
        let forward = self::reach(drafts, |to| drafts[to].loops.is_none());
        let mut backward = Vec::new();
        let mut named = vec![false; drafts.len()];
        for (to, draft) in drafts.iter().enumerate() {
            if let Some(at) = draft.loops
                && !reach[to][to]
            {
                let says = format!(
                    "no way leads from stage {0} back to {0}: leave out loop",
                    draft.stage.name
                );
                self.wrong(at, says);
            }
            for from in &draft.from {
                let Some(source) = drafts.iter().position(|one| one.stage.name == from.stage)
                else {
                    continue;
                };
                let is_in_cycle = source == to || reach[to][source];
                if is_in_cycle && draft.loops.is_some() {
                    backward.push((from.at, source, to));
                }
            }
            if forward[to][to] && !named[to] {
                let stages: Vec<&str> = (0..drafts.len())
                    .filter(|other| *other == to || (forward[to][*other] && forward[*other][to]))
                    .map(|other| {
                        named[other] = true;
                        drafts[other].stage.name.as_str()
                    })
                    .collect();
                let at = draft.from.first().map_or(draft.at, |from| from.at);
                let says = format!(
                    "stages {} are a cycle: say loop = true at the stage where it begins again",
                    stages.join(", ")
                );
                self.wrong(at, says);
            }
        }
        backward
    }

    /// Finds the forks of all joins, and the levels between them.
    fn find_levels(&mut self, drafts: &mut [Draft]) {
        let is_right_so_far = self.mistakes.is_empty();
        for place in 0..drafts.len() {
            let Some((at, fork)) = drafts[place].join.clone() else {
                continue;
            };
            let known = drafts.iter().position(|one| one.stage.name == fork);
            if known.is_none() {
                let fork = shorten(&fork, ECHO);
                self.wrong(at, format!("there is no stage {fork:?} to join"));
            }
            drafts[place].stage.join = known;
        }
        // Ways through a graph with other mistakes say nothing.
        if !is_right_so_far || !self.mistakes.is_empty() {
            return;
        }
        let mut stages: Vec<Stage> = drafts.iter().map(|draft| draft.stage.clone()).collect();
        match levels::set_ways(&mut stages) {
            Ok(()) => {
                for (draft, stage) in drafts.iter_mut().zip(stages) {
                    draft.stage = stage;
                }
            }
            Err(mistakes) => {
                for (place, says) in mistakes {
                    let draft = &drafts[place];
                    let at = draft.join.as_ref().map_or(draft.at, |(at, _)| *at);
                    self.wrong(at, says);
                }
            }
        }
    }

    fn find_unreachable(&mut self, drafts: &[Draft]) {
        if drafts.is_empty() {
            return;
        }
        let starts = || (0..drafts.len()).filter(|place| drafts[*place].stage.is_start);
        if starts().next().is_none() {
            self.wrong(
                drafts[0].at,
                "no stage has start = true, so nothing begins".to_owned(),
            );
            return;
        }
        let reach = reach(drafts, |_| true);
        for (place, draft) in drafts.iter().enumerate() {
            // Otherwise a mistake in `from` is named already.
            let has_from = !draft.from.is_empty();
            let is_reached = starts().any(|start| start == place || reach[start][place]);
            if has_from && !is_reached {
                let says = format!("no way leads from a start to stage {}", draft.stage.name);
                self.wrong(draft.at, says);
            }
        }
    }
}

/// Which stages can be reached from which, over the edges into stages that are chosen.
fn reach(drafts: &[Draft], into: impl Fn(usize) -> bool) -> Vec<Vec<bool>> {
    let count = drafts.len();
    let mut reach = vec![vec![false; count]; count];
    for (from, draft) in drafts.iter().enumerate() {
        for edge in &draft.stage.edges {
            reach[from][edge.to] |= into(edge.to);
        }
    }
    for by in 0..count {
        let behind = reach[by].clone();
        for row in reach.iter_mut().filter(|row| row[by]) {
            row.iter_mut()
                .zip(&behind)
                .for_each(|(reached, is_behind)| *reached |= is_behind);
        }
    }
    reach
}

pub(super) fn at(value: &Located<'_>) -> usize {
    value.span().start
}

/// A condition in JSON. Numbers and truth values are compared as texts.
pub(super) fn json_of(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::Table(names) => {
            let of_name = |(name, tests): (&Spanned<_>, &Located<'_>)| {
                let name: &std::borrow::Cow<'_, str> = name.get_ref();
                (name.clone().into_owned(), tests_of(tests.get_ref()))
            };
            Value::Object(names.iter().map(of_name).collect::<Map<_, _>>())
        }
        // No condition, which its reader says.
        _ => Value::Bool(false),
    }
}

fn tests_of(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Integer(number) => Value::String(number.to_string()),
        DeValue::Float(number) => Value::String(number.as_str().to_owned()),
        DeValue::Boolean(flag) => Value::String(flag.to_string()),
        DeValue::Datetime(_) => Value::Null,
        DeValue::Array(values) => values
            .iter()
            .map(|value| tests_of(value.get_ref()))
            .collect(),
        DeValue::Table(test) => {
            let of_test = |(name, value): (&Spanned<std::borrow::Cow<'_, str>>, &Located<'_>)| {
                let value = match value.get_ref() {
                    DeValue::Boolean(flag) => Value::Bool(*flag),
                    other => tests_of(other),
                };
                (name.get_ref().clone().into_owned(), value)
            };
            Value::Object(test.iter().map(of_test).collect::<Map<_, _>>())
        }
    }
}
