//! Changes of one task. Each has a page that asks first, and works without a script.

use askama::Template;
use axum::http::StatusCode;

use crate::{
    ingress::http::{
        problem::Problem,
        request::TwoIds,
        ui::{
            scene::Head,
            visit::{Answer, Visit, page},
        },
    },
    model::{ChangeTasks, ItemStatus, Priority, RequeueTasks, TasksChanged, Update},
};

#[derive(Template)]
#[template(path = "act.html", blocks = ["frame"])]
struct Act {
    head: Head,
    id: String,
    path: &'static str,
    asks: &'static str,
    verb: &'static str,
    kind: &'static str,
    replicas: u32,
}
page!(Act);

/// The changes: the last part of the path, the title, the question, the button, its class.
const ACTS: [(&str, &str, &str, &str, &str); 5] = [
    (
        "cancel",
        "Cancel the task",
        "No worker does this task any more, and those that have it are told so.",
        "Cancel the task",
        "danger",
    ),
    (
        "retry",
        "Retry the task",
        "The task is offered to workers again, with its attempts counted from zero.",
        "Retry the task",
        "main",
    ),
    (
        "priority",
        "Change the priority",
        "Workers get tasks of a higher priority first.",
        "Change the priority",
        "main",
    ),
    (
        "num",
        "Change NUM",
        "A higher NUM opens a completed task again.",
        "Change NUM",
        "main",
    ),
    (
        "requeue",
        "Requeue the task",
        "Leases and backoffs of the task end, and workers are offered it at once. Without a name: all workers.",
        "Requeue the task",
        "main",
    ),
];

pub(in crate::ingress::http::ui) async fn ask(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    let (path, title, asks, verb, kind) = known(&act)?;
    let room = |_| Ok::<_, Problem>(());
    let (file, ()) = visit.api().task_file(&visit.caller, &id, room).await?;
    visit.show(&Act {
        head: visit.head("tasks", title),
        id: file.task.id.to_string(),
        path,
        asks,
        verb,
        kind,
        replicas: file.task.replicas,
    })
}

pub(in crate::ingress::http::ui) async fn act(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    let (path, ..) = known(&act)?;
    let api = visit.api();
    let caller = &visit.caller;
    let one = ChangeTasks::new(vec![id.clone()], None, false, true);
    let changed = match path {
        "cancel" => api.cancel_chosen(caller, one).await?,
        "retry" => api.retry_tasks(caller, one).await?,
        "requeue" => {
            let requeue = RequeueTasks::new(visit.field("to"), visit.field("away_from"), None);
            api.requeue_tasks(caller, one, requeue).await?
        }
        _ => api.update_tasks(caller, one, update(path, &visit)).await?,
    };
    let TasksChanged::Items(answers) = changed else {
        unreachable!("one task is changed at once");
    };
    let answer = answers.into_iter().next();
    let answer =
        answer.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "there is no such task"))?;
    let did = match answer.status {
        ItemStatus::Ok => path,
        ItemStatus::TryLater => "later",
        ItemStatus::UnknownTask => {
            return Err(Problem::new(StatusCode::NOT_FOUND, "there is no such task"));
        }
        status => {
            let why = if answer.error.is_empty() {
                format!("the task cannot be changed any more: {}", status.as_str())
            } else {
                answer.error
            };
            return Err(Problem::new(StatusCode::CONFLICT, why));
        }
    };
    visit.go_to(&format!("tasks/{id}?did={did}"))
}

fn known(
    act: &str,
) -> Result<
    (
        &'static str,
        &'static str,
        &'static str,
        &'static str,
        &'static str,
    ),
    Problem,
> {
    let found = ACTS.into_iter().find(|(path, ..)| *path == act);
    found.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "there is no such page"))
}

fn update(path: &str, visit: &Visit) -> Result<Update, String> {
    if path == "num" {
        let text = visit.field("replicas");
        let replicas = text
            .parse()
            .map_err(|_| format!("NUM is {text:?}; it must be a whole number"))?;
        return Ok(Update {
            priority: None,
            replicas: Some(replicas),
        });
    }
    let name = visit.field("priority");
    let priority = [Priority::High, Priority::Medium, Priority::Low]
        .into_iter()
        .find(|priority| priority.as_str() == name);
    let priority = priority.ok_or_else(|| format!("the priority {name:?} is unknown"))?;
    Ok(Update {
        priority: Some(priority),
        replicas: None,
    })
}
