//! `taskd workflow run`: a taskd of its own, and one execution.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::file::{deploy_text, name_of, read_text, say_mistakes};
use crate::{
    cli::{
        ask::{ask_with, printable},
        http::HttpPort,
        own::{Own, Signals, Start, setting},
        print::{print, say},
        start::{begin, execution_path, outcome, read_input, when_ended, workflow_path},
    },
    workflow::definition::Definition,
};

/// The exit code of a run whose file has mistakes.
const MISTAKES: u8 = 2;
/// How long a cancelled execution may take to end.
const CANCEL: Duration = Duration::from_secs(10);

/// Run a definition once: a taskd of its own, and one execution
#[derive(Args)]
#[command(after_help = "\
The steps are tasks of its queues. stderr has the address at which workers get them:
  TASKD_URL=http://127.0.0.1:40123 taskd work pay -- ./pay

Examples:
  taskd workflow run order.yaml --input order.json
  echo '{\"total\": 21}' | taskd workflow run order.yaml --input - | jq .

stdout has the output as JSON. The taskd and all its data are removed at the end. Ctrl-C cancels the execution, and \
ends it.

Exit code: 0 if the execution completed, 3 if it faulted or was cancelled, 2 if the file has mistakes, or something \
cannot be read or started.")]
pub(super) struct Run {
    /// Definition in YAML or JSON
    file: PathBuf,
    /// The input: a file of JSON, - for stdin, or {…} or […] itself [default: null]
    #[arg(long, value_name = "FILE")]
    input: Option<String>,
    /// A setting of the taskd, by its key in the configuration file: workflow_call_allow=127.0.0.1
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
}

/// Runs it. Returns the exit code.
pub(super) async fn run(args: Run) -> anyhow::Result<u8> {
    let text = read_text(&args.file)?;
    if let Err(mistakes) = Definition::read(&text) {
        say_mistakes(&args.file, mistakes);
        return Ok(MISTAKES);
    }
    let input = args.input.as_deref().map(read_input).transpose()?;
    let mut signals = Signals::listen()?;
    let mut own = Own::start(Start {
        settings: &args.settings,
        ..Start::default()
    })
    .await?;
    let server = own.server()?;
    let at = format!("{} (gRPC {})", own.url(), own.addresses.grpc);
    let mut id = String::new();
    let work = execute(&args.file, text, input, (&server, &at), &mut id);
    let ended = match own.unless_stopped(&mut signals, work).await {
        Ok(None) => tokio::select! {
            cancelled = cancel(&server, &id) => cancelled.map(Some),
            () = signals.another() => Err(anyhow::anyhow!("stopped before the execution had ended")),
        },
        worked => worked.map(Option::flatten),
    };
    let stopped = own.stop().await;
    let Some(execution) = ended? else {
        return Ok(MISTAKES);
    };
    stopped?;
    let code = outcome(&execution);
    if code == 0 {
        print(&execution["output"])?;
    }
    Ok(code)
}

/// Deploys the file, and waits for the end of one execution. `None`: the file has mistakes, which
/// stderr names.
async fn execute(
    file: &Path,
    text: String,
    input: Option<Value>,
    (server, at): (&HttpPort, &str),
    id: &mut String,
) -> anyhow::Result<Option<Value>> {
    let Some((_, deployed)) = deploy_text(server, file, text, false).await? else {
        return Ok(None);
    };
    let name = name_of(&deployed);
    let path = workflow_path(&name, ":start")?;
    let (_, execution) = begin(server, &path, input, None)
        .await?
        .context("the workflow is gone")?;
    *id = execution["id"].as_str().unwrap_or_default().to_owned();
    let queues = deployed["queues"].as_array().into_iter().flatten();
    let queues: Vec<String> = queues.filter_map(Value::as_str).map(printable).collect();
    let workers = match queues.len() {
        0 => String::new(),
        _ => format!(", for workers of {}", queues.join(", ")),
    };
    say(format_args!(
        "taskd: workflow {} runs at {at}{workers}",
        printable(&name)
    ));
    let (_, ended) = when_ended(server, id, None)
        .await?
        .context("the execution is gone")?;
    Ok(Some(ended))
}

/// Cancels the execution, and waits for its end.
async fn cancel(server: &HttpPort, id: &str) -> anyhow::Result<Value> {
    if id.is_empty() {
        bail!("stopped before the execution had begun");
    }
    // It may have ended before.
    ask_with(server, Method::POST, &execution_path(id, ":cancel"), None)
        .await
        .ok();
    let (_, ended) = when_ended(server, id, Some(Instant::now() + CANCEL))
        .await?
        .context("the execution is gone")?;
    Ok(ended)
}
