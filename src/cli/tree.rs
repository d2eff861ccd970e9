//! `taskd tree`: lists, shows, watches, awaits, cancels and retries trees, over gRPC.

use std::time::{Duration, Instant};

use anyhow::bail;
use backon::BackoffBuilder as _;
use clap::{Args, Subcommand, ValueEnum};
use indicatif::HumanCount;
use serde_json::{Map, Value, json};
use tonic::{Code, Status};

use super::{
    ask::printable,
    bulk,
    client::{self, Server, Taskd, WAITS, is_transient},
    patience::patiently,
    print::{self, print, print_one, say, say_more},
};
use crate::{
    config::Time,
    model::TaskStatus,
    wire::{
        pb::{self, trees_client::TreesClient},
        task_status,
    },
};

type Client = TreesClient<Taskd>;

/// How long to retry after the last sign of life from taskd.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// A stream that lasted this long counts as a success, even without a change.
const WAS_OPEN: Duration = Duration::from_secs(5);
/// The most trees in one call.
const MOST: u32 = 1000;
/// The largest answer to accept.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Show, watch and cancel trees: tasks with all that is discovered from them
#[derive(Args)]
#[command(arg_required_else_help = false)]
#[command(after_help = "\
Examples:
  taskd insert crawl --key https://example.org/ --tree new    begin a tree
  taskd tree list --state open                                the newest first
  taskd tree show 0199…                                       counts, and what it waits for, as JSON
  taskd tree watch 0199…                                      a line for each change, to its end
  taskd tree wait 0199… && taskd insert reports --key daily   wait for its end
  taskd tree cancel 0199…                                     cancel all its tasks, by a bulk change
  taskd tree retry 0199…                                      send its dead tasks again

The id of a tree is that of its root.
Exit code: 0; of watch and wait: 0 if the tree is DONE, 1 if it FAILED, or is still open after --timeout. 1 if there is \
no such tree, 2 if the request is wrong or the server cannot be reached.")]
pub struct Tree {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List trees, the newest first
    List(List),
    /// Show one tree with what it waits for, as JSON
    Show(One),
    /// Watch a tree to its end: a line for each change
    Watch(Watch),
    /// Wait for the end of a tree
    Wait(Wait),
    /// Cancel the tasks of a tree; nothing is added to it any more
    Cancel(Change),
    /// Send the dead tasks of a tree again
    Retry(Change),
}

#[derive(Clone, Copy, ValueEnum)]
enum State {
    Open,
    Done,
    Failed,
}

#[derive(Args)]
struct List {
    /// Only with roots in this queue
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// Only in this state
    #[arg(long, value_enum, ignore_case = true)]
    state: Option<State>,

    /// Most trees to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,

    /// Print a JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct One {
    /// Id of the tree: that of its root
    id: String,

    /// Changes nothing: a tree is JSON also without it
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Watch {
    /// Id of the tree: that of its root
    id: String,

    /// Print a JSON object for each change
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Wait {
    /// Id of the tree: that of its root
    id: String,

    /// How long to wait [default: until it has ended]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Time>,

    /// Print the tree as a JSON object at the end
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Change {
    /// Id of the tree: that of its root
    id: String,

    /// Wait for the end of the bulk change
    #[arg(long)]
    watch: bool,

    /// Print the bulk change as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Runs the command. Returns false if a watched tree is not done, or a bulk change that was watched
/// could not change some tasks.
pub(super) async fn run(args: Tree) -> anyhow::Result<bool> {
    match args.what {
        What::List(args) => list(&args).await.map(|()| true),
        What::Show(One { id, server, .. }) => {
            let client = connect(&server).await?;
            let request = pb::GetTreeRequest { id, wait: None };
            let tree = patiently(async || client.clone().get_tree(request.clone()).await)
                .await?
                .into_inner();
            print(format_args!("{:#}", json(&tree)))?;
            Ok(true)
        }
        What::Watch(Watch { id, json, server }) => {
            let says = if json { Says::Json } else { Says::Lines };
            let tree = follow(&server, &id, says, None).await?;
            Ok(is_done(tree.as_ref()))
        }
        What::Wait(Wait {
            id,
            timeout,
            json: as_json,
            server,
        }) => {
            let timeout = timeout.map(|Time(timeout)| timeout);
            let tree = follow(&server, &id, Says::Nothing, timeout).await?;
            if let Some(tree) = &tree {
                let is_open = tree.state() == pb::TreeState::Open;
                if as_json {
                    print(json(tree))?;
                } else if is_open {
                    say(line(tree));
                } else {
                    print(line(tree))?;
                }
            }
            Ok(is_done(tree.as_ref()))
        }
        What::Cancel(args) => {
            let client = connect(&args.server).await?;
            let request = pb::CancelTreeRequest {
                id: args.id.clone(),
            };
            let bulk = patiently(async || client.clone().cancel_tree(request.clone()).await)
                .await?
                .into_inner();
            started(&args, bulk).await
        }
        What::Retry(args) => {
            let client = connect(&args.server).await?;
            let request = pb::RetryTreeRequest {
                id: args.id.clone(),
            };
            let bulk = patiently(async || client.clone().retry_tree(request.clone()).await)
                .await?
                .into_inner();
            started(&args, bulk).await
        }
    }
}

async fn connect(server: &Server) -> anyhow::Result<Client> {
    Ok(TreesClient::new(server.connect().await?).max_decoding_message_size(MAX_ANSWER_BYTES))
}

/// Prints a bulk change that was started, or watches it.
async fn started(args: &Change, bulk: pb::BulkChange) -> anyhow::Result<bool> {
    if args.watch {
        let operator = bulk::connect(&args.server).await?;
        return bulk::watch(&operator, bulk, args.json).await;
    }
    if args.json {
        print(bulk::json(&bulk))?;
    } else {
        print(format_args!(
            "bulk change {} has begun: taskd bulk show {} --watch",
            bulk.id, bulk.id
        ))?;
    }
    Ok(true)
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = connect(&args.server).await?;
    let state = match args.state {
        None => pb::TreeState::Unspecified,
        Some(State::Open) => pb::TreeState::Open,
        Some(State::Done) => pb::TreeState::Done,
        Some(State::Failed) => pb::TreeState::Failed,
    };
    // One extra entry shows whether the list goes on.
    let request = pb::ListTreesRequest {
        queue: args.queue.clone().unwrap_or_default(),
        state: state.into(),
        since: None,
        limit: MOST.min(args.limit + 1),
        cursor: String::new(),
    };
    let mut trees = patiently(async || client.clone().list_trees(request.clone()).await)
        .await?
        .into_inner()
        .trees;
    if trees.len() > args.limit as usize {
        trees.pop();
        say_more(args.limit, "--limit");
    }
    if args.json {
        trees.iter().try_for_each(|tree| print_one(json(tree)))?;
        return Ok(());
    }
    let mut table = print::table([
        "ID",
        "QUEUE",
        "STATE",
        "OPENED",
        "TASKS",
        "OPEN",
        "COMPLETED",
        "DEAD",
        "CANCELLED",
        "LETTERS",
    ]);
    for tree in &trees {
        let opened = tree.opened_at.map(|at| at.to_string()).unwrap_or_default();
        let counts = [
            tree.tasks,
            tree.open,
            tree.completed,
            tree.dead,
            tree.cancelled,
            tree.letters,
        ];
        let mut row = vec![
            tree.id.clone(),
            printable(&tree.queue),
            state_of(tree.state()).to_owned(),
            opened,
        ];
        row.extend(counts.map(|count| count.to_string()));
        table.add_row(row);
    }
    print::print_table(&table)?;
    Ok(())
}

/// What is printed of each change.
#[derive(Clone, Copy, PartialEq)]
enum Says {
    Nothing,
    Lines,
    Json,
}

/// Follows a tree to its end, over restarts of taskd. Returns it as it was last; `None`: there is no
/// such tree.
async fn follow(
    server: &Server,
    id: &str,
    says: Says,
    timeout: Option<Duration>,
) -> anyhow::Result<Option<pb::Tree>> {
    let taskd = server.connect_for_long_calls().await?;
    let deadline = timeout.map(|timeout| tokio::time::Instant::now() + timeout);
    let mut last = None;
    let mut waits = WAITS.build();
    let mut heard = Instant::now();
    loop {
        let opened = Instant::now();
        let following = follow_once(&taskd, id, says, &mut last);
        let ended = match deadline {
            None => following.await?,
            Some(deadline) => match tokio::time::timeout_at(deadline, following).await {
                Ok(ended) => ended?,
                Err(_elapsed) => return Ok(last),
            },
        };
        let Some(status) = ended else {
            return Ok(last);
        };
        if status.code() == Code::NotFound {
            say(format_args!("taskd: {}", printable(&client::said(&status))));
            return Ok(None);
        }
        if !is_transient(&status) {
            bail!("{}", client::said(&status));
        }
        if opened.elapsed() > WAS_OPEN {
            waits = WAITS.build();
            heard = Instant::now();
        }
        match waits.next().filter(|_| heard.elapsed() < GIVE_UP_AFTER) {
            Some(wait) => tokio::time::sleep(wait).await,
            None => bail!(
                "gave up: no word from taskd for a minute: {}",
                client::said(&status)
            ),
        }
    }
}

/// Follows a tree until it has ended (`None`), or until the stream breaks.
async fn follow_once(
    taskd: &Taskd,
    id: &str,
    says: Says,
    last: &mut Option<pb::Tree>,
) -> anyhow::Result<Option<Status>> {
    let request = pb::WatchTreeRequest { id: id.to_owned() };
    let mut trees = match TreesClient::new(taskd.clone()).watch_tree(request).await {
        Ok(trees) => trees.into_inner(),
        Err(status) => return Ok(Some(status)),
    };
    loop {
        match trees.message().await {
            Ok(Some(tree)) => {
                // A stream that was opened again begins with the tree as it is.
                if last.as_ref() != Some(&tree) {
                    match says {
                        Says::Nothing => {}
                        Says::Lines => print_one(line(&tree))?,
                        Says::Json => print_one(json(&tree))?,
                    }
                }
                let is_open = tree.state() == pb::TreeState::Open;
                *last = Some(tree);
                if !is_open {
                    return Ok(None);
                }
            }
            Ok(None) => return Ok(Some(Status::unavailable("taskd ended the watch"))),
            Err(status) => return Ok(Some(status)),
        }
    }
}

fn is_done(tree: Option<&pb::Tree>) -> bool {
    tree.is_some_and(|tree| tree.state() == pb::TreeState::Done)
}

pub(super) fn state_of(state: pb::TreeState) -> &'static str {
    match state {
        pb::TreeState::Open => "OPEN",
        pb::TreeState::Done => "DONE",
        pb::TreeState::Failed => "FAILED",
        pb::TreeState::Unspecified => "UNKNOWN",
    }
}

fn on_dead_of(tree: &pb::Tree) -> &'static str {
    match tree.on_dead() {
        pb::TreeOnDead::Count | pb::TreeOnDead::Unspecified => "count",
        pb::TreeOnDead::Ignore => "ignore",
        pb::TreeOnDead::Hold => "hold",
    }
}

/// One line about a tree.
fn line(tree: &pb::Tree) -> String {
    let state = state_of(tree.state());
    let open = HumanCount(tree.open);
    let tasks = HumanCount(tree.tasks);
    let mut line = format!("{state}  {open} of {tasks} tasks unfinished");
    for (count, what) in [
        (tree.held, "hold it"),
        (tree.dead, "dead"),
        (tree.cancelled, "cancelled"),
        (tree.letters, "became letters"),
        (tree.joins, "joins wait"),
    ] {
        if count > 0 {
            line.push_str(&format!(", {} {what}", HumanCount(count)));
        }
    }
    if tree.epoch > 0 {
        line.push_str(&format!(", epoch {}", tree.epoch));
    }
    line
}

/// Formats a tree as the HTTP API does.
fn json(tree: &pb::Tree) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| drop(object.insert(name.into(), value));
    set("id", tree.id.as_str().into());
    set("queue", tree.queue.as_str().into());
    set("state", state_of(tree.state()).into());
    set("epoch", tree.epoch.into());
    for (name, count) in [
        ("tasks", tree.tasks),
        ("open", tree.open),
        ("held", tree.held),
        ("completed", tree.completed),
        ("dead", tree.dead),
        ("cancelled", tree.cancelled),
        ("letters", tree.letters),
        ("late", tree.late),
        ("joins", tree.joins),
    ] {
        set(name, count.into());
    }
    set("cancelling", tree.cancelling.into());
    set("on_dead", on_dead_of(tree).into());
    if !tree.then.is_empty() {
        set("then", tree.then.as_str().into());
    }
    for (name, at) in [
        ("deadline", tree.deadline),
        ("opened_at", tree.opened_at),
        ("ended_at", tree.ended_at),
    ] {
        if let Some(at) = at {
            set(name, at.to_string().into());
        }
    }
    if !tree.queues.is_empty() {
        let queue = |queue: &pb::TreeQueue| {
            json!({
                "queue": queue.queue,
                "unfinished": queue.unfinished,
                "completed": queue.completed,
                "dead": queue.dead,
                "cancelled": queue.cancelled,
            })
        };
        set("queues", tree.queues.iter().map(queue).collect());
        set("at_least", tree.at_least.into());
    }
    if !tree.waits_for.is_empty() {
        let task = |task: &pb::Task| {
            json!({
                "id": task.id,
                "queue": task.queue,
                "key": String::from_utf8_lossy(&task.key),
                "status": task_status(task.status).map_or("UNKNOWN", TaskStatus::as_str),
            })
        };
        let mut waits_for: Vec<Value> = tree.waits_for.iter().map(task).collect();
        for (task, reason) in waits_for.iter_mut().zip(&tree.reasons) {
            for (name, text) in [("says", &reason.says), ("next", &reason.next)] {
                if !text.is_empty() {
                    task[name] = text.as_str().into();
                }
            }
        }
        set("waits_for", waits_for.into());
    }
    object.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_a_tree_waits_for() {
        let tree = pb::Tree {
            state: pb::TreeState::Open.into(),
            tasks: 1200,
            open: 3,
            held: 1,
            dead: 1,
            epoch: 2,
            ..Default::default()
        };
        assert_eq!(
            line(&tree),
            "OPEN  3 of 1,200 tasks unfinished, 1 hold it, 1 dead, epoch 2"
        );
        assert_eq!(json(&tree)["on_dead"], "count");
        assert!(json(&tree).get("queues").is_none());
    }
}
