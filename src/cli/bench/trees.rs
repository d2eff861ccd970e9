//! The phase trees: tasks that workers discover outside of trees beside those that a topology sends
//! on within them, in one large tree and in many; forks with a join beside the same tasks without;
//! what idle topologies cost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use indicatif::HumanCount;
use tokio::task::JoinSet;

use super::{
    args::{Phase, Work},
    progress,
    run::Run,
    throughput,
    work::key,
};
use crate::{
    cli::client::Taskd,
    wire::pb::{
        self, discovery_client::DiscoveryClient, tasks_client::TasksClient,
        topologies_client::TopologiesClient,
    },
};

/// How many outputs a task of a fork has.
const OUTPUTS: u32 = 100;
/// How much smaller the smaller tree is than the larger one.
const SMALLER: u32 = 10;
/// Topologies that nobody uses.
const IDLE: u32 = 50;
/// How long new topologies settle before their CPU is looked at.
const CALM: Duration = Duration::from_secs(3);
/// How long a worker waits for tasks.
const WAIT: prost_types::Duration = prost_types::Duration {
    seconds: 0,
    nanos: 200_000_000,
};

/// What a worker reports for a task.
#[derive(Clone)]
pub(super) enum Report {
    /// This many tasks of this queue.
    Tasks(String, u32),
    /// This many outputs on the port of the stage.
    Outputs(u32),
    Nothing,
}

impl Report {
    fn discovered(&self, parent: &[u8]) -> Vec<pb::NewTask> {
        let (queue, count) = match self {
            Self::Tasks(queue, count) => (queue.as_str(), *count),
            Self::Outputs(count) => ("", *count),
            Self::Nothing => return Vec::new(),
        };
        let task = |number| {
            let mut key = parent.to_vec();
            key.extend(format!("-{number}").into_bytes());
            pb::NewTask {
                queue: queue.to_owned(),
                key: key.into(),
                payload: b"x".to_vec().into(),
                ..Default::default()
            }
        };
        (0..count).map(task).collect()
    }
}

pub(super) async fn measure(run: &mut Run<'_>) -> anyhow::Result<()> {
    throughput::warm_up(run).await?;
    let work = run.args.work.clone();
    let tasks = work.tasks;

    let outside = hop(run, &work, "plain", tasks, None).await?;
    let reference = Some(("discovered outside of trees", outside));
    let in_one = hop(run, &work, "one", tasks, Some(1)).await?;
    let measure = format!("sent on in one tree of {}", HumanCount((2 * tasks).into()));
    note(run, &measure, in_one, reference);
    let small = hop(run, &work, "small", tasks, Some(SMALLER)).await?;
    let measure = format!("sent on in {SMALLER} trees");
    note(run, &measure, small, Some(("in one tree", in_one)));
    let own = hop(run, &work, "own", tasks, Some(tasks)).await?;
    let measure = format!("sent on in {} trees", HumanCount(tasks.into()));
    note(run, &measure, own, Some(("in one tree", in_one)));

    let forks = (tasks / OUTPUTS).max(1);
    let without = forked(run, &work, forks, false).await?;
    let joined = forked(run, &work, forks, true).await?;
    let measure = format!("tasks of forks of {OUTPUTS} with a join");
    note(run, &measure, joined, Some(("without", without)));
    idle(run).await
}

fn note(run: &mut Run<'_>, measure: &str, rate: f64, reference: Option<(&str, f64)>) {
    run.report
        .figure(Phase::Trees, measure, "/s", Some(rate), reference);
}

/// Inserts tasks into the first of two queues, and lets workers send each on to the second one.
/// With `trees`, the queues are two stages, and the tasks are spread over that many trees. Without,
/// they are plain queues. Returns how many tasks a second workers can claim in the second one.
async fn hop(
    run: &Run<'_>,
    work: &Work,
    what: &str,
    tasks: u32,
    trees: Option<u32>,
) -> anyhow::Result<f64> {
    let name = format!("{}-{what}", run.name);
    let [first, second] = ["a", "b"].map(|stage| format!("{name}.{stage}"));
    let report = match trees {
        None => Report::Tasks(second.clone(), 1),
        Some(_) => {
            let file = format!("name = \"{name}\"\n[stage.a]\n[stage.b]\nfrom = \"a\"\n");
            apply(run, &name, &file).await?;
            Report::Outputs(1)
        }
    };
    insert(run, work, what, &first, tasks, trees).await?;
    let began = Instant::now();
    work_off(run, work, what, &first, tasks, report).await?;
    claimable(run, work, &second, tasks, began).await
}

/// Lets workers fork, and work off what came out of the forks. Returns how many tasks a second that
/// are, with those of joins.
async fn forked(run: &Run<'_>, work: &Work, forks: u32, with_join: bool) -> anyhow::Result<f64> {
    let what = if with_join { "join" } else { "fork" };
    let name = format!("{}-{what}", run.name);
    let join = match with_join {
        true => "[stage.all]\njoin = \"fork\"\nfrom = \"leaf\"\n",
        false => "",
    };
    let file = format!("name = \"{name}\"\n[stage.fork]\n[stage.leaf]\nfrom = \"fork\"\n{join}");
    apply(run, &name, &file).await?;
    let [fork, leaf, all] = ["fork", "leaf", "all"].map(|stage| format!("{name}.{stage}"));
    insert(run, work, what, &fork, forks, Some(forks)).await?;
    let began = Instant::now();
    work_off(run, work, what, &fork, forks, Report::Outputs(OUTPUTS)).await?;
    let leaves = forks * OUTPUTS;
    let report = match with_join {
        true => Report::Outputs(1),
        false => Report::Nothing,
    };
    work_off(run, work, what, &leaf, leaves, report).await?;
    if with_join {
        claimable(run, work, &all, forks, began).await?;
    } else {
        let at = run
            .server
            .wait_for(&[leaf], work.give_up_after.0, |counts| {
                counts.completed == u64::from(leaves)
            })
            .await?;
        at.context("gave up: not all tasks are completed")?;
    }
    Ok(f64::from(forks + leaves) / began.elapsed().as_secs_f64())
}

async fn claimable(
    run: &Run<'_>,
    work: &Work,
    queue: &str,
    tasks: u32,
    began: Instant,
) -> anyhow::Result<f64> {
    let at = run
        .server
        .wait_for(&[queue.to_owned()], work.give_up_after.0, |counts| {
            counts.waiting == u64::from(tasks)
        })
        .await?;
    let at = at.context("gave up: not all tasks can be claimed")?;
    Ok(f64::from(tasks) / (at - began).as_secs_f64())
}

async fn apply(run: &Run<'_>, name: &str, text: &str) -> anyhow::Result<()> {
    let request = pb::ApplyTopologyRequest {
        name: name.to_owned(),
        text: text.to_owned(),
    };
    let mut client = TopologiesClient::new(run.server.channel(0));
    client
        .apply_topology(request)
        .await
        .context("no topology")?;
    Ok(())
}

/// Inserts tasks, spread over `trees` trees if there are any, and waits until workers can claim them.
async fn insert(
    run: &Run<'_>,
    work: &Work,
    what: &str,
    queue: &str,
    tasks: u32,
    trees: Option<u32>,
) -> anyhow::Result<()> {
    run.step(&format!("{what}: insert"), tasks.into());
    let mut client = DiscoveryClient::new(run.server.channel(0));
    let task = |number: u32, tree: Option<String>| pb::NewTask {
        queue: queue.to_owned(),
        key: key(number).into(),
        payload: b"x".to_vec().into(),
        tree: tree.map(|id| pb::TaskTree {
            id,
            ..Default::default()
        }),
        ..Default::default()
    };
    // The roots first, so that the others can join their trees.
    let roots = trees.unwrap_or(0).min(tasks);
    let mut opened: Vec<String> = Vec::new();
    let mut next = 0;
    while next < tasks {
        let is_root = next < roots;
        let end = if is_root { roots } else { tasks };
        let last = end.min(next + u32::from(work.batch));
        let of_call = (next..last).map(|number| {
            let tree = match trees {
                Some(_) if is_root => Some(String::new()),
                Some(_) => Some(opened[number as usize % opened.len()].clone()),
                None => None,
            };
            task(number, tree)
        });
        let request = pb::InsertTasksRequest {
            tasks: of_call.collect(),
            ..Default::default()
        };
        let answer = client.insert_tasks(request).await?.into_inner();
        for result in &answer.results {
            if result.status() != pb::InsertStatus::Created {
                bail!("taskd did not store a task: {result:?}");
            }
            if is_root {
                opened.push(result.id.clone());
            }
        }
        run.bar.inc(u64::from(last - next));
        next = last;
    }
    claimable(run, work, queue, tasks, Instant::now()).await?;
    Ok(())
}

/// Lets workers complete `tasks` tasks of a queue, each with this report.
pub(super) async fn work_off(
    run: &Run<'_>,
    work: &Work,
    what: &str,
    queue: &str,
    tasks: u32,
    report: Report,
) -> anyhow::Result<()> {
    run.step(&format!("{what}: work"), tasks.into());
    let done = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for number in 0..work.workers {
        let worker = Worker {
            client: TasksClient::new(run.server.channel(number.into())),
            name: format!("bench-{number}"),
            queue: queue.to_owned(),
            batch: u32::from(work.batch),
            report: report.clone(),
        };
        let (done, bar) = (Arc::clone(&done), run.bar.clone());
        workers.spawn(worker.run(done, bar, tasks.into()));
    }
    while let Some(ended) =
        progress::next_moving(&mut workers, run.bar, work.give_up_after.0).await?
    {
        ended?;
    }
    Ok(())
}

struct Worker {
    client: TasksClient<Taskd>,
    name: String,
    queue: String,
    batch: u32,
    report: Report,
}

impl Worker {
    async fn run(
        mut self,
        done: Arc<AtomicU64>,
        bar: indicatif::ProgressBar,
        total: u64,
    ) -> anyhow::Result<()> {
        while done.load(Ordering::Relaxed) < total {
            let request = pb::GetTasksRequest {
                worker: self.name.clone(),
                queues: vec![self.queue.clone()],
                max_tasks: self.batch,
                wait: Some(WAIT),
                ..Default::default()
            };
            let leased = self.client.get_tasks(request).await?.into_inner().tasks;
            if leased.is_empty() {
                continue;
            }
            let completion = |task: pb::LeasedTask| pb::Completion {
                discovered: self.report.discovered(&task.key),
                id: task.id,
                lease_token: task.lease_token,
                ..Default::default()
            };
            let request = pb::CompleteTasksRequest {
                worker: self.name.clone(),
                completions: leased.into_iter().map(completion).collect(),
                next: None,
            };
            let answer = self.client.complete_tasks(request).await?.into_inner();
            for result in &answer.results {
                if result.status() != pb::ItemStatus::Ok {
                    bail!("taskd answered a completion with {result:?}");
                }
            }
            let count = answer.results.len() as u64;
            bar.inc(count);
            done.fetch_add(count, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Makes topologies that nobody uses.
async fn idle(run: &mut Run<'_>) -> anyhow::Result<()> {
    let before = run.idle_cpu().await;
    run.step("idle topologies", IDLE.into());
    for number in 0..IDLE {
        let name = format!("{}-idle-{number}", run.name);
        let file = format!("name = \"{name}\"\n[stage.a]\n[stage.b]\nfrom = \"a\"\n");
        apply(run, &name, &file).await?;
        run.bar.inc(1);
    }
    tokio::time::sleep(CALM).await;
    let after = run.idle_cpu().await;
    let used = after.zip(before).map(|(after, before)| after - before);
    let measure = format!("CPU of {IDLE} idle topologies");
    run.report
        .figure(Phase::Trees, &measure, "% of a core", used, None);
    Ok(())
}
