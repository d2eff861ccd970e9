//! All queues at a glance: what is wrong, and which queue needs somebody.

use std::{cmp::Ordering, collections::BTreeMap};

use askama::Template;

use super::rows::{Banner, QueueState, Row};
use crate::{
    ingress::http::ui::{
        format::{self, Moment},
        looks::{AllBooks, Failure, Look, MOST_DEAD, Queues},
        scene::Head,
        visit::{Answer, Visit, page},
    },
    model::{BooksState, SeenProcess},
};

/// The columns: the name in the URL, the heading, whether it holds numbers.
const COLUMNS: [(&str, &str, bool); 10] = [
    ("queue", "Queue", false),
    ("state", "State", false),
    ("waiting", "Waiting", true),
    ("leased", "Leased", true),
    ("later", "Later", true),
    ("oldest", "Oldest", true),
    ("in", "In/s", true),
    ("done", "Done/s", true),
    ("completed", "Completed", true),
    ("dead", "Dead", true),
];

/// The parameters of the page.
pub(in crate::ingress::http::ui) const PARAMETERS: &[&str] = &["q", "sort", "group", "flat"];

#[derive(Template)]
#[template(path = "overview.html", blocks = ["frame"])]
struct Overview {
    head: Head,
    banners: Vec<Banner>,
    sentence: String,
    is_well: bool,
    is_empty: bool,
    filter: String,
    sort: String,
    group: String,
    /// The query of the page with all groups.
    all_groups: String,
    columns: Vec<Column>,
    rows: Vec<Row>,
    /// Of what moment the numbers of SQL and of Redis are, if these do not answer.
    sql_as_of: Option<Moment>,
    redis_as_of: Option<Moment>,
    sql_old: &'static str,
    redis_old: &'static str,
    host: String,
    curl_token: &'static str,
}
page!(Overview);

struct Column {
    name: &'static str,
    link: String,
    is_number: bool,
    /// For `aria-sort`.
    order: &'static str,
}

pub(in crate::ingress::http::ui) async fn show(mut visit: Visit) -> Answer {
    let (looks, api) = (&visit.looks, visit.api());
    let (queues, books, workers, processes, dead, depths) = tokio::join!(
        looks.queues(api),
        looks.books(api),
        looks.workers(api),
        looks.processes(api),
        looks.dead(api),
        looks.depths(api),
    );
    visit.has_looked();
    let queues = queues?;
    let Queues { sql, redis, .. } = &*queues.value;
    let depths = depths.ok();
    let of_books = books.as_ref().ok();
    // Who was heard before a failure may be gone, and others may have come.
    let heard = workers
        .as_ref()
        .ok()
        .filter(|workers| workers.failed.is_none())
        .map(|workers| &workers.value.heard);
    let reaches = |queue: &str| visit.caller.access.reaches(queue);
    let mut rows = Vec::new();
    for view in &queues.value.queues {
        let name = view.queue.as_str();
        if !reaches(name) {
            continue;
        }
        let rates = queues.value.rates.get(name);
        let of_queue = of_books.and_then(|books| books.value.of(name));
        let lately = depths.as_ref().and_then(|look| look.value.queues.get(name));
        rows.push(Row::new(view, rates, lately, of_queue, heard, sql));
    }
    let mut banners = Banner::of_servers(sql, redis);
    let servers_answer = banners.is_empty();
    add_banners(&mut banners, &rows);
    add_books(&mut banners, &books, reaches);
    let sees_all = visit.scene.sees_all;
    // The numbers of the sentence. An old one is left out.
    let processes = processes
        .ok()
        .filter(|look| sees_all && look.failed.is_none());
    let processes = processes.map(|look| look.value);
    if sees_all {
        add_memory(&mut banners, visit.api().memory_shortage());
        match &processes {
            Some(processes) => add_processes(&mut banners, processes),
            None if servers_answer => {
                let text = "The list of processes cannot be read now.".to_owned();
                let link = "processes";
                banners.push(Banner::new("Processes", "warn", text, link, "Processes"));
            }
            None => {}
        }
    }
    let is_empty = rows.is_empty();
    let is_well = banners.is_empty();
    let numbers = Numbers {
        processes: processes.map(|processes| processes.len()),
        workers: workers
            .ok()
            .filter(|look| sees_all && look.failed.is_none())
            .map(|look| look.value.heard.workers),
        queues: rows.len(),
        dead: dead
            .ok()
            .filter(|look| sees_all && look.failed.is_none())
            .map(|look| *look.value),
    };
    let sentence = sentence(&banners, &numbers);
    let filter = visit.get("q");
    let group = visit.get("group");
    let sort = visit.get("sort");
    let is_flat = !visit.get("flat").is_empty();
    let rows = listed(rows, filter, group, is_flat, sort);
    let address = &visit.scene.address;
    let host = address.split("://").nth(1).unwrap_or_default();
    visit.show(&Overview {
        head: visit.head("", "Overview").live().call("v1/queues"),
        banners,
        sentence,
        is_well,
        is_empty,
        filter: format::line(filter),
        sort: format::line(sort),
        group: format::line(group),
        all_groups: format::query(&[("sort", sort)]),
        columns: columns(sort, filter, group),
        rows,
        sql_as_of: sql.as_of(),
        redis_as_of: redis.as_of(),
        sql_old: sql.class(),
        redis_old: redis.class(),
        host: host.to_owned(),
        curl_token: if visit.scene.has_login {
            "-H \"Authorization: Bearer $TASKD_TOKEN\" "
        } else {
            ""
        },
    })
}

/// The rows that the page lists, in their order.
fn listed(mut rows: Vec<Row>, filter: &str, group: &str, is_flat: bool, sort: &str) -> Vec<Row> {
    if !filter.is_empty() {
        let lower = filter.to_lowercase();
        rows.retain(|row| row.name.to_lowercase().contains(&lower));
    } else if !group.is_empty() {
        rows.retain(|row| group_of(&row.name) == Some(group));
    } else if !is_flat {
        rows = grouped(rows, sort);
    }
    order(&mut rows, sort);
    rows
}

/// The headings, which sort by their column.
fn columns(sort: &str, filter: &str, group: &str) -> Vec<Column> {
    let columns = COLUMNS.map(|(name, heading, is_number)| {
        let (next, order) = match (sort == name, sort.strip_prefix('-') == Some(name)) {
            (true, _) => (format!("-{name}"), "ascending"),
            (_, true) => (name.to_owned(), "descending"),
            _ if is_number => (format!("-{name}"), ""),
            _ => (name.to_owned(), ""),
        };
        Column {
            name: heading,
            link: format::query(&[("sort", &next), ("q", filter), ("group", group)]),
            is_number,
            order,
        }
    });
    columns.into()
}

fn add_banners(banners: &mut Vec<Banner>, rows: &[Row]) {
    /// Further queues are in the table.
    const MOST: usize = 3;
    let not_worked: Vec<&Row> = rows
        .iter()
        .filter(|row| row.state == QueueState::NotWorked)
        .collect();
    if let [row] = &not_worked[..] {
        let text = format!(
            "Queue {} is not worked: {} wait, the oldest for {}, no worker has one, and none has ended for a minute.",
            row.name,
            row.waiting(),
            row.oldest()
        );
        let link = format!("workers?queue={}", row.name);
        let name = format!("{} is not worked", row.name);
        banners.push(Banner::new(name, "warn", text, &link, "Workers"));
    } else if !not_worked.is_empty() {
        let some = not_worked.iter().take(MOST);
        let some: Vec<String> = some
            .map(|row| format!("{} ({} wait)", row.name, row.waiting()))
            .collect();
        let more = if not_worked.len() > MOST {
            " and others"
        } else {
            ""
        };
        let text = format!(
            "{} queues are not worked: tasks wait, no worker has one, and none has ended for a minute: {}{more}.",
            not_worked.len(),
            some.join(", ")
        );
        let name = "queues are not worked";
        banners.push(Banner::new(name, "warn", text, "workers", "Workers"));
    }
    for row in rows
        .iter()
        .filter(|row| row.state == QueueState::Parked)
        .take(MOST)
    {
        let text = format!(
            "Queue {} is full: further tasks wait in SQL until it has room.",
            row.name
        );
        let name = format!("{} is full", row.name);
        banners.push(Banner::new(name, "warn", text, &row.link, "Queue"));
    }
    let unread = rows
        .iter()
        .filter(|row| row.state == QueueState::Unread)
        .count();
    if unread > 0 {
        let text = format!("Redis cannot serve shards of {unread} queues.");
        let name = "unread shards";
        banners.push(Banner::new(name, "bad", text, "books", "Check"));
    }
}

fn add_memory(banners: &mut Vec<Banner>, shortage: Option<String>) {
    if let Some(why) = shortage {
        let text = format::sentence(&why);
        let link = "processes";
        banners.push(Banner::new("memory", "warn", text, link, "Processes"));
    }
}

fn add_books(
    banners: &mut Vec<Banner>,
    books: &Result<Look<AllBooks>, Failure>,
    reaches: impl Fn(&str) -> bool,
) {
    let all = match books {
        Ok(books) if books.failed.is_some() => {
            let failed = Banner::of_failure("The books", books.failed.as_ref());
            banners.extend(failed.map(|banner| banner.linked("books", "Books")));
            return;
        }
        Ok(books) => &books.value,
        Err(failure) => {
            let text = format!(
                "The books cannot be read now: {}",
                format::line(failure.why())
            );
            banners.push(Banner::new("The books", "warn", text, "books", "Books"));
            return;
        }
    };
    let unbalanced: Vec<&str> = all
        .books
        .queues
        .iter()
        .filter(|of| of.state == BooksState::Unbalanced && reaches(of.queue.as_str()))
        .map(|of| of.queue.as_str())
        .collect();
    if let Some(first) = unbalanced.first() {
        let text = match unbalanced.len() {
            1 => format!("The books of queue {first} do not balance."),
            more => format!("The books of {more} queues do not balance, among them {first}."),
        };
        let name = "unbalanced books";
        banners.push(Banner::new(name, "bad", text, "books", "Check"));
    }
}

fn add_processes(banners: &mut Vec<Banner>, processes: &[SeenProcess]) {
    let watches = |pipelines: &[String]| pipelines.iter().any(|name| name == "watchdog");
    if !processes.is_empty() && !processes.iter().any(|process| watches(&process.pipelines)) {
        let text =
            "No process runs the watchdog: expired leases and lost tasks wait for one.".to_owned();
        let name = "no watchdog";
        banners.push(Banner::new(name, "bad", text, "processes", "Processes"));
    }
    let mut versions: Vec<&str> = processes
        .iter()
        .map(|process| &process.version[..])
        .collect();
    versions.sort_unstable();
    versions.dedup();
    let differences: u64 = processes.iter().map(|process| process.differences).sum();
    if differences > 0 {
        let text = format!(
            "The last check of the watchdog found {} differences between the servers; its log names them.",
            format::count(differences)
        );
        banners.push(Banner::new("differences", "bad", text, "books", "Check"));
    }
    for process in processes.iter().filter(|one| !one.stalled.is_empty()) {
        let text = format!(
            "Loops of process {} do not come round: {}.",
            format::line(&process.process),
            format::line(&process.stalled.join(", "))
        );
        let name = format!("stalled {}", process.process);
        banners.push(Banner::new(name, "bad", text, "processes", "Processes"));
    }
    if versions.len() > 1 {
        let text = format!(
            "The processes have {} versions: {}.",
            versions.len(),
            format::line(&versions.join(", "))
        );
        let name = "versions";
        banners.push(Banner::new(name, "warn", text, "processes", "Processes"));
    }
}

/// What the sentence counts; `None` is unknown, or not for this viewer.
struct Numbers {
    processes: Option<usize>,
    workers: Option<usize>,
    queues: usize,
    dead: Option<usize>,
}

/// How taskd is, in a sentence.
fn sentence(banners: &[Banner], numbers: &Numbers) -> String {
    let some = |count: usize, one: &str| match count {
        1 => format!("1 {one}"),
        more => format!("{} {one}s", format::count(more as u64)),
    };
    let mut parts = Vec::new();
    parts.extend(numbers.processes.map(|count| match count {
        1 => "1 process".to_owned(),
        more => format!("{more} processes"),
    }));
    parts.extend(numbers.workers.map(|count| some(count, "worker")));
    parts.push(some(numbers.queues, "queue"));
    if !banners.iter().any(|banner| banner.link == "books") {
        parts.push("the books balance".to_owned());
    }
    parts.extend(numbers.dead.map(|count| match count {
        0 => "nothing died in 24 h".to_owned(),
        MOST_DEAD => format!("{MOST_DEAD} or more died in 24 h"),
        dead => format!("{dead} died in 24 h"),
    }));
    let beginning = if banners.is_empty() {
        "All is well: "
    } else {
        "Look at what stands above. Otherwise: "
    };
    format!("{beginning}{}.", parts.join(", "))
}

/// What stands before the first dot.
fn group_of(name: &str) -> Option<&str> {
    name.split_once('.')
        .map(|(group, _)| group)
        .filter(|group| !group.is_empty())
}

/// Makes one row of all queues with the same beginning, if there are several.
fn grouped(rows: Vec<Row>, sort: &str) -> Vec<Row> {
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    for row in &rows {
        if let Some(group) = group_of(&row.name) {
            *sizes.entry(group.to_owned()).or_default() += 1;
        }
    }
    let mut groups: BTreeMap<String, Row> = BTreeMap::new();
    let mut list = Vec::new();
    for row in rows {
        let group =
            group_of(&row.name).filter(|group| sizes.get(*group).is_some_and(|size| *size > 1));
        let Some(group) = group.map(str::to_owned) else {
            list.push(row);
            continue;
        };
        match groups.get_mut(&group) {
            Some(sum) => sum.add(&row),
            None => {
                let of_group = Row {
                    id: format!("g-{group}"),
                    link: format::query(&[("group", &group), ("sort", sort)]),
                    name: format!("{group}."),
                    queues: 1,
                    ..row
                };
                groups.insert(group, of_group);
            }
        }
    }
    list.extend(groups.into_values());
    list
}

/// Sorts by a column. Without one, the queues that need somebody come first.
fn order(rows: &mut [Row], sort: &str) {
    let (column, is_descending) = match sort.strip_prefix('-') {
        Some(column) => (column, true),
        None => (sort, false),
    };
    let rate = |rate: Option<f64>| rate.unwrap_or(-1.0);
    let by = |a: &Row, b: &Row| match column {
        "queue" => Ordering::Equal,
        "state" => a.state.cmp(&b.state),
        "waiting" => a.waiting.cmp(&b.waiting),
        "leased" => a.leased.cmp(&b.leased),
        "later" => a.later.cmp(&b.later),
        "oldest" => a.oldest_ms.cmp(&b.oldest_ms),
        "in" => rate(a.inserted).total_cmp(&rate(b.inserted)),
        "done" => rate(a.done).total_cmp(&rate(b.done)),
        "completed" => a.completed.cmp(&b.completed),
        "dead" => a.dead.cmp(&b.dead),
        _ => a.state.cmp(&b.state).then(b.oldest_ms.cmp(&a.oldest_ms)),
    };
    rows.sort_by(|a, b| {
        let sorted = by(a, b).then_with(|| a.name.cmp(&b.name));
        if is_descending && column != "queue" {
            by(a, b).reverse().then_with(|| a.name.cmp(&b.name))
        } else if is_descending {
            sorted.reverse()
        } else {
            sorted
        }
    });
}
