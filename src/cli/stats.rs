//! `taskd stats`: the queues of a running taskd, again and again on a terminal.

use std::{
    collections::HashMap,
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use hyper::StatusCode;
use indicatif::HumanCount;
use serde::Deserialize;

use super::{
    http::{HttpPort, HttpServer},
    trust::with_hint,
};
use crate::config::Time;

/// Clears the terminal, and begins at its top left (ECMA-48: ED, CUP).
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Show the queues of a running taskd: a table that lives on a terminal, else JSON
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd stats                     until Ctrl-C, if stdout is a terminal
  taskd stats | jq '.queues[] | {queue, dead}'

pending: in SQL only; queued: can be claimed; assigned: workers hold all that is left;
delayed: nothing is due yet; (paused): no worker gets anything;
done/s: tasks completed a second since the look before.")]
pub struct Stats {
    /// The time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s")]
    every: Time,

    /// One look, also on a terminal
    #[arg(long)]
    once: bool,

    /// Print the answer of the API, one JSON object, also on a terminal
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: HttpServer,
}

#[derive(Deserialize)]
struct Queues {
    queues: Vec<Queue>,
}

#[derive(Deserialize)]
struct Queue {
    queue: String,
    pending: u64,
    queued: u64,
    assigned: u64,
    delayed: u64,
    leases: u64,
    completed: u64,
    dead: u64,
    oldest_waiting_ms: Option<u64>,
    #[serde(default)]
    paused: bool,
}

/// The completed tasks of each queue at the look before.
struct Before {
    at: Instant,
    completed: HashMap<String, u64>,
}

pub(super) async fn run(args: Stats) -> anyhow::Result<()> {
    let server = args.server.port()?;
    let is_terminal = io::stdout().is_terminal();
    if args.json || !is_terminal {
        println!("{}", String::from_utf8_lossy(&look(&server).await?));
        return Ok(());
    }
    let mut before = None;
    loop {
        let body = look(&server).await?;
        let Queues { queues } = serde_json::from_slice(&body).with_context(|| server.is_another())?;
        let clear = if args.once { "" } else { CLEAR };
        // A terminal that went away is no failure.
        if writeln!(io::stdout(), "{clear}{}", table(&queues, before.as_ref())).is_err() || args.once {
            return Ok(());
        }
        let completed = queues.into_iter().map(|queue| (queue.queue, queue.completed)).collect();
        before = Some(Before { at: Instant::now(), completed });
        tokio::time::sleep(args.every.0.max(Duration::from_millis(100))).await;
    }
}

async fn look(server: &HttpPort) -> anyhow::Result<hyper::body::Bytes> {
    let (status, body) = server.get("/v1/queues").await?;
    let said = || with_hint(String::from_utf8_lossy(&body).trim(), status == StatusCode::UNAUTHORIZED);
    ensure!(status.is_success(), "{}/v1/queues answers {status}: {}", server.url, said());
    Ok(body)
}

fn table(queues: &[Queue], before: Option<&Before>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "queue",
        "pending",
        "queued",
        "assigned",
        "delayed",
        "leases",
        "completed",
        "done/s",
        "dead",
        "oldest",
    ]);
    for queue in queues {
        let rate = before.and_then(|before| {
            let more = queue.completed.saturating_sub(*before.completed.get(&queue.queue)?);
            Some(format!("{:.0}", more as f64 / before.at.elapsed().as_secs_f64()))
        });
        let oldest = queue.oldest_waiting_ms.map(|ms| Time(Duration::from_secs(ms / 1000)).to_string());
        let counts = [queue.pending, queue.queued, queue.assigned, queue.delayed, queue.leases, queue.completed];
        let mark = if queue.paused { " (paused)" } else { "" };
        let mut row = vec![format!("{}{mark}", queue.queue)];
        row.extend(counts.map(|count| HumanCount(count).to_string()));
        row.extend([rate.unwrap_or_default(), HumanCount(queue.dead).to_string(), oldest.unwrap_or_default()]);
        table.add_row(row);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_a_row_with_what_it_completed_meanwhile() {
        let answer = br#"{"queues": [{"queue": "q", "pending": 0, "queued": 12345, "assigned": 2, "delayed": 3,
            "leases": 4, "completed": 1000, "dead": 5, "cancelled": 0, "oldest_waiting_ms": 61000}]}"#;
        let Queues { queues } = serde_json::from_slice(answer).unwrap();
        let text = table(&queues, None).to_string();
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["q", "0", "12,345", "2", "3", "4", "1,000", "5", "1m", "1s"]);
        let at = Instant::now() - Duration::from_secs(100);
        let before = Before { at, completed: HashMap::from([("q".to_owned(), 0)]) };
        let text = table(&queues, Some(&before)).to_string();
        assert_eq!(text.lines().nth(1).unwrap().split_whitespace().nth(7), Some("10"));
    }
}
