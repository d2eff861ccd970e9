//! `taskd tasks retry`: sends dead and cancelled tasks again.

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::HumanCount;
use serde_json::json;

use super::{
    super::{
        client::{Server, said},
        jobs::{self, Operator},
        patience::patiently,
    },
    filter::Filter,
};
use crate::wire::pb;

/// The ids of one call.
const AT_ONCE: usize = 500;

#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd tasks retry 0199… 0199…                        send these tasks again
  taskd tasks retry --queue crawl --since 2h --dry-run count those of the filter
  taskd tasks retry --queue crawl --since 2h --yes     start a job, and watch it
  taskd tasks retry --queue crawl --status cancelled --yes --detach

With a filter taskd runs a job: Ctrl-C ends the watching and not the job. `taskd jobs` shows and stops jobs.
Exit code: 0, or 1 if some tasks could not be sent again, 2 if the request is wrong or the server cannot be
reached.")]
pub(super) struct Retry {
    /// Ids of tasks, instead of a filter
    #[arg(value_name = "ID", conflicts_with_all = ["queue", "worker", "since", "until"])]
    ids: Vec<String>,

    #[command(flatten)]
    filter: Filter,

    /// Only count
    #[arg(long)]
    dry_run: bool,

    /// Send all tasks of the filter again
    #[arg(long)]
    yes: bool,

    /// Print the id of the job, and leave it alone
    #[arg(long)]
    detach: bool,

    /// Print the outcome as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

pub(super) async fn run(args: &Retry) -> anyhow::Result<bool> {
    let client = jobs::connect(&args.server).await?;
    if !args.ids.is_empty() {
        return by_ids(args, &client).await;
    }
    if !args.dry_run && !args.yes {
        bail!("this may change many tasks: say --dry-run to count them, or --yes to go on");
    }
    let filter = Some(args.filter.message());
    let (dry_run, yes) = (args.dry_run, args.yes);
    let request = pb::RetryTasksRequest { filter, dry_run, yes, ..Default::default() };
    if args.dry_run {
        let answer = patiently(async || client.clone().retry_tasks(request.clone()).await).await?.into_inner();
        count(args, &answer.count.unwrap_or_default());
        return Ok(true);
    }
    // Once: a call that broke off may have started its job.
    let answer = client.clone().retry_tasks(request).await;
    let answer = answer.map_err(|status| anyhow::anyhow!("{}", said(&status)))?.into_inner();
    let job = answer.job.context("taskd has started no job")?;
    if args.detach {
        println!("{}", if args.json { jobs::json(&job).to_string() } else { job.id });
        return Ok(true);
    }
    jobs::watch(&client, job, args.json).await
}

fn count(args: &Retry, count: &pb::TaskCount) {
    let pb::TaskCount { matched, looked_at, at_least } = count;
    if args.json {
        println!("{}", json!({ "matched": matched, "looked_at": looked_at, "at_least": at_least }));
    } else {
        let more = if *at_least { "at least " } else { "" };
        println!("{more}{} tasks would be sent again", HumanCount(*matched));
    }
}

async fn by_ids(args: &Retry, client: &Operator) -> anyhow::Result<bool> {
    let (mut matched, mut changed, mut failed) = (0, 0_u64, 0_u64);
    for ids in args.ids.chunks(AT_ONCE) {
        let request = pb::RetryTasksRequest { ids: ids.to_vec(), dry_run: args.dry_run, ..Default::default() };
        let answer = patiently(async || client.clone().retry_tasks(request.clone()).await).await?.into_inner();
        matched += answer.count.map_or(0, |count| count.matched);
        for result in answer.results {
            if result.status == i32::from(pb::ItemStatus::Ok) {
                changed += 1;
                continue;
            }
            failed += 1;
            let unknown = "there is no such task, or it finished so long ago that it was removed";
            let why = if result.error.is_empty() { unknown } else { &result.error };
            eprintln!("{}: {why}", result.id);
        }
    }
    if args.dry_run {
        count(args, &pb::TaskCount { matched, looked_at: args.ids.len() as u64, at_least: false });
    } else if args.json {
        println!("{}", json!({ "changed": changed, "failed": failed }));
    } else {
        println!("{} of {} tasks sent again", HumanCount(changed), HumanCount(changed + failed));
    }
    Ok(failed == 0)
}
