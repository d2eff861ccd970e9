//! One call of the machine: from an input until everything waits.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    event::{Entry, Event, StepKey, StepStatus, TimerPurpose},
    io::{Command, Input, Limits, Outcome, Step, StepEnd},
    problem::{Problem, ProblemKind},
    scope::{Scope, View},
    state::{BadHistory, Held, Phase, ROOT, State, Status, value_bytes},
};
use crate::{
    model::{Encoding, PayloadSchema, QueueName, json, to_rfc_3339},
    workflow::{
        definition::{Agree, StepOptions},
        program::{
            Code, Export, For, Fork, Kind, Next, Output, Program, Raise, Retry, Task, Try, as_text,
        },
    },
};

/// Takes an input to an execution and runs it until it waits, or has ended.
///
/// `state` becomes the fold of its log with the new events. If they are not stored, drop it. `now`
/// is Unix time in milliseconds.
///
/// It evaluates many expressions, so call it inside [`with_stack`]: one thread serves them all, and
/// where no thread can be started, the call can be made again later. Elsewhere each expression starts
/// a thread of its own, and the execution faults if that fails.
///
/// [`with_stack`]: crate::workflow::expression::with_stack
pub fn step(
    program: &Program,
    limits: &Limits,
    state: &mut State,
    input: Input,
    now: i64,
) -> Result<Outcome, BadHistory> {
    let steps_before = state.steps.clone();
    let timers_before: Vec<u64> = state.timers.keys().copied().collect();
    let was_final = state.status.is_final();
    let ended = match &input {
        Input::StepEnded { key, .. } => Some(key.clone()),
        _ => None,
    };
    let mut run = Run {
        program,
        limits,
        state,
        now,
        entries: Vec::new(),
        bytes: 0,
        work: Cell::new(limits.expressions.work),
        refused: RefCell::default(),
        state_bytes: 0,
        issued: BTreeMap::new(),
        ready: VecDeque::new(),
    };
    let more = match run.take(input) {
        Ok(more) => more,
        Err(Stop::Bound(error)) => {
            run.append(Event::Faulted { error })?;
            false
        }
        Err(Stop::Bad(bad)) => return Err(bad),
    };
    let mut commands = Vec::new();
    // A step that was cancelled by the same events has no task, and needs none.
    for (path, step) in steps_before {
        if run.state.steps.get(&path) == Some(&step) {
            continue;
        }
        let key = step.key(&path);
        if ended.as_ref() != Some(&key) {
            commands.push(Command::CancelStep(key));
        }
    }
    for (path, step) in std::mem::take(&mut run.issued) {
        if run
            .state
            .steps
            .get(&path)
            .is_some_and(|open| open.key(&path) == step.key)
        {
            commands.push(Command::IssueStep(Box::new(step)));
        }
    }
    for timer in &timers_before {
        if !run.state.timers.contains_key(timer) {
            commands.push(Command::DisarmTimer { timer: *timer });
        }
    }
    for (timer, armed) in &run.state.timers {
        if timers_before.binary_search(timer).is_err() {
            commands.push(Command::ArmTimer {
                timer: *timer,
                due: armed.due,
            });
        }
    }
    if !was_final && run.state.status.is_final() {
        commands.push(Command::Finish(run.state.status));
    }
    Ok(Outcome {
        entries: run.entries,
        commands,
        more,
        refused: run.refused.into_inner(),
    })
}

const TOO_DEEP: &str = "a value has more than 120 levels";

struct Run<'a> {
    program: &'a Program,
    limits: &'a Limits,
    state: &'a mut State,
    now: i64,
    entries: Vec<Entry>,
    /// About the bytes of the entries, and of the payloads of steps.
    bytes: usize,
    /// The work that expressions of this task may do.
    work: Cell<u64>,
    refused: RefCell<BTreeMap<&'static str, u64>>,
    /// The bytes of the state when they were counted last, and of the events since. The state has no
    /// more.
    state_bytes: usize,
    issued: BTreeMap<Arc<str>, Step>,
    /// The paths of frames that may go on.
    ready: VecDeque<Arc<str>>,
}

/// Why a run ends early.
enum Stop {
    /// The execution is beyond a limit, and faults.
    Bound(Problem),
    Bad(BadHistory),
}

impl From<BadHistory> for Stop {
    fn from(bad: BadHistory) -> Self {
        Self::Bad(bad)
    }
}

/// The path of the frame to look at next. `None`: this thread of control waits.
type Went = Result<Option<Arc<str>>, Stop>;

impl<'a> Run<'a> {
    /// Returns whether more can be done.
    fn take(&mut self, input: Input) -> Result<bool, Stop> {
        let is_start = matches!(input, Input::Start { .. });
        if is_start != (self.state.status == Status::Pending) || self.state.status.is_final() {
            return Ok(false);
        }
        let mut at = match input {
            Input::Start { execution, input } => self.start(execution, input)?,
            Input::StepEnded { key, end } => self.step_ended(&key, end)?,
            Input::TimerFired { timer } => self.timer_fired(timer)?,
            Input::Cancel => {
                self.emit(Event::Cancelled)?;
                None
            }
            Input::Resume => None,
        };
        self.check_work()?;
        self.state_bytes = self.state.bytes();
        let mut work = 0;
        for (path, frame) in &self.state.frames {
            if frame.phase != Phase::Blocked && at.as_ref() != Some(path) {
                self.ready.push_back(path.clone());
            }
        }
        while !self.state.status.is_final() {
            if self.state_bytes > self.limits.state {
                self.state_bytes = self.state.bytes();
            }
            if self.state_bytes > self.limits.state {
                let limit = self.limits.state;
                return Err(bound(format!("its state has more than {limit} bytes")));
            }
            let path = match at.take().or_else(|| self.ready.pop_front()) {
                Some(path) => path,
                None => return Ok(false),
            };
            if self.entries.len() >= self.limits.batch_events
                || self.bytes >= self.limits.batch_bytes
                || work >= self.limits.batch_work
            {
                return Ok(true);
            }
            let of_task = self.limits.expressions.work;
            self.work.set(of_task);
            at = self.advance(&path)?;
            self.check_work()?;
            work += of_task - self.work.get();
        }
        Ok(false)
    }

    /// Ends the execution if the expressions of a task have done too much. An error of an expression
    /// would be caught.
    fn check_work(&self) -> Result<(), Stop> {
        match self.work.get() {
            0 => Err(bound(
                "the expressions of one task take too many steps (expr_fuel)".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Appends an event, unless the history has no room for it and the last one.
    fn emit(&mut self, event: Event) -> Result<(), Stop> {
        if self.state.events + 1 >= self.limits.events
            && !matches!(
                event,
                Event::Cancelled | Event::Completed { .. } | Event::Faulted { .. }
            )
        {
            let limit = self.limits.events;
            return Err(bound(format!("its history has more than {limit} events")));
        }
        if self.state.history_bytes > self.limits.history {
            let limit = self.limits.history;
            return Err(bound(format!("its history has more than {limit} bytes")));
        }
        // Its log must be readable after a restart.
        if event.values().any(is_too_deep) {
            return Err(bound(TOO_DEEP.to_owned()));
        }
        Ok(self.append(event)?)
    }

    fn append(&mut self, event: Event) -> Result<(), BadHistory> {
        let entry = Entry {
            at: self.now,
            event,
        };
        let before = self.state.history_bytes;
        self.state.apply(&entry)?;
        let bytes = usize::try_from(self.state.history_bytes - before).unwrap_or(usize::MAX);
        self.bytes += bytes;
        self.state_bytes += bytes;
        self.entries.push(entry);
        Ok(())
    }

    fn arm(&mut self, path: &str, purpose: TimerPurpose, ms: u64) -> Result<(), Stop> {
        let due = self
            .now
            .saturating_add(i64::try_from(ms).unwrap_or(i64::MAX));
        self.emit(Event::TimerArmed {
            timer: self.state.armed,
            path: path.to_owned(),
            purpose,
            due,
        })
    }

    /// What expressions see.
    fn view(&self) -> View<'_> {
        View {
            program: self.program,
            state: self.state,
            bounds: self.limits.expressions,
            work: &self.work,
            refused: &self.refused,
            now: self.now,
        }
    }

    fn parent(&self, path: &str) -> Option<Arc<str>> {
        self.state.parent(path).map(|(path, _)| path)
    }

    fn start(&mut self, execution: String, input: Value) -> Went {
        let too_deep = || Problem::new(ProblemKind::Runtime, ROOT, TOO_DEEP);
        // Starts of today refuse such an input.
        let (input, fits) = match is_too_deep(&input) {
            true => (Value::Null, Err(too_deep())),
            false => (input, Ok(())),
        };
        // Expressions see the execution that is about to start.
        self.state.execution.clone_from(&execution);
        self.state.started_at = self.now;
        self.state.input = Held::new(input.clone());
        let scope = Scope {
            raw: Some(self.state.input.value.clone()),
            context: Some(Arc::default()),
            ..Scope::at(ROOT)
        };
        let fits = fits.and_then(|()| check(&self.program.input.schema, "the input", &input, ROOT));
        let from = fits.and_then(|()| {
            let from = self.program.input.from.as_ref();
            from.map(|from| self.view().evaluate(from, "input.from", &input, &scope))
                .transpose()
        });
        let from = from.and_then(|from| match from.as_ref().is_some_and(is_too_deep) {
            true => Err(too_deep()),
            false => Ok(from),
        });
        let timeout = from.as_ref().ok().map(|from| {
            let timeout = self.program.timeout.as_ref();
            let input = from.as_ref().unwrap_or(&input);
            timeout
                .map(|timeout| self.view().length(timeout, "timeout", input, &scope))
                .transpose()
        });
        let (from, error) = match from {
            Ok(from) => (from, None),
            Err(error) => (None, Some(error)),
        };
        self.emit(Event::Started {
            execution,
            program: self.program.hash.clone(),
            input,
            from,
        })?;
        let timeout = match (error, timeout) {
            (Some(error), _) | (None, Some(Err(error))) => return self.faulted(error),
            (None, timeout) => timeout.and_then(Result::ok).flatten(),
        };
        if let Some(ms) = timeout {
            self.arm(ROOT, TimerPurpose::Timeout, ms)?;
        }
        Ok(Some(ROOT.into()))
    }

    fn faulted(&mut self, mut error: Problem) -> Went {
        // The pointer to the workflow itself.
        if error.instance.as_deref() == Some(ROOT) {
            error.instance = Some("/".to_owned());
        }
        self.emit(Event::Faulted { error })?;
        Ok(None)
    }

    fn step_ended(&mut self, key: &StepKey, end: StepEnd) -> Went {
        let Some((path, open)) = self.state.steps.get_key_value(key.path.as_str()) else {
            return Ok(None);
        };
        if open.key(path) != *key {
            return Ok(None);
        }
        let path = path.clone();
        let task = self.task(&path)?;
        let agree = match &task.kind {
            Kind::Http(call) => call.options.agree,
            Kind::OpenApi(call) => call.options.agree,
            Kind::Step { options, .. } => options.agree,
            _ => Agree::First,
        };
        let (status, output) = match end {
            StepEnd::Completed { results } => {
                let agreed = agreed(agree, results).ok_or_else(|| {
                    let detail = "no result is the same for more than half of the workers";
                    Problem::new(ProblemKind::Runtime, &path, detail)
                });
                (StepStatus::Completed, agreed)
            }
            StepEnd::Dead { reason } => (StepStatus::Dead, Err(Problem::of_death(&reason, &path))),
            StepEnd::Cancelled => {
                let error = Problem::new(ProblemKind::Runtime, &path, "cancelled");
                (StepStatus::Cancelled, Err(error))
            }
        };
        self.emit(Event::StepEnded {
            path: path.to_string(),
            status,
        })?;
        match output {
            Ok(output) => self.complete(&path, task, Some(output), task.next.clone(), None),
            Err(error) => self.fault(&path, Some(error)),
        }
    }

    fn timer_fired(&mut self, timer: u64) -> Went {
        let Some(armed) = self.state.timers.get(&timer) else {
            return Ok(None);
        };
        let path = armed.path.clone();
        let purpose = armed.purpose;
        self.emit(Event::TimerFired { timer })?;
        match purpose {
            TimerPurpose::Wait => {
                let task = self.task(&path)?;
                self.complete(&path, task, None, task.next.clone(), None)
            }
            TimerPurpose::Retry => Ok(Some(path)),
            TimerPurpose::Attempt => {
                self.cancel_inside(&path)?;
                Ok(Some(path))
            }
            TimerPurpose::Timeout => {
                self.cancel_inside(&path)?;
                let error = Problem::timed_out(&path);
                if &*path == ROOT {
                    return self.faulted(error);
                }
                self.fault(&path, Some(error))
            }
        }
    }

    fn cancel_inside(&mut self, path: &str) -> Result<(), Stop> {
        for child in self.state.children(path) {
            self.emit(Event::TaskCancelled {
                path: child.to_string(),
            })?;
        }
        Ok(())
    }

    /// Does the next thing with a frame.
    fn advance(&mut self, path: &Arc<str>) -> Went {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        match frame.phase.clone() {
            Phase::Blocked => Ok(None),
            Phase::Begin => self.begin(path),
            Phase::Next(Next::Task(next)) => self.enter(path, &next),
            Phase::Next(next) => self.list_ended(path, next),
            Phase::Failed(error) => self.failed(path, error),
        }
    }

    /// The task of a path of the log.
    fn task(&self, path: &str) -> Result<&'a Task, Stop> {
        self.program.task(path).ok_or_else(|| {
            Stop::Bad(BadHistory {
                event: self.state.events,
                reason: format!("the program has no task {path:?}"),
            })
        })
    }

    fn begin(&mut self, path: &Arc<str>) -> Went {
        let program = self.program;
        if &**path == ROOT {
            return match program.list.first() {
                Some(first) => self.enter(path, first),
                None => self.list_ended(path, Next::Exit),
            };
        }
        if let Some(inner) = program.branches.get(path) {
            return self.enter(path, inner);
        }
        let task = self.task(path)?;
        let first = match &task.kind {
            Kind::Do(list) | Kind::For(For { list, .. }) => list.first(),
            Kind::Function { body, .. } => Some(body),
            Kind::Try(try_) => {
                let frame = self.state.frames.get(path);
                if frame.is_some_and(|frame| frame.caught.is_some()) {
                    try_.catch.first()
                } else {
                    let parent = self.parent(path);
                    if !self.begin_attempt(path, try_.retry.as_ref())? {
                        return Ok(parent);
                    }
                    try_.list.first()
                }
            }
            _ => None,
        };
        match first {
            Some(first) => self.enter(path, first),
            None => self.list_ended(path, Next::Exit),
        }
    }

    /// Arms the timer of an attempt of a `try`.
    fn begin_attempt(&mut self, path: &Arc<str>, retry: Option<&Retry>) -> Result<bool, Stop> {
        let (Some(length), Some(frame)) = (
            retry.and_then(|retry| retry.attempt_duration.as_ref()),
            self.state.frames.get(path),
        ) else {
            return Ok(true);
        };
        let input = frame.input.value.clone();
        let what = "retry.limit.attempt.duration";
        match self.view().length(length, what, &input, &Scope::at(path)) {
            Ok(ms) => self.arm(path, TimerPurpose::Attempt, ms)?,
            Err(error) => {
                self.fault(path, Some(error))?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enters the task `path` inside the frame `around`.
    fn enter(&mut self, around: &Arc<str>, path: &str) -> Went {
        let task = self.task(path)?;
        if self.state.tasks_since_wait >= self.limits.steps {
            let limit = self.limits.steps;
            return Err(bound(format!("more than {limit} tasks ran without a wait")));
        }
        let depth = path.matches('/').count();
        if depth > self.limits.depth && self.depth(path) > self.limits.depth {
            let limit = self.limits.depth;
            return Err(bound(format!("its tasks are more than {limit} deep")));
        }
        let Some(frame) = self.state.frames.get(around) else {
            return Ok(None);
        };
        let attempt = match self.program.task(around).map(|task| &task.kind) {
            Some(Kind::Try(_)) if frame.caught.is_none() => frame.retries,
            _ => frame.attempt,
        };
        let raw = frame.current.value.clone();
        let scope = Scope {
            raw: Some(raw.clone()),
            ..Scope::at(path)
        };
        if let Some(condition) = &task.if_ {
            match self.view().is_true(condition, "if", &raw, &scope) {
                Ok(true) => {}
                Ok(false) => {
                    self.emit(Event::TaskSkipped {
                        path: path.to_owned(),
                        next: task.next_if_skipped.clone(),
                    })?;
                    return Ok(Some(around.clone()));
                }
                Err(error) => return self.fault(path, Some(error)),
            }
        }
        let from = check(&task.input.schema, "the input", &raw, path).and_then(|()| {
            let from = task.input.from.as_ref();
            from.map(|from| self.view().evaluate(from, "input.from", &raw, &scope))
                .transpose()
        });
        let from = match from {
            Ok(from) => from,
            Err(error) => return self.fault(path, Some(error)),
        };
        let input = match &from {
            Some(from) => Arc::new(from.clone()),
            None => raw,
        };
        let arguments = match &task.kind {
            Kind::Function {
                with: Some(with), ..
            } => {
                let scope = Scope {
                    raw: Some(input.clone()),
                    ..Scope::at(path)
                };
                match self.view().evaluate(with, "with", &input, &scope) {
                    Ok(arguments) => Some(arguments),
                    Err(error) => return self.fault(path, Some(error)),
                }
            }
            _ => None,
        };
        let round = self.state.rounds.get(path).copied().unwrap_or(0);
        self.emit(Event::TaskStarted {
            path: path.to_owned(),
            round,
            attempt,
            input: from,
            arguments,
        })?;
        if let Some(timeout) = &task.timeout {
            match self
                .view()
                .length(timeout, "timeout", &input, &Scope::at(path))
            {
                Ok(ms) => self.arm(path, TimerPurpose::Timeout, ms)?,
                Err(error) => return self.fault(path, Some(error)),
            }
        }
        self.run_kind(&path.into(), task, &input, round, attempt)
    }

    /// How many tasks are around a path.
    fn depth(&self, path: &str) -> usize {
        let mut depth = 1;
        let mut at = self.parent(path);
        while let Some(path) = at {
            depth += usize::from(self.program.task(&path).is_some());
            at = self.parent(&path);
        }
        depth
    }

    /// Does what the task says, after it started.
    fn run_kind(
        &mut self,
        path: &Arc<str>,
        task: &'a Task,
        input: &Arc<Value>,
        round: u32,
        attempt: u32,
    ) -> Went {
        let scope = Scope::at(path);
        let output = match &task.kind {
            Kind::Do(_) | Kind::Try(_) | Kind::Function { .. } => return Ok(Some(path.clone())),
            Kind::Set(code) => self.view().evaluate(code, "set", input, &scope),
            Kind::Switch(cases) => {
                let mut next = &task.next;
                for case in cases {
                    let matches = match &case.when {
                        Some(when) => self.view().is_true(when, "when", input, &scope),
                        None => Ok(true),
                    };
                    match matches {
                        Ok(false) => {}
                        Ok(true) => {
                            next = &case.next;
                            break;
                        }
                        Err(error) => return self.fault(path, Some(error)),
                    }
                }
                return self.complete(path, task, None, next.clone(), None);
            }
            Kind::For(for_) => match self.view().evaluate(&for_.in_, "for.in", input, &scope) {
                Ok(Value::Array(items)) => return self.round(path, task, for_, 0, Some(items)),
                Ok(_) => {
                    let detail = "for.in: the expression must give an array";
                    Err(Problem::new(ProblemKind::Expression, path, detail))
                }
                Err(error) => Err(error),
            },
            Kind::Fork(fork) => return self.begin_branches(path, task, fork),
            Kind::Raise(raise) => match self.raised(path, raise, input) {
                Ok(error) | Err(error) => Err(error),
            },
            Kind::Wait(length) => match self.view().length(length, "wait", input, &scope) {
                Ok(0) => return self.complete(path, task, None, task.next.clone(), None),
                Ok(ms) => {
                    self.arm(path, TimerPurpose::Wait, ms)?;
                    return Ok(None);
                }
                Err(error) => Err(error),
            },
            Kind::Emit(with) => match self.cloud_event(path, with, input, round) {
                Ok(event) => {
                    self.emit(Event::Emitted {
                        path: path.to_string(),
                        event,
                    })?;
                    return self.complete(path, task, None, task.next.clone(), None);
                }
                Err(error) => Err(error),
            },
            Kind::Http(_) | Kind::OpenApi(_) | Kind::Step { .. } => {
                match self.payload(path, task, input) {
                    Ok((queue, options, payload)) => {
                        let key = StepKey {
                            path: path.to_string(),
                            round,
                            attempt,
                        };
                        self.emit(Event::StepIssued {
                            path: path.to_string(),
                            round,
                            attempt,
                        })?;
                        let step = Step {
                            key,
                            queue,
                            options,
                            payload,
                        };
                        self.bytes += value_bytes(&step.payload);
                        self.issued.insert(path.clone(), step);
                        return Ok(None);
                    }
                    Err(error) => Err(error),
                }
            }
        };
        match output {
            Ok(output) => self.complete(path, task, Some(output), task.next.clone(), None),
            Err(error) => self.fault(path, Some(error)),
        }
    }

    /// The queue, the settings and the payload of a step.
    fn payload(
        &self,
        path: &str,
        task: &Task,
        input: &Value,
    ) -> Result<(QueueName, StepOptions, Value), Problem> {
        Ok(match &task.kind {
            Kind::Http(call) => (
                call.queue.clone(),
                call.options.clone(),
                self.view().http(path, call, input)?,
            ),
            Kind::OpenApi(call) => (
                call.queue.clone(),
                call.options.clone(),
                self.view().openapi(path, call, input)?,
            ),
            Kind::Step {
                with,
                queue,
                options,
            } => {
                let payload = match with {
                    Some(with) => {
                        let with = self
                            .view()
                            .evaluate(with, "with", input, &Scope::at(path))?;
                        self.view().worker_payload(path, &with)
                    }
                    None => self.view().worker_payload(path, input),
                };
                (queue.clone(), options.clone(), payload)
            }
            _ => {
                let detail = "the task is no step";
                return Err(Problem::new(ProblemKind::Runtime, path, detail));
            }
        })
    }

    /// The error that a task raises, or the error of doing so.
    fn raised(&self, path: &str, raise: &Raise, input: &Value) -> Result<Problem, Problem> {
        let scope = Scope::at(path);
        let text = |code: &Option<Code>, what| match code {
            Some(code) => {
                let value = self.view().evaluate(code, what, input, &scope)?;
                Ok((!value.is_null()).then(|| as_text(&value)))
            }
            None => Ok(None),
        };
        Ok(Problem {
            type_: self
                .view()
                .text(&raise.type_, "raise.error.type", input, &scope)?,
            status: raise.status,
            title: text(&raise.title, "raise.error.title")?,
            detail: text(&raise.detail, "raise.error.detail")?,
            instance: text(&raise.instance, "raise.error.instance")?
                .or_else(|| Some(path.to_owned())),
        })
    }

    /// The event that a task emits, with the attributes that it must have.
    fn cloud_event(
        &self,
        path: &str,
        with: &Code,
        input: &Value,
        round: u32,
    ) -> Result<Value, Problem> {
        let mut event = self
            .view()
            .fields(with, "emit.event.with", input, &Scope::at(path))?;
        let program = self.program;
        let source = || {
            format!(
                "/{}/{}/{}",
                program.namespace, program.name, program.version
            )
        };
        event.insert("specversion".to_owned(), "1.0".into());
        event
            .entry("id")
            .or_insert_with(|| event_id(&self.state.execution, path, round).into());
        event.entry("source").or_insert_with(|| source().into());
        event
            .entry("time")
            .or_insert_with(|| to_rfc_3339(self.now).into());
        Ok(Value::Object(event))
    }

    /// Begins a round of a loop, or ends the loop. The first round brings the items.
    fn round(
        &mut self,
        path: &Arc<str>,
        task: &'a Task,
        for_: &'a For,
        index: u32,
        items: Option<Vec<Value>>,
    ) -> Went {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let number = usize::try_from(index).unwrap_or(usize::MAX);
        let item = match &items {
            Some(items) => items.get(number),
            None => frame
                .items
                .as_ref()
                .and_then(|items| items.value.get(number)),
        };
        let Some(item) = item else {
            return self.complete(path, task, None, task.next.clone(), None);
        };
        if let Some(condition) = &for_.while_ {
            let scope = Scope {
                round: Some((Arc::new(item.clone()), index)),
                ..Scope::at(path)
            };
            match self
                .view()
                .is_true(condition, "while", &frame.current.value, &scope)
            {
                Ok(true) => {}
                Ok(false) => return self.complete(path, task, None, task.next.clone(), None),
                Err(error) => return self.fault(path, Some(error)),
            }
        }
        self.emit(Event::RoundStarted {
            path: path.to_string(),
            index,
            items,
        })?;
        Ok(Some(path.clone()))
    }

    fn begin_branches(&mut self, path: &Arc<str>, task: &'a Task, fork: &'a Fork) -> Went {
        if fork.branches.is_empty() {
            return self.complete(path, task, Some(json!([])), task.next.clone(), None);
        }
        for branch in &fork.branches {
            self.emit(Event::BranchStarted {
                path: branch.to_string(),
            })?;
            self.ready.push_back(branch.clone());
        }
        Ok(None)
    }

    /// The list of tasks of a frame ended.
    fn list_ended(&mut self, path: &Arc<str>, next: Next) -> Went {
        if &**path == ROOT {
            return self.workflow_ended();
        }
        if self.program.branches.contains_key(path) {
            return self.branch_ended(path, true, next == Next::End);
        }
        let task = self.task(path)?;
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let mut own = &task.next;
        match &task.kind {
            Kind::Fork(fork) => return self.join(path, task, fork, next),
            Kind::For(for_) if next != Next::End => {
                let index = frame.index.saturating_add(1);
                return self.round(path, task, for_, index, None);
            }
            Kind::Try(try_) if frame.caught.is_some() => own = &try_.next,
            _ => {}
        }
        // The end of the workflow goes through all that is around it.
        let next = if next == Next::End { next } else { own.clone() };
        self.complete(path, task, None, next, None)
    }

    fn workflow_ended(&mut self) -> Went {
        let Some(frame) = self.state.frames.get(ROOT) else {
            return Ok(None);
        };
        let last = frame.current.value.clone();
        let scope = Scope {
            output: Some(last.clone()),
            ..Scope::at(ROOT)
        };
        let made = self.output(&self.program.output, &last, &scope);
        match made {
            Ok(output) => self.emit(Event::Completed { output })?,
            Err(error) => return self.faulted(error),
        }
        Ok(None)
    }

    /// What `output` makes of a value. `None`: the value itself.
    fn output(
        &self,
        output: &Output,
        value: &Value,
        scope: &Scope<'_>,
    ) -> Result<Option<Value>, Problem> {
        let made = match &output.as_ {
            Some(as_) => Some(self.view().evaluate(as_, "output.as", value, scope)?),
            None => None,
        };
        let checked = made.as_ref().unwrap_or(value);
        check(&output.schema, "the output", checked, scope.path)?;
        Ok(made)
    }

    /// A branch of a fork ended.
    fn branch_ended(&mut self, path: &Arc<str>, succeeded: bool, ends: bool) -> Went {
        let Some((fork, frame)) = self.state.parent(path) else {
            return Ok(None);
        };
        let Kind::Fork(Fork { compete, .. }) = &self.task(&fork)?.kind else {
            return Ok(None);
        };
        let joins = frame.open == 1 || succeeded == *compete || ends;
        self.emit(Event::BranchEnded {
            path: path.to_string(),
            joins,
        })?;
        if !joins {
            return Ok(None);
        }
        self.cancel_inside(&fork)?;
        Ok(Some(fork))
    }

    /// All branches of a fork ended, or one decided for all.
    fn join(&mut self, path: &Arc<str>, task: &'a Task, fork: &'a Fork, next: Next) -> Went {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let mut outputs = Vec::new();
        let mut context = None;
        let mut failed = None;
        let mut decides = None;
        // In declared order.
        for end in frame.ended.values() {
            match &end.output {
                Ok(output) => {
                    if fork.compete || end.ends {
                        decides = Some(end);
                    }
                    outputs.push((*output.value).clone());
                    context = end.context.as_ref().or(context);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let (output, context) = match (decides, failed) {
            (Some(end), _) => {
                let output = end.output.as_ref().ok();
                (
                    output.map(|output| (*output.value).clone()),
                    end.context.as_ref(),
                )
            }
            (None, Some(error)) => {
                let error = error.clone();
                return self.fault(path, Some(error));
            }
            (None, None) => (Some(Value::Array(outputs)), context),
        };
        let context = context.map(|context| context.value.clone());
        let next = if next == Next::End {
            next
        } else {
            task.next.clone()
        };
        self.complete(path, task, output, next, context)
    }

    /// A task inside a frame failed.
    fn failed(&mut self, path: &Arc<str>, error: Problem) -> Went {
        if &**path == ROOT {
            return self.faulted(error);
        }
        if self.program.branches.contains_key(path) {
            return self.branch_ended(path, false, false);
        }
        let task = self.task(path)?;
        let caught = self
            .state
            .frames
            .get(path)
            .is_some_and(|f| f.caught.is_some());
        match &task.kind {
            Kind::Try(try_) if !caught => self.try_failed(path, task, try_, error),
            _ => self.fault(path, None),
        }
    }

    /// A task inside the `try` of this path failed.
    fn try_failed(
        &mut self,
        path: &Arc<str>,
        task: &'a Task,
        try_: &'a Try,
        error: Problem,
    ) -> Went {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let input = frame.input.value.clone();
        match self.view().catches(path, try_, &error, &input) {
            Ok(true) => {}
            Ok(false) => return self.fault(path, None),
            Err(error) => return self.fault(path, Some(error)),
        }
        let wait = match &try_.retry {
            Some(retry) => match self.view().wait_before_retry(path, retry, &input) {
                Ok(wait) => wait,
                Err(error) => return self.fault(path, Some(error)),
            },
            None => None,
        };
        if let Some((attempt, wait)) = wait {
            self.emit(Event::TaskRetried {
                path: path.to_string(),
                attempt,
                wait,
            })?;
            if wait == 0 {
                return Ok(Some(path.clone()));
            }
            self.arm(path, TimerPurpose::Retry, wait)?;
            return Ok(None);
        }
        self.emit(Event::ErrorCaught {
            path: path.to_string(),
        })?;
        if try_.catch.is_empty() {
            return self.complete(path, task, None, try_.next.clone(), None);
        }
        Ok(Some(path.clone()))
    }

    /// Ends a task with an error. `None`: the error of a task inside it.
    fn fault(&mut self, path: &str, error: Option<Problem>) -> Went {
        let parent = self.parent(path);
        self.emit(Event::TaskFaulted {
            path: path.to_owned(),
            error,
        })?;
        Ok(parent)
    }

    /// Ends a task with an output. `None`: the value that flowed through it. `context` is the one
    /// of the branches inside it.
    fn complete(
        &mut self,
        path: &str,
        task: &'a Task,
        output: Option<Value>,
        next: Next,
        context: Option<Arc<Value>>,
    ) -> Went {
        let Some(frame) = self.state.frames.get(path) else {
            return Ok(None);
        };
        let raw = output.map(Arc::new);
        let flowed = raw.as_ref().unwrap_or(&frame.current.value);
        let scope = Scope {
            output: Some(flowed.clone()),
            context: context.clone(),
            ..Scope::at(path)
        };
        let made = match self.output(&task.output, flowed, &scope) {
            Ok(made) => made.map(Arc::new),
            Err(error) => return self.fault(path, Some(error)),
        };
        let output = made.or(raw);
        let exported = match &task.export {
            Some(export) => {
                let value = output.as_ref().unwrap_or(&frame.current.value);
                let scope = Scope {
                    output: Some(value.clone()),
                    ..scope
                };
                self.exported(export, value, &scope)
            }
            None => Ok(None),
        };
        let context = match exported {
            Ok(Some(exported)) => Some(exported),
            Ok(None) => context.map(|context| (*context).clone()),
            Err(error) => return self.fault(path, Some(error)),
        };
        let parent = self.parent(path);
        self.emit(Event::TaskCompleted {
            path: path.to_owned(),
            output: output.map(Arc::unwrap_or_clone),
            context,
            next,
        })?;
        Ok(parent)
    }

    fn exported(
        &self,
        export: &Export,
        output: &Value,
        scope: &Scope<'_>,
    ) -> Result<Option<Value>, Problem> {
        let Some(as_) = &export.as_ else {
            return Ok(None);
        };
        let context = self.view().evaluate(as_, "export.as", output, scope)?;
        check(&export.schema, "the context", &context, scope.path)?;
        Ok(Some(context))
    }
}

/// Whether readers of the log would refuse a value.
fn is_too_deep(value: &Value) -> bool {
    json::levels(value) > json::MAX_DEPTH
}

/// The error of an execution that goes beyond a limit.
fn bound(says: String) -> Stop {
    Stop::Bound(Problem::new(ProblemKind::Runtime, "/", says))
}

/// Checks a value against a schema.
fn check(
    schema: &Option<PayloadSchema>,
    what: &str,
    value: &Value,
    path: &str,
) -> Result<(), Problem> {
    let Some(schema) = schema else {
        return Ok(());
    };
    match schema.misfit(value.to_string().as_bytes(), Encoding::Json) {
        None => Ok(()),
        Some(misfit) => {
            let detail = format!("{what} does not fit its schema: {}", misfit.says);
            Err(Problem::new(ProblemKind::Validation, path, detail))
        }
    }
}

/// The id of an emitted event: the same for the same task in the same round.
fn event_id(execution: &str, path: &str, round: u32) -> String {
    let hash = Sha256::new()
        .chain_update((execution.len() as u64).to_be_bytes())
        .chain_update(execution)
        .chain_update(path)
        .chain_update(round.to_be_bytes())
        .finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes)
        .into_uuid()
        .to_string()
}

/// Makes one result of those of all workers.
fn agreed(agree: Agree, results: Vec<Value>) -> Option<Value> {
    match agree {
        Agree::First => Some(results.into_iter().next().unwrap_or_default()),
        Agree::All => Some(Value::Array(results)),
        Agree::Majority => {
            let votes = |result: &&Value| results.iter().filter(|other| other == result).count();
            let winner = results
                .iter()
                .find(|result| votes(result) * 2 > results.len());
            winner.cloned()
        }
    }
}
