//! `make bench`: measures taskd and, in the same run, the most that this machine's Redis, SQLite,
//! gRPC, MariaDB and Kafka can do.
//!
//! Absolute figures depend on the machine and its current load; ratios much less, because each run
//! is divided by limits measured just before. A run in which a task is lost or doubled, or an
//! answer is wrong, fails and yields no figure.

// Every spawned task is awaited or aborted by its run.
#![allow(clippy::disallowed_methods)]

mod claim;
mod command;
mod costs;
mod daemon;
mod database;
mod delay;
mod folder;
mod kafka;
mod limits;
mod lines;
mod machine;
mod production;
mod progress;
mod push;
mod queues;
mod rebuild;
mod redis_server;
mod report;
mod scale;
mod search;
mod servers;
mod ui;
mod work;

use anyhow::Context;
use clap::Parser;

use folder::folder;
use machine::Machine;
use progress::Progress;
use report::{Form, Table};
use scale::Scale;

/// Measures taskd beside the limits of this machine
#[derive(Parser)]
#[command(name = "bench")]
struct Args {
    /// Only the benchmarks whose name contains this: command, limits, topics, costs, delay, push,
    /// claim, queues, production; search and ui run only when they are named
    filter: Option<String>,
    /// Small numbers and one run: shows that it works, measures nothing
    #[arg(long)]
    quick: bool,
    /// Tasks and queues of `ui`, if not 1,000,000 in 1,000
    #[arg(long, num_args = 2, value_names = ["TASKS", "QUEUES"])]
    shown: Option<Vec<usize>>,
    /// One line of JSON for each figure
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// The ratios alone, for docs/benchmarks.md
    #[arg(long)]
    markdown: bool,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // `cargo test --benches` also starts this program, but without this argument.
    if !args.bench {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    // Run on a worker thread, like taskd's own callers: from any other thread, each call would cost
    // a thread switch.
    runtime.block_on(async {
        tokio::spawn(run(args))
            .await
            .context("a benchmark panicked")?
    })
}

async fn run(args: Args) -> anyhow::Result<()> {
    let form = match args {
        Args { json: true, .. } => Form::Json,
        Args { markdown: true, .. } => Form::Markdown,
        _ => Form::Human,
    };
    let mut scale = if args.quick {
        Scale::quick()
    } else {
        Scale::full()
    };
    if let Some([tasks, queues]) = args.shown.as_deref() {
        anyhow::ensure!(
            *queues > 0 && *tasks >= *queues,
            "--shown: each queue needs a task"
        );
        // Each queue has as many.
        scale.shown = [tasks / queues * queues, *queues];
    }
    let machine = Machine::look(folder()?.path()).await?;
    match form {
        Form::Json => println!("{}", machine.json()),
        Form::Human | Form::Markdown => {
            println!(
                "{machine}; each figure the median of {} (lowest–highest)",
                scale.runs
            )
        }
    }
    let wanted = |name: &str| {
        args.filter
            .as_ref()
            .is_none_or(|filter| name.contains(filter.as_str()))
    };
    if wanted("command") {
        show(form, &command::run(&scale, &Progress::new()).await?);
    }
    if wanted("limits") {
        show(form, &command::keys(&scale, &Progress::new()).await?);
    }
    if wanted("topics") {
        show(form, &command::topics(&scale, &Progress::new()).await?);
    }
    if wanted("costs") {
        show(form, &costs::run(&scale, &Progress::new()).await?);
    }
    if wanted("delay") {
        show(form, &delay::run(&scale, &Progress::new()).await?);
    }
    if wanted("push") {
        show(form, &push::run(&scale, &Progress::new()).await?);
    }
    if wanted("claim") {
        show(form, &claim::run(&scale, &Progress::new()).await?);
    }
    if wanted("queues") {
        show(form, &queues::run(&scale, &Progress::new()).await?);
    }
    if wanted("production") {
        show(form, &production::run(&scale, &Progress::new()).await?);
    }
    // Only on request, because it creates a database of several gigabytes.
    if args.filter.as_deref() == Some("search") {
        show(form, &search::run(&scale, &Progress::new()).await?);
    }
    // Only on request, because it inserts a million tasks.
    if args.filter.as_deref() == Some("ui") {
        show(form, &ui::run(&scale, &Progress::new()).await?);
    }
    let busy = machine::busy_cores().await?;
    if busy.max(machine.busy_cores) > 0.2 {
        eprintln!(
            "bench: others use {:.1} cores before and {busy:.1} after: measure again when they do not",
            machine.busy_cores
        );
    }
    Ok(())
}

fn show(form: Form, tables: &[Table]) {
    tables.iter().for_each(|table| table.print(form));
}
