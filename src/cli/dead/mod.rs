//! `taskd dead`: lists dead letters, shows one, sends them again and purges them, over gRPC.

mod show;

use anyhow::{bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use indicatif::HumanCount;
use serde_json::json;
use tonic::Status;

use super::{
    ask::printable,
    client::{Server, Taskd},
    named::{AnyQueue, Names, ids_of},
    patience::{pages, patiently, progress_bar, repeatedly, say_perhaps_changed, time},
    print::{print, say},
};
use crate::{
    model::to_rfc_3339,
    wire::{
        pb::{self, operator_client::OperatorClient},
        time::{timestamp, unix_ms},
    },
};

/// The most letters in one call.
const AT_ONCE: u32 = 500;
/// The largest answer to accept. A letter has a record or a payload of up to 8 MiB, and more around
/// it.
const MAX_ANSWER_BYTES: usize = 64 << 20;

type Client = OperatorClient<Taskd>;

/// List, show, retry and purge dead letters of a running taskd
#[derive(Args)]
#[command(arg_required_else_help = false)]
#[command(after_help = "\
Examples:
  taskd dead list crawl --since 2h                  the newest first
  taskd dead reasons crawl                          which reasons, and how often
  taskd dead show crawl https://example.org/        one letter, with payload and attempts
  taskd dead retry 0199… 0199…                      send these tasks again
  taskd dead retry crawl --reason 'it took longer' --dry-run
                                                    count them
  taskd dead retry crawl --reason 'it took longer' --yes
  taskd dead purge --kind record --until 7d --yes

A task that is sent again keeps its id and the results that it has. What retry or purge has done stays \
done if it is interrupted: the same command goes on with the rest.
Exit code: 0, or 1 if some letters could not be changed or the letter is not there, 2 if the request is wrong or the \
server cannot be reached.")]
pub struct Dead {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List letters, the newest first
    List(List),
    /// Count letters by their reasons: of at most 10,000, the newest
    Reasons(Reasons),
    /// Show one letter with all that it has, as JSON
    Show(Show),
    /// Send tasks again: those of the ids, or of the filter
    Retry(Change),
    /// Remove letters for ever; of a dead task only its key stays
    Purge(Change),
}

#[derive(Args)]
struct Filter {
    /// Letters of this kind: tasks that failed, discovered tasks without room, poison records,
    /// refused inserts
    #[arg(long, value_enum, value_name = "KIND")]
    kind: Option<Kind>,

    /// From this time on: RFC 3339, or so long ago (2h, 7days)
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<i64>,

    /// Before this time: RFC 3339, or so long ago
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<i64>,

    /// Letters whose reason begins with this text; needs a queue
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Task,
    Discovered,
    Record,
    Refused,
}

#[derive(Args)]
struct List {
    #[command(flatten)]
    queue: AnyQueue,

    #[command(flatten)]
    filter: Filter,

    /// Most letters to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,

    /// Print a JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Reasons {
    #[command(flatten)]
    queue: AnyQueue,

    #[command(flatten)]
    filter: Filter,

    /// Print the reasons as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Show {
    /// Name of the queue, or id of the letter; that of a dead task is the task's
    #[arg(value_name = "QUEUE|ID", required_unless_present = "queue")]
    first: Option<String>,

    /// Key of the dead task
    #[arg(value_name = "KEY")]
    key: Option<String>,

    #[arg(long, value_name = "NAME", hide = true)]
    queue: Option<String>,

    /// Changes nothing: a letter is JSON also without it
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Change {
    /// Name of the queue, or ids of letters instead of a filter
    #[arg(value_name = "QUEUE|ID")]
    first: Option<String>,

    /// Keys of dead tasks of the queue instead of a filter, or more ids
    #[arg(value_name = "KEY|ID")]
    others: Vec<String>,

    #[arg(long, value_name = "NAME", hide = true)]
    queue: Option<String>,

    #[command(flatten)]
    filter: Filter,

    /// Only count
    #[arg(long)]
    dry_run: bool,

    /// Change all letters of the filter
    #[arg(long)]
    yes: bool,

    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

impl Filter {
    /// Returns true if any flag of the filter is given.
    fn chooses(&self) -> bool {
        self.kind.is_some() || self.since.is_some() || self.until.is_some() || self.reason.is_some()
    }

    fn message(&self, queue: Option<&str>) -> anyhow::Result<pb::LetterFilter> {
        ensure!(
            self.reason.is_none() || queue.is_some(),
            "--reason needs a queue: QUEUE --reason TEXT"
        );
        let kind = self.kind.map(|kind| match kind {
            Kind::Task => pb::LetterKind::Task,
            Kind::Discovered => pb::LetterKind::Discovered,
            Kind::Record => pb::LetterKind::Record,
            Kind::Refused => pb::LetterKind::Refused,
        });
        Ok(pb::LetterFilter {
            queue: queue.unwrap_or_default().to_owned(),
            kind: kind.unwrap_or_default().into(),
            since: self.since.map(timestamp),
            until: self.until.map(timestamp),
            reason: self.reason.clone().unwrap_or_default(),
        })
    }
}

/// Runs the command. Returns false if some letters could not be changed.
pub async fn run(args: Dead) -> anyhow::Result<bool> {
    match args.what {
        What::List(args) => list(&args).await.map(|()| true),
        What::Reasons(args) => reasons(&args).await.map(|()| true),
        What::Show(args) => show(&args).await.map(|()| true),
        What::Retry(args) => {
            change(&args, "sent again", async |client, request| {
                client.retry_dead_letters(request).await
            })
            .await
        }
        What::Purge(args) => {
            change(&args, "purged", async |client, request| {
                client.purge_dead_letters(request).await
            })
            .await
        }
    }
}

async fn connect(server: &Server) -> anyhow::Result<Client> {
    Ok(OperatorClient::new(server.connect().await?).max_decoding_message_size(MAX_ANSWER_BYTES))
}

async fn list(args: &List) -> anyhow::Result<()> {
    let filter = args.filter.message(args.queue.name())?;
    let client = connect(&args.server).await?;
    let page = async |limit, cursor| {
        let request = pb::ListDeadLettersRequest {
            filter: Some(filter.clone()),
            limit,
            cursor,
        };
        let page = client
            .clone()
            .list_dead_letters(request)
            .await?
            .into_inner();
        Ok((page.letters, page.cursor))
    };
    pages(args.limit, args.json, page, show::json, show::table).await
}

/// Prints how many letters have each reason, with runs of digits folded.
async fn reasons(args: &Reasons) -> anyhow::Result<()> {
    let filter = Some(args.filter.message(args.queue.name())?);
    let client = connect(&args.server).await?;
    let request = pb::CountDeadLettersRequest { filter };
    let call = async || client.clone().count_dead_letters(request.clone()).await;
    let found = patiently(call).await?.into_inner();
    let time = |at: Option<_>| at.map(|at| to_rfc_3339(unix_ms(at))).unwrap_or_default();
    if args.json {
        let reason = |reason: pb::LetterReason| {
            json!({
                "reason": reason.reason,
                "prefix": reason.prefix,
                "count": reason.count,
                "first_at": time(reason.first_at),
                "last_at": time(reason.last_at),
            })
        };
        let reasons: Vec<_> = found.reasons.into_iter().map(reason).collect();
        print(json!({
            "reasons": reasons,
            "looked_at": found.looked_at,
            "at_least": found.at_least,
        }))?;
        return Ok(());
    }
    for reason in found.reasons {
        let count = HumanCount(reason.count).to_string();
        let last = time(reason.last_at);
        print(format_args!(
            "{count:>9}  {last:<24}  {}",
            printable(&reason.reason)
        ))?;
    }
    if found.at_least {
        say(format!(
            "counted are the newest {}; --until counts older ones",
            HumanCount(found.looked_at)
        ));
    }
    Ok(())
}

async fn show(args: &Show) -> anyhow::Result<()> {
    let words: Vec<String> = args.first.iter().chain(&args.key).cloned().collect();
    let queue = args.queue.clone();
    // The letter of a record has an id that is not the id of a task, so take a single word as an
    // id.
    let id = match (&words[..], &queue) {
        ([id], None) => Some(id.clone()),
        _ => None,
    };
    let names = Names::read(words, queue, &[])?;
    let taskd = args.server.connect().await?;
    let id = match id {
        Some(id) => id,
        None => {
            let ids = ids_of(&taskd, &names).await?;
            ensure!(ids.len() == 1, "name one letter: its id, or QUEUE KEY");
            ids.concat()
        }
    };
    let client = OperatorClient::new(taskd).max_decoding_message_size(MAX_ANSWER_BYTES);
    let request = pb::GetDeadLetterRequest { id };
    let letter = patiently(async || client.clone().get_dead_letter(request.clone()).await)
        .await?
        .into_inner();
    print(format_args!("{:#}", show::json(&letter)))?;
    Ok(())
}

/// The outcome of all calls of a command.
#[derive(Default)]
struct Total {
    matched: u64,
    changed: u64,
    failed: u64,
}

async fn change(
    args: &Change,
    done: &str,
    call: impl AsyncFn(
        &mut Client,
        pb::ChangeDeadLettersRequest,
    ) -> Result<tonic::Response<pb::ChangeDeadLettersResponse>, Status>,
) -> anyhow::Result<bool> {
    let words = args.first.iter().chain(&args.others).cloned().collect();
    let names = Names::read(words, args.queue.clone(), &[])?;
    let by_filter = names.ids.is_empty() && names.keys.is_empty();
    ensure!(
        by_filter || !args.filter.chooses(),
        "letters are named, and a filter is given; use one"
    );
    if by_filter && !args.dry_run && !args.yes {
        bail!("this may change many letters: say --dry-run to count them, or --yes to go on");
    }
    let filter = args.filter.message(names.queue.as_deref())?;
    let taskd = args.server.connect().await?;
    let ids = ids_of(&taskd, &names).await?;
    let client = OperatorClient::new(taskd).max_decoding_message_size(MAX_ANSWER_BYTES);
    let mut requests: Vec<pb::ChangeDeadLettersRequest> = Vec::new();
    let request = pb::ChangeDeadLettersRequest {
        dry_run: args.dry_run,
        yes: args.yes,
        limit: AT_ONCE,
        ..Default::default()
    };
    if by_filter {
        requests.push(pb::ChangeDeadLettersRequest {
            filter: Some(filter),
            ..request
        });
    } else {
        let some = ids.chunks(AT_ONCE as usize);
        requests.extend(some.map(|ids| pb::ChangeDeadLettersRequest {
            ids: ids.to_vec(),
            ..request.clone()
        }));
    }
    let mut total = Total::default();
    let bar = progress_bar();
    for mut request in requests {
        loop {
            let (answer, is_repeat) =
                repeatedly(async || call(&mut client.clone(), request.clone()).await).await?;
            let answer = answer.into_inner();
            total.matched += answer.matched;
            total.changed += answer.changed;
            total.failed += answer.failed.len() as u64;
            let lines = answer
                .failed
                .iter()
                .map(|failure| printable(&format!("{}: {}", failure.id, failure.error)));
            bar.suspend(|| lines.for_each(say));
            // An earlier call, whose answer was lost, may have changed and so removed these
            // letters.
            if is_repeat && !by_filter && !args.dry_run && !answer.failed.is_empty() {
                bar.suspend(|| say_perhaps_changed(answer.failed.len() as u64));
            }
            bar.set_message(format!(
                "{} letters, {} {done}",
                HumanCount(total.matched),
                HumanCount(total.changed)
            ));
            bar.tick();
            request.cursor = answer.cursor;
            if request.cursor.is_empty() {
                break;
            }
        }
    }
    bar.finish_and_clear();
    let Total {
        matched,
        changed,
        failed,
    } = total;
    if args.json {
        print(
            json!({ "matched": matched, "changed": changed, "failed": failed, "dry_run": args.dry_run }),
        )?;
    } else if args.dry_run {
        print(format_args!(
            "{} letters would be {done}",
            HumanCount(matched)
        ))?;
    } else {
        // An id without a letter counts as failed, but not as matched.
        let all = matched.max(changed + failed);
        print(format_args!(
            "{} of {} letters {done}",
            HumanCount(changed),
            HumanCount(all)
        ))?;
    }
    if let (0, Some(reason)) = (matched, &args.filter.reason) {
        say(format_args!(
            "no reason begins with {reason:?}; `taskd dead list` shows the reasons"
        ));
    }
    Ok(failed == 0)
}
