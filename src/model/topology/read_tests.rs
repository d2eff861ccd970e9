//! Reads the tests in a topology's file.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use toml::de::{DeArray, DeTable, DeValue};

use super::{
    read::{Draft, File, Located, at},
    scripted::{Counted, Expected, Scripted, ScriptedAnswer, TopologyTest},
};
use crate::model::{ECHO, Encoding, NewTask, TreeState, shorten};

const TEST_KEYS: [&str; 4] = ["name", "input", "workers", "expect"];
const TASK_KEYS: [&str; 5] = ["stage", "port", "queue", "key", "payload"];
const STAGE_COUNTS: [&str; 2] = ["count", "dead"];
/// In `expect`, besides the stages.
const TREES: &str = "trees";

impl File<'_> {
    /// Reads the tests.
    pub(super) fn tests(&mut self, table: &DeTable<'_>, drafts: &[Draft]) -> Vec<TopologyTest> {
        let Some(value) = table.get("test") else {
            return Vec::new();
        };
        let Some(tests) = self.list("test", value) else {
            return Vec::new();
        };
        let mut read = Vec::new();
        for test in tests {
            if let Some(table) = self.table("[[test]]", test) {
                read.push(self.test(at(test), table, drafts));
            }
        }
        read
    }

    fn test(&mut self, place: usize, table: &DeTable<'_>, drafts: &[Draft]) -> TopologyTest {
        let mut test = TopologyTest {
            name: String::new(),
            inputs: Vec::new(),
            workers: BTreeMap::new(),
            expected: Vec::new(),
        };
        for (key, value) in table {
            match &**key.get_ref() {
                "name" => test.name = self.text("name", value).unwrap_or_default(),
                "input" => test.inputs = self.inputs(value, drafts),
                "workers" => {
                    for (at, name, value) in self.by_stage("workers", value) {
                        let worker = self.worker(value);
                        if let Some(stage) = self.place_of(at, &name, drafts)
                            && let Some(worker) = worker
                        {
                            test.workers.insert(stage, worker);
                        }
                    }
                }
                "expect" => {
                    for (at, name, value) in self.by_stage("expect", value) {
                        let expected = match name == TREES {
                            true => self.expected_trees(value),
                            false => self.expected_of(at, &name, value, drafts),
                        };
                        test.expected.extend(expected);
                    }
                }
                unknown => self.unknown(key.span().start, unknown, &TEST_KEYS),
            }
        }
        if test.name.is_empty() {
            self.wrong(place, "name is missing: name = \"one page\"".to_owned());
        }
        if test.inputs.is_empty() {
            self.wrong(
                place,
                "input is missing: input = [{ key = \"…\" }]".to_owned(),
            );
        }
        test
    }

    fn list<'v, 'i>(&mut self, what: &str, value: &'v Located<'i>) -> Option<&'v DeArray<'i>> {
        let DeValue::Array(list) = value.get_ref() else {
            self.wrong(at(value), format!("{what} must be a list"));
            return None;
        };
        Some(list)
    }

    /// The entries of a table that has a key for each stage, with the places of the keys.
    fn by_stage<'v, 'i>(
        &mut self,
        what: &str,
        value: &'v Located<'i>,
    ) -> Vec<(usize, String, &'v Located<'i>)> {
        let Some(table) = self.table(what, value) else {
            return Vec::new();
        };
        let entries = table.iter();
        entries
            .map(|(key, value)| (key.span().start, key.get_ref().clone().into_owned(), value))
            .collect()
    }

    fn place_of(&mut self, at: usize, name: &str, drafts: &[Draft]) -> Option<usize> {
        let place = drafts.iter().position(|draft| draft.stage.name == name);
        if place.is_none() {
            let name = shorten(name, ECHO);
            self.wrong(at, format!("there is no stage {name:?}"));
        }
        place
    }

    fn inputs(&mut self, value: &Located<'_>, drafts: &[Draft]) -> Vec<(usize, NewTask)> {
        let mut inputs = Vec::new();
        for value in self.list("input", value).into_iter().flatten() {
            let Some((stage, task)) = self.task("input", value) else {
                continue;
            };
            let stage = match stage {
                Some((at, stage)) => self.place_of(at, &stage, drafts),
                None => drafts.iter().position(|draft| draft.stage.is_start),
            };
            if !task.port.is_empty() || !task.queue.is_empty() {
                self.wrong(
                    at(value),
                    "an input has a stage, key and payload".to_owned(),
                );
            }
            inputs.extend(stage.map(|stage| (stage, task)));
        }
        inputs
    }

    /// Reads a task, and the stage that it names.
    fn task(
        &mut self,
        what: &str,
        value: &Located<'_>,
    ) -> Option<(Option<(usize, String)>, NewTask)> {
        let table = self.table(what, value)?;
        let mut stage = None;
        let mut task = NewTask::default();
        for (key, value) in table {
            match &**key.get_ref() {
                "stage" => stage = self.text("stage", value).map(|stage| (at(value), stage)),
                "port" => task.port = self.text("port", value)?,
                "queue" => task.queue = self.text("queue", value)?,
                "key" => task.key = self.text("key", value)?.into(),
                "payload" => {
                    task.payload = json(value.get_ref()).to_string().into();
                    task.payload_encoding = Encoding::Json;
                }
                unknown => self.unknown(key.span().start, unknown, &TASK_KEYS),
            }
        }
        Some((stage, task))
    }

    fn worker(&mut self, value: &Located<'_>) -> Option<Scripted> {
        let DeValue::Table(table) = value.get_ref() else {
            return self.answer(value).map(Scripted::Always);
        };
        let mut answers = BTreeMap::new();
        for (key, value) in table {
            if let Some(answer) = self.answer(value) {
                answers.insert(key.get_ref().clone().into_owned(), answer);
            }
        }
        Some(Scripted::ByKey(answers))
    }

    fn answer(&mut self, value: &Located<'_>) -> Option<ScriptedAnswer> {
        match value.get_ref() {
            DeValue::String(text) if text == "fail" => Some(ScriptedAnswer::Fails),
            DeValue::Array(outputs) => {
                let mut read = Vec::new();
                for output in outputs {
                    let (stage, task) = self.task("an output", output)?;
                    if let Some((at, _)) = stage {
                        self.wrong(at, "an output has a port or a queue".to_owned());
                    }
                    read.push(task);
                }
                Some(ScriptedAnswer::Outputs(read))
            }
            _ => {
                let says = "a worker is a list of outputs, \"fail\", or a table of these by key";
                self.wrong(at(value), says.to_owned());
                None
            }
        }
    }

    fn expected_of(
        &mut self,
        at: usize,
        name: &str,
        value: &Located<'_>,
        drafts: &[Draft],
    ) -> Vec<Expected> {
        let Some(stage) = self.place_of(at, name, drafts) else {
            return Vec::new();
        };
        self.counts(value, &STAGE_COUNTS, |name| {
            Some(match name {
                "count" => Counted::Tasks(stage),
                "dead" => Counted::Dead(stage),
                _ => return None,
            })
        })
    }

    fn expected_trees(&mut self, value: &Located<'_>) -> Vec<Expected> {
        self.counts(value, &["done", "failed"], |name| {
            Some(match name {
                "done" => Counted::Trees(TreeState::Done),
                "failed" => Counted::Trees(TreeState::Failed),
                _ => return None,
            })
        })
    }

    fn counts(
        &mut self,
        value: &Located<'_>,
        known: &[&str],
        counted: impl Fn(&str) -> Option<Counted>,
    ) -> Vec<Expected> {
        let mut expected = Vec::new();
        let Some(table) = self.table("an expectation", value) else {
            return expected;
        };
        for (key, value) in table {
            let Some(what) = counted(key.get_ref()) else {
                self.unknown(key.span().start, key.get_ref(), known);
                continue;
            };
            let count = match value.get_ref() {
                DeValue::Integer(number) => number.to_string().parse().ok(),
                _ => None,
            };
            match count {
                Some(count) => expected.push(Expected { what, count }),
                None => self.wrong(at(value), format!("{} must be a number", key.get_ref())),
            }
        }
        expected
    }
}

/// A value as JSON. Times are texts.
fn json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Integer(number) => number_of(&number.to_string()),
        DeValue::Float(number) => number_of(number.as_str()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(time) => Value::String(time.to_string()),
        DeValue::Array(values) => values.iter().map(|value| json(value.get_ref())).collect(),
        DeValue::Table(table) => {
            let entry =
                |(key, value): (&toml::Spanned<std::borrow::Cow<'_, str>>, &Located<'_>)| {
                    (key.get_ref().clone().into_owned(), json(value.get_ref()))
                };
            Value::Object(table.iter().map(entry).collect::<Map<_, _>>())
        }
    }
}

/// A number, or its text where JSON has no such number.
fn number_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}
