//! All operations of taskd. The router, the index at `/`, `/openapi.json`, the roles of gRPC, the
//! tests of access and the table of docs/api.md are made from this list.

use uuid::Uuid;

use super::{
    http::{
        Readiness, bulk, changes, events, letters, limits, reading, sessions, subscriptions,
        tasks::{complete_tasks, extend_tasks, get_tasks, insert_tasks, reject_tasks},
        topics, topologies, trees, workflows,
    },
    json,
    operation::Operation,
};
use crate::model::{
    Act, BulkChange, ExecutionList, ExecutionView, Explanation, FsckPage, History, InsertAnswer,
    ItemAnswer, LetterKind, LetterReasons, LettersChanged, LimitKeyPage, LimitKeyView,
    LimitsCleared, OneQueue, Pending, Published, QueueView, RecordExplanation,
    Role::{Admin, Insert, Read, Work},
    SeenProcess, SeenWorkers, SessionClosed, SessionOpened, SubscriptionView, TaskId, TaskList,
    TasksReported, TopicView, TopologyView, TreeFile, TreeList, TreeView, WorkflowList,
    WorkflowView,
};

/// The groups of operations, and what they are for.
pub(super) const GROUPS: [(&str, &str); 7] = [
    ("tasks", "Insert tasks, and see what became of them"),
    ("workers", "Get tasks, and report them"),
    (
        "topics",
        "Publish records, read them, and turn them into tasks",
    ),
    (
        "trees",
        "Trees of tasks: when all that came out of a task is over; topologies: where it goes",
    ),
    (
        "workflows",
        "Deploy workflows, and start executions of them",
    ),
    ("operators", "Queues, dead letters and acts"),
    ("process", "This process: probes, metrics, this document"),
];

const LIMIT: &str = "At most this many; 0, and without it: 100";
const CURSOR: &str = "The cursor of the answer before";
const LAST_EVENT: &str = "As the header Last-Event-ID: the last event that the caller has seen";
const CHANGES_TASKS: &str = "Tasks of ids are changed at once, those of a filter by a bulk change.";
const SESSION_IS_OVER: &str = "The session is over";
const NO_TOPIC: &str = "There is no such topic";
const NO_SUBSCRIPTION: &str = "There is no such subscription";
const NO_TOPOLOGY: &str = "There is no such topology";
const NO_WORKFLOW: &str = "There is no such workflow";
const NO_EXECUTION: &str = "There is no such execution, or not any more";
const NO_TREE: &str = "There is no such tree, or not any more";

/// The operations, in the order of the index.
#[allow(
    clippy::too_many_lines,
    reason = "a table, an entry for each operation"
)]
pub fn all() -> Vec<Operation> {
    let of_tasks = |name, role, summary| Operation::new("tasks", name, Some(role), summary);
    let of_workers = |name, summary| Operation::new("workers", name, Some(Work), summary);
    let of_session = |name, summary| of_workers(name, summary).or_problem(404, SESSION_IS_OVER);
    let of_topics = |name, role, summary| {
        Operation::new("topics", name, Some(role), summary).or_problem(404, NO_TOPIC)
    };
    let of_subscriptions = |name, role, summary| {
        Operation::new("topics", name, Some(role), summary).or_problem(404, NO_SUBSCRIPTION)
    };
    let of_trees = |name, role, summary| {
        Operation::new("trees", name, Some(role), summary).or_problem(404, NO_TREE)
    };
    let of_topologies = |name, role, summary| {
        Operation::new("trees", name, Some(role), summary).or_problem(404, NO_TOPOLOGY)
    };
    let of_workflows = |name, role, summary| {
        Operation::new("workflows", name, Some(role), summary).or_problem(404, NO_WORKFLOW)
    };
    let of_executions = |name, role, summary| {
        Operation::new("workflows", name, Some(role), summary).or_problem(404, NO_EXECUTION)
    };
    let of_operators = |name, role, summary| Operation::new("operators", name, Some(role), summary);
    let without_token = |name, summary| Operation::new("process", name, None, summary);
    vec![
        of_tasks("insertTasks", Insert, "Insert one task, an array of tasks, or lines of any number")
            .post("/v1/tasks", insert_tasks)
            .grpc("taskd.v1.Discovery/InsertTasks")
            .header("Idempotency-Key", "The `idempotency_key` of a body of one task")
            .takes::<json::insert::OneOrMore<'_>>()
            .or_lines()
            .says(
                "With `wait`, taskd answers when all tasks are final, or when the time is over; not for lines. With \
                 `wait_for=tree` it waits for the ends of the trees of those tasks that name one.",
            )
            .query::<String>("wait", "How long to wait for the ends of the tasks: `30s`; at most `max_wait`")
            .query::<String>("wait_for", "What to wait for: `task` (default) or `tree`; with `wait`")
            .lists::<json::events::AwaitedTask<'_>>("results")
            .or_list::<InsertAnswer>(422, "The only task of the request is rejected", "results"),
        of_tasks("listTasks", Read, "List tasks, the newest first")
            .get("/v1/tasks", reading::list_tasks)
            .grpc("taskd.v1.Discovery/ListTasks")
            .says("`header.NAME=VALUE` chooses tasks with this header. Status, `key_prefix` and header need a queue.")
            .query::<String>("queue", "Only of this queue")
            .query::<String>("status", "Only with one of these statuses, separated by commas")
            .query::<String>("key", "Only with this key; without a queue, in all queues that the caller reaches")
            .query::<String>("key_prefix", "Only with a key that begins so")
            .query_of_task_headers()
            .query::<String>("worker", "Only with a result of this worker")
            .query::<json::Instant>("since", "Only inserted from this time on")
            .query::<json::Instant>("until", "Only inserted before this time")
            .query::<String>("reason", "Only dead with a reason that begins so; it needs `queue`")
            .query::<json::Instant>("as_of", "Only inserted at this time or before, and not changed since")
            .query::<TaskId>("tree", "Only of this tree; then status, headers and reason need no queue")
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
        of_operators("getHistory", Read, "Show how many tasks there were in the last hour and in the last day")
            .get("/v1/history", reading::get_history)
            .says("A queue beyond the 200 that have a place has no points. Without a queue, `inserted` and the other totals count what happened in queues that have a place, from any number on; `partial` says that some had none.")
            .query::<String>("queue", "Only this queue; without it, the sum of those that the caller reaches")
            .answers::<History>(),
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
        Operation::new("topics", "listTopics", Some(Read), "List the topics")
            .get("/v1/topics", topics::list_topics)
            .grpc("taskd.v1.Topics/ListTopics")
            .lists::<TopicView>("topics"),
        of_topics("getTopic", Read, "Get a topic, with the extents of its partitions")
            .get("/v1/topics/{topic}", topics::get_topic)
            .grpc("taskd.v1.Topics/GetTopic")
            .answers::<TopicView>(),
        Operation::new("topics", "putTopic", Some(Admin), "Make a topic, or change its settings")
            .put("/v1/topics/{topic}", topics::put_topic)
            .grpc("taskd.v1.Topics/PutTopic")
            .says("Settings that are left out stay, or are the defaults. Partitions only grow.")
            .takes::<json::topics::Settings>()
            .answers::<TopicView>(),
        of_topics("deleteTopic", Admin, "Delete a topic with its records")
            .delete("/v1/topics/{topic}", topics::delete_topic)
            .grpc("taskd.v1.Topics/DeleteTopic")
            .or_nothing(204, "The topic is deleted"),
        of_topics("publishRecords", Insert, "Publish one record, an array of records, or lines")
            .post("/v1/topics/{topic}/records", topics::publish)
            .grpc("taskd.v1.Topics/Publish")
            .says("A token's queues are those of its topics, too.")
            .takes::<json::topics::OneOrMoreRecords<'_>>()
            .or_lines()
            .lists::<Published>("results")
            .or_list::<Published>(422, "The only record of the request is rejected", "results"),
        of_topics("readTopic", Read, "Read the records of a topic, page by page")
            .get("/v1/topics/{topic}/records", topics::read_topic)
            .grpc("taskd.v1.Topics/ReadTopic")
            .query::<String>("from", "`0`, the first record; `$`, the next; after an offset, or `next` of an answer; from a time, or `-1h`")
            .query::<u32>("partition", "Only this partition")
            .limit(0, LIMIT)
            .query::<String>("wait", "How long to wait for a record if there is none: `30s`; at most `max_wait`")
            .answers::<json::topics::Page<'_>>(),
        of_topics("followTopic", Read, "Follow a topic: its records, and those that come later")
            .get("/v1/topics/{topic}/events", topics::follow_topic)
            .grpc("taskd.v1.Topics/FollowTopic")
            .says("Events are named `record`; the id of each is a `from`, which the header Last-Event-ID replaces. An event `end` says why the stream ends.")
            .query::<String>("from", "As for a page of records")
            .query::<u32>("partition", "Only this partition")
            .answers_events::<json::topics::Shows<'_>>(),
        of_topics("explainRecord", Read, "Say what became of a record in each subscription")
            .get("/v1/topics/{topic}/records:explain", topics::explain_record)
            .grpc("taskd.v1.Topics/ExplainRecord")
            .query::<u32>("partition", "The partition of the record; without it 0")
            .query::<String>("offset", "Its offset")
            .answers::<RecordExplanation>(),
        Operation::new("topics", "listSubscriptions", Some(Read), "List the subscriptions")
            .get("/v1/subscriptions", subscriptions::list_subscriptions)
            .grpc("taskd.v1.Topics/ListSubscriptions")
            .lists::<SubscriptionView>("subscriptions"),
        of_subscriptions("getSubscription", Read, "Get a subscription with its positions")
            .get("/v1/subscriptions/{subscription}", subscriptions::get_subscription)
            .grpc("taskd.v1.Topics/GetSubscription")
            .says("`waiting`, `leased`, `done` and `dead` are those of its queue.")
            .answers::<SubscriptionView>(),
        of_topics("putSubscription", Admin, "Make a subscription, or change it")
            .put("/v1/subscriptions/{subscription}", subscriptions::put_subscription)
            .grpc("taskd.v1.Topics/PutSubscription")
            .says("It turns each record of its topic that matches into a task of its queue. A token must reach both.")
            .takes::<json::subscriptions::Settings>()
            .answers::<SubscriptionView>(),
        of_subscriptions("deleteSubscription", Admin, "Delete a subscription; its tasks stay")
            .delete("/v1/subscriptions/{subscription}", subscriptions::delete_subscription)
            .grpc("taskd.v1.Topics/DeleteSubscription")
            .or_nothing(204, "The subscription is deleted"),
        of_subscriptions("seekSubscription", Admin, "Send a subscription to another place")
            .post("/v1/subscriptions/{subscription}:seek", subscriptions::seek)
            .grpc("taskd.v1.Topics/Seek")
            .says("The records from there on become new tasks. Those of before stay; with `cancel`, a bulk change cancels the unfinished ones.")
            .takes::<json::subscriptions::Seek>()
            .answers::<SubscriptionView>(),
        Operation::new("trees", "listTrees", Some(Read), "List trees, the newest first")
            .get("/v1/trees", trees::list_trees)
            .grpc("taskd.v1.Trees/ListTrees")
            .query::<String>("queue", "Only with roots in this queue")
            .query::<String>("state", "Only `OPEN`, `DONE` or `FAILED` ones")
            .query::<json::Instant>("since", "Only opened from this time on")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<TreeList>(),
        of_trees("getTree", Read, "Get a tree with what it waits for, at once or when it has ended")
            .get("/v1/trees/{id}", trees::get_tree)
            .grpc("taskd.v1.Trees/GetTree")
            .query::<String>("wait", "How long to wait for its end: `30s`; at most `max_wait`")
            .answers::<TreeFile>(),
        of_trees("watchTree", Read, "Watch a tree: as it is now, then each change, to its end")
            .get("/v1/trees/{id}/events", trees::watch_tree)
            .grpc("taskd.v1.Trees/WatchTree")
            .says("Events are named `tree`; changes within a quarter of a second are one. An event `end` says why the stream ends early.")
            .answers_events::<TreeView>()
            .or_nothing(204, "The header Last-Event-ID says that the caller has seen the end"),
        of_trees("cancelTree", Admin, "Cancel a tree: its tasks, by a bulk change")
            .post("/v1/trees/{id}:cancel", trees::cancel_or_retry)
            .grpc("taskd.v1.Trees/CancelTree")
            .says("Nothing is added to it any more: what its tasks discover is dropped.")
            .answers::<BulkChange>()
            .or_problem(409, "The tree has ended"),
        of_trees("retryTree", Admin, "Send the dead tasks of a tree again, by a bulk change")
            .post("/v1/trees/{id}:retry", trees::cancel_or_retry)
            .grpc("taskd.v1.Trees/RetryTree")
            .says("A tree that had ended is open again, in its next epoch.")
            .answers::<BulkChange>(),
        Operation::new("trees", "listTopologies", Some(Read), "List the topologies, without their files")
            .get("/v1/topologies", topologies::list_topologies)
            .grpc("taskd.v1.Topologies/ListTopologies")
            .lists::<TopologyView>("topologies"),
        of_topologies("getTopology", Read, "Get a topology with its file and the settings in force")
            .get("/v1/topologies/{topology}", topologies::get_topology)
            .grpc("taskd.v1.Topologies/GetTopology")
            .answers::<TopologyView>(),
        of_topologies("applyTopology", Admin, "Apply the file of a topology")
            .put("/v1/topologies/{topology}", topologies::apply_topology)
            .grpc("taskd.v1.Topologies/ApplyTopology")
            .says("A stage NAME is the queue TOPOLOGY.NAME. The answer names all mistakes, and the removed stages that have unfinished tasks; then nothing has changed.")
            .takes::<json::topologies::Apply>()
            .answers::<TopologyView>(),
        of_topologies("deleteTopology", Admin, "Delete a topology whose stages have no unfinished tasks")
            .delete("/v1/topologies/{topology}", topologies::delete_topology)
            .grpc("taskd.v1.Topologies/DeleteTopology")
            .or_nothing(204, "The topology is deleted"),
        Operation::new("workflows", "listWorkflows", Some(Read), "List the workflows, without their definitions")
            .get("/v1/workflows", workflows::list_workflows)
            .query::<String>("namespace", "Only of this namespace")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<WorkflowList>(),
        Operation::new("workflows", "deployWorkflow", Some(Admin), "Deploy a version of a workflow, in YAML or JSON")
            .put("/v1/workflows", workflows::deploy_workflow)
            .says("A version never changes. The body may also be `application/yaml`.")
            .query::<bool>("dry_run", "Only check it")
            .takes::<json::workflows::Written>()
            .answers::<WorkflowView>()
            .or::<WorkflowView>(201, "The version is new")
            .or_problem(409, "The version is deployed with another text")
            .or_list::<json::workflows::Mistake>(422, "All mistakes of the definition", "mistakes"),
        of_workflows("getWorkflow", Read, "Get a version of a workflow with its definition")
            .get("/v1/workflows/{namespace}/{name}/{version}", workflows::get_workflow)
            .says("The version may be `latest`.")
            .answers::<WorkflowView>(),
        of_workflows("deleteWorkflow", Admin, "Delete a version of a workflow of which no execution runs")
            .delete("/v1/workflows/{namespace}/{name}/{version}", workflows::delete_workflow)
            .or_nothing(204, "It is deleted")
            .or_problem(409, "Executions of it run"),
        of_workflows("startExecution", Insert, "Start an execution of a workflow")
            .post("/v1/workflows/{namespace}/{name}/{version}:start", workflows::start_execution)
            .says(
                "The version may be `latest`. A start with the same `id` again is the same execution. With `wait`, \
                 taskd answers 200 when it has ended, or 202 when the time is over.",
            )
            .takes::<json::workflows::Start>()
            .answers::<ExecutionView>()
            .or::<ExecutionView>(202, "It is new, and runs from now on; with `wait`: it has not ended")
            .or_problem(409, "The id belongs to an execution of another workflow"),
        Operation::new("workflows", "listExecutions", Some(Read), "List executions, the newest first")
            .get("/v1/executions", workflows::list_executions)
            .query::<String>("workflow", "Only of this workflow: `NAMESPACE/NAME`")
            .query::<String>("status", "Only with this status: `pending`, `running`, `waiting`, `completed`, `faulted` or `cancelled`")
            .query::<json::Instant>("since", "Only started from this time on")
            .query::<json::Instant>("until", "Only started before this time")
            .limit(0, LIMIT)
            .query::<String>("cursor", CURSOR)
            .answers::<ExecutionList>(),
        of_executions("getExecution", Read, "Get an execution: what it waits for, its output or its error")
            .get("/v1/executions/{execution}", workflows::get_execution)
            .says("By its id, or by the id that was given at its start.")
            .query::<String>("wait", "How long to wait for its end: `30s`; at most `max_wait`")
            .answers::<ExecutionView>(),
        of_executions("getExecutionHistory", Read, "Get all that happened in an execution, a line for each event")
            .get("/v1/executions/{execution}/history", workflows::get_history)
            .query::<u64>("after", "Only events after the one of this number")
            .answers_lines::<json::workflows::HistoryEvent>(),
        of_executions("cancelExecution", Admin, "Cancel an execution, with the tasks of its steps")
            .post("/v1/executions/{execution}:cancel", workflows::cancel_execution)
            .answers::<ExecutionView>()
            .or_problem(409, "It has ended before"),
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
        of_operators("requeueTasks", Admin, "End leases and backoffs, so that tasks can be claimed at once")
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
        of_operators("countDeadLetters", Read, "Count the newest 10,000 dead letters by their reasons")
            .get("/v1/dead-letters:reasons", letters::count_letters)
            .grpc("taskd.v1.Operator/CountDeadLetters")
            .says("Runs of digits count as the same: `took longer than # s`.")
            .query::<String>("queue", "Only of this queue")
            .query::<LetterKind>("kind", "Only of this kind")
            .query::<json::Instant>("since", "Only from this time on")
            .query::<json::Instant>("until", "Only before this time")
            .query::<String>("reason", "Only with a reason that begins so; it needs `queue`")
            .answers::<LetterReasons>(),
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
        without_token("getHealth", "Say that the process is alive")
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
