//! The values of variables in expressions.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    sync::Arc,
};

use serde_json::{Map, Value, json};

use super::{
    problem::{Problem, ProblemKind},
    state::{Frame, Phase, State},
};
use crate::{
    model::to_rfc_3339,
    workflow::{
        definition::Period,
        expression::Bounds,
        program::{Code, Length, Program, Variable},
    },
};

/// What expressions see.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) program: &'a Program,
    pub(super) state: &'a State,
    pub(super) bounds: Bounds,
    /// [`Bounds::work`] that is left.
    pub(super) work: &'a Cell<u64>,
    /// [`Outcome::refused`](super::Outcome::refused).
    pub(super) refused: &'a RefCell<BTreeMap<&'static str, u64>>,
    pub(super) now: i64,
}

/// Where an expression is evaluated, and the values that the state does not have there.
#[derive(Clone, Default)]
pub(super) struct Scope<'p> {
    /// The path of the task.
    pub(super) path: &'p str,
    /// The input of a task that has not started.
    pub(super) raw: Option<Arc<Value>>,
    pub(super) output: Option<Arc<Value>>,
    /// The context that replaces the one of the state.
    pub(super) context: Option<Arc<Value>>,
    /// The item and its number in a round that has not started.
    pub(super) round: Option<(Arc<Value>, u32)>,
}

impl<'p> Scope<'p> {
    pub(super) fn at(path: &'p str) -> Self {
        Self {
            path,
            ..Self::default()
        }
    }
}

impl View<'_> {
    /// Evaluates code. `what` names it in the error.
    pub(super) fn evaluate(
        &self,
        code: &Code,
        what: &str,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<Value, Problem> {
        let look_up = |variable: &Variable| self.look_up(variable, scope);
        let mut bounds = Bounds {
            work: self.work.get(),
            ..self.bounds
        };
        let value = code.evaluate(input, look_up, &mut bounds);
        self.work.set(bounds.work);
        value.map_err(|error| {
            if let Some(bound) = error.bound() {
                *self.refused.borrow_mut().entry(bound).or_default() += 1;
            }
            let detail = format!("{what}: {error}");
            Problem::new(ProblemKind::Expression, scope.path, detail)
        })
    }

    /// Evaluates a condition. As in jq, all values but false and null are true.
    pub(super) fn is_true(
        &self,
        code: &Code,
        what: &str,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<bool, Problem> {
        let value = self.evaluate(code, what, input, scope)?;
        Ok(!matches!(value, Value::Null | Value::Bool(false)))
    }

    /// Evaluates a length of time. Returns milliseconds.
    pub(super) fn length(
        &self,
        length: &Length,
        what: &str,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<u64, Problem> {
        match length {
            Length::Fixed(ms) => Ok(*ms),
            Length::Code(code) => {
                let value = self.evaluate(code, what, input, scope)?;
                Period::read(&value).map_err(|says| {
                    let detail = format!("{what}: {says}");
                    Problem::new(ProblemKind::Expression, scope.path, detail)
                })
            }
        }
    }

    /// Evaluates code that must give an object.
    pub(super) fn fields(
        &self,
        code: &Code,
        what: &str,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<Map<String, Value>, Problem> {
        match self.evaluate(code, what, input, scope)? {
            Value::Object(fields) => Ok(fields),
            Value::Null => Ok(Map::new()),
            _ => Err(wrong(scope, what, "an object")),
        }
    }

    /// Evaluates code that must give a text.
    pub(super) fn text(
        &self,
        code: &Code,
        what: &str,
        input: &Value,
        scope: &Scope<'_>,
    ) -> Result<String, Problem> {
        match self.evaluate(code, what, input, scope)? {
            Value::String(text) => Ok(text),
            _ => Err(wrong(scope, what, "a text")),
        }
    }

    fn look_up(&self, variable: &Variable, scope: &Scope<'_>) -> Arc<Value> {
        let frame = self.state.frames.get(scope.path);
        let input = || match (frame, &scope.raw) {
            (Some(frame), _) => Some(frame.input.value.clone()),
            (None, raw) => raw.clone(),
        };
        let value = match variable {
            Variable::Context => match &scope.context {
                Some(context) => Some(context.clone()),
                None => {
                    let context = self.state.context(scope.path);
                    context.map(|context| context.value.clone())
                }
            },
            Variable::Input => input(),
            Variable::Output => scope.output.clone(),
            Variable::Task => Some(self.task_value(frame, scope).into()),
            Variable::Workflow => Some(self.workflow_value().into()),
            Variable::Runtime => Some(runtime_value().into()),
            Variable::Item(path) => match &scope.round {
                Some((item, _)) if &**path == scope.path => Some(item.clone()),
                _ => self.state.frames.get(path).and_then(item),
            },
            Variable::Index(path) => match &scope.round {
                Some((_, index)) if &**path == scope.path => Some(Arc::new((*index).into())),
                _ => {
                    let frame = self.state.frames.get(path);
                    frame.map(|frame| Arc::new(frame.index.into()))
                }
            },
            Variable::Caught(path) => self.state.frames.get(path).and_then(caught),
        };
        value.unwrap_or_default()
    }

    fn task_value(&self, frame: Option<&Frame>, scope: &Scope<'_>) -> Value {
        let Some(task) = self.program.task(scope.path) else {
            return Value::Null;
        };
        let raw = frame.map(|frame| &frame.raw.value).or(scope.raw.as_ref());
        let mut value = json!({
            "name": task.name,
            "reference": scope.path,
            "definition": *task.definition,
            "input": raw.map(|raw| &**raw),
            "startedAt": time_value(frame.map_or(self.now, |frame| frame.started_at)),
        });
        if let Some(output) = &scope.output {
            value["output"] = (**output).clone();
        }
        value
    }

    fn workflow_value(&self) -> Value {
        json!({
            "id": self.state.execution,
            "definition": *self.program.source,
            "input": *self.state.input.value,
            "startedAt": time_value(self.state.started_at),
        })
    }
}

fn wrong(scope: &Scope<'_>, what: &str, expected: &str) -> Problem {
    let detail = format!("{what}: the expression must give {expected}");
    Problem::new(ProblemKind::Expression, scope.path, detail)
}

fn item(frame: &Frame) -> Option<Arc<Value>> {
    let index = usize::try_from(frame.index).ok()?;
    let item = frame.items.as_ref()?.value.get(index)?;
    Some(Arc::new(item.clone()))
}

fn caught(frame: &Frame) -> Option<Arc<Value>> {
    let error = match (&frame.caught, &frame.phase) {
        (Some(error), _) | (None, Phase::Failed(error)) => error,
        _ => return None,
    };
    Some(error.to_value().into())
}

fn runtime_value() -> Value {
    json!({ "name": "taskd", "version": env!("CARGO_PKG_VERSION"), "metadata": {} })
}

fn time_value(unix_ms: i64) -> Value {
    json!({
        "iso8601": to_rfc_3339(unix_ms),
        "epoch": { "seconds": unix_ms.div_euclid(1000), "milliseconds": unix_ms },
    })
}
