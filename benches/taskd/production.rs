//! taskd with MariaDB and Kafka: insert over HTTP, fanout from Kafka, and the rebuild after Redis
//! has lost everything, each compared with the minimal work of those servers for the same tasks.

use std::time::Instant;

use anyhow::ensure;
use taskd::{bus::Topic, telemetry::metrics::FANOUT_ENQUEUED};

use crate::{
    daemon::{Counts, Daemon},
    database, kafka, limits,
    lines::{CONFIG, CONNECTIONS, QUEUE, insert},
    progress::Progress,
    rebuild::Rebuild,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
    servers::{Place, Servers},
};

const BATCH: usize = 1000;

#[derive(Default)]
struct Limits {
    insert: Runs,
    write: Runs,
    read: Runs,
    redis: Runs,
}

#[derive(Default)]
struct Figures {
    insert: Runs,
    waiting: Runs,
    duplicates: Runs,
    insert_alone: Runs,
    fanout: Runs,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    progress.step("production: waiting for MariaDB and Kafka".to_owned());
    let servers = Servers::find().await?;
    let (mut limits, mut figures, mut rebuild) =
        (Limits::default(), Figures::default(), Rebuild::default());
    for run in 1..=scale.runs {
        let step =
            |what: &str| progress.step(format!("production, run {run} of {}: {what}", scale.runs));
        let place = Place::make(&servers).await?;
        step("insert through HTTP");
        let done = inserts(&place, scale.lines, &mut limits, &mut figures).await;
        let removed = place.remove().await;
        done.and(removed)?;

        let place = Place::make(&servers).await?;
        let done = fanout_and_rebuild(
            &place,
            scale.rebuilt,
            &step,
            &mut limits,
            &mut figures,
            &mut rebuild,
        )
        .await;
        let removed = place.remove().await;
        done.and(removed)?;
    }
    Ok(vec![
        table(scale, &servers, &limits, &figures),
        rebuild.table(scale.rebuilt),
    ])
}

async fn inserts(
    place: &Place<'_>,
    count: usize,
    limits: &mut Limits,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let daemon = Daemon::start_as("all", &place.arguments()?, CONFIG).await?;
    limits
        .insert
        .push(database::insert_rows(&place.database_url()?, CONNECTIONS, BATCH, count).await?);
    insert(&daemon, "warm", BATCH, "CREATED").await?;
    daemon
        .wait_for(
            "warm",
            Counts {
                waiting: BATCH as u64,
                ..Counts::default()
            },
        )
        .await?;

    let began = Instant::now();
    insert(&daemon, QUEUE, count, "CREATED").await?;
    figures.insert.push(rate(count, began));
    daemon
        .wait_for(
            QUEUE,
            Counts {
                waiting: count as u64,
                ..Counts::default()
            },
        )
        .await?;
    figures.waiting.push(rate(count, began));

    let began = Instant::now();
    insert(&daemon, QUEUE, count, "DUPLICATE").await?;
    figures.duplicates.push(rate(count, began));
    let after = daemon.queue(QUEUE).await?;
    ensure!(
        after.waiting == count as u64,
        "{} tasks wait after {count} duplicates",
        after.waiting
    );
    daemon.stop().await
}

async fn fanout_and_rebuild(
    place: &Place<'_>,
    count: usize,
    step: &impl Fn(&str),
    limits: &mut Limits,
    figures: &mut Figures,
    rebuild: &mut Rebuild,
) -> anyhow::Result<()> {
    step("insert without a fanout");
    let arguments = place.arguments()?;
    let discovery = Daemon::start_as("discovery", &arguments, CONFIG).await?;
    let began = Instant::now();
    insert(&discovery, QUEUE, count, "CREATED").await?;
    figures.insert_alone.push(rate(count, began));
    let topic = place.topic(Topic::Pipeline);
    kafka::wait_for_records(place, &topic, count).await?;
    discovery.stop().await?;

    step("limits of Kafka and Redis");
    let (read, records) = tokio::task::block_in_place(|| kafka::read(place, &topic, count))?;
    limits.read.push(read);
    limits.write.push(kafka::write(place, &records).await?);
    limits
        .redis
        .push(limits::Redis::start().await?.insert(1, BATCH, count)?);

    step("fanout");
    let fanout = Daemon::start_as("fanout", &arguments, CONFIG).await?;
    figures.fanout.push(fanout_rate(&fanout, count).await?);
    fanout.stop().await?;

    step("Redis is lost, with Kafka and MariaDB");
    rebuild.measure(place, count).await
}

/// The rate of enqueues per second, from the first observed one to the last.
async fn fanout_rate(daemon: &Daemon, count: usize) -> anyhow::Result<f64> {
    let deadline = Instant::now() + std::time::Duration::from_secs(120);
    let (count, mut first) = (count as u64, None);
    loop {
        let done = daemon.counter(FANOUT_ENQUEUED).await?;
        let now = Instant::now();
        if done > 0 {
            let (began, before) = *first.get_or_insert((now, done));
            if done == count {
                return Ok((done - before) as f64 / (now - began).as_secs_f64());
            }
        }
        ensure!(
            done <= count && now < deadline,
            "the fanout enqueued {done} of {count} tasks"
        );
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn rate(tasks: usize, began: Instant) -> f64 {
    tasks as f64 / began.elapsed().as_secs_f64()
}

fn table(scale: &Scale, servers: &Servers, limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: &str, runs: &Runs, limits: [Option<&Runs>; 4]| {
        let ratios = limits
            .map(|limit| limit.map(|limit| runs.over(limit)))
            .to_vec();
        Row {
            figure: figure.to_owned(),
            unit: Unit::PerSecond,
            runs: runs.clone(),
            ratios,
        }
    };
    let limit = |figure: String, runs: &Runs| row(&figure, runs, [None; 4]);
    let stored = [Some(&limits.insert), Some(&limits.write), None, None];
    Table {
        bench: "production",
        title: "production: tasks a second through one taskd on MariaDB and Kafka",
        conditions: format!(
            "{}; Kafka: one broker, taskd's producer (idempotent, acks all, zstd), 1 partition; Redis appendfsync \
             always. NDJSON through {CONNECTIONS} HTTP connections, {} tasks with 100 bytes of payload; {} for the \
             fanout. Servers, taskd and callers on one machine.",
            servers.about, scale.lines, scale.rebuilt,
        ),
        references: vec![
            "MariaDB".into(),
            "producer".into(),
            "consumer".into(),
            "Redis".into(),
        ],
        rows: vec![
            limit(
                format!("limit: MariaDB, {BATCH} rows a statement, {CONNECTIONS} connections"),
                &limits.insert,
            ),
            limit(
                "limit: Kafka, the same records by a producer alone".into(),
                &limits.write,
            ),
            limit(
                "limit: Kafka, the same records by a consumer group alone".into(),
                &limits.read,
            ),
            limit(
                format!("limit: Redis, LPUSH of {BATCH}, 1 connection"),
                &limits.redis,
            ),
            row("insert → CREATED, all pipelines", &figures.insert, stored),
            row("insert → waiting in the queue", &figures.waiting, stored),
            row(
                "insert → CREATED, discovery alone",
                &figures.insert_alone,
                stored,
            ),
            row(
                "insert → DUPLICATE",
                &figures.duplicates,
                [Some(&limits.insert), None, None, None],
            ),
            row(
                "fanout, first to last enqueue",
                &figures.fanout,
                [None, None, Some(&limits.read), Some(&limits.redis)],
            ),
        ],
    }
}
