//! A publisher of records, with three subscriptions, and of tasks in sequences, and the workers of
//! their queues. They count outside of taskd: each record that was answered STORED has one task in
//! each subscription that it is for, unless its loss is counted, and those of a key come in order.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    crowd::{Crowd, rfc3339_ms},
    dice::Dice,
    ledger::{Book, Sent, now_ms},
    world::Bus,
};

/// The queues of the subscriptions of topic `news`, and that of the tasks in sequences.
pub(crate) const QUEUES: [&str; 4] = ["heard", "chosen", "ordered", LINED];
const LINED: &str = "lined";
pub(crate) const WORKERS: usize = 4;
/// The settings of the topic, the subscriptions and the queues.
pub(crate) const CONFIG: &str = r#"
[topics.news]
partitions = 3
[subscriptions.heard]
topic = "news"
[subscriptions.chosen]
topic = "news"
match = { parity = "odd" }
[subscriptions.ordered]
topic = "news"
sequence = "key"
"#;
/// How many keys of records and sequences of tasks there are. Each does some tasks a second.
const GROUPS: u64 = 24;
/// How long the publisher waits between two calls.
const PAUSE: Duration = Duration::from_millis(100);
/// How long calls without an answer are repeated at the end.
const AT_THE_END: Duration = Duration::from_secs(60);

/// What was sent, and what came to the workers.
#[derive(Default)]
pub(crate) struct Records {
    /// By number, which is the payload.
    items: BTreeMap<u64, Item>,
    /// Counts what was sent and answered.
    moment: u64,
    /// The ids of the tasks that came to workers, by queue and number.
    tasks: BTreeMap<(String, u64), BTreeSet<String>>,
    /// By queue and group: the losses of Redis, and the latest moment of sending of what came.
    latest: HashMap<(String, String), (usize, u64)>,
}

/// A record or a task that was sent.
struct Item {
    kind: Kind,
    /// When it was sent for the first time.
    sent: u64,
    /// When it was first answered that it is stored.
    answered: Option<u64>,
    /// How often Redis had lost data before the call that was answered.
    life: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Record,
    /// It has an id, so it is sent until it is answered.
    Named,
    Task,
}

impl Kind {
    fn of(number: u64) -> Self {
        match number % 8 {
            1 | 4 => Self::Task,
            2 | 7 => Self::Named,
            _ => Self::Record,
        }
    }
}

/// The key of a record, or the sequence of a task.
fn group(number: u64) -> Option<String> {
    let is_free = Kind::of(number) != Kind::Task && number.is_multiple_of(5);
    (!is_free).then(|| format!("g{}", number / 3 % GROUPS))
}

fn is_odd(number: u64) -> bool {
    number % 2 == 1
}

fn is_for(number: u64, queue: &str) -> bool {
    match Kind::of(number) {
        Kind::Task => queue == LINED,
        Kind::Record | Kind::Named => match queue {
            "chosen" => is_odd(number),
            _ => queue != LINED,
        },
    }
}

fn record(number: u64) -> Value {
    let parity = if is_odd(number) { "odd" } else { "even" };
    let mut record = json!({"value": number, "attributes": {"parity": parity}});
    if let Some(key) = group(number) {
        record["key"] = json!(key);
    }
    if Kind::of(number) == Kind::Named {
        record["id"] = json!(format!("id-{number}"));
    }
    record
}

fn task(number: u64) -> Value {
    json!({"queue": LINED, "key": format!("l{number}"), "payload": number, "sequence": group(number)})
}

/// Publishes and inserts until inserting ends. Then repeats what has no answer.
pub(crate) async fn publish(crowd: Arc<Crowd>) {
    let mut dice = Dice::new(crowd.seed, "publisher");
    let mut next = 0;
    let mut again: Vec<u64> = Vec::new();
    while !crowd.inserting.is_cancelled() {
        let mut numbers = std::mem::take(&mut again);
        for _ in 0..1 + dice.below(12) {
            numbers.push(next);
            next += 1;
        }
        again = send(&crowd, &mut dice, &numbers).await;
        tokio::time::sleep(PAUSE).await;
    }
    let deadline = Instant::now() + AT_THE_END;
    while !again.is_empty() {
        assert!(Instant::now() < deadline, "nobody answers {again:?}");
        again = send(&crowd, &mut dice, &again).await;
    }
}

/// Sends records and tasks. Returns those to be sent again.
async fn send(crowd: &Crowd, dice: &mut Dice, numbers: &[u64]) -> Vec<u64> {
    let (tasks, records): (Vec<u64>, Vec<u64>) = numbers
        .iter()
        .partition(|number| Kind::of(**number) == Kind::Task);
    let mut again = Vec::new();
    for (path, numbers) in [("/v1/topics/news/records", records), ("/v1/tasks", tasks)] {
        if numbers.is_empty() {
            continue;
        }
        let body: Vec<Value> = numbers
            .iter()
            .map(|number| match Kind::of(*number) {
                Kind::Task => task(*number),
                Kind::Record | Kind::Named => record(*number),
            })
            .collect();
        let life = crowd.ledger.book().sends(&numbers);
        let answer = crowd.call(dice, path, &json!(body)).await;
        let mut book = crowd.ledger.book();
        for (place, number) in numbers.iter().enumerate() {
            let status = match &answer {
                Some(answer) => answer["results"][place]["status"].as_str(),
                None => None,
            };
            match status {
                Some("STORED" | "CREATED" | "DUPLICATE") => book.is_stored(*number, life),
                // Without an id it may have been stored, and sending it again would double it.
                None | Some("TRY_LATER") if Kind::of(*number) == Kind::Record => {}
                None | Some("TRY_LATER") => again.push(*number),
                Some(status) => book
                    .violations
                    .push(format!("{path} answered {status} to number {number}")),
            }
        }
    }
    again
}

/// A worker that completes what it gets, and now and then forgets it.
pub(crate) async fn work(crowd: Arc<Crowd>, number: usize) {
    let name = format!("r{number}");
    let mut dice = Dice::new(crowd.seed, &name);
    while !crowd.stop.is_cancelled() {
        let most = 1 + dice.below(10);
        let body = json!({"worker": name, "queues": QUEUES, "max_tasks": most, "wait": "200ms"});
        let sent = crowd.ledger.sending();
        let Some(answer) = crowd.call(&mut dice, "/v1/tasks:get", &body).await else {
            continue;
        };
        let tasks = answer["tasks"].as_array().unwrap();
        for task in tasks {
            crowd.ledger.book().came(task, sent);
        }
        let forgets = !crowd.is_honest() && dice.chance(3);
        if tasks.is_empty() || forgets {
            continue;
        }
        let completions: Vec<Value> = tasks
            .iter()
            .map(|task| json!({"id": task["id"], "lease_token": task["lease_token"]}))
            .collect();
        let body = json!({"worker": name, "completions": completions});
        for _ in 0..3 {
            let answer = crowd.call(&mut dice, "/v1/tasks:complete", &body).await;
            let is_final = answer.is_some_and(|answer| {
                let results = answer["results"].as_array().unwrap();
                results.iter().all(|one| one["status"] != "TRY_LATER")
            });
            if is_final {
                break;
            }
        }
    }
}

impl Book {
    /// Notes that numbers are sent. Returns how often Redis has lost data.
    fn sends(&mut self, numbers: &[u64]) -> usize {
        let records = &mut self.records;
        for number in numbers {
            records.moment += 1;
            let sent = records.moment;
            records.items.entry(*number).or_insert(Item {
                kind: Kind::of(*number),
                sent,
                answered: None,
                life: 0,
            });
        }
        self.losses
    }

    fn is_stored(&mut self, number: u64, life: usize) {
        let records = &mut self.records;
        records.moment += 1;
        let answered = records.moment;
        let item = records.items.get_mut(&number).unwrap();
        item.answered.get_or_insert(answered);
        item.life = life;
    }

    /// Notes that a worker has got a task, and checks whether it may.
    fn came(&mut self, task: &Value, sent: Sent) {
        let queue = task["queue"].as_str().unwrap().to_owned();
        let id = task["id"].as_str().unwrap().to_owned();
        let number = task["payload"].as_u64().unwrap();
        let what = format!("number {number} in {queue}, {id},");
        let expires_ms = rfc3339_ms(task["lease_expires_at"].as_str().unwrap());
        // If the lease expired before it arrived, nothing can be concluded.
        let is_current = self.losses == sent.life && expires_ms > now_ms();
        let records = &mut self.records;
        let Some(item) = records.items.get(&number) else {
            self.violations.push(format!("{what} was sent by nobody"));
            return;
        };
        if !is_for(number, &queue) {
            self.violations.push(format!("{what} is not for it"));
        }
        let ids = records.tasks.entry((queue.clone(), number)).or_default();
        ids.insert(id);
        if ids.len() > 1 {
            self.violations.push(format!("{what} has tasks {ids:?}"));
        }
        let has_order = queue == "ordered" || queue == LINED;
        let Some(group) = group(number).filter(|_| has_order && is_current) else {
            return;
        };
        let latest = records.latest.entry((queue, group)).or_default();
        if latest.0 != self.losses {
            *latest = (self.losses, 0);
        }
        if item.answered.is_some_and(|answered| answered < latest.1) {
            self.violations
                .push(format!("{what} came after one that was sent later"));
        }
        latest.1 = latest.1.max(item.sent);
    }
}

impl Records {
    /// Checks the tasks that SQL has, by queue, and what taskd says of the subscriptions.
    pub(crate) fn check(
        &self,
        in_sql: &BTreeMap<String, BTreeSet<String>>,
        subscriptions: &Value,
        bus: Bus,
        losses: usize,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let none = BTreeSet::new();
        for queue in QUEUES {
            let mut came = BTreeSet::new();
            for ((of, _), ids) in &self.tasks {
                if of == queue {
                    came.extend(ids.iter().cloned());
                }
            }
            let stored = in_sql.get(queue).unwrap_or(&none);
            if *stored != came {
                let difference: Vec<&String> = stored.symmetric_difference(&came).collect();
                wrong.push(format!("{queue}: SQL and workers disagree: {difference:?}"));
            }
            let mut missing = Vec::new();
            for (number, item) in &self.items {
                // The records of a Redis leave with it.
                let is_there = item.kind == Kind::Task || bus == Bus::Kafka || item.life == losses;
                let must_be = item.answered.is_some() && is_there && is_for(*number, queue);
                if must_be && !self.tasks.contains_key(&(queue.to_owned(), *number)) {
                    missing.push(*number);
                }
            }
            let mut skipped = 0;
            if queue != LINED {
                let all = subscriptions["subscriptions"].as_array().unwrap();
                let one = all.iter().find(|one| one["name"] == queue).unwrap();
                let count = |field: &str| one[field].as_u64().unwrap();
                skipped = count("skipped");
                let became = count("tasks") + count("duplicates") + count("filtered");
                if count("read") != became || count("tasks") != stored.len() as u64 {
                    wrong.push(format!("SQL has {} tasks, and {one}", stored.len()));
                }
            }
            if missing.len() as u64 > skipped {
                wrong.push(format!("{queue} lacks {missing:?}, {skipped} were skipped"));
            }
        }
        if self.tasks.is_empty() {
            wrong.push("no record came to anybody".to_owned());
        }
        wrong
    }

    pub(crate) fn summary(&self) -> String {
        let count = |kind: Kind| self.items.values().filter(|item| item.kind == kind).count();
        format!(
            "{} records and {} tasks in sequences sent, {} tasks of them",
            count(Kind::Record) + count(Kind::Named),
            count(Kind::Task),
            self.tasks.len()
        )
    }
}
