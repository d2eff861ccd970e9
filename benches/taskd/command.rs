//! `taskd bench`, the command that users have, beside the least that Redis must do for the same work in the same run.

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::process::Command;

use crate::{
    limits,
    progress::Progress,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
};

/// As the command has it by default.
const CALLERS: usize = 64;
const BATCH: usize = 100;

#[derive(Default)]
struct Limits {
    insert: Runs,
    cycle: Runs,
    cycle_one: Runs,
    p50: Runs,
    p99: Runs,
}

#[derive(Default)]
struct Figures {
    accepted: Runs,
    claimable: Runs,
    known: Runs,
    completed: Runs,
    settled: Runs,
    completed_one: Runs,
    settled_one: Runs,
    p50: Runs,
    p99: Runs,
    passed_p50: Runs,
    passed_p99: Runs,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let (mut limits, mut figures) = (Limits::default(), Figures::default());
    for run in 1..=scale.runs {
        let step = |what: &str| progress.step(format!("command, run {run} of {}: {what}", scale.runs));
        step("limits of Redis");
        measure_redis(&mut limits, scale).await?;
        step("taskd bench");
        let many = bench(&["--tasks", &scale.flow_tasks.to_string(), "--batch", &BATCH.to_string()]).await?;
        step("taskd bench, 1 a call");
        let one = bench(&["process", "--tasks", &scale.flow_single_tasks.to_string(), "--batch", "1"]).await?;
        figures.add(&many, &one)?;
    }
    Ok(vec![throughput(scale, &limits, &figures), latency(&limits, &figures)])
}

async fn measure_redis(limits: &mut Limits, scale: &Scale) -> anyhow::Result<()> {
    let redis = limits::Redis::start().await?;
    limits.insert.push(redis.insert(CALLERS, BATCH, scale.flow_tasks)?);
    limits.cycle.push(redis.cycle(CALLERS, BATCH, scale.flow_tasks)?);
    limits.cycle_one.push(redis.cycle(CALLERS, 1, scale.flow_single_tasks)?);
    let micros = redis.hand_over(scale.latency_samples)?;
    limits.p50.push(quantile(&micros, 0.5));
    limits.p99.push(quantile(&micros, 0.99));
    Ok(())
}

/// One run with a taskd of the command's own. A count that is wrong is an error.
async fn bench(arguments: &[&str]) -> anyhow::Result<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.arg("bench").args(arguments).args(["--runs", "1", "--json"]);
    let output = command.output().await.context("cannot start taskd")?;
    ensure!(output.status.success(), "taskd bench: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Figures {
    fn add(&mut self, many: &Value, one: &Value) -> anyhow::Result<()> {
        for (runs, report, phase, measure) in [
            (&mut self.accepted, many, "insert", "accepted"),
            (&mut self.claimable, many, "insert", "claimable"),
            (&mut self.known, many, "duplicates", "answered"),
            (&mut self.completed, many, "process", "completed"),
            (&mut self.settled, many, "process", "settled in SQL"),
            (&mut self.completed_one, one, "process", "completed"),
            (&mut self.settled_one, one, "process", "settled in SQL"),
        ] {
            let rates = report["rates"].as_array().into_iter().flatten();
            let mut found = rates.filter(|rate| rate["phase"] == phase && rate["measure"] == measure);
            let rate = found.next().and_then(|rate| rate["per_second"]["median"].as_f64());
            runs.push(rate.with_context(|| format!("taskd bench has no figure {phase} {measure}"))?);
        }
        for (runs, measure, quantile) in [
            (&mut self.p50, "insert to handler", "p50"),
            (&mut self.p99, "insert to handler", "p99"),
            (&mut self.passed_p50, "rejection to handler", "p50"),
            (&mut self.passed_p99, "rejection to handler", "p99"),
        ] {
            let mut latencies = many["latency_ms"].as_array().into_iter().flatten();
            let latency = latencies.find(|latency| latency["measure"] == measure);
            let millis = latency.and_then(|latency| latency[quantile]["median"].as_f64());
            runs.push(millis.with_context(|| format!("taskd bench has no {measure} {quantile}"))? * 1e3);
        }
        Ok(())
    }
}

fn row(figure: impl Into<String>, unit: Unit, runs: &Runs, limit: Option<&Runs>) -> Row {
    Row { figure: figure.into(), unit, runs: runs.clone(), ratios: vec![limit.map(|limit| runs.over(limit))] }
}

fn throughput(scale: &Scale, limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: String, runs, limit| row(figure, Unit::PerSecond, runs, limit);
    let (insert, cycle, one) = (Some(&limits.insert), Some(&limits.cycle), Some(&limits.cycle_one));
    Table {
        bench: "command",
        title: "taskd bench: tasks a second",
        conditions: format!(
            "`taskd bench` with a taskd of its own on embedded defaults: Redis appendfsync always, SQLite synchronous \
             FULL. {} tasks, {BATCH} a call; 1 a call: {} tasks. {CALLERS} inserts in flight, {CALLERS} workers. \
             Redis at the same durability, in the same batches, from {CALLERS} connections.",
            scale.flow_tasks, scale.flow_single_tasks
        ),
        references: vec!["Redis".into()],
        rows: vec![
            row(format!("limit: Redis, LPUSH of {BATCH}"), &limits.insert, None),
            row(format!("limit: Redis, XREADGROUP, XACK + XDEL, {BATCH} a call"), &limits.cycle, None),
            row("limit: Redis, the same, 1 a call".into(), &limits.cycle_one, None),
            row("insert → accepted".into(), &figures.accepted, insert),
            row("insert → claimable".into(), &figures.claimable, insert),
            row("duplicates → answered".into(), &figures.known, insert),
            row(format!("process → completed, {BATCH} a call"), &figures.completed, cycle),
            row(format!("process → settled in SQL, {BATCH} a call"), &figures.settled, cycle),
            row("process → completed, 1 a call".into(), &figures.completed_one, one),
            row("process → settled in SQL, 1 a call".into(), &figures.settled_one, one),
        ],
    }
}

fn latency(limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: &str, runs, limit| row(figure, Unit::Micros, runs, limit);
    Table {
        bench: "command",
        title: "taskd bench: latency at 500 tasks a second, one a call",
        conditions: "As above; tasks are due at fixed times. Redis: one task after the other.".into(),
        references: vec!["Redis".into()],
        rows: vec![
            row("limit: Redis, LPUSH → BLPOP, p50", &limits.p50, None),
            row("limit: Redis, LPUSH → BLPOP, p99", &limits.p99, None),
            row("insert → handler, p50", &figures.p50, Some(&limits.p50)),
            row("insert → handler, p99", &figures.p99, Some(&limits.p99)),
            row("rejection → handler, p50", &figures.passed_p50, Some(&limits.p50)),
            row("rejection → handler, p99", &figures.passed_p99, Some(&limits.p99)),
        ],
    }
}
