//! Redis loses everything while taskd runs: measures how long it takes until all unfinished tasks
//! are waiting in the queue again.

use std::{collections::HashSet, time::Instant};

use anyhow::{Context, ensure};
use taskd::wire::pb::{self, tasks_client::TasksClient};
use tonic::transport::Channel;

use crate::{
    daemon::{Counts, Daemon},
    database::Database,
    limits,
    lines::{CONFIG, FOR_TWO, QUEUE},
    report::{Row, Runs, Table, Unit},
    servers::Place,
};

const WORKER: &str = "ann";
/// One in this many tasks is leased when the loss happens.
const IN_HAND: usize = 5;
const PER: f64 = 100_000.0;

/// Seconds per 100,000 tasks.
#[derive(Default)]
pub(crate) struct Rebuild {
    limit: Runs,
    took: Runs,
}

impl Rebuild {
    /// Measures the rebuild. `count` tasks are already in the database.
    pub(crate) async fn measure(&mut self, place: &Place<'_>, count: usize) -> anyhow::Result<()> {
        let daemon = Daemon::start_as("all", &place.arguments()?, CONFIG).await?;
        let mut database = Database::connect(&place.database_url()?).await?;
        let all = Counts {
            waiting: count as u64,
            ..Counts::default()
        };
        daemon.wait_for(QUEUE, all).await?;
        let rows = database.read_tasks(count).await?;
        let pushes = limits::Redis::start().await?.insert(1, 1000, count)?;
        self.limit.push(PER / rows + PER / pushes);

        let mut worker = TasksClient::new(daemon.channels(1).await?.remove(0));
        let credited = take_in_hand(&mut worker, count / IN_HAND).await?;
        database.wait_for_results(credited.len()).await?;
        let mut conn = place
            .redis
            .client()?
            .get_multiplexed_async_connection()
            .await?;
        let began = Instant::now();
        redis::cmd("FLUSHALL").exec_async(&mut conn).await?;
        let took = daemon.wait_patiently_for(QUEUE, all).await? - began;

        let again = take_all(&mut worker, count - credited.len()).await?;
        ensure!(
            again.is_disjoint(&credited),
            "a worker got again what it had completed"
        );
        self.took.push(took.as_secs_f64() * PER / count as f64);
        daemon.stop().await
    }

    pub(crate) fn table(&self, count: usize) -> Table {
        let row = |figure: &str, runs: &Runs, limit: Option<&Runs>| {
            let ratios = vec![limit.map(|limit| runs.over(limit))];
            Row {
                figure: figure.to_owned(),
                unit: Unit::Seconds,
                runs: runs.clone(),
                ratios,
            }
        };
        Table {
            bench: "rebuild",
            title: "rebuild: seconds for 100,000 tasks after FLUSHALL",
            conditions: format!(
                "{count} unfinished tasks in Redis, one in {IN_HAND} in a worker's hand, one in {FOR_TWO} of those \
                 completed by one of two workers. From FLUSHALL until /v1/queues shows all of them waiting; taskd \
                 notices by itself. `command` has the same on embedded defaults.",
            ),
            references: vec!["SELECT + LPUSH".into()],
            rows: vec![
                row(
                    "limit: MariaDB, SELECT of the rows; Redis, LPUSH of 1000",
                    &self.limit,
                    None,
                ),
                row(
                    "rebuild on MariaDB and Kafka",
                    &self.took,
                    Some(&self.limit),
                ),
            ],
        }
    }
}

/// Leases tasks in several calls; completes those that need two workers, and keeps the others.
/// Returns the ids of the completed ones.
async fn take_in_hand(
    worker: &mut TasksClient<Channel>,
    count: usize,
) -> anyhow::Result<HashSet<String>> {
    let (mut credited, mut taken) = (HashSet::new(), 0);
    while taken < count {
        let tasks = get(worker, 100).await?;
        ensure!(
            !tasks.is_empty(),
            "{taken} of {count} tasks were handed out"
        );
        taken += tasks.len();
        let for_two = tasks.into_iter().filter(|task| task.replicas == 2);
        let completions = for_two.map(|task| pb::Completion {
            id: task.id,
            lease_token: task.lease_token,
            result: "done".into(),
            ..Default::default()
        });
        let request = pb::CompleteTasksRequest {
            worker: WORKER.to_owned(),
            completions: completions.collect(),
            next: None,
        };
        let results = worker
            .complete_tasks(request)
            .await
            .context("complete")?
            .into_inner()
            .results;
        let wrong = results
            .iter()
            .find(|result| result.status() != pb::ItemStatus::Ok);
        ensure!(wrong.is_none(), "a completion was answered {wrong:?}");
        credited.extend(results.into_iter().map(|result| result.id));
    }
    ensure!(!credited.is_empty(), "no task for two was among {count}");
    Ok(credited)
}

/// Leases all tasks that the worker may have; fails unless they are `count` distinct ones.
async fn take_all(
    worker: &mut TasksClient<Channel>,
    count: usize,
) -> anyhow::Result<HashSet<String>> {
    let (mut ids, mut taken) = (HashSet::with_capacity(count), 0);
    loop {
        let tasks = get(worker, 1000).await?;
        if tasks.is_empty() {
            break;
        }
        taken += tasks.len();
        ids.extend(tasks.into_iter().map(|task| task.id));
    }
    ensure!(
        taken == count && ids.len() == count,
        "{taken} tasks ({} distinct) came instead of {count}",
        ids.len()
    );
    Ok(ids)
}

async fn get(worker: &mut TasksClient<Channel>, most: u32) -> anyhow::Result<Vec<pb::LeasedTask>> {
    let get = pb::GetTasksRequest {
        worker: WORKER.to_owned(),
        queues: vec![QUEUE.to_owned()],
        max_tasks: most,
        ..Default::default()
    };
    Ok(worker
        .get_tasks(get)
        .await
        .context("get")?
        .into_inner()
        .tasks)
}
