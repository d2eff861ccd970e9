//! `taskd tasks retry`, `cancel`, `change` and `requeue`: change the tasks with given ids or keys,
//! or start a bulk change for those of a filter.

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use indicatif::HumanCount;
use serde_json::json;
use tonic::Status;

use super::{
    super::{
        bulk::{self, Operator},
        client::{Server, Taskd, said},
        named::{Names, ids_of},
        patience::{patiently, repeatedly, say_perhaps_changed},
        values::{Values, Whom},
    },
    filter::Filter,
};
use crate::{
    cli::{
        ask::printable,
        print::{print, say},
    },
    model::to_rfc_3339,
    wire::{
        pb::{self, discovery_client::DiscoveryClient},
        time::unix_ms,
    },
};

/// The most ids in one call.
const AT_ONCE: usize = 500;

#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd tasks retry 0199… 0199…                        send these tasks again
  taskd tasks retry crawl --since 2h --dry-run         count those of the filter
  taskd tasks retry crawl --reason timeout --as-of 2026-01-31T09:00:00Z --yes
                                                       those that were dead by then, and no others
  taskd tasks retry crawl --since 2h --yes             start a bulk change, and watch it
  taskd tasks retry crawl --status cancelled --yes --detach

With a filter taskd runs a bulk change: Ctrl-C ends the watching and not the bulk change. `taskd bulk` shows and stops bulk changes.
Exit code: 0, or 1 if some tasks could not be sent again or the bulk change was stopped, 2 if the request is wrong or the \
server cannot be reached.")]
pub(super) struct Retry {
    #[command(flatten)]
    change: Change,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd tasks cancel crawl --key-prefix https://example.org/ --dry-run
                                                       count those of the filter
  taskd tasks cancel crawl --until 2days --yes         start a bulk change, and watch it
  taskd tasks cancel crawl --yes --detach              all unfinished tasks of a queue

With a filter taskd runs a bulk change: Ctrl-C ends the watching and not the bulk change. `taskd bulk` shows and stops bulk changes. \
`taskd cancel` names single tasks by their keys.
Exit code: 0, or 1 if some tasks could not be cancelled or the bulk change was stopped, 2 if the request is wrong or the \
server cannot be reached.")]
pub(super) struct Cancel {
    #[command(flatten)]
    change: Change,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd tasks change crawl --key-prefix https://example.org/ --priority high --dry-run
                                                       count those of the filter
  taskd tasks change crawl --replicas 3 --yes          start a bulk change, and watch it
  taskd tasks change crawl --status completed --replicas 3 --yes --detach
                                                       reopens completed tasks

With a filter taskd runs a bulk change: Ctrl-C ends the watching and not the bulk change. `taskd bulk` shows and stops bulk changes. \
`taskd change` names single tasks by their keys.
Exit code: 0, or 1 if some tasks could not be changed or the bulk change was stopped, 2 if the request is wrong or the \
server cannot be reached.")]
pub(super) struct Update {
    #[command(flatten)]
    values: Values,

    #[command(flatten)]
    change: Change,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd tasks requeue crawl --away-from w7 --dry-run
                                                       count those of the filter
  taskd tasks requeue crawl --away-from w7 --yes
                                                       w7 loses its tasks, and never gets them again
  taskd tasks requeue crawl --yes --detach             every worker may get its tasks now

With a filter taskd runs a bulk change: Ctrl-C ends the watching and not the bulk change. `taskd bulk` shows and stops bulk changes. \
`taskd requeue` names single tasks by their keys. A time of --for begins when the bulk change begins.
Exit code: 0, or 1 if some tasks could not be requeued or the bulk change was stopped, 2 if the request is wrong or the \
server cannot be reached.")]
pub(super) struct Requeue {
    #[command(flatten)]
    whom: Whom,

    #[command(flatten)]
    change: Change,
}

#[derive(Args)]
struct Change {
    /// Name of the queue, or ids of tasks instead of a filter
    #[arg(value_name = "QUEUE|ID")]
    first: Option<String>,

    /// Keys of tasks of the queue instead of a filter, or more ids
    #[arg(value_name = "KEY|ID")]
    others: Vec<String>,

    #[arg(long, value_name = "NAME", hide = true)]
    queue: Option<String>,

    #[command(flatten)]
    filter: Filter,

    /// Only count
    #[arg(long)]
    dry_run: bool,

    /// Change all tasks of the filter
    #[arg(long)]
    yes: bool,

    /// Print the id of the bulk change, and leave it alone
    #[arg(long)]
    detach: bool,

    /// Print the outcome as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Which change to make, and its values.
#[derive(Clone)]
enum Verb {
    Retry,
    Cancel,
    Update(pb::ChangeTasksRequest),
    Requeue(pb::RequeueTasksRequest),
}

impl Verb {
    fn done(&self) -> &'static str {
        match self {
            Self::Retry => "sent again",
            Self::Cancel => "cancelled",
            Self::Update(_) => "changed",
            Self::Requeue(_) => "requeued",
        }
    }

    /// Returns true if taskd may refuse a change like this because an earlier call, whose answer
    /// was lost, has made it already.
    fn is_as_if_repeated(&self, refusal: pb::ItemStatus) -> bool {
        match self {
            // The task is unfinished again, or completed by now.
            Self::Retry => matches!(
                refusal,
                pb::ItemStatus::Invalid | pb::ItemStatus::AlreadyCompleted
            ),
            Self::Cancel => refusal == pb::ItemStatus::Cancelled,
            Self::Update(_) | Self::Requeue(_) => false,
        }
    }
}

/// A connection to both services.
struct Client {
    operator: Operator,
    discovery: DiscoveryClient<Taskd>,
}

impl Client {
    async fn call(
        &self,
        verb: &Verb,
        request: pb::RetryTasksRequest,
    ) -> Result<pb::RetryTasksResponse, Status> {
        let mut operator = self.operator.clone();
        let mut discovery = self.discovery.clone();
        let pb::RetryTasksRequest {
            ids,
            filter,
            dry_run,
            yes,
        } = request;
        Ok(match verb {
            Verb::Retry => {
                let request = pb::RetryTasksRequest {
                    ids,
                    filter,
                    dry_run,
                    yes,
                };
                operator.retry_tasks(request).await?.into_inner()
            }
            Verb::Update(values) => {
                let request = pb::ChangeTasksRequest {
                    ids,
                    filter,
                    dry_run,
                    yes,
                    ..values.clone()
                };
                let answer = operator.change_tasks(request).await?.into_inner();
                pb::RetryTasksResponse {
                    results: answer.results,
                    count: answer.count,
                    bulk: answer.bulk,
                }
            }
            Verb::Requeue(whom) => {
                let request = pb::RequeueTasksRequest {
                    ids,
                    filter,
                    dry_run,
                    yes,
                    ..whom.clone()
                };
                let answer = operator.requeue_tasks(request).await?.into_inner();
                pb::RetryTasksResponse {
                    results: answer.results,
                    count: answer.count,
                    bulk: answer.bulk,
                }
            }
            Verb::Cancel => {
                let request = pb::CancelTasksRequest {
                    ids,
                    filter,
                    dry_run,
                    yes,
                };
                let answer = discovery.cancel_tasks(request).await?.into_inner();
                pb::RetryTasksResponse {
                    results: answer.results,
                    count: answer.count,
                    bulk: answer.bulk,
                }
            }
        })
    }
}

pub(super) async fn retry(args: &Retry) -> anyhow::Result<bool> {
    run(&args.change, &Verb::Retry).await
}

pub(super) async fn cancel(args: &Cancel) -> anyhow::Result<bool> {
    run(&args.change, &Verb::Cancel).await
}

pub(super) async fn update(args: &Update) -> anyhow::Result<bool> {
    run(&args.change, &Verb::Update(args.values.message())).await
}

pub(super) async fn requeue(args: &Requeue) -> anyhow::Result<bool> {
    run(&args.change, &Verb::Requeue(args.whom.message()?)).await
}

async fn run(args: &Change, verb: &Verb) -> anyhow::Result<bool> {
    let words = args.first.iter().chain(&args.others).cloned().collect();
    let names = Names::read(words, args.queue.clone(), &[])?;
    let by_filter = names.ids.is_empty() && names.keys.is_empty();
    if by_filter && names.queue.is_none() {
        let what = if matches!(verb, Verb::Retry) {
            "--status dead"
        } else {
            "--key-prefix TEXT"
        };
        bail!(
            "name tasks by QUEUE KEY or by ids, or a queue and what is meant in it: QUEUE {what}"
        );
    }
    ensure!(
        by_filter || !args.filter.chooses(),
        "tasks are named, and a filter is given; use one"
    );
    if by_filter && !args.dry_run && !args.yes {
        bail!("this may change many tasks: say --dry-run to count them, or --yes to go on");
    }
    let filter = args.filter.message(names.queue.as_deref())?;
    let connection = args.server.connect().await?;
    let ids = ids_of(&connection, &names).await?;
    let operator = Operator::new(connection.clone());
    let discovery = DiscoveryClient::new(connection);
    let client = Client {
        operator,
        discovery,
    };
    if !by_filter {
        return by_ids(args, &ids, verb, &client).await;
    }
    let filter = Some(filter);
    let dry_run = args.dry_run;
    let yes = args.yes;
    let request = pb::RetryTasksRequest {
        filter,
        dry_run,
        yes,
        ..Default::default()
    };
    if args.dry_run {
        let answer = patiently(async || client.call(verb, request.clone()).await).await?;
        count(args, verb, &answer.count.unwrap_or_default())?;
        return Ok(true);
    }
    // Do not retry: a call whose answer was lost may have started a bulk change.
    let answer = client
        .call(verb, request)
        .await
        .map_err(|status| anyhow::anyhow!("{}", said(&status)))?;
    let bulk = answer.bulk.context("taskd has started no bulk change")?;
    if args.detach {
        print(if args.json {
            bulk::json(&bulk).to_string()
        } else {
            bulk.id
        })?;
        return Ok(true);
    }
    bulk::watch(&client.operator, bulk, args.json).await
}

fn count(args: &Change, verb: &Verb, count: &pb::TaskCount) -> anyhow::Result<()> {
    let pb::TaskCount {
        matched,
        looked_at,
        at_least,
        as_of,
    } = count;
    let as_of = as_of.map(|as_of| to_rfc_3339(unix_ms(as_of)));
    if args.json {
        print(json!({
            "matched": matched,
            "looked_at": looked_at,
            "at_least": at_least,
            "as_of": as_of,
        }))?;
    } else {
        let more = if *at_least { "at least " } else { "" };
        print(format_args!(
            "{more}{} tasks would be {}",
            HumanCount(*matched),
            verb.done()
        ))?;
    }
    Ok(())
}

async fn by_ids(
    args: &Change,
    ids: &[String],
    verb: &Verb,
    client: &Client,
) -> anyhow::Result<bool> {
    let mut matched = 0;
    let mut changed = 0_u64;
    let mut failed = 0_u64;
    for ids in ids.chunks(AT_ONCE) {
        let request = pb::RetryTasksRequest {
            ids: ids.to_vec(),
            dry_run: args.dry_run,
            ..Default::default()
        };
        let (answer, is_repeat) =
            repeatedly(async || client.call(verb, request.clone()).await).await?;
        matched += answer.count.map_or(0, |count| count.matched);
        let mut changed_before = 0;
        for result in answer.results {
            if result.status == i32::from(pb::ItemStatus::Ok) {
                changed += 1;
                continue;
            }
            failed += 1;
            changed_before += u64::from(is_repeat && verb.is_as_if_repeated(result.status()));
            let unknown = "there is no such task, or it finished so long ago that it was removed";
            let why = if result.error.is_empty() {
                unknown
            } else {
                &result.error
            };
            say(printable(&format!("{}: {why}", result.id)));
        }
        if changed_before > 0 {
            say_perhaps_changed(changed_before);
        }
    }
    if args.dry_run {
        count(
            args,
            verb,
            &pb::TaskCount {
                matched,
                looked_at: ids.len() as u64,
                at_least: false,
                as_of: None,
            },
        )?;
    } else if args.json {
        print(json!({ "changed": changed, "failed": failed }))?;
    } else {
        print(format_args!(
            "{} of {} tasks {}",
            HumanCount(changed),
            HumanCount(changed + failed),
            verb.done()
        ))?;
    }
    Ok(failed == 0)
}
