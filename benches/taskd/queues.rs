//! Many queues: the cost of empty ones, the latency of one while new names appear, and the cost of
//! a task depending on its NUM.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use taskd::{
    model::WorkerName,
    wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient},
};
use tonic::transport::Channel;

use crate::{
    claim::Bed,
    daemon::{Counts, Daemon, Used},
    progress::Progress,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
    work::{WAIT, complete, new_task},
};

const MANY: &str = "max_queues = 20000";
/// Like `MANY`, but finished tasks leave Redis quickly, so that the queues become empty.
const MANY_SOON_EMPTY: &str = "max_queues = 20000\ngrace = \"1s\"";
/// Enough that nearly all shards of a queue are open.
const TASKS_OF_EACH: usize = 8;
/// The most queues that one get call may list.
const NAMED: usize = 100;
/// How long to wait before measuring idle queues, so that the last tasks are settled and forgotten.
const QUIET: Duration = Duration::from_secs(20);
/// How long to measure; an idle shard is polled once in this time.
const MEASURED: Duration = Duration::from_secs(30);
const WORKER: &str = "worker";

/// The costs of this many empty queues.
#[derive(Default)]
struct Idle {
    queues: usize,
    taskd_cpu: Runs,
    redis_cpu: Runs,
    both_cpu: Runs,
    taskd_bytes: Runs,
    redis_bytes: Runs,
}

/// Latencies of an existing queue, with or without new names appearing.
#[derive(Default)]
struct Neighbour {
    p50: Runs,
    most: Runs,
}

/// The costs of a task that needs this many workers.
struct Replicas {
    count: u32,
    claim: Runs,
    complete: Runs,
    bytes: Runs,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut idle: Vec<_> = scale
        .queues
        .iter()
        .map(|queues| Idle {
            queues: *queues,
            ..Idle::default()
        })
        .collect();
    let (mut alone, mut beside, mut names) =
        (Neighbour::default(), Neighbour::default(), Runs::default());
    let mut replicas: Vec<_> = scale
        .replicas
        .iter()
        .map(|count| Replicas::new(*count))
        .collect();
    for run in 1..=scale.runs {
        let daemon = Daemon::start_as("all", &[], MANY_SOON_EMPTY).await?;
        let mut made = 0;
        for one in &mut idle {
            progress.step(format!(
                "queues, run {run} of {}: {} empty queues",
                scale.runs, one.queues
            ));
            make_empty_queues(&daemon, made, one.queues).await?;
            made = one.queues;
            tokio::time::sleep(QUIET).await;
            let before = daemon.used().await?;
            tokio::time::sleep(MEASURED).await;
            one.note(&before, &daemon.used().await?);
        }
        daemon.stop().await?;
        progress.step(format!("queues, run {run} of {}: new names", scale.runs));
        names.push(neighbours(scale, &mut alone, &mut beside).await?);
        let mut bed = Bed::start().await?;
        // A first run loads the scripts, so that they do not count as memory of tasks.
        Replicas::new(1).measure(scale, &mut bed).await?;
        for one in &mut replicas {
            progress.step(format!(
                "queues, run {run} of {}: NUM {}",
                scale.runs, one.count
            ));
            one.measure(scale, &mut bed).await?;
        }
    }
    Ok(vec![
        idle_table(&idle),
        neighbour_table(scale, &alone, &beside, &names),
        replicas_table(scale, &replicas),
    ])
}

fn queue_name(number: usize) -> String {
    format!("queue-{number:05}")
}

/// Creates the queues numbered from `made` on by inserting tasks and completing them.
async fn make_empty_queues(daemon: &Daemon, made: usize, wanted: usize) -> anyhow::Result<()> {
    let channel = daemon.channels(1).await?.remove(0);
    let queues: Vec<String> = (made..wanted).map(queue_name).collect();
    let mut worker = TasksClient::new(channel.clone());
    for some in queues.chunks(NAMED) {
        let of_queue = |queue: &String| {
            (0..TASKS_OF_EACH)
                .map(|n| new_task(queue, n))
                .collect::<Vec<_>>()
        };
        let tasks: Vec<_> = some.iter().flat_map(of_queue).collect();
        insert(&channel, tasks).await?;
        let (mut done, wanted) = (0, some.len() * TASKS_OF_EACH);
        while done < wanted {
            let got = get(&mut worker, some.to_vec()).await?;
            done += complete(&mut worker, WORKER, got).await?.len();
        }
    }
    let Some(last) = queues.last() else {
        return Ok(());
    };
    let all = Counts {
        completed: TASKS_OF_EACH as u64,
        ..Counts::default()
    };
    daemon.wait_for(last, all).await.map(drop)
}

async fn insert(channel: &Channel, tasks: Vec<pb::NewTask>) -> anyhow::Result<()> {
    let count = tasks.len();
    let answer = DiscoveryClient::new(channel.clone())
        .insert_tasks(pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        })
        .await?;
    let results = answer.into_inner().results;
    let created = results
        .iter()
        .filter(|one| one.status() == pb::InsertStatus::Created)
        .count();
    ensure!(
        created == count,
        "{created} of {count} tasks were new: {:?}",
        results.first()
    );
    Ok(())
}

async fn get(
    worker: &mut TasksClient<Channel>,
    queues: Vec<String>,
) -> anyhow::Result<Vec<pb::LeasedTask>> {
    let get = pb::GetTasksRequest {
        worker: WORKER.into(),
        queues,
        max_tasks: 1000,
        wait: WAIT,
        ..Default::default()
    };
    Ok(worker
        .get_tasks(get)
        .await
        .context("get")?
        .into_inner()
        .tasks)
}

impl Idle {
    fn note(&mut self, before: &Used, after: &Used) {
        let percent = |before: f64, after: f64| (after - before) / MEASURED.as_secs_f64() * 100.0;
        let taskd = percent(before.taskd_cpu, after.taskd_cpu);
        let redis = percent(before.redis_cpu, after.redis_cpu);
        self.taskd_cpu.push(taskd);
        self.redis_cpu.push(redis);
        self.both_cpu.push(taskd + redis);
        self.taskd_bytes.push(after.taskd_bytes);
        self.redis_bytes.push(after.redis_bytes);
    }
}

/// Measures an existing queue, alone and while new names appear, each with one task. Returns how
/// many new names appeared per second.
async fn neighbours(
    scale: &Scale,
    alone: &mut Neighbour,
    beside: &mut Neighbour,
) -> anyhow::Result<f64> {
    let daemon = Daemon::start_as("all", &[], MANY).await?;
    let channels = daemon.channels(2).await?;
    one_by_one(&channels[0], 0, |count| count < 50).await?;
    alone.note(&one_by_one(&channels[0], 50, |count| count < scale.latency_samples).await?);
    let ended = Arc::new(AtomicBool::new(false));
    let (inserter, names, until) = (channels[1].clone(), scale.new_names, Arc::clone(&ended));
    let inserts = tokio::spawn(async move {
        let began = Instant::now();
        let tasks = (0..names)
            .map(|number| new_task(&queue_name(number), 0))
            .collect();
        let outcome = insert(&inserter, tasks).await;
        until.store(true, Relaxed);
        outcome.map(|()| names as f64 / began.elapsed().as_secs_f64())
    });
    beside.note(&one_by_one(&channels[0], 100_000, |_| !ended.load(Relaxed)).await?);
    let rate = inserts.await.context("the inserter panicked")??;
    daemon.stop().await?;
    Ok(rate)
}

/// Measures the time from the insert of a task until a worker gets it, in µs, for as long as `more`
/// returns true.
async fn one_by_one(
    channel: &Channel,
    first: usize,
    more: impl Fn(usize) -> bool,
) -> anyhow::Result<Vec<f64>> {
    const QUEUE: &str = "neighbour";
    let (mut worker, mut micros) = (TasksClient::new(channel.clone()), Vec::new());
    while micros.is_empty() || more(micros.len()) {
        let began = Instant::now();
        insert(channel, vec![new_task(QUEUE, first + micros.len())]).await?;
        let tasks = get(&mut worker, vec![QUEUE.to_owned()]).await?;
        micros.push(began.elapsed().as_secs_f64() * 1e6);
        ensure!(
            tasks.len() == 1,
            "{} tasks where one was inserted",
            tasks.len()
        );
        complete(&mut worker, WORKER, tasks).await?;
    }
    Ok(micros)
}

impl Neighbour {
    fn note(&mut self, micros: &[f64]) {
        self.p50.push(quantile(micros, 0.5));
        self.most.push(quantile(micros, 1.0));
    }
}

impl Replicas {
    fn new(count: u32) -> Self {
        Self {
            count,
            claim: Runs::default(),
            complete: Runs::default(),
            bytes: Runs::default(),
        }
    }

    /// Runs all workers, one after the other, and measures the last tenth, which find what all the
    /// others have left.
    async fn measure(&mut self, scale: &Scale, bed: &mut Bed) -> anyhow::Result<()> {
        bed.empty().await?;
        let tasks = scale.tasks_of_replicas;
        let empty = bed.used_memory().await?;
        let (shard, _) = bed.fill(self.count, tasks).await?;
        let known = bed.shard(&shard)?;
        let measured_from = self.count - self.count.div_ceil(10);
        let (mut claims, mut completions) = (Vec::new(), Vec::new());
        for number in 0..self.count {
            let worker = WorkerName::new(&format!("worker-{number:04}"))?;
            let began = Instant::now();
            let claimed = bed.claim(&known, &worker, tasks).await?;
            let claim = began.elapsed();
            if number + 1 == self.count {
                self.bytes
                    .push((bed.used_memory().await? - empty) / tasks as f64);
            }
            let began = Instant::now();
            bed.complete(&worker, claimed).await?;
            if number >= measured_from {
                claims.push(claim.as_secs_f64() * 1e6 / tasks as f64);
                completions.push(began.elapsed().as_secs_f64() * 1e6 / tasks as f64);
            }
        }
        self.claim.push(quantile(&claims, 0.5));
        self.complete.push(quantile(&completions, 0.5));
        Ok(())
    }
}

fn row(figure: String, unit: Unit, runs: &Runs, reference: Option<&Runs>) -> Row {
    Row {
        figure,
        unit,
        runs: runs.clone(),
        ratios: vec![reference.map(|reference| runs.over(reference))],
    }
}

fn idle_table(idle: &[Idle]) -> Table {
    let few = idle.first().filter(|_| idle.len() > 1);
    let rows = idle.iter().flat_map(|one| {
        let few = few.filter(|few| few.queues != one.queues);
        let figure = |what: &str| format!("{what}, {} queues", one.queues);
        [
            row(
                figure("taskd, CPU"),
                Unit::PercentOfACore,
                &one.taskd_cpu,
                few.map(|few| &few.taskd_cpu),
            ),
            row(
                figure("Redis, CPU"),
                Unit::PercentOfACore,
                &one.redis_cpu,
                few.map(|few| &few.redis_cpu),
            ),
            row(
                figure("both, CPU"),
                Unit::PercentOfACore,
                &one.both_cpu,
                few.map(|few| &few.both_cpu),
            ),
            row(
                figure("taskd, resident memory"),
                Unit::Bytes,
                &one.taskd_bytes,
                few.map(|few| &few.taskd_bytes),
            ),
            row(
                figure("Redis, used memory"),
                Unit::Bytes,
                &one.redis_bytes,
                few.map(|few| &few.redis_bytes),
            ),
        ]
    });
    Table {
        bench: "queues",
        title: "queues: what empty queues cost",
        conditions: format!(
            "`taskd --pipelines all` on embedded defaults. Each queue has had {TASKS_OF_EACH} tasks, all of them \
             completed and settled. For {} s nobody calls.",
            MEASURED.as_secs()
        ),
        references: vec!["fewest queues".into()],
        rows: rows.collect(),
    }
}

fn neighbour_table(scale: &Scale, alone: &Neighbour, beside: &Neighbour, names: &Runs) -> Table {
    Table {
        bench: "queues",
        title: "queues: a queue beside new names",
        conditions: format!(
            "`taskd --pipelines all` on embedded defaults. One task after the other through a queue that is there, \
             alone and while a call inserts {} tasks, each into a queue of a new name.",
            scale.new_names
        ),
        references: vec!["alone".into()],
        rows: vec![
            row(
                "insert → claimed, alone, p50".into(),
                Unit::Micros,
                &alone.p50,
                None,
            ),
            row(
                "insert → claimed, alone, the slowest".into(),
                Unit::Micros,
                &alone.most,
                None,
            ),
            row(
                "insert → claimed, beside new names, p50".into(),
                Unit::Micros,
                &beside.p50,
                Some(&alone.p50),
            ),
            row(
                "insert → claimed, beside new names, the slowest".into(),
                Unit::Micros,
                &beside.most,
                Some(&alone.most),
            ),
            row("new names".into(), Unit::PerSecond, names, None),
        ],
    }
}

fn replicas_table(scale: &Scale, replicas: &[Replicas]) -> Table {
    let one = replicas.first().filter(|_| replicas.len() > 1);
    let rows = replicas.iter().flat_map(|some| {
        let one = one.filter(|one| one.count != some.count);
        let figure = |what: &str| format!("{what}, NUM {}", some.count);
        [
            row(
                figure("claim, a task"),
                Unit::Micros,
                &some.claim,
                one.map(|one| &one.claim),
            ),
            row(
                figure("complete, a task"),
                Unit::Micros,
                &some.complete,
                one.map(|one| &one.complete),
            ),
            row(
                figure("Redis memory, a task"),
                Unit::Bytes,
                &some.bytes,
                one.map(|one| &one.bytes),
            ),
        ]
    });
    Table {
        bench: "queues",
        title: "queues: µs and bytes of one task by NUM",
        conditions: format!(
            "`taskd::queue::Queue` on a redis-server of its own, appendfsync everysec, {} tasks a call, one worker \
             after the other. The last tenth of the workers; the memory before the last completions.",
            scale.tasks_of_replicas
        ),
        references: vec!["NUM 1".into()],
        rows: rows.collect(),
    }
}
