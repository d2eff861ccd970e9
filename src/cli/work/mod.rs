//! `taskd work`: a worker that needs no code: it runs a command for each task, or checks the task's
//! URL.

mod args;
mod capture;
mod command;
mod drained;
mod found;
mod http_check;
mod name;
mod output;
mod show;

use std::{future::pending, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use taskd_client::{Client, Error, Source as _, Unary, Worker};
use tonic::Code;

pub use self::args::Work;
use self::{command::Plan, drained::Drained, http_check::Checker, show::Show};
use super::client::refused;
use crate::app;

/// The lease of a call that only checks whether taskd answers; its timeout is a quarter of this.
const ASKING: Duration = Duration::from_secs(8);

/// Works until it is stopped.
pub(super) async fn run(args: Work) -> anyhow::Result<()> {
    let handler = Handler::new(&args)?;
    let name = args.name();
    let queues = args.queues();
    // Until this function returns.
    let _taken = name::take(&name, &queues)?;
    let client = args.server.client().await?;
    let calls = Unary::new(&client, &name, &queues, Duration::ZERO, ASKING);
    if let Err(error @ Error::Refused { code, .. }) = &calls.extend(Vec::new()).await
        && *code != Code::Unimplemented
    {
        return Err(refused(error));
    }
    let drained = Drained::new(&args.server, &queues);
    if args.exit_when_idle.is_some() {
        drained.may_ask().await?;
    }
    let show = Arc::new(Show::new(args.json, args.results).context("cannot start a thread")?);
    show.up(&name);
    let worker = worker(&args, name, &show);
    let stop = worker.stop();
    let mut gave_up = None;
    let mut hangup = app::hangups().context("cannot listen for SIGHUP")?;
    let worked = async {
        let worked = handler.work(worker, &client, &show).await;
        worked.map_err(|error| refused(&error))
    };
    let idle = async {
        match args.exit_when_idle {
            Some(time) => show.idle(time.0, async || drained.ask().await).await,
            None => pending().await,
        }
    };
    let stopping = async {
        tokio::select! {
            idle = idle => gave_up = idle.err(),
            Some(()) = async { hangup.as_mut()?.recv().await } => {}
        }
        stop.drain();
        pending::<()>().await;
    };
    let summary = tokio::select! {
        summary = Box::pin(worked) => summary,
        () = Box::pin(stopping) => bail!("the worker ended before its end"),
    };
    show.finish(summary.as_ref().ok()).await;
    let summary = summary?;
    if let Some(why) = handler.unusable() {
        bail!("{why}");
    }
    match (summary.unreported, gave_up) {
        (0, None) => Ok(()),
        (0, Some(why)) => bail!("taskd did not answer for a minute: {why}"),
        (1, _) => bail!(
            "1 task is finished, and taskd did not answer its report: another worker may do it again"
        ),
        (tasks, _) => {
            bail!(
                "{tasks} tasks are finished, and taskd did not answer their reports: others may do them again"
            )
        }
    }
}

fn worker(args: &Work, name: String, show: &Arc<Show>) -> Worker {
    // The handler has a timeout of its own, with a better message. A check may spend the same time
    // again waiting for its host.
    let waiting = if args.http_check {
        args.timeout.0
    } else {
        Duration::ZERO
    };
    let limit = args.timeout.0 + waiting + command::KILL_AFTER * 4;
    let mut worker = Worker::new(name, args.queues());
    for (queue, weight) in args.weights() {
        worker = worker.weight(queue, weight);
    }
    let worker = worker
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
    if args.poll { worker.poll() } else { worker }
}

/// What the worker does with a task.
enum Handler {
    Command(Arc<Plan>),
    HttpCheck(Arc<Checker>),
}

impl Handler {
    fn new(args: &Work) -> anyhow::Result<Self> {
        if args.http_check {
            let checker =
                Checker::new(&args.checks, args.timeout.0).context("cannot check URLs")?;
            return Ok(Self::HttpCheck(Arc::new(checker)));
        }
        Ok(Self::Command(Arc::new(Plan::new(args)?)))
    }

    async fn work(
        &self,
        worker: Worker,
        client: &Client,
        show: &Arc<Show>,
    ) -> Result<taskd_client::Summary, Error> {
        match self {
            Self::Command(plan) => {
                let plan = plan.clone();
                let stop = worker.stop();
                let show = show.clone();
                let run = move |task| command::run(plan.clone(), stop.clone(), show.clone(), task);
                worker.run(client, run).await
            }
            Self::HttpCheck(checker) => {
                let checker = checker.clone();
                worker
                    .run(client, move |task| http_check::check(checker.clone(), task))
                    .await
            }
        }
    }

    /// Why the worker cannot do any task, if that is so.
    fn unusable(&self) -> Option<&str> {
        match self {
            Self::Command(plan) => plan.unusable(),
            Self::HttpCheck(_) => None,
        }
    }
}
