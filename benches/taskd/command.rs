//! `taskd bench`, the command that users run, compared with the minimal work that Redis, SQLite and
//! gRPC must do for it, in the same run.

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::process::Command;

use crate::{
    claim,
    daemon::Daemon,
    limits,
    progress::Progress,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
};

/// The defaults of the command.
const CALLERS: usize = 64;
const CONNECTIONS: usize = 4;
/// How many calls to its health service taskd accepts on one connection at a time.
const PROBES_OF_CONNECTION: usize = 10;
const BATCH: usize = 100;
/// Rows per transaction: taskd batches this many from its callers.
const ROWS: usize = 1000;
/// The number of callers that keep one Redis busy with taskd's scripts.
const SCRIPT_CALLERS: usize = 16;

#[derive(Default)]
struct Limits {
    ping: Runs,
    insert: Runs,
    cycle: Runs,
    cycle_one: Runs,
    scripts: Runs,
    scripts_one: Runs,
    sqlite: Runs,
    /// Two empty calls per task.
    grpc: Runs,
    p50: Runs,
    p99: Runs,
    /// CPU of the minimal work per task, at 500 tasks per second: three empty gRPC calls, and two
    /// Redis writes.
    calls_cpu: Runs,
    writes_cpu: Runs,
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
    /// With `--next` and with `--stream`.
    completed_next: Runs,
    completed_stream: Runs,
    rebuilt: Runs,
    p50: Runs,
    p99: Runs,
    passed_p50: Runs,
    passed_p99: Runs,
    taskd_cpu: Runs,
    redis_cpu: Runs,
    /// The figures of the phases flat and start, as the command prints them.
    compared: Vec<Compared>,
}

struct Compared {
    figure: String,
    value: Runs,
    ratio: Option<Runs>,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let (mut limits, mut figures) = (Limits::default(), Figures::default());
    for run in 1..=scale.runs {
        let step =
            |what: &str| progress.step(format!("command, run {run} of {}: {what}", scale.runs));
        step("limits");
        measure_limits(&mut limits, scale).await?;
        step("taskd bench");
        let many = bench(&[
            "--tasks",
            &scale.tasks.to_string(),
            "--batch",
            &BATCH.to_string(),
        ])
        .await?;
        step("taskd bench, 1 a call");
        let single_tasks = scale.single_tasks.to_string();
        let one = ["process", "--tasks", &single_tasks, "--batch", "1"];
        for (runs, way) in [
            (&mut figures.completed_next, "--next"),
            (&mut figures.completed_stream, "--stream"),
        ] {
            runs.push(rate_of(
                &bench(&[&one[..], &[way]].concat()).await?,
                "process",
                "completed",
            )?);
        }
        let one = bench(&one).await?;
        step("taskd bench flat start");
        let rebuilt = scale.rebuilt.to_string();
        let compared =
            bench(&[&["flat", "start", "--tasks", &rebuilt], scale.compared].concat()).await?;
        figures.add(&many, &one, &compared)?;
    }
    let tables = vec![
        throughput(scale, &limits, &figures),
        latency(&limits, &figures),
        cpu(&limits, &figures),
        compared_table(&figures),
    ];
    Ok(tables)
}

/// Measures what limits per key cost.
pub(crate) async fn keys(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut figures = Figures::default();
    for run in 1..=scale.runs {
        progress.step(format!("limits, run {run} of {}", scale.runs));
        let report = bench(&[&["limits"], scale.limited].concat()).await?;
        for figure in report["figures"].as_array().into_iter().flatten() {
            figures.compare(figure);
        }
    }
    Ok(vec![Table {
        bench: "limits",
        title: "taskd bench: limits",
        conditions: "`taskd bench limits` with a taskd of its own on embedded defaults.".into(),
        references: vec!["the other".into()],
        rows: compared_rows(&figures).collect(),
    }])
}

/// Measures records of topics beside inserted tasks.
pub(crate) async fn topics(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut figures = Figures::default();
    let mut latencies: Vec<(&str, Runs)> = Vec::new();
    for run in 1..=scale.runs {
        progress.step(format!("topics, run {run} of {}", scale.runs));
        // Tasks are inserted and processed many times in this phase.
        let tasks = (scale.tasks / 2).to_string();
        let report = bench(&["topics", "--tasks", &tasks, "--duration", "5s"]).await?;
        for figure in report["figures"].as_array().into_iter().flatten() {
            figures.compare(figure);
        }
        for quantile in ["p50", "p99"] {
            let of = |measure: &str| -> anyhow::Result<f64> {
                let mut all = report["latency_ms"].as_array().into_iter().flatten();
                let found = all.find(|latency| latency["measure"] == measure);
                let found = found.and_then(|latency| latency[quantile]["median"].as_f64());
                found.with_context(|| format!("no {quantile} of {measure}"))
            };
            let ratio = of("publish to handler")? / of("insert to handler")?;
            match latencies.iter_mut().find(|(name, _)| *name == quantile) {
                Some((_, runs)) => runs.push(ratio),
                None => {
                    let mut runs = Runs::default();
                    runs.push(ratio);
                    latencies.push((quantile, runs));
                }
            }
        }
    }
    for (quantile, ratio) in latencies {
        figures.compared.push(Compared {
            figure: format!("publish to handler, {quantile}, beside insert to handler"),
            value: ratio,
            ratio: None,
        });
    }
    Ok(vec![Table {
        bench: "topics",
        title: "taskd bench: topics",
        conditions: "`taskd bench topics` with a taskd of its own on embedded defaults.".into(),
        references: vec!["the other".into()],
        rows: compared_rows(&figures).collect(),
    }])
}

async fn measure_limits(limits: &mut Limits, scale: &Scale) -> anyhow::Result<()> {
    let redis = limits::Redis::start().await?;
    limits.ping.push(redis.ping(CALLERS, scale.single_tasks)?);
    limits
        .insert
        .push(redis.insert(CALLERS, BATCH, scale.tasks)?);
    limits.cycle.push(redis.cycle(CALLERS, BATCH, scale.tasks)?);
    limits
        .cycle_one
        .push(redis.cycle(CALLERS, 1, scale.single_tasks)?);
    let micros = redis.hand_over(scale.latency_samples)?;
    limits.p50.push(quantile(&micros, 0.5));
    limits.p99.push(quantile(&micros, 0.99));
    limits
        .writes_cpu
        .push(redis.cpu_of_writes(scale.paced).await?);
    limits
        .scripts
        .push(claim::cycle(SCRIPT_CALLERS, BATCH, scale.tasks).await?);
    limits
        .scripts_one
        .push(claim::cycle(CALLERS, 1, scale.single_tasks).await?);
    limits.sqlite.push(
        limits::Sqlite::start()
            .await?
            .insert(ROWS, scale.tasks)
            .await?,
    );
    let daemon = Daemon::start().await?;
    let channels = daemon
        .channels(CALLERS.div_ceil(PROBES_OF_CONNECTION))
        .await?;
    let calls = limits::grpc(&channels, CALLERS, 2 * scale.single_tasks).await?;
    limits.grpc.push(calls / 2.0);
    limits
        .calls_cpu
        .push(limits::cpu_of_calls(&daemon, &channels[0], scale.paced).await?);
    daemon.stop().await
}

/// Runs the command once. Fails if a count is wrong.
pub(crate) async fn bench(arguments: &[&str]) -> anyhow::Result<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .arg("bench")
        .args(arguments)
        .args(["--runs", "1", "--json"]);
    let output = command.output().await.context("cannot start taskd")?;
    ensure!(
        output.status.success(),
        "taskd bench: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Tasks per second, as the command reports them.
pub(crate) fn rate_of(report: &Value, phase: &str, measure: &str) -> anyhow::Result<f64> {
    let mut rates = report["rates"].as_array().into_iter().flatten();
    let rate = rates.find(|rate| rate["phase"] == phase && rate["measure"] == measure);
    let rate = rate.and_then(|rate| rate["per_second"]["median"].as_f64());
    rate.with_context(|| format!("taskd bench has no figure {phase} {measure}"))
}

/// The CPU of a process, in µs per task, in the phase latency.
fn cpu_of(report: &Value, process: &str) -> anyhow::Result<f64> {
    let mut rates = report["rates"].as_array().into_iter().flatten();
    let rate = rates.find(|rate| rate["phase"] == "latency");
    let cpu = rate.and_then(|rate| rate["cpu_us_per_task"][process]["median"].as_f64());
    cpu.with_context(|| format!("taskd bench has no CPU of {process} in its phase latency"))
}

/// A latency in µs.
pub(crate) fn latency_of(report: &Value, measure: &str, quantile: &str) -> anyhow::Result<f64> {
    let mut latencies = report["latency_ms"].as_array().into_iter().flatten();
    let latency = latencies.find(|latency| latency["measure"] == measure);
    let millis = latency.and_then(|latency| latency[quantile]["median"].as_f64());
    Ok(millis.with_context(|| format!("taskd bench has no {measure} {quantile}"))? * 1e3)
}

impl Figures {
    fn add(&mut self, many: &Value, one: &Value, compared: &Value) -> anyhow::Result<()> {
        for (runs, report, phase, measure) in [
            (&mut self.accepted, many, "insert", "accepted"),
            (&mut self.claimable, many, "insert", "claimable"),
            (&mut self.known, many, "duplicates", "answered"),
            (&mut self.completed, many, "process", "completed"),
            (&mut self.settled, many, "process", "settled in SQL"),
            (&mut self.completed_one, one, "process", "completed"),
            (&mut self.settled_one, one, "process", "settled in SQL"),
            (
                &mut self.rebuilt,
                compared,
                "start",
                "claimable again after FLUSHALL",
            ),
        ] {
            runs.push(rate_of(report, phase, measure)?);
        }
        for (runs, measure, quantile) in [
            (&mut self.p50, "insert to handler", "p50"),
            (&mut self.p99, "insert to handler", "p99"),
            (&mut self.passed_p50, "rejection to handler", "p50"),
            (&mut self.passed_p99, "rejection to handler", "p99"),
        ] {
            runs.push(latency_of(many, measure, quantile)?);
        }
        self.taskd_cpu.push(cpu_of(many, "taskd")?);
        self.redis_cpu.push(cpu_of(many, "redis")?);
        for figure in compared["figures"].as_array().into_iter().flatten() {
            self.compare(figure);
        }
        Ok(())
    }

    fn compare(&mut self, figure: &Value) {
        let text = |field: &str| figure[field].as_str().unwrap_or_default();
        let beside = figure["reference"]
            .as_str()
            .map(|name| format!(" ÷ {name}"))
            .unwrap_or_default();
        let name = format!(
            "{}: {}{beside}, {}",
            text("phase"),
            text("measure"),
            text("unit")
        );
        let place = self
            .compared
            .iter()
            .position(|one| one.figure == name)
            .unwrap_or_else(|| {
                self.compared.push(Compared {
                    figure: name,
                    value: Runs::default(),
                    ratio: None,
                });
                self.compared.len() - 1
            });
        let one = &mut self.compared[place];
        one.value.0.extend(figure["value"]["median"].as_f64());
        if let Some(ratio) = figure["ratio"]["median"].as_f64() {
            one.ratio.get_or_insert_default().push(ratio);
        }
    }
}

fn row(figure: impl Into<String>, unit: Unit, runs: &Runs, limits: &[Option<&Runs>]) -> Row {
    let ratios = limits
        .iter()
        .map(|limit| limit.map(|limit| runs.over(limit)))
        .collect();
    Row {
        figure: figure.into(),
        unit,
        runs: runs.clone(),
        ratios,
    }
}

fn throughput(scale: &Scale, limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: String, runs, limits: [Option<&Runs>; 4]| {
        row(figure, Unit::PerSecond, runs, &limits)
    };
    let limit = |figure: String, runs| row(figure, runs, [None; 4]);
    let (insert, cycle, one) = (
        Some(&limits.insert),
        Some(&limits.cycle),
        Some(&limits.cycle_one),
    );
    let (scripts, scripts_one) = (Some(&limits.scripts), Some(&limits.scripts_one));
    let (sqlite, grpc) = (Some(&limits.sqlite), Some(&limits.grpc));
    let of_one = [one, scripts_one, None, None];
    Table {
        bench: "command",
        title: "taskd bench: tasks a second",
        conditions: format!(
            "`taskd bench` with a taskd of its own on embedded defaults: Redis appendfsync always, SQLite synchronous \
             FULL. {} tasks, {BATCH} a call; 1 a call: {} tasks. {CALLERS} inserts in flight, {CALLERS} workers, \
             {CONNECTIONS} gRPC connections. Limits at the same durability, in the same batches, from {CALLERS} \
             connections; scripts: {SCRIPT_CALLERS} callers of 100, or {CALLERS} of 1. Rebuild: {} tasks.",
            scale.tasks, scale.single_tasks, scale.rebuilt
        ),
        references: vec![
            "Redis".into(),
            "scripts".into(),
            "SQLite".into(),
            "gRPC".into(),
        ],
        rows: vec![
            limit("limit: Redis, PING".into(), &limits.ping),
            limit(format!("limit: Redis, LPUSH of {BATCH}"), &limits.insert),
            limit(
                format!("limit: Redis, XREADGROUP, XACK + XDEL, {BATCH} a call"),
                &limits.cycle,
            ),
            limit("limit: Redis, the same, 1 a call".into(), &limits.cycle_one),
            limit(
                format!("limit: taskd's scripts alone, claim + complete, {BATCH} a call"),
                &limits.scripts,
            ),
            limit("limit: the same, 1 a call".into(), &limits.scripts_one),
            limit(
                format!("limit: SQLite, {ROWS} rows a transaction"),
                &limits.sqlite,
            ),
            limit("limit: gRPC, two empty calls a task".into(), &limits.grpc),
            row(
                "insert → accepted".into(),
                &figures.accepted,
                [insert, None, sqlite, None],
            ),
            row(
                "insert → claimable".into(),
                &figures.claimable,
                [insert, None, sqlite, None],
            ),
            row(
                "duplicates → answered".into(),
                &figures.known,
                [insert, None, None, None],
            ),
            row(
                format!("process → completed, {BATCH} a call"),
                &figures.completed,
                [cycle, scripts, None, None],
            ),
            row(
                format!("process → settled in SQL, {BATCH} a call"),
                &figures.settled,
                [cycle, scripts, sqlite, None],
            ),
            row(
                "process → completed, 1 a call".into(),
                &figures.completed_one,
                [one, scripts_one, None, grpc],
            ),
            row(
                "process → settled in SQL, 1 a call".into(),
                &figures.settled_one,
                [one, scripts_one, sqlite, grpc],
            ),
            row(
                "process → completed, 1 a call, `--next`".into(),
                &figures.completed_next,
                of_one,
            ),
            row(
                "process → completed, 1 a frame, `--stream`".into(),
                &figures.completed_stream,
                of_one,
            ),
            row(
                "rebuild after FLUSHALL → claimable".into(),
                &figures.rebuilt,
                [insert, None, None, None],
            ),
        ],
    }
}

fn latency(limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: &str, runs, limit| row(figure, Unit::Micros, runs, &[limit]);
    Table {
        bench: "command",
        title: "taskd bench: latency at 500 tasks a second, one a call",
        conditions: "As above; tasks are due at fixed times. Redis: one task after the other."
            .into(),
        references: vec!["Redis".into()],
        rows: vec![
            row("limit: Redis, LPUSH → BLPOP, p50", &limits.p50, None),
            row("limit: Redis, LPUSH → BLPOP, p99", &limits.p99, None),
            row("insert → handler, p50", &figures.p50, Some(&limits.p50)),
            row("insert → handler, p99", &figures.p99, Some(&limits.p99)),
            row(
                "rejection → handler, p50",
                &figures.passed_p50,
                Some(&limits.p50),
            ),
            row(
                "rejection → handler, p99",
                &figures.passed_p99,
                Some(&limits.p99),
            ),
        ],
    }
}

fn cpu(limits: &Limits, figures: &Figures) -> Table {
    let row =
        |figure: &str, runs, limits: [Option<&Runs>; 2]| row(figure, Unit::Micros, runs, &limits);
    Table {
        bench: "command",
        title: "taskd bench: CPU of a task at 500 tasks a second, one a call",
        conditions: "As above, insert to settled. Limits: the CPU of the server for one task after the other, at the \
                     same rate; an LPUSH of one element is synced before it is answered."
            .into(),
        references: vec!["gRPC".into(), "Redis".into()],
        rows: vec![
            row("limit: taskd, three empty gRPC calls a task", &limits.calls_cpu, [None; 2]),
            row("limit: Redis, two LPUSH a task", &limits.writes_cpu, [None; 2]),
            row("taskd", &figures.taskd_cpu, [Some(&limits.calls_cpu), None]),
            row("Redis", &figures.redis_cpu, [None, Some(&limits.writes_cpu)]),
        ],
    }
}

fn compared_rows(figures: &Figures) -> impl Iterator<Item = Row> {
    figures.compared.iter().map(|one| Row {
        figure: one.figure.clone(),
        unit: Unit::Plain,
        runs: one.value.clone(),
        ratios: vec![one.ratio.clone()],
    })
}

fn compared_table(figures: &Figures) -> Table {
    Table {
        bench: "command",
        title: "taskd bench: flat and start",
        conditions: "`taskd bench flat start`, as above; 10 workers, 100 a call unless said."
            .into(),
        references: vec!["the first".into()],
        rows: compared_rows(figures).collect(),
    }
}
