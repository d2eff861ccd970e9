//! One queue: where its tasks are, and why its oldest ones are not done.

use askama::Template;
use axum::http::HeaderMap;
use futures::future::BoxFuture;

use super::rows::{Banner, Row};
use crate::{
    api,
    ingress::http::{
        events::{self as streams, last_event},
        request::Id,
        ui::{
            charts::{self, Chart},
            format::{self, Moment},
            looks::Queues,
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
/// The oldest are searched in growing spans of time: the first one, and how much each is longer.
const FIRST_SPAN_MS: i64 = 1000;
const GROWS: i64 = 16;
/// How many lists are read for that at most, and how many tasks each has.
const LISTS: u32 = 30;
const LISTED: u32 = 1000;

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
    sql_as_of: Option<Moment>,
    redis_as_of: Option<Moment>,
    sql_old: &'static str,
    redis_old: &'static str,
    books_are_old: bool,
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

pub(in crate::ingress::http::ui) async fn show(Id(name): Id, mut visit: Visit) -> Answer {
    let (shared, api) = (&visit.looks, visit.api());
    let (looks, books, workers, depths) = tokio::join!(
        shared.queues(api),
        shared.books(api),
        shared.workers(api),
        shared.depths(api),
    );
    visit.has_looked();
    let api = visit.api();
    let looks = looks?;
    let Queues { sql, redis, .. } = &*looks.value;
    let known = looks.value.queues.iter().find(|view| {
        view.queue.as_str() == name && visit.caller.access.reaches(view.queue.as_str())
    });
    // A queue that has nothing to do is not among them.
    let view = match known {
        Some(view) => view.clone(),
        None => api.queue(&visit.caller, &name, None).await?.view,
    };
    let name = view.queue.to_string();
    let books_failed = books.as_ref().ok().and_then(|look| look.failed.clone());
    let of_books = match books.as_ref().ok().and_then(|look| look.value.of(&name)) {
        Some(of) => Some(of.clone()),
        None if sql.failed.is_some() => None,
        None => {
            let books = api.books(&visit.caller, &name).await;
            books.ok().and_then(|mut books| books.queues.pop())
        }
    };
    let rates = looks.value.rates.get(&name);
    let heard = workers
        .as_ref()
        .ok()
        .filter(|look| look.failed.is_none())
        .map(|look| &look.value.heard);
    let now = api.now_unix_ms();
    let depths = depths.ok();
    let lately = depths
        .as_ref()
        .and_then(|look| look.value.queues.get(&name));
    let row = Row::new(&view, rates, lately, of_books.as_ref(), heard, sql);
    let mut charts = Vec::new();
    if let Some(depths) = &depths {
        for span in DepthSpan::ALL {
            let entries = depths.value.entries.of(span);
            charts.extend(charts::of_queue(entries, &name, span, now));
        }
    }
    let mut banners = Banner::of_servers(sql, redis);
    banners.extend(Banner::of_failure("The books", books_failed.as_ref()));
    if view.paused {
        let text = "This queue is paused: no worker gets a task from it.".to_owned();
        banners.push(Banner::new("paused", "warn", text, "", ""));
    }
    let (why, explained) = if visit.is_frame() {
        (Vec::new(), 0)
    } else {
        // While a server is away, the page shows what is known.
        let explained = explain_oldest(&visit, &view.queue, view.oldest_waiting_ms).await;
        explained.unwrap_or_default()
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
        sql_as_of: sql.as_of(),
        redis_as_of: redis.as_of(),
        sql_old: sql.class(),
        redis_old: redis.class(),
        books_are_old: books_failed.is_some(),
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

/// The oldest unfinished tasks.
async fn oldest(
    visit: &Visit,
    queue: &QueueName,
    oldest_ms: u64,
) -> Result<Vec<TaskView>, api::Error> {
    let now = visit.api().now_unix_ms();
    let first = now - i64::try_from(oldest_ms).unwrap_or(now);
    let list = |until_unix_ms| -> BoxFuture<'_, _> {
        let filter = TaskFilter {
            queue: Some(queue.clone()),
            statuses: TaskStatus::UNFINISHED.to_vec(),
            until_unix_ms: Some(until_unix_ms),
            ..TaskFilter::default()
        };
        let pages = TaskPages {
            filter,
            limit: LISTED,
            after: None,
        };
        Box::pin(async move {
            let list = visit.api().list_tasks(&visit.caller, Ok(pages)).await?;
            Ok((list.tasks, list.next.is_some()))
        })
    };
    last_of_list(first, now, list, |a, b| a.id == b.id).await
}

/// The last [`EXPLAINED`] of a list that begins with the newest task, the oldest first. `list`
/// returns those before a time, and whether there are older ones than it has. `is_same` says whether
/// two entries of lists are the same task.
///
/// This asks for a short time after `first`, and for longer ones until there are enough tasks. A
/// list that is cut has not the oldest ones, so then it asks for times in between.
async fn last_of_list<'a, T, E>(
    first: i64,
    now: i64,
    list: impl Fn(i64) -> BoxFuture<'a, Result<(Vec<T>, bool), E>>,
    is_same: fn(&T, &T) -> bool,
) -> Result<Vec<T>, E> {
    let (mut few, mut many) = (0, None);
    let mut oldest: Vec<T> = Vec::new();
    let mut cut: Vec<T> = Vec::new();
    for _ in 0..LISTS {
        let span: i64 = match many {
            None if few == 0 => FIRST_SPAN_MS,
            None => few * GROWS,
            Some(many) if many - few > 1 => few + (many - few) / 2,
            Some(_) => break,
        };
        let (tasks, is_cut) = list(first + span).await?;
        if is_cut {
            many = Some(span);
            cut = tasks;
            continue;
        }
        few = span;
        oldest = tasks;
        if oldest.len() >= EXPLAINED || first + span > now {
            break;
        }
    }
    oldest.reverse();
    // So many were inserted at the same moment that the list does not show all.
    let missing = EXPLAINED.saturating_sub(oldest.len());
    if many.is_some() {
        cut.retain(|task| !oldest.iter().any(|known| is_same(known, task)));
        oldest.extend(cut.into_iter().rev().take(missing));
    }
    oldest.truncate(EXPLAINED);
    Ok(oldest)
}

pub(in crate::ingress::http::ui) async fn pause(Id(name): Id, visit: Visit) -> Answer {
    visit.api().pause_queue(&visit.caller, &name).await?;
    visit.looks.forget_queues();
    visit.go_to(&format!("queues/{}?did=pause", format::encoded(&name)))
}

pub(in crate::ingress::http::ui) async fn resume(Id(name): Id, visit: Visit) -> Answer {
    visit.api().resume_queue(&visit.caller, &name).await?;
    visit.looks.forget_queues();
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// The oldest of tasks that were inserted at these times, of lists of 1,000.
    async fn oldest_of(inserted: &[i64], now: i64) -> Vec<i64> {
        let first = inserted[0];
        let list = |until| -> BoxFuture<'_, _> {
            let before: Vec<i64> = inserted
                .iter()
                .copied()
                .filter(|at| *at < until)
                .rev()
                .collect();
            let is_cut = before.len() > LISTED as usize;
            let list = before.into_iter().take(LISTED as usize).collect();
            Box::pin(async move { Ok::<_, Infallible>((list, is_cut)) })
        };
        let Ok(oldest) = last_of_list(first, now, list, |a, b| a == b).await;
        oldest
    }

    #[tokio::test]
    async fn a_few_old_tasks_are_found_before_many_new_ones() {
        let now = 10_000_000;
        let mut inserted: Vec<i64> = (0..5).collect();
        // A hundred a second, since half an hour.
        inserted.extend((0..180_000).map(|n| now - 1_800_000 + n * 10));
        assert_eq!(oldest_of(&inserted, now).await, inserted[..EXPLAINED]);
        // Of a single moment, any are the oldest.
        let mut inserted: Vec<i64> = (0..5).collect();
        inserted.extend(std::iter::repeat_n(5_000, 3_000));
        assert_eq!(oldest_of(&inserted, now).await, inserted[..EXPLAINED]);
        // The list that is cut has two of the five.
        let mut inserted: Vec<i64> = (0..5).collect();
        inserted.extend(std::iter::repeat_n(5_000, LISTED as usize - 2));
        assert_eq!(oldest_of(&inserted, now).await, inserted[..EXPLAINED]);
        let few: Vec<i64> = vec![0, 9_000_000];
        assert_eq!(oldest_of(&few, now).await, few);
    }
}
