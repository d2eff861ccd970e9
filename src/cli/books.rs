//! `taskd books`: shows for each queue of a running taskd what came in, what went out, and where
//! the rest is.

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::bail;
use clap::Args;
use comfy_table::CellAlignment;
use hyper::body::Bytes;
use indicatif::HumanCount;
use serde::Deserialize;
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{get, printable, read},
    http::HttpPort,
    named::AnyQueue,
    print::{self, CLEAR, NotThere, print_one, say},
};

const EVERY: Duration = Duration::from_secs(1);

/// Show what came in, what went out, and where the rest is, by queue
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd books                     all queues with unfinished tasks
  taskd books crawl --watch       one queue, each second until Ctrl-C
  taskd books --json | jq '.queues[] | {queue, state, in, out}'

stored = completed + dead + cancelled + in SQL + between + in Redis. `between` is on the bus, or finished \
with its report on the way to SQL; at rest it is 0.
Exit code: 0, 1 if the books of a queue are UNBALANCED or the queue named has no task, 2 if the server cannot be \
reached or the question is wrong.")]
pub struct Books {
    #[command(flatten)]
    queue: AnyQueue,

    /// Look again each second, until Ctrl-C
    #[arg(long)]
    watch: bool,

    /// Print the answer of the API, one JSON object a look
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Deserialize)]
struct Answer {
    /// Absent if the token does not reach all queues.
    bus: Option<Bus>,
    queues: Vec<Queue>,
}

#[derive(Deserialize)]
struct Bus {
    pipeline: u64,
    task_results: u64,
}

#[derive(Deserialize)]
struct Queue {
    queue: String,
    state: String,
    #[serde(rename = "in")]
    came_in: In,
    out: Out,
    held: UnfinishedTasks,
}

impl Queue {
    /// Returns true if nothing ever came in. The API shows a queue that does not exist like this.
    fn is_blank(&self) -> bool {
        let In {
            stored,
            duplicates,
            rejected,
        } = self.came_in;
        let Redis {
            waiting,
            assigned,
            delayed,
            reports,
        } = self.held.redis;
        [
            stored, duplicates, rejected, waiting, assigned, delayed, reports,
        ]
        .iter()
        .all(|count| *count == 0)
    }
}

#[derive(Deserialize)]
struct In {
    stored: u64,
    duplicates: u64,
    rejected: u64,
}

#[derive(Deserialize)]
struct Out {
    completed: u64,
    dead: u64,
    cancelled: u64,
}

#[derive(Deserialize)]
struct UnfinishedTasks {
    sql: Sql,
    between: i64,
    redis: Redis,
}

#[derive(Deserialize)]
struct Sql {
    fresh: u64,
    parked: u64,
    #[serde(default)]
    crowded: u64,
    #[serde(default)]
    behind: u64,
    scheduled: u64,
    missing: u64,
}

#[derive(Deserialize)]
struct Redis {
    waiting: u64,
    assigned: u64,
    delayed: u64,
    reports: u64,
}

/// Prints the books. Returns false if those of a queue are unbalanced.
pub(super) async fn run(args: Books) -> anyhow::Result<bool> {
    let server = args.server.port()?;
    let clear = if args.watch && io::stdout().is_terminal() && !args.json {
        CLEAR
    } else {
        ""
    };
    let (mut body, mut answer) = look(&server, args.queue.name()).await?;
    if let (Some(name), false) = (args.queue.name(), args.watch)
        && answer.queues.iter().all(Queue::is_blank)
    {
        bail!(NotThere(format!(
            "queue {name} has no task; taskd stats lists the queues"
        )));
    }
    loop {
        let text = match args.json {
            true => String::from_utf8_lossy(&body).into_owned(),
            false => table(&answer),
        };
        let is_read = match print_one(format_args!("{clear}{text}")) {
            Ok(()) => true,
            // A closed stdout is not an error: the reader has read enough.
            Err(unwritten) if unwritten.is_closed() => false,
            Err(unwritten) => return Err(unwritten.into()),
        };
        if !args.watch || !is_read {
            return Ok(answer
                .queues
                .iter()
                .all(|queue| queue.state != "UNBALANCED"));
        }
        (body, answer) = next(&server, args.queue.name()).await;
    }
}

/// Asks each second until taskd answers, because it may only be restarting. Tells the user about
/// the first error.
async fn next(server: &HttpPort, queue: Option<&str>) -> (Bytes, Answer) {
    let mut is_told = false;
    loop {
        tokio::time::sleep(EVERY).await;
        match look(server, queue).await {
            Ok(seen) => return seen,
            Err(error) if !is_told => {
                say(format_args!("taskd: {}", printable(&format!("{error:#}"))));
                is_told = true;
            }
            Err(_) => {}
        }
    }
}

async fn look(server: &HttpPort, queue: Option<&str>) -> anyhow::Result<(Bytes, Answer)> {
    let mut path = "/v1/books".to_owned();
    if let Some(queue) = queue {
        path.push('?');
        path.push_str(
            &form_urlencoded::Serializer::new(String::new())
                .append_pair("queue", queue)
                .finish(),
        );
    }
    let body = get(server, &path).await?;
    let answer = read(server, &body)?;
    Ok((body, answer))
}

fn table(answer: &Answer) -> String {
    let mut table = print::table([
        "queue", "stored", "dupl.", "reject.", "compl.", "dead", "cancel.", "fresh", "parked",
        "crowded", "behind", "sched.", "missing", "between", "waiting", "assigned", "delayed",
        "reports", "state",
    ]);
    for Queue {
        queue,
        state,
        came_in,
        out,
        held,
    } in &answer.queues
    {
        let UnfinishedTasks {
            sql,
            between,
            redis,
        } = held;
        let count = |count: u64| HumanCount(count).to_string();
        let mut row = vec![queue.clone()];
        row.extend([came_in.stored, came_in.duplicates, came_in.rejected].map(count));
        row.extend([out.completed, out.dead, out.cancelled].map(count));
        row.extend(
            [
                sql.fresh,
                sql.parked,
                sql.crowded,
                sql.behind,
                sql.scheduled,
                sql.missing,
            ]
            .map(count),
        );
        row.push(format!(
            "{}{}",
            if *between < 0 { "-" } else { "" },
            count(between.unsigned_abs())
        ));
        row.extend([redis.waiting, redis.assigned, redis.delayed, redis.reports].map(count));
        row.push(state.clone());
        table.add_row(row);
    }
    table
        .column_iter_mut()
        .skip(1)
        .take(17)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    let table = print::shown(&table);
    match answer.bus {
        Some(Bus {
            pipeline,
            task_results,
        }) => {
            format!(
                "{table}\non the bus: {pipeline} records of pipeline, {task_results} of task-results"
            )
        }
        None => table,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_a_row() {
        let answer = br#"{"bus": {"pipeline": 1, "task_results": 2}, "queues": [{"queue": "q", "state": "MOVING",
            "in": {"stored": 1234, "duplicates": 1, "rejected": 2}, "out": {"completed": 3, "dead": 4, "cancelled": 5},
            "held": {"total": 100, "sql": {"fresh": 6, "parked": 7, "crowded": 15, "behind": 16, "scheduled": 8, "missing": 9}, "between": -1500,
            "redis": {"live": 33, "waiting": 10, "assigned": 11, "delayed": 12, "leases": 13, "reports": 14}}}]}"#;
        let text = table(&serde_json::from_slice(answer).unwrap());
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = "q 1,234 1 2 3 4 5 6 7 15 16 8 9 -1,500 10 11 12 14 MOVING";
        assert_eq!(cells, expected.split(' ').collect::<Vec<_>>());
        assert!(
            text.ends_with("1 records of pipeline, 2 of task-results"),
            "{text}"
        );
        let nothing = table(&serde_json::from_str(r#"{"bus": null, "queues": []}"#).unwrap());
        assert_eq!(nothing, "none");
    }
}
