//! The command line of `taskd work`.

use std::{ffi::OsString, time::Duration};

use clap::{Args, builder::NonEmptyStringValueParser};

use crate::{
    cli::client::Server,
    config::{ByteSize, Time},
    model::{QueueName, WorkerName},
};

/// The shortest lease of the client.
const SHORTEST_LEASE: Duration = Duration::from_millis(300);

/// Work on tasks: run a command for each, or check its URL
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd work thumbs --concurrency 4 -- convert {key} -resize 200 png:-
  taskd work crawl --discover-fd -- ./crawl.sh {key}
  taskd work mail -- ./send.py {id} {file}             the payload as a file
  taskd work links --http-check --per-host 2           GET each key; the result is JSON
  taskd work q --exit-when-idle 5s -- ./do.sh | jq -c 'select(.status == \"rejected\")'

In the command, {key}, {id}, {queue}, {attempt} and {file} stand for those of the task, also inside an argument. \
No shell reads them. A key may begin with a dash: put -- before {key} if the command takes options. \
The payload comes on stdin, or is in the file {file}. The environment has TASKD_ID, TASKD_KEY, TASKD_QUEUE, \
TASKD_ATTEMPT, TASKD_HEADER_<NAME> and TRACEPARENT, and no TASKD_TOKEN.

Exit code of the command:
  0         the task is done; stdout is its result
  --dead-code (65)  counts as max_attempts failures: a task for one worker is dead
  --put-off-code (75)  no failure: the task comes again after --put-off (10s), or after the time, such as 90s, that is
            the last line of stdout. With --throttle this worker takes no tasks until then
  others    the attempt failed; the end of stderr is the reason. taskd tries again after the backoff

A command that takes longer than --timeout, or writes more than --max-output, is killed with all that it started \
(its process group), and the attempt failed. The lease is extended while a command runs.

Discovered tasks: a line is a key of the same queue (or of --discover-queue), or a task in JSON:
  --discover-fd             each line that the command writes to file descriptor 3
  --discover-prefix 'NEW '  each line of stdout that begins so, without that; it is no part of the result

A terminal shows what the commands print, each line after the key of its task, and the progress; otherwise stdout has a JSON object per line for each task, and a summary. \
Ctrl-C (SIGINT, SIGTERM) takes no more tasks and finishes those that run; a second one kills them, and other \
workers get their tasks at once. A terminal that closes (SIGHUP) is a first one. Exit code: 0 after a stop; 2 if taskd \
cannot be reached or refuses, if the command cannot be started (its tasks go back at no cost), and if taskd did not \
answer the reports of finished tasks at the end. With --exit-when-idle also if taskd did not answer for a minute; a \
token needs the role read for it.")]
pub struct Work {
    /// Queues to take tasks from. With NAME=WEIGHT (1 to 1000) they share the worker by weight,
    /// while each has tasks: a=3 b=1
    #[arg(value_name = "QUEUE", required_unless_present = "queue_flag", value_parser = weighted_queue)]
    queues: Vec<WeightedQueue>,

    #[arg(id = "queue_flag", long = "queue", value_name = "NAME", value_parser = weighted_queue, hide = true)]
    queues_of_flag: Vec<WeightedQueue>,

    #[command(flatten)]
    pub(super) server: Server,

    /// Name of this worker; two of one name are one worker for taskd [default: the host's name]
    #[arg(long, env = "TASKD_WORKER", alias = "worker", value_name = "NAME", value_parser = worker)]
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

    /// How long the leases are; if this worker is silent for half of that (10m at most), others get
    /// its tasks; with --poll for all of it
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = lease)]
    pub(super) lease: Time,

    /// How long a task may take, without a check's wait for its host
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = above_zero)]
    pub(super) timeout: Time,

    /// End when no task came for so long and the queue is drained: no task of it is unfinished, in
    /// backoff or delayed
    #[arg(long, value_name = "TIME")]
    pub(super) exit_when_idle: Option<Time>,

    /// Print JSON lines, also on a terminal
    #[arg(long)]
    pub(super) json: bool,

    /// Print a JSON line with each result, too
    #[arg(long, requires = "json", conflicts_with = "http_check")]
    pub(super) results: bool,

    /// Stop in order when stdin ends: the worker of `taskd topology run` outlives no run
    #[arg(long, hide = true)]
    pub(in crate::cli) stop_with_stdin: bool,

    #[command(flatten)]
    pub(super) commands: Commands,

    /// GET each key as a URL, instead of a command
    #[arg(long, conflicts_with = "command")]
    pub(super) http_check: bool,

    #[command(flatten)]
    pub(super) checks: Checks,

    /// The command, after --
    #[arg(
        last = true,
        value_name = "CMD",
        required_unless_present = "http_check"
    )]
    pub(super) command: Vec<OsString>,
}

/// The bounds of a command, and the meaning of its output.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("discovers").multiple(true))]
pub(super) struct Commands {
    /// Exit code of a command that means: do not try this task again
    #[arg(
        long,
        value_name = "CODE",
        default_value_t = 65,
        conflicts_with = "http_check"
    )]
    #[arg(value_parser = clap::value_parser!(u8).range(1..))]
    pub(super) dead_code: u8,

    /// Exit code of a command that means: not now. No failure counts, and the task comes again
    /// later
    #[arg(
        long,
        value_name = "CODE",
        default_value_t = 75,
        conflicts_with = "http_check"
    )]
    #[arg(value_parser = clap::value_parser!(u8).range(1..))]
    pub(super) put_off_code: u8,

    /// After such a code the worker takes no tasks until that time is over
    #[arg(long, conflicts_with = "http_check")]
    pub(super) throttle: bool,

    /// How much later, unless the last line of stdout is a time
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10s",
        conflicts_with = "http_check"
    )]
    pub(super) put_off: Time,

    /// The most that a command may write to stdout
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "1MiB",
        conflicts_with = "http_check"
    )]
    pub(super) max_output: ByteSize,

    /// The result is JSON; anything else on stdout fails the attempt
    #[arg(long, conflicts_with = "http_check")]
    pub(super) json_result: bool,

    /// Take discovered tasks from file descriptor 3
    #[arg(long, conflicts_with = "http_check", group = "discovers")]
    pub(super) discover_fd: bool,

    /// Take discovered tasks from the lines of stdout that begin so
    #[arg(
        long,
        value_name = "PREFIX",
        conflicts_with = "http_check",
        group = "discovers"
    )]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(super) discover_prefix: Option<String>,

    /// Queue of discovered keys, instead of that of the task
    #[arg(long, value_name = "NAME", requires = "discovers", value_parser = queue)]
    pub(super) discover_queue: Option<String>,

    /// Port of discovered keys, and of tasks in JSON that name no queue, where the queue is a stage of
    /// a topology
    #[arg(
        long,
        value_name = "NAME",
        requires = "discovers",
        conflicts_with = "discover_queue"
    )]
    pub(super) discover_port: Option<String>,
}

/// How URLs are checked.
#[derive(Args)]
#[command(next_help_heading = "With --http-check")]
pub(super) struct Checks {
    /// Ask with HEAD, and with GET if the server does not know it
    #[arg(long, conflicts_with = "command")]
    pub(super) head: bool,

    /// Requests to one host at a time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    #[arg(conflicts_with = "command")]
    pub(super) per_host: u16,

    /// How long to wait between two requests to one host
    #[arg(
        long,
        value_name = "TIME",
        default_value = "0s",
        conflicts_with = "command"
    )]
    pub(super) host_delay: Time,

    /// How long a connection and each answer may take
    #[arg(long, value_name = "TIME", default_value = "20s", conflicts_with = "command", value_parser = above_zero)]
    pub(super) answer_timeout: Time,

    /// How much of an answer is read
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "1MiB",
        conflicts_with = "command"
    )]
    pub(super) max_body: ByteSize,

    /// Redirects to follow
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=20))]
    #[arg(conflicts_with = "command")]
    pub(super) redirects: u8,

    /// Name of the check for the servers; add a page or an address at which its owner can be
    /// reached
    #[arg(long, value_name = "TEXT", default_value = concat!("taskd/", env!("CARGO_PKG_VERSION"), " (http-check)"))]
    #[arg(conflicts_with = "command")]
    pub(super) user_agent: String,
}

impl Work {
    pub(super) fn queues(&self) -> Vec<String> {
        let queues = self.queues.iter().chain(&self.queues_of_flag);
        queues.map(|queue| queue.name.clone()).collect()
    }

    /// The queues that have weights.
    pub(super) fn weights(&self) -> Vec<(&str, u32)> {
        let queues = self.queues.iter().chain(&self.queues_of_flag);
        queues
            .filter_map(|queue| Some((&queue.name[..], queue.weight?)))
            .collect()
    }

    /// The given name of the worker, or one made from the host and the process id.
    pub(super) fn name(&self) -> String {
        let host = || {
            let host = nix::unistd::gethostname().ok()?.into_string().ok()?;
            worker(&host).ok()
        };
        self.name
            .clone()
            .or_else(host)
            .unwrap_or_else(|| "worker".to_owned())
    }
}

/// A queue, and its weight if one is given.
#[derive(Clone)]
struct WeightedQueue {
    name: String,
    weight: Option<u32>,
}

fn weighted_queue(text: &str) -> Result<WeightedQueue, String> {
    let (name, weight) = match text.split_once('=') {
        None => (text, None),
        Some((name, weight)) => match weight.parse() {
            Ok(number @ 1..=1000) => (name, Some(number)),
            _ => return Err(format!("weight {weight:?}; must be 1 to 1000")),
        },
    };
    Ok(WeightedQueue {
        name: queue(name)?,
        weight,
    })
}

/// Validates the queue name: with an invalid one, taskd would refuse every completion, and the
/// tasks would die.
fn queue(text: &str) -> Result<String, String> {
    QueueName::new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

fn worker(text: &str) -> Result<String, String> {
    WorkerName::new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

fn lease(text: &str) -> Result<Time, String> {
    let lease: Time = text.parse()?;
    if lease.0 < SHORTEST_LEASE {
        Err(format!("must be at least {}", Time(SHORTEST_LEASE)))
    } else {
        Ok(lease)
    }
}

fn above_zero(text: &str) -> Result<Time, String> {
    let time: Time = text.parse()?;
    if time.0.is_zero() {
        Err("must be more than 0s".to_owned())
    } else {
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use crate::cli::{Refusal, parse};

    fn refusal(args: &[&str]) -> String {
        let all = ["taskd", "work", "--queue", "q"]
            .iter()
            .chain(args)
            .map(OsString::from);
        match parse(all) {
            Err(Refusal::Usage(line)) => line,
            Ok(_) | Err(_) => panic!("{args:?} should be refused"),
        }
    }

    #[test]
    fn what_would_do_harm_or_nothing_is_refused() {
        let cases: [(&[&str], &str); 14] = [
            (
                &["--queue", "a b", "--", "true"],
                "queue \"a b\" contains ' '",
            ),
            (&["--name", "a\nb", "--", "true"], "'--name <NAME>'"),
            (
                &["--discover-fd", "--discover-queue", "a b", "--", "true"],
                "queue \"a b\" contains ' '",
            ),
            (&["--discover-queue", "ab", "--", "true"], "--discover-fd"),
            (
                &["--discover-prefix", "", "--", "true"],
                "'--discover-prefix <PREFIX>'",
            ),
            (&["--timeout", "0s", "--", "true"], "must be more than 0s"),
            (&["--lease", "1ms", "--", "true"], "must be at least 300ms"),
            (&["--dead-code", "0", "--", "true"], "must be 1 to 255"),
            (&["--head", "--", "true"], "'--head' cannot be used with"),
            (
                &["--per-host", "2", "--", "true"],
                "'--per-host <N>' cannot be used with",
            ),
            (
                &["--user-agent", "me", "--", "true"],
                "'--user-agent <TEXT>' cannot be used with",
            ),
            (
                &["--http-check", "--answer-timeout", "0s"],
                "must be more than 0s",
            ),
            (
                &["--http-check", "--dead-code", "1"],
                "'--dead-code <CODE>'",
            ),
            (&["--http-check", "--discover-fd"], "'--discover-fd'"),
        ];
        for (args, want) in cases {
            let line = refusal(args);
            assert!(line.contains(want), "{args:?}: {line}");
        }
    }

    #[test]
    fn both_ways_of_discovery_go_together() {
        let args = [
            "--discover-fd",
            "--discover-prefix",
            "NEW ",
            "--discover-queue",
            "found",
            "--",
            "true",
        ];
        assert!(
            parse(
                ["taskd", "work", "--queue", "q"]
                    .iter()
                    .chain(&args)
                    .map(OsString::from)
            )
            .is_ok()
        );
    }
}
