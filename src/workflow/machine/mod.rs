//! The machine that steps executions. It is pure: it takes a program, a state and an input, and
//! gives events and commands.
//!
//! Whoever calls it stores the events and carries out the commands in one transaction. The events
//! hold every result and decision, so [`State::fold`] gives the state again without evaluating
//! anything.

mod call;
mod event;
mod io;
mod problem;
mod run;
mod scope;
mod state;
#[cfg(test)]
mod tests;
mod tries;

pub use self::{
    call::{HttpAuthentication, HttpRequest},
    event::{Entry, Event, StepKey, StepStatus, TimerPurpose},
    io::{Command, Input, Limits, Outcome, Step, StepEnd},
    problem::{Problem, ProblemKind},
    run::step,
    state::{BadHistory, State, Status, Wait, WaitOn},
};
pub use super::program::Next;
