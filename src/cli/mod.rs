//! Parses the command line into the command to run, or into the reason why it is refused.

mod address;
mod ask;
pub mod bench;
mod books;
pub mod bulk;
pub mod change;
mod client;
pub mod dead;
mod dump;
mod environment;
mod events;
mod execution;
pub mod explain;
mod fsck;
mod http;
pub mod insert;
pub mod limits;
pub mod load;
mod manual;
mod mistake;
mod named;
mod own;
mod patience;
mod print;
mod probe;
mod queues;
mod run;
mod start;
mod stats;
mod subscription;
pub mod task;
pub mod tasks;
mod token;
mod top;
mod topic;
mod topology;
mod tree;
mod trust;
mod values;
pub mod wait;
pub mod watch;
pub mod work;
pub mod workers;
mod workflow;

use std::{ffi::OsString, process::ExitCode};

use clap::{
    ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind,
    parser::ValueSource,
};

use self::print::say;
pub use self::run::run;
use crate::{
    app,
    config::{self, Loaded, Options, Origins, Settings},
};

/// Exit code for a wrong command line or configuration, and for a server that a command cannot
/// reach.
pub const USAGE: u8 = 2;

const EXAMPLES: &str = "\
Examples:
  taskd --pipelines all                       run everything in one process; needs nothing else
  taskd --pipelines tasks --config prod.toml  run one pipeline, with the backends of the file
  taskd insert crawl urls.txt                 insert one task per line
  taskd work crawl -- ./fetch {key}           run a command for each task
  taskd task crawl https://example.org/       show a task, its payload and its attempts
  taskd watch crawl                           show each change of a task or of a queue
  taskd wait crawl                            wait until nothing of a queue is unfinished
  taskd events --from now --follow            print the events of queues with events = true
  taskd topic read orders --follow            print the records of a topic
  taskd subscription list                     show what turns records into tasks, and what is left
  taskd topology apply crawl.toml             send what workers find to the next queues
  taskd workflow deploy order.yaml            let executions of a workflow start
  taskd execution list                        show executions of workflows, and how they ended
  taskd tree list                             show trees of tasks, and how they ended
  taskd explain crawl https://example.org/    say where a task is and what happens next
  taskd token create ci --roles insert        let a client call a taskd with auth = tokens
  taskd tasks crawl --status dead             list tasks, the newest first
  taskd dead list                             list what failed for good
  taskd stats                                 watch the queues of a running taskd
  taskd top                                   the same on a whole screen
  taskd workers                               list the workers: in hand, done, last heard
  taskd processes                             list the processes of taskd
  taskd books                                 count what came in, went out, and is held where
  taskd fsck                                  find where SQL, the bus and Redis do not agree
  taskd bench                                 measure a taskd of its own: tasks a second, latency
  taskd load                                  send it made-up work and count what becomes of it
  taskd check-config --config prod.toml       print the effective settings and their origins

Each flag is also an environment variable (--http-listen: TASKD_HTTP_LISTEN) and a key of the \
configuration file (http_listen). A flag overrides the environment, and the environment overrides \
the file. taskd.toml in the source documents every key.";

const HINT: &str = "\
taskd is a task queue for work that grows while it is being done.

Say which pipelines this process should run:

  taskd --pipelines all        everything in one process; try this first
  taskd --pipelines LIST       some of discovery, fanout, watchdog, tasks, workflow
  taskd --help                 all flags and commands
";

/// A task queue for work that grows while it is being done
#[derive(Parser)]
#[command(name = "taskd", version = env!("BUILD_VERSION"), after_help = EXAMPLES, max_term_width = 110)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Stop in order when stdin ends: a taskd of `taskd bench` outlives no benchmark, however that
    /// ends
    #[arg(long, hide = true)]
    stop_with_stdin: bool,
    #[command(subcommand)]
    command: Option<Subcommands>,
}

#[derive(Subcommand)]
enum Subcommands {
    #[command(flatten)]
    Client(Client),
    Migrate(Migrate),
    Partitions(Partitions),
    Token(token::Token),
    Acts(token::Acts),
    Events(events::Events),
    CheckConfig(CheckConfig),
}

/// The commands that need no settings of a taskd.
#[derive(Subcommand)]
pub enum Client {
    Insert(Box<insert::Insert>),
    Work(Box<work::Work>),
    Tasks(Box<tasks::Tasks>),
    Bulk(bulk::Bulk),
    Dead(dead::Dead),
    Task(task::Task),
    Subscription(subscription::Subscription),
    Topic(topic::Topic),
    Topology(topology::Topology),
    Workflow(workflow::Workflow),
    Execution(execution::Execution),
    Tree(tree::Tree),
    Watch(watch::Watch),
    Wait(wait::Wait),
    Workers(workers::Workers),
    Processes(workers::Processes),
    Explain(explain::Explain),
    Cancel(change::Cancel),
    Change(change::Change),
    Requeue(change::Requeue),
    Pause(change::Pause),
    Resume(change::Resume),
    Limits(limits::Limits),
    Bench(bench::Bench),
    Load(load::Load),
    #[command(visible_alias = "queues")]
    Stats(stats::Stats),
    Top(top::Top),
    Books(books::Books),
    Fsck(fsck::Fsck),
    Dump(dump::Dump),
    #[command(display_order = 100)]
    Completions(manual::Completions),
    #[command(display_order = 101)]
    Man(manual::Man),
}

/// Bring the database's schema up to date, and exit
#[derive(Args)]
struct Migrate {
    #[command(flatten)]
    options: Options,
}

/// Give the bus more partitions, and each queue as many shards, and exit; running processes notice
/// it
#[derive(Args)]
struct Partitions {
    /// The new number of partitions, 1 to 1024; never fewer than now
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(config::MOST_PARTITIONS)))]
    count: u32,
    #[command(flatten)]
    options: Options,
}

/// Print the effective settings as TOML (passwords hidden), and where each that is no default comes
/// from
#[derive(Args)]
struct CheckConfig {
    #[command(flatten)]
    options: Options,
}

/// The command that the user asks for.
pub enum Command {
    Run {
        loaded: Loaded,
        stop_with_stdin: bool,
    },
    Migrate(Settings),
    Partitions(Settings, u32),
    CheckConfig(Loaded),
    Token(token::Command, Settings),
    Acts(token::Acts, Settings),
    Events(events::Events, Settings),
    Client(Client),
}

/// Why taskd runs nothing. Shown to the user.
pub enum Refusal {
    /// The user asked for `--help` or `--version`.
    Asked(clap::Error),
    /// The user named neither a pipeline nor a command.
    NothingNamed,
    /// A mistake, in one line.
    Usage(String),
}

impl Refusal {
    /// Tells the user, and returns the exit code.
    pub fn show(self) -> ExitCode {
        match self {
            Self::Asked(text) => {
                // A reader that closed stdout has read enough.
                let _closed = text.print();
                ExitCode::SUCCESS
            }
            Self::NothingNamed => {
                say(HINT.trim_end());
                ExitCode::from(USAGE)
            }
            Self::Usage(line) => {
                say(format_args!("taskd: {line}"));
                ExitCode::from(USAGE)
            }
        }
    }
}

impl From<config::Error> for Refusal {
    fn from(error: config::Error) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Reads the command line, the environment and the configuration file.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, Refusal> {
    let args = asked(args.into_iter().collect());
    let refuse = |error: clap::Error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Refusal::Asked(error),
        // The message quotes what the user typed or pasted, so escape it for the terminal.
        _ => Refusal::Usage(ask::printable(&mistake::in_one_line(&error, &args))),
    };
    let matches = environment::without_empty(Cli::command())
        .try_get_matches_from(&args)
        .map_err(refuse)?;
    let cli = Cli::from_arg_matches(&matches).map_err(refuse)?;
    let load = |options| load(options, &matches);
    let all = Cli::command();
    let run = matches
        .subcommand_name()
        .and_then(|name| all.find_subcommand(name));
    if let Some(line) = run.and_then(|run| environment::overlooked(&all, run, variables())) {
        say(format_args!("taskd: {line}"));
    }
    Ok(match cli.command {
        Some(Subcommands::Client(client)) => {
            if let Client::Bench(bench) = &client {
                let is_given = |flag: &str| {
                    innermost(&matches).value_source(flag) == Some(ValueSource::CommandLine)
                };
                bench.check(is_given).map_err(Refusal::Usage)?;
            }
            Command::Client(client)
        }
        Some(Subcommands::Migrate(Migrate { options })) => {
            Command::Migrate(load(options)?.settings)
        }
        Some(Subcommands::Partitions(Partitions { count, options })) => {
            Command::Partitions(load(options)?.settings, count)
        }
        Some(Subcommands::Token(token::Token { mut command })) => {
            let settings = load(command.take_options())?.settings;
            Command::Token(command, settings)
        }
        Some(Subcommands::Acts(mut acts)) => {
            let settings = load(std::mem::take(&mut acts.options))?.settings;
            Command::Acts(acts, settings)
        }
        Some(Subcommands::Events(mut events)) => {
            let settings = load(std::mem::take(&mut events.options))?.settings;
            Command::Events(events, settings)
        }
        Some(Subcommands::CheckConfig(CheckConfig { options })) => {
            Command::CheckConfig(load(options)?)
        }
        None => {
            let loaded = load(cli.options)?;
            if loaded.settings.pipelines.is_empty() {
                return Err(Refusal::NothingNamed);
            }
            Command::Run {
                loaded,
                stop_with_stdin: cli.stop_with_stdin,
            }
        }
    })
}

/// Rewrites `taskd help COMMAND` to `taskd COMMAND --help`, and a lone `version` to `--version`.
fn asked(mut args: Vec<OsString>) -> Vec<OsString> {
    match args.get(1).and_then(|first| first.to_str()) {
        Some("help") => {
            args.remove(1);
            args.push("--help".into());
        }
        Some("version") if args.len() == 2 => args[1] = "--version".into(),
        _ => {}
    }
    args
}

/// Loads the settings from the command line, the environment and the configuration file.
fn load(options: Options, matches: &clap::ArgMatches) -> Result<config::Loaded, Refusal> {
    environment::check(&Cli::command(), variables()).map_err(Refusal::Usage)?;
    let vars = std::env::vars_os();
    let vars = vars
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let vars = vars.filter(|(_, value)| !value.is_empty());
    let options = Options {
        kafka: environment::kafka(vars),
        ..options
    };
    let origins = Origins::given(innermost(matches)).with_environment(&options.kafka);
    Ok(config::load(
        options,
        origins,
        app::PROPERTY_RULES,
        |name| std::env::var(name).ok(),
    )?)
}

/// The environment variables of this process.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, value)| {
        (
            name.to_string_lossy().into(),
            value.to_string_lossy().into(),
        )
    })
}

/// The whole command line, for completions and manual pages.
fn command_line() -> clap::Command {
    Cli::command()
}

fn innermost(mut matches: &ArgMatches) -> &ArgMatches {
    while let Some((_, inner)) = matches.subcommand() {
        matches = inner;
    }
    matches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Command, Refusal> {
        super::parse(
            std::iter::once("taskd")
                .chain(args.iter().copied())
                .map(OsString::from),
        )
    }

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
    }

    /// clap wraps paragraphs at the width of the terminal: a manual line break would leave single
    /// words on a line.
    #[test]
    fn helps_break_no_paragraph_and_their_examples_fit() {
        fn check(command: &clap::Command) {
            let text = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            let name = command.get_name();
            let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
            for (line, next) in text.lines().zip(text.lines().skip(1).chain([""])) {
                assert!(
                    is_text(line) || line.chars().count() <= 100,
                    "{name}: {line:?} is too long"
                );
                let is_broken = is_text(line) && is_text(next) && !next.starts_with("Exit code");
                assert!(!is_broken, "{name}: clap breaks {line:?}");
            }
            command
                .get_subcommands()
                .filter(|command| command.get_name() != "work")
                .for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn all_commands_of_a_server_can_wait_for_it() {
        fn check(command: &clap::Command, path: &str) -> usize {
            let path = format!("{path} {}", command.get_name());
            let has = |name: &str| {
                command
                    .get_arguments()
                    .any(|arg| arg.get_long() == Some(name))
            };
            let calls = has("server") && !path.contains("bench");
            assert_eq!(has("wait-for-server"), calls, "{path}");
            usize::from(calls)
                + command
                    .get_subcommands()
                    .map(|command| check(command, &path))
                    .sum::<usize>()
        }
        assert!(check(&Cli::command(), "") > 10);
    }

    #[test]
    fn pipelines_run_and_nothing_is_refused() {
        let run = parse(&["--pipelines", "all"]);
        assert!(
            matches!(run, Ok(Command::Run { loaded, .. }) if loaded.settings.pipelines.len() == 5)
        );
        assert!(matches!(parse(&[]), Err(Refusal::NothingNamed)));
        assert!(matches!(
            parse(&["migrate", "--data-dir", "x"]),
            Ok(Command::Migrate(_))
        ));
        assert!(matches!(parse(&["--help"]), Err(Refusal::Asked(_))));
    }
}
