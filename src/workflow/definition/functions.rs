//! Functions in the places of their calls: none in itself, and not too many.

use std::collections::BTreeMap;

use super::{Definition, Place, Task, TaskKind};

/// How deep tasks may be in each other, with functions in the places of their calls.
pub const MOST_TASK_LEVELS: usize = 64;
/// The most tasks of a definition, with functions in the places of their calls.
pub const MOST_TASKS: usize = 10_000;

/// How large a function is once the functions that it calls are in it.
#[derive(Clone, Copy, Default)]
struct Size {
    tasks: usize,
    levels: usize,
}

enum Visit {
    Open,
    Done(Size),
}

/// Walks through the tasks, and through functions as often as it must.
struct Walk<'d> {
    functions: &'d BTreeMap<String, Task>,
    visits: BTreeMap<&'d str, Visit>,
    /// How deep the walk is, in tasks.
    levels: usize,
    mistakes: Vec<(Place, String)>,
}

/// Finds functions that call themselves, and definitions that are too large with their functions.
pub(super) fn check(definition: &Definition) -> Vec<(Place, String)> {
    let mut walk = Walk {
        functions: &definition.use_.functions,
        visits: BTreeMap::new(),
        levels: 0,
        mistakes: Vec::new(),
    };
    for name in definition.use_.functions.keys() {
        walk.function(name);
    }
    let size = walk.list(&definition.do_);
    if walk.mistakes.is_empty() {
        let place = Place {
            pointer: "/do".to_owned(),
            line: 1,
            column: 1,
        };
        let place = definition
            .do_
            .first()
            .map_or(place, |task| task.place.clone());
        let place = || place.clone();
        if size.tasks > MOST_TASKS {
            let tasks = size.tasks;
            let says = format!(
                "with functions in the places of their calls there are {tasks} tasks; at most {MOST_TASKS}"
            );
            walk.mistakes.push((place(), says));
        }
        if size.levels > MOST_TASK_LEVELS {
            walk.mistakes.push((place(), too_deep()));
        }
    }
    walk.mistakes
}

impl<'d> Walk<'d> {
    /// The size of a function. `None` while it is being walked through: it calls itself.
    fn function(&mut self, name: &'d str) -> Option<Size> {
        match self.visits.get(name) {
            Some(Visit::Open) => return None,
            Some(Visit::Done(size)) => return Some(*size),
            None => {}
        }
        let Some(task) = self.functions.get(name) else {
            return Some(Size::default());
        };
        self.visits.insert(name, Visit::Open);
        let size = self.task(task);
        self.visits.insert(name, Visit::Done(size));
        Some(size)
    }

    fn list(&mut self, tasks: impl IntoIterator<Item = &'d Task>) -> Size {
        let mut sum = Size::default();
        for task in tasks {
            let size = self.task(task);
            sum.tasks = sum.tasks.saturating_add(size.tasks);
            sum.levels = sum.levels.max(size.levels);
        }
        sum
    }

    fn task(&mut self, task: &'d Task) -> Size {
        if self.levels == MOST_TASK_LEVELS {
            self.mistakes.push((task.place.clone(), too_deep()));
            return Size::default();
        }
        self.levels += 1;
        let inner = self.inside(task);
        self.levels -= 1;
        Size {
            tasks: inner.tasks.saturating_add(1),
            levels: inner.levels.saturating_add(1),
        }
    }

    /// The size of what is inside of a task.
    fn inside(&mut self, task: &'d Task) -> Size {
        match &task.kind {
            TaskKind::CallFunction(call) => match self.function(&call.function) {
                Some(size) => size,
                None => {
                    let says = format!("function {:?} calls itself", call.function);
                    self.mistakes.push((task.place.clone(), says));
                    Size::default()
                }
            },
            _ => self.list(task.inner()),
        }
    }
}

fn too_deep() -> String {
    format!(
        "with functions in the places of their calls tasks are more than {MOST_TASK_LEVELS} deep in each other"
    )
}
