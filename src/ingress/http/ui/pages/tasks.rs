//! Lists of tasks, with the fields of `GET /v1/tasks`, and the box that finds a task.

use askama::Template;
use uuid::Uuid;

use crate::{
    ingress::{
        http::ui::{
            format::{self, Moment},
            scene::Head,
            visit::{Answer, Visit, page},
        },
        json,
    },
    model::{TaskFilter, TaskId, TaskPages, TaskStatus, TaskView},
};

/// How many tasks a page has.
const ROWS: u32 = 50;
/// The most tasks with one key that the box shows.
const MOST_FOUND: u32 = 1000;

/// The parameters of the page.
pub(in crate::ingress::http::ui) const PARAMETERS: &[&str] = &[
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
    "cursor",
    json::query::HEADERS,
];

/// The fields of the form: the name, the label, an example.
const FIELDS: [(&str, &str, &str); 10] = [
    ("queue", "Queue", ""),
    ("status", "Status", ""),
    ("key", "Key", ""),
    ("key_prefix", "Key begins with", ""),
    ("header", "Header", "name=value"),
    ("worker", "Result of worker", ""),
    ("reason", "Died because", ""),
    ("tree", "Tree", ""),
    ("since", "Inserted since", "2026-01-31T09:00:00Z"),
    ("until", "Inserted before", "2026-01-31T10:00:00Z"),
];

#[derive(Template)]
#[template(path = "tasks.html", blocks = ["frame"])]
struct Tasks {
    head: Head,
    fields: Vec<Field>,
    statuses: Vec<(String, bool)>,
    has_filter: bool,
    /// What can be done with all that match: the name, the link.
    changes: Vec<(&'static str, String)>,
    rows: Vec<Row>,
    looked_at: u64,
    /// Only the open queues were searched.
    partial: bool,
    older: String,
    /// The parts of the filter, each with a link without it.
    drops: Vec<(&'static str, String, String)>,
}
page!(Tasks);

struct Field {
    name: &'static str,
    label: &'static str,
    hint: &'static str,
    value: String,
}

struct Row {
    id: String,
    key: String,
    queue: String,
    status: &'static str,
    class: &'static str,
    shape: &'static str,
    completed: u32,
    replicas: u32,
    attempts: u32,
    priority: &'static str,
    reason: String,
    created: Moment,
    updated: Moment,
}

impl From<TaskView> for Row {
    fn from(task: TaskView) -> Self {
        let (class, shape) = look(task.status);
        Self {
            id: task.id.to_string(),
            key: format::bytes(&task.key),
            queue: task.queue.to_string(),
            status: task.status.as_str(),
            class,
            shape,
            completed: task.completed,
            replicas: task.replicas,
            attempts: task.attempts,
            priority: task.priority.as_str(),
            reason: format::line(&task.reason),
            created: Moment::new(task.created_unix_ms),
            updated: Moment::new(task.updated_unix_ms),
        }
    }
}

/// The class and the shape of a status.
pub(super) fn look(status: TaskStatus) -> (&'static str, &'static str) {
    match status {
        TaskStatus::Pending => ("idle", "○"),
        TaskStatus::Queued => ("idle", "◌"),
        TaskStatus::Assigned => ("ok", "◐"),
        TaskStatus::Delayed => ("warn", "‖"),
        TaskStatus::Completed => ("ok", "●"),
        TaskStatus::Dead => ("bad", "✕"),
        TaskStatus::Cancelled => ("idle", "–"),
    }
}

/// Reads the filter of a page, whose parameters have the names of the API; `header=NAME=VALUE` is
/// what a form can send.
pub(super) fn filter_of(parameters: &[(String, String)]) -> Result<TaskPages, String> {
    let mut query = String::new();
    for (name, value) in parameters {
        let (name, value) = match (&name[..], value.is_empty()) {
            (_, true) => continue,
            ("header", _) => {
                let (name, value) = value.split_once('=').ok_or_else(|| {
                    format!("the header {value:?} has no value: write name=value")
                })?;
                (format!("header.{name}"), value)
            }
            (name, _) => (name.to_owned(), &value[..]),
        };
        if !query.is_empty() {
            query.push('&');
        }
        query.push_str(&format!(
            "{}={}",
            format::encoded(&name),
            format::encoded(value)
        ));
    }
    json::search::pages_of_query(&query)
}

/// The query of a page with these parameters, without one of them.
fn without(parameters: &[(String, String)], left_out: &[&str]) -> String {
    let kept = parameters
        .iter()
        .filter(|(name, _)| !left_out.contains(&&name[..]))
        .map(|(name, value)| (&name[..], &value[..]));
    format::query(&kept.collect::<Vec<_>>())
}

pub(in crate::ingress::http::ui) async fn list(visit: Visit) -> Answer {
    if let Some(queue) = visit.own_queue().await? {
        return visit.go_to(&format!("tasks?queue={}", format::encoded(&queue)));
    }
    let pages = filter_of(&visit.query).map(|pages| TaskPages {
        limit: ROWS,
        ..pages
    });
    let is_first = pages.as_ref().is_ok_and(|pages| pages.after.is_none());
    let has_queue = pages
        .as_ref()
        .is_ok_and(|pages| pages.filter.queue.is_some());
    let list = visit.api().list_tasks(&visit.caller, pages).await?;
    let given: Vec<(String, String)> = visit
        .query
        .iter()
        .filter(|(name, value)| !value.is_empty() && name != "cursor")
        .cloned()
        .collect();
    let fields = FIELDS.map(|(name, label, hint)| Field {
        name,
        label,
        hint,
        value: format::line(visit.get(name)),
    });
    let chosen = visit.get("status");
    let mut statuses = vec![("", String::new()), ("UNFINISHED", "UNFINISHED".to_owned())];
    statuses.extend(TaskStatus::ALL.map(|status| (status.as_str(), status.as_str().to_owned())));
    let mut statuses: Vec<(String, bool)> = statuses
        .into_iter()
        .map(|(name, value)| (value, name.eq_ignore_ascii_case(chosen)))
        .collect();
    if !statuses.iter().any(|(_, is_chosen)| *is_chosen) {
        statuses.push((format::line(chosen), true));
    }
    let drops = FIELDS.iter().filter_map(|(name, label, _)| {
        let value = visit.get(name);
        let rest: Vec<(String, String)> = given
            .iter()
            .filter(|(other, _)| other != name)
            .cloned()
            .collect();
        // Some parts need the queue.
        let may_drop = filter_of(&rest).is_ok_and(|pages| pages.filter.check().is_ok());
        let link = format!("tasks{}", without(&rest, &[]));
        (!value.is_empty() && may_drop).then(|| (*label, format::line(value), link))
    });
    let drops = drops.collect();
    let changes = if has_queue {
        bulk_links(&given)
    } else {
        Vec::new()
    };
    let older = list.next.map(|next| {
        let mut query = given.clone();
        query.push(("cursor".to_owned(), next.to_string()));
        format!("tasks{}", without(&query, &[]))
    });
    let head = visit.head("tasks", "Tasks");
    let head = head.call(format!("v1/tasks{}", api_query(&visit.query)));
    visit.show(&Tasks {
        head: if is_first { head.live() } else { head },
        fields: fields.into(),
        statuses,
        has_filter: !given.is_empty(),
        changes,
        looked_at: list.looked_at,
        partial: list.partial,
        rows: list.tasks.into_iter().map(Row::from).collect(),
        older: older.unwrap_or_default(),
        drops,
    })
}

/// The links to bulk changes with this filter.
fn bulk_links(given: &[(String, String)]) -> Vec<(&'static str, String)> {
    let link = |what: &str| {
        let mut query = vec![("what".to_owned(), what.to_owned())];
        query.extend(given.iter().cloned());
        format!("bulk/new{}", without(&query, &[]))
    };
    let status = given.iter().find(|(name, _)| name == "status");
    let status = status.map_or("", |(_, value)| value).to_ascii_uppercase();
    let mut links = Vec::new();
    if matches!(status.as_str(), "" | "DEAD" | "CANCELLED") {
        links.push(("Retry…", link("retry")));
    }
    if matches!(status.as_str(), "" | "UNFINISHED") {
        links.push(("Cancel…", link("cancel")));
        links.push(("Requeue…", link("requeue")));
        links.push(("Priority high…", link("high")));
        links.push(("Priority low…", link("low")));
    }
    links
}

/// The query of the API that gives the same list.
fn api_query(parameters: &[(String, String)]) -> String {
    let mut query = Vec::new();
    for (name, value) in parameters {
        match (&name[..], value.split_once('=')) {
            ("header", Some((header, value))) => {
                query.push((format!("header.{header}"), value.to_owned()));
            }
            _ => query.push((name.clone(), value.clone())),
        }
    }
    without(&query, &[])
}

#[derive(Template)]
#[template(path = "find.html", blocks = ["frame"])]
struct Found {
    head: Head,
    asked: String,
    rows: Vec<(String, String, &'static str)>,
    /// Only the open queues were searched.
    partial: bool,
}
page!(Found);

/// Opens what the text names: a task's id, a queue, or a key.
pub(in crate::ingress::http::ui) async fn find(visit: Visit) -> Answer {
    let asked = visit.get("q").trim();
    if asked.is_empty() {
        return visit.go_to("tasks");
    }
    // A key may be 32 digits, too, such as those of an MD5.
    if asked.contains('-')
        && let Ok(id) = Uuid::parse_str(asked)
    {
        return visit.go_to(&format!("tasks/{}", TaskId(id)));
    }
    let looks = visit.looks.queues(visit.api()).await?;
    let is_queue = looks.value.queues.iter().any(|view| {
        view.queue.as_str() == asked && visit.caller.access.reaches(view.queue.as_str())
    });
    if is_queue {
        return visit.go_to(&format!("queues/{}", format::encoded(asked)));
    }
    let filter = TaskFilter {
        key: Some(asked.to_owned().into()),
        ..TaskFilter::default()
    };
    let pages = TaskPages {
        filter,
        limit: MOST_FOUND,
        after: None,
    };
    let list = visit.api().list_tasks(&visit.caller, Ok(pages)).await?;
    let mut rows = Vec::new();
    for task in list.tasks {
        rows.push((
            task.id.to_string(),
            task.queue.to_string(),
            task.status.as_str(),
        ));
    }
    rows.sort_by(|a, b| a.1.cmp(&b.1));
    if let [(id, _, _)] = &rows[..]
        && !list.partial
    {
        return visit.go_to(&format!("tasks/{id}"));
    }
    visit.show(&Found {
        head: visit.head("tasks", "Find"),
        asked: format::line(asked),
        rows,
        partial: list.partial,
    })
}
