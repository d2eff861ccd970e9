//! `taskd topology`: checks, draws, applies and shows topologies.

mod file;
mod run;
mod stats;
mod test;

use std::{fs, io::Write as _, path::PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use hyper::Method;
use serde::Deserialize;
use serde_json::Value;

use self::file::{apply_to, path, read};
use super::{
    address::Server,
    ask::{ask, ask_with, printable},
    print::{self, print, say},
};
use crate::model::TopologyName;

/// Check, test, draw, apply, show and run topologies: graphs of stages, whose queues are TOPOLOGY.STAGE
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd topology new words                            write words.toml, which counts words
  ls *.md | taskd topology run words.toml --input - --exit-when-done
  taskd topology check crawl.toml                     all mistakes, with line and column
  taskd topology test crawl.toml                      its [[test]]s, without a server
  taskd topology graph crawl.toml | dot -Tsvg > crawl.svg
  taskd topology apply crawl.toml                     from now on; the old file again goes back
  taskd insert crawl.fetch --key https://example.org/
  taskd topology show crawl                           the settings in force, as JSON
  taskd topology stats crawl                          the tasks of each stage, and its feeds
  taskd topology show crawl --text | diff - crawl.toml

Exit code: 0, or 1 if the file has mistakes or there is no such topology, 2 if the server cannot be reached or refuses \
the request."
)]
pub struct Topology {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    New(New),
    Check(Check),
    Graph(Graph),
    Apply(Apply),
    Test(test::Test),
    Run(run::Run),
    List(List),
    Show(Show),
    Stats(stats::Stats),
    Delete(Delete),
}

/// Write a small topology to NAME.toml
#[derive(Args)]
struct New {
    /// Name of the topology
    #[arg(default_value = "words")]
    name: String,
}

/// Name all mistakes of a file
#[derive(Args)]
struct Check {
    /// File of a topology
    file: PathBuf,
}

/// Draw the graph of a file
#[derive(Args)]
struct Graph {
    /// File of a topology
    file: PathBuf,
    /// The language of the drawing
    #[arg(long, value_enum, default_value_t = Format::Dot)]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// Graphviz
    Dot,
    /// Mermaid, for Markdown
    Mermaid,
}

/// Apply a file: running processes follow it within a second
#[derive(Args)]
struct Apply {
    /// File of a topology
    file: PathBuf,
    #[command(flatten)]
    server: Server,
}

/// List the topologies
#[derive(Args)]
struct List {
    /// Print a JSON object for each topology
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

/// Show a topology with the settings in force, as a JSON object
#[derive(Args)]
struct Show {
    /// Name of the topology
    topology: String,
    /// Print the file alone
    #[arg(long)]
    text: bool,
    #[command(flatten)]
    server: Server,
}

/// Delete a topology whose stages have no unfinished tasks
#[derive(Args)]
struct Delete {
    /// Name of the topology
    topology: String,
    #[command(flatten)]
    server: Server,
}

/// Does it. Returns the exit code.
pub(super) async fn run(args: Topology) -> anyhow::Result<u8> {
    match args.command {
        Command::Run(run) => Box::pin(run::run(run)).await,
        other => Ok(u8::from(!run_one(other).await?)),
    }
}

/// Does what is no run. False if the file has mistakes, or there is no such topology.
async fn run_one(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Run(_) => Ok(false),
        Command::Test(test) => test::run(test).await,
        Command::New(new) => self::new(&new.name).map(|()| true),
        Command::Check(Check { file }) => {
            let Some((_, plan)) = read(&file)? else {
                return Ok(false);
            };
            for note in &plan.notes {
                say(format_args!("{}:{note}", file.display()));
            }
            let stages = plan.stages.len();
            let edges: usize = plan.stages.iter().map(|stage| stage.edges.len()).sum();
            print(format_args!(
                "topology {}: {stages} stages, {edges} edges, no mistakes",
                plan.name
            ))?;
            Ok(true)
        }
        Command::Graph(Graph { file, format }) => {
            let Some((_, plan)) = read(&file)? else {
                return Ok(false);
            };
            let graph = match format {
                Format::Dot => plan.to_dot(),
                Format::Mermaid => plan.to_mermaid(),
            };
            print(graph.trim_end())?;
            Ok(true)
        }
        Command::Apply(apply) => self::apply(&apply).await,
        Command::List(list) => self::list(list).await,
        Command::Show(show) => {
            let server = show.server.port()?;
            let Some((_, topology)) = ask::<Value>(&server, &path(&show.topology)).await? else {
                return Ok(false);
            };
            match topology["text"].as_str().filter(|_| show.text) {
                Some(text) => print(text.strip_suffix('\n').unwrap_or(text))?,
                None => print(format_args!("{topology:#}"))?,
            }
            Ok(true)
        }
        Command::Stats(args) => stats::stats(&args).await,
        Command::Delete(delete) => {
            let server = delete.server.port()?;
            let path = path(&delete.topology);
            let answer = ask_with(&server, Method::DELETE, &path, None).await?;
            Ok(answer.is_some())
        }
    }
}

fn new(name: &str) -> anyhow::Result<()> {
    let name = TopologyName::new(name)?;
    let file = format!("{name}.toml");
    let text = format!(
        "name = \"{name}\"\n\
         [stage.read]\ncommand = [\"cat\", \"--\", \"{{key}}\"]\n\
         [stage.count]\nfrom = \"read\"\ncommand = [\"wc\", \"-w\"]\n"
    );
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&file)
        .and_then(|mut created| created.write_all(text.as_bytes()))
        .with_context(|| format!("cannot make {file}"))?;
    print(format_args!(
        "{file}: taskd topology run {file} --input FILE"
    ))?;
    Ok(())
}

async fn apply(apply: &Apply) -> anyhow::Result<bool> {
    let Some((text, plan)) = read(&apply.file)? else {
        return Ok(false);
    };
    let server = apply.server.port()?;
    let Some(applied) = apply_to(&server, &plan.name, &text).await? else {
        return Ok(false);
    };
    print(format_args!(
        "topology {} is in force, version {}",
        plan.name, applied["version"]
    ))?;
    Ok(true)
}

#[derive(Deserialize)]
struct Topologies {
    topologies: Vec<Value>,
}

async fn list(list: List) -> anyhow::Result<bool> {
    let server = list.server.port()?;
    let Some((_, Topologies { topologies })) = ask(&server, "/v1/topologies").await? else {
        return Ok(false);
    };
    if list.json {
        for topology in topologies {
            print(topology)?;
        }
        return Ok(true);
    }
    let mut table = print::table(["name", "version", "stages", "applied by", "at"]);
    for topology in &topologies {
        let text = |name: &str| printable(topology[name].as_str().unwrap_or_default());
        let stages = topology["stages"].as_array().map_or(0, Vec::len);
        table.add_row([
            text("name"),
            topology["version"].to_string(),
            stages.to_string(),
            text("applied_by"),
            text("applied_at"),
        ]);
    }
    print::print_table(&table)?;
    Ok(true)
}
