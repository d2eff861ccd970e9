//! The command line of `taskd work`.

use std::ffi::OsString;

use clap::Args;

use crate::{
    cli::client::Server,
    config::{ByteSize, Time},
};

/// Work on tasks: run a command for each, or check its URL
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd work --queue thumbs --concurrency 4 -- convert {key} -resize 200 png:-
  taskd work --queue crawl --discover-fd -- ./crawl.sh {key}
  taskd work --queue mail -- ./send.py {id} {file}     the payload as a file
  taskd work --queue links --http-check --per-host 2   GET each key; the result is JSON
  taskd work --queue q --exit-when-idle 5s -- ./do.sh | jq -c 'select(.status == \"rejected\")'

In the command, {key}, {id}, {queue}, {attempt} and {file} stand for those of the task, also inside an argument. \
No shell reads them. A key may begin with a dash: put -- before {key} if the command takes options. \
The payload comes on stdin, or is in the file {file}. The environment has TASKD_ID, TASKD_KEY, TASKD_QUEUE, \
TASKD_ATTEMPT, TASKD_HEADER_<NAME> and TRACEPARENT, and no TASKD_TOKEN.

Exit code of the command:
  0         the task is done; stdout is its result
  --dead-code (65)  the task is dead: it is not tried again
  others    the attempt failed; the end of stderr is the reason. taskd tries again after the backoff

A command that takes longer than --timeout, or writes more than --max-output, is killed with all that it started \
(its process group), and the attempt failed. The lease is extended while a command runs.

Discovered tasks: a line is a key of the same queue (or of --discover-queue), or a task in JSON:
  --discover-fd             each line that the command writes to file descriptor 3
  --discover-prefix 'NEW '  each line of stdout that begins so, without that; it is no part of the result

Progress is a line on a terminal; otherwise stdout has a JSON object per line for each task, and a summary. \
Ctrl-C (SIGINT, SIGTERM) takes no more tasks and finishes those that run; a second one kills them, and other \
workers get their tasks at once. Exit code: 0 after a stop; 2 if taskd cannot be reached or refuses, also if it did \
not answer the reports of finished tasks at the end.")]
pub struct Work {
    /// Queue to take tasks from; may be repeated
    #[arg(long = "queue", value_name = "NAME", required = true)]
    pub(super) queues: Vec<String>,

    #[command(flatten)]
    pub(super) server: Server,

    /// Name of this worker; each process needs one of its own [default: host and process]
    #[arg(long, alias = "worker", value_name = "NAME")]
    name: Option<String>,

    /// Tasks at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) concurrency: u16,

    /// Tasks that wait here for a free place
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1000))]
    pub(super) prefetch: u16,

    /// Ask for tasks by long polls, instead of holding a stream
    #[arg(long)]
    pub(super) poll: bool,

    /// How soon another worker gets the tasks of this one if it dies
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(super) lease: Time,

    /// How long a task may take, without a check's wait for its host
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub(super) timeout: Time,

    /// End when no task came for so long
    #[arg(long, value_name = "TIME")]
    pub(super) exit_when_idle: Option<Time>,

    /// Print JSON lines, also on a terminal
    #[arg(long)]
    pub(super) json: bool,

    #[command(flatten)]
    pub(super) commands: Commands,

    /// GET each key as a URL, instead of a command
    #[arg(long, conflicts_with = "command")]
    pub(super) http_check: bool,

    #[command(flatten)]
    pub(super) checks: Checks,

    /// The command, after --
    #[arg(last = true, value_name = "CMD", required_unless_present = "http_check")]
    pub(super) command: Vec<OsString>,
}

/// The bounds of a command, and the meaning of its output.
#[derive(Args)]
pub(super) struct Commands {
    /// Exit code of a command that means: do not try this task again
    #[arg(long, value_name = "CODE", default_value_t = 65)]
    pub(super) dead_code: u8,

    /// The most that a command may write to stdout
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    pub(super) max_output: ByteSize,

    /// The result is JSON; anything else on stdout fails the attempt
    #[arg(long)]
    pub(super) json_result: bool,

    /// Take discovered tasks from file descriptor 3
    #[arg(long)]
    pub(super) discover_fd: bool,

    /// Take discovered tasks from the lines of stdout that begin so
    #[arg(long, value_name = "PREFIX")]
    pub(super) discover_prefix: Option<String>,

    /// Queue of discovered keys, instead of that of the task
    #[arg(long, value_name = "NAME")]
    pub(super) discover_queue: Option<String>,
}

/// How URLs are checked.
#[derive(Args)]
#[command(next_help_heading = "With --http-check")]
pub(super) struct Checks {
    /// Ask with HEAD, and with GET if the server does not know it
    #[arg(long, requires = "http_check")]
    pub(super) head: bool,

    /// Requests to one host at a time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) per_host: u16,

    /// How long to wait between two requests to one host
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub(super) host_delay: Time,

    /// How long a connection and each answer may take
    #[arg(long, value_name = "TIME", default_value = "20s")]
    pub(super) answer_timeout: Time,

    /// How much of an answer is read
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    pub(super) max_body: ByteSize,

    /// Redirects to follow
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=20))]
    pub(super) redirects: u8,

    /// Name of the check for the servers; add a page or an address at which its owner can be reached
    #[arg(long, value_name = "TEXT", default_value = concat!("taskd/", env!("CARGO_PKG_VERSION"), " (http-check)"))]
    pub(super) user_agent: String,
}

impl Work {
    /// The name of the worker.
    pub(super) fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| {
            let host = nix::unistd::gethostname().ok().and_then(|host| host.into_string().ok());
            format!("{}-{}", host.as_deref().unwrap_or("work"), std::process::id())
        })
    }
}
