//! `taskd bench`: measures a taskd over gRPC, as its users call it, and checks that no task is lost
//! or completed too often.

mod args;
mod flat;
mod http;
mod insert;
mod latency;
mod ledger;
mod limits;
mod machine;
mod process;
mod progress;
mod pushed;
mod report;
mod run;
mod server;
mod start;
mod throughput;
mod topics;
mod trees;
mod work;
mod workflow;

use anyhow::bail;
use tokio::signal::unix::{SignalKind, signal};
use uuid::Uuid;

pub use self::args::Bench;
use self::{
    args::{Part, Phase},
    report::Report,
    run::Run,
    server::Server,
};
use super::print::{print, say};

/// Measures, and prints the figures. Returns true if every task was completed exactly NUM times.
///
/// Fails if taskd cannot be reached or started, or makes no progress.
pub async fn run(args: Bench) -> anyhow::Result<bool> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    // If this command started a taskd, dropping the future stops it.
    tokio::select! {
        result = measure(&args) => result,
        _ = interrupt.recv() => bail!("stopped"),
        _ = terminate.recv() => bail!("stopped"),
    }
}

async fn measure(args: &Bench) -> anyhow::Result<bool> {
    let bar = progress::bar();
    let mut report = Report::default();
    let mut conditions = None;
    for number in 1..=args.runs {
        for part in args.parts() {
            progress::step(&bar, format!("run {number} of {}: start", args.runs), 0);
            let server = Server::open(args, part).await?;
            if conditions.is_none() {
                conditions = Some(server.conditions(args).await?);
            }
            let name = match part {
                // Its own taskd knows the queues of these names.
                Part::Limits => limits::NAME.to_owned(),
                _ => format!("bench-{}", &Uuid::new_v4().simple().to_string()[..12]),
            };
            let mut run = Run {
                args,
                server,
                name,
                number,
                bar: &bar,
                report: &mut report,
            };
            match part {
                Part::Calls => calls(&mut run).await?,
                Part::Flat => flat::measure(&mut run).await?,
                Part::Start => start::measure(&mut run).await?,
                Part::Limits => limits::measure(&mut run).await?,
                Part::Topics => topics::measure(&mut run).await?,
                Part::Trees => trees::measure(&mut run).await?,
                Part::Workflow => Box::pin(workflow::measure(&mut run)).await?,
            }
            run.server.close().await?;
        }
    }
    bar.finish_and_clear();
    let Some(conditions) = conditions else {
        bail!("no run")
    };
    let text = match args.json {
        true => report.json(&conditions, args).to_string(),
        false => report.text(&conditions, args),
    };
    print(&text)?;
    report
        .mistakes()
        .iter()
        .for_each(|line| say(format_args!("taskd: {line}")));
    Ok(report.mistakes().is_empty())
}

/// The phases that can run against any taskd, not only against the benchmark's own.
async fn calls(run: &mut Run<'_>) -> anyhow::Result<()> {
    throughput::warm_up(run).await?;
    let wants = |phase| run.args.wants(phase);
    if wants(Phase::Insert) || wants(Phase::Duplicates) || wants(Phase::Process) {
        throughput::measure(run).await?;
    }
    if run.args.wants(Phase::Latency) {
        latency::measure(run).await?;
    }
    Ok(())
}
