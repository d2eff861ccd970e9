//! `taskd cancel`, `change`, `requeue`, `pause` and `resume`: change live work of a running taskd,
//! over gRPC.

use anyhow::bail;
use clap::Args;
use serde_json::json;
use tonic::Response;

use super::{
    ask::printable,
    client::{Server, Taskd},
    named::{Names, TheQueue, id_of},
    patience::patiently,
    print::{print, say},
    values::{Values, Whom},
};
use crate::wire::pb::{
    CancelTasksRequest, ChangeTasksRequest, ItemResult, ItemStatus, ListTasksRequest,
    PauseQueueRequest, RequeueTasksRequest, ResumeQueueRequest, TaskFilter,
    discovery_client::DiscoveryClient, operator_client::OperatorClient,
};

/// The most tasks in one call.
const AT_ONCE: usize = 500;

/// The tasks that a command is about.
#[derive(Args)]
#[group(skip)]
pub(super) struct Targets {
    /// Name of their queue, or ids of tasks
    #[arg(value_name = "QUEUE|ID", required_unless_present = "queue")]
    first: Option<String>,

    /// Keys of the tasks, or more ids
    #[arg(value_name = "KEY|ID")]
    others: Vec<String>,

    #[arg(long, value_name = "NAME", hide = true)]
    queue: Option<String>,

    #[arg(long = "key", value_name = "KEY", hide = true)]
    keys: Vec<String>,

    /// Print a JSON object per task
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Cancel unfinished tasks: no worker does them any more
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd cancel crawl https://e.org/                 the task with this queue and key
  taskd cancel 0199… 0199…                          the tasks with these ids

A worker that holds such a task is told CANCELLED. Its key stays taken. taskd tasks retry sends the task again. \
A cancelled task stays so if the command is interrupted: the same command goes on with the rest.
Exit code: 0, or 1 if some tasks could not be cancelled, 2 if the request is wrong or the server cannot be reached.")]
pub struct Cancel {
    #[command(flatten)]
    targets: Targets,
}

/// Cancels the tasks. Returns whether all of them are cancelled.
pub async fn cancel(args: Cancel) -> anyhow::Result<bool> {
    args.targets
        .change("cancelled", async |taskd, ids| {
            let answer = DiscoveryClient::new(taskd)
                .cancel_tasks(CancelTasksRequest {
                    ids,
                    ..Default::default()
                })
                .await?;
            Ok(answer.map(|answer| answer.results))
        })
        .await
}

/// Give unfinished tasks another priority, or another number of workers
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd change --priority high 0199…                 workers get it before others
  taskd change --replicas 3 0199…                    three workers do it; reopens a completed task
  taskd change crawl https://e.org/ --replicas 1

A lower number ends the latest leases at no cost; if as many workers have completed the task, it is completed. \
taskd tasks change changes all tasks of a filter.
Exit code: 0, or 1 if some tasks could not be changed, 2 if the request is wrong or the server cannot be reached.")]
pub struct Change {
    #[command(flatten)]
    targets: Targets,

    #[command(flatten)]
    values: Values,
}

/// End leases and backoffs at no cost, so that tasks can be claimed at once
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd requeue crawl https://e.org/                 every worker may get it now
  taskd requeue --away-from w7 0199…                 w7 loses it, and does not get it again
  taskd requeue --to w7 --for 10m 0199…              only w7 gets it, for ten minutes

taskd tasks requeue requeues all tasks of a filter.
Exit code: 0, or 1 if some tasks could not be requeued, 2 if the request is wrong or the server cannot be reached.")]
pub struct Requeue {
    #[command(flatten)]
    targets: Targets,

    #[command(flatten)]
    whom: Whom,
}

/// Changes the tasks. Returns whether all of them are changed.
pub async fn change(args: Change) -> anyhow::Result<bool> {
    let values = args.values.message();
    let call = async |taskd, ids| {
        let request = ChangeTasksRequest {
            ids,
            ..values.clone()
        };
        let answer = OperatorClient::new(taskd).change_tasks(request).await?;
        Ok(answer.map(|answer| answer.results))
    };
    args.targets.change("changed", call).await
}

/// Requeues the tasks. Returns whether all of them are requeued.
pub async fn requeue(args: Requeue) -> anyhow::Result<bool> {
    let whom = args.whom.message()?;
    let call = async |taskd, ids| {
        let request = RequeueTasksRequest {
            ids,
            ..whom.clone()
        };
        let answer = OperatorClient::new(taskd).requeue_tasks(request).await?;
        Ok(answer.map(|answer| answer.results))
    };
    args.targets.change("requeued", call).await
}

/// Pause a queue: no worker gets anything of it until `taskd resume`
#[derive(Args)]
#[command(after_help = "\
Leases go on, and so do inserts; workers wait as for an empty queue. Each process knows it within half a second.
Exit code: 0, also if the queue was paused before; 2 if the request is wrong or the server cannot be reached.")]
pub struct Pause {
    #[command(flatten)]
    queue: TheQueue,

    #[command(flatten)]
    server: Server,
}

/// Resume a paused queue
#[derive(Args)]
pub struct Resume {
    #[command(flatten)]
    queue: TheQueue,

    #[command(flatten)]
    server: Server,
}

pub async fn pause(args: Pause) -> anyhow::Result<()> {
    let taskd = args.server.connect().await?;
    let queue = args.queue.name().to_owned();
    let request = PauseQueueRequest {
        queue: queue.clone(),
    };
    let answer = patiently(async || {
        OperatorClient::new(taskd.clone())
            .pause_queue(request.clone())
            .await
    })
    .await?;
    // Any name can be paused, so say if the queue has no task: it may be misspelt.
    let filter = Some(TaskFilter {
        queue: queue.clone(),
        ..Default::default()
    });
    let first = ListTasksRequest {
        filter,
        limit: 1,
        ..Default::default()
    };
    let first = DiscoveryClient::new(taskd).list_tasks(first).await;
    let is_empty = first.is_ok_and(|first| first.into_inner().tasks.is_empty());
    print(format_args!(
        "queue {queue} {}{}",
        if answer.into_inner().changed {
            "is paused"
        } else {
            "was paused before"
        },
        if is_empty { " (it has no task)" } else { "" }
    ))?;
    Ok(())
}

pub async fn resume(args: Resume) -> anyhow::Result<()> {
    let taskd = args.server.connect().await?;
    let queue = args.queue.name().to_owned();
    let request = ResumeQueueRequest {
        queue: queue.clone(),
    };
    let answer = patiently(async || {
        OperatorClient::new(taskd.clone())
            .resume_queue(request.clone())
            .await
    })
    .await?;
    print(format_args!(
        "queue {queue} {}",
        if answer.into_inner().changed {
            "is resumed"
        } else {
            "was not paused"
        }
    ))?;
    Ok(())
}

impl Targets {
    /// Changes the tasks, up to [`AT_ONCE`] per call. `call` may be repeated after an error, so it
    /// must be idempotent.
    async fn change(
        &self,
        done: &str,
        call: impl AsyncFn(Taskd, Vec<String>) -> Result<Response<Vec<ItemResult>>, tonic::Status>,
    ) -> anyhow::Result<bool> {
        let words = self.first.iter().chain(&self.others).cloned().collect();
        let names = Names::read(words, self.queue.clone(), &self.keys)?;
        let queue = names.queue.unwrap_or_default();
        if names.ids.is_empty() && names.keys.is_empty() {
            bail!(
                "{queue:?} is not the id of a task; name a task by its queue and key: {queue} KEY"
            );
        }
        let taskd = self.server.connect().await?;
        let mut ids: Vec<String> = names.ids.iter().map(ToString::to_string).collect();
        let mut changed = 0;
        let mut failed = 0;
        for key in &names.keys {
            match id_of(&taskd, &queue, key).await? {
                Ok(id) => ids.push(id),
                Err(why) => {
                    failed += 1;
                    self.tell("key", key, ItemStatus::UnknownTask, &why);
                }
            }
        }
        for ids in ids.chunks(AT_ONCE) {
            for result in patiently(async || call(taskd.clone(), ids.to_vec()).await)
                .await?
                .into_inner()
            {
                match result.status() {
                    ItemStatus::Ok => changed += 1,
                    _ => failed += 1,
                }
                self.tell("id", &result.id, result.status(), &result.error);
            }
        }
        if !self.json {
            print(format_args!(
                "{changed} of {} tasks {done}",
                changed + failed
            ))?;
        }
        Ok(failed == 0)
    }

    /// Reports the outcome for one task. `what` is `id` or `key`, and `name` is its value.
    fn tell(&self, what: &str, name: &str, status: ItemStatus, error: &str) {
        let shown = status.as_str_name().trim_start_matches("ITEM_STATUS_");
        match (self.json, status) {
            // Go on with the other tasks if the line cannot be written, for example to a full disk.
            (true, _) => drop(print(
                json!({ what: name, "status": shown, "error": error }),
            )),
            (false, ItemStatus::Ok) => {}
            (false, _) if error.is_empty() => say(printable(&format!("{name}: {shown}"))),
            (false, _) => say(printable(&format!("{name}: {shown}: {error}"))),
        }
    }
}
