//! `taskd jobs`: lists, shows, watches and stops jobs, over gRPC.

use std::time::Duration;

use clap::{Args, Subcommand};
use indicatif::HumanCount;
use serde_json::{Map, Value};

use super::{
    client::{Server, Taskd},
    patience::{patiently, progress_bar},
    print::{self, print, print_one, say, say_more},
};
use crate::{
    model::{JobState, TaskStatus},
    wire::{
        pb::{self, operator_client::OperatorClient},
        task_status,
    },
};

pub(super) type Operator = OperatorClient<Taskd>;

/// The time between two looks at a job.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The most jobs of one call.
const MOST: u32 = 1000;
/// The largest answer.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// List, show and stop jobs: changes of many tasks, which taskd makes page by page
#[derive(Args)]
#[command(arg_required_else_help = false)]
#[command(after_help = "\
Examples:
  taskd jobs list                   the latest first
  taskd jobs show 0199…             one job with its progress, as JSON
  taskd jobs show 0199… --watch     until it ends
  taskd jobs stop 0199…             what it has changed stays changed

`taskd tasks retry --queue NAME --yes` starts one. A job can be read for 30 days from its start.
Exit code: 0, or 1 if the job that was watched could not change some tasks, was stopped, or is not there, 2 if the \
request is wrong or the server cannot be reached.")]
pub struct Jobs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List jobs, the latest first
    List(List),
    /// Show one job with its progress, as JSON
    Show(Show),
    /// Stop a job
    Stop(Stop),
}

#[derive(Args)]
struct List {
    /// Most jobs to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,

    /// Print a JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Show {
    /// Id of the job
    id: String,

    /// Wait for its end
    #[arg(long)]
    watch: bool,

    /// Changes nothing: a job is JSON also without it
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Stop {
    /// Id of the job
    id: String,

    #[command(flatten)]
    server: Server,
}

/// Runs the command. False if the job that was watched could not change some tasks, or was stopped.
pub async fn run(args: Jobs) -> anyhow::Result<bool> {
    match args.what {
        What::List(args) => list(&args).await.map(|()| true),
        What::Show(Show {
            id,
            watch: is_watched,
            server,
            ..
        }) => {
            let client = connect(&server).await?;
            let job = read(&client, &id).await?;
            if is_watched {
                return watch(&client, job, true).await;
            }
            print(format_args!("{:#}", json(&job)))?;
            Ok(true)
        }
        What::Stop(Stop { id, server }) => {
            let client = connect(&server).await?;
            let request = pb::StopJobRequest { id };
            let job = patiently(async || client.clone().stop_job(request.clone()).await)
                .await?
                .into_inner();
            print(sentence(&job))?;
            Ok(true)
        }
    }
}

pub(super) async fn connect(server: &Server) -> anyhow::Result<Operator> {
    Ok(Operator::new(server.connect().await?).max_decoding_message_size(MAX_ANSWER_BYTES))
}

async fn read(client: &Operator, id: &str) -> anyhow::Result<pb::Job> {
    let request = pb::GetJobRequest { id: id.to_owned() };
    Ok(
        patiently(async || client.clone().get_job(request.clone()).await)
            .await?
            .into_inner(),
    )
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = connect(&args.server).await?;
    // One more tells whether the list goes on.
    let request = pb::ListJobsRequest {
        limit: MOST.min(args.limit + 1),
        before: String::new(),
    };
    let mut jobs = patiently(async || client.clone().list_jobs(request.clone()).await)
        .await?
        .into_inner()
        .jobs;
    if jobs.len() > args.limit as usize {
        jobs.pop();
        say_more(args.limit, "--limit");
    }
    if args.json {
        jobs.iter().try_for_each(|job| print_one(json(job)))?;
        return Ok(());
    }
    let mut table = print::table([
        "ID", "CREATED", "WHO", "WHAT", "QUEUE", "STATE", "MATCHED", "CHANGED", "FAILED",
    ]);
    for job in &jobs {
        let created = job.created_at.map(|at| at.to_string()).unwrap_or_default();
        let queue = job.filter.as_ref().map_or("", |filter| &filter.queue);
        let [matched, changed, failed] =
            [job.matched, job.changed, job.failed].map(|count| count.to_string());
        table.add_row([
            &job.id,
            &created,
            &job.who,
            &job.what,
            queue,
            state(job),
            &matched,
            &changed,
            &failed,
        ]);
    }
    print(&table)?;
    Ok(())
}

/// Watches a job until its end. Answers whether it has changed all its tasks.
pub(super) async fn watch(
    client: &Operator,
    mut job: pb::Job,
    as_json: bool,
) -> anyhow::Result<bool> {
    let bar = progress_bar();
    bar.suspend(|| {
        say(format_args!(
            "job {}: taskd jobs stop {} stops it",
            job.id, job.id
        ))
    });
    while job.state == i32::from(pb::JobState::Running) {
        let looked_at = HumanCount(job.looked_at);
        let changed = HumanCount(job.changed);
        bar.set_message(format!("{looked_at} tasks looked at, {changed} changed"));
        bar.tick();
        tokio::time::sleep(LOOK_EVERY).await;
        job = read(client, &job.id).await?;
    }
    bar.finish_and_clear();
    print(if as_json {
        json(&job).to_string()
    } else {
        sentence(&job)
    })?;
    Ok(job.failed == 0 && job.state() == pb::JobState::Done)
}

fn state(job: &pb::Job) -> &'static str {
    match job.state() {
        pb::JobState::Running => JobState::Running.as_str(),
        pb::JobState::Done => JobState::Done.as_str(),
        pb::JobState::Stopped => JobState::Stopped.as_str(),
        pb::JobState::Failed => JobState::Failed.as_str(),
        pb::JobState::Unspecified => "UNKNOWN",
    }
}

fn sentence(job: &pb::Job) -> String {
    let matched = HumanCount(job.matched);
    let changed = HumanCount(job.changed);
    let mut text = format!(
        "job {} is {}: {changed} of {matched} tasks changed",
        job.id,
        state(job)
    );
    if !job.last_error.is_empty() {
        text.push_str(&format!(
            "; {} failed, the last error: {}",
            HumanCount(job.failed),
            job.last_error
        ));
    }
    text
}

/// As the HTTP API shows it.
pub(super) fn json(job: &pb::Job) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| drop(object.insert(name.into(), value));
    set("id", job.id.as_str().into());
    set("what", job.what.as_str().into());
    set("state", state(job).into());
    set(
        "filter",
        job.filter.as_ref().map(filter).unwrap_or_default(),
    );
    set("who", job.who.as_str().into());
    let counts = [
        ("looked_at", job.looked_at),
        ("matched", job.matched),
        ("changed", job.changed),
        ("failed", job.failed),
    ];
    counts
        .into_iter()
        .for_each(|(name, count)| set(name, count.into()));
    if !job.last_error.is_empty() {
        set("last_error", job.last_error.as_str().into());
    }
    for (name, at) in [
        ("created_at", job.created_at),
        ("updated_at", job.updated_at),
    ] {
        if let Some(at) = at {
            set(name, at.to_string().into());
        }
    }
    object.into()
}

fn filter(filter: &pb::TaskFilter) -> Value {
    let mut object = Map::new();
    let statuses: Vec<_> = filter
        .statuses
        .iter()
        .copied()
        .filter_map(task_status)
        .map(TaskStatus::as_str)
        .collect();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for (name, value) in [
        ("queue", filter.queue.clone()),
        ("status", statuses.join(",")),
        ("key", text(&filter.key)),
        ("key_prefix", text(&filter.key_prefix)),
        ("worker", filter.worker.clone()),
        (
            "since",
            filter.since.map(|at| at.to_string()).unwrap_or_default(),
        ),
        (
            "until",
            filter.until.map(|at| at.to_string()).unwrap_or_default(),
        ),
    ] {
        if !value.is_empty() {
            object.insert(name.into(), value.into());
        }
    }
    if !filter.headers.is_empty() {
        object.insert("headers".into(), serde_json::json!(filter.headers));
    }
    object.into()
}
