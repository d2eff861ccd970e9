//! A bulk change: first a dry run, whose page shows the number and some of the tasks, then the
//! change of what was counted.

use super::{confirm::Confirm, dead::named, tasks::filter_of};
use crate::{
    api,
    ingress::{
        http::{
            problem::Problem,
            ui::{
                format,
                visit::{Answer, Visit},
            },
        },
        json,
    },
    model::{
        BulkAction, ChangeTasks, ChosenTasks, LetterFilter, LetterKind, LetterPages, Priority,
        Requeue, RequeueTasks, TaskCount, TaskFilter, TaskPages, TaskStatus, TasksChanged, Update,
        WorkerName,
    },
};

/// The parameters of the page: the change, and the filter of the list.
pub(in crate::ingress::http::ui) const PARAMETERS: &[&str] = &[
    "what",
    "away_from",
    "queue",
    "status",
    "key",
    "key_prefix",
    "header",
    "worker",
    "since",
    "until",
    "reason",
    "tree",
    json::query::HEADERS,
];

/// The parameters that are not of the filter.
const OF_THE_CHANGE: [&str; 2] = ["what", "away_from"];

/// Above this many tasks the number is typed.
const TYPED_FROM: u64 = 100;
const SAMPLES: u32 = 3;

/// What a page asks for.
struct Asked {
    change: BulkAction,
    /// What happens to the tasks.
    does: String,
    /// The verb of the button, and its class.
    verb: &'static str,
    kind: &'static str,
}

/// The change that a word means.
fn action(what: &str, away_from: &str) -> Result<Asked, Problem> {
    let priority = |priority| {
        BulkAction::Update(Update {
            priority: Some(priority),
            replicas: None,
        })
    };
    let asked = |change, does: &str, verb, kind| Asked {
        change,
        does: does.to_owned(),
        verb,
        kind,
    };
    match what {
        "retry" => Ok(asked(
            BulkAction::Retry,
            "are offered to workers again",
            "Retry",
            "main",
        )),
        "cancel" => Ok(asked(
            BulkAction::Cancel,
            "are cancelled: no worker does them any more",
            "Cancel",
            "danger",
        )),
        "requeue" if !away_from.is_empty() => {
            let worker = WorkerName::new(away_from)
                .map_err(|error| Problem::bad_request(error.to_string()))?;
            let does = format!(
                "are kept from worker {}: it loses those that it has, and gets none of them again",
                format::line(away_from)
            );
            let change = BulkAction::Requeue(Requeue::AwayFrom(worker));
            Ok(asked(change, &does, "Requeue", "main"))
        }
        "requeue" => Ok(asked(
            BulkAction::Requeue(Requeue::All),
            "are offered at once: their leases and backoffs end",
            "Requeue",
            "main",
        )),
        "high" => Ok(asked(
            priority(Priority::High),
            "get the priority high",
            "Change",
            "main",
        )),
        "low" => Ok(asked(
            priority(Priority::Low),
            "get the priority low",
            "Change",
            "main",
        )),
        _ => Err(Problem::bad_request("this change of many tasks is unknown")),
    }
}

fn filter(parameters: &[(String, String)]) -> Result<TaskFilter, Problem> {
    let known: Vec<(String, String)> = parameters
        .iter()
        .filter(|(name, _)| {
            !OF_THE_CHANGE.contains(&&name[..]) && PARAMETERS.contains(&&name[..])
                || name.starts_with("header.")
        })
        .cloned()
        .collect();
    let pages = filter_of(&known).map_err(Problem::bad_request)?;
    Ok(pages.filter)
}

/// Calls the operation of a change.
async fn call(
    visit: &Visit,
    change: &BulkAction,
    filter: TaskFilter,
    is_dry_run: bool,
) -> Result<TasksChanged, api::Error> {
    let request = Ok(ChangeTasks {
        chosen: ChosenTasks::Filter(Box::new(filter)),
        dry_run: is_dry_run,
        yes: true,
    });
    let (api, caller) = (visit.api(), &visit.caller);
    match change {
        BulkAction::Retry => api.retry_tasks(caller, request).await,
        BulkAction::Cancel => api.cancel_chosen(caller, request).await,
        BulkAction::Update(update) => api.update_tasks(caller, request, Ok(*update)).await,
        BulkAction::Requeue(requeue) => {
            let requeue = match requeue {
                Requeue::AwayFrom(worker) => RequeueTasks::AwayFrom(worker.clone()),
                _ => RequeueTasks::All,
            };
            api.requeue_tasks(caller, request, Ok(requeue)).await
        }
    }
}

pub(in crate::ingress::http::ui) async fn ask(visit: Visit) -> Answer {
    let what = visit.get("what");
    let away_from = visit.get("away_from");
    let Asked {
        change,
        does,
        verb,
        kind,
    } = action(what, away_from)?;
    let filter = filter(&visit.query)?;
    let counted = call(&visit, &change, filter.clone(), true).await?;
    let TasksChanged::Counted(TaskCount {
        matched,
        at_least,
        as_of_unix_ms: as_of,
        ..
    }) = counted
    else {
        return Err(Problem::bad_request("this change of many tasks is unknown"));
    };
    // Those that were inserted since are not among the counted ones.
    let filter = TaskFilter {
        as_of_unix_ms: Some(as_of),
        ..filter
    };
    let filter = change.filter(filter).map_err(Problem::bad_request)?;
    let reasons = reasons(&visit, &filter).await;
    let pages = TaskPages {
        filter,
        limit: SAMPLES,
        after: None,
    };
    let samples = visit
        .api()
        .list_tasks(&visit.caller, Ok(pages))
        .await?
        .tasks;
    let samples = samples
        .iter()
        .map(|task| (format::bytes(&task.key), format!("tasks/{}", task.id)));
    let number = format::count(matched);
    let least = if at_least { "At least " } else { "" };
    let mut hidden: Vec<(String, String)> = visit
        .query
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .cloned()
        .collect();
    let shown = hidden.iter().filter(|(name, _)| name != "what");
    let shown = shown
        .map(|(name, value)| (format::line(name), format::line(value)))
        .collect();
    let back: Vec<(&str, &str)> = hidden
        .iter()
        .filter(|(name, _)| !OF_THE_CHANGE.contains(&&name[..]))
        .map(|(name, value)| (&name[..], &value[..]))
        .collect();
    let back = if away_from.is_empty() {
        format!("tasks{}", format::query(&back))
    } else {
        format!("workers{}", format::query(&[("queue", visit.get("queue"))]))
    };
    hidden.push(("matched".to_owned(), matched.to_string()));
    hidden.push(("as_of".to_owned(), as_of.to_string()));
    hidden.push(("at_least".to_owned(), at_least.to_string()));
    let tasks = if matched == 1 { "task" } else { "tasks" };
    visit.show(&Confirm {
        head: visit.head("bulk", format!("{verb} many tasks")),
        asks: format!("{least}{number} {tasks} match, and {does}. Tasks that are inserted or changed from now on stay as they are."),
        filter: shown,
        reasons,
        samples: samples.collect(),
        action: "bulk/new".to_owned(),
        hidden,
        typed: if must_be_typed(matched, at_least) { matched.to_string() } else { String::new() },
        verb: if at_least {
            format!("{verb} all that match, at least {number} {tasks}")
        } else if matched > 0 {
            format!("{verb} {number} {tasks}")
        } else {
            String::new()
        },
        kind,
        back,
    })
}

/// The reasons of the letters that a filter by reason chooses: it goes by their beginning, which
/// others may share. None if the filter chooses by something else, too, which letters cannot tell,
/// or if the letters cannot be read.
async fn reasons(visit: &Visit, filter: &TaskFilter) -> Vec<(String, String)> {
    let by_reason = TaskFilter {
        queue: filter.queue.clone(),
        statuses: filter.statuses.clone(),
        reason: filter.reason.clone(),
        as_of_unix_ms: filter.as_of_unix_ms,
        ..TaskFilter::default()
    };
    let is_of_letters = filter.queue.is_some()
        && !filter.reason.is_empty()
        && filter.statuses.contains(&TaskStatus::Dead);
    if !is_of_letters || *filter != by_reason {
        return Vec::new();
    }
    let filter = LetterFilter {
        queue: filter.queue.clone(),
        kind: Some(LetterKind::Task),
        reason: filter.reason.clone(),
        ..LetterFilter::default()
    };
    let pages = LetterPages {
        filter,
        ..LetterPages::default()
    };
    let found = visit.api().letter_reasons(&visit.caller, Ok(pages)).await;
    found.map(|found| named(&found)).unwrap_or_default()
}

/// Whether somebody has to type the number. Nobody knows how many tasks match if the count ended
/// early.
pub(super) fn must_be_typed(matched: u64, at_least: bool) -> bool {
    matched > TYPED_FROM || at_least
}

pub(in crate::ingress::http::ui) async fn start(visit: Visit) -> Answer {
    let Asked { change, .. } = action(visit.field("what"), visit.field("away_from"))?;
    let matched = visit.field("matched");
    let number = |name: &str| {
        let text = visit.field(name);
        let read = text.parse::<i64>();
        read.map_err(|_| Problem::bad_request(format!("the form has no number {name}")))
    };
    let count = number("matched")?;
    let as_of = number("as_of")?;
    let at_least = visit.field("at_least") == "true";
    if must_be_typed(count.unsigned_abs(), at_least) && visit.field("typed").trim() != matched {
        let why = format!("the number typed is not {matched}, so nothing was changed");
        return Err(Problem::bad_request(why));
    }
    let mut filter = filter(&visit.form)?;
    filter.as_of_unix_ms = Some(as_of);
    match call(&visit, &change, filter, false).await? {
        TasksChanged::Started(bulk) => visit.go_to(&format!("bulk/{}?did=start", bulk.id)),
        _ => Err(Problem::bad_request("the filter names no tasks")),
    }
}
