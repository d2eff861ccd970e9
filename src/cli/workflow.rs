//! `taskd workflow`: checks definitions of workflows.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::json;

use super::{
    ask::printable,
    print::{print, say},
};
use crate::workflow::definition::{
    Definition, MAX_DEFINITION_BYTES, Mistake, ReadDefinition, Task, TaskKind,
};

/// Check definitions of workflows: the Open Workflow Specification, DSL 1.0, in YAML or JSON
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd workflow check order.yaml              all mistakes, with line and column
  taskd workflow check --json flows/*.yaml     the same as JSON, for an editor

This version checks definitions and runs none yet.
Exit code: 0, or 1 if a file has mistakes, 2 if a file cannot be read."
)]
pub struct Workflow {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(Check),
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

/// Does it. False if a file has mistakes.
pub(super) fn run(args: Workflow) -> anyhow::Result<bool> {
    let Command::Check(check) = args.command;
    let mut is_right = true;
    for file in &check.files {
        let shown = file.display();
        match read(file)? {
            Ok(ReadDefinition { definition, .. }) if !check.json => {
                print(summary(&definition))?;
            }
            Ok(_) => {}
            Err(mistakes) => {
                is_right = false;
                for mistake in mistakes {
                    if check.json {
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
                    } else {
                        say(printable(&format!("{shown}:{mistake}")));
                    }
                }
            }
        }
    }
    Ok(is_right)
}

/// Reads a file. Fails if it cannot be read; what is wrong in it is no failure.
fn read(file: &PathBuf) -> anyhow::Result<Result<ReadDefinition, Vec<Mistake>>> {
    let shown = file.display();
    let bytes = fs::metadata(file).with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() > MAX_DEFINITION_BYTES as u64 {
        bail!("{shown} is larger than a definition may be: {MAX_DEFINITION_BYTES} bytes");
    }
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    Ok(Definition::read(&text))
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
