//! `taskd stats`: shows the queues of a running taskd, on a terminal until Ctrl-C.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use anyhow::bail;
use clap::Args;
use comfy_table::{CellAlignment, ColumnConstraint, Table};
use indicatif::HumanCount;
use serde_json::Value;

use terminal_size::{Height, Width, terminal_size};

use super::{
    address::Server,
    ask::{self, cut, get, printable},
    http::HttpPort,
    named::AnyQueue,
    print::{self, CLEAR, NotThere, print},
    queues::{Counts, QueuesSnapshot},
};
use crate::config::Time;

/// The size to assume if the terminal does not report one.
const USUAL: (Width, Height) = (Width(80), Height(24));
/// The columns to hide on a narrow terminal, in this order: assigned, completed, pending.
const LEFT_OUT: [usize; 3] = [3, 6, 1];

/// Show the queues of a running taskd: a table that lives on a terminal, else JSON
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd stats                     until Ctrl-C, if stdout is a terminal
  taskd stats | jq '.queues[] | {queue, dead}'
  taskd top                       the same on a whole screen, sorted, with the latencies of calls

pending: in SQL only; waiting: can be claimed; assigned: workers hold all that is left; \
delayed: nothing is due yet; (paused): no worker gets anything; (unread): Redis cannot read a shard, whose tasks \
count as pending; in/s, compl./s: tasks inserted and completed a \
second since the look before. A narrow terminal leaves out assigned, completed and pending.")]
pub struct Stats {
    #[command(flatten)]
    queue: AnyQueue,

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
    server: Server,
}

pub(super) async fn run(args: Stats) -> anyhow::Result<()> {
    let server = args.server.port()?;
    let name = args.queue.name();
    if args.json || !io::stdout().is_terminal() {
        let body = get(&server, "/v1/queues").await?;
        match name {
            None => print(String::from_utf8_lossy(&body))?,
            Some(name) => print(only(&server, &body, name)?)?,
        }
        return Ok(());
    }
    let look = async || -> anyhow::Result<QueuesSnapshot> {
        let mut look = QueuesSnapshot::read(&server, &get(&server, "/v1/queues").await?)?;
        look.keep(name);
        Ok(look)
    };
    let mut before = look().await?;
    if let (Some(name), true) = (name, before.queues.is_empty()) {
        bail!(NotThere(closed(name)));
    }
    if args.once {
        print::print_table(&table(&before, None, size().0))?;
        return Ok(());
    }
    let mut text = print::shown(&table(&before, None, size().0));
    let mut trouble = None;
    loop {
        let (width, height) = size();
        let lines = screen(&text, trouble.as_deref(), width, height);
        // A terminal that was closed is not an error.
        if writeln!(io::stdout(), "{CLEAR}{}", lines.join("\n")).is_err() {
            return Ok(());
        }
        tokio::time::sleep(args.every.0.max(Duration::from_millis(100))).await;
        // Keep asking after an error, because taskd may only be restarting.
        let look = look().await;
        trouble = look
            .as_ref()
            .err()
            .map(|error| printable(&format!("{error:#}")));
        if let Ok(look) = look {
            text = print::shown(&table(&look, Some(&before), size().0));
            before = look;
        }
    }
}

/// Reduces the answer of the API to one queue. Fails if the queue is not in it.
fn only(server: &HttpPort, body: &[u8], name: &str) -> anyhow::Result<Value> {
    let mut answer: Value = ask::read(server, body)?;
    let queues = answer["queues"].as_array_mut();
    let queues = queues.map(|queues| {
        queues.retain(|queue| queue["queue"] == name);
        queues.len()
    });
    if queues.unwrap_or_default() == 0 {
        bail!(NotThere(closed(name)));
    }
    Ok(answer)
}

fn closed(name: &str) -> String {
    format!("queue {name} is not open: it has no unfinished task; taskd stats lists the open ones")
}

fn size() -> (usize, usize) {
    let (Width(width), Height(height)) = terminal_size().unwrap_or(USUAL);
    (width.max(1).into(), height.max(2).into())
}

/// Returns the lines that fit on the terminal: the error of the last request, if there was one, and
/// the table below it. The terminal's last line stays empty.
fn screen(table: &str, trouble: Option<&str>, width: usize, height: usize) -> Vec<String> {
    let rows = height
        .saturating_sub(1 + usize::from(trouble.is_some()))
        .max(1);
    let lines: Vec<&str> = table.lines().collect();
    let mut shown: Vec<String> = trouble.map(str::to_owned).into_iter().collect();
    if lines.len() <= rows {
        shown.extend(lines.iter().map(|line| (*line).to_owned()));
    } else {
        let fit = rows - 1;
        let hidden = lines.len() + 1 - rows;
        shown.extend(lines[..fit].iter().map(|line| (*line).to_owned()));
        shown.push(format!(" and {hidden} more queues; taskd top sorts them"));
    }
    shown
        .iter()
        .map(|line| cut(line.trim_end(), width))
        .collect()
}

fn table(look: &QueuesSnapshot, before: Option<&QueuesSnapshot>, width: usize) -> Table {
    let mut table = print::table([
        "queue",
        "pending",
        "waiting",
        "assigned",
        "delayed",
        "leases",
        "completed",
        "in/s",
        "compl./s",
        "dead",
        "oldest",
    ]);
    for queue in &look.queues {
        let rates = look
            .rates(queue, before)
            .map(|rates| [rates.inserted, rates.completed]);
        let rates = rates.map_or_else(Default::default, |rates| {
            rates.map(|rate| format!("{rate:.0}"))
        });
        let oldest = queue
            .oldest_waiting_ms
            .map(|ms| Time(Duration::from_secs(ms / 1000)).to_string());
        let Counts {
            pending,
            waiting,
            assigned,
            delayed,
            completed,
            dead,
            ..
        } = queue.counts;
        let counts = [pending, waiting, assigned, delayed, queue.leases, completed];
        let mut row = vec![format!("{}{}", queue.queue, queue.mark())];
        row.extend(counts.map(|count| HumanCount(count).to_string()));
        row.extend(rates);
        row.extend([HumanCount(dead).to_string(), oldest.unwrap_or_default()]);
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((1, 0));
    }
    table
        .column_iter_mut()
        .skip(1)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    for column in LEFT_OUT {
        let is_wider = table.lines().any(|line| line.chars().count() > width);
        if let Some(column) = table.column_mut(column).filter(|_| is_wider) {
            column.set_constraint(ColumnConstraint::Hidden);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{super::queues::Queue, *};

    #[test]
    fn a_small_terminal_shows_what_fits() {
        let table = "queue  pending\na-long-name  1\nb  2\nc  3";
        for (width, height) in [(1, 2), (5, 3), (80, 24), (20, 4)] {
            for trouble in [None, Some("cannot reach taskd")] {
                let lines = screen(table, trouble, width, height);
                assert!(
                    lines.iter().all(|line| line.chars().count() <= width),
                    "{lines:?}"
                );
                assert!(lines.len() < height || height == 2, "{lines:?}");
            }
        }
        assert_eq!(
            screen(table, None, 60, 4)[1..],
            ["a-long-name  1", " and 2 more queues; taskd top sorts them"]
        );
        assert_eq!(
            screen(table, Some("trouble"), 9, 24)[..2],
            ["trouble", "queue  p…"]
        );
    }

    #[test]
    fn a_queue_is_a_row_with_what_it_completed_meanwhile() {
        let answer = br#"{"queue": "q", "pending": 0, "waiting": 12345, "assigned": 2, "delayed": 3, "leases": 4,
            "completed": 1000, "dead": 5, "cancelled": 0, "oldest_waiting_ms": 61000,
            "paused": false, "unread_shards": 0}"#;
        let queue: Queue = serde_json::from_slice(answer).unwrap();
        let at = Instant::now();
        let counts = Counts {
            completed: 0,
            waiting: 12245,
            ..queue.counts
        };
        let was = Queue {
            counts,
            ..queue.clone()
        };
        let before = QueuesSnapshot {
            at,
            queues: vec![was],
        };
        let look = QueuesSnapshot {
            at: at + Duration::from_secs(100),
            queues: vec![queue],
        };
        let cells = |before| -> Vec<String> {
            let text = table(&look, before, 90).to_string();
            text.lines()
                .nth(1)
                .unwrap()
                .split_whitespace()
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(
            cells(None),
            ["q", "0", "12,345", "2", "3", "4", "1,000", "5", "1m", "1s"]
        );
        assert_eq!(cells(Some(&before))[7..9], ["11", "10"]);
        let usual = table(&look, None, 80).to_string();
        assert!(
            usual.lines().all(|line| line.chars().count() <= 80),
            "{usual}"
        );
        assert!(
            !usual.contains("assigned") && usual.contains("pending") && usual.contains("oldest"),
            "{usual}"
        );
        let narrow = table(&look, None, 60).to_string();
        assert!(
            !narrow.contains("pending") && narrow.contains("waiting") && narrow.contains("oldest"),
            "{narrow}"
        );
    }
}
