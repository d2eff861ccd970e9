//! `taskd tasks`: lists tasks by queue, status, key, header, worker and time, over gRPC. Sends them
//! again, cancels, changes and requeues them.

mod change;
mod filter;
mod show;

use clap::{Args, Subcommand};

use self::filter::Filter;
use super::{
    client::{Server, Taskd},
    named::AnyQueue,
    patience::pages,
    print::say,
};
use crate::wire::pb::{self, discovery_client::DiscoveryClient};

/// The largest answer to accept: a page of tasks, with keys of up to 4 KiB.
const MAX_ANSWER_BYTES: usize = 64 << 20;

type Client = DiscoveryClient<Taskd>;

/// List tasks of a running taskd, the newest first; send them again, cancel, change or requeue them
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:
  taskd tasks crawl                                    the newest hundred
  taskd tasks crawl --status dead --since 2h
  taskd tasks crawl --status unfinished --until 1day
  taskd tasks crawl --key-prefix https://example.org/ --limit 1000
  taskd tasks crawl --header site=example --json | jq .id
  taskd tasks --worker w7                              what this worker has completed
  taskd tasks retry crawl --since 2h --dry-run         count what would be sent again

A status is PENDING, QUEUED, ASSIGNED, DELAYED, COMPLETED, DEAD, CANCELLED, or UNFINISHED for the first \
four. --status, --key-prefix, --header and --reason need a queue.
Exit code: 0, or 1 if some tasks could not be changed, 2 if the request is wrong or the server cannot be \
reached.")]
pub struct Tasks {
    #[command(subcommand)]
    what: Option<What>,

    #[command(flatten)]
    list: List,
}

#[derive(Subcommand)]
enum What {
    /// Send dead and cancelled tasks again: those of the ids, or all of the filter
    Retry(change::Retry),
    /// Cancel unfinished tasks: those of the ids, or all of the filter
    Cancel(change::Cancel),
    /// Give unfinished tasks another priority, or another number of workers: those of the ids, or
    /// all of the filter
    Change(change::Update),
    /// Offer unfinished tasks anew: those of the ids, or all of the filter
    Requeue(change::Requeue),
}

#[derive(Args)]
struct List {
    #[command(flatten)]
    queue: AnyQueue,

    #[command(flatten)]
    filter: Filter,

    /// Most tasks to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,

    /// Print a JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Runs the command. Returns false if some tasks could not be changed.
pub async fn run(args: Tasks) -> anyhow::Result<bool> {
    match args.what {
        None => list(&args.list).await.map(|()| true),
        Some(What::Retry(args)) => change::retry(&args).await,
        Some(What::Cancel(args)) => change::cancel(&args).await,
        Some(What::Change(args)) => change::update(&args).await,
        Some(What::Requeue(args)) => change::requeue(&args).await,
    }
}

async fn list(args: &List) -> anyhow::Result<()> {
    let filter = args.filter.message(args.queue.name())?;
    let client =
        Client::new(args.server.connect().await?).max_decoding_message_size(MAX_ANSWER_BYTES);
    let page = async |limit, cursor| {
        let request = pb::ListTasksRequest {
            filter: Some(filter.clone()),
            limit,
            cursor,
        };
        let page = client.clone().list_tasks(request).await?.into_inner();
        if page.partial {
            say(
                "There are more than 10,000 queues, so only the open ones were searched. Name a queue to search it.",
            );
        }
        Ok((page.tasks, page.cursor))
    };
    pages(args.limit, args.json, page, show::json, show::table).await
}
