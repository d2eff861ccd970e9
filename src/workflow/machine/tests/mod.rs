//! The machine on a store in memory.

mod crashes;
mod data;
mod fake;
mod flow;
mod limits;
mod oracle;
mod steps;
mod times;
mod tries;

use serde_json::{Value, json};

use self::fake::{Answer, Ended, Fake, program};
use super::{Entry, Problem, Status, Step, StepEnd};
use crate::workflow::{self, expression::Bounds};

/// The text of a definition with these tasks.
fn definition(rest: &str) -> String {
    let document = "{ dsl: '1.0.3', namespace: test, name: test, version: '1.0.0' }";
    format!("document: {document}\n{rest}")
}

/// Runs a definition whose steps give back the input that they get.
fn run(rest: &str, input: Value) -> Ended {
    run_with(rest, input, |step| {
        Answer::result(step.payload["input"].clone())
    })
}

fn run_with(rest: &str, input: Value, workers: impl FnMut(&Step) -> Answer + 'static) -> Ended {
    fake(rest, workers).run(input)
}

fn fake(rest: &str, workers: impl FnMut(&Step) -> Answer + 'static) -> Fake {
    Fake::new(program(&definition(rest), &Default::default()), workers)
}

/// The last segment of an error's type.
fn kind(problem: &Problem) -> &str {
    problem.type_.rsplit('/').next().unwrap()
}

/// A worker that answers after a time that is in its input.
fn slow(step: &Step) -> Answer {
    let input = &step.payload["input"];
    let answer = match input["dies"].as_str() {
        Some(reason) => Answer::dead(reason),
        None => Answer::result(input["gives"].clone()),
    };
    answer.after(input["after"].as_i64().unwrap_or(10))
}
