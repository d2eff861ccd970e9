//! Topologies: graphs of stages, read from a TOML file, without I/O.
//!
//! A stage `fetch` of the topology `crawl` is the queue `crawl.fetch`. Its tasks send outputs to
//! ports, and each edge of a port makes an output a task of another stage.

mod feed;
mod graph;
mod levels;
mod read;
mod read_feeds;
mod read_tests;
mod route;
mod scripted;
#[cfg(test)]
mod tests;
mod view;

use std::{fmt, time::Duration};

pub use self::{
    feed::{
        FeedAck, FeedCounts, FeedSettings, FeedSource, MoveTo, PendingAct, PendingRule, RedisList,
        RedisStream, feed_task_id,
    },
    route::FanOut,
    scripted::{Counted, Expected, Scripted, ScriptedAnswer, TopologyTest},
    view::{EdgeView, FeedView, StageView, TopologyView},
};
use super::{
    Matching, NewBackoff, NewTask, NewTree, Priority, QueueName, TopicName, TopologyName,
    TreeOnDead, Way,
};

/// The most topologies.
pub const MOST_TOPOLOGIES: u32 = 1000;
/// The most stages of a topology.
const MOST_STAGES: usize = 64;
/// The largest bound on open trees: each process counts them twice a second.
const MOST_OPEN: u32 = 100_000;
/// The most edges of a topology.
const MOST_EDGES: usize = 256;
/// The largest file.
pub const MAX_TOPOLOGY_BYTES: usize = 256 << 10;

/// The port of an output that names none, and of a stage that names none.
const OUT: &str = "out";

/// A topology without mistakes.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    pub name: TopologyName,
    pub on_dead: TreeOnDead,
    /// The time within which a tree must end.
    pub timeout: Option<Duration>,
    /// The queue that gets a task when a tree has ended. Empty: none.
    pub then: String,
    /// The most open trees whose roots are in start stages; 0: no bound.
    pub max_open: u32,
    /// In the order of the file.
    pub stages: Vec<Stage>,
    /// For `taskd topology test`.
    pub tests: Vec<TopologyTest>,
    /// In the order of the file.
    pub feeds: Vec<FeedSettings>,
    /// Remarks on what is no mistake.
    pub notes: Vec<Mistake>,
}

/// A stage: what is left out is the setting of its queue.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    pub name: String,
    pub queue: QueueName,
    /// Inserts begin here, so each opens a tree.
    pub is_start: bool,
    /// The place of the fork: the stage gets one task for each task of it, when all that came out of
    /// that is over.
    pub join: Option<usize>,
    pub lease: Option<Duration>,
    pub max_attempts: Option<u32>,
    pub backoff: Option<NewBackoff>,
    pub priority: Option<Priority>,
    /// What works on its tasks, in a run of the topology in one process. Empty: any worker.
    pub command: Vec<String>,
    pub on_start: Vec<String>,
    pub on_stop: Vec<String>,
    /// taskd works on its tasks itself: it publishes each as a record of this topic.
    pub topic: Option<TopicName>,
    pub ports: Vec<String>,
    /// Where its outputs go.
    pub edges: Vec<Edge>,
}

/// An edge from a port to a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Edge {
    pub port: String,
    /// The place of the next stage in [`Topology::stages`].
    pub to: usize,
    /// What an output must have. Names that begin with `/` are JSON pointers into the payload,
    /// others are headers.
    pub matching: Matching,
    /// It closes a cycle.
    pub goes_back: bool,
    /// Through the levels of joins. [`Way::Into`] has the place of the join in
    /// [`Topology::stages`].
    pub way: Way,
}

/// A mistake in a file, or a remark on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    /// Both count from 1.
    pub line: usize,
    pub column: usize,
    pub says: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.says)
    }
}

impl Topology {
    pub fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// The queues of the start stages.
    pub fn start_queues(&self) -> impl Iterator<Item = &QueueName> {
        let starts = self.stages.iter().filter(|stage| stage.is_start);
        starts.map(|stage| &stage.queue)
    }

    /// Completes a task to insert into a stage: with the settings of the stage, and for a start
    /// stage with a tree. What the task says itself stays. Fails if no stage can have the task.
    pub fn complete_insert(&self, stage: usize, task: &mut NewTask) -> Result<(), String> {
        let stage = &self.stages[stage];
        stage.apply_to(task)?;
        if !stage.is_start {
            return Ok(());
        }
        let tree = task
            .tree
            .get_or_insert_with(|| Box::new(super::TaskTree::Root(NewTree::default())));
        if let super::TaskTree::Root(tree) = &mut **tree {
            if tree.then.is_empty() {
                tree.then.clone_from(&self.then);
            }
            tree.timeout = tree.timeout.or(self.timeout);
            tree.on_dead = tree.on_dead.or(Some(self.on_dead));
        }
        Ok(())
    }
}

impl Stage {
    /// Fails if several workers are to complete a task of this stage: only the outputs of the first
    /// would count.
    pub fn is_for_one_worker(&self, task: &NewTask) -> Result<(), String> {
        match task.replicas {
            Some(replicas) if replicas > 1 => Err(format!(
                "replicas is {replicas}; a task of stage {} is for one worker",
                self.queue
            )),
            _ => Ok(()),
        }
    }

    /// Gives a task of this stage its settings. What the task says itself stays. Fails if the task is
    /// [for several workers](Self::is_for_one_worker).
    fn apply_to(&self, task: &mut NewTask) -> Result<(), String> {
        self.is_for_one_worker(task)?;
        task.lease_duration = task.lease_duration.or(self.lease);
        task.max_attempts = task.max_attempts.or(self.max_attempts);
        task.backoff = task.backoff.or(self.backoff);
        task.priority = task.priority.or(self.priority);
        Ok(())
    }
}
