//! Streams compared with polls: throughput in tasks per second, the time from insert to handler at
//! three loads, and the cost of a waiting worker.

use std::{future::Future, time::Duration};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt};
use serde_json::Value;
use taskd::wire::pb::{self, tasks_client::TasksClient};
use tokio::{
    task::JoinSet,
    time::{interval, sleep},
};
use tonic::transport::Channel;

use crate::{
    command::{bench, latency_of, rate_of},
    daemon::{Daemon, Used},
    progress::Progress,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
};

/// Loads, in percent of the rate that taskd can sustain with one task per call.
const LOADS: [u32; 3] = [1, 50, 95];
/// A rate, in tasks per second, that is more than taskd can sustain.
const OVERLOAD: &str = "20000";
const BATCH: &str = "100";
const CONFIG: &str = "[queues.default]\nhigh_water_tasks = 1000000\n";
/// How many waiting workers share a connection.
const WORKERS_A_CONNECTION: usize = 250;
/// How many workers start to wait concurrently.
const AT_ONCE: usize = 64;
/// The default heartbeat of a session.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// The longest wait of a get call by default.
const WAIT: Option<prost_types::Duration> = Some(prost_types::Duration {
    seconds: 60,
    nanos: 0,
});

/// A figure with polls, and the same with streams.
#[derive(Default)]
struct Pair {
    poll: Runs,
    stream: Runs,
}

#[derive(Default)]
struct Figures {
    one: Pair,
    many: Pair,
    capacity: Pair,
    /// The p50 and p99 latencies at each load.
    latency: [[Pair; 2]; LOADS.len()],
    memory: Pair,
    cpu: Pair,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut figures = Figures::default();
    for run in 1..=scale.runs {
        let step = |what: &str| progress.step(format!("push, run {run} of {}: {what}", scale.runs));
        let daemon = Daemon::start_as("all", &[], CONFIG).await?;
        step("tasks a second");
        figures.throughput(scale, &daemon).await?;
        step("latency");
        figures.latencies(scale, &daemon).await?;
        daemon.stop().await?;
        step("workers that wait");
        let poll = waiting(scale, poll).await?;
        let stream = waiting(scale, stream).await?;
        figures.memory.push(poll.bytes, stream.bytes);
        figures
            .cpu
            .push(poll.percent_of_a_core, stream.percent_of_a_core);
    }
    Ok(vec![
        throughput(scale, &figures),
        latency(scale, &figures),
        waiters(scale, &figures),
    ])
}

impl Pair {
    fn push(&mut self, poll: f64, stream: f64) {
        self.poll.push(poll);
        self.stream.push(stream);
    }

    /// The rows for polls and for streams, the latter with its ratio to the former.
    fn rows(&self, figure: &str, unit: Unit) -> [Row; 2] {
        let row = |way: &str, runs: &Runs, ratio| Row {
            figure: format!("{figure}, {way}"),
            unit,
            runs: runs.clone(),
            ratios: vec![ratio],
        };
        [
            row("by polls", &self.poll, None),
            row(
                "by streams",
                &self.stream,
                Some(self.stream.over(&self.poll)),
            ),
        ]
    }
}

/// Runs the same command with workers that poll, and with workers that hold streams.
async fn both(daemon: &Daemon, arguments: &[&str]) -> anyhow::Result<[Value; 2]> {
    let arguments = [arguments, &daemon.arguments()[..]].concat();
    Ok([
        bench(&arguments).await?,
        bench(&[&arguments[..], &["--stream"]].concat()).await?,
    ])
}

impl Figures {
    async fn throughput(&mut self, scale: &Scale, daemon: &Daemon) -> anyhow::Result<()> {
        let (many, few) = (scale.tasks.to_string(), scale.single_tasks.to_string());
        for (pair, tasks, batch) in [(&mut self.one, &few, "1"), (&mut self.many, &many, BATCH)] {
            let [poll, stream] =
                both(daemon, &["process", "--tasks", tasks, "--batch", batch]).await?;
            pair.push(
                rate_of(&poll, "process", "completed")?,
                rate_of(&stream, "process", "completed")?,
            );
        }
        Ok(())
    }

    /// Finds the rate that taskd can sustain, and measures at percentages of it, with polls and
    /// streams at the same rates.
    async fn latencies(&mut self, scale: &Scale, daemon: &Daemon) -> anyhow::Result<()> {
        let most = [
            "latency",
            "--batch",
            "1",
            "--rate",
            OVERLOAD,
            "--duration",
            scale.overloaded_for,
        ];
        let [poll, stream] = both(daemon, &most).await?;
        let [poll, stream] = [
            rate_of(&poll, "latency", "one a call")?,
            rate_of(&stream, "latency", "one a call")?,
        ];
        self.capacity.push(poll, stream);
        for (pairs, load) in self.latency.iter_mut().zip(LOADS) {
            let rate = (poll.min(stream) * f64::from(load) / 100.0).max(1.0);
            let rate = format!("{rate:.0}");
            let at_load = [
                "latency",
                "--batch",
                "1",
                "--rate",
                &rate,
                "--duration",
                scale.loaded_for,
            ];
            let [poll, stream] = both(daemon, &at_load).await?;
            for (pair, quantile) in pairs.iter_mut().zip(["p50", "p99"]) {
                let of = |report| latency_of(report, "insert to handler", quantile);
                pair.push(of(&poll)?, of(&stream)?);
            }
        }
        Ok(())
    }
}

fn throughput(scale: &Scale, figures: &Figures) -> Table {
    let pull = &figures.many.poll;
    let row = |figure: &str, runs: &Runs| Row {
        figure: figure.to_owned(),
        unit: Unit::PerSecond,
        runs: runs.clone(),
        ratios: vec![Some(runs.over(&figures.one.poll)), Some(runs.over(pull))],
    };
    let most = |figure: &str, runs: &Runs| Row {
        figure: figure.to_owned(),
        unit: Unit::PerSecond,
        runs: runs.clone(),
        ratios: vec![None, None],
    };
    Table {
        bench: "push",
        title: "push: tasks a second",
        conditions: format!(
            "`taskd bench process` against one taskd on embedded defaults. 64 workers on 4 connections; {} tasks, \
             {BATCH} a call or frame; 1 a call: {} tasks. The last two: tasks come one a call, faster than taskd \
             takes them.",
            scale.tasks, scale.single_tasks
        ),
        references: vec!["polls, 1 a call".into(), format!("polls, {BATCH} a call")],
        rows: vec![
            row("polls, 1 a call", &figures.one.poll),
            row("streams, 1 a frame", &figures.one.stream),
            row(&format!("polls, {BATCH} a call"), &figures.many.poll),
            row(&format!("streams, {BATCH} a frame"), &figures.many.stream),
            most(
                "insert → completed, 1 a call, by polls",
                &figures.capacity.poll,
            ),
            most(
                "insert → completed, 1 a call, by streams",
                &figures.capacity.stream,
            ),
        ],
    }
}

fn latency(scale: &Scale, figures: &Figures) -> Table {
    let at = figures.latency.iter().zip(LOADS);
    let rows = at.flat_map(|(pairs, load)| {
        let quantiles = pairs.iter().zip(["p50", "p99"]);
        quantiles.flat_map(move |(pair, quantile)| {
            pair.rows(&format!("{load} % load, {quantile}"), Unit::Micros)
        })
    });
    Table {
        bench: "push",
        title: "push: from the insert to the handler",
        conditions: format!(
            "`taskd bench latency --batch 1`, {} at each load: 64 workers with one task at a time, tasks one a call. \
             100 % is what the same taskd took when tasks came faster than it could, by the slower way.",
            scale.loaded_for
        ),
        references: vec!["polls".into()],
        rows: rows.collect(),
    }
}

fn waiters(scale: &Scale, figures: &Figures) -> Table {
    let memory = figures
        .memory
        .rows("memory of taskd for a worker that waits", Unit::Bytes);
    let cpu = figures.cpu.rows(
        "CPU of taskd and Redis for all of them",
        Unit::PercentOfACore,
    );
    Table {
        bench: "push",
        title: "push: workers that wait",
        conditions: format!(
            "{} workers, {WORKERS_A_CONNECTION} a connection, wait for a queue without tasks, each with a get call of \
             60 s or with a session, whose heartbeats go both ways every {} s. Resident memory before and after, \
             divided by the workers; CPU over {} s.",
            scale.waiting_workers,
            HEARTBEAT.as_secs(),
            scale.wait_for.as_secs()
        ),
        references: vec!["polls".into()],
        rows: memory.into_iter().chain(cpu).collect(),
    }
}

/// The cost of waiting workers.
struct Price {
    /// Per worker.
    bytes: f64,
    /// For all workers together.
    percent_of_a_core: f64,
}

/// Lets workers wait in the way of `wait`. Fails if any of them ends.
async fn waiting<F>(scale: &Scale, wait: impl Fn(Channel, usize) -> F) -> anyhow::Result<Price>
where
    F: Future<Output = anyhow::Result<Waiting>>,
{
    let daemon = Daemon::start_as("all", &[], CONFIG).await?;
    let channels = daemon
        .channels(scale.waiting_workers.div_ceil(WORKERS_A_CONNECTION))
        .await?;
    // Start one worker per connection first, so that shared costs are not attributed to the others.
    let mut workers = JoinSet::new();
    for (number, channel) in channels.iter().enumerate() {
        workers.spawn(wait(channel.clone(), number).await?);
    }
    settle().await;
    let before = daemon.used().await?;
    let rest = (channels.len()..scale.waiting_workers)
        .map(|number| wait(channels[number % channels.len()].clone(), number));
    let rest: Vec<Waiting> = futures::stream::iter(rest)
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    let count = rest.len();
    rest.into_iter().for_each(|one| drop(workers.spawn(one)));
    settle().await;
    let begun = daemon.used().await?;
    sleep(scale.wait_for).await;
    let done = daemon.used().await?;
    if let Some(ended) = workers.try_join_next() {
        ended??;
    }
    let cpu = |used: Used| used.taskd_cpu + used.redis_cpu;
    // The disconnecting clients must not count.
    workers.shutdown().await;
    drop(channels);
    daemon.stop().await?;
    Ok(Price {
        bytes: (begun.taskd_bytes - before.taskd_bytes) / count as f64,
        percent_of_a_core: 100.0 * (cpu(done) - cpu(begun)) / scale.wait_for.as_secs_f64(),
    })
}

/// Waits until the work caused by the last calls is done.
async fn settle() {
    sleep(Duration::from_secs(2)).await;
}

/// A worker that keeps waiting. It only ends with an error.
type Waiting = futures::future::BoxFuture<'static, anyhow::Result<()>>;

const QUEUE: &str = "nothing-comes";

async fn poll(channel: Channel, number: usize) -> anyhow::Result<Waiting> {
    let mut client = TasksClient::new(channel);
    let worker = format!("waits-{number}");
    Ok(Box::pin(async move {
        loop {
            let queues = vec![QUEUE.to_owned()];
            let get = pb::GetTasksRequest {
                worker: worker.clone(),
                queues,
                wait: WAIT,
                ..Default::default()
            };
            let answer = client
                .get_tasks(get)
                .await
                .context("a poll failed")?
                .into_inner();
            ensure!(answer.tasks.is_empty(), "a task came from nowhere");
        }
    }))
}

async fn stream(channel: Channel, number: usize) -> anyhow::Result<Waiting> {
    let (worker, queues) = (format!("waits-{number}"), vec![QUEUE.to_owned()]);
    let open = Some(pb::OpenSession {
        worker,
        queues,
        want: 10,
        ..Default::default()
    });
    let mut beats = interval(HEARTBEAT);
    // The first tick is immediate; the opening frame takes its place.
    beats.tick().await;
    let beats = futures::stream::unfold(beats, |mut beats| async move {
        beats.tick().await;
        Some((pb::WorkerFrame::default(), beats))
    });
    let frames = futures::stream::iter([pb::WorkerFrame {
        open,
        ..Default::default()
    }])
    .chain(beats);
    let mut taskd = TasksClient::new(channel)
        .stream_tasks(frames)
        .await
        .context("a stream was refused")?
        .into_inner();
    let first = taskd.message().await?.context("the stream ended at once")?;
    ensure!(
        first.opened.is_some_and(|opened| opened.granted == 10),
        "the session has another demand"
    );
    Ok(Box::pin(async move {
        loop {
            let frame = taskd.message().await?.context("the stream ended")?;
            ensure!(frame.tasks.is_empty(), "a task came from nowhere");
        }
    }))
}
