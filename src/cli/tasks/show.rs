//! Formats tasks as a table and as JSON.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Map, Value};

use crate::{
    cli::{ask::cell, print},
    model::{Priority, TaskStatus},
    wire::{pb, task_status},
};

fn status(task: &pb::Task) -> &'static str {
    task_status(task.status).map_or("UNKNOWN", TaskStatus::as_str)
}

pub(super) fn table(tasks: &[pb::Task]) -> String {
    let mut table = print::table([
        "ID",
        "CREATED",
        "QUEUE",
        "KEY",
        "STATUS",
        "COMPLETED",
        "FAILURES",
        "REASON",
    ]);
    for task in tasks {
        let created = task.created_at.map(|at| at.to_string()).unwrap_or_default();
        let key = cell(&String::from_utf8_lossy(&task.key));
        let reason = cell(&task.reason);
        let completed = format!("{} of {}", task.completed, task.replicas);
        let attempts = task.attempts.to_string();
        table.add_row([
            &task.id,
            &created,
            &task.queue,
            &key,
            status(task),
            &completed,
            &attempts,
            &reason,
        ]);
    }
    table.to_string()
}

/// Formats a task as the HTTP API does.
pub(super) fn json(task: &pb::Task) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| drop(object.insert(name.into(), value));
    set("id", task.id.as_str().into());
    set("queue", task.queue.as_str().into());
    set("key", String::from_utf8_lossy(&task.key).into());
    if std::str::from_utf8(&task.key).is_err() {
        set("key_base64", BASE64.encode(&task.key).into());
    }
    set("status", status(task).into());
    set("replicas", task.replicas.into());
    set("completed", task.completed.into());
    set("leased", task.leased.into());
    set("attempts", task.attempts.into());
    set(
        "priority",
        Priority::from_number(task.priority.into()).as_str().into(),
    );
    let times = [
        ("created_at", task.created_at),
        ("updated_at", task.updated_at),
        ("not_before", task.not_before),
        ("deadline", task.deadline),
    ];
    for (name, at) in times {
        if let Some(at) = at {
            set(name, at.to_string().into());
        }
    }
    if !task.sequence.is_empty() {
        set("sequence", task.sequence.as_str().into());
    }
    if !task.tree.is_empty() {
        set("tree", task.tree.as_str().into());
    }
    if !task.reason.is_empty() {
        set("reason", task.reason.as_str().into());
    }
    object.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_task_is_shown_as_the_api_shows_it() {
        let task = pb::Task {
            id: "i".into(),
            queue: "q".into(),
            key: b"k\x1b[31m\xff".to_vec().into(),
            status: pb::TaskStatus::Dead.into(),
            replicas: 2,
            priority: pb::Priority::Low.into(),
            reason: "no luck".into(),
            ..Default::default()
        };
        let shown = json(&task);
        assert_eq!(
            (&shown["status"], &shown["priority"]),
            (&json!("DEAD"), &json!("low"))
        );
        assert!(shown.get("key_base64").is_some() && shown.get("not_before").is_none());
        let table = table(&[task]);
        assert!(
            table.contains("0 of 2") && table.contains("\\u{1b}") && !table.contains('\u{1b}'),
            "{table}"
        );
    }
}
