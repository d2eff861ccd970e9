//! `taskd work`: a worker without a line of code: a command for each task, or a check of the task's URL.

mod args;
mod capture;
mod command;
mod found;
mod http_check;
mod show;

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use taskd_client::{Client, Error, Worker};

pub use self::args::Work;
use self::{command::Plan, http_check::Checker, show::Show};
use super::client::refused;

/// Works until it is stopped.
pub(super) async fn run(args: Work) -> anyhow::Result<()> {
    let handler = Handler::new(&args)?;
    let client = args.server.client().await?;
    let name = args.name();
    let show = Arc::new(Show::new(&name, args.json));
    // The handler has a time-out of its own, and says more. A check may wait as long for its host.
    let waiting = if args.http_check { args.timeout.0 } else { Duration::ZERO };
    let limit = args.timeout.0 + waiting + command::KILL_AFTER * 4;
    let mut worker = Worker::new(name, args.queues.clone())
        .concurrency(args.concurrency.into())
        .prefetch(args.prefetch.into())
        .lease(args.lease.0)
        .time_limit(limit)
        .drain_limit(limit)
        .stop_on_signals()
        .on_event({
            let show = show.clone();
            move |event| show.event(&event)
        });
    if args.poll {
        worker = worker.poll();
    }
    let stop = worker.stop();
    let worked = async {
        let worked = handler.work(worker, &client).await;
        worked.map_err(|error| refused(&error))
    };
    let idle = async {
        match args.exit_when_idle {
            Some(time) => show.idle(time.0).await,
            None => std::future::pending().await,
        }
        stop.drain();
        std::future::pending::<()>().await;
    };
    let summary = tokio::select! {
        summary = Box::pin(worked) => summary,
        () = idle => bail!("the worker ended before its end"),
    };
    show.finish();
    let summary = summary?;
    show.summary(&summary);
    match summary.unreported {
        0 => Ok(()),
        1 => bail!("1 task is finished, and taskd did not answer its report: another worker may do it again"),
        tasks => bail!("{tasks} tasks are finished, and taskd did not answer their reports: others may do them again"),
    }
}

/// The work on a task.
enum Handler {
    Command(Arc<Plan>),
    HttpCheck(Arc<Checker>),
}

impl Handler {
    fn new(args: &Work) -> anyhow::Result<Self> {
        if args.http_check {
            let checker = Checker::new(&args.checks, args.timeout.0).context("cannot check URLs")?;
            return Ok(Self::HttpCheck(Arc::new(checker)));
        }
        Ok(Self::Command(Arc::new(Plan::new(args)?)))
    }

    async fn work(self, worker: Worker, client: &Client) -> Result<taskd_client::Summary, Error> {
        match self {
            Self::Command(plan) => worker.run(client, move |task| command::run(plan.clone(), task)).await,
            Self::HttpCheck(checker) => worker.run(client, move |task| http_check::check(checker.clone(), task)).await,
        }
    }
}
