//! `taskd workers` and `taskd processes`: list the workers and the processes of a running taskd.

use clap::Args;
use comfy_table::CellAlignment;
use indicatif::HumanCount;
use serde_json::{Value, json};

use super::{
    ask::printable,
    client::Server,
    patience::patiently,
    print::{self, print, say},
};
use crate::{
    model::now_unix_ms,
    wire::pb::{self, operator_client::OperatorClient},
};

/// List the workers that taskd has heard of in the last ten minutes
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd workers            all workers, the last one heard first
  taskd workers crawl      those of this queue, with what they did in it
  taskd workers --json | jq -r .worker

In hand are the leases that a worker has now. Done and failed are its completions and rejections since a process that \
still runs heard it first. A worker that calls several processes is shown at the one that it called last.")]
pub struct Workers {
    /// Only workers of this queue
    #[arg(value_name = "QUEUE")]
    queue: Option<String>,

    /// Print a JSON object for each worker
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// List the processes of taskd that live
#[derive(Args)]
#[command(after_help = "\
A process that stops leaves the list at once, and one that was killed leaves it after 15 seconds.")]
pub struct Processes {
    /// Print a JSON object for each process
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

pub(super) async fn workers(args: Workers) -> anyhow::Result<()> {
    let taskd = args.server.connect().await?;
    let request = pb::ListWorkersRequest {
        queue: args.queue.unwrap_or_default(),
    };
    let ask = async || {
        OperatorClient::new(taskd.clone())
            .list_workers(request.clone())
            .await
    };
    let answer = patiently(ask).await?.into_inner();
    if args.json {
        for worker in &answer.workers {
            print(worker_json(worker))?;
        }
    } else if answer.workers.is_empty() {
        print("no worker has called in the last ten minutes")?;
    } else {
        print(worker_table(&answer.workers))?;
    }
    if answer.more > 0 {
        say(format_args!("… and {} more", HumanCount(answer.more)));
    }
    if answer.unread_leases > 0 {
        let unread = HumanCount(answer.unread_leases);
        say(format_args!(
            "{unread} leases were not read: workers may have more in hand"
        ));
    }
    Ok(())
}

pub(super) async fn processes(args: Processes) -> anyhow::Result<()> {
    let taskd = args.server.connect().await?;
    let ask = async || {
        OperatorClient::new(taskd.clone())
            .list_processes(pb::ListProcessesRequest {})
            .await
    };
    let answer = patiently(ask).await?.into_inner();
    if args.json {
        for process in &answer.processes {
            print(process_json(process))?;
        }
    } else if answer.processes.is_empty() {
        print("no process has told of itself yet")?;
    } else {
        print(process_table(&answer.processes))?;
    }
    Ok(())
}

/// Formats how long ago a time was, in whole seconds.
fn ago(at: Option<prost_types::Timestamp>) -> String {
    let then = at.map_or(0, |at| at.seconds);
    let seconds = (now_unix_ms() / 1000 - then).max(0).unsigned_abs();
    humantime::format_duration(std::time::Duration::from_secs(seconds)).to_string()
}

fn text(at: Option<prost_types::Timestamp>) -> Option<String> {
    at.map(|at| at.to_string())
}

fn worker_json(worker: &pb::WorkerInfo) -> Value {
    json!({
        "worker": worker.worker, "process": worker.process, "address": worker.address, "queues": worker.queues,
        "since": text(worker.since), "last_heard": text(worker.last_heard), "in_hand": worker.in_hand,
        "done": worker.done, "failed": worker.failed,
    })
}

fn worker_table(workers: &[pb::WorkerInfo]) -> String {
    let mut table = print::table([
        "WORKER", "IN HAND", "DONE", "FAILED", "HEARD", "SINCE", "ADDRESS", "PROCESS", "QUEUES",
    ]);
    for worker in workers {
        table.add_row([
            printable(&worker.worker),
            HumanCount(worker.in_hand).to_string(),
            HumanCount(worker.done).to_string(),
            HumanCount(worker.failed).to_string(),
            format!("{} ago", ago(worker.last_heard)),
            format!("{} ago", ago(worker.since)),
            printable(&worker.address),
            printable(&worker.process),
            printable(&worker.queues.join(" ")),
        ]);
    }
    table
        .column_iter_mut()
        .skip(1)
        .take(3)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.to_string()
}

fn process_json(process: &pb::ProcessInfo) -> Value {
    json!({
        "process": process.process, "host": process.host, "pid": process.pid, "http": process.http,
        "grpc": process.grpc, "pipelines": process.pipelines, "version": process.version,
        "since": text(process.since), "last_heard": text(process.last_heard), "workers": process.workers,
    })
}

fn process_table(processes: &[pb::ProcessInfo]) -> String {
    let mut table = print::table([
        "PROCESS",
        "HOST",
        "PID",
        "HTTP",
        "GRPC",
        "PIPELINES",
        "VERSION",
        "SINCE",
        "HEARD",
        "WORKERS",
    ]);
    for process in processes {
        table.add_row([
            printable(&process.process),
            printable(&process.host),
            process.pid.to_string(),
            printable(&process.http),
            printable(&process.grpc),
            printable(&process.pipelines.join(" ")),
            printable(&process.version),
            format!("{} ago", ago(process.since)),
            format!("{} ago", ago(process.last_heard)),
            HumanCount(process.workers).to_string(),
        ]);
    }
    table.to_string()
}
