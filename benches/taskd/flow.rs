//! The whole of taskd: insert → claim → complete through gRPC, in the release binary on embedded defaults, beside the
//! least that Redis, SQLite and gRPC must do for the same work.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::{
    daemon::{Counts, Daemon},
    limits::{self, take},
    progress::Progress,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
    work::{Work, pause},
};

const CHANNELS: usize = 4;
const QUEUE: &str = "bench";
const PAYLOAD: [u8; 100] = [b'x'; 100];
/// Long enough that no call is repeated because of it.
pub(crate) const WAIT: Option<prost_types::Duration> = Some(prost_types::Duration { seconds: 20, nanos: 0 });

/// The limits in one run.
#[derive(Default)]
struct Limits {
    redis_insert: Runs,
    redis_cycle: Runs,
    redis_cycle_one: Runs,
    redis_whole: Runs,
    redis_ping: Runs,
    redis_p50: Runs,
    redis_p99: Runs,
    sqlite_insert: Runs,
    sqlite_one: Runs,
    grpc: Runs,
}

#[derive(Default)]
struct Figures {
    insert: Runs,
    waiting: Runs,
    done: Runs,
    settled: Runs,
    done_one: Runs,
    settled_one: Runs,
    whole_done: Runs,
    whole_settled: Runs,
    insert_one: Runs,
    p50: Runs,
    p99: Runs,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let many = Work { tasks: scale.flow_tasks, inserters: 4, insert_batch: 1000, workers: 16, batch: 100 };
    let single = Work { tasks: scale.flow_single_tasks, workers: 64, batch: 1, ..many };
    let (mut limits, mut figures) = (Limits::default(), Figures::default());
    for run in 1..=scale.runs {
        let step = |what: &str| progress.step(format!("flow, run {run} of {}: {what}", scale.runs));
        step("limits of Redis");
        measure_redis(&mut limits, &many, &single, scale).await?;
        step("limits of SQLite");
        let mut sqlite = limits::Sqlite::start().await?;
        limits.sqlite_insert.push(sqlite.insert(many.insert_batch, many.tasks).await?);
        limits.sqlite_one.push(sqlite.insert_one(scale.latency_samples).await?);
        step("insert, then work, 100 a call");
        batches(&mut figures, &many).await?;
        step("work, 1 a call");
        singles(&mut figures, &mut limits, &single).await?;
        step("insert and work at once");
        at_once(&mut figures, &many).await?;
        step("one task at a time");
        latency(&mut figures, scale.latency_samples).await?;
    }
    Ok(vec![throughput_table(&many, &single, &limits, &figures), latency_table(scale, &limits, &figures)])
}

async fn measure_redis(limits: &mut Limits, many: &Work, single: &Work, scale: &Scale) -> anyhow::Result<()> {
    let redis = limits::Redis::start().await?;
    limits.redis_ping.push(redis.ping(single.workers, single.tasks)?);
    limits.redis_insert.push(redis.insert(many.inserters, many.insert_batch, many.tasks)?);
    limits.redis_cycle.push(redis.cycle(many.workers, many.batch, many.tasks)?);
    limits.redis_cycle_one.push(redis.cycle(single.workers, single.batch, single.tasks)?);
    limits.redis_whole.push(redis.whole(many)?);
    let micros = redis.hand_over(scale.latency_samples)?;
    limits.redis_p50.push(quantile(&micros, 0.5));
    limits.redis_p99.push(quantile(&micros, 0.99));
    Ok(())
}

async fn batches(figures: &mut Figures, work: &Work) -> anyhow::Result<()> {
    let daemon = Daemon::start().await?;
    let channels = warmed(&daemon).await?;
    let began = Instant::now();
    insert(&channels, work).await?;
    figures.insert.push(rate(work.tasks, began.elapsed()));
    let waiting = daemon.wait_for(QUEUE, Counts { waiting: work.tasks as u64, ..Counts::default() }).await?;
    figures.waiting.push(rate(work.tasks, waiting - began));

    let began = Instant::now();
    let done = do_all(&channels, work).await?;
    figures.done.push(rate(work.tasks, done - began));
    figures.settled.push(rate(work.tasks, all_settled(&daemon, work).await? - began));
    daemon.stop().await
}

async fn singles(figures: &mut Figures, limits: &mut Limits, work: &Work) -> anyhow::Result<()> {
    let daemon = Daemon::start().await?;
    let channels = warmed(&daemon).await?;
    limits.grpc.push(limits::grpc(&channels, work.workers, work.tasks).await?);
    insert(&channels, work).await?;
    daemon.wait_for(QUEUE, Counts { waiting: work.tasks as u64, ..Counts::default() }).await?;
    let began = Instant::now();
    let done = do_all(&channels, work).await?;
    figures.done_one.push(rate(work.tasks, done - began));
    figures.settled_one.push(rate(work.tasks, all_settled(&daemon, work).await? - began));
    daemon.stop().await
}

async fn at_once(figures: &mut Figures, work: &Work) -> anyhow::Result<()> {
    let daemon = Daemon::start().await?;
    let channels = warmed(&daemon).await?;
    let began = Instant::now();
    let ((), done) = tokio::try_join!(insert(&channels, work), do_all(&channels, work))?;
    figures.whole_done.push(rate(work.tasks, done - began));
    figures.whole_settled.push(rate(work.tasks, all_settled(&daemon, work).await? - began));
    daemon.stop().await
}

fn rate(tasks: usize, took: Duration) -> f64 {
    tasks as f64 / took.as_secs_f64()
}

async fn all_settled(daemon: &Daemon, work: &Work) -> anyhow::Result<Instant> {
    daemon.wait_for(QUEUE, Counts { completed: work.tasks as u64, ..Counts::default() }).await
}

/// Connections to a taskd that has done each step once.
async fn warmed(daemon: &Daemon) -> anyhow::Result<Vec<Channel>> {
    const WARM: &str = "warm";
    let channels = daemon.channels(CHANNELS).await?;
    let tasks = (0..1000).map(|n| new_task(WARM, n)).collect();
    DiscoveryClient::new(channels[0].clone()).insert_tasks(pb::InsertTasksRequest { tasks }).await?;
    let mut client = TasksClient::new(channels[0].clone());
    let mut done = 0;
    while done < 1000 {
        done += get_and_complete(&mut client, "warm", WARM, 100).await?.len();
    }
    daemon.wait_for(WARM, Counts { completed: 1000, ..Counts::default() }).await?;
    Ok(channels)
}

pub(crate) fn new_task(queue: &str, number: usize) -> pb::NewTask {
    let key = format!("https://www.example.org/pages/{number:012}").into();
    pb::NewTask { queue: queue.to_owned(), key, payload: PAYLOAD.to_vec().into(), ..Default::default() }
}

/// Until the last task is answered CREATED.
async fn insert(channels: &[Channel], work: &Work) -> anyhow::Result<()> {
    let Work { tasks, inserters, insert_batch, .. } = *work;
    let left = Arc::new(AtomicUsize::new(tasks));
    let next = Arc::new(AtomicUsize::new(0));
    let mut callers = JoinSet::new();
    for caller in 0..inserters {
        let mut client = DiscoveryClient::new(channels[caller % channels.len()].clone());
        let (left, next) = (Arc::clone(&left), Arc::clone(&next));
        callers.spawn(async move {
            loop {
                let count = take(&left, insert_batch);
                if count == 0 {
                    return Ok::<_, anyhow::Error>(());
                }
                let first = next.fetch_add(count, Relaxed);
                let tasks = (first..first + count).map(|number| new_task(QUEUE, number)).collect();
                let answer = client.insert_tasks(pb::InsertTasksRequest { tasks }).await?.into_inner();
                let created = answer.results.iter().filter(|one| one.status() == pb::InsertStatus::Created).count();
                ensure!(created == count, "{created} of {count} tasks were new: {:?}", answer.results.first());
            }
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended??;
    }
    Ok(())
}

/// Until the last completion is answered OK; every task once, or it is an error.
async fn do_all(channels: &[Channel], work: &Work) -> anyhow::Result<Instant> {
    let total = work.tasks;
    let (done, stop) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
    let began = Instant::now();
    let ended = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for number in 0..work.workers {
        let mut client = TasksClient::new(channels[number % channels.len()].clone());
        let (done, stop, ended, batch) = (Arc::clone(&done), stop.clone(), Arc::clone(&ended), work.batch);
        workers.spawn(async move {
            let (name, mut ids) = (format!("worker-{number}"), Vec::new());
            while let Some(some) = stop.run_until_cancelled(get_and_complete(&mut client, &name, QUEUE, batch)).await {
                let some = some?;
                if done.fetch_add(some.len(), Relaxed) + some.len() >= total && !some.is_empty() {
                    ended.store(u64::try_from(began.elapsed().as_nanos())?, Relaxed);
                    stop.cancel();
                }
                ids.extend(some);
            }
            Ok::<_, anyhow::Error>(ids)
        });
    }
    let (mut distinct, mut all) = (HashSet::with_capacity(total), 0);
    while let Some(ids) = workers.join_next().await {
        let ids = ids??;
        all += ids.len();
        distinct.extend(ids);
    }
    ensure!(all == total && distinct.len() == total, "{all} completions of {} tasks for {total}", distinct.len());
    Ok(began + Duration::from_nanos(ended.load(Relaxed)))
}

/// One round of a worker: the ids that were answered OK, which are all of them.
async fn get_and_complete(
    client: &mut TasksClient<Channel>,
    worker: &str,
    queue: &str,
    batch: usize,
) -> anyhow::Result<Vec<String>> {
    let get = pb::GetTasksRequest {
        worker: worker.to_owned(),
        queues: vec![queue.to_owned()],
        max_tasks: u32::try_from(batch)?,
        wait: WAIT,
        ..Default::default()
    };
    let tasks = client.get_tasks(get).await.context("get")?.into_inner().tasks;
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    complete(client, worker, tasks).await
}

pub(crate) async fn complete(
    client: &mut TasksClient<Channel>,
    worker: &str,
    tasks: Vec<pb::LeasedTask>,
) -> anyhow::Result<Vec<String>> {
    let completions = tasks.into_iter().map(|task| pb::Completion {
        id: task.id,
        lease_token: task.lease_token,
        result: br#"{"ok":true}"#.to_vec().into(),
        ..Default::default()
    });
    let request = pb::CompleteTasksRequest { worker: worker.to_owned(), completions: completions.collect() };
    let results = client.complete_tasks(request).await.context("complete")?.into_inner().results;
    let wrong = results.iter().find(|result| result.status() != pb::ItemStatus::Ok);
    ensure!(wrong.is_none(), "a completion was answered {wrong:?}");
    Ok(results.into_iter().map(|result| result.id).collect())
}

/// A task at a time through an idle taskd whose only worker waits for it.
async fn latency(figures: &mut Figures, samples: usize) -> anyhow::Result<()> {
    let daemon = Daemon::start().await?;
    let channels = warmed(&daemon).await?;
    let (sender, mut claimed) = mpsc::channel(1);
    let mut client = TasksClient::new(channels[1].clone());
    let worker = tokio::spawn(async move {
        for _ in 0..samples {
            let get = pb::GetTasksRequest {
                worker: "worker".into(),
                queues: vec![QUEUE.into()],
                max_tasks: 1,
                wait: WAIT,
                ..Default::default()
            };
            let tasks = client.get_tasks(get).await?.into_inner().tasks;
            let at = Instant::now();
            ensure!(tasks.len() == 1, "{} tasks where one was inserted", tasks.len());
            complete(&mut client, "worker", tasks).await?;
            sender.send(at).await?;
        }
        Ok(())
    });
    let mut client = DiscoveryClient::new(channels[0].clone());
    let (mut inserts, mut claims) = (Vec::new(), Vec::new());
    for sample in 0..samples {
        tokio::time::sleep(pause(sample)).await;
        let began = Instant::now();
        let tasks = vec![new_task(QUEUE, sample)];
        client.insert_tasks(pb::InsertTasksRequest { tasks }).await?;
        inserts.push(began.elapsed().as_secs_f64() * 1e6);
        let Some(at) = claimed.recv().await else { break };
        claims.push((at - began).as_secs_f64() * 1e6);
    }
    worker.await??;
    daemon.wait_for(QUEUE, Counts { completed: samples as u64, ..Counts::default() }).await?;
    figures.insert_one.push(quantile(&inserts, 0.5));
    figures.p50.push(quantile(&claims, 0.5));
    figures.p99.push(quantile(&claims, 0.99));
    daemon.stop().await
}

fn throughput_table(many: &Work, single: &Work, limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: String, runs: &Runs, redis: Option<&Runs>, sqlite: Option<&Runs>, grpc: Option<&Runs>| {
        let ratios = [redis, sqlite, grpc].map(|limit| limit.map(|limit| runs.over(limit))).to_vec();
        Row { figure, unit: Unit::PerSecond, runs: runs.clone(), ratios }
    };
    let limit = |figure: String, runs: &Runs| row(figure, runs, None, None, None);
    let Work { inserters, insert_batch, workers, batch, .. } = many;
    let (callers, of_many, of_one) = (single.workers, &limits.redis_cycle, &limits.redis_cycle_one);
    // A task of its own takes two calls.
    let calls = Runs(limits.grpc.0.iter().map(|calls| calls / 2.0).collect());
    let (inserted, sqlite) = (Some(&limits.redis_insert), Some(&limits.sqlite_insert));
    Table {
        bench: "flow",
        title: "flow: tasks a second through one taskd",
        conditions: format!(
            "`taskd --pipelines all` on embedded defaults: Redis appendfsync always, SQLite synchronous FULL. \
             {} tasks with 100 bytes of payload, {inserters} inserters × {insert_batch} a call, \
             {workers} workers × {batch} a call; 1 a call: {} tasks, {callers} workers. \
             {CHANNELS} gRPC connections, the callers on the same machine. \
             Limits at the same durability, in the same batches, from as many connections.",
            many.tasks, single.tasks,
        ),
        references: vec!["Redis".into(), "SQLite".into(), "gRPC".into()],
        rows: vec![
            limit(format!("limit: Redis, LPUSH of {insert_batch}"), &limits.redis_insert),
            limit(format!("limit: Redis, XREADGROUP, XACK + XDEL, {batch} a call"), of_many),
            limit("limit: Redis, the same, 1 a call".into(), of_one),
            limit("limit: Redis, XADD and these at once".into(), &limits.redis_whole),
            limit("limit: Redis, PING".into(), &limits.redis_ping),
            limit(format!("limit: SQLite, {insert_batch} rows a transaction"), &limits.sqlite_insert),
            limit("limit: gRPC, empty calls, halved".into(), &calls),
            row("insert → CREATED".into(), &figures.insert, inserted, sqlite, None),
            row("insert → waiting in the queue".into(), &figures.waiting, inserted, sqlite, None),
            row(format!("get → complete OK, {batch} a call"), &figures.done, Some(of_many), None, None),
            row(format!("get → settled in SQL, {batch} a call"), &figures.settled, Some(of_many), sqlite, None),
            row("get → complete OK, 1 a call".into(), &figures.done_one, Some(of_one), None, Some(&calls)),
            row("get → settled in SQL, 1 a call".into(), &figures.settled_one, Some(of_one), sqlite, Some(&calls)),
            row("all at once → complete OK".into(), &figures.whole_done, Some(&limits.redis_whole), sqlite, None),
            row("all at once → settled in SQL".into(), &figures.whole_settled, Some(&limits.redis_whole), sqlite, None),
        ],
    }
}

fn latency_table(scale: &Scale, limits: &Limits, figures: &Figures) -> Table {
    let row = |figure: &str, runs: &Runs, redis: Option<&Runs>, sqlite: Option<&Runs>| {
        let ratios = [redis, sqlite].map(|limit| limit.map(|limit| runs.over(limit))).to_vec();
        Row { figure: figure.to_owned(), unit: Unit::Micros, runs: runs.clone(), ratios }
    };
    Table {
        bench: "latency",
        title: "latency: one task through an idle taskd",
        conditions: format!(
            "As above; {} tasks one after the other, 5 to 15 ms apart, one worker that waits in GetTasks.",
            scale.latency_samples
        ),
        references: vec!["Redis".into(), "SQLite".into()],
        rows: vec![
            row("limit: Redis, LPUSH → BLPOP, p50", &limits.redis_p50, None, None),
            row("limit: Redis, LPUSH → BLPOP, p99", &limits.redis_p99, None, None),
            row("limit: SQLite, one row a transaction, p50", &limits.sqlite_one, None, None),
            row("insert → CREATED, p50", &figures.insert_one, None, Some(&limits.sqlite_one)),
            row("insert → claimed, p50", &figures.p50, Some(&limits.redis_p50), None),
            row("insert → claimed, p99", &figures.p99, Some(&limits.redis_p99), None),
        ],
    }
}
