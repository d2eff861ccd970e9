//! A store, queues, timers and workers in memory, with virtual time, which run an execution to its
//! end.

use std::collections::BTreeMap;

use serde_json::Value;

use super::workflow::{
    definition::Definition,
    expression::with_stack,
    machine::{
        Command, Entry, Event, Input, Limits, Problem, State, Status, Step, StepEnd, StepKey, step,
    },
    program::{Documents, Program},
};

/// When executions start.
pub(super) const START: i64 = 1_700_000_000_000;

/// What a worker answers, and after how many milliseconds.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) after: i64,
    pub(super) end: StepEnd,
}

impl Answer {
    pub(super) fn result(result: Value) -> Self {
        Self::results(vec![result])
    }

    pub(super) fn results(results: Vec<Value>) -> Self {
        Self {
            after: 10,
            end: StepEnd::Completed { results },
        }
    }

    pub(super) fn dead(reason: impl Into<String>) -> Self {
        Self {
            after: 10,
            end: StepEnd::Dead {
                reason: reason.into(),
            },
        }
    }

    pub(super) fn after(self, after: i64) -> Self {
        Self { after, ..self }
    }
}

type Workers = Box<dyn FnMut(&Step) -> Answer>;

/// An execution and all that is around it.
pub(super) struct Fake {
    program: Program,
    pub(super) limits: Limits,
    workers: Workers,
    /// Forgets the state after every append, as a process that dies.
    pub(super) crashes: bool,
    /// Cancels the execution at this time.
    pub(super) cancel_at: Option<i64>,
    log: Vec<Entry>,
    state: State,
    now: i64,
    /// The ends of steps, in order.
    steps: Vec<(i64, StepKey, StepEnd)>,
    timers: BTreeMap<u64, i64>,
    issued: Vec<Step>,
    calls: usize,
}

/// How an execution ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: Status,
    pub(super) output: Value,
    pub(super) error: Option<Problem>,
    pub(super) log: Vec<Entry>,
    pub(super) issued: Vec<Step>,
    /// Milliseconds of virtual time.
    pub(super) took: i64,
    /// How often the machine was called.
    pub(super) calls: usize,
}

pub(super) fn program(text: &str, documents: &Documents) -> Program {
    let read = Definition::read(text).unwrap_or_else(|mistakes| panic!("{mistakes:?}\n{text}"));
    Program::compile(&read, documents).unwrap_or_else(|mistakes| panic!("{mistakes:?}\n{text}"))
}

impl Fake {
    pub(super) fn new(program: Program, workers: impl FnMut(&Step) -> Answer + 'static) -> Self {
        Self {
            program,
            limits: Limits::default(),
            workers: Box::new(workers),
            crashes: false,
            cancel_at: None,
            log: Vec::new(),
            state: State::new(),
            now: START,
            steps: Vec::new(),
            timers: BTreeMap::new(),
            issued: Vec::new(),
            calls: 0,
        }
    }

    pub(super) fn run(mut self, input: Value) -> Ended {
        let mut more = self.take(Input::Start {
            execution: "execution-1".to_owned(),
            input,
        });
        while !self.state.status().is_final() {
            let next = if more { Input::Resume } else { self.wait() };
            more = self.take(next);
        }
        Ended {
            status: self.state.status(),
            output: self.state.output().cloned().unwrap_or_default(),
            error: self.state.error().cloned(),
            log: self.log,
            issued: self.issued,
            took: self.now - START,
            calls: self.calls,
        }
    }

    /// Goes on to the time at which something happens, and returns what.
    fn wait(&mut self) -> Input {
        assert_eq!(self.state.status(), Status::Waiting);
        assert!(!self.state.waits().is_empty(), "it waits for nothing");
        let step = self.steps.iter().enumerate().min_by_key(|(_, step)| step.0);
        let step = step.map(|(number, step)| (step.0, number));
        let timer = self.timers.iter().min_by_key(|(_, due)| **due);
        let timer = timer.map(|(timer, due)| (*due, *timer));
        if let Some(at) = self.cancel_at
            && step.is_none_or(|(end, _)| at < end)
            && timer.is_none_or(|(due, _)| at < due)
        {
            self.cancel_at = None;
            self.now = at;
            return Input::Cancel;
        }
        match (step, timer) {
            (Some((end, number)), timer) if timer.is_none_or(|(due, _)| end <= due) => {
                self.now = end;
                let (_, key, end) = self.steps.remove(number);
                Input::StepEnded { key, end }
            }
            (_, Some((due, timer))) => {
                self.now = due;
                Input::TimerFired { timer }
            }
            _ => panic!("it waits for nothing: {:?}", self.state.waits()),
        }
    }

    /// One call of the machine, and the transaction after it. Returns whether more can be done.
    fn take(&mut self, input: Input) -> bool {
        let fired = match &input {
            Input::TimerFired { timer } => Some(*timer),
            _ => None,
        };
        let (program, limits) = (&self.program, &self.limits);
        let (state, now) = (&mut self.state, self.now);
        let outcome = with_stack(|| step(program, limits, state, input, now));
        let outcome = outcome.unwrap().unwrap();
        self.calls += 1;
        self.log.extend(outcome.entries);
        if let Some(timer) = fired {
            self.timers.remove(&timer);
        }
        for command in outcome.commands {
            self.carry_out(command);
        }
        self.check();
        if self.crashes {
            self.state = State::fold(&self.log).unwrap();
        }
        outcome.more
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::IssueStep(step) => {
                let key = &step.key;
                assert!(
                    self.issued.iter().all(|issued| issued.key != *key),
                    "{key} was issued twice"
                );
                let answer = (self.workers)(&step);
                let end = self.now + answer.after;
                self.steps.push((end, key.clone(), answer.end));
                self.issued.push(*step);
            }
            Command::CancelStep(key) => {
                let steps = self.steps.len();
                self.steps.retain(|step| step.1 != key);
                assert_eq!(self.steps.len() + 1, steps, "{key} is not open");
            }
            Command::ArmTimer { timer, due } => {
                assert_eq!(self.timers.insert(timer, due), None);
            }
            // One that fired is gone already.
            Command::DisarmTimer { timer } => drop(self.timers.remove(&timer)),
            Command::Finish(status) => assert_eq!(status, self.state.status()),
        }
    }

    /// The state is the fold of the log, and what is outside fits.
    fn check(&self) {
        if self.log.len() < 2_000 {
            assert_eq!(State::fold(&self.log).unwrap(), self.state);
        }
        assert_eq!(self.state.events(), self.log.len() as u64);
        let waits = self.state.waits();
        assert_eq!(waits.len(), self.steps.len() + self.timers.len());
        assert_eq!(
            self.state.status().is_final(),
            matches!(
                self.log.last().unwrap().event,
                Event::Completed { .. } | Event::Faulted { .. } | Event::Cancelled
            )
        );
    }
}

impl Ended {
    /// The names of tasks in the order in which they started.
    pub(super) fn started(&self) -> Vec<&str> {
        let started = self.log.iter().filter_map(|entry| match &entry.event {
            Event::TaskStarted { path, .. } => path.rsplit('/').next(),
            _ => None,
        });
        started.collect()
    }

    /// The names of the events.
    pub(super) fn kinds(&self) -> Vec<String> {
        let kind = |entry: &Entry| {
            let value = serde_json::to_value(entry).unwrap();
            value["kind"].as_str().unwrap().to_owned()
        };
        self.log.iter().map(kind).collect()
    }

    /// The error of an execution that faulted.
    pub(super) fn fault(&self) -> &Problem {
        assert_eq!(self.status, Status::Faulted, "{self:#?}");
        self.error.as_ref().unwrap()
    }

    /// The output of an execution that completed.
    pub(super) fn completed(&self) -> &Value {
        assert_eq!(self.status, Status::Completed, "{:?}", self.error);
        &self.output
    }
}
