//! One queue: where its tasks are, and why its oldest ones are not done.

use askama::Template;
use axum::http::HeaderMap;

use super::rows::{Banner, Row};
use crate::{
    api,
    ingress::http::{
        events::{self as streams, last_event},
        request::Id,
        ui::{
            charts::{self, Chart},
            format,
            scene::Head,
            visit::{Answer, Visit, page},
        },
    },
    model::{
        BooksState, DepthSpan, ExplainTask, QueueBooks, QueueName, TaskFilter, TaskPages,
        TaskStatus, TaskView,
    },
};

/// How many of the oldest unfinished tasks are explained.
const EXPLAINED: usize = 20;
/// The oldest are searched in growing spans of time: the first one, how much each is longer, and
/// how many there are.
const FIRST_SPAN_MS: i64 = 1000;
const GROWS: i64 = 16;
const SPANS: u32 = 8;

#[derive(Template)]
#[template(path = "queue.html", blocks = ["frame"])]
struct Queue {
    head: Head,
    queue: String,
    is_paused: bool,
    banners: Vec<Banner>,
    row: Row,
    flow: Option<Flow>,
    charts: Vec<Chart>,
    why: Vec<Reason>,
    explained: usize,
    as_of: String,
}
page!(Queue);

/// The books of the queue, from the insert to the end.
struct Flow {
    steps: Vec<Step>,
    verdict: String,
    is_bad: bool,
}

struct Step {
    name: &'static str,
    /// A name, a number, and a link from `/ui/` on or nothing.
    parts: Vec<(&'static str, String, String)>,
}

/// A reason, how many tasks have it, and one of these.
struct Reason {
    says: String,
    count: usize,
    id: String,
    key: String,
}

pub(in crate::ingress::http::ui) async fn show(Id(name): Id, visit: Visit) -> Answer {
    let api = visit.api();
    let looks = visit.looks.queues(api).await?;
    let books = visit.looks.books(api).await.ok();
    let people = visit.looks.people(api).await.ok();
    let known = looks.value.queues.iter().find(|view| {
        view.queue.as_str() == name && visit.caller.access.reaches(view.queue.as_str())
    });
    // A queue that has nothing to do is not among them.
    let view = match known {
        Some(view) => view.clone(),
        None => api.queue(&visit.caller, &name, None).await?.view,
    };
    let name = view.queue.to_string();
    let of_books = match books.as_ref().and_then(|books| {
        let mut all = books.value.queues.iter();
        all.find(|of| of.queue == view.queue).cloned()
    }) {
        Some(of) => Some(of),
        None => {
            let books = api.books(&visit.caller, &name).await;
            books.ok().and_then(|mut books| books.queues.pop())
        }
    };
    let rates = looks.value.rates.get(&name);
    let workers = people.as_ref().map(|people| &people.value.workers);
    let now = api.now_unix_ms();
    let depths = visit.looks.depths(api).await.ok();
    let lately = depths
        .as_ref()
        .and_then(|look| look.value.queues.get(&name));
    let row = Row::new(
        &view,
        rates,
        lately,
        of_books.as_ref(),
        workers,
        looks.at_unix_ms,
    );
    let mut charts = Vec::new();
    if let Some(depths) = &depths {
        for span in DepthSpan::ALL {
            let entries = depths.value.entries.of(span);
            charts.extend(charts::of_queue(entries, &name, span, now));
        }
    }
    let mut banners: Vec<Banner> = Banner::of_failure(looks.failed.as_ref())
        .into_iter()
        .collect();
    if view.paused {
        let text = "This queue is paused: no worker gets a task from it.".to_owned();
        banners.push(Banner::new("warn", text, "", ""));
    }
    let (why, explained) = if visit.is_frame() {
        (Vec::new(), 0)
    } else {
        // While a server is away, the page shows what is known.
        let explained = explain_oldest(&visit, &view.queue, view.oldest_waiting_ms).await;
        explained.unwrap_or_default()
    };
    let as_of = if looks.failed.is_some() {
        format::Moment::new(looks.at_unix_ms).text
    } else {
        String::new()
    };
    let did = match visit.get("did") {
        "pause" => "The queue is paused. Workers notice within a second.",
        "resume" => "The queue goes on. Workers notice within a second.",
        _ => "",
    };
    let head = visit
        .head("", name.clone())
        .live()
        .call(format!("v1/books?queue={name}"))
        .did(did);
    visit.show(&Queue {
        head,
        is_paused: view.paused,
        banners,
        row,
        flow: of_books.as_ref().map(flow),
        charts,
        why,
        explained,
        as_of,
        queue: name,
    })
}

fn flow(of: &QueueBooks) -> Flow {
    let held = &of.held;
    let count = format::count;
    let to = |path: &str| format!("tasks?queue={}&status={path}", of.queue);
    let part = |name: &'static str, number: u64| (name, count(number), String::new());
    let mut waiting = vec![("to claim", count(held.waiting), to("QUEUED"))];
    if held.behind_limits > 0 {
        waiting.push(part("behind limits", held.behind_limits));
    }
    if held.lost_shards > 0 {
        waiting.push(part("shards lost", held.lost_shards));
    }
    let steps = vec![
        Step {
            name: "Came in",
            parts: vec![
                part("stored", of.stored()),
                part("duplicates", of.duplicates),
                part("rejected", of.rejected),
            ],
        },
        Step {
            name: "In SQL",
            parts: vec![
                part("just stored", held.fresh),
                part("parked", held.parked),
                part("crowded", held.crowded),
                part("behind in sequences", held.behind),
                part("scheduled", held.scheduled),
                part("missing", held.missing),
            ],
        },
        Step {
            name: "Under way",
            parts: vec![("between", format::signed(held.between), String::new())],
        },
        Step {
            name: "Waiting",
            parts: waiting,
        },
        Step {
            name: "In hand",
            parts: vec![
                ("leased", count(held.assigned), to("ASSIGNED")),
                ("delayed", count(held.delayed), to("DELAYED")),
                part("reports", held.reports),
            ],
        },
        Step {
            name: "Ended",
            parts: vec![
                ("completed", count(of.completed), to("COMPLETED")),
                ("dead", count(of.dead), format!("dead?queue={}", of.queue)),
                ("cancelled", count(of.cancelled), to("CANCELLED")),
            ],
        },
    ];
    let (verdict, is_bad) = match of.state {
        BooksState::Balanced => ("Balanced to the task.".to_owned(), false),
        BooksState::Moving => (
            "Tasks are moving, so the counts may differ for a moment.".to_owned(),
            false,
        ),
        BooksState::Unbalanced => (
            format!(
                "UNBALANCED: SQL has {} unfinished tasks, and {} fewer can be found. `taskd fsck` says which.",
                count(held.total),
                format::signed(held.between)
            ),
            true,
        ),
    };
    Flow {
        steps,
        verdict,
        is_bad,
    }
}

/// Explains the oldest unfinished tasks, and counts the reasons.
async fn explain_oldest(
    visit: &Visit,
    queue: &QueueName,
    oldest_ms: Option<u64>,
) -> Result<(Vec<Reason>, usize), api::Error> {
    let Some(oldest_ms) = oldest_ms else {
        return Ok((Vec::new(), 0));
    };
    let mut reasons: Vec<Reason> = Vec::new();
    let mut explained = 0;
    for task in oldest(visit, queue, oldest_ms).await? {
        let question = ExplainTask {
            id: task.id.to_string(),
            ..ExplainTask::default()
        };
        let explanation = match visit.api().explain(&visit.caller, &question).await {
            Ok(explanation) => explanation,
            // It ended meanwhile.
            Err(error) if error.kind() == api::Kind::NotFound => continue,
            Err(error) => return Err(error),
        };
        explained += 1;
        let says = format!("{:?}", explanation.place).to_lowercase();
        let notes = explanation.notes.join("; ");
        let says = format::line(&if notes.is_empty() {
            says
        } else {
            format!("{says}: {notes}")
        });
        match reasons.iter_mut().find(|reason| reason.says == says) {
            Some(reason) => reason.count += 1,
            None => reasons.push(Reason {
                says,
                count: 1,
                id: task.id.to_string(),
                key: format::bytes(&task.key),
            }),
        }
    }
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
    Ok((reasons, explained))
}

/// The oldest unfinished tasks. Lists begin with the newest task, so this asks for a short time
/// after the oldest one, and for longer ones until there are enough tasks.
async fn oldest(
    visit: &Visit,
    queue: &QueueName,
    oldest_ms: u64,
) -> Result<Vec<TaskView>, api::Error> {
    let now = visit.api().now_unix_ms();
    let first = now - i64::try_from(oldest_ms).unwrap_or(now);
    let mut span = FIRST_SPAN_MS;
    for _ in 0..SPANS {
        let filter = TaskFilter {
            queue: Some(queue.clone()),
            statuses: TaskStatus::UNFINISHED.to_vec(),
            until_unix_ms: Some(first + span),
            ..TaskFilter::default()
        };
        let pages = TaskPages {
            filter,
            limit: 1000,
            after: None,
        };
        let mut tasks = visit
            .api()
            .list_tasks(&visit.caller, Ok(pages))
            .await?
            .tasks;
        if tasks.len() >= EXPLAINED || first + span > now {
            tasks.reverse();
            tasks.truncate(EXPLAINED);
            return Ok(tasks);
        }
        span = span.saturating_mul(GROWS);
    }
    Ok(Vec::new())
}

pub(in crate::ingress::http::ui) async fn pause(Id(name): Id, visit: Visit) -> Answer {
    visit.api().pause_queue(&visit.caller, &name).await?;
    visit.looks.forget_queues().await;
    visit.go_to(&format!("queues/{}?did=pause", format::encoded(&name)))
}

pub(in crate::ingress::http::ui) async fn resume(Id(name): Id, visit: Visit) -> Answer {
    visit.api().resume_queue(&visit.caller, &name).await?;
    visit.looks.forget_queues().await;
    visit.go_to(&format!("queues/{}?did=resume", format::encoded(&name)))
}

#[derive(Template)]
#[template(path = "live.html", blocks = ["frame"])]
struct Live {
    head: Head,
    queue: String,
}
page!(Live);

/// The tab that shows the events of a queue as they come.
pub(in crate::ingress::http::ui) async fn live(Id(name): Id, visit: Visit) -> Answer {
    let view = visit.api().queue(&visit.caller, &name, None).await?.view;
    let queue = view.queue.to_string();
    visit.show(&Live {
        head: visit
            .head("", format!("Live events of {queue}"))
            .call(format!("v1/events?queue={queue}")),
        queue,
    })
}

/// The stream of that tab. It is the stream of the API, for the cookie.
pub(in crate::ingress::http::ui) async fn events(
    Id(name): Id,
    headers: HeaderMap,
    visit: Visit,
) -> Answer {
    let last = last_event(&headers, None)?;
    let watching = visit
        .api()
        .watch_queue(&visit.caller, &name, last.as_deref())
        .await?;
    Ok(streams::events(watching))
}
