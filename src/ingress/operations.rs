//! All operations of taskd. The router, the index at `/`, `/openapi.json`, the roles of gRPC, the
//! tests of access and the table of docs/api.md are made from this list.

use uuid::Uuid;

use super::{
    http::{
        Readiness, bulk, changes, events, letters, limits, reading, sessions,
        tasks::{complete_tasks, extend_tasks, get_tasks, insert_tasks, reject_tasks},
    },
    json,
    operation::Operation,
};
use crate::model::{
    Act, BulkChange, Explanation, FsckPage, InsertAnswer, ItemAnswer, LetterKind, LettersChanged,
    LimitKeyPage, LimitKeyView, LimitsCleared, OneQueue, Pending, QueueView,
    Role::{Admin, Insert, Read, Work},
    SeenProcess, SeenWorkers, SessionClosed, SessionOpened, TaskId, TaskList, TasksReported,
};

/// The groups of operations, and what they are for.
pub(super) const GROUPS: [(&str, &str); 4] = [
    ("tasks", "Insert tasks, and see what became of them"),
    ("workers", "Get tasks, and report them"),
    ("operators", "Queues, dead letters and acts"),
    ("process", "This process: probes, metrics, this document"),
];

const LIMIT: &str = "At most this many; 0, and without it: 100";
const CURSOR: &str = "The cursor of the answer before";
const LAST_EVENT: &str = "As the header Last-Event-ID: the last event that the caller has seen";
const CHANGES_TASKS: &str = "Tasks of ids are changed at once, those of a filter by a bulk change.";
const SESSION_IS_OVER: &str = "The session is over";

/// The operations, in the order of the index.
#[allow(
    clippy::too_many_lines,
    reason = "a table, an entry for each operation"
)]
pub fn all() -> Vec<Operation> {
    let of_tasks = |name, role, summary| Operation::new("tasks", name, Some(role), summary);
    let of_workers = |name, summary| Operation::new("workers", name, Some(Work), summary);
    let of_session = |name, summary| of_workers(name, summary).or_problem(404, SESSION_IS_OVER);
    let of_operators = |name, role, summary| Operation::new("operators", name, Some(role), summary);
    let without_token = |name, summary| Operation::new("process", name, None, summary);
    vec![
        of_tasks("insertTasks", Insert, "Insert one task, an array of tasks, or lines of any number")
            .post("/v1/tasks", insert_tasks)
            .grpc("taskd.v1.Discovery/InsertTasks")
            .header("Idempotency-Key", "The `idempotency_key` of a body of one task")
            .takes::<json::insert::OneOrMore<'_>>()
            .or_lines()
            .says("With `wait`, taskd answers when all tasks are final, or when the time is over; not for lines.")
            .query::<String>("wait", "How long to wait for the ends of the tasks: `30s`; at most `max_wait`")
            .lists::<json::events::AwaitedTask<'_>>("results")
            .or_list::<InsertAnswer>(422, "The only task of the request is rejected", "results"),
        of_tasks("listTasks", Read, "List tasks, the newest first")
            .get("/v1/tasks", reading::list_tasks)
            .grpc("taskd.v1.Discovery/ListTasks")
            .says("`header.NAME=VALUE` chooses tasks with this header. Status, key and header need a queue.")
            .query::<String>("queue", "Only of this queue")
            .query::<String>("status", "Only with one of these statuses, separated by commas")
            .query::<String>("key", "Only with this key")
            .query::<String>("key_prefix", "Only with a key that begins so")
            .query_of_task_headers()
            .query::<String>("worker", "Only with a result of this worker")
            .query::<json::Instant>("since", "Only inserted from this time on")
            .query::<json::Instant>("until", "Only inserted before this time")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<TaskList>(),
        of_tasks("getTask", Read, "Get a task with its payload and its history")
            .get("/v1/tasks/{id}", reading::get_task)
            .grpc("taskd.v1.Discovery/GetTask")
            .answers::<json::history::TaskFile<'_>>(),
        of_operators("cancelTask", Admin, "Cancel one task")
            .delete("/v1/tasks/{id}", changes::cancel_task)
            .answers::<ItemAnswer>()
            .or_problem(409, "The task was over before"),
        of_tasks("getResults", Read, "Get the results that workers reported")
            .get("/v1/tasks/{id}/results", reading::get_results)
            .lists::<json::read::TaskResult<'_>>("results"),
        of_tasks("watchTask", Read, "Watch a task: its status now, then each change, to its end")
            .get("/v1/tasks/{id}/events", events::watch_task)
            .grpc("taskd.v1.Discovery/WatchTask")
            .says("Events are named `status`; their data is `Event`. An event `end` says why the stream ends early.")
            .query::<String>("last_event_id", LAST_EVENT)
            .answers_events::<json::events::Event<'_>>()
            .or_nothing(204, "The caller has seen the last event"),
        of_tasks("watchQueue", Read, "Watch all tasks of a queue, from now on")
            .get("/v1/events", events::watch_queue)
            .grpc("taskd.v1.Discovery/WatchQueue")
            .says("Events are named `status`; their data is `Event`. Behind an event `gap` some may be missing.")
            .query::<String>("queue", "The queue")
            .query::<String>("last_event_id", LAST_EVENT)
            .answers_events::<json::events::Event<'_>>(),
        of_operators("listQueues", Read, "List the open queues")
            .get("/v1/queues", reading::get_queues)
            .lists::<QueueView>("queues"),
        of_operators("getQueue", Read, "Get one queue, at once or when it is drained")
            .get("/v1/queues/{queue}", reading::get_queue)
            .grpc("taskd.v1.Operator/GetQueue")
            .says("With `wait=drained`, taskd answers when nothing of the queue is unfinished, or when the time is over.")
            .query::<String>("wait", "`drained`: wait until nothing of the queue is unfinished or on its way")
            .query::<String>("timeout", "How long to wait: `30s`, and without it 30s; at most `max_wait`")
            .answers::<OneQueue>()
            .or_problem(404, "The queue never had a task"),
        of_operators("listWorkers", Read, "List the workers that taskd has heard of lately")
            .get("/v1/workers", reading::get_workers)
            .grpc("taskd.v1.Operator/ListWorkers")
            .says("A token that reaches some queues sees workers of these, and one for a worker sees its own.")
            .query::<String>("queue", "Only workers of this queue, with their counts of it")
            .answers::<SeenWorkers>(),
        of_operators("listProcesses", Read, "List the processes of taskd that live")
            .get("/v1/processes", reading::get_processes)
            .grpc("taskd.v1.Operator/ListProcesses")
            .for_all_queues()
            .lists::<SeenProcess>("processes"),
        of_tasks("explainTask", Read, "Say where a task is, and why a worker does not get it")
            .get("/v1/tasks:explain", reading::explain_task)
            .grpc("taskd.v1.Discovery/ExplainTask")
            .query::<TaskId>("id", "The task, by its id …")
            .query::<String>("queue", "… or by its queue and its key")
            .query::<String>("key", "The key; it needs `queue`")
            .query::<String>("worker", "Say also whether this worker may get it")
            .answers::<Explanation>()
            .or_problem(404, "There is no such task, or not any more"),
        of_operators("getBooks", Read, "Count what came in, what went out, and where the rest is")
            .get("/v1/books", reading::get_books)
            .grpc("taskd.v1.Operator/GetBooks")
            .query::<String>("queue", "Only this queue")
            .answers::<json::books::Books<'_>>(),
        of_operators("dumpQueue", Read, "Show what Redis holds of a queue, decoded")
            .get("/v1/dump", reading::get_dump)
            .query::<String>("queue", "The queue")
            .query::<u32>("shard", "Only this shard")
            .limit(1, "At most so many entries of each key; without it 100")
            .answers::<json::fsck::Dump<'_>>(),
        of_operators("fsck", Admin, "Find where SQL, the bus and Redis do not agree, and mend it")
            .post("/v1/fsck", reading::fsck)
            .grpc("taskd.v1.Operator/Fsck")
            .says("While an answer has a `cursor`, send the request again with it.")
            .takes::<json::fsck::Request>()
            .answers::<FsckPage>(),
        of_workers("getTasks", "Lease tasks to a worker")
            .post("/v1/tasks:get", get_tasks)
            .grpc("taskd.v1.Tasks/GetTasks")
            .takes::<json::work::GetTasks>()
            .lists::<json::work::LeasedTask<'_>>("tasks"),
        of_workers("completeTasks", "Report tasks as done, with what they discovered")
            .post("/v1/tasks:complete", complete_tasks)
            .grpc("taskd.v1.Tasks/CompleteTasks")
            .says("With `next`, the call also leases tasks that are there.")
            .takes::<json::work::CompleteTasks<'_>>()
            .answers::<json::work::Completed<'_>>(),
        of_workers("rejectTasks", "Give tasks back")
            .post("/v1/tasks:reject", reject_tasks)
            .grpc("taskd.v1.Tasks/RejectTasks")
            .takes::<json::work::RejectTasks<'_>>()
            .lists::<ItemAnswer>("results"),
        of_workers("extendTasks", "Move the deadlines of leases")
            .post("/v1/tasks:extend", extend_tasks)
            .grpc("taskd.v1.Tasks/ExtendTasks")
            .takes::<json::work::ExtendTasks<'_>>()
            .lists::<ItemAnswer>("results"),
        of_workers("streamTasks", "Send a worker tasks, and take its reports on the same stream")
            .grpc("taskd.v1.Tasks/StreamTasks"),
        of_session("openSession", "Open a session, or go on with one")
            .post("/v1/sessions:open", sessions::open_session)
            .grpc("taskd.v1.Tasks/OpenSession")
            .says("Any process serves its calls. Each call is a heartbeat.")
            .takes::<json::sessions::OpenSession>()
            .answers::<SessionOpened>(),
        of_session("wantTasks", "Add to the demand of a session, and get tasks")
            .post("/v1/sessions:want", sessions::want_tasks)
            .grpc("taskd.v1.Tasks/WantTasks")
            .takes::<json::sessions::WantTasks>()
            .answers::<json::sessions::WantedTasks<'_>>(),
        of_session("surrenderTasks", "Set the demand of a session to 0")
            .post("/v1/sessions:surrender", sessions::surrender_tasks)
            .grpc("taskd.v1.Tasks/SurrenderTasks")
            .takes::<json::sessions::SessionCall>()
            .answers::<json::sessions::Surrendered>(),
        of_session("getPendingCount", "Say how many tasks a session wants and has")
            .post("/v1/sessions:pending", sessions::pending_count)
            .grpc("taskd.v1.Tasks/GetPendingCount")
            .takes::<json::sessions::SessionCall>()
            .answers::<Pending>(),
        of_session("reportTasks", "Report tasks of a session")
            .post("/v1/sessions:report", sessions::report_tasks)
            .grpc("taskd.v1.Tasks/ReportTasks")
            .takes::<json::sessions::ReportTasks<'_>>()
            .answers::<TasksReported>(),
        of_session("closeSession", "End a session")
            .post("/v1/sessions:close", sessions::close_session)
            .grpc("taskd.v1.Tasks/CloseSession")
            .takes::<json::sessions::SessionCall>()
            .answers::<SessionClosed>(),
        of_operators("retryTasks", Admin, "Send dead and cancelled tasks again")
            .post("/v1/tasks:retry", changes::retry_tasks)
            .grpc("taskd.v1.Operator/RetryTasks")
            .says(CHANGES_TASKS)
            .takes::<json::bulk::Change>()
            .answers::<json::bulk::Changed<'_>>(),
        of_operators("listBulkChanges", Read, "List bulk changes, the latest first")
            .get("/v1/bulk", bulk::get_bulk_changes)
            .grpc("taskd.v1.Operator/ListBulkChanges")
            .query::<Uuid>("before", "Only bulk changes before this one")
            .limit(0, LIMIT)
            .lists::<BulkChange>("bulk"),
        of_operators("getBulkChange", Read, "Get a bulk change with its progress")
            .get("/v1/bulk/{id}", bulk::get_bulk_change)
            .grpc("taskd.v1.Operator/GetBulkChange")
            .answers::<BulkChange>(),
        of_operators("stopBulkChange", Admin, "Stop a bulk change")
            .post("/v1/bulk/{id}:stop", bulk::stop_bulk_change)
            .grpc("taskd.v1.Operator/StopBulkChange")
            .says("A bulk change that has ended stays as it is.")
            .answers::<BulkChange>(),
        of_operators("cancelTasks", Admin, "Cancel unfinished tasks")
            .post("/v1/tasks:cancel", changes::cancel_tasks)
            .grpc("taskd.v1.Discovery/CancelTasks")
            .says(CHANGES_TASKS)
            .takes::<json::bulk::Change>()
            .answers::<json::bulk::Changed<'_>>(),
        of_operators("changeTasks", Admin, "Give unfinished tasks another priority or NUM")
            .post("/v1/tasks:change", changes::update_tasks)
            .grpc("taskd.v1.Operator/ChangeTasks")
            .says(CHANGES_TASKS)
            .takes::<json::changes::UpdateTasks>()
            .answers::<json::bulk::Changed<'_>>(),
        of_operators("requeueTasks", Admin, "Offer tasks anew: leases and backoffs end")
            .post("/v1/tasks:requeue", changes::requeue_tasks)
            .grpc("taskd.v1.Operator/RequeueTasks")
            .says("At most one of `to` and `away_from`; `reserved_for` needs `to`. A bulk change requeues those of a filter.")
            .takes::<json::changes::Requeue>()
            .answers::<json::bulk::Changed<'_>>(),
        of_operators("pauseQueue", Admin, "Pause a queue")
            .post("/v1/queues/{queue}:pause", changes::pause_or_resume)
            .grpc("taskd.v1.Operator/PauseQueue")
            .says("No worker gets anything of it. Leases and inserts go on.")
            .answers::<json::changes::Pausing<'_>>(),
        of_operators("resumeQueue", Admin, "Resume a paused queue")
            .post("/v1/queues/{queue}:resume", changes::pause_or_resume)
            .grpc("taskd.v1.Operator/ResumeQueue")
            .answers::<json::changes::Pausing<'_>>(),
        of_operators("listLimits", Read, "List limit keys of a queue")
            .get("/v1/queues/{queue}/limits", limits::list_limits)
            .grpc("taskd.v1.Operator/ListLimits")
            .query::<String>("state", "`own` (and without it): with own limits; `running`, `waiting` or `held`")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<LimitKeyPage>(),
        of_operators("getLimit", Read, "Get a limit key with its limits and counts")
            .get("/v1/queues/{queue}/limits/{limit_key}", limits::get_limit)
            .grpc("taskd.v1.Operator/GetLimit")
            .says("The limit key `*` stands for all of the queue.")
            .answers::<LimitKeyView>(),
        of_operators("setLimit", Admin, "Give a limit key own limits")
            .put("/v1/queues/{queue}/limits/{limit_key}", limits::set_limit)
            .grpc("taskd.v1.Operator/SetLimit")
            .says("They replace those that it had, and count within a second. At most 100,000 limit keys have some.")
            .takes::<json::limits::SetLimits>()
            .answers::<LimitKeyView>(),
        of_operators("clearLimit", Admin, "Remove the own limits of a limit key")
            .delete("/v1/queues/{queue}/limits/{limit_key}", limits::clear_limit)
            .grpc("taskd.v1.Operator/ClearLimit")
            .answers::<LimitsCleared>(),
        of_operators("listActs", Admin, "List what operators did, the latest first")
            .get("/v1/acts", reading::get_acts)
            .grpc("taskd.v1.Operator/ListActs")
            .for_all_queues()
            .query::<Uuid>("before", "Only acts before this one")
            .limit(0, LIMIT)
            .lists::<Act>("acts"),
        of_operators("listDeadLetters", Read, "List dead letters, the newest first")
            .get("/v1/dead-letters", letters::get_letters)
            .grpc("taskd.v1.Operator/ListDeadLetters")
            .query::<String>("queue", "Only of this queue")
            .query::<LetterKind>("kind", "Only of this kind")
            .query::<json::Instant>("since", "Only from this time on")
            .query::<json::Instant>("until", "Only before this time")
            .query::<String>("reason", "Only with a reason that begins so; it needs `queue`")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<json::letters::Page<'_>>(),
        of_operators("getDeadLetter", Read, "Get a dead letter with all that it has")
            .get("/v1/dead-letters/{id}", letters::get_letter)
            .grpc("taskd.v1.Operator/GetDeadLetter")
            .answers::<json::letters::Letter<'_>>(),
        of_operators("retryDeadLetters", Admin, "Send the tasks of dead letters again")
            .post("/v1/dead-letters:retry", letters::retry_letters)
            .grpc("taskd.v1.Operator/RetryDeadLetters")
            .takes::<json::letters::Change>()
            .answers::<LettersChanged>(),
        of_operators("purgeDeadLetters", Admin, "Remove dead letters")
            .post("/v1/dead-letters:purge", letters::purge_letters)
            .grpc("taskd.v1.Operator/PurgeDeadLetters")
            .takes::<json::letters::Change>()
            .answers::<LettersChanged>(),
        Operation::new("process", "getMetrics", Some(Read), "Get the metrics of this process, as Prometheus reads them")
            .get("/metrics", reading::get_metrics)
            .for_all_queues()
            .answers_text(),
        without_token("getIndex", "Say what this is, and where to go")
            .served_at("/")
            .answers_text(),
        without_token("getOpenApi", "Get this document").served_at("/openapi.json"),
        without_token("getHealth", "Say that the process lives")
            .served_at("/healthz")
            .answers_text(),
        without_token("getReadiness", "Say whether the process does its work")
            .served_at("/readyz")
            .answers::<Readiness>()
            .or::<Readiness>(503, "It does not; `status` says why"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The router checks one role and one list of parameters per route.
    #[test]
    fn verbs_of_one_route_share_role_and_parameters() {
        let all = all();
        for (before, one) in all.iter().zip(&all[1..]) {
            let (Some(a), Some(b)) = (&before.http, &one.http) else {
                continue;
            };
            if a.method == b.method && a.matched_path() == b.matched_path() {
                assert_eq!(before.role, one.role, "{}", b.path);
                assert_eq!(before.known_parameters(), one.known_parameters());
            }
        }
        let names: std::collections::BTreeSet<_> = all.iter().map(|one| one.name).collect();
        assert_eq!(names.len(), all.len());
    }
}
