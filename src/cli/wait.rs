//! `taskd wait`: waits until a queue is drained.

use std::time::{Duration, Instant};

use backon::BackoffBuilder as _;
use clap::Args;
use indicatif::HumanCount;
use serde_json::json;
use tonic::Code;

use super::{
    ask::printable,
    client::{self, Server, Taskd, WAITS, is_transient},
    patience::progress_bar,
    print::print,
};
use crate::{
    config::Time,
    wire::pb::{self, operator_client::OperatorClient},
};

/// The longest wait in one call. It must be shorter than the timeout for an answer.
const OF_A_CALL: Duration = Duration::from_secs(30);
/// The wait in one call if a terminal shows the progress.
const SHOWN_EVERY: Duration = Duration::from_secs(1);
/// If an answer comes sooner than this, wait before asking again.
const SOON: Duration = Duration::from_millis(100);
/// How long to retry after the last answer of taskd.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// Wait until nothing of a queue is unfinished
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd wait crawl                      until the queue is drained
  taskd wait crawl --timeout 10m && ./report.sh
  taskd wait crawl --timeout 0s         is it drained now?

A queue is drained when no task of it waits, is delayed, is in backoff, is parked without room, or is in a worker's \
hand, and when no report is on its way that discovered one. Tasks that are dead or cancelled are finished. A paused \
queue with tasks is not drained.

Exit code: 0 if the queue is drained, 1 if the time is over before. 2 if the queue never had a task, if the server \
cannot be reached, or if the question is wrong.")]
pub struct Wait {
    /// Name of the queue
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// Give up after this time [default: wait for ever]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Time>,

    /// Print the queue as JSON, with "drained"
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Waits for the queue. Returns whether it is drained.
pub async fn run(args: Wait) -> anyhow::Result<bool> {
    let taskd = args.server.connect().await?;
    let until = args
        .timeout
        .and_then(|time| Instant::now().checked_add(time.0));
    let bar = progress_bar();
    let mut waits = WAITS.build();
    let mut heard = Instant::now();
    let queue = loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let longest = if bar.is_hidden() {
            OF_A_CALL
        } else {
            SHOWN_EVERY
        };
        let wait = left.map_or(longest, |left| left.min(longest));
        let asked = Instant::now();
        match ask(&taskd, &args.queue, wait).await {
            Ok(queue) if is_drained(&queue) => break queue,
            Ok(queue) if until.is_some_and(|until| Instant::now() >= until) => break queue,
            Ok(queue) => {
                // A taskd that is shutting down answers without waiting.
                if asked.elapsed() < SOON {
                    tokio::time::sleep(SOON).await;
                }
                bar.set_message(printable(&progress(&queue)));
                bar.tick();
                heard = Instant::now();
                waits = WAITS.build();
            }
            Err(status) if !is_transient(&status) => anyhow::bail!("{}", client::said(&status)),
            Err(status) => {
                let pause = waits.next().filter(|_| heard.elapsed() < GIVE_UP_AFTER);
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                match pause {
                    Some(pause) if left.is_none_or(|left| left > pause) => {
                        tokio::time::sleep(pause).await;
                    }
                    Some(_) => anyhow::bail!(
                        "the time is over, and taskd does not answer: {}",
                        client::said(&status)
                    ),
                    None => anyhow::bail!(
                        "gave up: no word from taskd for a minute: {}",
                        client::said(&status)
                    ),
                }
            }
        }
    };
    bar.finish_and_clear();
    let is_drained = is_drained(&queue);
    match args.json {
        true => print(as_json(&queue))?,
        false => print(printable(&told(&queue)))?,
    }
    Ok(is_drained)
}

/// Returns the state of a queue. taskd answers when the queue is drained, or after `wait`.
pub(super) async fn ask(
    taskd: &Taskd,
    queue: &str,
    wait: Duration,
) -> Result<pb::Queue, tonic::Status> {
    let request = pb::GetQueueRequest {
        queue: queue.to_owned(),
        wait_drained: prost_types::Duration::try_from(wait).ok(),
    };
    let answer = OperatorClient::new(taskd.clone()).get_queue(request).await;
    Ok(answer?.into_inner())
}

/// Returns whether all these queues are drained at the same time. A queue that never had a task
/// counts as drained.
pub(super) async fn are_drained(
    taskd: &Taskd,
    queues: &[String],
    wait: Duration,
) -> Result<bool, tonic::Status> {
    let Some(before) = ended(taskd, queues, wait).await? else {
        return Ok(false);
    };
    // While a queue was checked, one of its tasks may have discovered tasks of a queue that was
    // checked before. Then the number of finished tasks has changed.
    Ok(queues.len() == 1 || ended(taskd, queues, Duration::ZERO).await? == Some(before))
}

/// Returns how many tasks of each queue are finished, or `None` if a queue is not drained.
async fn ended(
    taskd: &Taskd,
    queues: &[String],
    wait: Duration,
) -> Result<Option<Vec<u64>>, tonic::Status> {
    let mut ended = Vec::new();
    for queue in queues {
        match ask(taskd, queue, wait).await {
            Ok(queue) if is_drained(&queue) => {
                ended.push(queue.completed + queue.dead + queue.cancelled);
            }
            Ok(_) => return Ok(None),
            Err(status) if status.code() == Code::NotFound => ended.push(0),
            Err(status) => return Err(status),
        }
    }
    Ok(Some(ended))
}

fn is_drained(queue: &pb::Queue) -> bool {
    queue.drained == Some(true)
}

fn unfinished(queue: &pb::Queue) -> u64 {
    queue.pending + queue.waiting + queue.assigned + queue.delayed
}

fn progress(queue: &pb::Queue) -> String {
    format!(
        "{}: {} waiting, {} assigned, {} delayed; {} completed, {} dead",
        queue.queue,
        HumanCount(queue.pending + queue.waiting),
        HumanCount(queue.assigned),
        HumanCount(queue.delayed),
        HumanCount(queue.completed),
        HumanCount(queue.dead),
    )
}

fn told(queue: &pb::Queue) -> String {
    let name = &queue.queue;
    if !is_drained(queue) {
        if unfinished(queue) == 0 {
            return format!(
                "queue {name} is not drained: reports that taskd has accepted are not in SQL yet"
            );
        }
        let paused = if queue.paused { ", and is paused" } else { "" };
        return format!(
            "queue {name} is not drained: it has {} unfinished tasks{paused}",
            HumanCount(unfinished(queue))
        );
    }
    format!(
        "queue {name} is drained: {} completed, {} dead, {} cancelled",
        HumanCount(queue.completed),
        HumanCount(queue.dead),
        HumanCount(queue.cancelled)
    )
}

fn as_json(queue: &pb::Queue) -> serde_json::Value {
    json!({
        "queue": queue.queue, "drained": is_drained(queue), "pending": queue.pending, "waiting": queue.waiting,
        "assigned": queue.assigned, "delayed": queue.delayed, "completed": queue.completed, "dead": queue.dead,
        "cancelled": queue.cancelled, "paused": queue.paused,
    })
}
