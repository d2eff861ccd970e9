//! `taskd insert`: inserts a file or stdin, one task per line, over gRPC, several batches at once.

mod progress;
mod signals;
mod wait;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use backon::BackoffBuilder;
use bytes::Bytes;
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use tokio::io::AsyncRead;
use tokio_util::{io::ReaderStream, sync::CancellationToken};

use self::{progress::Progress, signals::Signals};
pub use self::{progress::Summary, signals::Stopped};
use super::client::{self, Server, Taskd, WAITS, is_transient};
use super::print::{print, say};
use super::values::{Level, header};
use crate::{
    config::{Settings, Time},
    ingress::{
        json,
        net::lines::{Line, Lines},
    },
    model::{
        LimitBy, MAX_REPLICAS, NewBackoff, NewTask, TaskRules, TaskTree, now_unix_ms, validate,
    },
    wire::{
        pb::{self, discovery_client::DiscoveryClient},
        time::{from_rfc_3339, timestamp},
    },
};

const READ_BYTES: usize = 256 << 10;
/// The longest line, as much as a server accepts by default.
const MAX_LINE_BYTES: usize = 32 << 20;
/// The most tasks in one request that waits.
const MOST_AWAITED: usize = 1_000;
/// The largest answer to accept: 32 MiB of results, and what surrounds them.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// How often to check whether taskd has fallen silent.
const LOOK_EVERY: Duration = Duration::from_millis(100);

type Client = DiscoveryClient<Taskd>;

/// Insert one task per line, from a file or stdin
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd insert crawl --key https://example.org/         one task
  taskd insert crawl urls.txt                           each line is a key
  taskd insert crawl urls.txt --priority low --delay 1h --header run=7
  taskd insert calls ids.txt --limit-key acme           limited together (limit_by)
  taskd insert crawl --key https://example.org/ --tree new   the root of a tree: taskd tree --help
  zcat tasks.ndjson.gz | taskd insert -                 each line is a task, such as
      {\"queue\": \"calls\", \"key\": \"7\", \"payload\": {…}, \"limit_key\": \"acme\"}
  taskd insert crawl urls.txt --json | jq .created
  taskd insert check urls.txt --wait 1m | jq -c '[.key, .status, .results[].result]'
  taskd insert crawl --key https://example.org/ --tree new --wait 1h --wait-for tree

A key is the whole line, with the blanks in it and around it, without the CR of a file with CRLF. \
JSON comes one task per line, not as one array. \
taskd reports a wrong line and goes on with the others. Inserting the same file twice creates no task twice. \
With --wait, the lines on stdout are about tasks, and the summary goes to stderr. \
After Ctrl-C or SIGTERM it reads no further, waits for the last answers and prints the summary; another one ends it at \
once.
Exit code: 0 if nothing was rejected, 1 if lines were or --wait saw tasks that were not completed or trees that were \
not DONE, 2 if the server cannot be reached or takes no lines, 130 or 143 after Ctrl-C or SIGTERM.")]
pub struct Insert {
    /// Queue of the tasks whose line names none, before the file or with --key; then the file of
    /// lines to insert; - is stdin
    #[arg(value_name = "QUEUE|FILE", num_args = 0..=2)]
    words: Vec<String>,

    #[arg(long, value_name = "NAME", hide = true)]
    queue: Option<String>,

    /// Key of one task to insert, instead of a file
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// high, medium or low, for each task whose line does not say
    #[arg(long, value_enum)]
    priority: Option<Level>,

    /// How long each task whose line does not say waits before its first attempt
    #[arg(long, value_name = "TIME")]
    delay: Option<Time>,

    /// Failures per replica after which each task whose line does not say is dead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: Option<u32>,

    /// A header of each task whose line does not have it; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = header)]
    header: Vec<(String, String)>,

    /// What each task whose line does not say shares its limits with, such as a host, a tenant or an
    /// account; only in queues with a limit_by
    #[arg(long, value_name = "KEY")]
    limit_key: Option<String>,

    /// The sequence of each task whose line does not say: the tasks of a queue with one sequence go
    /// one after the other
    #[arg(long, value_name = "NAME")]
    sequence: Option<String>,

    /// When such a task dies, the next ones of its sequence: next lets them go on, hold lets them
    /// wait until it is sent again or purged
    #[arg(long, value_enum, requires = "sequence")]
    on_dead: Option<AfterDeath>,

    /// The tree of each task whose line does not say: new makes each the root of a tree, an ID joins an
    /// open one; or settings in JSON: {"then": "reports", "timeout": "1h", "on_dead": "hold"}
    #[arg(long, value_name = "TREE", value_parser = json::trees::read)]
    tree: Option<TaskTree>,

    #[command(flatten)]
    server: Server,

    /// ndjson: a task in JSON per line; keys: a key per line; auto: the first line decides
    #[arg(long, value_enum, default_value_t = Format::Auto, hide_possible_values = true)]
    format: Format,

    /// Distinct workers that must complete each task whose line does not say
    #[arg(long, value_name = "N")]
    replicas: Option<u32>,

    /// Backoff of each task whose line does not say, in JSON: {"kind": "exponential", "initial":
    /// "1s"}
    #[arg(long, value_name = "JSON", value_parser = json::backoff::read)]
    backoff: Option<NewBackoff>,

    /// Deadline of each task whose line has none, in RFC 3339: it is dead if it is not completed by
    /// then
    #[arg(long, value_name = "TIME", value_parser = deadline, conflicts_with = "finish_within")]
    deadline: Option<i64>,

    /// Deadline of each task whose line has none, as a time from its insert
    #[arg(long, value_name = "TIME")]
    finish_within: Option<Time>,

    /// Give each task whose line has none the idempotency key NAME:LINE, so that the file may be
    /// sent again
    #[arg(long, value_name = "NAME")]
    idempotency: Option<String>,

    /// Tasks in one request
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    batch: u16,

    /// Requests in flight at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    in_flight: u16,

    /// How long to go on while taskd accepts no line, from its last answer
    #[arg(long, value_name = "TIME", default_value = "60s")]
    give_up_after: Time,

    /// Wait so long for the ends of the tasks of each batch, and print a JSON line for each: status
    /// and results
    #[arg(long, value_name = "TIME")]
    wait: Option<Time>,

    /// With --wait: task waits for the ends of the tasks, tree for those of the trees that they are in
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        requires = "wait",
        default_value = "task"
    )]
    wait_for: wait::Awaited,

    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Format {
    Auto,
    Ndjson,
    Keys,
}

/// Inserts all lines and prints the summary.
///
/// Returns an error if the input or the server failed, or if a signal came. Once lines are being
/// sent, the summary of what taskd has stored is printed even then.
pub async fn run(mut args: Insert) -> anyhow::Result<Summary> {
    let input = args.take_names()?;
    check(&args)?;
    let client = DiscoveryClient::new(args.server.connect().await?)
        .max_decoding_message_size(MAX_ANSWER_BYTES);
    let (input, size) = open(&input).await?;
    let bar = progress_bar(size);
    let patience = args.give_up_after.0 + args.wait.map_or(Duration::ZERO, |Time(wait)| wait);
    let address = args.server.shown();
    let progress = Progress::new(&address, Time(patience), &bar);
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let stop = CancellationToken::new();
    let mut sending = std::pin::pin!(send_all(&args, client, input, &progress, &stop));
    let sent = tokio::select! {
        sent = &mut sending => sent,
        stopped = signals.next() => {
            stop.cancel();
            signals.last(sending).await.and(Err(stopped.into()))
        }
    };
    bar.finish_and_clear();
    let summary = progress.summary();
    let shown = if args.json {
        serde_json::to_string(&summary)?
    } else {
        table(&summary)
    };
    let written = match args.wait {
        Some(_) => {
            say(shown);
            Ok(())
        }
        None => print(&shown),
    };
    sent?;
    written?;
    Ok(summary)
}

/// Checks the flags that apply to all lines: taskd would reject each line for a wrong one. The
/// limits of taskd may be stricter.
fn check(args: &Insert) -> anyhow::Result<()> {
    let rules = TaskRules {
        max_replicas: MAX_REPLICAS,
        // Only the queue knows whether it has limit keys.
        limit_by: LimitBy::Given,
        ..Settings::default().task_rules("default")
    };
    let task = NewTask {
        queue: args.queue.clone().unwrap_or_else(|| "default".to_owned()),
        key: Bytes::from_static(b"key"),
        replicas: args.replicas,
        max_attempts: args.max_attempts,
        delay: args.delay.map(|Time(delay)| delay),
        headers: args.header.iter().cloned().collect(),
        backoff: args.backoff,
        deadline_unix_ms: args.deadline,
        finish_within: args.finish_within.map(|Time(within)| within),
        idempotency_key: args
            .idempotency
            .as_ref()
            .map(|name| format!("{name}:1"))
            .unwrap_or_default(),
        limit_key: args.limit_key.clone().unwrap_or_default(),
        sequence: args.sequence.clone().unwrap_or_default(),
        ..Default::default()
    };
    match validate::check(&task, &rules, now_unix_ms()) {
        Ok(_) => Ok(()),
        Err(why) => bail!("the flags suit no task: {why}"),
    }
}

/// Where the lines come from.
enum Input {
    Key(String),
    Stdin,
    File {
        path: PathBuf,
        /// If absent, the file name may be meant as the queue.
        queue: Option<String>,
    },
}

impl Insert {
    /// Reads QUEUE and FILE, each of which may be missing.
    fn take_names(&mut self) -> anyhow::Result<Input> {
        let mut words = std::mem::take(&mut self.words).into_iter();
        let is_queue = self.queue.is_none() && (self.key.is_some() || words.len() == 2);
        if is_queue {
            self.queue = words.next();
        }
        let file = words.next();
        if words.next().is_some() {
            bail!("the queue is named twice: by --queue and before the file");
        }
        if let Some(key) = &self.key {
            if let Some(file) = file {
                bail!("--key inserts one task, and {file:?} is a file of tasks; use one");
            }
            if key.contains('\n') {
                bail!("--key has a line break; send such a key as JSON: {{\"key\": \"a\\nb\"}}");
            }
            if self.queue.is_none() {
                bail!("--key needs a queue: taskd insert QUEUE --key KEY");
            }
            self.format = Format::Keys;
            return Ok(Input::Key(key.clone()));
        }
        Ok(match file {
            Some(file) if file != "-" => Input::File {
                path: file.into(),
                queue: self.queue.clone(),
            },
            _ => Input::Stdin,
        })
    }
}

/// Opens the input. Also returns its length, if that is known.
async fn open(input: &Input) -> anyhow::Result<(Box<dyn AsyncRead + Send + Unpin>, Option<u64>)> {
    let (path, queue) = match input {
        Input::Key(key) => {
            let line = std::io::Cursor::new(format!("{key}\n").into_bytes());
            return Ok((Box::new(line), None));
        }
        Input::Stdin => return Ok((Box::new(tokio::io::stdin()), None)),
        Input::File { path, queue } => (path, queue),
    };
    let unreadable = || format!("cannot read {}", path.display());
    let file = match tokio::fs::File::open(path).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let name = path.display();
            match queue {
                None => bail!(
                    "there is no file {name}; if it is a queue: taskd insert {name} FILE, taskd insert {name} - for \
                     stdin, or taskd insert {name} --key KEY"
                ),
                Some(queue) => bail!(
                    "there is no file {name}; if it is the key of a task: taskd insert {queue} --key {name}"
                ),
            }
        }
        opened => opened.with_context(unreadable)?,
    };
    let metadata = file.metadata().await.with_context(unreadable)?;
    if metadata.is_dir() {
        bail!("cannot read {}: it is a folder", path.display());
    }
    Ok((Box::new(file), metadata.is_file().then_some(metadata.len())))
}

/// A progress bar; it draws nothing if stderr is not a terminal.
fn progress_bar(size: Option<u64>) -> ProgressBar {
    let (bar, template) = match size {
        Some(size) => (
            ProgressBar::new(size),
            "{bar:30} {bytes}/{total_bytes}  {msg}  {eta} left",
        ),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes}  {msg}"),
    };
    bar.with_style(
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
    )
}

async fn send_all(
    args: &Insert,
    client: Client,
    input: impl AsyncRead + Unpin,
    progress: &Progress<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let chunks = ReaderStream::with_capacity(input, READ_BYTES)
        .inspect_ok(|chunk| progress.read(chunk.len()));
    let batches =
        batches(args, Lines::new(chunks, MAX_LINE_BYTES, drop)).take_until(stop.cancelled());
    let sent = batches.map(|batch| send(client.clone(), args, batch, progress, stop));
    let sent = sent.buffer_unordered(args.in_flight.into());
    let mut sent = std::pin::pin!(sent);
    let mut look = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            batch = sent.next() => match batch {
                Some(batch) => batch?,
                None => return Ok(()),
            },
            _ = look.tick() => progress.look()?,
        }
    }
}

/// Splits the lines into batches, each with its format: the given one, or else the one that the
/// first line suggests.
fn batches<S>(
    args: &Insert,
    lines: Lines<S>,
) -> impl Stream<Item = anyhow::Result<(Format, Vec<Line>)>>
where
    S: Stream<Item = std::io::Result<Bytes>> + Unpin,
{
    let most = if args.wait.is_some() {
        MOST_AWAITED
    } else {
        usize::MAX
    };
    let size = usize::from(args.batch).min(most);
    let format = args.format;
    stream::try_unfold((lines, format), move |(mut lines, format)| async move {
        let batch = lines
            .next_batch(size)
            .await
            .context("cannot read the input")?;
        let Some(first) = batch.first() else {
            return Ok(None);
        };
        let format = if format == Format::Auto {
            format_of(first)?
        } else {
            format
        };
        Ok(Some(((format, batch), (lines, format))))
    })
}

fn format_of(line: &Line) -> anyhow::Result<Format> {
    let text = line.text.as_deref().unwrap_or_default();
    match text {
        [0x1f, 0x8b, ..] => {
            bail!(
                "the input is compressed with gzip: unpack it (zcat FILE | taskd insert -), or say --format keys"
            )
        }
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => bail!(
            "the input is UTF-16: convert it (iconv -f UTF-16 -t UTF-8 FILE | taskd insert -), or say --format keys"
        ),
        _ => {}
    }
    match text.trim_ascii_start().first() {
        Some(b'{') => Ok(Format::Ndjson),
        Some(b'[') => bail!(
            "the first line begins with [: a JSON array is not taken; send a task per line (jq -c '.[]'), \
             or say --format keys"
        ),
        _ => Ok(Format::Keys),
    }
}

/// Sends a batch, and retries until taskd has answered all lines. With `--wait`, then waits for the
/// tasks.
async fn send(
    mut client: Client,
    args: &Insert,
    batch: anyhow::Result<(Format, Vec<Line>)>,
    progress: &Progress<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let (format, lines) = batch?;
    if format == Format::Keys && args.queue.is_none() {
        bail!("lines that are keys need a queue: taskd insert QUEUE FILE");
    }
    let mut rest = Vec::with_capacity(lines.len());
    for line in lines {
        match task(args, format, &line) {
            Ok(task) => rest.push((line.number, task)),
            Err(why) => progress.rejected(line.number, &why),
        }
    }
    let _waiting = progress.wait();
    let mut stored = Vec::new();
    let mut waits = WAITS.build();
    while let Some(first) = rest.first().map(|(number, _)| *number) {
        let tasks: Vec<_> = rest.iter().map(|(_, task)| task.clone()).collect();
        // Sending again is safe, even if the answer was lost: a stored task is then a duplicate.
        match client
            .insert_tasks(pb::InsertTasksRequest {
                tasks,
                ..Default::default()
            })
            .await
        {
            Ok(response) => {
                let sent = rest.len();
                let results = response.into_inner().results;
                if args.wait.is_some() {
                    stored.extend(wait::stored(&rest, &results, args.wait_for));
                }
                rest = progress.answered(rest, results);
                if rest.len() < sent {
                    waits = WAITS.build();
                }
            }
            Err(status) if is_transient(&status) => progress.failed(&status),
            Err(status) => {
                bail!(
                    "taskd at {} did not take the lines from {first}: {}",
                    args.server.shown(),
                    client::said(&status)
                )
            }
        }
        if !rest.is_empty() {
            tokio::time::sleep(waits.next().unwrap_or_default()).await;
        }
    }
    match args.wait {
        Some(Time(wait)) => {
            let until = Instant::now() + wait;
            let ends = wait::wait(client, stored, args.wait_for, until, progress);
            stop.run_until_cancelled(ends).await.unwrap_or(Ok(()))
        }
        None => Ok(()),
    }
}

fn task(args: &Insert, format: Format, line: &Line) -> Result<pb::NewTask, String> {
    let text = line.text.as_ref().map_err(ToString::to_string)?;
    let mut task = match format {
        Format::Keys => pb::NewTask {
            key: text.clone(),
            ..Default::default()
        },
        Format::Ndjson | Format::Auto => json::insert::new_task(text)?.into(),
    };
    if task.queue.is_empty() {
        task.queue = args.queue.clone().unwrap_or_default();
    }
    task.replicas = task.replicas.or(args.replicas);
    task.max_attempts = task.max_attempts.or(args.max_attempts);
    if task.priority == i32::from(pb::Priority::Unspecified) {
        task.priority = args
            .priority
            .map_or(task.priority, |level| pb::Priority::from(level).into());
    }
    if task.delay.is_none() && task.not_before.is_none() {
        task.delay = args.delay.and_then(|Time(delay)| delay.try_into().ok());
    }
    for (name, value) in &args.header {
        task.headers
            .entry(name.clone())
            .or_insert_with(|| value.clone());
    }
    task.backoff = task.backoff.or_else(|| args.backoff.map(Into::into));
    if task.deadline.is_none() && task.finish_within.is_none() {
        task.deadline = args.deadline.map(timestamp);
        task.finish_within = args
            .finish_within
            .and_then(|Time(within)| within.try_into().ok());
    }
    if task.limit_key.is_empty() {
        task.limit_key = args.limit_key.clone().unwrap_or_default();
    }
    if let (true, Some(sequence)) = (task.sequence.is_empty(), &args.sequence) {
        task.sequence.clone_from(sequence);
        task.on_dead = match args.on_dead {
            Some(AfterDeath::Hold) => pb::OnDead::Hold.into(),
            Some(AfterDeath::Next) | None => pb::OnDead::Unspecified.into(),
        };
    }
    task.tree = task.tree.or_else(|| args.tree.clone().map(Into::into));
    if let (true, Some(name)) = (task.idempotency_key.is_empty(), &args.idempotency) {
        task.idempotency_key = format!("{name}:{}", line.number);
    }
    Ok(task)
}

/// What a death means for the next ones of a sequence.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum AfterDeath {
    Next,
    Hold,
}

/// Parses the value of `--deadline`.
fn deadline(text: &str) -> Result<i64, String> {
    from_rfc_3339(text).ok_or_else(|| format!("{text:?} is not a time; write 2030-01-31T12:00:00Z"))
}

fn table(summary: &Summary) -> String {
    let ended = [
        (summary.duplicate_completed, "COMPLETED"),
        (summary.duplicate_dead, "DEAD"),
        (summary.duplicate_cancelled, "CANCELLED"),
    ];
    let ended: Vec<String> = ended
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, status)| format!("{status} {}", HumanCount(*count)))
        .collect();
    let rows = [
        ("created", HumanCount(summary.created), String::new()),
        ("duplicate", HumanCount(summary.duplicate), ended.join(", ")),
        ("rejected", HumanCount(summary.rejected), String::new()),
        (
            "lines/s",
            HumanCount(summary.lines_per_second as u64),
            String::new(),
        ),
    ];
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    for (name, count, more) in rows {
        let cells = [name.to_owned(), count.to_string(), more];
        let is_filled = |cell: &String| !cell.is_empty();
        table.add_row(cells.into_iter().filter(is_filled));
    }
    if let Some(tree) = summary.tree.as_ref().filter(|_| !summary.has_several_trees) {
        table.add_row(["tree", tree.as_str()]);
    }
    if let Some(counts) = table.column_mut(1) {
        counts.set_cell_alignment(comfy_table::CellAlignment::Right);
    }
    table.to_string()
}
