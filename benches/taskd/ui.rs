//! The dashboard: its pages beside the same data by the API, and what viewers cost.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use serde_json::Value;

use crate::{
    command::{bench, rate_of},
    daemon::Daemon,
    progress::Progress,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
};

/// Requests for a figure.
const REQUESTS: usize = 30;
/// The tasks of a page, and the page that is compared with the first.
const ROWS: usize = 50;
const PAGE: usize = 200;
const VIEWERS: usize = 100;
/// How long the queues may take to have all tasks.
const WAIT_WITHIN: Duration = Duration::from_secs(120);
/// How often a page asks for its frame.
const FRAME_EVERY: Duration = Duration::from_secs(2);

/// The pages, and the data of each.
const PAGES: [(&str, &str); 5] = [
    ("ui/?flat=1", "v1/queues"),
    ("ui/tasks", "v1/tasks?limit=50"),
    ("ui/tasks?queue=q0", "v1/tasks?limit=50&queue=q0"),
    ("ui/dead", "v1/dead-letters?limit=50"),
    ("ui/workers", "v1/workers"),
];

/// The live pages. The viewers share them evenly.
const LIVE: [&str; 8] = [
    "ui/?flat=1",
    "ui/queues/q0",
    "ui/tasks?queue=q0",
    "ui/dead",
    "ui/workers",
    "ui/processes",
    "ui/books",
    "ui/bulk",
];

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let [tasks, queues] = scale.shown;
    progress.step(format!("ui: {tasks} tasks in {queues} queues"));
    let daemon = Daemon::start().await?;
    let mut lines = String::new();
    for number in 0..tasks {
        let queue = number % queues;
        lines.push_str(&format!(
            "{{\"queue\":\"q{queue}\",\"key\":\"{number}\"}}\n"
        ));
    }
    let mut answered = 0;
    let count = |_: &str| {
        answered += 1;
        Ok(())
    };
    daemon.insert_lines(Bytes::from(lines), count).await?;
    ensure!(
        answered == tasks,
        "{answered} of {tasks} lines were answered"
    );
    all_wait(&daemon, tasks).await?;
    let beside = pages(scale, progress, &daemon).await?;
    let deep = deep(scale, progress, &daemon).await?;
    let viewers = viewers(progress, &daemon, scale.look_for).await?;
    let beside_work = beside_work(scale, progress, &daemon).await?;
    let files = files(&daemon).await?;
    daemon.stop().await?;
    Ok(vec![beside, deep, viewers, beside_work, files])
}

/// Waits until each task can be claimed, so that nothing else happens while pages are measured.
async fn all_wait(daemon: &Daemon, tasks: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + WAIT_WITHIN;
    loop {
        let answer: Value = serde_json::from_str(&daemon.text("v1/queues", None).await?)?;
        let queues = answer["queues"].as_array().into_iter().flatten();
        let waiting: u64 = queues.filter_map(|queue| queue["waiting"].as_u64()).sum();
        if waiting == tasks as u64 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{waiting} of {tasks} tasks wait in their queues"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

fn table(title: &'static str, conditions: &str, references: &[&str], rows: Vec<Row>) -> Table {
    Table {
        bench: "ui",
        title,
        conditions: conditions.to_owned(),
        references: references.iter().map(|&text| text.to_owned()).collect(),
        rows,
    }
}

/// The median time of a request, in µs.
async fn timed(daemon: &Daemon, path: &str) -> anyhow::Result<f64> {
    let mut took = Vec::new();
    for _ in 0..REQUESTS {
        let began = Instant::now();
        daemon.text(path, None).await?;
        took.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(quantile(&took, 0.5))
}

async fn pages(scale: &Scale, progress: &Progress, daemon: &Daemon) -> anyhow::Result<Table> {
    let mut figures: Vec<(Runs, Runs)> = PAGES.iter().map(|_| Default::default()).collect();
    for run in 1..=scale.runs {
        progress.step(format!("ui, run {run} of {}: pages", scale.runs));
        for ((page, data), (path, call)) in figures.iter_mut().zip(PAGES) {
            data.push(timed(daemon, call).await?);
            page.push(timed(daemon, path).await?);
        }
    }
    let rows = figures
        .iter()
        .zip(PAGES)
        .map(|((page, data), (path, _))| Row {
            figure: path.to_owned(),
            unit: Unit::Micros,
            runs: page.clone(),
            ratios: vec![Some(page.over(data))],
        });
    let conditions = "the median of some requests, one after the other";
    Ok(table(
        "ui: pages",
        conditions,
        &["the data by the API"],
        rows.collect(),
    ))
}

async fn deep(scale: &Scale, progress: &Progress, daemon: &Daemon) -> anyhow::Result<Table> {
    let mut cursor = String::new();
    let mut at = 1;
    while at < PAGE {
        let path = format!("v1/tasks?limit={ROWS}{cursor}");
        let page: Value = serde_json::from_str(&daemon.text(&path, None).await?)?;
        let Some(next) = page["cursor"].as_str() else {
            break;
        };
        cursor = format!("&cursor={next}");
        at += 1;
    }
    let path = format!("ui/tasks?{}", cursor.trim_start_matches('&'));
    let mut first = Runs::default();
    let mut last = Runs::default();
    for run in 1..=scale.runs {
        progress.step(format!("ui, run {run} of {}: page {at}", scale.runs));
        first.push(timed(daemon, "ui/tasks").await?);
        last.push(timed(daemon, &path).await?);
    }
    let row = Row {
        figure: format!("page {at} of all tasks"),
        unit: Unit::Micros,
        ratios: vec![Some(last.over(&first))],
        runs: last,
    };
    Ok(table("ui: older pages", "", &["page 1"], vec![row]))
}

/// The calls to Redis and the operations on SQL while viewers look, per second. One long run: a
/// look is rare, so a short one sees few of them.
async fn viewers(
    progress: &Progress,
    daemon: &Daemon,
    look_for: Duration,
) -> anyhow::Result<Table> {
    let cases = [
        ("nobody", 0),
        ("a viewer of each page", LIVE.len()),
        ("100 viewers", VIEWERS),
        ("nobody afterwards", 0),
    ];
    let mut redis: Vec<Runs> = Vec::new();
    let mut sql: Vec<Runs> = Vec::new();
    for (name, viewers) in cases {
        progress.step(format!("ui: {name}"));
        let before = calls(daemon).await?;
        let began = Instant::now();
        look(daemon, viewers, look_for).await?;
        let after = calls(daemon).await?;
        let seconds = began.elapsed().as_secs_f64();
        redis.push(Runs(vec![(after.0 - before.0) as f64 / seconds]));
        sql.push(Runs(vec![(after.1 - before.1) as f64 / seconds]));
    }
    let mut rows = Vec::new();
    for (at, (name, _)) in cases.into_iter().enumerate() {
        for (what, runs) in [("calls to Redis", &redis), ("operations on SQL", &sql)] {
            rows.push(Row {
                figure: format!("{name}: {what}"),
                unit: Unit::PerSecond,
                runs: runs[at].clone(),
                ratios: vec![Some(runs[at].over(&runs[0])), Some(runs[at].over(&runs[1]))],
            });
        }
    }
    let conditions = "each viewer asks for the frame of a live page every two seconds";
    Ok(table(
        "ui: viewers",
        conditions,
        &["nobody", "a viewer of each page"],
        rows,
    ))
}

/// How fast tasks go while viewers look, beside a run without them.
async fn beside_work(scale: &Scale, progress: &Progress, daemon: &Daemon) -> anyhow::Result<Table> {
    let tasks = scale.single_tasks.to_string();
    let arguments = [&["process", "--tasks", &tasks][..], &daemon.arguments()[..]].concat();
    let mut alone = Runs::default();
    let mut seen = Runs::default();
    for run in 1..=scale.runs {
        progress.step(format!("ui, run {run} of {}: work", scale.runs));
        let report = bench(&arguments).await?;
        alone.push(rate_of(&report, "process", "completed")?);
        progress.step(format!(
            "ui, run {run} of {}: work with viewers",
            scale.runs
        ));
        // The viewers end with the work.
        let report = tokio::select! {
            report = bench(&arguments) => report?,
            looked = look(daemon, VIEWERS, WAIT_WITHIN) => {
                looked?;
                bail!("the work took longer than {WAIT_WITHIN:?}");
            }
        };
        seen.push(rate_of(&report, "process", "completed")?);
    }
    let row = Row {
        figure: format!("completed with {VIEWERS} viewers"),
        unit: Unit::PerSecond,
        ratios: vec![Some(seen.over(&alone))],
        runs: seen,
    };
    Ok(table(
        "ui: work beside viewers",
        "taskd bench process",
        &["without viewers"],
        vec![row],
    ))
}

/// Commands that Redis has carried out, and operations on SQL.
async fn calls(daemon: &Daemon) -> anyhow::Result<(u64, u64)> {
    let redis = daemon.redis_commands().await?;
    let sql = daemon
        .counter("taskd_sql_operation_duration_seconds_count")
        .await?;
    Ok((redis, sql))
}

async fn look(daemon: &Daemon, viewers: usize, duration: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + duration;
    let views = (0..viewers).map(|viewer| async move {
        tokio::time::sleep(FRAME_EVERY * viewer as u32 / viewers as u32).await;
        while Instant::now() < until {
            daemon.text(LIVE[viewer % LIVE.len()], Some("none")).await?;
            tokio::time::sleep(FRAME_EVERY).await;
        }
        anyhow::Ok(())
    });
    futures::future::try_join_all(views).await?;
    tokio::time::sleep(until.saturating_duration_since(Instant::now())).await;
    Ok(())
}

/// The scripts and the style of the pages, as a proxy that compresses would send them.
async fn files(daemon: &Daemon) -> anyhow::Result<Table> {
    let page = daemon.text("ui/queues/q0/live", None).await?;
    let page = page + &daemon.text("ui/", None).await?;
    let mut names: Vec<&str> = page
        .split('"')
        .filter(|part| part.starts_with('.') && part.contains("assets/"))
        .filter(|part| part.ends_with(".js") || part.ends_with(".css"))
        .filter_map(|part| part.rsplit('/').next())
        .collect();
    names.sort_unstable();
    names.dedup();
    ensure!(names.len() == 4, "the pages name {names:?}");
    let mut rows = Vec::new();
    let mut all = 0;
    for name in names {
        let bytes = zipped(&daemon.text(&format!("ui/assets/{name}"), None).await?)?;
        all += bytes;
        rows.push((name.to_owned(), bytes));
    }
    rows.push(("all".to_owned(), all));
    let rows = rows.into_iter().map(|(figure, bytes)| Row {
        figure,
        unit: Unit::Bytes,
        runs: Runs(vec![bytes as f64]),
        ratios: Vec::new(),
    });
    Ok(table("ui: files, gzipped", "", &[], rows.collect()))
}

fn zipped(text: &str) -> anyhow::Result<usize> {
    let mut gzip = Command::new("gzip")
        .arg("-9c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start gzip")?;
    // It reads all before it writes: the files are small.
    let mut input = gzip.stdin.take().context("gzip has an input")?;
    input.write_all(text.as_bytes())?;
    drop(input);
    Ok(gzip.wait_with_output()?.stdout.len())
}
