//! `taskd bulk`: lists, shows, watches and stops bulk changes, over gRPC.

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
    model::{BulkState, TaskStatus},
    wire::{
        pb::{self, operator_client::OperatorClient},
        task_status,
    },
};

pub(super) type Operator = OperatorClient<Taskd>;

/// How often to read the state of a bulk change that is watched.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The most bulk changes in one call.
const MOST: u32 = 1000;
/// The largest answer to accept.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// List, show and stop bulk changes: changes of many tasks, which taskd makes page by page
#[derive(Args)]
#[command(arg_required_else_help = false)]
#[command(after_help = "\
Examples:
  taskd bulk list                   the latest first
  taskd bulk show 0199…             one bulk change with its progress, as JSON
  taskd bulk show 0199… --watch     until it ends
  taskd bulk stop 0199…             what it has changed stays changed

`taskd tasks retry --queue NAME --yes` starts one. A bulk change can be read for 30 days from its start.
Exit code: 0, or 1 if the bulk change that was watched could not change some tasks, was stopped, or is not there, 2 if the \
request is wrong or the server cannot be reached.")]
pub struct Bulk {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List bulk changes, the latest first
    List(List),
    /// Show one bulk change with its progress, as JSON
    Show(Show),
    /// Stop a bulk change
    Stop(Stop),
}

#[derive(Args)]
struct List {
    /// Most bulk changes to list
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
    /// Id of the bulk change
    id: String,

    /// Wait for its end
    #[arg(long)]
    watch: bool,

    /// Changes nothing: a bulk change is JSON also without it
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Stop {
    /// Id of the bulk change
    id: String,

    #[command(flatten)]
    server: Server,
}

/// Runs the command. Returns false if a watched bulk change could not change some tasks, failed or
/// was stopped.
pub async fn run(args: Bulk) -> anyhow::Result<bool> {
    match args.what {
        What::List(args) => list(&args).await.map(|()| true),
        What::Show(Show {
            id,
            watch: is_watched,
            server,
            ..
        }) => {
            let client = connect(&server).await?;
            let bulk = read(&client, &id).await?;
            if is_watched {
                return watch(&client, bulk, true).await;
            }
            print(format_args!("{:#}", json(&bulk)))?;
            Ok(true)
        }
        What::Stop(Stop { id, server }) => {
            let client = connect(&server).await?;
            let request = pb::StopBulkChangeRequest { id };
            let bulk = patiently(async || client.clone().stop_bulk_change(request.clone()).await)
                .await?
                .into_inner();
            print(sentence(&bulk))?;
            Ok(true)
        }
    }
}

pub(super) async fn connect(server: &Server) -> anyhow::Result<Operator> {
    Ok(Operator::new(server.connect().await?).max_decoding_message_size(MAX_ANSWER_BYTES))
}

async fn read(client: &Operator, id: &str) -> anyhow::Result<pb::BulkChange> {
    let request = pb::GetBulkChangeRequest { id: id.to_owned() };
    Ok(
        patiently(async || client.clone().get_bulk_change(request.clone()).await)
            .await?
            .into_inner(),
    )
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = connect(&args.server).await?;
    // One extra entry shows whether the list goes on.
    let request = pb::ListBulkChangesRequest {
        limit: MOST.min(args.limit + 1),
        before: String::new(),
    };
    let mut bulk_changes =
        patiently(async || client.clone().list_bulk_changes(request.clone()).await)
            .await?
            .into_inner()
            .bulk;
    if bulk_changes.len() > args.limit as usize {
        bulk_changes.pop();
        say_more(args.limit, "--limit");
    }
    if args.json {
        bulk_changes
            .iter()
            .try_for_each(|bulk| print_one(json(bulk)))?;
        return Ok(());
    }
    let mut table = print::table([
        "ID", "CREATED", "WHO", "WHAT", "QUEUE", "STATE", "MATCHED", "CHANGED", "FAILED",
    ]);
    for bulk in &bulk_changes {
        let created = bulk.created_at.map(|at| at.to_string()).unwrap_or_default();
        let queue = bulk.filter.as_ref().map_or("", |filter| &filter.queue);
        let [matched, changed, failed] =
            [bulk.matched, bulk.changed, bulk.failed].map(|count| count.to_string());
        table.add_row([
            &bulk.id,
            &created,
            &bulk.who,
            &bulk.what,
            queue,
            state(bulk),
            &matched,
            &changed,
            &failed,
        ]);
    }
    print::print_table(&table)?;
    Ok(())
}

/// Watches a bulk change until it ends. Returns whether it has changed all its tasks.
pub(super) async fn watch(
    client: &Operator,
    mut bulk: pb::BulkChange,
    as_json: bool,
) -> anyhow::Result<bool> {
    let bar = progress_bar();
    bar.suspend(|| {
        say(format_args!(
            "bulk change {}: taskd bulk stop {} stops it",
            bulk.id, bulk.id
        ))
    });
    while bulk.state == i32::from(pb::BulkState::Running) {
        let looked_at = HumanCount(bulk.looked_at);
        let changed = HumanCount(bulk.changed);
        bar.set_message(format!("{looked_at} tasks looked at, {changed} changed"));
        bar.tick();
        tokio::time::sleep(LOOK_EVERY).await;
        bulk = read(client, &bulk.id).await?;
    }
    bar.finish_and_clear();
    print(if as_json {
        json(&bulk).to_string()
    } else {
        sentence(&bulk)
    })?;
    Ok(bulk.failed == 0 && bulk.state() == pb::BulkState::Done)
}

fn state(bulk: &pb::BulkChange) -> &'static str {
    match bulk.state() {
        pb::BulkState::Running => BulkState::Running.as_str(),
        pb::BulkState::Done => BulkState::Done.as_str(),
        pb::BulkState::Stopped => BulkState::Stopped.as_str(),
        pb::BulkState::Failed => BulkState::Failed.as_str(),
        pb::BulkState::Unspecified => "UNKNOWN",
    }
}

fn sentence(bulk: &pb::BulkChange) -> String {
    let matched = HumanCount(bulk.matched);
    let changed = HumanCount(bulk.changed);
    let mut text = format!(
        "bulk change {} is {}: {changed} of {matched} tasks changed",
        bulk.id,
        state(bulk)
    );
    if !bulk.last_error.is_empty() {
        text.push_str(&format!(
            "; {} failed, the last error: {}",
            HumanCount(bulk.failed),
            bulk.last_error
        ));
    }
    text
}

/// Formats a bulk change as the HTTP API does.
pub(super) fn json(bulk: &pb::BulkChange) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| drop(object.insert(name.into(), value));
    set("id", bulk.id.as_str().into());
    set("what", bulk.what.as_str().into());
    set("state", state(bulk).into());
    set(
        "filter",
        bulk.filter.as_ref().map(filter).unwrap_or_default(),
    );
    set("who", bulk.who.as_str().into());
    let counts = [
        ("looked_at", bulk.looked_at),
        ("matched", bulk.matched),
        ("changed", bulk.changed),
        ("failed", bulk.failed),
    ];
    counts
        .into_iter()
        .for_each(|(name, count)| set(name, count.into()));
    if !bulk.last_error.is_empty() {
        set("last_error", bulk.last_error.as_str().into());
    }
    for (name, at) in [
        ("created_at", bulk.created_at),
        ("updated_at", bulk.updated_at),
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
        ("tree", filter.tree.clone()),
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
