//! `taskd load`: sends made-up tasks at a fixed rate, runs workers for them, and compares the
//! result with the plan.

mod args;
mod ledger;
mod plan;
mod report;
mod work;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use taskd_client::{Client, Inserted, InsertedAs};
use tokio::task::JoinSet;
use tonic::Code;
use uuid::Uuid;

pub use self::args::Load;
use self::{ledger::Ledger, plan::Plan, report::Report};
use super::client::{Taskd, is_transient, refused, said};
use super::print::{print, say};
use crate::wire::pb::{GetBooksRequest, QueueBooks, operator_client::OperatorClient};

/// How often tasks are sent. At a rate of thousands per second, each call sends several.
const EVERY: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// If no task has ended for this long, ask SQL.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// How long SQL may take to show the last completions.
const LONGEST_SETTLE: Duration = Duration::from_secs(30);
/// How many inserts may be in flight.
const MOST_INSERTS: usize = 64;
/// taskd bounds the number of calls on one connection.
const WORKERS_A_CONNECTION: u16 = 50;

/// The range of tasks that an insert sent, and the answers.
type Answered = Result<(std::ops::Range<u32>, Vec<Inserted>), taskd_client::Error>;

/// Runs the load. Returns true if all counts are as planned.
pub(super) async fn run(args: Load) -> anyhow::Result<bool> {
    let plan = Arc::new(Plan::new(&args)?);
    // Workers have connections of their own, so that their long calls cannot delay inserts.
    let client = args.server.client().await?;
    let queue = format!("load-{}", &Uuid::new_v4().simple().to_string()[..12]);
    let ledger = Arc::new(Ledger::new(plan.count()));
    let mut workers = JoinSet::new();
    let mut stops = Vec::new();
    for first in (0..args.workers).step_by(WORKERS_A_CONNECTION.into()) {
        let client = args.server.another_client()?;
        for number in first..args.workers.min(first + WORKERS_A_CONNECTION) {
            let worker =
                work::worker(number, &queue, args.concurrency, &ledger).lease(args.lease.0);
            stops.push(worker.stop());
            let (client, plan, ledger) = (client.clone(), plan.clone(), ledger.clone());
            workers.spawn(async move { work::run(worker, &client, plan, ledger).await });
        }
    }
    let mut books = Books {
        operator: OperatorClient::new(args.server.connect().await?),
        queue: queue.clone(),
    };
    let bar = bar(plan.new_tasks());
    let began = Instant::now();
    let worked = async {
        send(&client, &plan, &queue, &ledger, began).await?;
        let sent = began.elapsed();
        wait_for_ends(
            &mut books,
            &ledger,
            u64::from(plan.new_tasks()),
            &bar,
            args.give_up_after.0,
        )
        .await?;
        Ok::<_, anyhow::Error>(sent)
    };
    let sent = tokio::select! {
        sent = worked => sent?,
        Some(ended) = workers.join_next() => {
            return Err(refused(&ended?.err().context("a worker ended by itself")?));
        }
    };
    let took = began.elapsed();
    stops.iter().for_each(taskd_client::Stop::drain);
    while let Some(ended) = workers.join_next().await {
        ended?.map_err(|error| refused(&error))?;
    }
    bar.finish_and_clear();
    let books = books
        .settled(u64::from(plan.new_tasks()), args.give_up_after.0)
        .await?;
    let report = Report::new(&args, &queue, &plan, &ledger, books.as_ref(), sent, took);
    print(if args.json {
        serde_json::to_string(&report)?
    } else {
        report.table()
    })?;
    report
        .wrong
        .iter()
        .for_each(|line| say(format_args!("taskd: {line}")));
    Ok(report.wrong.is_empty())
}

/// Sends each task at its scheduled time, however long the answers take.
async fn send(
    client: &Client,
    plan: &Arc<Plan>,
    queue: &str,
    ledger: &Arc<Ledger>,
    began: Instant,
) -> anyhow::Result<()> {
    let mut calls: JoinSet<Answered> = JoinSet::new();
    let mut ticks = tokio::time::interval(EVERY);
    let mut next = 0;
    while next < plan.count() || !calls.is_empty() {
        tokio::select! {
            _ = ticks.tick(), if next < plan.count() && calls.len() < MOST_INSERTS => {
                let end = plan.end_of_call(next, began.elapsed());
                if end > next {
                    let numbers = next..end;
                    numbers.clone().for_each(|number| ledger.sent(number));
                    let tasks: Vec<_> = numbers.clone().map(|number| plan.task(number, queue)).collect();
                    let client = client.clone();
                    calls.spawn(async move { client.insert(tasks).await.map(|answers| (numbers, answers)) });
                    next = end;
                }
            }
            Some(answered) = calls.join_next() => {
                let (numbers, answers) = answered?.map_err(|error| refused(&error))?;
                for (number, answer) in numbers.zip(answers) {
                    anyhow::ensure!(answer.status != InsertedAs::Rejected, "taskd rejected a task: {}", answer.note);
                    ledger.inserted(plan.original(number), answer.status);
                }
            }
        }
    }
    Ok(())
}

/// Waits until all `tasks` have ended, including those whose insert was never answered, or until
/// none has ended for `give_up_after`.
async fn wait_for_ends(
    books: &mut Books,
    ledger: &Ledger,
    tasks: u64,
    bar: &ProgressBar,
    give_up_after: Duration,
) -> anyhow::Result<()> {
    let (mut before, mut since, mut asked) = (0, Instant::now(), Instant::now());
    loop {
        let ended = ledger.ended();
        bar.set_position(ended);
        if ended >= tasks || since.elapsed() > give_up_after {
            return Ok(());
        }
        if ended > before {
            (before, since) = (ended, Instant::now());
        }
        // If taskd was killed, the answer to a rejection may be lost. Then only SQL knows that the
        // task ended.
        if since.elapsed() > ASK_AFTER && asked.elapsed() > ASK_AFTER {
            asked = Instant::now();
            if books
                .look()
                .await?
                .is_some_and(|books| books.completed + books.dead >= tasks)
            {
                return Ok(());
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Reads the books of the queue, which taskd keeps in SQL.
struct Books {
    operator: OperatorClient<Taskd>,
    queue: String,
}

impl Books {
    /// Returns `None` if taskd does not answer at the moment, or if this caller is not allowed to
    /// read.
    async fn look(&mut self) -> anyhow::Result<Option<QueueBooks>> {
        match self
            .operator
            .get_books(GetBooksRequest {
                queue: self.queue.clone(),
            })
            .await
        {
            Ok(answer) => Ok(answer.into_inner().queues.into_iter().next()),
            Err(status) if is_transient(&status) || status.code() == Code::PermissionDenied => {
                Ok(None)
            }
            Err(status) => anyhow::bail!("{}", said(&status)),
        }
    }

    /// Waits until `tasks` have ended in SQL, and returns the books; after the timeout, returns the
    /// books as they are.
    async fn settled(
        &mut self,
        tasks: u64,
        patience: Duration,
    ) -> anyhow::Result<Option<QueueBooks>> {
        let deadline = Instant::now() + patience.min(LONGEST_SETTLE);
        loop {
            let books = self.look().await?;
            if books
                .as_ref()
                .is_some_and(|books| books.completed + books.dead >= tasks)
                || Instant::now() > deadline
            {
                return Ok(books);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

fn bar(tasks: u32) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:30} {human_pos}/{human_len} ended  {per_sec}  {elapsed}",
    );
    ProgressBar::new(tasks.into())
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
