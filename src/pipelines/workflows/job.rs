//! Steps one execution: what came to it becomes an append.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde_json::Value;

use super::{
    inputs::{Incoming, ROWS_BESIDE_TIMERS},
    row::{row, task_id},
};
use crate::{
    model::{ExecutionId, ExecutionStatus, ExecutionSummary, SummaryWait, TaskId},
    pipelines::context::Context,
    store::{Append, Happening, NewRow, Timer},
    workflow::{
        machine::{
            Command, Entry, Event, Input, Limits, Problem, ProblemKind, State, Status, StepEnd,
            StepKey, TimerPurpose, Wait, WaitOn, step,
        },
        program::{Kind, Program},
    },
};

/// How many timers go before the ends of steps where these are many.
const TIMERS_FIRST: usize = 8;
/// How many waits readers are shown.
const SHOWN_WAITS: usize = 100;

/// An execution as its log has it.
pub(super) struct Live {
    pub(super) state: State,
    program: Arc<Program>,
    traceparent: String,
    /// The tasks of the steps that have not ended, and the other way round.
    steps: BTreeMap<StepKey, TaskId>,
    keys: HashMap<TaskId, StepKey>,
}

impl Live {
    pub(super) fn new(
        id: ExecutionId,
        state: State,
        program: Arc<Program>,
        traceparent: String,
    ) -> Self {
        let mut live = Self {
            state,
            program,
            traceparent,
            steps: BTreeMap::new(),
            keys: HashMap::new(),
        };
        for wait in live.state.waits() {
            if let WaitOn::Step(key) = wait.on {
                let task = task_id(id, &key, wait.since);
                live.add_step(key, task);
            }
        }
        live
    }

    fn add_step(&mut self, key: StepKey, task: TaskId) {
        self.keys.insert(task, key.clone());
        self.steps.insert(key, task);
    }

    fn remove_step(&mut self, key: &StepKey) -> Option<TaskId> {
        let task = self.steps.remove(key)?;
        self.keys.remove(&task);
        Some(task)
    }

    fn timers(&self) -> Vec<u64> {
        let timer = |wait: Wait| match wait.on {
            WaitOn::Timer { timer, .. } => Some(timer),
            WaitOn::Step(_) => None,
        };
        self.state.waits().into_iter().filter_map(timer).collect()
    }
}

/// An execution to step.
pub(super) struct Job {
    pub(super) id: ExecutionId,
    /// The number of entries of its log.
    pub(super) seq: u64,
    pub(super) live: Live,
    pub(super) incoming: Incoming,
    /// How steps of it ended, as far as that was read.
    pub(super) ends: HashMap<TaskId, StepEnd>,
    /// Ends that were missed may be left.
    pub(super) looks_on: bool,
    /// Its input, if it has not begun.
    pub(super) input: Value,
}

/// An execution that was stepped.
pub(super) struct Stepped {
    pub(super) append: Append,
    /// `None`: the execution has ended.
    pub(super) live: Option<Live>,
    /// What to store instead if the database refuses the append.
    pub(super) fallback: Fallback,
    /// About the bytes of the append.
    pub(super) bytes: usize,
    pub(super) seen: Seen,
}

/// What metrics count once the append is stored.
#[derive(Default)]
pub(super) struct Seen {
    /// The kind of each step that ended, and how it ended.
    pub(super) steps: Vec<(&'static str, &'static str)>,
    /// How late timers fired.
    pub(super) late: Vec<Duration>,
    /// How many evaluations went beyond each bound.
    pub(super) refused: BTreeMap<&'static str, u64>,
}

/// What is known of an execution without running the machine.
pub(super) struct Fallback {
    id: ExecutionId,
    seq: u64,
    steps: Vec<TaskId>,
    timers: Vec<u64>,
    consumed: Vec<Happening>,
}

impl Fallback {
    fn of(job: &Job) -> Self {
        Self {
            id: job.id,
            seq: job.seq,
            steps: job.live.steps.values().copied().collect(),
            timers: job.live.timers(),
            consumed: job.incoming.happenings.clone(),
        }
    }

    /// Ends the execution with an error.
    pub(super) fn fault(&self, reason: &str, now_unix_ms: i64) -> Append {
        let error = Problem::new(ProblemKind::Runtime, "", reason);
        let entry = Entry {
            at: now_unix_ms,
            event: Event::Faulted {
                error: error.clone(),
            },
        };
        Append {
            execution: self.id,
            seq: self.seq,
            entries: vec![encoded(&entry)],
            armed: Vec::new(),
            disarmed: self.timers.clone(),
            steps: Vec::new(),
            cancelled: self.steps.clone(),
            consumed: self.consumed.clone(),
            goes_on: false,
            status: ExecutionStatus::Faulted,
            summary: Some(summary(None, Some(&error), Vec::new())),
            at_unix_ms: now_unix_ms,
        }
    }
}

impl Job {
    /// The steps that ended.
    pub(super) fn ended(&self) -> impl Iterator<Item = TaskId> {
        let happenings = self.incoming.happenings.iter();
        happenings.filter_map(|happening| match happening {
            Happening::StepEnded { task, .. } => Some(*task),
            _ => None,
        })
    }

    /// The steps whose ends may have been missed.
    pub(super) fn to_look_at(&self) -> impl Iterator<Item = TaskId> {
        let looks = self.incoming.happenings.contains(&Happening::LookAgain);
        let steps = self.live.steps.values().copied();
        steps.filter(move |_| looks)
    }

    /// Steps the execution until it waits, or the time is over. If it cannot be stepped, it faults.
    pub(super) fn run(self, context: &Context, limits: &Limits, until: Instant) -> Stepped {
        let fallback = Fallback::of(&self);
        let id = self.id;
        // A bug of the machine ends this execution, not those that are stepped with it.
        let stepped = catch_unwind(AssertUnwindSafe(|| self.step(context, limits, until)));
        let reason = match stepped {
            Ok(Ok((append, live, bytes, seen))) => {
                return Stepped {
                    append,
                    live,
                    fallback,
                    bytes,
                    seen,
                };
            }
            Ok(Err(reason)) => reason,
            Err(_) => "a bug of taskd: the machine panicked, as the log of taskd says".to_owned(),
        };
        tracing::warn!("execution {id} faults: {reason}");
        Stepped {
            append: fallback.fault(&reason, context.clock.now_unix_ms()),
            live: None,
            fallback,
            bytes: 0,
            seen: Seen::default(),
        }
    }

    fn step(
        self,
        context: &Context,
        limits: &Limits,
        until: Instant,
    ) -> Result<(Append, Option<Live>, usize, Seen), String> {
        let mut run = Run {
            context,
            limits,
            id: self.id,
            live: self.live,
            entries: Vec::new(),
            bytes: 0,
            armed: BTreeMap::new(),
            disarmed: BTreeSet::new(),
            issued: BTreeMap::new(),
            cancelled: Vec::new(),
            consumed: Vec::new(),
            refused: Vec::new(),
            more: false,
            until,
            looks_on: self.looks_on,
            seen: Seen::default(),
        };
        run.take_all(self.incoming, self.ends, self.input)?;
        let bytes = run.bytes;
        let seen = std::mem::take(&mut run.seen);
        let (append, live) = run.end(self.seq);
        Ok((append, live, bytes, seen))
    }
}

struct Run<'a> {
    context: &'a Context,
    limits: &'a Limits,
    id: ExecutionId,
    live: Live,
    entries: Vec<Bytes>,
    bytes: usize,
    armed: BTreeMap<u64, i64>,
    disarmed: BTreeSet<u64>,
    issued: BTreeMap<StepKey, NewRow>,
    cancelled: Vec<TaskId>,
    consumed: Vec<Happening>,
    /// Steps whose tasks are invalid, and why. They have no tasks, so nobody else ends them.
    refused: Vec<(StepKey, String)>,
    more: bool,
    /// When it ends at the latest, with what it has.
    until: Instant,
    looks_on: bool,
    seen: Seen,
}

impl Run<'_> {
    fn take_all(
        &mut self,
        incoming: Incoming,
        mut ends: HashMap<TaskId, StepEnd>,
        input: Value,
    ) -> Result<(), String> {
        let Incoming {
            mut happenings,
            timers,
        } = incoming;
        // Nothing comes before the beginning, and after it a cancel waits for nothing.
        happenings.sort_by_key(|happening| match happening {
            Happening::Start => 0,
            Happening::Cancel => 1,
            Happening::LookAgain | Happening::GoOn => 2,
            Happening::StepEnded { .. } => 3,
        });
        if self.live.state.status() == Status::Pending {
            let execution = self.id.to_string();
            self.feed(Input::Start { execution, input })?;
        }
        let mut timers = VecDeque::from(timers);
        if happenings.len() >= ROWS_BESIDE_TIMERS {
            self.fire(&mut timers, TIMERS_FIRST)?;
        }
        let mut looks = false;
        for happening in happenings {
            if !self.has_room() {
                return Ok(());
            }
            match happening {
                Happening::Start | Happening::GoOn => {}
                Happening::Cancel => self.feed(Input::Cancel)?,
                Happening::LookAgain => {
                    looks = true;
                    continue;
                }
                // It was sent again, or nobody has read how it ended. Its row may be of another end.
                Happening::StepEnded { task, .. }
                    if self.live.keys.contains_key(&task) && !ends.contains_key(&task) =>
                {
                    continue;
                }
                Happening::StepEnded { task, .. } => self.end_step(task, &mut ends)?,
            }
            self.consumed.push(happening);
        }
        // Those whose ends were missed.
        let missed: Vec<TaskId> = ends.keys().copied().collect();
        for task in missed {
            if !self.has_room() {
                return Ok(());
            }
            self.end_step(task, &mut ends)?;
        }
        if looks && !self.looks_on {
            self.consumed.push(Happening::LookAgain);
        }
        self.fire(&mut timers, usize::MAX)?;
        // A process that died between two appends has left something to do.
        if self.has_room() && self.live.state.status() == Status::Running {
            self.feed(Input::Resume)?;
        }
        Ok(())
    }

    /// Fires up to `most` timers.
    fn fire(&mut self, timers: &mut VecDeque<Timer>, most: usize) -> Result<(), String> {
        for _ in 0..most {
            if !self.has_room() {
                return Ok(());
            }
            let Some(timer) = timers.pop_front() else {
                return Ok(());
            };
            // It fires once, also if the execution waits for it no more.
            let late = self.context.clock.now_unix_ms() - timer.due_unix_ms;
            let late = Duration::from_millis(late.max(0).unsigned_abs());
            self.seen.late.push(late);
            let timer = timer.number;
            self.disarmed.insert(timer);
            self.feed(Input::TimerFired { timer })?;
        }
        Ok(())
    }

    /// Tells the machine how a step ended. It may have been sent again, or the execution waits for it
    /// no more: then nothing happens.
    fn end_step(
        &mut self,
        task: TaskId,
        ends: &mut HashMap<TaskId, StepEnd>,
    ) -> Result<(), String> {
        if let Some(end) = ends.remove(&task)
            && let Some(key) = self.live.keys.get(&task).cloned()
        {
            self.live.remove_step(&key);
            let kind = match self.live.program.task(&key.path).map(|task| &task.kind) {
                Some(Kind::Http(_) | Kind::OpenApi(_)) => "http",
                _ => "worker",
            };
            let outcome = match &end {
                StepEnd::Completed { .. } => "completed",
                StepEnd::Dead { .. } => "dead",
                StepEnd::Cancelled => "cancelled",
            };
            self.seen.steps.push((kind, outcome));
            self.feed(Input::StepEnded { key, end })?;
        }
        Ok(())
    }

    /// Whether this append takes another input.
    fn has_room(&self) -> bool {
        let is_new = self.entries.is_empty() && self.consumed.is_empty();
        !self.more
            && self.entries.len() < self.limits.batch_events
            && self.bytes < self.limits.batch_bytes
            && (is_new || Instant::now() < self.until)
    }

    /// Gives the machine an input, and the ends of steps that this issues with invalid tasks.
    fn feed(&mut self, input: Input) -> Result<(), String> {
        self.take(input, self.limits)?;
        // The next append goes on after them: a `try` may begin again at once, for ever.
        let ends_only = Limits {
            batch_events: 1,
            ..*self.limits
        };
        while let Some((key, reason)) = self.refused.pop() {
            let end = StepEnd::Dead { reason };
            self.take(Input::StepEnded { key, end }, &ends_only)?;
        }
        Ok(())
    }

    fn take(&mut self, input: Input, limits: &Limits) -> Result<(), String> {
        let now = self.context.clock.now_unix_ms();
        let program = Arc::clone(&self.live.program);
        let outcome = step(&program, limits, &mut self.live.state, input, now)
            .map_err(|error| error.to_string())?;
        for entry in &outcome.entries {
            self.keep(entry);
        }
        for command in outcome.commands {
            self.carry_out(command, now);
        }
        self.more = outcome.more;
        for (bound, evaluations) in outcome.refused {
            *self.seen.refused.entry(bound).or_default() += evaluations;
        }
        Ok(())
    }

    fn keep(&mut self, entry: &Entry) {
        let entry = encoded(entry);
        self.bytes += entry.len();
        self.entries.push(entry);
    }

    fn carry_out(&mut self, command: Command, now: i64) {
        match command {
            Command::IssueStep(step) => {
                let key = step.key.clone();
                let task = task_id(self.id, &key, now);
                let traceparent = &self.live.traceparent;
                match row(self.context, self.id, traceparent, task, *step, now) {
                    Ok(row) => {
                        self.bytes += row.task.payload.len();
                        self.live.add_step(key.clone(), task);
                        self.issued.insert(key, row);
                    }
                    Err(reason) => self.refused.push((key, reason)),
                }
            }
            Command::CancelStep(key) => {
                self.refused.retain(|(refused, _)| *refused != key);
                let task = self.live.remove_step(&key);
                // What this append has issued is not stored at all.
                if self.issued.remove(&key).is_none() {
                    self.cancelled.extend(task);
                }
            }
            Command::ArmTimer { timer, due } => {
                self.armed.insert(timer, due);
            }
            Command::DisarmTimer { timer } => {
                if self.armed.remove(&timer).is_none() {
                    self.disarmed.insert(timer);
                }
            }
            // The status of the append says so.
            Command::Finish(_) => {}
        }
    }

    fn end(self, seq: u64) -> (Append, Option<Live>) {
        let state = &self.live.state;
        let status = match state.status() {
            Status::Pending => ExecutionStatus::Pending,
            Status::Running => ExecutionStatus::Running,
            Status::Waiting => ExecutionStatus::Waiting,
            Status::Cancelled => ExecutionStatus::Cancelled,
            Status::Faulted => ExecutionStatus::Faulted,
            Status::Completed => ExecutionStatus::Completed,
        };
        let waits = match status.is_final() {
            true => Vec::new(),
            false => self.live.shown_waits(),
        };
        let output = state
            .output()
            .filter(|_| status == ExecutionStatus::Completed);
        let append = Append {
            execution: self.id,
            seq,
            entries: self.entries,
            armed: self.armed.into_iter().collect(),
            disarmed: self.disarmed.into_iter().collect(),
            steps: self.issued.into_values().collect(),
            cancelled: self.cancelled,
            consumed: self.consumed,
            // Something is ready, perhaps because the time was over before the machine was asked.
            goes_on: self.more || status == ExecutionStatus::Running,
            status,
            summary: Some(summary(output, state.error(), waits)),
            at_unix_ms: self.context.clock.now_unix_ms(),
        };
        (append, (!status.is_final()).then_some(self.live))
    }
}

impl Live {
    fn shown_waits(&self) -> Vec<SummaryWait> {
        let waits = self.state.waits().into_iter().take(SHOWN_WAITS);
        let shown = waits.map(|wait| {
            let (on, task) = match &wait.on {
                WaitOn::Step(key) => ("step", self.steps.get(key)),
                WaitOn::Timer { purpose, .. } => (name_of(*purpose), None),
            };
            SummaryWait {
                path: wait.path,
                on: on.to_owned(),
                task: task.map(ToString::to_string),
                since_unix_ms: wait.since,
                until_unix_ms: wait.until,
            }
        });
        shown.collect()
    }
}

fn name_of(purpose: TimerPurpose) -> &'static str {
    match purpose {
        TimerPurpose::Wait => "wait",
        TimerPurpose::Timeout => "timeout",
        TimerPurpose::Retry => "retry",
        TimerPurpose::Attempt => "attempt",
    }
}

fn summary(output: Option<&Value>, error: Option<&Problem>, waits: Vec<SummaryWait>) -> Bytes {
    let summary = ExecutionSummary {
        output: output.cloned(),
        error: error.map(Problem::to_value),
        waits,
    };
    serde_json::to_vec(&summary)
        .expect("texts, numbers and values are always JSON")
        .into()
}

/// An entry as it is stored.
fn encoded(entry: &Entry) -> Bytes {
    serde_json::to_vec(entry)
        .expect("an entry is always JSON")
        .into()
}
