//! The words and types of each route in the document.
//!
//! A test fails for a route that has no description here.

use axum::http::Method;

use super::{
    super::{super::json, probes::Readiness},
    operation::Operation,
};
use crate::model::{InsertAnswer, LetterKind, Pending, QueueView, SessionClosed, TaskId};

/// The description of a route. One that has none is in the document by its method and its path. A
/// route whose handler reads a verb behind the last part of the path is described with that verb.
pub(super) fn of(method: &Method, path: &'static str) -> Operation {
    let known = match *method {
        Method::GET => read(path),
        Method::POST => change(path),
        Method::DELETE => remove(path),
        _ => None,
    };
    known.unwrap_or_else(|| {
        let id: String = path.chars().filter(char::is_ascii_alphanumeric).collect();
        let id = format!("{}{id}", method.as_str().to_ascii_lowercase());
        Operation::new(path, "operators", &id, "")
    })
}

fn read(path: &'static str) -> Option<Operation> {
    let new = |tag, id, summary| Operation::new(path, tag, id, summary);
    Some(match path {
        "/v1/queues" => {
            new("operators", "listQueues", "List the open queues").lists::<QueueView>("queues")
        }
        "/v1/books" => new(
            "operators",
            "getBooks",
            "Count what came in, what went out, and where the rest is",
        )
        .query::<String>("queue", "Only this queue")
        .answers::<json::books::Books<'_>>(),
        "/v1/dump" => new(
            "operators",
            "dumpQueue",
            "Show what Redis holds of a queue, decoded",
        )
        .query::<String>("queue", "The queue")
        .query::<u32>("shard", "Only this shard")
        .limit(1, "At most so many entries of each key; without it 100")
        .answers::<json::fsck::Dump<'_>>(),
        "/v1/jobs" => new("operators", "listJobs", "List jobs, the latest first")
            .query::<uuid::Uuid>("before", "Only jobs before this one")
            .limit(0, "At most this many; 0, and without it: 100")
            .lists::<json::jobs::Job<'_>>("jobs"),
        "/v1/jobs/{id}" => new("operators", "getJob", "Get a job with its progress")
            .answers::<json::jobs::Job<'_>>(),
        "/v1/acts" => new(
            "operators",
            "listActs",
            "List what operators did, the latest first",
        )
        .query::<uuid::Uuid>("before", "Only acts before this one")
        .limit(0, "At most this many; 0, and without it: 100")
        .lists::<json::read::Act<'_>>("acts"),
        "/v1/dead-letters" => new(
            "operators",
            "listDeadLetters",
            "List dead letters, the newest first",
        )
        .query::<String>("queue", "Only of this queue")
        .query::<LetterKind>("kind", "Only of this kind")
        .query::<json::Instant>("since", "Only from this time on")
        .query::<json::Instant>("until", "Only before this time")
        .query::<String>(
            "reason",
            "Only with a reason that begins so; it needs `queue`",
        )
        .limit(0, "At most this many; 0, and without it: 100")
        .query::<String>("cursor", "The cursor of the answer before")
        .answers::<json::letters::Page<'_>>(),
        "/v1/dead-letters/{id}" => new(
            "operators",
            "getDeadLetter",
            "Get a dead letter with all that it has",
        )
        .answers::<json::letters::Letter<'_>>(),
        "/metrics" => new(
            "process",
            "getMetrics",
            "Get the metrics of this process, as Prometheus reads them",
        )
        .answers_text(),
        _ => return read_tasks(path),
    })
}

fn read_tasks(path: &'static str) -> Option<Operation> {
    let new = |tag, id, summary| Operation::new(path, tag, id, summary);
    Some(match path {
        "/v1/tasks" => new("tasks", "listTasks", "List tasks, the newest first")
            .says("`header.NAME=VALUE` chooses tasks with this header. Status, key and header need a queue.")
            .query::<String>("queue", "Only of this queue")
            .query::<String>("status", "Only with one of these statuses, separated by commas")
            .query::<String>("key", "Only with this key")
            .query::<String>("key_prefix", "Only with a key that begins so")
            .query_of_task_headers()
            .query::<String>("worker", "Only with a result of this worker")
            .query::<json::Instant>("since", "Only inserted from this time on")
            .query::<json::Instant>("until", "Only inserted before this time")
            .limit(0, "At most this many; 0, and without it: 100")
            .query::<String>("cursor", "The cursor of the answer before")
            .answers::<json::search::List<'_>>(),
        "/v1/tasks/{id}" => new("tasks", "getTask", "Get a task with its payload and its history")
            .answers::<json::history::TaskFile<'_>>(),
        "/v1/tasks/{id}/results" => new("tasks", "getResults", "Get the results that workers reported")
            .lists::<json::read::TaskResult<'_>>("results"),
        "/v1/tasks/{id}/events" => {
            new("tasks", "watchTask", "Watch a task: its status now, then each change, to its end")
                .says(
                    "Events are named `status`; their data is `Event`. An event `end` says why the stream ends early.",
                )
                .query::<String>(
                    "last_event_id",
                    "As the header Last-Event-ID: the last event that the caller has seen",
                )
                .answers_events()
                .or_nothing(204, "The caller has seen the last event")
        }
        "/v1/events" => new("tasks", "watchQueue", "Watch all tasks of a queue, from now on")
            .says("Events are named `status`; their data is `Event`. Behind an event `gap` some may be missing.")
            .query::<String>("queue", "The queue")
            .query::<String>("last_event_id", "As the header Last-Event-ID: the last event that the caller has seen")
            .answers_events(),
        "/v1/tasks:explain" => new("tasks", "explainTask", "Say where a task is, and why a worker does not get it")
            .query::<TaskId>("id", "The task, by its id …")
            .query::<String>("queue", "… or by its queue and its key")
            .query::<String>("key", "The key; it needs `queue`")
            .query::<String>("worker", "Say also whether this worker may get it")
            .answers::<json::explain::Explanation<'_>>()
            .or_problem(404, "There is no such task, or not any more"),
        _ => return None,
    })
}

fn change(path: &'static str) -> Option<Operation> {
    let new = |tag, id, summary| Operation::new(path, tag, id, summary);
    let rejected = "The only task of the request is rejected";
    Some(match path {
        "/v1/tasks" => new("tasks", "insertTasks", "Insert one task, an array of tasks, or lines of any number")
            .header("Idempotency-Key", "The `idempotency_key` of a body of one task")
            .takes::<json::insert::OneOrMore<'_>>()
            .or_lines()
            .says("With `wait`, taskd answers when all tasks are final, or when the time is over; not for lines.")
            .query::<String>("wait", "How long to wait for the ends of the tasks: `30s`; at most `max_wait`")
            .lists::<json::events::AwaitedTask<'_>>("results")
            .or_list::<InsertAnswer>(422, rejected, "results"),
        "/v1/tasks:get" => new("workers", "getTasks", "Lease tasks to a worker")
            .takes::<json::work::GetTasks>()
            .lists::<json::work::LeasedTask<'_>>("tasks"),
        "/v1/tasks:complete" => new("workers", "completeTasks", "Report tasks as done, with what they discovered")
            .says("With `next`, the call also leases tasks that are there.")
            .takes::<json::work::CompleteTasks<'_>>()
            .answers::<json::work::Completed<'_>>(),
        "/v1/tasks:reject" => new("workers", "rejectTasks", "Give tasks back")
            .takes::<json::work::RejectTasks<'_>>()
            .lists::<json::work::ItemAnswer<'_>>("results"),
        "/v1/tasks:extend" => new("workers", "extendTasks", "Move the deadlines of leases")
            .takes::<json::work::ExtendTasks<'_>>()
            .lists::<json::work::ItemAnswer<'_>>("results"),
        "/v1/fsck" => new("operators", "fsck", "Find where SQL, the bus and Redis do not agree, and mend it")
            .says("While an answer has a `cursor`, send the request again with it.")
            .takes::<json::fsck::Request>()
            .answers::<json::fsck::Page<'_>>(),
        "/v1/tasks:retry" => new("operators", "retryTasks", "Send dead and cancelled tasks again")
            .says("Tasks of ids are changed at once, those of a filter by a job.")
            .takes::<json::jobs::Change>()
            .answers::<json::jobs::Changed<'_>>(),
        "/v1/tasks:cancel" => new("operators", "cancelTasks", "Cancel unfinished tasks")
            .says("Tasks of ids are changed at once, those of a filter by a job.")
            .takes::<json::jobs::Change>()
            .answers::<json::jobs::Changed<'_>>(),
        "/v1/tasks:change" => new("operators", "changeTasks", "Give unfinished tasks another priority or NUM")
            .says("Tasks of ids are changed at once, those of a filter by a job.")
            .takes::<json::changes::UpdateTasks>()
            .answers::<json::jobs::Changed<'_>>(),
        "/v1/tasks:requeue" => new("operators", "requeueTasks", "Offer tasks anew: leases and backoffs end")
            .says("At most one of `to` and `away_from`; `reserved_for` needs `to`. A job requeues those of a filter.")
            .takes::<json::changes::Requeue>()
            .answers::<json::jobs::Changed<'_>>(),
        "/v1/queues/{queue}" => Operation::new("/v1/queues/{queue}:pause", "operators", "pauseQueue", "Pause a queue")
            .says("No worker gets anything of it. Leases and inserts go on.")
            .answers::<json::changes::Pausing<'_>>(),
        "/v1/jobs/{id}" => Operation::new("/v1/jobs/{id}:stop", "operators", "stopJob", "Stop a job")
            .says("A job that has ended stays as it is.")
            .answers::<json::jobs::Job<'_>>(),
        "/v1/dead-letters:retry" => new("operators", "retryDeadLetters", "Send the tasks of dead letters again")
            .takes::<json::letters::Change>()
            .answers::<json::letters::Changed<'_>>(),
        "/v1/dead-letters:purge" => new("operators", "purgeDeadLetters", "Remove dead letters")
            .takes::<json::letters::Change>()
            .answers::<json::letters::Changed<'_>>(),
        _ => return session(path),
    })
}

fn session(path: &'static str) -> Option<Operation> {
    let new = |id, summary| {
        Operation::new(path, "workers", id, summary).or_problem(404, "The session is over")
    };
    Some(match path {
        "/v1/sessions:open" => new("openSession", "Open a session, or go on with one")
            .says("Any process serves its calls. Each call is a heartbeat.")
            .takes::<json::sessions::OpenSession>()
            .answers::<json::sessions::SessionOpened<'_>>(),
        "/v1/sessions:want" => new("wantTasks", "Add to the demand of a session, and get tasks")
            .takes::<json::sessions::WantTasks>()
            .answers::<json::sessions::WantedTasks<'_>>(),
        "/v1/sessions:surrender" => new("surrenderTasks", "Set the demand of a session to 0")
            .takes::<json::sessions::SessionCall>()
            .answers::<json::sessions::Surrendered>(),
        "/v1/sessions:pending" => new(
            "getPendingCount",
            "Say how many tasks a session wants and has",
        )
        .takes::<json::sessions::SessionCall>()
        .answers::<Pending>(),
        "/v1/sessions:report" => new("reportTasks", "Report tasks of a session")
            .takes::<json::sessions::ReportTasks<'_>>()
            .answers::<json::sessions::TasksReported<'_>>(),
        "/v1/sessions:close" => new("closeSession", "End a session")
            .takes::<json::sessions::SessionCall>()
            .answers::<SessionClosed>(),
        _ => return None,
    })
}

/// The second operation of a route whose last part names the operation.
pub(super) fn second(method: &Method, path: &str) -> Option<Operation> {
    (method == Method::POST && path == "/v1/queues/{queue}").then(|| {
        Operation::new(
            "/v1/queues/{queue}:resume",
            "operators",
            "resumeQueue",
            "Resume a paused queue",
        )
        .answers::<json::changes::Pausing<'_>>()
    })
}

fn remove(path: &'static str) -> Option<Operation> {
    (path == "/v1/tasks/{id}").then(|| {
        Operation::new(path, "operators", "cancelTask", "Cancel one task")
            .answers::<json::work::ItemAnswer<'_>>()
            .or_problem(409, "The task was over before")
    })
}

/// The routes that take no token.
pub(super) fn open() -> [Operation; 4] {
    [
        Operation::new(
            "/",
            "process",
            "getIndex",
            "Say what this is, and where to go",
        )
        .answers_text(),
        Operation::new(
            "/openapi.json",
            "process",
            "getOpenApi",
            "Get this document",
        ),
        Operation::new(
            "/healthz",
            "process",
            "getHealth",
            "Say that the process lives",
        )
        .answers_text(),
        Operation::new(
            "/readyz",
            "process",
            "getReadiness",
            "Say whether the process does its work",
        )
        .answers::<Readiness>()
        .or::<Readiness>(503, "It does not; `status` says why"),
    ]
}
