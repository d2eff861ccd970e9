//! `taskd topology stats`: the tasks of each stage, and what becomes of the records of each feed.

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};

use super::file::path;
use crate::cli::{
    address::Server,
    ask::{ask, get, printable},
    print::{self, print},
    queues::{Queue, QueuesSnapshot},
};

/// Show the tasks of each stage by status, and what becomes of the records of each feed
#[derive(Args)]
pub(super) struct Stats {
    /// Name of the topology
    topology: String,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

const STAGE: [&str; 8] = [
    "stage",
    "pending",
    "waiting",
    "assigned",
    "delayed",
    "completed",
    "dead",
    "cancelled",
];
const FEED: [&str; 8] = [
    "feed",
    "reads",
    "trees",
    "duplicates",
    "refused",
    "acknowledged",
    "acks pending",
    "held",
];

/// False if there is no such topology.
pub(super) async fn stats(args: &Stats) -> anyhow::Result<bool> {
    let server = args.server.port()?;
    let Some((_, topology)) = ask::<Value>(&server, &path(&args.topology)).await? else {
        return Ok(false);
    };
    let queues = QueuesSnapshot::read(&server, &get(&server, "/v1/queues").await?)?.queues;
    let list = |name: &str| topology[name].as_array().cloned().unwrap_or_default();
    let stages = list("stages");
    let feeds = list("feeds");
    let text = |of: &Value, name: &str| printable(of[name].as_str().unwrap_or_default());
    // A queue without tasks is not in the list.
    let queue = |stage: &Value| {
        let known = queues.iter().find(|known| stage["queue"] == known.queue);
        known.cloned().unwrap_or_default()
    };
    if let Some(error) = topology["error"].as_str().filter(|error| !error.is_empty()) {
        bail!(
            "topology {} is not followed: {}",
            args.topology,
            printable(error)
        );
    }
    if args.json {
        let stages: Vec<Value> = stages
            .iter()
            .map(|stage| of_stage(stage, &queue(stage)))
            .collect();
        print(json!({"name": topology["name"], "stages": stages, "feeds": feeds}))?;
        return Ok(true);
    }
    let mut table = print::table(STAGE);
    for stage in &stages {
        let queue = queue(stage);
        let mut row = vec![text(stage, "name") + queue.mark()];
        let counts = of_stage(stage, &queue);
        row.extend(STAGE[1..].iter().map(|name| counts[*name].to_string()));
        table.add_row(row);
    }
    print::print_table(&table)?;
    if feeds.is_empty() {
        return Ok(true);
    }
    let mut table = print::table(FEED);
    for feed in &feeds {
        let mut row = vec![text(feed, "name"), text(feed, "reads")];
        let counts = [
            "trees",
            "duplicates",
            "refused",
            "acknowledged",
            "acks_pending",
        ];
        row.extend(counts.map(|name| feed[name].to_string()));
        row.push(text(feed, "held"));
        table.add_row(row);
    }
    print("")?;
    print::print_table(&table)?;
    Ok(true)
}

fn of_stage(stage: &Value, queue: &Queue) -> Value {
    let counts = queue.counts;
    json!({
        "stage": stage["name"],
        "pending": counts.pending,
        "waiting": counts.waiting,
        "assigned": counts.assigned,
        "delayed": counts.delayed,
        "completed": counts.completed,
        "dead": counts.dead,
        "cancelled": counts.cancelled,
    })
}
