//! `taskd dump`: shows the decoded state of a queue in Redis.

use anyhow::bail;
use clap::{Args, value_parser};
use hyper::body::Bytes;
use serde::Deserialize;
use serde_json::Value;
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{get, printable, read},
    http::HttpPort,
    named::TheQueue,
    print::{NotThere, print},
};
use crate::model::to_rfc_3339;

/// How many entries of each key to show by default, and at most.
const ENTRIES: u32 = 100;
const MOST_ENTRIES: i64 = 1000;

/// Show what Redis holds of a queue: counters, lanes, records, leases
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd dump crawl                       all shards, at most 100 entries of each key
  taskd dump crawl --shard 3 --limit 10
  taskd dump crawl --json | jq '.shards[].holds.counters'

Exit code: 0, 1 if the queue has no open shard, 2 if the server cannot be reached or the question is wrong.")]
pub struct Dump {
    #[command(flatten)]
    queue: TheQueue,

    /// Only this shard
    #[arg(long, value_name = "N")]
    shard: Option<u32>,

    /// Most entries of each key, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = ENTRIES, value_parser = value_parser!(u32).range(1..=MOST_ENTRIES))]
    limit: u32,

    /// Print the answer of the API, one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Deserialize)]
struct Answer {
    shards: Vec<Shard>,
}

#[derive(Deserialize)]
struct Shard {
    shard: u32,
    holds: Value,
}

pub(super) async fn run(args: Dump) -> anyhow::Result<()> {
    let server = args.server.port()?;
    let mut query = form_urlencoded::Serializer::new(String::new());
    query
        .append_pair("queue", args.queue.name())
        .append_pair("limit", &args.limit.to_string());
    if let Some(shard) = args.shard {
        query.append_pair("shard", &shard.to_string());
    }
    let (body, answer) = look(&server, &query.finish()).await?;
    if answer.shards.is_empty() {
        // The error names the open shards, and one entry of each is enough for that.
        let mut query = form_urlencoded::Serializer::new(String::new());
        query
            .append_pair("queue", args.queue.name())
            .append_pair("limit", "1");
        let open = if args.shard.is_some() {
            look(&server, &query.finish()).await?.1.shards
        } else {
            Vec::new()
        };
        bail!(NotThere(absent(args.queue.name(), args.shard, &open)));
    }
    let text = if args.json {
        String::from_utf8_lossy(&body).into_owned()
    } else {
        text(args.queue.name(), &answer)
    };
    Ok(print(text)?)
}

async fn look(server: &HttpPort, query: &str) -> anyhow::Result<(Bytes, Answer)> {
    let body = get(server, &format!("/v1/dump?{query}")).await?;
    let answer = read(server, &body)?;
    Ok((body, answer))
}

/// Says why there is nothing to show. `open` are the open shards of the queue.
fn absent(queue: &str, shard: Option<u32>, open: &[Shard]) -> String {
    let has: Vec<_> = open.iter().map(|shard| shard.shard.to_string()).collect();
    match shard.filter(|_| !has.is_empty()) {
        Some(shard) => format!(
            "queue {queue} has no open shard {shard}; it has {}",
            has.join(", ")
        ),
        None => format!("queue {queue} has no open shard; taskd stats lists the queues"),
    }
}

/// Formats each entry as a line. Nested entries are indented.
fn text(queue: &str, answer: &Answer) -> String {
    let mut lines = Vec::new();
    for Shard { shard, holds } in &answer.shards {
        match holds.as_object() {
            None => lines.push(format!("shard {queue}:{shard} has no generation in Redis")),
            Some(fields) => {
                lines.push(format!("shard {queue}:{shard}"));
                fields
                    .iter()
                    .for_each(|(name, value)| show(name, value, 1, &mut lines));
            }
        }
    }
    lines.join("\n")
}

fn show(name: &str, value: &Value, depth: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(depth);
    let Value::Array(entries) = value else {
        lines.push(format!("{indent}{name}: {}", inline(&at(name, value))));
        return;
    };
    lines.push(format!("{indent}{name}"));
    for entry in entries {
        lines.push(format!("{indent}  {}", inline(entry)));
        // The lists of a lane follow on their own lines.
        let fields = entry
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, _)| is_of_lane(name));
        fields.for_each(|(name, list)| show(name, list, depth + 2, lines));
    }
}

/// Formats an entry as one line, without the elements and pointers of a lane.
fn inline(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let shown = fields
                .iter()
                .filter(|(name, value)| !(value.is_array() && is_of_lane(name)));
            let field =
                |(name, value): (&String, &Value)| format!("{name}={}", inline(&at(name, value)));
            shown.map(field).collect::<Vec<_>>().join(" ")
        }
        Value::Array(entries) => format!(
            "[{}]",
            entries.iter().map(inline).collect::<Vec<_>>().join(", ")
        ),
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}

fn is_of_lane(name: &str) -> bool {
    matches!(name, "elements" | "pointers")
}

/// Formats a field whose name ends in `_ms` as a time. Returns others as they are.
fn at(name: &str, value: &Value) -> Value {
    match value.as_i64().filter(|_| name.ends_with("_ms")) {
        Some(ms) => to_rfc_3339(ms).into(),
        None => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_shown_line_by_line() {
        let answer = r#"{"shards": [{"shard": 0, "holds": {"counters": {"live": "1"},
            "lanes": [{"lane": "m", "length": 1, "elements": [{"id": "61", "spent": false}]}],
            "leases": [{"id": "61", "grant": "7", "at_ms": 0}], "offset": "g/1-0",
            "records": [{"id": "61", "held": [{"worker": "w", "grant": "7"}]}]}}, {"shard": 1, "holds": null}]}"#;
        let expected = "shard q:0\n  counters: live=1\n  lanes\n    lane=m length=1\n      elements\n        \
                        id=61 spent=false\n  leases\n    at_ms=1970-01-01T00:00:00Z grant=7 id=61\n  offset: g/1-0\n  \
                        records\n    held=[grant=7 worker=w] id=61\nshard q:1 has no generation in Redis";
        let shown = text("q", &serde_json::from_str(answer).unwrap());
        assert_eq!(
            shown
                .replace(".000Z", "Z")
                .replace("length=1 lane=m", "lane=m length=1"),
            expected
        );
        assert_eq!(
            absent("q", None, &[]),
            "queue q has no open shard; taskd stats lists the queues"
        );
        assert_eq!(absent("q", Some(7), &[]), absent("q", None, &[]));
        let open = [0, 2].map(|shard| Shard {
            shard,
            holds: Value::Null,
        });
        assert_eq!(
            absent("q", Some(7), &open),
            "queue q has no open shard 7; it has 0, 2"
        );
    }
}
