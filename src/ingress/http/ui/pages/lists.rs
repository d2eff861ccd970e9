//! Pages that are one table: workers, processes, books, bulk changes, acts.

use askama::Template;

use super::rows::Banner;
use crate::{
    api::Kind,
    ingress::http::{
        problem::Problem,
        request::Id,
        ui::{
            format::{self, Fact, Moment},
            scene::Head,
            visit::{Answer, Visit, page},
        },
    },
    model::{BooksState, BulkChange, BulkState, Fsck, SeenProcess, SeenWorker, TaskId, TaskStatus},
};

const ROWS: u32 = 50;
/// A worker that was not heard for this long is silent.
const SILENT_MS: i64 = 40_000;

#[derive(Template)]
#[template(path = "list.html", blocks = ["frame"])]
struct List {
    head: Head,
    banners: Vec<Banner>,
    as_of: Option<Moment>,
    note: String,
    empty: &'static str,
    command: String,
    columns: Vec<(&'static str, &'static str)>,
    rows: Vec<Row>,
    older: String,
    /// The button of the books.
    check: Option<String>,
}
page!(List);

struct Row {
    id: String,
    cells: Vec<Cell>,
}

/// A cell: a time, a link, a state or a text.
#[derive(Default)]
struct Cell {
    class: &'static str,
    text: String,
    link: String,
    state: &'static str,
    at: Option<Moment>,
}

fn text(text: impl Into<String>) -> Cell {
    Cell {
        text: text.into(),
        ..Cell::default()
    }
}

fn wide(shown: impl Into<String>) -> Cell {
    Cell {
        class: "wide",
        ..text(shown)
    }
}

fn number(number: u64) -> Cell {
    Cell {
        class: "n",
        ..text(format::count(number))
    }
}

fn link(shown: impl Into<String>, link: String) -> Cell {
    Cell {
        link,
        ..text(shown)
    }
}

fn state(shown: impl Into<String>, state: &'static str) -> Cell {
    Cell {
        state,
        ..text(shown)
    }
}

fn time(unix_ms: i64) -> Cell {
    Cell {
        at: Some(Moment::new(unix_ms)),
        ..Cell::default()
    }
}

/// The name of an element, of a stranger's text.
fn id(kind: char, name: &str) -> String {
    format!("{kind}-{}", format::encoded(name))
}

pub(in crate::ingress::http::ui) async fn workers(mut visit: Visit) -> Answer {
    let looks = visit.looks.workers(visit.api()).await?;
    visit.has_looked();
    let queue = visit.get("queue");
    let seen = looks.value.look.seen_by(&visit.caller, queue)?;
    let now = visit.api().now_unix_ms();
    let mut rows = Vec::new();
    let mut workers = seen.workers;
    // Those whose share of failures is far above the usual come first.
    let share = |done: u64, failed: u64| failed as f64 / (done + failed).max(1) as f64;
    let mut shares: Vec<f64> = workers
        .iter()
        .map(|one| share(one.done, one.failed))
        .collect();
    shares.sort_by(f64::total_cmp);
    let median = shares.get(shares.len() / 2).copied().unwrap_or_default();
    let is_faulty = |done, failed| failed > 2 && share(done, failed) > 3.0 * median;
    workers.sort_by_key(|one| !is_faulty(one.done, one.failed));
    for one in workers {
        let quiet = now - one.heard_unix_ms;
        let shown = match (quiet > SILENT_MS, one.in_hand) {
            (true, _) => state(
                format!("silent {}", format::age(quiet.unsigned_abs())),
                "warn",
            ),
            (false, 0) => state("waiting", "idle"),
            (false, _) => state("working", "ok"),
        };
        let failed = Cell {
            class: if is_faulty(one.done, one.failed) {
                "n dead"
            } else {
                "n"
            },
            ..number(one.failed)
        };
        rows.push(Row {
            id: id('w', &one.worker),
            cells: vec![
                text(format::line(&one.worker)),
                shown,
                wide(format::line(&one.queues.join(", "))),
                number(one.in_hand),
                number(one.done),
                failed,
                time(one.heard_unix_ms),
                text(format::line(&one.address)),
                text(format::line(&one.process)),
                requeue(&visit, &one),
            ],
        });
    }
    let mut note = Vec::new();
    if !queue.is_empty() {
        note.push(format!("Workers of queue {}.", format::line(queue)));
    }
    if seen.more > 0 {
        note.push(format!("{} more were heard.", format::count(seen.more)));
    }
    if seen.unread_leases > 0 {
        note.push("Some leases were not read, so workers may hold more.".to_owned());
    }
    let query = format::query(&[("queue", queue)]);
    let head = visit.head("workers", "Workers").live();
    let name = if queue.is_empty() {
        "hello".to_owned()
    } else {
        format::line(queue)
    };
    let address = &visit.scene.address;
    visit.show(&List {
        head: head.call(format!("v1/workers{query}")),
        banners: Banner::of_failure("The list of workers", looks.failed.as_ref())
            .into_iter()
            .collect(),
        as_of: None,
        note: note.join(" "),
        empty: "No worker has called lately. This one prints each key:",
        command: format!("taskd work --url {address} {name} -- sh -c 'echo \"done: $TASKD_KEY\"'"),
        columns: vec![
            ("Worker", ""),
            ("State", ""),
            ("Queues", ""),
            ("In hand", "n"),
            ("Done", "n"),
            ("Failed", "n"),
            ("Last heard", ""),
            ("Address", ""),
            ("Process", ""),
            ("Tasks", ""),
        ],
        rows,
        older: String::new(),
        check: None,
    })
}

/// The link that takes a worker the tasks of a queue: of the one that is looked at, or of its only
/// one.
fn requeue(visit: &Visit, worker: &SeenWorker) -> Cell {
    let queue = match (&worker.queues[..], visit.get("queue")) {
        ([only], "") => only,
        (_, queue) => queue,
    };
    if queue.is_empty() || !visit.scene.may_act {
        return text("–");
    }
    let query = format::query(&[
        ("what", "requeue"),
        ("queue", queue),
        ("status", "UNFINISHED"),
        ("away_from", &worker.worker),
    ]);
    link("Requeue…", format!("bulk/new{query}"))
}

/// Whether a process leads, and which of its loops stall.
fn standing(one: &SeenProcess) -> Cell {
    match (one.leads, one.stalled.is_empty()) {
        (true, true) => state("leads", "ok"),
        (false, true) => state("runs", "idle"),
        (_, false) => state(
            format!("stalls: {}", format::line(&one.stalled.join(", "))),
            "bad",
        ),
    }
}

pub(in crate::ingress::http::ui) async fn processes(mut visit: Visit) -> Answer {
    // Who reaches only some queues does not see the processes.
    visit.api().may_read_metrics(&visit.caller)?;
    let looks = visit.looks.processes(visit.api()).await?;
    visit.has_looked();
    let processes = &looks.value;
    let newest = processes.iter().map(|one| &one.version).max().cloned();
    let mut rows = Vec::new();
    for one in processes.iter() {
        let is_other = Some(&one.version) != newest.as_ref();
        let version = format::line(&one.version);
        rows.push(Row {
            id: id('p', &one.process),
            cells: vec![
                text(format::line(&one.process)),
                wide(format::line(&format!("{} (pid {})", one.host, one.pid))),
                if is_other {
                    state(version, "warn")
                } else {
                    text(version)
                },
                standing(one),
                wide(format::line(&one.pipelines.join(", "))),
                text(format::line(&one.http)),
                text(format::line(&one.grpc)),
                number(one.workers),
                time(one.since_unix_ms),
                time(one.heard_unix_ms),
            ],
        });
    }
    visit.show(&List {
        head: visit
            .head("processes", "Processes")
            .live()
            .call("v1/processes"),
        banners: Banner::of_failure("The list of processes", looks.failed.as_ref())
            .into_iter()
            .collect(),
        as_of: None,
        note: String::new(),
        empty: "No process tells of itself.",
        command: String::new(),
        columns: vec![
            ("Process", ""),
            ("Host", ""),
            ("Version", ""),
            ("State", ""),
            ("Pipelines", ""),
            ("HTTP", ""),
            ("gRPC", ""),
            ("Workers", "n"),
            ("Since", ""),
            ("Last heard", ""),
        ],
        rows,
        older: String::new(),
        check: None,
    })
}

pub(in crate::ingress::http::ui) async fn books(mut visit: Visit) -> Answer {
    let looks = visit.looks.books(visit.api()).await?;
    visit.has_looked();
    let mut rows = Vec::new();
    for of in &looks.value.books.queues {
        let name = of.queue.to_string();
        if !visit.caller.access.reaches(&name) {
            continue;
        }
        let (word, class) = match of.state {
            BooksState::Balanced => ("balanced", "ok"),
            BooksState::Moving => ("moving", "idle"),
            BooksState::Unbalanced => ("UNBALANCED", "bad"),
        };
        let held = &of.held;
        let between = Cell {
            class: "n",
            ..text(format::signed(held.between))
        };
        rows.push(Row {
            id: id('q', &name),
            cells: vec![
                link(name.clone(), format!("queues/{name}")),
                state(word, class),
                number(of.stored()),
                number(held.off_bus()),
                between,
                number(held.waiting),
                number(held.assigned),
                number(held.delayed),
                number(of.completed),
                number(of.dead),
                number(of.cancelled),
            ],
        });
    }
    let mut note = String::new();
    if let (Some(bus), true) = (&looks.value.books.bus, visit.scene.sees_all) {
        note = format!(
            "On the bus: {} records of tasks, {} of reports.",
            format::count(bus.pipeline),
            format::count(bus.task_results)
        );
    }
    let check = visit.scene.may_act.then(String::new);
    visit.show(&List {
        head: visit.head("books", "Books").live().call("v1/books"),
        banners: Banner::of_failure("The books", looks.failed.as_ref())
            .into_iter()
            .collect(),
        as_of: Some(Moment::new(looks.at_unix_ms)),
        note,
        empty: "No queue has an unfinished task.",
        command: String::new(),
        columns: vec![
            ("Queue", ""),
            ("State", ""),
            ("Stored", "n"),
            ("In SQL", "n"),
            ("Between", "n"),
            ("Waiting", "n"),
            ("Leased", "n"),
            ("Delayed", "n"),
            ("Completed", "n"),
            ("Dead", "n"),
            ("Cancelled", "n"),
        ],
        rows,
        older: String::new(),
        check,
    })
}

#[derive(Template)]
#[template(path = "checked.html", blocks = ["frame"])]
struct Checked {
    head: Head,
    says: String,
    finds: Vec<(&'static str, String, String, &'static str)>,
    unchecked: Vec<(String, String)>,
    cursor: String,
}
page!(Checked);

/// Runs a part of fsck. It repairs nothing.
pub(in crate::ingress::http::ui) async fn check(visit: Visit) -> Answer {
    let request = Fsck {
        queue: String::new(),
        repair: false,
        cursor: visit.field("cursor").to_owned(),
    };
    let part = visit.api().fsck(&visit.caller, request).await?;
    let is_over = part.cursor.is_none();
    let mut says = format!(
        "{}: {} shards and {} published tasks were checked; {} differences.",
        if is_over {
            "The last part"
        } else {
            "This part"
        },
        format::count(part.shards),
        format::count(part.tasks),
        format::count(part.finds.len() as u64 + part.more)
    );
    if part.unchecked > 0 {
        says.push_str(&format!(
            " {} could not be checked again.",
            format::count(part.unchecked)
        ));
    }
    let finds = part.finds.iter().map(|find| {
        (
            find.kind.as_str(),
            format::line(&find.queue),
            format::line(&find.says),
            find.kind.mend(),
        )
    });
    let unchecked = part
        .unchecked_shards
        .iter()
        .map(|(shard, why)| (shard.to_string(), format::line(why)));
    visit.show(&Checked {
        head: visit.head("books", "Check"),
        says,
        finds: finds.collect(),
        unchecked: unchecked.collect(),
        cursor: part.cursor.unwrap_or_default(),
    })
}

pub(in crate::ingress::http::ui) async fn acts(visit: Visit) -> Answer {
    let before = visit.get("before");
    let acts = visit.api().acts(&visit.caller, Some(before), ROWS).await?;
    let older = older(&acts, "acts", |act| act.id);
    let mut rows = Vec::new();
    for act in &acts {
        rows.push(Row {
            id: id('a', &act.id.to_string()),
            cells: vec![
                text(format::line(&act.what)),
                wide(format::line(&act.target)),
                text(format::line(&act.who)),
                time(TaskId(act.id).created_unix_ms()),
            ],
        });
    }
    let query = format::query(&[("before", before)]);
    let head = visit.head("acts", "Acts").call(format!("v1/acts{query}"));
    visit.show(&List {
        head: if before.is_empty() { head.live() } else { head },
        banners: Vec::new(),
        as_of: None,
        note: "What operators did.".to_owned(),
        empty: "Nobody has done anything yet.",
        command: String::new(),
        columns: vec![("Act", ""), ("On", ""), ("Who", ""), ("When", "")],
        rows,
        older,
        check: None,
    })
}

fn older<T>(list: &[T], page: &str, id: impl Fn(&T) -> uuid::Uuid) -> String {
    match list.last() {
        Some(last) if list.len() >= ROWS as usize => format!("{page}?before={}", id(last)),
        _ => String::new(),
    }
}

pub(in crate::ingress::http::ui) async fn bulk_changes(visit: Visit) -> Answer {
    let before = visit.get("before");
    let list = visit
        .api()
        .bulk_changes(&visit.caller, Some(before), ROWS)
        .await?;
    let older = older(&list, "bulk", |bulk| bulk.id);
    let mut rows = Vec::new();
    for bulk in &list {
        let queue = bulk.filter.queue.as_ref().map(ToString::to_string);
        rows.push(Row {
            id: id('b', &bulk.id.to_string()),
            cells: vec![
                link(
                    format::line(&bulk.change.to_string()),
                    format!("bulk/{}", bulk.id),
                ),
                text(queue.unwrap_or_default()),
                state(bulk.state.as_str(), class(bulk.state)),
                number(bulk.progress.matched),
                number(bulk.progress.changed),
                number(bulk.progress.failed),
                text(format::line(&bulk.who)),
                time(bulk.created_unix_ms),
            ],
        });
    }
    let query = format::query(&[("before", before)]);
    let head = visit
        .head("bulk", "Bulk changes")
        .call(format!("v1/bulk{query}"));
    visit.show(&List {
        head: if before.is_empty() { head.live() } else { head },
        banners: Vec::new(),
        as_of: None,
        note: "Changes of all tasks that match a filter. They begin at a list of tasks.".to_owned(),
        empty: "There was no bulk change yet.",
        command: String::new(),
        columns: vec![
            ("Change", ""),
            ("Queue", ""),
            ("State", ""),
            ("Matched", "n"),
            ("Changed", "n"),
            ("Failed", "n"),
            ("Who", ""),
            ("Began", ""),
        ],
        rows,
        older,
        check: None,
    })
}

fn class(state: BulkState) -> &'static str {
    match state {
        BulkState::Running => "idle",
        BulkState::Done => "ok",
        BulkState::Stopped => "warn",
        BulkState::Failed => "bad",
    }
}

#[derive(Template)]
#[template(path = "bulk.html", blocks = ["frame"])]
struct Bulk {
    head: Head,
    id: String,
    says: String,
    state: &'static str,
    class: &'static str,
    looked_at: String,
    matched: String,
    changed: String,
    failed: String,
    error: String,
    filter: Vec<Fact>,
    who: String,
    created: Moment,
    updated: Moment,
}
page!(Bulk);

pub(in crate::ingress::http::ui) async fn bulk_change(Id(id): Id, visit: Visit) -> Answer {
    let bulk = visit.api().bulk_change(&visit.caller, &id).await?;
    let did = match visit.get("did") {
        "start" => "The bulk change has begun.",
        "stop" => "The bulk change is stopped. What it has changed stays changed.",
        _ => "",
    };
    let head = visit
        .head("bulk", format::line(&bulk.change.to_string()))
        .call(format!("v1/bulk/{}", bulk.id))
        .did(did);
    let is_live = bulk.state == BulkState::Running;
    visit.show(&Bulk {
        head: if is_live { head.live() } else { head },
        says: progress(&bulk),
        state: bulk.state.as_str(),
        class: class(bulk.state),
        looked_at: format::count(bulk.progress.looked_at),
        matched: format::count(bulk.progress.matched),
        changed: format::count(bulk.progress.changed),
        failed: format::count(bulk.progress.failed),
        error: format::line(&bulk.progress.last_error),
        filter: filter(&bulk),
        who: format::line(&bulk.who),
        created: Moment::new(bulk.created_unix_ms),
        updated: Moment::new(bulk.updated_unix_ms),
        id: bulk.id.to_string(),
    })
}

fn progress(bulk: &BulkChange) -> String {
    let changed = format::count(bulk.progress.changed);
    let matched = format::count(bulk.progress.matched);
    let end = match bulk.state {
        BulkState::Running => "so far",
        BulkState::Done => "in all",
        BulkState::Stopped => "until it was stopped",
        BulkState::Failed => "until it failed",
    };
    format!("{changed} tasks changed of {matched} that matched, {end}.")
}

fn filter(bulk: &BulkChange) -> Vec<Fact> {
    let filter = &bulk.filter;
    let statuses: Vec<&str> = filter
        .statuses
        .iter()
        .map(|one| TaskStatus::as_str(*one))
        .collect();
    let some = |text: Option<String>| text.unwrap_or_default();
    let mut shown = vec![
        Fact::new(
            "Queue",
            some(filter.queue.as_ref().map(ToString::to_string)),
        ),
        Fact::new("Status", statuses.join(", ")),
        Fact::new("Key", some(filter.key.as_deref().map(format::bytes))),
        Fact::new("Key begins with", format::bytes(&filter.key_prefix)),
        Fact::new(
            "Result of",
            some(filter.worker.as_ref().map(ToString::to_string)),
        ),
        Fact::new("Tree", some(filter.tree.map(|tree| tree.to_string()))),
        Fact::new("Reason begins with", format::line(&filter.reason)),
    ];
    for (name, value) in &filter.headers {
        shown.push(Fact::new(
            "Header",
            format::line(&format!("{name}={value}")),
        ));
    }
    shown.retain(|fact| !fact.text.is_empty());
    for (name, at) in [
        ("Inserted since", filter.since_unix_ms),
        ("Inserted before", filter.until_unix_ms),
        ("As counted at", filter.as_of_unix_ms),
    ] {
        shown.extend(at.map(|at| Fact::at(name, at)));
    }
    shown
}

pub(in crate::ingress::http::ui) async fn stop_bulk_change(Id(id): Id, visit: Visit) -> Answer {
    match visit.api().stop_bulk_change(&visit.caller, &id).await {
        Ok(bulk) => visit.go_to(&format!("bulk/{}?did=stop", bulk.id)),
        Err(error) if error.kind() == Kind::Final => visit.go_to(&format!("bulk/{id}")),
        Err(error) => Err(Problem::from(error)),
    }
}
