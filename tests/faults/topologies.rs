//! Trees of a topology with a loop, a fork and a join, which are begun all the time, and the workers of
//! its stages. They count outside of taskd: each stage has one task for each page of each site, each join
//! has exactly what its stages sent, and the end of each tree comes once, with its counts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use reqwest::Method;
use serde_json::{Value, json};

use crate::{crowd::Crowd, dice::Dice};

pub(crate) const QUEUES: [&str; 6] = [
    "web.fetch",
    "web.parse",
    "web.index",
    "web.shot",
    "web.page",
    ENDS,
];
/// It gets a task at the end of each tree.
const ENDS: &str = "webends";
pub(crate) const WORKERS: usize = 2;
const FILE: &str = r#"
name = "web"
then = "webends"

[stage.fetch]
start = true
from = "parse.link"
loop = true

[stage.parse]
from = "fetch"
ports = ["page", "link"]

[stage.index]
from = "parse.page"

[stage.shot]
from = "parse.page"

[stage.page]
join = "parse"
from = ["index", "shot"]
"#;

/// The pages of a site. Each links to the next one and to the first, which is known already.
const PAGES: u64 = 3;
/// How long the starter waits between two sites.
const PAUSE: Duration = Duration::from_millis(400);
/// How long calls without an answer are repeated at the end.
const AT_THE_END: Duration = Duration::from_secs(60);

/// What was begun, and what came to the workers.
#[derive(Default)]
pub(crate) struct Topologies {
    /// The trees of the sites whose inserts were answered.
    trees: BTreeMap<u64, String>,
    /// The ids of the tasks that came to workers, by queue and what they are of: a page, or a tree.
    tasks: BTreeMap<(String, String), BTreeSet<String>>,
    /// The payloads of the ends, by tree.
    ends: BTreeMap<String, Value>,
    /// What was wrong with a task that came.
    wrong: Vec<String>,
}

/// No picture can be taken of the second page of some sites.
fn is_dead(site: u64, page: u64) -> bool {
    site % 4 == 1 && page == 1
}

fn page_of(task: &Value) -> (u64, u64) {
    let payload = match task["queue"].as_str() {
        Some("web.page") => &task["payload"]["fork"]["payload"],
        _ => &task["payload"],
    };
    let number = |name: &str| payload[name].as_u64().unwrap();
    (number("site"), number("page"))
}

fn key(site: u64, page: u64) -> String {
    format!("{site}/{page}")
}

/// What a worker sends out for a task.
fn outputs(task: &Value) -> Value {
    let page = &task["payload"];
    match task["queue"].as_str().unwrap() {
        "web.parse" => {
            let (site, number) = page_of(task);
            let next = (number + 1) % PAGES;
            let link = |to: u64| {
                let payload = json!({"site": site, "page": to});
                json!({"port": "link", "key": key(site, to), "payload": payload})
            };
            json!([{"port": "page", "payload": page}, link(next), link(0)])
        }
        "web.page" | ENDS => json!([]),
        _ => json!([{"port": "out", "payload": page}]),
    }
}

/// Begins sites until inserting ends. Then repeats what has no answer.
pub(crate) async fn begin(crowd: Arc<Crowd>) {
    let mut dice = Dice::new(crowd.seed, "surfer");
    let mut is_applied = false;
    let mut next = 0;
    let mut again: Vec<u64> = Vec::new();
    while !crowd.inserting.is_cancelled() {
        if is_applied {
            again.push(next);
            next += 1;
            again = insert(&crowd, &mut dice, &again).await;
        } else {
            let file = json!({"text": FILE});
            let path = "/v1/topologies/web";
            let answer = crowd.send(&mut dice, Method::PUT, path, &file).await;
            is_applied = answer.is_some();
        }
        tokio::time::sleep(PAUSE).await;
    }
    let deadline = Instant::now() + AT_THE_END;
    while !again.is_empty() {
        assert!(
            Instant::now() < deadline,
            "nobody answers inserts of the sites {again:?}"
        );
        again = insert(&crowd, &mut dice, &again).await;
    }
}

/// Inserts the first pages of sites. Returns the sites to be inserted again.
async fn insert(crowd: &Crowd, dice: &mut Dice, sites: &[u64]) -> Vec<u64> {
    // The tree is named, since a process may not know the topology in the first second.
    let task = |site: &u64| {
        let payload = json!({"site": site, "page": 0});
        json!({"queue": "web.fetch", "key": key(*site, 0), "payload": payload, "tree": {"then": ENDS}})
    };
    let tasks: Vec<Value> = sites.iter().map(task).collect();
    let Some(answer) = crowd.call(dice, "/v1/tasks", &json!(tasks)).await else {
        return sites.to_vec();
    };
    let mut again = Vec::new();
    for (site, result) in sites.iter().zip(answer["results"].as_array().unwrap()) {
        match result["tree"].as_str() {
            Some(tree) => {
                let mut book = crowd.ledger.book();
                book.topologies.trees.insert(*site, tree.to_owned());
            }
            None => again.push(*site),
        }
    }
    again
}

/// A worker of all stages, which forgets a task now and then.
pub(crate) async fn work(crowd: Arc<Crowd>, number: usize) {
    let name = format!("t{number}");
    let mut dice = Dice::new(crowd.seed, &name);
    while !crowd.stop.is_cancelled() {
        let body = json!({"worker": name, "queues": QUEUES, "max_tasks": 20, "wait": "200ms"});
        let Some(answer) = crowd.call(&mut dice, "/v1/tasks:get", &body).await else {
            continue;
        };
        let (mut completions, mut rejections) = (Vec::new(), Vec::new());
        for task in answer["tasks"].as_array().unwrap() {
            let is_dead = crowd.ledger.book().topologies.came(task);
            if !crowd.is_honest() && dice.chance(3) {
                continue;
            }
            let mut report = json!({"id": task["id"], "lease_token": task["lease_token"]});
            if is_dead {
                report["reason"] = json!("no picture of this page");
                report["retry"] = json!(false);
                rejections.push(report);
            } else {
                report["discovered"] = outputs(task);
                completions.push(report);
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

impl Topologies {
    /// Notes that a worker has got a task. Returns whether it fails for good.
    fn came(&mut self, task: &Value) -> bool {
        let id = task["id"].as_str().unwrap().to_owned();
        let queue = task["queue"].as_str().unwrap().to_owned();
        if queue == ENDS {
            let tree = task["payload"]["tree"].as_str().unwrap().to_owned();
            self.ends.insert(tree.clone(), task["payload"].clone());
            self.tasks.entry((queue, tree)).or_default().insert(id);
            return false;
        }
        let (site, page) = page_of(task);
        let is_dead = is_dead(site, page);
        if queue == "web.page" {
            let sent = json!({"site": site, "page": page});
            let part =
                |stage: &str| json!({"stage": stage, "port": "out", "key": "", "payload": sent});
            let (parts, missing) = match is_dead {
                true => (json!([part("index")]), json!(["shot"])),
                false => (json!([part("index"), part("shot")]), json!([])),
            };
            let payload = &task["payload"];
            if (&payload["parts"], &payload["missing"]) != (&parts, &missing) {
                self.wrong.push(format!("a join has {payload}"));
            }
        }
        let fails = is_dead && queue == "web.shot";
        let of = (queue, key(site, page));
        self.tasks.entry(of).or_default().insert(id);
        fails
    }

    /// Checks the tasks that SQL has, by queue, and the states of its trees.
    pub(crate) fn check(
        &self,
        in_sql: &BTreeMap<String, BTreeSet<String>>,
        states: &BTreeMap<String, i64>,
    ) -> Vec<String> {
        const DONE: i64 = 1;
        const FAILED: i64 = 2;
        let mut wrong = self.wrong.clone();
        let none = BTreeSet::new();
        for queue in QUEUES {
            let came = self.tasks.iter().filter(|((of, _), _)| of == queue);
            let came: BTreeSet<String> = came.flat_map(|(_, ids)| ids.clone()).collect();
            let stored = in_sql.get(queue).unwrap_or(&none);
            if *stored != came {
                let difference: Vec<&String> = stored.symmetric_difference(&came).collect();
                wrong.push(format!("{queue}: SQL and workers disagree: {difference:?}"));
            }
        }
        let begun: BTreeSet<&String> = self.trees.values().collect();
        let known: BTreeSet<&String> = states.keys().collect();
        if begun != known {
            let difference: Vec<_> = begun.symmetric_difference(&known).collect();
            wrong.push(format!(
                "trees that SQL and the surfer do not share: {difference:?}"
            ));
        }
        let count = |queue: &str, of: &str| {
            let ids = self.tasks.get(&(queue.to_owned(), of.to_owned()));
            ids.map_or(0, BTreeSet::len)
        };
        for (site, tree) in &self.trees {
            for page in 0..PAGES {
                let of = key(*site, page);
                let counts = [
                    "web.fetch",
                    "web.parse",
                    "web.index",
                    "web.shot",
                    "web.page",
                ]
                .map(|queue| count(queue, &of));
                if counts != [1; 5] {
                    wrong.push(format!("page {of} had {counts:?} tasks"));
                }
            }
            let dead = (0..PAGES).filter(|page| is_dead(*site, *page)).count() as u64;
            let (state, name) = match dead {
                0 => (DONE, "DONE"),
                _ => (FAILED, "FAILED"),
            };
            let end = self.ends.get(tree).unwrap_or(&Value::Null);
            let told = [
                &end["state"],
                &end["epoch"],
                &end["tasks"],
                &end["completed"],
                &end["dead"],
            ];
            let all = PAGES * 5;
            let expected = [
                json!(name),
                json!(0),
                json!(all),
                json!(all - dead),
                json!(dead),
            ];
            let expected = expected.each_ref();
            let ends = count(ENDS, tree);
            if (states.get(tree), ends, told) != (Some(&state), 1, expected) {
                let state = states.get(tree);
                wrong.push(format!(
                    "tree {tree} has state {state:?} and {ends} ends: {end}"
                ));
            }
        }
        if self.trees.is_empty() {
            wrong.push("no tree was begun".to_owned());
        }
        wrong
    }

    pub(crate) fn summary(&self) -> String {
        let tasks: usize = self.tasks.values().map(BTreeSet::len).sum();
        format!("{} trees with {tasks} tasks", self.trees.len())
    }
}
