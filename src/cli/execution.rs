//! `taskd execution`: starts, lists, shows and cancels executions of workflows.

use std::time::Instant;

use clap::{Args, Subcommand};
use hyper::Method;
use serde::Deserialize;
use serde_json::Value;
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{ask, ask_with, get, printable, read},
    print::{self, print, print_one, say_more},
    start::{begin, execution_path, outcome, read_input, when_ended, workflow_path},
};
use crate::config::Time;

/// Start, list, show and cancel executions of workflows
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd execution start shop/order --input order.json    start the latest version
  taskd execution start shop/order --id order-17         again with this id: the same execution
  taskd execution start shop/order --wait 30s            print it when it has ended
  taskd execution list --workflow shop/order --status waiting
  taskd execution show order-17                          what it waits for, its output or its error
  taskd execution history order-17                       all that happened in it
  taskd execution cancel order-17

Exit code: 0; of start with --wait: 0 if the execution completed, 3 if it faulted or was cancelled, 1 if it has not \
ended in this time. 1 if there is no such workflow or execution, 2 if the server cannot be reached or refuses the \
request."
)]
pub struct Execution {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Start(Start),
    List(List),
    Show(One),
    History(History),
    Cancel(One),
}

/// Start an execution, and print it
#[derive(Args)]
struct Start {
    /// NAMESPACE/NAME for the latest version, or NAMESPACE/NAME/VERSION
    workflow: String,
    /// The input: a file of JSON, - for stdin, or {…} or […] itself [default: null]
    #[arg(long, value_name = "FILE")]
    input: Option<String>,
    /// Your own id: a start with it again is the same execution
    #[arg(long)]
    id: Option<String>,
    /// Print it when it has ended, at the latest after this time
    #[arg(long, value_name = "TIME")]
    wait: Option<Time>,
    #[command(flatten)]
    server: Server,
}

/// List executions, the newest first
#[derive(Args)]
struct List {
    /// Only of this workflow: NAMESPACE/NAME
    #[arg(long)]
    workflow: Option<String>,
    /// Only with this status: pending, running, waiting, cancelled, faulted or completed
    #[arg(long)]
    status: Option<String>,
    /// Only started from this time on, in RFC 3339
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only started before this time, in RFC 3339
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// How many
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print a JSON object for each execution
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

/// An execution
#[derive(Args)]
struct One {
    /// Its id, or the id that was given at its start
    id: String,
    #[command(flatten)]
    server: Server,
}

/// Print all that happened in an execution: a JSON object for each event
#[derive(Args)]
struct History {
    /// Its id, or the id that was given at its start
    id: String,
    /// Only events after the one of this number
    #[arg(long, value_name = "N", default_value_t = 0)]
    after: u64,
    #[command(flatten)]
    server: Server,
}

/// Does it. Returns the exit code.
pub(super) async fn run(args: Execution) -> anyhow::Result<u8> {
    match args.command {
        Command::Start(start) => self::start(start).await,
        other => Ok(u8::from(!run_one(other).await?)),
    }
}

/// Does what is no start. False if there is no such execution.
async fn run_one(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Start(_) => Ok(false),
        Command::List(list) => self::list(&list).await,
        Command::Show(One { id, server }) => {
            let server = server.port()?;
            let Some((_, execution)) = ask::<Value>(&server, &execution_path(&id, "")).await?
            else {
                return Ok(false);
            };
            print(format_args!("{execution:#}"))?;
            Ok(true)
        }
        Command::History(history) => self::history(&history).await,
        Command::Cancel(One { id, server }) => {
            let server = server.port()?;
            let path = execution_path(&id, ":cancel");
            let Some(body) = ask_with(&server, Method::POST, &path, None).await? else {
                return Ok(false);
            };
            print(String::from_utf8_lossy(&body))?;
            Ok(true)
        }
    }
}

async fn start(start: Start) -> anyhow::Result<u8> {
    let until = start.wait.map(|Time(wait)| Instant::now() + wait);
    let input = start.input.as_deref().map(read_input).transpose()?;
    let server = start.server.port()?;
    let path = workflow_path(&start.workflow, ":start")?;
    let begun = begin(&server, &path, input, start.id).await?;
    let Some((mut body, mut execution)) = begun else {
        return Ok(1);
    };
    // The start itself does not wait: if its connection broke, nobody would know the id.
    if until.is_some() {
        let id = execution["id"].as_str().unwrap_or_default();
        let Some(ended) = when_ended(&server, id, until).await? else {
            return Ok(1);
        };
        (body, execution) = ended;
    }
    print(String::from_utf8_lossy(&body))?;
    Ok(until.map_or(0, |_| outcome(&execution)))
}

#[derive(Deserialize)]
struct Page {
    executions: Vec<Value>,
}

async fn list(list: &List) -> anyhow::Result<bool> {
    let server = list.server.port()?;
    let mut query = form_urlencoded::Serializer::new(String::new());
    let filters = [
        ("workflow", &list.workflow),
        ("status", &list.status),
        ("since", &list.since),
        ("until", &list.until),
    ];
    for (name, value) in filters {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    // One more shows whether the list goes on.
    let limit = 1000.min(list.limit + 1);
    query.append_pair("limit", &limit.to_string());
    let path = format!("/v1/executions?{}", query.finish());
    let Some((_, Page { mut executions })) = ask(&server, &path).await? else {
        return Ok(false);
    };
    if executions.len() > list.limit as usize {
        executions.pop();
        say_more(list.limit, "--limit");
    }
    if list.json {
        executions.iter().try_for_each(print_one)?;
        return Ok(true);
    }
    let mut table = print::table(["id", "given id", "workflow", "status", "started", "ended"]);
    for execution in &executions {
        let text = |name: &str| printable(execution[name].as_str().unwrap_or_default());
        let (namespace, name, version) = (text("namespace"), text("name"), text("version"));
        table.add_row([
            text("id"),
            text("given_id"),
            format!("{namespace}/{name}/{version}"),
            text("status"),
            text("started_at"),
            text("ended_at"),
        ]);
    }
    print::print_table(&table)?;
    Ok(true)
}

async fn history(history: &History) -> anyhow::Result<bool> {
    let server = history.server.port()?;
    // An execution that is not there ends the command with 1.
    let Some((_, execution)) = ask::<Value>(&server, &execution_path(&history.id, "")).await?
    else {
        return Ok(false);
    };
    drop(execution);
    let path = execution_path(&history.id, "/history");
    let body = get(&server, &format!("{path}?after={}", history.after)).await?;
    for line in body.split(|byte| *byte == b'\n') {
        if !line.is_empty() {
            let event: Value = read(&server, line)?;
            print_one(event)?;
        }
    }
    Ok(true)
}
