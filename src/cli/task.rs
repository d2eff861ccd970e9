//! `taskd task`: shows one task with its payload and everything that happened to it.

use std::{collections::BTreeMap, time::Duration};

use clap::Args;
use serde::Deserialize;
use serde_json::Value;
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{ask, cut, printable},
    named::{Name, Named},
    print::{self, print, say},
};
use crate::{config::Time, wire::time::from_rfc_3339};

/// The most characters of a payload or a reason in the table.
const SHOWN: usize = 1000;
/// The most characters of a result.
const SHOWN_OF_RESULT: usize = 200;

/// Show a task: its payload, its attempts, its results, and what operators did to it
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd task 0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44    the task with this id
  taskd task crawl https://example.org/              the task with this queue and key
  taskd task crawl https://example.org/ --json | jq .history

Exit code: 0 if there is such a task, 1 if there is none, 2 if the server cannot be reached or the \
question is wrong.")]
pub struct Task {
    #[command(flatten)]
    task: Named,

    /// Print the answer of the API, one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Asks taskd and prints its answer. Returns false if there is no such task.
pub async fn run(args: Task) -> anyhow::Result<bool> {
    let server = args.server.port()?;
    let id = match args.task.task("task")? {
        // The id has been parsed, so it is safe in the path.
        Name::Id(id) => id.to_string(),
        Name::Queue(_) => return Ok(false),
        Name::Key { queue, key } => {
            let query = form_urlencoded::Serializer::new(String::new())
                .append_pair("queue", &queue)
                .append_pair("key", &key)
                .finish();
            match ask::<Explained>(&server, &format!("/v1/tasks:explain?{query}")).await? {
                Some((_, explained)) => explained.task.id,
                None => return Ok(false),
            }
        }
    };
    let Some((body, answer)) = ask::<Answer>(&server, &format!("/v1/tasks/{id}")).await? else {
        return Ok(false);
    };
    if args.json {
        print(String::from_utf8_lossy(&body))?;
        return Ok(true);
    }
    let results = match answer.results {
        0 => Ok(None),
        _ => ask::<Results>(&server, &format!("/v1/tasks/{id}/results")).await,
    };
    // The results may be larger than the command accepts. Then show the task without them.
    let results = results.unwrap_or_else(|error| {
        say(format_args!(
            "taskd: the results cannot be shown: {}",
            printable(&format!("{error:#}"))
        ));
        None
    });
    print(answer.text(&results.map_or_else(Vec::new, |(_, found)| found.results)))?;
    Ok(true)
}

#[derive(Deserialize)]
struct Results {
    results: Vec<TaskResult>,
}

#[derive(Deserialize)]
struct TaskResult {
    worker: String,
    completed_at: String,
    result: Option<Value>,
    result_base64: Option<String>,
}

#[derive(Deserialize)]
struct Explained {
    task: WithId,
}

#[derive(Deserialize)]
struct WithId {
    id: String,
}

#[derive(Deserialize)]
struct Answer {
    id: String,
    queue: String,
    key: Option<String>,
    key_base64: Option<String>,
    status: String,
    replicas: u32,
    completed: u32,
    priority: String,
    created_at: String,
    updated_at: String,
    not_before: Option<String>,
    deadline: Option<String>,
    sequence: Option<String>,
    tree: Option<String>,
    #[serde(default)]
    reason: String,
    payload: Option<Value>,
    payload_base64: Option<String>,
    headers: BTreeMap<String, String>,
    traceparent: String,
    history: Vec<Attempt>,
    acts: Vec<Act>,
    results: u32,
}

#[derive(Deserialize)]
struct Attempt {
    worker: String,
    state: String,
    from: Option<String>,
    until: Option<String>,
    lease_expires_at: Option<String>,
    attempt: Option<u32>,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    surplus: bool,
}

#[derive(Deserialize)]
struct Act {
    at: String,
    who: String,
    what: String,
}

impl Answer {
    fn text(&self, results: &[TaskResult]) -> String {
        let mut parts = vec![self.facts()];
        if !self.history.is_empty() {
            parts.push(self.attempts());
        }
        if !results.is_empty() {
            let rows = results.iter().map(|one| {
                let result =
                    content(one.result.as_ref(), one.result_base64.as_ref()).unwrap_or_default();
                [
                    one.worker.clone(),
                    one.completed_at.clone(),
                    cut(&result, SHOWN_OF_RESULT),
                ]
            });
            parts.push(table(["WORKER", "COMPLETED", "RESULT"], rows));
        }
        if !self.acts.is_empty() {
            let rows = self
                .acts
                .iter()
                .map(|act| [act.at.clone(), act.who.clone(), act.what.clone()]);
            parts.push(table(["AT", "WHO", "ACT"], rows));
        }
        parts.join("\n\n")
    }

    fn facts(&self) -> String {
        let key = self
            .key
            .clone()
            .unwrap_or_else(|| format!("{} (base64)", self.key_base64.as_deref().unwrap_or("")));
        let completed = format!(
            "{} of {}; {} results are stored",
            self.completed, self.replicas, self.results
        );
        let mut facts: Vec<(String, String)> = [
            ("id", self.id.clone()),
            ("queue", self.queue.clone()),
            ("key", key),
            ("status", self.status.clone()),
            ("completed", completed),
            ("priority", self.priority.clone()),
            ("created", self.created_at.clone()),
            ("updated", self.updated_at.clone()),
            ("traceparent", self.traceparent.clone()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        facts.extend(
            self.not_before
                .iter()
                .map(|at| ("not before".to_owned(), at.clone())),
        );
        facts.extend(
            self.deadline
                .iter()
                .map(|at| ("deadline".to_owned(), at.clone())),
        );
        facts.extend(
            self.sequence
                .iter()
                .map(|name| ("sequence".to_owned(), name.clone())),
        );
        facts.extend(
            self.tree
                .iter()
                .map(|tree| ("tree".to_owned(), tree.clone())),
        );
        if !self.reason.is_empty() {
            facts.push(("reason".into(), self.reason.clone()));
        }
        facts.extend(
            self.headers
                .iter()
                .map(|(name, value)| (format!("header {name}"), value.clone())),
        );
        let payload = content(self.payload.as_ref(), self.payload_base64.as_ref());
        facts.extend(payload.map(|payload| ("payload".to_owned(), payload)));
        let width = facts
            .iter()
            .map(|(name, _)| name.chars().count())
            .max()
            .unwrap_or(0);
        let line = |(name, value): &(String, String)| {
            format!("{:width$}  {}", printable(name), shortened(value))
        };
        facts.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    fn attempts(&self) -> String {
        let rows = self.history.iter().map(|one| {
            let state = if one.surplus {
                format!("{} (surplus)", one.state)
            } else {
                one.state.clone()
            };
            let ends = one
                .lease_expires_at
                .as_ref()
                .map(|at| format!("lease until {at}"));
            [
                one.attempt
                    .map(|number| number.to_string())
                    .unwrap_or_default(),
                state,
                one.worker.clone(),
                one.from.clone().unwrap_or_default(),
                one.until.clone().or(ends).unwrap_or_default(),
                one.took().unwrap_or_default(),
                one.reason.clone(),
            ]
        });
        table(
            [
                "ATTEMPT", "STATE", "WORKER", "FROM", "UNTIL", "TOOK", "REASON",
            ],
            rows,
        )
    }
}

impl Attempt {
    fn took(&self) -> Option<String> {
        let from = from_rfc_3339(self.from.as_ref()?)?;
        let until = from_rfc_3339(self.until.as_ref()?)?;
        Some(Time(Duration::from_millis(until.abs_diff(from))).to_string())
    }
}

/// Formats a payload or a result.
fn content(value: Option<&Value>, base64: Option<&String>) -> Option<String> {
    match (value, base64) {
        (Some(Value::String(text)), _) => Some(text.clone()),
        (Some(json), _) => Some(json.to_string()),
        (None, Some(base64)) => Some(format!("{base64} (base64)")),
        (None, None) => None,
    }
}

fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut table = print::table(head);
    for row in rows {
        table.add_row(row.map(|cell| shortened(&cell)));
    }
    table.to_string()
}

/// Shortens a text and escapes it for a terminal.
fn shortened(text: &str) -> String {
    let mut shown = printable(&text.chars().take(SHOWN).collect::<String>());
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_shown_with_its_attempts_and_acts() {
        let answer = r#"{
            "id": "i", "queue": "q", "key": "k\u001b[31m", "status": "ASSIGNED", "replicas": 2, "completed": 1,
            "leased": 1, "attempts": 1, "priority": "medium", "created_at": "2030-01-31T12:00:00Z",
            "updated_at": "2030-01-31T12:00:00Z", "payload": {"a": 1}, "payload_encoding": "json",
            "headers": {"h": "v"}, "traceparent": "t", "results": 1,
            "history": [
                {"worker": "v", "state": "REJECTED", "from": "2030-01-31T12:00:00Z", "until": "2030-01-31T12:00:01.5Z",
                 "attempt": 1, "reason": "no\nluck"},
                {"worker": "w", "state": "COMPLETED", "until": "2030-01-31T12:00:03Z", "surplus": true},
                {"worker": "u", "state": "LEASED", "lease_expires_at": "2030-01-31T12:01:00Z"}],
            "acts": [{"id": "a", "at": "2030-01-31T12:00:02Z", "who": "ann", "what": "retry dead letter"}]}"#;
        let results = r#"{"results": [
            {"worker": "w", "attempt": 2, "completed_at": "2030-01-31T12:00:03Z", "surplus": true,
             "result": {"b": "\u001b"}},
            {"worker": "x", "attempt": 1, "completed_at": "2030-01-31T12:00:04Z", "surplus": false,
             "result_base64": "/w=="}]}"#;
        let Results { results } = serde_json::from_str(results).unwrap();
        let text = serde_json::from_str::<Answer>(answer)
            .unwrap()
            .text(&results);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = text.lines().map(words).collect();
        for line in [
            "key k\\u{1b}[31m",
            "completed 1 of 2; 1 results are stored",
            "payload {\"a\":1}",
            "header h v",
            "1 REJECTED v 2030-01-31T12:00:00Z 2030-01-31T12:00:01.5Z 1s 500ms no\\nluck",
            "COMPLETED (surplus) w 2030-01-31T12:00:03Z",
            "LEASED u lease until 2030-01-31T12:01:00Z",
            "w 2030-01-31T12:00:03Z {\"b\":\"\\u001b\"}",
            "x 2030-01-31T12:00:04Z /w== (base64)",
            "2030-01-31T12:00:02Z ann retry dead letter",
        ] {
            assert!(
                lines.iter().any(|one| one == line),
                "{line} is not in\n{text}"
            );
        }
        assert!(!text.contains('\x1b'));
        assert_eq!(shortened(&"x".repeat(1001)).chars().count(), 1001);
    }
}
