//! Executions of a workflow, which are started all the time, and the workers of their steps. They
//! count outside of taskd: each start that was answered is one execution that completes, and each of
//! its steps is one task.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use reqwest::Method;
use serde_json::{Value, json};

use crate::{crowd::Crowd, dice::Dice};

pub(crate) const QUEUES: [&str; 2] = ["pay", "ship"];
pub(crate) const WORKERS: usize = 2;
/// The first task to pay of some executions fails for good, and the language tries again.
fn workflow() -> Value {
    json!({
        "document": {"dsl": "1.0.3", "namespace": "faults", "name": "order", "version": "1.0.0"},
        "do": [
            {"charge": {
                "try": [{"pay": {"call": "pay", "with": {"n": "${ .n }"}}}],
                "catch": {
                    "errors": {"with": {"status": 503}},
                    "retry": {"delay": {"milliseconds": 300}},
                },
            }},
            {"cool": {"wait": {"milliseconds": 500}}},
            {"both": {"fork": {"branches": [
                {"one": {"call": "ship", "with": {"n": "${ .n }"}}},
                {"two": {"set": {"n": 1}}},
            ]}}},
        ],
    })
}

const START: &str = "/v1/workflows/faults/order/1.0.0:start";
/// How long the starter waits between two starts.
const PAUSE: Duration = Duration::from_millis(150);
/// How long calls without an answer are repeated at the end.
const AT_THE_END: Duration = Duration::from_secs(60);

/// What was started, and what came to the workers.
#[derive(Default)]
pub(crate) struct Executions {
    /// The numbers of the starts that were answered.
    started: BTreeSet<u64>,
    /// The ids of the tasks that came to workers, by the number of the execution and the queue.
    tasks: BTreeMap<(u64, String), BTreeSet<String>>,
    /// The task that fails, by the number of the execution.
    fails: BTreeMap<u64, String>,
}

fn does_fail(number: u64) -> bool {
    number % 3 == 1
}

/// Starts executions until inserting ends. Then repeats what has no answer.
pub(crate) async fn start(crowd: Arc<Crowd>) {
    let mut dice = Dice::new(crowd.seed, "starter");
    let mut is_deployed = false;
    let mut next = 0;
    let mut again: Vec<u64> = Vec::new();
    while !crowd.inserting.is_cancelled() {
        if is_deployed {
            again.push(next);
            next += 1;
            again = send(&crowd, &mut dice, &again).await;
        } else {
            let answer = crowd
                .send(&mut dice, Method::PUT, "/v1/workflows", &workflow())
                .await;
            is_deployed = answer.is_some();
        }
        tokio::time::sleep(PAUSE).await;
    }
    let deadline = Instant::now() + AT_THE_END;
    while !again.is_empty() {
        assert!(Instant::now() < deadline, "nobody answers starts {again:?}");
        again = send(&crowd, &mut dice, &again).await;
    }
}

/// Starts executions. Returns those to be started again.
async fn send(crowd: &Crowd, dice: &mut Dice, numbers: &[u64]) -> Vec<u64> {
    let mut again = Vec::new();
    for number in numbers {
        let start = json!({"id": format!("order-{number}"), "input": {"n": number}});
        match crowd.call(dice, START, &start).await {
            Some(_) => drop(crowd.ledger.book().executions.started.insert(*number)),
            None => again.push(*number),
        }
    }
    again
}

/// A worker that completes what it gets, and now and then forgets it.
pub(crate) async fn work(crowd: Arc<Crowd>, number: usize) {
    let name = format!("e{number}");
    let mut dice = Dice::new(crowd.seed, &name);
    while !crowd.stop.is_cancelled() {
        let body = json!({"worker": name, "queues": QUEUES, "max_tasks": 5, "wait": "200ms"});
        let Some(answer) = crowd.call(&mut dice, "/v1/tasks:get", &body).await else {
            continue;
        };
        let (mut completions, mut rejections) = (Vec::new(), Vec::new());
        for task in answer["tasks"].as_array().unwrap() {
            let mut report = json!({"id": task["id"], "lease_token": task["lease_token"]});
            let fails = crowd.ledger.book().executions.came(task);
            if !crowd.is_honest() && dice.chance(3) {
                continue;
            }
            let problem = json!({"type": "https://example.org/busy", "status": 503});
            let (field, value) = match fails {
                true => ("reason", json!(problem.to_string())),
                false => ("result", task["payload"]["input"].clone()),
            };
            report[field] = value;
            match fails {
                true => {
                    report["retry"] = json!(false);
                    rejections.push(report);
                }
                false => completions.push(report),
            }
        }
        for (path, field, reports) in [
            ("/v1/tasks:complete", "completions", completions),
            ("/v1/tasks:reject", "rejections", rejections),
        ] {
            if !reports.is_empty() {
                let body = json!({"worker": name, field: reports});
                crowd.call(&mut dice, path, &body).await;
            }
        }
    }
}

impl Executions {
    /// Notes that a worker has got a task. Returns whether it fails.
    fn came(&mut self, task: &Value) -> bool {
        let id = task["id"].as_str().unwrap().to_owned();
        let queue = task["queue"].as_str().unwrap().to_owned();
        let number = task["payload"]["input"]["n"].as_u64().unwrap();
        let is_first = queue == "pay"
            && does_fail(number)
            && *self.fails.entry(number).or_insert_with(|| id.clone()) == id;
        self.tasks.entry((number, queue)).or_default().insert(id);
        is_first
    }

    /// Checks the tasks that SQL has, by queue, and how the executions ended, by given id.
    pub(crate) fn check(
        &self,
        in_sql: &BTreeMap<String, BTreeSet<String>>,
        ended: &BTreeMap<String, i64>,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let none = BTreeSet::new();
        for queue in QUEUES {
            let came = self.tasks.iter().filter(|((_, of), _)| of == queue);
            let came: BTreeSet<String> = came.flat_map(|(_, ids)| ids.clone()).collect();
            let stored = in_sql.get(queue).unwrap_or(&none);
            if *stored != came {
                let difference: Vec<&String> = stored.symmetric_difference(&came).collect();
                wrong.push(format!("{queue}: SQL and workers disagree: {difference:?}"));
            }
        }
        let names = self.started.iter().map(|number| format!("order-{number}"));
        let started: BTreeSet<String> = names.collect();
        let known: BTreeSet<String> = ended.keys().cloned().collect();
        if started != known {
            let difference: Vec<&String> = started.symmetric_difference(&known).collect();
            wrong.push(format!(
                "executions that SQL and the starter do not share: {difference:?}"
            ));
        }
        const COMPLETED: i64 = 3;
        for (id, status) in ended.iter().filter(|(_, status)| **status != COMPLETED) {
            wrong.push(format!("execution {id} ended with status {status}"));
        }
        for number in &self.started {
            let tasks = QUEUES.map(|queue| self.tasks.get(&(*number, queue.to_owned())));
            let tasks = tasks.map(|ids| ids.map_or(0, BTreeSet::len));
            if tasks != [1 + usize::from(does_fail(*number)), 1] {
                wrong.push(format!("execution {number} had {tasks:?} tasks"));
            }
        }
        if self.started.is_empty() {
            wrong.push("no execution was started".to_owned());
        }
        wrong
    }

    pub(crate) fn summary(&self) -> String {
        let tasks: usize = self.tasks.values().map(BTreeSet::len).sum();
        format!("{} executions with {tasks} steps", self.started.len())
    }
}
