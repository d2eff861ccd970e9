//! Tests in a topology's file: inputs, workers that always answer the same, and what is expected.

use std::collections::BTreeMap;

use crate::model::{NewTask, TreeState};

/// A test of a topology, for `taskd topology test`.
#[derive(Clone, Debug, PartialEq)]
pub struct TopologyTest {
    pub name: String,
    /// The stage of each input, by its place, and the input.
    pub inputs: Vec<(usize, NewTask)>,
    /// The worker of a stage, by its place. A stage without one passes its payload on.
    pub workers: BTreeMap<usize, Scripted>,
    pub expected: Vec<Expected>,
}

/// A worker that always answers the same.
#[derive(Clone, Debug, PartialEq)]
pub enum Scripted {
    Always(ScriptedAnswer),
    /// By the key of the task. For others as if there were no worker.
    ByKey(BTreeMap<String, ScriptedAnswer>),
}

#[derive(Clone, Debug, PartialEq)]
pub enum ScriptedAnswer {
    Outputs(Vec<NewTask>),
    Fails,
}

/// A count that a test expects.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    pub what: Counted,
    pub count: u64,
}

/// What a test counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counted {
    /// The tasks of a stage, by its place.
    Tasks(usize),
    /// Those of them that died.
    Dead(usize),
    Trees(TreeState),
}

impl Scripted {
    /// The answer to a task with this key.
    pub fn answer(&self, key: &[u8]) -> Option<&ScriptedAnswer> {
        match self {
            Self::Always(answer) => Some(answer),
            Self::ByKey(answers) => answers.get(std::str::from_utf8(key).ok()?),
        }
    }
}
