//! The phase workflow: steps of executions beside plain tasks through the same workers; late rounds
//! of a loop beside early ones; the memory of executions that wait; other queues of a taskd that
//! could run workflows, beside one that could not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use axum::body::Bytes;
use hyper::{Method, StatusCode};
use indicatif::HumanCount;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{
    args::{Part, Phase, Work},
    insert::{Plan, insert_all},
    process::{Habit, complete_all},
    progress,
    run::Run,
    server::{Server, Usage},
    throughput,
    trees::{self, Report},
};
use crate::{
    cli::{client::Taskd, http::Connection},
    model::printable,
    wire::pb::{self, tasks_client::TasksClient},
};

/// The pipelines of a taskd that could not run a workflow.
const WITHOUT: &str = "discovery,fanout,watchdog,tasks";
/// How often the two are measured, in turn: one pass differs from the next by more than what is
/// measured.
const PASSES: u32 = 3;
/// The round after which early rounds of a loop are timed, and how many are.
const EARLY: u32 = 100;
const TIMED: u32 = 200;
/// In how many blocks they are timed, late and early ones in turn.
const BLOCKS: u32 = 4;
/// The most executions that wait before memory is looked at for the first time: as many as taskd
/// keeps in memory.
const WARM: u32 = 1000;
/// How long nothing happens before memory is looked at.
const CALM: Duration = Duration::from_secs(3);
/// How long executions may take to end, or to come to wait.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often to look whether they have.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a call waits for a task.
const WAIT: prost_types::Duration = prost_types::Duration {
    seconds: 20,
    nanos: 0,
};

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    let work = Work {
        replicas: 1,
        queues: 1,
        ..run.args.work.clone()
    };
    // Before anything is deployed.
    other_queues(run, &work).await?;
    steps(run, &work).await?;
    rounds(run).await?;
    parked(run, &work).await
}

fn note(
    run: &mut Run<'_>,
    measure: &str,
    unit: &'static str,
    value: Option<f64>,
    reference: Option<(&str, f64)>,
) {
    run.report
        .figure(Phase::Workflow, measure, unit, value, reference);
}

/// How long tasks took to be inserted and to be completed.
#[derive(Clone, Copy, Default)]
struct Took {
    insert: Duration,
    process: Duration,
}

impl Took {
    async fn add_pass(&mut self, run: &mut Run<'_>, work: &Work, what: &str) -> anyhow::Result<()> {
        let tasks = run.tasks(what, work);
        run.step(&format!("insert, {what}"), work.tasks.into());
        let began = Instant::now();
        insert_all(run, work, &tasks, Plan::From(0)).await?;
        self.insert += began.elapsed();
        let total = u64::from(work.tasks);
        let all = run
            .server
            .wait_for(&tasks.queues, work.give_up_after.0, |counts| {
                counts.waiting == total
            })
            .await?;
        all.context("gave up: not all tasks can be claimed")?;
        let began = Instant::now();
        let done = complete_all(run, what, work, &tasks, work.tasks, Habit::Plain).await?;
        let (last, ..) = done.context("not every task was completed once")?;
        self.process += last.saturating_duration_since(began);
        Ok(())
    }

    /// Tasks a second: inserted, and completed.
    fn rates(&self, tasks: u32) -> [f64; 2] {
        [self.insert, self.process].map(|took| f64::from(tasks) / took.as_secs_f64())
    }
}

/// Inserts and completes tasks on a taskd that runs no workflow, but could, and on one that could
/// not.
async fn other_queues(run: &mut Run<'_>, work: &Work) -> anyhow::Result<()> {
    let mut other = Server::open_with(run.args, Part::Workflow, WITHOUT).await?;
    throughput::warm_up(run).await?;
    std::mem::swap(&mut run.server, &mut other);
    throughput::warm_up(run).await?;
    std::mem::swap(&mut run.server, &mut other);
    let mut with = Took::default();
    let mut without = Took::default();
    for pass in 0..PASSES {
        let what = format!("pass-{pass}");
        // Which of them is first alternates.
        for is_with in [pass % 2 == 1, pass % 2 == 0] {
            if is_with {
                with.add_pass(run, work, &what).await?;
            } else {
                std::mem::swap(&mut run.server, &mut other);
                without.add_pass(run, work, &what).await?;
                std::mem::swap(&mut run.server, &mut other);
            }
        }
    }
    other.close().await?;
    let tasks = PASSES * work.tasks;
    let [inserted, completed] = without.rates(tasks);
    let [with_inserted, with_completed] = with.rates(tasks);
    for (what, without, with) in [
        ("inserted", inserted, with_inserted),
        ("completed", completed, with_completed),
    ] {
        let reference = format!("tasks {what}, without the pipeline workflow");
        note(run, &reference, "/s", Some(without), None);
        let measure = format!("tasks {what}, with it, none deployed");
        let reference = Some((reference.as_str(), without));
        note(run, &measure, "/s", Some(with), reference);
    }
    Ok(())
}

/// What tasks cost.
struct Cost {
    per_second: f64,
    /// CPU of taskd and of Redis, from the insert or the start to the end, in µs per task.
    cpu: Option<f64>,
}

impl Cost {
    fn of(tasks: u32, took: Duration, used: Usage) -> Self {
        let tasks = f64::from(tasks);
        let cpu = used.taskd.zip(used.redis);
        Self {
            per_second: tasks / took.as_secs_f64(),
            cpu: cpu.map(|(taskd, redis)| (taskd + redis) * 1e6 / tasks),
        }
    }
}

/// Lets workers complete the steps of executions, and as many plain tasks.
async fn steps(run: &mut Run<'_>, work: &Work) -> anyhow::Result<()> {
    let sizes = run.args.workflow.clone();
    let total = sizes.executions * sizes.steps;
    let plain = plain_tasks(run, work, total).await?;
    let flow = all_steps(run, work, sizes.executions, sizes.steps).await?;
    let measure = format!(
        "steps, {} executions of {} each",
        HumanCount(sizes.executions.into()),
        sizes.steps
    );
    note(run, "plain tasks", "/s", Some(plain.per_second), None);
    let reference = Some(("plain tasks", plain.per_second));
    note(run, &measure, "/s", Some(flow.per_second), reference);
    note(run, "CPU of a plain task", "µs", plain.cpu, None);
    let reference = plain.cpu.map(|cpu| ("CPU of a plain task", cpu));
    note(run, "CPU of a step", "µs", flow.cpu, reference);
    Ok(())
}

async fn plain_tasks(run: &Run<'_>, work: &Work, total: u32) -> anyhow::Result<Cost> {
    let work = Work {
        tasks: total,
        ..work.clone()
    };
    let tasks = run.tasks("plain", &work);
    run.step("plain tasks: insert", total.into());
    let before = run.server.usage().await;
    insert_all(run, &work, &tasks, Plan::From(0)).await?;
    let took = work_off(run, &work, &tasks.queues[0], (total, total)).await?;
    let used = run.server.usage().await.since(before);
    Ok(Cost::of(total, took, used))
}

async fn all_steps(
    run: &Run<'_>,
    work: &Work,
    executions: u32,
    steps: u32,
) -> anyhow::Result<Cost> {
    let flow = Flow::new(run, "steps");
    let mut tasks = String::new();
    for number in 1..=steps {
        tasks.push_str(&format!("  - step{number}:\n{}", flow.call("      ")));
    }
    flow.deploy(run, &tasks).await?;
    let before = run.server.usage().await;
    flow.start(run, work, executions).await?;
    let took = work_off(run, work, &flow.name, (executions, executions * steps)).await?;
    let began = Instant::now();
    flow.until_none(run, &["pending", "running", "waiting"])
        .await?;
    let took = took + began.elapsed();
    let used = run.server.usage().await.since(before);
    let other = flow.count(run, &["faulted", "cancelled"]).await?;
    ensure!(other == 0, "{other} executions have not completed");
    Ok(Cost::of(executions * steps, took, used))
}

/// Waits until the first tasks of a queue can be claimed, and lets workers complete these and all
/// that follow. Returns how long that took.
async fn work_off(
    run: &Run<'_>,
    work: &Work,
    queue: &str,
    (first, all): (u32, u32),
) -> anyhow::Result<Duration> {
    let patience = work.give_up_after.0;
    let queues = [queue.to_owned()];
    let are_there = run.server.wait_for(&queues, patience, |counts| {
        counts.waiting == u64::from(first)
    });
    are_there
        .await?
        .context("gave up: not all tasks can be claimed")?;
    let began = Instant::now();
    trees::work_off(run, work, "workflow", queue, all, Report::Nothing).await?;
    let are_done = run.server.wait_for(&queues, patience, |counts| {
        counts.completed == u64::from(all)
    });
    let at = are_done
        .await?
        .context("gave up: not all tasks are completed")?;
    Ok(at - began)
}

/// Times late rounds of a loop, and in turn early ones of another execution.
async fn rounds(run: &mut Run<'_>) -> anyhow::Result<()> {
    let rounds = run.args.workflow.rounds;
    let early = EARLY.min(rounds / 4);
    let timed = TIMED.min(rounds / 4).max(1);
    let late = rounds - timed;
    run.step("rounds", u64::from(late + early + 2 * timed));
    let mut first = Loop::start(run, "late", rounds).await?;
    for _ in 0..late {
        first.round(run).await?;
    }
    // Not before: it holds a task from the start, whose lease would end meanwhile.
    let mut second = Loop::start(run, "early", rounds).await?;
    for _ in 0..early {
        second.round(run).await?;
    }
    let [mut late_cost, mut early_cost] = [RoundCost::default(), RoundCost::default()];
    for blocks_left in (1..=BLOCKS).rev() {
        let rounds = (timed - late_cost.rounds()).div_ceil(blocks_left);
        late_cost.add_block(run, &mut first, rounds).await?;
        early_cost.add_block(run, &mut second, rounds).await?;
    }
    let [late, early] = [late, early].map(|after| HumanCount(after.into()));
    let (late_cpu, early_cpu) = (late_cost.cpu_us(), early_cost.cpu_us());
    for (what, unit, late_value, early_value) in [
        (
            "",
            "ms",
            Some(late_cost.median_ms()),
            Some(early_cost.median_ms()),
        ),
        ("CPU of ", "µs", late_cpu, early_cpu),
    ] {
        let reference = format!("{what}a round of a loop, after {early}");
        note(run, &reference, unit, early_value, None);
        let measure = format!("{what}a round of a loop, after {late}");
        let reference = early_value.map(|early| (reference.as_str(), early));
        note(run, &measure, unit, late_value, reference);
    }
    Ok(())
}

/// What rounds of a loop cost. The time of a round is mostly the tick on which taskd forwards reports,
/// so a round that needs more CPU is not seen in it.
#[derive(Default)]
struct RoundCost {
    times_ms: Vec<f64>,
    /// Of taskd and of Redis, in seconds; `None` if it is not known.
    cpu: Option<f64>,
}

impl RoundCost {
    fn rounds(&self) -> u32 {
        self.times_ms.len() as u32
    }

    async fn add_block(
        &mut self,
        run: &Run<'_>,
        flow: &mut Loop,
        rounds: u32,
    ) -> anyhow::Result<()> {
        let before = run.server.usage().await;
        for _ in 0..rounds {
            self.times_ms.push(flow.round(run).await?);
        }
        let used = run.server.usage().await.since(before);
        let used = used.taskd.zip(used.redis);
        self.cpu = used.map(|(taskd, redis)| taskd + redis + self.cpu.unwrap_or_default());
        Ok(())
    }

    fn median_ms(&self) -> f64 {
        let mut times = self.times_ms.clone();
        times.sort_unstable_by(f64::total_cmp);
        times[times.len() / 2]
    }

    /// CPU of a round, in µs.
    fn cpu_us(&self) -> Option<f64> {
        Some(self.cpu? * 1e6 / f64::from(self.rounds()))
    }
}

/// An execution of a loop, each round of which has one step, and its only worker.
struct Loop {
    client: TasksClient<Taskd>,
    queue: String,
    task: pb::LeasedTask,
}

impl Loop {
    const WORKER: &str = "bench-loop";

    async fn start(run: &Run<'_>, what: &str, rounds: u32) -> anyhow::Result<Self> {
        let flow = Flow::new(run, what);
        let step = flow.call("            ");
        let tasks = format!(
            "  - again:\n      for: {{ each: round, in: '.' }}\n      do:\n        - step:\n{step}"
        );
        flow.deploy(run, &tasks).await?;
        // One more than are timed: after each round the next task comes.
        let input: Vec<u32> = (0..=rounds).collect();
        let body = Bytes::from(json!({ "input": input }).to_string());
        let mut connection = run.server.http().connect().await?;
        flow.start_one(&mut connection, body).await?;
        let mut client = TasksClient::new(run.server.channel(0));
        let task = next_task(&mut client, &flow.name).await?;
        Ok(Self {
            client,
            queue: flow.name,
            task,
        })
    }

    /// Completes the step of a round, and waits for that of the next one. Returns how long it took,
    /// in ms.
    async fn round(&mut self, run: &Run<'_>) -> anyhow::Result<f64> {
        let began = Instant::now();
        let request = pb::CompleteTasksRequest {
            worker: Self::WORKER.to_owned(),
            completions: vec![pb::Completion {
                id: self.task.id.clone(),
                lease_token: self.task.lease_token.clone(),
                ..Default::default()
            }],
            next: None,
        };
        let answer = self.client.complete_tasks(request).await?.into_inner();
        let is_done = answer
            .results
            .iter()
            .all(|result| result.status() == pb::ItemStatus::Ok);
        ensure!(is_done, "taskd answered a completion with {answer:?}");
        self.task = next_task(&mut self.client, &self.queue).await?;
        run.bar.inc(1);
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

async fn next_task(client: &mut TasksClient<Taskd>, queue: &str) -> anyhow::Result<pb::LeasedTask> {
    let request = pb::GetTasksRequest {
        worker: Loop::WORKER.to_owned(),
        queues: vec![queue.to_owned()],
        max_tasks: 1,
        wait: Some(WAIT),
        ..Default::default()
    };
    let tasks = client.get_tasks(request).await?.into_inner().tasks;
    let next = tasks.into_iter().next();
    next.context("gave up: the next round of a loop does not come")
}

/// Lets executions wait for a month.
async fn parked(run: &mut Run<'_>, work: &Work) -> anyhow::Result<()> {
    let all = run.args.workflow.parked;
    let flow = Flow::new(run, "parked");
    flow.deploy(run, "  - park: { wait: { days: 30 } }\n")
        .await?;
    let warm = WARM.min(all.div_ceil(10));
    flow.start(run, work, warm).await?;
    let before = resident(run, &flow).await?;
    flow.start(run, work, all).await?;
    let after = resident(run, &flow).await?;
    let bytes = after
        .zip(before)
        .map(|(after, before)| (after - before) / f64::from(all));
    let measure = format!(
        "memory of an execution that waits, {} do",
        HumanCount(all.into())
    );
    note(run, &measure, "bytes", bytes, None);
    Ok(())
}

/// The resident memory of taskd when all executions wait.
async fn resident(run: &Run<'_>, flow: &Flow) -> anyhow::Result<Option<f64>> {
    flow.until_none(run, &["pending", "running"]).await?;
    tokio::time::sleep(CALM).await;
    Ok(run.server.resident_bytes())
}

/// A workflow, whose name is that of the queue of its steps, too.
struct Flow {
    name: String,
}

impl Flow {
    const NAMESPACE: &str = "bench";

    fn new(run: &Run<'_>, what: &str) -> Self {
        Self {
            name: format!("{}-{what}", run.name),
        }
    }

    /// The call of a step, without an input.
    fn call(&self, indent: &str) -> String {
        let queue = &self.name;
        format!(
            "{indent}call: step\n{indent}with: {{}}\n{indent}metadata: {{ taskd: {{ queue: {queue} }} }}\n"
        )
    }

    async fn deploy(&self, run: &Run<'_>, tasks: &str) -> anyhow::Result<()> {
        let text = format!(
            "document: {{ dsl: '1.0.3', namespace: {}, name: {}, version: '1.0.0' }}\ndo:\n{tasks}",
            Self::NAMESPACE,
            self.name
        );
        let body = Some(("application/yaml", Bytes::from(text)));
        let mut connection = run.server.http().connect().await?;
        let (status, _, body) = connection
            .answer(Method::PUT, "/v1/workflows", body)
            .await?;
        accepted(status, &body)
    }

    /// Starts executions.
    async fn start(&self, run: &Run<'_>, work: &Work, executions: u32) -> anyhow::Result<()> {
        run.step("start executions", executions.into());
        let next = Arc::new(AtomicU32::new(0));
        let mut callers = JoinSet::new();
        for _ in 0..work.concurrency {
            let http = run.server.http().clone();
            let next = Arc::clone(&next);
            let bar = run.bar.clone();
            let flow = Self {
                name: self.name.clone(),
            };
            callers.spawn(async move {
                let mut connection = http.connect().await?;
                while next.fetch_add(1, Ordering::Relaxed) < executions {
                    let body = Bytes::from_static(b"{}");
                    flow.start_one(&mut connection, body).await?;
                    bar.inc(1);
                }
                anyhow::Ok(())
            });
        }
        while let Some(done) =
            progress::next_moving(&mut callers, run.bar, work.give_up_after.0).await?
        {
            done?;
        }
        Ok(())
    }

    async fn start_one(&self, connection: &mut Connection<'_>, body: Bytes) -> anyhow::Result<()> {
        let path = format!(
            "/v1/workflows/{}/{}/1.0.0:start",
            Self::NAMESPACE,
            self.name
        );
        let body = Some(("application/json", body));
        let (status, _, body) = connection.answer(Method::POST, &path, body).await?;
        accepted(status, &body)
    }

    /// Waits until no execution has one of these statuses.
    async fn until_none(&self, run: &Run<'_>, statuses: &[&str]) -> anyhow::Result<()> {
        let began = Instant::now();
        while self.count(run, statuses).await? > 0 {
            ensure!(
                began.elapsed() < PATIENCE,
                "gave up: executions of {} are still {}",
                self.name,
                statuses.join(" or ")
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// For how many of these statuses there are executions.
    async fn count(&self, run: &Run<'_>, statuses: &[&str]) -> anyhow::Result<usize> {
        #[derive(Deserialize)]
        struct Page {
            executions: Vec<Value>,
        }
        let mut count = 0;
        let mut connection = run.server.http().connect().await?;
        for status in statuses {
            let path = format!(
                "/v1/executions?workflow={}/{}&status={status}&limit=1",
                Self::NAMESPACE,
                self.name
            );
            let (status, _, body) = connection.answer(Method::GET, &path, None).await?;
            accepted(status, &body)?;
            let page: Page = serde_json::from_slice(&body)?;
            count += page.executions.len();
        }
        Ok(count)
    }
}

fn accepted(status: StatusCode, body: &[u8]) -> anyhow::Result<()> {
    let said = String::from_utf8_lossy(body);
    ensure!(
        status.is_success(),
        "taskd answers {status}: {}",
        printable(said.trim())
    );
    Ok(())
}
