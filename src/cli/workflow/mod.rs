//! `taskd workflow`: checks, deploys, lists, shows, deletes and runs definitions of workflows.

mod file;
mod run;

use std::{collections::BTreeSet, path::PathBuf};

use clap::{Args, Subcommand};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use url::form_urlencoded;

use self::file::{deploy_text, name_of, read_text, say_mistakes};
use super::{
    address::Server,
    ask::{ask, ask_with, printable},
    print::{self, print, print_one},
    start::workflow_path,
};
use crate::workflow::definition::{Definition, Mistake, ReadDefinition, Task, TaskKind};

/// Check, deploy, list, show, delete and run workflows: the Open Workflow Specification, DSL 1.0, in
/// YAML or JSON
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd workflow check order.yaml              all mistakes, with line and column
  taskd workflow check --json flows/*.yaml     the same as JSON, for an editor
  taskd workflow deploy order.yaml             from now on; a version never changes
  taskd workflow list                          all versions of all workflows
  taskd workflow show shop/order/1.0.0         the definition, as JSON
  taskd execution start shop/order             start the latest version
  taskd workflow run order.yaml                run it once, without a server

Exit code: 0, or 1 if a file has mistakes or there is no such workflow, 2 if a file cannot be read, or the server \
cannot be reached or refuses the request. Those of run are in its help."
)]
pub struct Workflow {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(Check),
    Deploy(Deploy),
    List(List),
    Show(Show),
    Delete(Delete),
    Run(run::Run),
}

/// Name all mistakes of definitions
#[derive(Args)]
struct Check {
    /// Definitions in YAML or JSON
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print a JSON object for each mistake
    #[arg(long)]
    json: bool,
}

/// Deploy definitions: a version that is there already with the same text stays as it is
#[derive(Args)]
struct Deploy {
    /// Definitions in YAML or JSON
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Only say whether taskd would take them
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    server: Server,
}

/// List the workflows that are deployed
#[derive(Args)]
struct List {
    /// Only of this namespace
    #[arg(long)]
    namespace: Option<String>,
    /// Print a JSON object for each version
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

/// Show a version of a workflow with its definition, as a JSON object
#[derive(Args)]
struct Show {
    /// NAMESPACE/NAME/VERSION, or NAMESPACE/NAME for the latest
    workflow: String,
    /// Print the definition alone
    #[arg(long)]
    text: bool,
    #[command(flatten)]
    server: Server,
}

/// Delete a version of which no execution runs
#[derive(Args)]
struct Delete {
    /// NAMESPACE/NAME/VERSION
    workflow: String,
    #[command(flatten)]
    server: Server,
}

/// Does it. Returns the exit code.
pub(super) async fn run(args: Workflow) -> anyhow::Result<u8> {
    match args.command {
        Command::Run(run) => Box::pin(run::run(run)).await,
        other => Ok(u8::from(!run_one(other).await?)),
    }
}

/// Does what is no run. False if a file has mistakes, or there is no such workflow.
async fn run_one(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Run(_) => Ok(false),
        Command::Check(check) => self::check(&check),
        Command::Deploy(deploy) => self::deploy(&deploy).await,
        Command::List(list) => self::list(&list).await,
        Command::Show(show) => {
            let server = show.server.port()?;
            let path = workflow_path(&show.workflow, "")?;
            let Some((_, workflow)) = ask::<Value>(&server, &path).await? else {
                return Ok(false);
            };
            match workflow["text"].as_str().filter(|_| show.text) {
                Some(text) => print(text.strip_suffix('\n').unwrap_or(text))?,
                None => print(format_args!("{workflow:#}"))?,
            }
            Ok(true)
        }
        Command::Delete(delete) => {
            let server = delete.server.port()?;
            let path = workflow_path(&delete.workflow, "")?;
            let answer = ask_with(&server, Method::DELETE, &path, None).await?;
            Ok(answer.is_some())
        }
    }
}

async fn deploy(deploy: &Deploy) -> anyhow::Result<bool> {
    let server = deploy.server.port()?;
    let mut is_right = true;
    for file in &deploy.files {
        let text = read_text(file)?;
        let deployed = deploy_text(&server, file, text, deploy.dry_run).await?;
        let Some((status, workflow)) = deployed else {
            is_right = false;
            continue;
        };
        let became = match status {
            _ if deploy.dry_run => "has no mistakes",
            StatusCode::CREATED => "is deployed",
            _ => "was deployed already",
        };
        let name = printable(&name_of(&workflow));
        print(format_args!("workflow {name} {became}"))?;
    }
    Ok(is_right)
}

#[derive(Deserialize)]
struct Page {
    workflows: Vec<Value>,
    #[serde(default)]
    next: String,
}

async fn list(list: &List) -> anyhow::Result<bool> {
    let server = list.server.port()?;
    let mut table = print::table(["workflow", "version", "deployed by", "at"]);
    let mut cursor = String::new();
    loop {
        let mut query = form_urlencoded::Serializer::new(String::new());
        if let Some(namespace) = &list.namespace {
            query.append_pair("namespace", namespace);
        }
        if !cursor.is_empty() {
            query.append_pair("cursor", &cursor);
        }
        let path = format!("/v1/workflows?{}", query.finish());
        let Some((_, Page { workflows, next })) = ask(&server, &path).await? else {
            return Ok(false);
        };
        for workflow in workflows {
            if list.json {
                print_one(workflow)?;
                continue;
            }
            let text = |name: &str| printable(workflow[name].as_str().unwrap_or_default());
            table.add_row([
                format!("{}/{}", text("namespace"), text("name")),
                text("version"),
                text("deployed_by"),
                text("deployed_at"),
            ]);
        }
        if next.is_empty() {
            break;
        }
        cursor = next;
    }
    if !list.json {
        print::print_table(&table)?;
    }
    Ok(true)
}

/// Names all mistakes of files. False if there are some.
fn check(check: &Check) -> anyhow::Result<bool> {
    let mut is_right = true;
    for file in &check.files {
        match Definition::read(&read_text(file)?) {
            Ok(ReadDefinition { definition, .. }) if !check.json => {
                print(summary(&definition))?;
            }
            Ok(_) => {}
            Err(mistakes) if check.json => {
                is_right = false;
                for mistake in mistakes {
                    let Mistake {
                        line,
                        column,
                        pointer,
                        says,
                    } = mistake;
                    print(json!({
                        "file": file.to_string_lossy(), "line": line, "column": column, "pointer": pointer,
                        "message": says,
                    }))?;
                }
            }
            Err(mistakes) => {
                is_right = false;
                say_mistakes(file, mistakes);
            }
        }
    }
    Ok(is_right)
}

/// What a definition without mistakes has: a function that is misspelled shows as a queue.
fn summary(definition: &Definition) -> String {
    let document = &definition.document;
    let mut tasks = 0;
    let mut queues = BTreeSet::new();
    let functions = definition.use_.functions.values();
    for task in definition.do_.iter().chain(functions) {
        count(task, definition, &mut tasks, &mut queues);
    }
    let queues = match queues.len() {
        0 => String::new(),
        1 => format!(", queue {}", queues.into_iter().collect::<String>()),
        _ => format!(
            ", queues {}",
            queues.into_iter().collect::<Vec<_>>().join(", ")
        ),
    };
    format!(
        "workflow {}/{} {}: {tasks} tasks{queues}, no mistakes",
        document.namespace, document.name, document.version
    )
}

fn count(task: &Task, definition: &Definition, tasks: &mut usize, queues: &mut BTreeSet<String>) {
    *tasks += 1;
    if let TaskKind::CallFunction(call) = &task.kind
        && !definition.use_.functions.contains_key(&call.function)
    {
        let queue = call.step.queue.as_ref();
        let queue = queue.map_or(call.function.as_str(), |queue| queue.as_str());
        queues.insert(queue.to_owned());
    }
    for inner in task.inner() {
        count(inner, definition, tasks, queues);
    }
}
