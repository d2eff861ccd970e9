//! The frames of a session, which a worker and taskd send each other on a stream.

use std::{collections::HashMap, time::Duration};

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::{Completion, Extension, Item, ItemAnswer, LeasedTask, Rejection};

/// Opens a session, or resumes one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpenSession {
    pub worker: String,
    pub queues: Vec<String>,
    /// The initial demand.
    pub want: u32,
    /// The session to resume, or empty for a new one.
    pub session: String,
    /// Ids of the tasks that the worker holds, if it resumes a session.
    pub holding: Vec<String>,
    /// Ends the worker's other sessions.
    pub takeover: bool,
    /// The worker reports each task when it starts it.
    pub tells_started: bool,
    /// taskd extends the leases while the worker lives.
    pub keep_leases: bool,
    /// `None` for the default.
    pub timeout: Option<Duration>,
    /// Overrides the lease durations of the tasks.
    pub lease_duration: Option<Duration>,
    /// Approximate maximum size of the tasks in a frame, in bytes. 0 means the default.
    pub max_bytes: u64,
    /// As in [`super::GetTasks`].
    pub weights: HashMap<String, u32>,
}

/// The items of a report, as in [`super::Batch`].
pub type Items<T> = Vec<Result<Item<T>, ItemAnswer>>;

/// A frame of a worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerFrame {
    /// `Err` says what is wrong with it.
    pub open: Option<Result<OpenSession, String>>,
    /// 0 if the frame needs no answer.
    pub number: u64,
    pub completions: Items<Completion>,
    pub rejections: Items<Rejection>,
    pub extensions: Items<Extension>,
    /// Ids of started tasks.
    pub started: Vec<String>,
    pub surrender: bool,
    pub want: u32,
    pub close: bool,
}

impl WorkerFrame {
    /// The number of completions, rejections and extensions in the frame.
    pub fn items(&self) -> usize {
        self.completions.len() + self.rejections.len() + self.extensions.len()
    }
}

/// A frame of taskd.
#[derive(Clone, Debug, Default)]
pub struct TaskdFrame {
    pub opened: Option<SessionOpened>,
    pub tasks: Vec<LeasedTask>,
    pub answer: Option<FrameAnswer>,
    /// Leases that ended before the worker reported their tasks.
    pub ended: Vec<ItemAnswer>,
    pub closing: Option<SessionClosing>,
    /// How many more tasks taskd may send after this frame.
    pub demand: u32,
}

/// A session that is open.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct SessionOpened {
    pub session: String,
    /// Whether taskd has resumed the session that the worker named.
    pub resumed: bool,
    pub granted: u32,
    /// The maximum number of tasks that the session may hold and demand together.
    pub max_tasks: u32,
    /// The worker must make a call at least this often.
    #[serde(serialize_with = "whole_ms")]
    #[schemars(with = "String")]
    pub heartbeat: Duration,
    #[serde(serialize_with = "whole_ms")]
    #[schemars(with = "String")]
    pub timeout: Duration,
}

/// Rounds down to whole milliseconds, which is what clients parse: they should be early rather than
/// late.
fn whole_ms<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    serializer.collect_str(&humantime::format_duration(Duration::from_millis(ms)))
}

/// The answer to a worker's frame.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrameAnswer {
    pub number: u64,
    pub completions: Vec<ItemAnswer>,
    pub rejections: Vec<ItemAnswer>,
    pub extensions: Vec<ItemAnswer>,
    pub granted: u32,
    pub surrendered: u32,
}

/// taskd is about to end the stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionClosing {
    pub reason: String,
    pub within: Duration,
}
