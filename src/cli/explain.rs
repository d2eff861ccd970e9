//! `taskd explain`: says where a task is, what happens to it next, and why a worker does not get
//! it; or what became of a record of a topic.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::Deserialize;
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{ask, printable},
    named::{Name, Named},
    print::print,
};
use crate::{config::Time, wire::time::from_rfc_3339};

/// Say where a task is, what happens to it next, and why a worker does not get it
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd explain 0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44    the task with this id
  taskd explain crawl https://example.org/ --worker w7  the task with this queue and key
  taskd explain crawl https://example.org/ --json | jq .place
  taskd explain --record orders/0/1764000000123-0       what became of a record of a topic

Exit code: 0 if there is such a task, 1 if there is none, 2 if the server cannot be reached or the \
question is wrong.")]
pub struct Explain {
    /// Name of the queue; or the id of a task, without a key
    #[arg(value_name = "QUEUE|ID", required_unless_present_any = ["queue_flag", "record"])]
    first: Option<String>,

    /// Key of the task
    #[arg(value_name = "KEY")]
    key: Option<String>,

    #[arg(id = "queue_flag", long = "queue", value_name = "NAME", hide = true)]
    queue: Option<String>,

    #[arg(id = "key_flag", long = "key", value_name = "KEY", hide = true)]
    key_of_flag: Option<String>,

    /// A record of a topic, in place of a task
    #[arg(
        long,
        value_name = "TOPIC/PARTITION/OFFSET",
        conflicts_with_all = ["first", "key", "queue_flag", "key_flag", "worker"]
    )]
    record: Option<String>,

    /// Also say whether this worker may get it, and why not
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,

    /// Print the answer of the API, one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Asks taskd and prints its answer. Returns false if there is no such task.
pub async fn run(args: Explain) -> anyhow::Result<bool> {
    if let Some(record) = &args.record {
        return explain_record(&args, record).await;
    }
    let named = Named::new(args.first, args.key, args.queue, args.key_of_flag);
    let path = path(&named.task("explain")?, args.worker.as_deref());
    let Some((body, answer)) = ask::<Answer>(&args.server.port()?, &path).await? else {
        return Ok(false);
    };
    match args.json {
        true => print(String::from_utf8_lossy(&body))?,
        false => answer
            .lines()
            .iter()
            .try_for_each(|line| print(printable(line)))?,
    }
    Ok(true)
}

/// Asks what became of a record, and prints a line for each subscription.
async fn explain_record(args: &Explain, record: &str) -> anyhow::Result<bool> {
    let parts: Vec<&str> = record.split('/').collect();
    let [topic, partition, offset] = parts[..] else {
        bail!(
            "{record:?} is no record: write TOPIC/PARTITION/OFFSET, for example orders/0/1764000000123-0"
        );
    };
    let topic: String = form_urlencoded::byte_serialize(topic.as_bytes()).collect();
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("partition", partition);
    query.append_pair("offset", offset);
    let path = format!("/v1/topics/{topic}/records:explain?{}", query.finish());
    let server = args.server.port()?;
    let Some((body, answer)) = ask::<RecordAnswer>(&server, &path).await? else {
        return Ok(false);
    };
    if args.json {
        print(String::from_utf8_lossy(&body))?;
        return Ok(true);
    }
    for line in answer.lines() {
        print(printable(&line))?;
    }
    Ok(true)
}

#[derive(Deserialize)]
struct RecordAnswer {
    published_at: Option<String>,
    subscriptions: Vec<RecordOfSubscription>,
}

#[derive(Deserialize)]
struct RecordOfSubscription {
    subscription: String,
    queue: String,
    fate: String,
    task: Option<String>,
    status: Option<String>,
    letter: Option<String>,
    says: String,
}

impl RecordAnswer {
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![match &self.published_at {
            Some(at) => format!("Published: {at}."),
            None => "The topic does not have the record any more.".to_owned(),
        }];
        for of in &self.subscriptions {
            let RecordOfSubscription {
                subscription,
                queue,
                fate,
                says,
                ..
            } = of;
            let task = of.task.iter().zip(&of.status);
            let task = task.map(|(id, status)| format!(" {id} of queue {queue} is {status}"));
            let letter = of.letter.iter().map(|id| format!(", dead letter {id}"));
            let more: String = task.chain(letter).collect();
            lines.push(format!(
                "Subscription {subscription}: {fate}{more}: {says}."
            ));
        }
        if self.subscriptions.is_empty() {
            lines.push("No subscription reads this topic.".to_owned());
        }
        lines
    }
}

fn path(task: &Name, worker: Option<&str>) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    match task {
        Name::Id(id) => query.append_pair("id", &id.to_string()),
        Name::Key { queue, key } => query.append_pair("queue", queue).append_pair("key", key),
        Name::Queue(queue) => query.append_pair("queue", queue),
    };
    if let Some(worker) = worker {
        query.append_pair("worker", worker);
    }
    format!("/v1/tasks:explain?{}", query.finish())
}

#[derive(Deserialize)]
struct Answer {
    task: Task,
    says: String,
    since: Option<String>,
    next: String,
    next_at: Option<String>,
    leases: Vec<Lease>,
    completed_by: Vec<String>,
    failures: Vec<Failure>,
    notes: Vec<String>,
    worker: Option<Worker>,
    now: String,
}

#[derive(Deserialize)]
struct Task {
    id: String,
    queue: String,
    key: String,
    status: String,
    replicas: u32,
}

#[derive(Deserialize)]
struct Lease {
    worker: String,
    lease_expires_at: Option<String>,
    delivered: bool,
}

#[derive(Deserialize)]
struct Failure {
    at: String,
    worker: String,
    reason: String,
}

#[derive(Deserialize)]
struct Worker {
    worker: String,
    may_get: bool,
    says: String,
    until: Option<String>,
}

impl Answer {
    fn lines(&self) -> Vec<String> {
        let Task {
            id,
            queue,
            key,
            status,
            replicas,
        } = &self.task;
        let mut lines = vec![format!(
            "Task {id} (queue {queue}, key {key}) is {status}: {}.",
            self.says
        )];
        if let Some(since) = &self.since {
            lines.push(format!("Since: {}.", self.at(since)));
        }
        let at = self
            .next_at
            .as_ref()
            .map(|at| format!(": {}", self.at(at)))
            .unwrap_or_default();
        lines.push(format!("Next: {}{at}.", self.next));
        lines.extend(self.notes.iter().map(|note| format!("Note: {note}.")));
        for Lease {
            worker,
            lease_expires_at,
            delivered,
        } in &self.leases
        {
            let until = lease_expires_at
                .as_ref()
                .map(|at| format!(" until {}", self.at(at)))
                .unwrap_or_default();
            let arrived = if *delivered {
                ""
            } else {
                "; taskd does not know yet that it has arrived"
            };
            lines.push(format!("Lease: worker {worker}{until}{arrived}."));
        }
        if !self.completed_by.is_empty() {
            let count = self.completed_by.len();
            let names = self.completed_by.join(", ");
            lines.push(format!("Completed by: {names} ({count} of {replicas})."));
        }
        for Failure { at, worker, reason } in &self.failures {
            lines.push(format!(
                "Failed: worker {worker}, {}: {reason:?}.",
                self.at(at)
            ));
        }
        if let Some(Worker {
            worker,
            may_get,
            says,
            until,
        }) = &self.worker
        {
            let may = if *may_get {
                "may get it"
            } else {
                "does not get it"
            };
            let until = until
                .as_ref()
                .map(|at| format!(", until {}", self.at(at)))
                .unwrap_or_default();
            lines.push(format!("Worker {worker} {may}: {says}{until}."));
        }
        lines
    }

    /// Formats a time with its distance from the time of the answer: `… (in 30s)`.
    fn at(&self, time: &str) -> String {
        let (Some(at), Some(now)) = (from_rfc_3339(time), from_rfc_3339(&self.now)) else {
            return time.to_owned();
        };
        let away = Duration::from_secs(at.abs_diff(now) / 1000);
        let away = Time(away);
        if at > now {
            format!("{time} (in {away})")
        } else {
            format!("{time} ({away} ago)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{
        "task": {"id": "i", "queue": "q", "key": "k\u001b[31m", "status": "ASSIGNED", "replicas": 2},
        "place": "LEASED", "says": "worker v holds it",
        "next": "its lease expires", "next_at": "2030-01-31T12:00:30Z",
        "leases": [{"worker": "v", "lease_expires_at": "2030-01-31T12:00:30Z", "delivered": true}],
        "completed_by": ["u"], "failures": [{"at": "2030-01-31T11:58:00Z", "worker": "w", "reason": "no \"luck\""}],
        "notes": ["one"],
        "worker": {"worker": "u", "may_get": false, "reason": "COMPLETED_IT", "says": "u has completed it"},
        "now": "2030-01-31T12:00:00Z"}"#;

    #[test]
    fn an_answer_is_told_in_sentences() {
        let answer: Answer = serde_json::from_str(ANSWER).unwrap();
        let lines: Vec<_> = answer.lines().iter().map(|line| printable(line)).collect();
        let expected = [
            "Task i (queue q, key k\\u{1b}[31m) is ASSIGNED: worker v holds it.",
            "Next: its lease expires: 2030-01-31T12:00:30Z (in 30s).",
            "Note: one.",
            "Lease: worker v until 2030-01-31T12:00:30Z (in 30s).",
            "Completed by: u (1 of 2).",
            "Failed: worker w, 2030-01-31T11:58:00Z (2m ago): \"no \\\"luck\\\"\".",
            "Worker u does not get it: u has completed it.",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_fates_of_a_record_are_told_in_sentences() {
        let answer: RecordAnswer = serde_json::from_str(
            r#"{"topic": "t", "published_at": "2030-01-31T12:00:00Z", "subscriptions": [
                {"subscription": "a", "queue": "q", "fate": "TASK", "task": "i", "status": "QUEUED", "says": "it waits"},
                {"subscription": "b", "queue": "q", "fate": "REFUSED", "letter": "l", "says": "too large"}]}"#,
        )
        .unwrap();
        let expected = [
            "Published: 2030-01-31T12:00:00Z.",
            "Subscription a: TASK i of queue q is QUEUED: it waits.",
            "Subscription b: REFUSED, dead letter l: too large.",
        ];
        assert_eq!(answer.lines(), expected);
    }

    #[test]
    fn a_key_is_part_of_a_url() {
        let task = Name::Key {
            queue: "q".into(),
            key: "a&b c".into(),
        };
        assert_eq!(
            path(&task, Some("w/1")),
            "/v1/tasks:explain?queue=q&key=a%26b+c&worker=w%2F1"
        );
    }
}
