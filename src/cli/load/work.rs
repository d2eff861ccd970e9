//! The workers of a load. They treat each task as planned.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use taskd_client::{Client, Done, Error, Event, Failure, Task, Worker};

use super::{
    ledger::Ledger,
    plan::{Kind, Plan},
};

/// The rejection reason of a task that dies as planned.
const DEAD: &str = "it dies, as asked for";

/// Creates a worker of the queue. It records each answered report in the ledger.
pub(super) fn worker(number: u16, queue: &str, concurrency: u16, ledger: &Arc<Ledger>) -> Worker {
    let ledger = ledger.clone();
    Worker::new(format!("load-{number}"), [queue])
        .concurrency(concurrency.into())
        .on_event(move |event| match event {
            Event::Ended {
                task,
                ended,
                reason,
                ..
            } => ledger.reported(&task.key(), ended, reason == DEAD),
            Event::Away(_) => {
                ledger.away.fetch_add(1, Relaxed);
            }
            _ => {}
        })
}

pub(super) async fn run(
    worker: Worker,
    client: &Client,
    plan: Arc<Plan>,
    ledger: Arc<Ledger>,
) -> Result<(), Error> {
    let handler = move |task: Task<()>| {
        let (plan, ledger) = (plan.clone(), ledger.clone());
        async move {
            let Some(number) = ledger.started(&task.key()) else {
                return Err(Failure::new("nobody sent it"));
            };
            match plan.kind(number) {
                Kind::Dying => return Err(Failure::new(DEAD).never_again()),
                Kind::Failing if task.attempt() == 1 => {
                    return Err(
                        Failure::new("it fails once, as asked for").again_after(Duration::ZERO)
                    );
                }
                Kind::Slow => tokio::time::sleep(plan.slow_time).await,
                Kind::Failing | Kind::Plain => {}
            }
            Ok(Done::new())
        }
    };
    worker.run(client, handler).await.map(drop)
}
