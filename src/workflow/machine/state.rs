//! What an execution has come to: the fold of its log.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ops::Bound,
    sync::Arc,
};

use serde_json::Value;

use super::{
    event::{Entry, Event, StepKey, TimerPurpose},
    problem::Problem,
};
use crate::workflow::program::Next;

/// The path of the workflow itself, around all of its tasks.
pub(super) const ROOT: &str = "";

/// What an execution has come to. Only [`State::apply`] changes it, so the fold of the log gives
/// the same state at every event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    pub(super) status: Status,
    pub(super) execution: String,
    pub(super) program: String,
    /// The input as it was given.
    pub(super) input: Held,
    pub(super) started_at: i64,
    /// The number of events so far.
    pub(super) events: u64,
    /// About the bytes of these events.
    pub(super) history_bytes: u64,
    /// The workflow, the tasks that run and the branches of forks that run, by path. A path runs at
    /// most once at a time.
    pub(super) frames: BTreeMap<Arc<str>, Frame>,
    /// How often the task of a path has started.
    pub(super) rounds: BTreeMap<Arc<str>, u32>,
    /// The steps that have not ended.
    pub(super) steps: BTreeMap<Arc<str>, OpenStep>,
    /// The timers that are armed.
    pub(super) timers: BTreeMap<u64, Timer>,
    /// The same by path.
    timers_at: BTreeSet<(Arc<str>, u64)>,
    /// The number of timers so far.
    pub(super) armed: u64,
    /// The tasks that began since a step ended or a timer fired.
    pub(super) tasks_since_wait: u32,
    pub(super) output: Option<Held>,
    pub(super) error: Option<Problem>,
}

/// Whether an execution runs, and how it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// It has no event yet.
    #[default]
    Pending,
    /// Something can be done at once.
    Running,
    /// It waits for a step or a timer.
    Waiting,
    Cancelled,
    Faulted,
    Completed,
}

impl Status {
    /// Whether the execution goes on no more.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Cancelled | Self::Faulted | Self::Completed)
    }
}

/// What an execution waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    pub path: String,
    pub on: WaitOn,
    /// Unix times in milliseconds.
    pub since: i64,
    pub until: Option<i64>,
}

/// The kind of a [`Wait`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOn {
    Step(StepKey),
    Timer { timer: u64, purpose: TimerPurpose },
}

/// An event does not fit into the history before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event {event} of the history does not fit: {reason}")]
pub struct BadHistory {
    /// The number of the event, from 1.
    pub event: u64,
    pub reason: String,
}

/// A value with its size.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    pub(super) value: Arc<Value>,
    bytes: usize,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.value, &other.value) || self.value == other.value
    }
}

impl Held {
    pub(super) fn new(value: Value) -> Self {
        Self {
            bytes: value_bytes(&value),
            value: Arc::new(value),
        }
    }

    fn or(value: &Option<Value>, other: &Held) -> Self {
        match value {
            Some(value) => Self::new(value.clone()),
            None => other.clone(),
        }
    }
}

/// About the size of a value in JSON.
pub(super) fn value_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 5,
        Value::Number(_) => 8,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => {
            items
                .iter()
                .map(|item| value_bytes(item) + 1)
                .sum::<usize>()
                + 2
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| name.len() + value_bytes(value) + 4;
            fields.iter().map(field).sum::<usize>() + 2
        }
    }
}

/// About the bytes of an event in the log.
fn event_bytes(event: &Event) -> usize {
    let values: usize = event.values().map(value_bytes).sum();
    values + event.problem().map_or(0, Problem::bytes) + 128
}

/// A task that runs, a branch that runs, or the workflow.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) round: u32,
    /// The retry of the `try` around it.
    pub(super) attempt: u32,
    pub(super) started_at: i64,
    /// The input before and after `input.from`.
    pub(super) raw: Held,
    pub(super) input: Held,
    /// The value that flows: the input of the task inside it that begins next.
    pub(super) current: Held,
    pub(super) phase: Phase,
    /// Of a `try`: how often it began again, and the error that it caught.
    pub(super) retries: u32,
    pub(super) caught: Option<Problem>,
    /// Of a loop.
    pub(super) items: Option<Held>,
    pub(super) index: u32,
    /// Of a fork: the branches that run, and how the others ended, by number.
    pub(super) open: u32,
    pub(super) ended: BTreeMap<u32, BranchEnd>,
    /// Of the workflow: the context. Of a branch: the context, if a task in it exported one.
    pub(super) context: Option<Held>,
    pub(super) holds_context: bool,
}

impl Frame {
    fn new(at: i64, raw: Held, input: Held) -> Self {
        Self {
            round: 0,
            attempt: 0,
            started_at: at,
            raw,
            current: input.clone(),
            input,
            phase: Phase::Begin,
            retries: 0,
            caught: None,
            items: None,
            index: 0,
            open: 0,
            ended: BTreeMap::new(),
            context: None,
            holds_context: false,
        }
    }

    /// The errors that it holds.
    fn problems(&self) -> impl Iterator<Item = &Problem> {
        let failed = match &self.phase {
            Phase::Failed(problem) => Some(problem),
            _ => None,
        };
        let branches = self.ended.values();
        let branches = branches.filter_map(|branch| branch.output.as_ref().err());
        failed.into_iter().chain(&self.caught).chain(branches)
    }

    fn held(&self) -> impl Iterator<Item = &Held> {
        let branches = self.ended.values().flat_map(|branch| {
            let output = branch.output.as_ref().ok();
            output.into_iter().chain(&branch.context)
        });
        [&self.raw, &self.input, &self.current]
            .into_iter()
            .chain(&self.items)
            .chain(&self.context)
            .chain(branches)
    }
}

/// What is to be done with a frame.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    /// It started: its tasks begin.
    Begin,
    /// A task inside it ended, and says where to go on.
    Next(Next),
    /// A task inside it faulted.
    Failed(Problem),
    /// Something inside it runs, or it waits for a step or a timer.
    Blocked,
}

/// How a branch of a fork ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BranchEnd {
    pub(super) output: Result<Held, Problem>,
    pub(super) context: Option<Held>,
    /// Whether the workflow ends with it.
    pub(super) ends: bool,
}

/// A step that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpenStep {
    pub(super) round: u32,
    pub(super) attempt: u32,
    pub(super) since: i64,
}

/// A timer that is armed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Timer {
    pub(super) path: Arc<str>,
    pub(super) purpose: TimerPurpose,
    pub(super) since: i64,
    pub(super) due: i64,
}

impl State {
    /// The state of an execution that has no event yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The state after these events.
    pub fn fold<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Result<Self, BadHistory> {
        let mut state = Self::new();
        for entry in entries {
            state.apply(entry)?;
        }
        Ok(state)
    }

    pub fn status(&self) -> Status {
        let is_ready = |frame: &Frame| frame.phase != Phase::Blocked;
        match self.status {
            Status::Running if !self.frames.values().any(is_ready) => Status::Waiting,
            status => status,
        }
    }

    /// The hash of the program that the execution is pinned to.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The number of events so far: the sequence number that an append compares with.
    pub fn events(&self) -> u64 {
        self.events
    }

    pub fn input(&self) -> &Value {
        &self.input.value
    }

    pub fn output(&self) -> Option<&Value> {
        self.output.as_ref().map(|held| &*held.value)
    }

    pub fn error(&self) -> Option<&Problem> {
        self.error.as_ref()
    }

    /// The value that flows in the task of this path: its input until it has another one.
    pub fn current(&self, path: &str) -> Option<&Value> {
        self.frames.get(path).map(|frame| &*frame.current.value)
    }

    /// What the execution waits for.
    pub fn waits(&self) -> Vec<Wait> {
        let steps = self.steps.iter().map(|(path, step)| Wait {
            path: path.to_string(),
            on: WaitOn::Step(step.key(path)),
            since: step.since,
            until: None,
        });
        let timers = self.timers.iter().map(|(timer, armed)| Wait {
            path: armed.path.to_string(),
            on: WaitOn::Timer {
                timer: *timer,
                purpose: armed.purpose,
            },
            since: armed.since,
            until: Some(armed.due),
        });
        steps.chain(timers).collect()
    }

    /// About the bytes of its values, errors and paths. A value that several tasks share counts once.
    pub fn bytes(&self) -> usize {
        let mut seen = HashSet::new();
        let values = self.frames.values().flat_map(Frame::held);
        let values = values
            .chain([&self.input])
            .filter(|held| seen.insert(Arc::as_ptr(&held.value)))
            .map(|held| held.bytes);
        let paths = self.rounds.keys().map(|path| path.len());
        let problems = self.frames.values().flat_map(Frame::problems);
        values
            .chain(paths)
            .chain(problems.map(Problem::bytes))
            .sum()
    }

    /// The frame around a path: the longest path before it that runs.
    pub(super) fn parent(&self, path: &str) -> Option<(Arc<str>, &Frame)> {
        let mut path = path;
        loop {
            path = &path[..path.rfind('/')?];
            if let Some((path, frame)) = self.frames.get_key_value(path) {
                return Some((path.clone(), frame));
            }
        }
    }

    /// The context that the task of a path sees.
    pub(super) fn context(&self, path: &str) -> Option<&Held> {
        let mut at = path.to_owned();
        loop {
            if let Some(context) = self
                .frames
                .get(at.as_str())
                .and_then(|f| f.context.as_ref())
            {
                return Some(context);
            }
            at = self.parent(&at)?.0.to_string();
        }
    }

    /// The paths of what runs directly inside a path.
    pub(super) fn children(&self, path: &str) -> Vec<Arc<str>> {
        let is_child = |inner: &Arc<str>| self.parent(inner).is_some_and(|(at, _)| &*at == path);
        self.inside(path).into_iter().filter(is_child).collect()
    }

    /// The paths of all that runs inside a path.
    fn inside(&self, path: &str) -> Vec<Arc<str>> {
        inside(&self.frames, path)
            .map(|(path, _)| path.clone())
            .collect()
    }

    /// Changes the state by one event. On an error it is not to be used any more.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), BadHistory> {
        self.events += 1;
        self.history_bytes += event_bytes(&entry.event) as u64;
        self.change(entry.at, &entry.event)
            .map_err(|reason| BadHistory {
                event: self.events,
                reason,
            })
    }

    fn change(&mut self, at: i64, event: &Event) -> Result<(), String> {
        let is_first = matches!(event, Event::Started { .. });
        match self.status {
            Status::Pending if is_first => {}
            Status::Running if !is_first => {}
            status => return Err(format!("the execution is {status:?}")),
        }
        match event {
            Event::Started {
                execution,
                program,
                input,
                from,
            } => {
                self.execution.clone_from(execution);
                self.program.clone_from(program);
                self.start(at, input, from);
            }
            Event::TaskStarted {
                path,
                round,
                attempt,
                input,
                arguments,
            } => self.start_task(at, path, (*round, *attempt), input, arguments)?,
            Event::TaskCompleted {
                path,
                output,
                context,
                next,
            } => self.complete_task(path, output, context, next)?,
            Event::TaskSkipped { path, next } => {
                self.tasks_since_wait += 1;
                let (_, parent) = self.around(path)?;
                parent.phase = Phase::Next(next.clone());
            }
            Event::TaskFaulted { path, error } => self.fault_task(path, error)?,
            Event::TaskRetried {
                path,
                attempt,
                wait,
            } => self.retry(path, *attempt, *wait)?,
            Event::ErrorCaught { path } => self.catch(path)?,
            Event::TaskCancelled { path } => self.cancel_task(path)?,
            Event::RoundStarted { path, index, items } => self.start_round(path, *index, items)?,
            Event::BranchStarted { path } => self.start_branch(at, path)?,
            Event::BranchEnded { path, joins } => self.end_branch(path, *joins)?,
            Event::StepIssued {
                path,
                round,
                attempt,
            } => {
                self.at(path)?.phase = Phase::Blocked;
                let step = OpenStep {
                    round: *round,
                    attempt: *attempt,
                    since: at,
                };
                self.steps.insert(path.as_str().into(), step);
            }
            Event::StepEnded { path, .. } => {
                if self.steps.remove(path.as_str()).is_none() {
                    return Err(format!("no step of {path} is open"));
                }
                self.tasks_since_wait = 0;
            }
            Event::TimerArmed {
                timer,
                path,
                purpose,
                due,
            } => {
                let armed = Timer {
                    path: path.as_str().into(),
                    purpose: *purpose,
                    since: at,
                    due: *due,
                };
                self.arm(*timer, armed)?;
            }
            Event::TimerFired { timer } => self.fire(*timer)?,
            Event::Emitted { path, event } => {
                self.at(path)?.current = Held::new(event.clone());
            }
            Event::Cancelled => self.finish(Status::Cancelled),
            Event::Faulted { error } => {
                self.finish(Status::Faulted);
                self.error = Some(error.clone());
            }
            Event::Completed { output } => {
                let current = self.at(ROOT)?.current.clone();
                self.output = Some(Held::or(output, &current));
                self.finish(Status::Completed);
            }
        }
        Ok(())
    }

    fn start(&mut self, at: i64, input: &Value, from: &Option<Value>) {
        self.status = Status::Running;
        self.input = Held::new(input.clone());
        self.started_at = at;
        let mut frame = Frame::new(at, self.input.clone(), Held::or(from, &self.input));
        frame.context = Some(Held::new(Value::Null));
        frame.holds_context = true;
        self.frames.insert(ROOT.into(), frame);
    }

    fn start_task(
        &mut self,
        at: i64,
        path: &str,
        (round, attempt): (u32, u32),
        input: &Option<Value>,
        arguments: &Option<Value>,
    ) -> Result<(), String> {
        let (_, parent) = self.around(path)?;
        parent.phase = Phase::Blocked;
        let raw = parent.current.clone();
        let mut frame = Frame::new(at, raw.clone(), Held::or(input, &raw));
        frame.round = round;
        frame.attempt = attempt;
        if let Some(arguments) = arguments {
            frame.current = Held::new(arguments.clone());
        }
        let path: Arc<str> = path.into();
        self.rounds.insert(path.clone(), round + 1);
        self.frames.insert(path, frame);
        self.tasks_since_wait += 1;
        Ok(())
    }

    fn complete_task(
        &mut self,
        path: &str,
        output: &Option<Value>,
        context: &Option<Value>,
        next: &Next,
    ) -> Result<(), String> {
        let frame = self.take(path)?;
        if let Some(context) = context {
            self.set_context(path, Held::new(context.clone()))?;
        }
        let (_, parent) = self.around(path)?;
        parent.current = Held::or(output, &frame.current);
        parent.phase = Phase::Next(next.clone());
        Ok(())
    }

    fn fault_task(&mut self, path: &str, error: &Option<Problem>) -> Result<(), String> {
        // A task may fail before it starts.
        let frame = match self.frames.contains_key(path) {
            true => Some(self.take(path)?),
            false => None,
        };
        let error = match (error, frame.map(|frame| frame.phase)) {
            (Some(error), _) => error.clone(),
            (None, Some(Phase::Failed(error))) => error,
            _ => return Err(format!("no error is known at {path}")),
        };
        let (_, parent) = self.around(path)?;
        parent.phase = Phase::Failed(error);
        Ok(())
    }

    fn retry(&mut self, path: &str, attempt: u32, wait: u64) -> Result<(), String> {
        self.disarm(path, TimerPurpose::Attempt);
        // Its first task may fail before it starts, so this counts, too.
        self.tasks_since_wait += 1;
        let frame = self.at(path)?;
        frame.retries = attempt;
        frame.current = frame.input.clone();
        frame.phase = match wait {
            0 => Phase::Begin,
            _ => Phase::Blocked,
        };
        Ok(())
    }

    fn catch(&mut self, path: &str) -> Result<(), String> {
        self.disarm(path, TimerPurpose::Attempt);
        let frame = self.at(path)?;
        let Phase::Failed(error) = std::mem::replace(&mut frame.phase, Phase::Begin) else {
            return Err(format!("{path} has no error to catch"));
        };
        frame.caught = Some(error);
        frame.current = frame.input.clone();
        Ok(())
    }

    fn start_round(
        &mut self,
        path: &str,
        index: u32,
        items: &Option<Vec<Value>>,
    ) -> Result<(), String> {
        let frame = self.at(path)?;
        frame.index = index;
        if let Some(items) = items {
            frame.items = Some(Held::new(Value::Array(items.clone())));
        }
        frame.phase = Phase::Begin;
        Ok(())
    }

    fn start_branch(&mut self, at: i64, path: &str) -> Result<(), String> {
        let (_, fork) = self.around(path)?;
        fork.phase = Phase::Blocked;
        fork.open += 1;
        let mut branch = Frame::new(at, fork.input.clone(), fork.input.clone());
        branch.attempt = fork.attempt;
        branch.holds_context = true;
        self.frames.insert(path.into(), branch);
        Ok(())
    }

    fn cancel_task(&mut self, path: &str) -> Result<(), String> {
        if self.at(path).is_ok_and(|frame| frame.holds_context)
            && let Ok((_, fork)) = self.around(path)
        {
            fork.open = fork.open.saturating_sub(1);
        }
        self.take(path)?;
        Ok(())
    }

    fn arm(&mut self, number: u64, timer: Timer) -> Result<(), String> {
        if matches!(timer.purpose, TimerPurpose::Wait | TimerPurpose::Retry) {
            self.at(&timer.path)?.phase = Phase::Blocked;
        }
        self.armed = number + 1;
        self.timers_at.insert((timer.path.clone(), number));
        self.timers.insert(number, timer);
        Ok(())
    }

    fn fire(&mut self, timer: u64) -> Result<(), String> {
        let fired = self.remove_timer(timer);
        let fired = fired.ok_or_else(|| format!("timer {timer} is not armed"))?;
        self.tasks_since_wait = 0;
        let frame = self.at(&fired.path)?;
        match fired.purpose {
            TimerPurpose::Retry => frame.phase = Phase::Begin,
            TimerPurpose::Attempt => frame.phase = Phase::Failed(Problem::timed_out(&fired.path)),
            TimerPurpose::Wait | TimerPurpose::Timeout => {}
        }
        Ok(())
    }

    fn at(&mut self, path: &str) -> Result<&mut Frame, String> {
        let frame = self.frames.get_mut(path);
        frame.ok_or_else(|| format!("{path:?} does not run"))
    }

    fn around(&mut self, path: &str) -> Result<(Arc<str>, &mut Frame), String> {
        let parent = self.parent(path).map(|(path, _)| path);
        let parent = parent.ok_or_else(|| format!("nothing runs around {path:?}"))?;
        let frame = self.at(&parent)?;
        Ok((parent, frame))
    }

    /// Removes a frame, all that runs inside it, and their steps and timers.
    fn take(&mut self, path: &str) -> Result<Frame, String> {
        let frame = self.frames.remove(path);
        let frame = frame.ok_or_else(|| format!("{path:?} does not run"))?;
        for inner in self.inside(path) {
            self.frames.remove(&inner);
        }
        self.steps.remove(path);
        let steps: Vec<_> = inside(&self.steps, path)
            .map(|(path, _)| path.clone())
            .collect();
        for step in steps {
            self.steps.remove(&step);
        }
        for timer in self.timers_of(path) {
            self.remove_timer(timer);
        }
        Ok(frame)
    }

    fn disarm(&mut self, path: &str, purpose: TimerPurpose) {
        for timer in self.timers_of(path) {
            let armed = self.timers.get(&timer);
            if armed.is_some_and(|armed| &*armed.path == path && armed.purpose == purpose) {
                self.remove_timer(timer);
            }
        }
    }

    /// The timers of a path and of all that runs inside it.
    fn timers_of(&self, path: &str) -> Vec<u64> {
        let from = |path: String| (Bound::Included((path.into(), 0)), Bound::Unbounded);
        let own = self.timers_at.range(from(path.to_owned()));
        let own = own.take_while(|(at, _)| &**at == path);
        let inner = self.timers_at.range(from(format!("{path}/")));
        let inner = inner.take_while(|(at, _)| is_inside(at, path));
        own.chain(inner).map(|(_, timer)| *timer).collect()
    }

    fn remove_timer(&mut self, number: u64) -> Option<Timer> {
        let timer = self.timers.remove(&number)?;
        self.timers_at.remove(&(timer.path.clone(), number));
        Some(timer)
    }

    /// Sets the context that the tasks around a path see.
    fn set_context(&mut self, path: &str, context: Held) -> Result<(), String> {
        let mut at = path.to_owned();
        loop {
            let (parent, frame) = self.around(&at)?;
            if frame.holds_context {
                frame.context = Some(context);
                return Ok(());
            }
            at = parent.to_string();
        }
    }

    fn end_branch(&mut self, path: &str, joins: bool) -> Result<(), String> {
        let branch = self.take(path)?;
        let number = path
            .rsplit('/')
            .next()
            .and_then(|number| number.parse().ok());
        let number = number.ok_or_else(|| format!("{path:?} is no branch"))?;
        let (output, ends) = match branch.phase {
            Phase::Next(next) => (Ok(branch.current), next == Next::End),
            Phase::Failed(error) => (Err(error), false),
            Phase::Begin | Phase::Blocked => return Err(format!("{path:?} has not ended")),
        };
        let end = BranchEnd {
            output,
            context: branch.context,
            ends,
        };
        let (_, fork) = self.around(path)?;
        fork.ended.insert(number, end);
        fork.open = fork.open.saturating_sub(1);
        if joins {
            fork.phase = Phase::Next(if ends { Next::End } else { Next::Exit });
        }
        Ok(())
    }

    fn finish(&mut self, status: Status) {
        self.status = status;
        self.frames.clear();
        self.steps.clear();
        self.timers.clear();
        self.timers_at.clear();
    }
}

impl OpenStep {
    pub(super) fn key(&self, path: &str) -> StepKey {
        StepKey {
            path: path.to_owned(),
            round: self.round,
            attempt: self.attempt,
        }
    }
}

/// Whether a path is inside another one.
fn is_inside(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer)
        .is_some_and(|rest| rest.starts_with('/'))
}

/// The entries whose paths are inside a path.
fn inside<'a, T>(
    map: &'a BTreeMap<Arc<str>, T>,
    path: &'a str,
) -> impl Iterator<Item = (&'a Arc<str>, &'a T)> {
    let from: Arc<str> = format!("{path}/").into();
    map.range((Bound::Included(from), Bound::Unbounded))
        .take_while(move |(inner, _)| is_inside(inner, path))
}
