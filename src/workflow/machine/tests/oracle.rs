//! Random programs do the same on the machine as in a small recursive interpreter.

use proptest::{collection::vec, prelude::*, test_runner::TestCaseError};
use serde_json::Map;

use super::*;
use crate::workflow::program::Documents;

/// A task of a random program.
#[derive(Clone, Debug)]
enum Task {
    Set,
    Export,
    /// Sleeps this many milliseconds.
    Wait(u16),
    /// Dies in attempts before this one.
    Step(u8),
    Raise(u8),
    Do(Vec<Item>),
    For(u8, Option<u8>, Vec<Item>),
    Fork(Vec<Task>),
    Race(Vec<Task>, u8),
    Try {
        list: Vec<Item>,
        catches: Option<u8>,
        retries: Option<u8>,
        handler: Option<Vec<Item>>,
    },
    /// Goes on where the first directive says if the trace has an even length.
    Switch(Then),
    Function(Box<Task>),
}

/// A task of a list.
#[derive(Clone, Debug)]
struct Item {
    /// Skipped if the trace has an odd length.
    only_if_even: bool,
    then: Then,
    task: Task,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Continue,
    Exit,
    End,
    /// So many tasks further.
    Skip(u8),
}

fn then() -> impl Strategy<Value = Then> {
    prop_oneof![
        6 => Just(Then::Continue),
        1 => Just(Then::Exit),
        1 => Just(Then::End),
        2 => (0..3_u8).prop_map(Then::Skip),
    ]
}

fn item(task: impl Strategy<Value = Task>) -> impl Strategy<Value = Item> {
    (prop::bool::weighted(0.2), then(), task).prop_map(|(only_if_even, then, task)| Item {
        only_if_even,
        then,
        task,
    })
}

fn task() -> impl Strategy<Value = Task> {
    let leaf = prop_oneof![
        4 => Just(Task::Set),
        2 => Just(Task::Export),
        1 => (0..50_u16).prop_map(Task::Wait),
        4 => (0..3_u8).prop_map(Task::Step),
        1 => (0..3_u8).prop_map(Task::Raise),
        1 => then().prop_map(Task::Switch),
    ];
    leaf.prop_recursive(4, 40, 4, |inner| {
        let list = || vec(item(inner.clone()), 1..4);
        prop_oneof![
            list().prop_map(Task::Do),
            (0..4_u8, prop::option::of(0..12_u8), list())
                .prop_map(|(rounds, most, list)| Task::For(rounds, most, list)),
            vec(inner.clone(), 1..4).prop_map(Task::Fork),
            (vec(inner.clone(), 1..4), any::<u8>())
                .prop_map(|(branches, winner)| Task::Race(branches, winner)),
            (
                list(),
                prop::option::of(0..3_u8),
                prop::option::of(0..3_u8),
                prop::option::of(list())
            )
                .prop_map(|(list, catches, retries, handler)| Task::Try {
                    list,
                    catches,
                    retries,
                    handler
                }),
            inner
                .clone()
                .prop_map(|task| Task::Function(Box::new(task))),
        ]
    })
}

/// What a task may do, so that its result does not depend on time.
#[derive(Clone, Copy)]
struct May {
    fail: bool,
    take_time: bool,
    end: bool,
    /// Whether it is inside a loop, and sees its item.
    item: bool,
}

/// Writes the definition of a program. Names are unique.
#[derive(Default)]
struct Writer {
    names: u32,
    functions: Map<String, Value>,
}

/// The same program for the interpreter.
#[derive(Clone, Debug)]
struct Node {
    name: String,
    only_if_even: bool,
    then: Next,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Set {
        item: bool,
    },
    Export,
    Pass,
    Step(u8),
    Raise(u8),
    Do(Vec<Node>),
    For(u8, Option<u8>, Vec<Node>),
    Fork(Vec<Node>),
    Race(Box<Node>),
    Try {
        list: Vec<Node>,
        catches: Option<u8>,
        retries: Option<u8>,
        handler: Option<Vec<Node>>,
    },
    Switch(Next),
    Function(Box<Node>),
}

/// Where a list goes on: at the task with this place.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    Task(usize),
    Exit,
    End,
}

impl Writer {
    fn list(&mut self, items: &[Item], may: May) -> (Value, Vec<Node>) {
        let names: Vec<String> = items.iter().map(|_| self.name()).collect();
        let next = |then: Then, place: usize| match then {
            Then::Continue => (json!("continue"), after(place + 1, items.len())),
            Then::Skip(more) => {
                let target = place + 1 + usize::from(more);
                match names.get(target) {
                    Some(name) => (json!(name), Next::Task(target)),
                    None => (json!("exit"), Next::Exit),
                }
            }
            Then::End if may.end => (json!("end"), Next::End),
            Then::Exit | Then::End => (json!("exit"), Next::Exit),
        };
        let mut list = Vec::new();
        let mut nodes = Vec::new();
        for (place, item) in items.iter().enumerate() {
            let (mut task, what) = match item.task {
                Task::Switch(then) => {
                    let (text, goes) = next(then, place);
                    let case = json!({ "when": "(.t | length) % 2 == 0", "then": text });
                    (json!({ "switch": [{ "even": case }] }), What::Switch(goes))
                }
                _ => self.task(&item.task, &names[place], may),
            };
            let (text, then) = next(item.then, place);
            task["then"] = text;
            if item.only_if_even {
                task["if"] = json!("(.t | length) % 2 == 0");
            }
            list.push(json!({ (names[place].as_str()): task }));
            nodes.push(Node {
                name: names[place].clone(),
                only_if_even: item.only_if_even,
                then,
                what,
            });
        }
        (Value::Array(list), nodes)
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("n{}", self.names)
    }

    /// A task alone: a branch or a function.
    fn alone(&mut self, task: &Task, may: May) -> (String, Value, Node) {
        let name = self.name();
        let (text, what) = self.task(task, &name, may);
        let node = Node {
            name: name.clone(),
            only_if_even: false,
            then: Next::Exit,
            what,
        };
        (name, text, node)
    }

    fn task(&mut self, task: &Task, name: &str, may: May) -> (Value, What) {
        let set = if may.item {
            json!({ "set": { "t": format!("${{ .t + [\"{name}:\\($item)\"] }}") } })
        } else {
            json!({ "set": { "t": format!("${{ .t + [\"{name}\"] }}") } })
        };
        let set = (set, What::Set { item: may.item });
        match task {
            Task::Set | Task::Switch(_) => set,
            Task::Step(_) | Task::Wait(_) if !may.take_time => set,
            Task::Raise(_) if !may.fail => set,
            Task::Export => (
                json!({
                    "set": "${ . }",
                    "export": { "as": format!("($context // []) + [\"{name}\"]") },
                }),
                What::Export,
            ),
            Task::Wait(ms) => (json!({ "wait": { "milliseconds": ms } }), What::Pass),
            Task::Step(deaths) => {
                let deaths = if may.fail { *deaths } else { 0 };
                let with = json!({ "t": "${ .t }", "name": name, "deaths": deaths });
                (json!({ "call": "work", "with": with }), What::Step(deaths))
            }
            Task::Raise(kind) => (
                json!({ "raise": { "error": {
                    "type": "https://example.com/raised", "status": 400 + i64::from(*kind), "title": name,
                } } }),
                What::Raise(*kind),
            ),
            Task::Do(items) => {
                let (list, nodes) = self.list(items, may);
                (json!({ "do": list }), What::Do(nodes))
            }
            Task::For(rounds, most, items) => {
                let inner = May { item: true, ..may };
                let (list, nodes) = self.list(items, inner);
                let mut task = json!({ "for": { "in": format!("[range({rounds})]") }, "do": list });
                if let Some(most) = most {
                    task["while"] = json!(format!("(.t | length) < {most} + $index"));
                }
                (task, What::For(*rounds, *most, nodes))
            }
            Task::Fork(branches) => {
                let mut list = Vec::new();
                let mut nodes = Vec::new();
                for (number, branch) in branches.iter().enumerate() {
                    // Of several that fail, time decides.
                    let inner = May {
                        fail: may.fail && number == 0,
                        end: false,
                        ..may
                    };
                    let (name, text, node) = self.alone(branch, inner);
                    list.push(json!({ (name.as_str()): text }));
                    nodes.push(node);
                }
                (
                    json!({
                        "fork": { "branches": list },
                        "output": { "as": "{ t: ([.[].t] | add) }" },
                    }),
                    What::Fork(nodes),
                )
            }
            Task::Race(branches, winner) => {
                let winner = usize::from(*winner) % branches.len();
                let mut list = Vec::new();
                let mut wins = None;
                for (number, branch) in branches.iter().enumerate() {
                    let inner = May {
                        fail: false,
                        take_time: number != winner && may.take_time,
                        end: false,
                        ..may
                    };
                    let (name, text, node) = self.alone(branch, inner);
                    if number == winner {
                        wins = Some(node);
                        list.push(json!({ (name.as_str()): text }));
                    } else {
                        let wait = json!({ "first": { "wait": "PT1S" } });
                        let slow = self.name();
                        list.push(
                            json!({ (slow.as_str()): { "do": [wait, { (name.as_str()): text }] } }),
                        );
                    }
                }
                let fork = json!({ "fork": { "compete": true, "branches": list } });
                (fork, What::Race(Box::new(wins.unwrap())))
            }
            Task::Try {
                list,
                catches,
                retries,
                handler,
            } => self.try_(list, *catches, *retries, handler.as_deref(), may),
            Task::Function(body) => {
                let inner = May { item: false, ..may };
                let (function, text, node) = self.alone(body, inner);
                self.functions.insert(function.clone(), text);
                (
                    json!({ "call": function, "with": { "t": "${ .t }" } }),
                    What::Function(Box::new(node)),
                )
            }
        }
    }

    fn try_(
        &mut self,
        list: &[Item],
        catches: Option<u8>,
        retries: Option<u8>,
        handler: Option<&[Item]>,
        may: May,
    ) -> (Value, What) {
        // What is caught may fail, unless it is caught in part.
        let inner = May {
            fail: may.fail,
            ..may
        };
        let (text, list) = self.list(list, inner);
        let mut catch = Map::new();
        if let Some(kind) = catches {
            catch.insert(
                "errors".to_owned(),
                json!({ "with": { "status": 400 + i64::from(kind) } }),
            );
        }
        if let Some(retries) = retries {
            let retry = json!({
                "delay": { "seconds": 1 }, "backoff": { "linear": {} },
                "limit": { "attempt": { "count": retries } },
            });
            catch.insert("retry".to_owned(), retry);
        }
        let handler = handler.map(|handler| {
            let (text, handler) = self.list(handler, may);
            catch.insert("do".to_owned(), text);
            handler
        });
        let what = What::Try {
            list,
            catches,
            retries,
            handler,
        };
        (json!({ "try": text, "catch": catch }), what)
    }
}

fn after(place: usize, len: usize) -> Next {
    if place < len {
        Next::Task(place)
    } else {
        Next::Exit
    }
}

/// What the interpreter has.
#[derive(Clone, Debug, PartialEq)]
struct World {
    context: Option<Vec<String>>,
    /// How often something began or was skipped.
    tasks: usize,
}

/// An error: its status and title.
type Failed = (i64, String);

impl World {
    /// Runs a list. Returns the trace, and whether the workflow ends.
    fn list(
        &mut self,
        list: &[Node],
        mut trace: Vec<String>,
        item: Option<usize>,
        attempt: u32,
    ) -> Result<(Vec<String>, bool), Failed> {
        let mut place = 0;
        while let Some(node) = list.get(place) {
            self.tasks += 1;
            if node.only_if_even && trace.len() % 2 == 1 {
                place += 1;
                continue;
            }
            let (output, next) = self.task(node, trace, item, attempt)?;
            trace = output;
            match next {
                Next::Task(next) => place = next,
                Next::Exit => break,
                Next::End => return Ok((trace, true)),
            }
        }
        Ok((trace, false))
    }

    fn task(
        &mut self,
        node: &Node,
        mut trace: Vec<String>,
        item: Option<usize>,
        attempt: u32,
    ) -> Result<(Vec<String>, Next), Failed> {
        let name = &node.name;
        let mut ends = false;
        match &node.what {
            What::Set { item: false } => trace.push(name.clone()),
            What::Set { item: true } => trace.push(format!("{name}:{}", item.unwrap())),
            What::Export => {
                let mut context = self.context.clone().unwrap_or_default();
                context.push(name.clone());
                self.context = Some(context);
            }
            What::Pass => {}
            What::Step(deaths) if attempt < u32::from(*deaths) => {
                return Err((500, "Runtime Error".to_owned()));
            }
            What::Step(_) => trace.push(format!("{name}@{attempt}")),
            What::Raise(kind) => return Err((400 + i64::from(*kind), name.clone())),
            What::Do(list) => (trace, ends) = self.list(list, trace, item, attempt)?,
            What::For(rounds, most, list) => {
                for round in 0..usize::from(*rounds) {
                    if most.is_some_and(|most| trace.len() >= usize::from(most) + round) || ends {
                        break;
                    }
                    (trace, ends) = self.list(list, trace, Some(round), attempt)?;
                }
            }
            What::Fork(branches) => {
                let before = self.context.clone();
                let mut traces = Vec::new();
                let mut context = None;
                for branch in branches {
                    let mut world = World {
                        context: before.clone(),
                        tasks: 0,
                    };
                    let (output, _) = world.task(branch, trace.clone(), item, attempt)?;
                    self.tasks += world.tasks + 1;
                    traces.extend(output);
                    if world.context != before {
                        context = world.context;
                    }
                }
                trace = traces;
                if context.is_some() {
                    self.context = context;
                }
            }
            What::Race(winner) => (trace, _) = self.task(winner, trace, item, attempt)?,
            What::Function(body) => {
                self.tasks += 1;
                let next;
                (trace, next) = self.task(body, trace, None, attempt)?;
                ends = next == Next::End;
            }
            What::Try {
                list,
                catches,
                retries,
                handler,
            } => {
                let mut retry = 0;
                loop {
                    match self.list(list, trace.clone(), item, retry) {
                        Ok((output, end)) => {
                            (trace, ends) = (output, end);
                            break;
                        }
                        Err(error)
                            if catches.is_some_and(|kind| error.0 != 400 + i64::from(kind)) =>
                        {
                            return Err(error);
                        }
                        Err(_) if retries.is_some_and(|most| retry < u32::from(most)) => retry += 1,
                        Err(_) => {
                            if let Some(handler) = handler {
                                (trace, ends) = self.list(handler, trace, item, attempt)?;
                            }
                            break;
                        }
                    }
                }
            }
            What::Switch(next) if trace.len().is_multiple_of(2) => return Ok((trace, *next)),
            What::Switch(_) => {}
        }
        let next = if ends { Next::End } else { node.then };
        Ok((trace, next))
    }
}

fn work(step: &Step) -> Answer {
    let input = &step.payload["input"];
    let attempt = u64::from(step.key.attempt);
    if attempt < input["deaths"].as_u64().unwrap() {
        return Answer::dead("too early");
    }
    let mut trace = input["t"].as_array().unwrap().clone();
    trace.push(format!("{}@{attempt}", input["name"].as_str().unwrap()).into());
    // Times differ, so that branches overtake each other.
    let after = 5 + i64::from(step.key.path.bytes().map(u32::from).sum::<u32>() % 37);
    Answer::result(json!({ "t": trace })).after(after)
}

fn compare(items: &[Item]) -> Result<(), TestCaseError> {
    let mut writer = Writer::default();
    let may = May {
        fail: true,
        take_time: true,
        end: true,
        item: false,
    };
    let (list, nodes) = writer.list(items, may);
    let text = json!({
        "document": { "dsl": "1.0.3", "namespace": "random", "name": "random", "version": "1.0.0" },
        "use": { "functions": writer.functions },
        "do": list,
        "output": { "as": "{ t: .t, context: $context }" },
    })
    .to_string();
    let run = |crashes: bool, batch: usize| {
        let mut fake = Fake::new(program(&text, &Documents::new()), work);
        fake.crashes = crashes;
        fake.limits.batch_events = batch;
        fake.run(json!({ "t": [] }))
    };
    let ended = run(false, 1_000);
    let mut world = World {
        context: None,
        tasks: 0,
    };
    match world.list(&nodes, Vec::new(), None, 0) {
        Ok((trace, _)) => {
            prop_assert_eq!(
                ended.status,
                Status::Completed,
                "{:?}\n{}",
                ended.error,
                text
            );
            let expected = json!({ "t": trace, "context": world.context });
            prop_assert_eq!(&ended.output, &expected, "{}", text);
        }
        Err((status, title)) => {
            prop_assert_eq!(
                ended.status,
                Status::Faulted,
                "{:?}\n{}",
                ended.output,
                text
            );
            let error = ended.error.as_ref().unwrap();
            prop_assert_eq!(error.status, status, "{}", text);
            prop_assert_eq!(error.title.as_deref(), Some(title.as_str()), "{}", text);
        }
    }
    let crashed = run(true, 1_000);
    prop_assert_eq!(crashed.log, ended.log, "{}", text);
    // The smallest appends may order branches in another way, but nothing else changes.
    let small = run(true, 1);
    prop_assert_eq!(small.output, ended.output, "{}", text);
    prop_assert_eq!(small.error, ended.error, "{}", text);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_do_as_the_oracle(items in vec(item(task()), 1..6)) {
        compare(&items)?;
    }
}
