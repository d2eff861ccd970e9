//! `taskd topology run`: a taskd of its own, a worker for each stage, and tasks from a file.

use std::{
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Deserialize;
use tokio::{
    process::{Child, ChildStdin, Command},
    time::{sleep, timeout},
};

use super::file::{apply_to, read};
use crate::{
    cli::{
        ask::{ask, printable},
        http::HttpPort,
        own::{Own, Signals, Start, remove_settings, taskd},
        print::{print, say},
    },
    model::{Stage, Topology},
};

/// The exit code if a tree failed.
const FAILED: u8 = 3;
/// How long `on_start` and `on_stop` may take.
const PREPARE: Duration = Duration::from_secs(600);
/// How long a worker may take to finish its tasks, which may take 10 minutes each.
const FINISH: Duration = Duration::from_secs(630);
/// How long a worker may take to end the tasks that run.
const STOP: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How many dead letters are named at the end.
const NAMED: usize = 5;

/// Run a topology: a taskd of its own, and a worker for each stage
#[derive(Args)]
#[command(after_help = "\
Each stage needs a command. It runs for each task as `taskd work` runs one: the payload comes on stdin, {key} stands for \
the key, and an exit code other than 0 is a failed attempt. What it prints is the result, which goes to port out. \
Outputs are lines that it writes to file descriptor 3:
  {\"port\": \"link\", \"key\": \"https://example.org/b\", \"payload\": {…}}
or a key alone, for port out.

Examples:
  taskd topology run crawl.toml --input urls.ndjson --exit-when-done
  echo https://example.org/ | taskd topology run crawl.toml --input - --exit-when-done

stdout has a JSON line for each task that was worked on, one for each result of a stage that nothing follows, and at \
the end one with the trees. The taskd and all its data \
are removed at the end. Ctrl-C finishes the tasks that run, and ends it.

Exit code: 0 if all trees are done or without --exit-when-done, 3 if some failed or are still open, 1 if the file has mistakes or lines \
were rejected, 2 if something cannot be started or was stopped before all trees had ended.")]
pub(super) struct Run {
    /// File of a topology
    file: PathBuf,

    /// Tasks to insert: each line is a key or a task in JSON. Without a queue it goes to the stage that
    /// begins the topology; - is stdin
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,

    /// End when all trees have ended
    #[arg(long, requires = "input")]
    exit_when_done: bool,

    /// Tasks at a time of each stage
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    concurrency: u16,
}

/// Runs it. Returns the exit code.
pub(super) async fn run(args: Run) -> anyhow::Result<u8> {
    let Some((text, plan)) = read(&args.file)? else {
        return Ok(1);
    };
    let start = check(&args, &plan)?;
    let mut signals = Signals::listen()?;
    let mut own = Own::start(Start::default()).await?;
    let url = own.url();
    let server = own.server()?;
    let mut world = World {
        plan: &plan,
        url: &url,
        server: &server,
        workers: Vec::new(),
        started: Vec::new(),
    };
    let work = world.work(&args, start, &text);
    let worked = match own.unless_stopped(&mut signals, work).await {
        Ok(None) => stopped(&args),
        worked => worked.map(Option::unwrap_or_default),
    };
    let ended = world.end(signals.another()).await;
    drop(world);
    // After what the workers print at their ends.
    let failed = match worked {
        Ok(_) if args.exit_when_done => conclude(&server).await,
        _ => Ok(false),
    };
    let stopped = own.stop().await;
    let code = worked?;
    ended?;
    stopped?;
    Ok(if failed? { FAILED } else { code })
}

/// Checks what only a run needs. Returns the queue of lines that name none.
fn check<'p>(args: &Run, plan: &'p Topology) -> anyhow::Result<&'p str> {
    let without: Vec<&str> = plan
        .stages
        .iter()
        .filter(|stage| stage.command.is_empty() && stage.topic.is_none())
        .map(|stage| stage.name.as_str())
        .collect();
    ensure!(
        without.is_empty(),
        "{}: no command for stages {}: write command = [\"PROGRAM\", …] in each",
        args.file.display(),
        without.join(", ")
    );
    let of_redis = plan.feeds.iter().filter(|feed| !feed.source.is_topic());
    let of_redis: Vec<&str> = of_redis.map(|feed| feed.name.as_str()).collect();
    // The source would forget them, and the store is removed at the end.
    ensure!(
        of_redis.is_empty(),
        "{}: feeds {} would take records from their Redis for good: leave them out of the file, or use taskd topology apply",
        args.file.display(),
        of_redis.join(", ")
    );
    let starts = plan.stages.iter().filter(|stage| stage.is_start);
    let starts: Vec<&str> = starts.map(|stage| stage.queue.as_str()).collect();
    // With several, each line must name its queue.
    Ok(match starts[..] {
        [only] => only,
        _ => "",
    })
}

fn stopped(args: &Run) -> anyhow::Result<u8> {
    if args.exit_when_done {
        bail!("stopped before all trees had ended");
    }
    Ok(0)
}

/// What runs.
struct World<'a> {
    plan: &'a Topology,
    url: &'a str,
    server: &'a HttpPort,
    workers: Vec<Worker<'a>>,
    /// The stages whose `on_start` has been run.
    started: Vec<&'a Stage>,
}

/// The worker of a stage.
struct Worker<'a> {
    stage: &'a str,
    child: Child,
    /// It stops when this ends.
    stdin: Option<ChildStdin>,
}

impl<'a> World<'a> {
    async fn work(&mut self, args: &Run, start: &str, text: &str) -> anyhow::Result<u8> {
        for topic in self
            .plan
            .stages
            .iter()
            .filter_map(|stage| stage.topic.as_ref())
        {
            let mut put = self.client()?;
            put.args(["topic", "put", topic.as_str()])
                .stdout(Stdio::null());
            let status = put.status().await?;
            ensure!(status.success(), "topic {topic} cannot be made: {status}");
        }
        if apply_to(self.server, &self.plan.name, text)
            .await?
            .is_none()
        {
            return Ok(1);
        }
        for stage in &self.plan.stages {
            // taskd itself works on the others.
            if stage.topic.is_some() {
                continue;
            }
            self.started.push(stage);
            self.prepare("on_start", stage, &stage.on_start).await?;
            let mut child = self.worker(stage, args.concurrency)?;
            self.workers.push(Worker {
                stage: &stage.name,
                stdin: child.stdin.take(),
                child,
            });
        }
        say(format_args!(
            "taskd: topology {} runs at {}",
            self.plan.name, self.url
        ));
        let mut code = 0;
        if let Some(input) = &args.input {
            let mut insert = self.client()?;
            insert.arg("insert");
            if !start.is_empty() {
                insert.arg(start);
            }
            insert.arg(input).arg("--json").stdout(Stdio::null());
            let status = self.unless_a_worker_ends(insert.status()).await??;
            match status.code() {
                Some(0) => {}
                Some(1) => code = 1,
                _ => bail!("the tasks cannot be inserted: {status}"),
            }
        }
        if !args.exit_when_done {
            self.unless_a_worker_ends(std::future::pending::<()>())
                .await?;
        }
        let server = self.server;
        let stages = self.plan.stages.iter();
        let queues: Vec<&str> = stages.map(|stage| stage.queue.as_str()).collect();
        self.unless_a_worker_ends(all_done(server, &queues))
            .await??;
        Ok(code)
    }

    /// This program as a client of the taskd.
    fn client(&self) -> anyhow::Result<Command> {
        let mut command = Command::from(taskd()?);
        command.env("TASKD_URL", self.url).kill_on_drop(true);
        Ok(command)
    }

    fn worker(&self, stage: &Stage, concurrency: u16) -> anyhow::Result<Child> {
        // Two runs of one file on this machine are different workers.
        let name = format!("{}-{}", stage.name, std::process::id());
        let mut command = self.client()?;
        command
            .args(["work", stage.queue.as_str(), "--name", &name])
            .args(["--concurrency", &concurrency.to_string()])
            .args(["--json", "--stop-with-stdin", "--discover-fd"])
            .args(stage.edges.is_empty().then_some("--results"))
            .args(["--discover-port", "out", "--"])
            .args(&stage.command)
            // The pipe ends however this process does. Ctrl-C reaches this process alone.
            .stdin(Stdio::piped())
            .process_group(0);
        command
            .spawn()
            .with_context(|| format!("cannot start the worker of stage {}", stage.name))
    }

    /// Runs a command of a stage that is for no task.
    async fn prepare(&self, what: &str, stage: &Stage, command: &[String]) -> anyhow::Result<()> {
        let Some((program, arguments)) = command.split_first() else {
            return Ok(());
        };
        let name = &stage.name;
        let mut command = std::process::Command::new(program);
        remove_settings(&mut command);
        command
            .args(arguments)
            .env("TASKD_URL", self.url)
            .env("TASKD_QUEUE", stage.queue.as_str())
            .stdin(Stdio::null());
        let status = Command::from(command).kill_on_drop(true).status();
        let status = timeout(PREPARE, status)
            .await
            .with_context(|| format!("{what} of stage {name} takes longer than {PREPARE:?}"))?
            .with_context(|| format!("{what} of stage {name}: cannot start {program}"))?;
        ensure!(status.success(), "{what} of stage {name}: {status}");
        Ok(())
    }

    /// Waits for `act`. Fails if a worker ends meanwhile: nobody would do the tasks of its stage.
    async fn unless_a_worker_ends<T>(&mut self, act: impl Future<Output = T>) -> anyhow::Result<T> {
        if self.workers.is_empty() {
            return Ok(act.await);
        }
        let ends = self
            .workers
            .iter_mut()
            .map(|worker| Box::pin(async move { (worker.stage, worker.child.wait().await) }));
        let ends = futures::future::select_all(ends);
        tokio::select! {
            done = act => Ok(done),
            ((stage, status), ..) = ends => bail!("the worker of stage {stage} ended: {}", shown(status)),
        }
    }

    /// Stops the workers, which finish their tasks unless `hurry` comes before, and runs `on_stop` of
    /// all stages that began.
    async fn end(&mut self, hurry: impl Future<Output = ()>) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            drop(worker.stdin.take());
        }
        tokio::select! {
            () = self.workers_end(FINISH) => {}
            () = hurry => {}
        }
        for worker in &self.workers {
            // The end of its stdin was the first signal to stop.
            if let Some(pid) = worker.child.id().and_then(|pid| i32::try_from(pid).ok()) {
                kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
            }
        }
        self.workers_end(STOP).await;
        for Worker { stage, child, .. } in &mut self.workers {
            if child.id().is_some() {
                say(format_args!(
                    "taskd: the worker of stage {stage} does not stop, and is killed"
                ));
                child.kill().await.ok();
            }
        }
        let mut first = Ok(());
        for stage in std::mem::take(&mut self.started) {
            let stopped = self.prepare("on_stop", stage, &stage.on_stop).await;
            first = first.and(stopped);
        }
        first
    }

    /// Waits until all workers have ended, or this time is over.
    async fn workers_end(&mut self, within: Duration) {
        let ends = self.workers.iter_mut().map(|worker| worker.child.wait());
        timeout(within, futures::future::join_all(ends)).await.ok();
    }
}

fn shown(status: std::io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    }
}

#[derive(Deserialize)]
struct Books {
    at: String,
    bus: Bus,
    queues: Vec<QueueBooks>,
}

#[derive(Deserialize)]
struct Bus {
    pipeline: u64,
    task_results: u64,
}

#[derive(Deserialize)]
struct QueueBooks {
    queue: String,
    held: Held,
}

#[derive(Deserialize)]
struct Held {
    total: u64,
}

/// Waits until no task of these queues is unfinished, and no report is on its way.
async fn all_done(server: &HttpPort, queues: &[&str]) -> anyhow::Result<()> {
    // The books of one second are shared, so the first ones may be from before the last insert.
    let mut empty_at: Option<String> = None;
    loop {
        let answer = ask::<Books>(server, "/v1/books").await?;
        let (_, books) = answer.context("taskd has no books")?;
        let mut of_stages = books
            .queues
            .iter()
            .filter(|one| queues.contains(&one.queue.as_str()));
        let is_on_its_way = books.bus.pipeline + books.bus.task_results > 0;
        let is_empty = !is_on_its_way && of_stages.all(|one| one.held.total == 0);
        match &empty_at {
            Some(at) if is_empty && *at != books.at => return Ok(()),
            Some(_) if is_empty => {}
            _ => empty_at = is_empty.then_some(books.at),
        }
        sleep(LOOK_EVERY).await;
    }
}

#[derive(Deserialize)]
struct Trees {
    trees: Vec<Tree>,
    cursor: Option<String>,
}

#[derive(Deserialize)]
struct Tree {
    state: String,
}

#[derive(Deserialize)]
struct Letters {
    letters: Vec<Letter>,
}

#[derive(Deserialize)]
struct Letter {
    #[serde(default)]
    queue: String,
    #[serde(default)]
    key: String,
    reason: String,
}

/// Says how the trees ended. Returns whether some failed, or are still open.
async fn conclude(server: &HttpPort) -> anyhow::Result<bool> {
    let (mut done, mut failed, mut open) = (0_u64, 0_u64, 0_u64);
    let mut path = "/v1/trees?limit=1000".to_owned();
    loop {
        let answer = ask::<Trees>(server, &path).await?;
        let (_, page) = answer.context("taskd has no trees")?;
        for tree in &page.trees {
            match tree.state.as_str() {
                "DONE" => done += 1,
                "FAILED" => failed += 1,
                _ => open += 1,
            }
        }
        match page.cursor {
            Some(cursor) => path = format!("/v1/trees?limit=1000&cursor={cursor}"),
            None => break,
        }
    }
    print(serde_json::json!({"trees": {"done": done, "failed": failed, "open": open}}))?;
    if open > 0 {
        say(format_args!(
            "taskd: {open} trees are open: dead tasks hold them, or their tasks in other queues are unfinished"
        ));
    }
    if failed + open > 0 {
        let answer = ask::<Letters>(server, &format!("/v1/dead-letters?limit={NAMED}")).await?;
        for letter in answer.map(|(_, page)| page.letters).unwrap_or_default() {
            say(format_args!(
                "taskd: {} {}: {}",
                printable(&letter.queue),
                printable(&letter.key),
                printable(&letter.reason)
            ));
        }
    }
    Ok(failed + open > 0)
}
