//! `taskd watch`: shows each change of a task, or of all tasks of a queue, as it happens.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use anyhow::bail;
use backon::BackoffBuilder as _;
use clap::Args;
use serde_json::json;
use tonic::{Code, Status, Streaming};

use super::{
    ask::printable,
    client::{self, Server, Taskd, WAITS, is_transient},
    named::{Name, Named, id_of},
    print::{NotThere, print_one, say},
};
use crate::{
    model::TaskStatus,
    wire::{
        pb::{self, discovery_client::DiscoveryClient},
        task_status,
    },
};

/// How long to retry after the last sign of life from taskd.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// A stream that lasted this long counts as a success, even without an event.
const WAS_OPEN: Duration = Duration::from_secs(5);

/// Watch a task to its end, or a queue: a line for each change
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd watch 0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44    the task with this id, until it is finished
  taskd watch crawl https://example.org/              the task with this queue and key
  taskd watch crawl                                   all tasks of the queue, from now on
  taskd watch crawl | jq -r .status                   JSON lines where stdout is no terminal

A watch outlives a taskd that starts again; for a task it then shows the status of that time.
Exit code of a task: 0 if it is completed, 1 if it died, was cancelled, or is not there. 2 if the server \
cannot be reached or the question is wrong.")]
pub struct Watch {
    #[command(flatten)]
    named: Named,

    /// Print a JSON object for each change, also on a terminal
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// The task or the queue that is watched.
enum Target {
    Task(String),
    Queue(String),
}

/// Watches the task or the queue. Returns whether the task was completed.
pub async fn run(args: Watch) -> anyhow::Result<bool> {
    let name = args.named.read()?;
    let taskd = args.server.connect().await?;
    let target = match name {
        Name::Queue(queue) => Target::Queue(queue),
        Name::Id(id) => Target::Task(id.to_string()),
        Name::Key { queue, key } => match id_of(&taskd, &queue, &key).await? {
            Ok(id) => Target::Task(id),
            Err(why) => bail!(NotThere(why)),
        },
    };
    let as_json = args.json || !std::io::stdout().is_terminal();
    let mut last = String::new();
    let mut was_open = false;
    let mut waits = WAITS.build();
    let mut heard = Instant::now();
    loop {
        let ended = match open(&taskd, &target, &last).await {
            Ok(events) => {
                // Without the id of an event to resume after, changes between the two streams may
                // be missing.
                if was_open && last.is_empty() && matches!(target, Target::Queue(_)) {
                    tell(
                        &pb::TaskEvent {
                            gap: true,
                            ..Default::default()
                        },
                        &target,
                        as_json,
                    )?;
                }
                was_open = true;
                let before = last.clone();
                let opened = Instant::now();
                let ended = follow(events, &target, &mut last, as_json).await?;
                if last != before || opened.elapsed() > WAS_OPEN {
                    waits = WAITS.build();
                    heard = Instant::now();
                }
                ended
            }
            Err(status) => Ended::Broken(status),
        };
        match ended {
            Ended::Final(status) => return Ok(status == TaskStatus::Completed),
            Ended::Quiet => bail!("taskd ended the watch without a reason"),
            Ended::Broken(status) if !is_transient(&status) => return refused(&status),
            // Measure the time rather than count the calls, because a call may take long to fail.
            Ended::Broken(status) => match waits.next().filter(|_| heard.elapsed() < GIVE_UP_AFTER)
            {
                Some(wait) => tokio::time::sleep(wait).await,
                None => bail!(
                    "gave up: no word from taskd for a minute: {}",
                    client::said(&status)
                ),
            },
        }
    }
}

/// Says on stderr that there is no such task, and returns false. Any other refusal is an error.
fn refused(status: &Status) -> anyhow::Result<bool> {
    if status.code() != Code::NotFound {
        bail!("{}", client::said(status));
    }
    say(format_args!("taskd: {}", printable(&client::said(status))));
    Ok(false)
}

async fn open(
    taskd: &Taskd,
    target: &Target,
    last: &str,
) -> Result<Streaming<pb::TaskEvent>, Status> {
    let mut client = DiscoveryClient::new(taskd.clone());
    let last_event_id = last.to_owned();
    let answer = match target {
        Target::Task(id) => {
            client
                .watch_task(pb::WatchTaskRequest {
                    id: id.clone(),
                    last_event_id,
                })
                .await
        }
        Target::Queue(queue) => {
            client
                .watch_queue(pb::WatchQueueRequest {
                    queue: queue.clone(),
                    last_event_id,
                })
                .await
        }
    };
    Ok(answer?.into_inner())
}

/// How a stream ended.
enum Ended {
    /// The task is finished.
    Final(TaskStatus),
    /// taskd ended the stream without an error.
    Quiet,
    Broken(Status),
}

async fn follow(
    mut events: Streaming<pb::TaskEvent>,
    target: &Target,
    last: &mut String,
    as_json: bool,
) -> anyhow::Result<Ended> {
    loop {
        match events.message().await {
            Ok(Some(event)) => {
                if !event.event_id.is_empty() {
                    last.clone_from(&event.event_id);
                }
                tell(&event, target, as_json)?;
                if let (Target::Task(_), Some(status)) = (target, task_status(event.status))
                    && status.is_final()
                {
                    // Do not wait for the end of the stream, because the connection may break
                    // before.
                    return Ok(Ended::Final(status));
                }
            }
            Ok(None) => return Ok(Ended::Quiet),
            Err(status) => return Ok(Ended::Broken(status)),
        }
    }
}

fn tell(event: &pb::TaskEvent, target: &Target, as_json: bool) -> anyhow::Result<()> {
    let at = event.at.map(|at| at.to_string()).unwrap_or_default();
    let id = &event.id;
    let status = task_status(event.status).map_or("UNKNOWN", TaskStatus::as_str);
    let key = String::from_utf8_lossy(&event.key);
    let line = match (as_json, event.gap, target) {
        (true, true, _) => json!({"gap": true}).to_string(),
        (true, false, _) => {
            json!({"id": id, "queue": event.queue, "key": key, "status": status, "at": at, "event_id": event.event_id}).to_string()
        }
        (false, true, _) => "(some changes before this may be missing)".to_owned(),
        (false, false, Target::Task(_)) => format!("{at}  {status}"),
        (false, false, Target::Queue(_)) => {
            format!("{at}  {id}  {status:<9}  {}", printable(&key))
        }
    };
    Ok(print_one(line)?)
}
