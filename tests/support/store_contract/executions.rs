//! Tests of executions of workflows: definitions, starts, appends, and what comes to them.

use std::time::Duration;

use taskd::{
    model::{
        Act, Change, ChangeKind, ExecutionId, ExecutionPages, ExecutionStatus, Update,
        WorkflowVersion,
    },
    store::{
        Append, Appended, Decided, Deleted, EndedChange, ExecutionCounts, Happening, InboxRow,
        KeptDefinition, KeptPages, NewExecution, OpenExecution, StartedExecution, StoredDefinition,
        Timer, Wanted,
    },
};

use super::{
    trees::{cancel, settle},
    *,
};

const HASH: &str = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945";

fn workflow(name: &str, version: &str) -> WorkflowVersion {
    WorkflowVersion {
        namespace: "shop".into(),
        name: name.into(),
        version: version.into(),
    }
}

fn definition(name: &str, version: &str) -> StoredDefinition {
    StoredDefinition {
        workflow: workflow(name, version),
        hash: HASH.into(),
        text: format!("document: {{ name: {name} }}"),
        documents: "{}".into(),
        deployed_by: "ops".into(),
        deployed_unix_ms: NOW,
    }
}

fn act(what: &str) -> Act {
    Act::new("ops", what, "shop")
}

async fn deploy(store: &dyn Store, name: &str) {
    let kept = store
        .keep_definition(&definition(name, "1.0.0"), &act("deploy workflow"))
        .await
        .unwrap();
    assert_eq!(kept, KeptDefinition::New);
}

fn new(name: &str, given: Option<&str>) -> NewExecution {
    NewExecution {
        id: ExecutionId::new(),
        given: given.map(str::to_owned),
        workflow: workflow(name, "1.0.0"),
        hash: HASH.into(),
        input: "{\"total\":7}".into(),
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
        created_unix_ms: NOW,
    }
}

async fn start(store: &dyn Store, execution: &NewExecution) -> StartedExecution {
    store.start_execution(execution).await.unwrap()
}

/// Starts an execution of a deployed workflow.
async fn started(store: &dyn Store, name: &str) -> ExecutionId {
    let execution = new(name, None);
    assert_eq!(start(store, &execution).await, StartedExecution::New);
    execution.id
}

/// An append of one entry to a log of this length.
fn one(execution: ExecutionId, seq: u64) -> Append {
    Append {
        execution,
        seq,
        entries: vec![format!("entry {}", seq + 1).into()],
        armed: vec![],
        disarmed: vec![],
        steps: vec![],
        cancelled: vec![],
        consumed: vec![],
        goes_on: false,
        status: ExecutionStatus::Waiting,
        summary: None,
        at_unix_ms: NOW + 1,
    }
}

/// The first append, with these steps.
fn first(execution: ExecutionId, steps: &[NewRow]) -> Append {
    Append {
        steps: steps.to_vec(),
        consumed: vec![Happening::Start],
        ..one(execution, 0)
    }
}

fn last(execution: ExecutionId, seq: u64) -> Append {
    Append {
        status: ExecutionStatus::Completed,
        ..one(execution, seq)
    }
}

/// The task of a step.
fn step(execution: ExecutionId, path: &str) -> NewRow {
    let id = TaskId::derived_from(&[execution.as_bytes(), path.as_bytes()], NOW);
    fresh(TaskRow {
        id,
        key_hash: KeyHash::without_key(id),
        ..task("q", path)
    })
}

async fn append(store: &dyn Store, append: &Append) -> Appended {
    let appends = std::slice::from_ref(append);
    let mut stored = store.append(appends).await.unwrap();
    stored.answers.pop().expect("there is one answer")
}

/// Appends, and takes the answers for the steps.
async fn appended(store: &dyn Store, of: &Append) -> Vec<Inserted> {
    match append(store, of).await {
        Appended::Yes { steps } => steps,
        Appended::Lost => panic!("{of:?} is lost"),
    }
}

/// What is in the inbox of each execution.
async fn inbox(store: &dyn Store) -> Vec<(ExecutionId, Happening)> {
    let page = store.inbox(None, &[], 1000).await.unwrap();
    assert_eq!(page.last, None);
    let rows = page.rows.into_iter();
    rows.map(|row| (row.execution, row.happening)).collect()
}

fn ended(row: &NewRow, status: StoredStatus) -> Happening {
    Happening::StepEnded {
        task: row.task.id,
        status,
    }
}

async fn log(store: &dyn Store, id: ExecutionId) -> Vec<String> {
    let entries = store.entries(id, 0, 1000).await.unwrap();
    let texts = entries.into_iter().zip(1..).map(|(stored, seq)| {
        assert_eq!(stored.seq, seq);
        String::from_utf8(stored.entry.to_vec()).unwrap()
    });
    texts.collect()
}

pub(crate) async fn a_definition_never_changes<D: Database>(db: &D) {
    let store = db.open().await;
    let first = definition("order", "1.0.0");
    let deployed = act("deploy workflow");
    for _ in 0..2 {
        let kept = store.keep_definition(&first, &deployed).await.unwrap();
        assert_eq!(kept, KeptDefinition::New, "the call may be repeated");
    }
    let other = StoredDefinition {
        hash: HASH.replace('4', "5"),
        text: "another".into(),
        ..first.clone()
    };
    let again = [
        (&first, KeptDefinition::Same),
        (&other, KeptDefinition::Other),
    ];
    for (definition, expected) in again {
        let kept = store
            .keep_definition(definition, &act("deploy workflow"))
            .await;
        assert_eq!(kept.unwrap(), expected);
    }
    let stored = store.definition(&first.workflow).await.unwrap();
    assert_eq!(stored.as_ref(), Some(&first));
    assert_eq!(db.number("SELECT COUNT(*) FROM acts").await, 1);

    for (name, version) in [("order", "1.1.0"), ("refund", "1.0.0")] {
        let definition = definition(name, version);
        store
            .keep_definition(&definition, &act("deploy workflow"))
            .await
            .unwrap();
    }
    let list = async |of, after: Option<&WorkflowVersion>| {
        let found = store.definitions(of, after, 2).await.unwrap();
        let names = found.into_iter().map(|found| found.workflow.to_string());
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        list((None, None), None).await,
        ["shop/order/1.0.0", "shop/order/1.1.0"]
    );
    let after = workflow("order", "1.1.0");
    assert_eq!(
        list((Some("shop"), None), Some(&after)).await,
        ["shop/refund/1.0.0"]
    );
    assert_eq!(list((Some("shop"), Some("refund")), None).await.len(), 1);
    assert_eq!(list((Some("bank"), None), None).await.len(), 0);
}

pub(crate) async fn a_definition_stays_while_executions_run<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let of = workflow("order", "1.0.0");
    let delete = async |act: &Act| store.delete_definition(&of, act).await.unwrap();
    let deleted = act("delete workflow");
    assert_eq!(delete(&deleted).await, Deleted::Running);
    appended(&*store, &last(id, 0)).await;
    for _ in 0..2 {
        assert_eq!(delete(&deleted).await, Deleted::Yes);
    }
    assert_eq!(delete(&act("delete workflow")).await, Deleted::Unknown);
    assert_eq!(store.definition(&of).await.unwrap(), None);
    let late = new("order", None);
    assert_eq!(start(&*store, &late).await, StartedExecution::NoDefinition);
    assert_eq!(store.execution(late.id).await.unwrap(), None);
}

pub(crate) async fn an_execution_starts_once_for_a_given_id<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    deploy(&*store, "refund").await;
    let first = new("order", Some("order 7"));
    for _ in 0..2 {
        assert_eq!(start(&*store, &first).await, StartedExecution::New);
    }
    let again = new("order", Some("order 7"));
    assert_eq!(
        start(&*store, &again).await,
        StartedExecution::Before(first.id)
    );
    let of_other = new("refund", Some("order 7"));
    assert_eq!(
        start(&*store, &of_other).await,
        StartedExecution::OtherWorkflow(first.workflow.clone())
    );
    // Ids are compared bytewise.
    let other = new("order", Some("ORDER 7"));
    assert_eq!(start(&*store, &other).await, StartedExecution::New);
    assert_eq!(
        store.execution_given("order 7").await.unwrap(),
        Some(first.id)
    );
    assert_eq!(store.execution_given("order").await.unwrap(), None);
    let of_another_hash = NewExecution {
        hash: HASH.replace('4', "5"),
        ..new("order", None)
    };
    assert_eq!(
        start(&*store, &of_another_hash).await,
        StartedExecution::NoDefinition
    );

    let execution = store.execution(first.id).await.unwrap().unwrap();
    assert_eq!(execution.input, first.input);
    assert_eq!(execution.listed.given.as_deref(), Some("order 7"));
    assert_eq!(execution.listed.workflow, first.workflow);
    assert_eq!(execution.listed.hash, HASH);
    assert_eq!(execution.listed.status, ExecutionStatus::Pending);
    assert_eq!(execution.listed.traceparent, first.traceparent);
    let mut starts = inbox(&*store).await;
    starts.sort_unstable();
    let mut expected = [first.id, other.id].map(|id| (id, Happening::Start));
    expected.sort_unstable();
    assert_eq!(starts, expected);

    // The log has the input after the first append, and a late repeat begins nothing.
    appended(&*store, &self::first(first.id, &[])).await;
    assert_eq!(start(&*store, &first).await, StartedExecution::New);
    assert_eq!(inbox(&*store).await, [(other.id, Happening::Start)]);
    let execution = store.execution(first.id).await.unwrap().unwrap();
    assert_eq!(execution.input, "");
}

pub(crate) async fn of_concurrent_starts_one_gets_the_id<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let starts: Vec<NewExecution> = (0..8).map(|_| new("order", Some("same"))).collect();
    let answers = join_all(starts.iter().map(|new| start(&*store, new))).await;
    let given = store.execution_given("same").await.unwrap().unwrap();
    for (new, answer) in starts.iter().zip(answers) {
        let expected = match new.id == given {
            true => StartedExecution::New,
            false => StartedExecution::Before(given),
        };
        assert_eq!(answer, expected);
    }
    assert_eq!(inbox(&*store).await, [(given, Happening::Start)]);
    assert_eq!(db.number("SELECT COUNT(*) FROM executions").await, 1);
}

pub(crate) async fn an_append_is_stored_as_a_whole_or_not_at_all<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let [pay, ship] = ["/do/0/pay", "/do/1/ship"].map(|path| step(id, path));
    let begin = Append {
        entries: vec!["entry 1".into(), "entry 2".into()],
        armed: vec![(0, NOW + 100), (1, NOW + 200)],
        summary: Some("waits".into()),
        ..first(id, std::slice::from_ref(&pay))
    };
    assert_eq!(appended(&*store, &begin).await, [New]);
    let check = async || {
        assert_eq!(log(&*store, id).await, ["entry 1", "entry 2"]);
        assert_eq!(ids_of_steps(&*store).await, [pay.task.id]);
        assert_eq!(inbox(&*store).await, []);
        let counts = store.execution_counts().await.unwrap();
        assert_eq!(counts, ExecutionCounts { open: 1, timers: 2 });
        let execution = store.execution(id).await.unwrap().unwrap();
        assert_eq!(execution.listed.seq, 2);
        assert_eq!(execution.listed.status, ExecutionStatus::Waiting);
        assert_eq!(execution.listed.updated_unix_ms, NOW + 1);
        assert_eq!(execution.listed.ended_unix_ms, 0);
        assert_eq!(execution.summary, "waits");
    };
    check().await;

    // Somebody else has appended since these were decided.
    for seq in [0, 1, 3] {
        let late = Append {
            armed: vec![(2, NOW + 300)],
            disarmed: vec![0, 1],
            steps: vec![ship.clone()],
            cancelled: vec![pay.task.id],
            goes_on: true,
            status: ExecutionStatus::Faulted,
            summary: Some("late".into()),
            ..one(id, seq)
        };
        assert_eq!(append(&*store, &late).await, Appended::Lost);
    }
    let unknown = one(ExecutionId::new(), 0);
    assert_eq!(append(&*store, &unknown).await, Appended::Lost);
    check().await;
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 0);

    // The step reaches the outbox with its batch, and its row says whose step it is.
    assert_eq!(outbox(&*store).await, [in_outbox(&pay, Fresh)]);
    let steps = "SELECT COUNT(*) FROM tasks WHERE LENGTH(execution) = 16";
    assert_eq!(db.number(steps).await, 1);

    // A row that cannot be stored leaves nothing of the append.
    let refused = Append {
        steps: vec![ship.clone()],
        ..one(id, 2)
    };
    db.execute(
        "INSERT INTO execution_events (execution, seq, entry) SELECT id, 3, x'' FROM executions",
    )
    .await;
    store
        .append(std::slice::from_ref(&refused))
        .await
        .unwrap_err();
    assert_eq!(ids_of_steps(&*store).await, [pay.task.id]);
    db.execute("DELETE FROM execution_events WHERE seq = 3")
        .await;
    assert_eq!(appended(&*store, &refused).await, [New]);
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 2)]);
}

/// The tasks in the outbox, by id.
async fn ids_of_steps(store: &dyn Store) -> Vec<TaskId> {
    let mut ids: Vec<TaskId> = outbox(store).await.iter().map(|row| row.task.id).collect();
    ids.sort_unstable();
    ids
}

pub(crate) async fn many_executions_append_at_once<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let mut appends = Vec::new();
    for _ in 0..20 {
        let id = started(&*store, "order").await;
        appends.push(first(id, &[step(id, "/do/0/a"), step(id, "/do/1/b")]));
    }
    let lost = appends[3].execution;
    appended(&*store, &one(lost, 0)).await;
    // Of two appends of one execution, the first is stored.
    appends.push(one(appends[7].execution, 0));
    let stored = store.append(&appends).await.unwrap();
    for (append, answer) in appends.iter().zip(&stored.answers) {
        let expected = match append.execution != lost && !append.steps.is_empty() {
            true => Appended::Yes {
                steps: vec![New, New],
            },
            false => Appended::Lost,
        };
        assert_eq!(*answer, expected);
    }
    let steps = appends[0].steps.iter();
    for step in steps {
        assert_eq!(stored.turn_of(step), Some(stored.batch));
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM batches").await, 1);
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 38)]);
    assert_eq!(inbox(&*store).await, [(lost, Happening::Start)]);
    // Each is as long as what was stored.
    let next: Vec<Append> = appends[..20]
        .iter()
        .map(|append| one(append.execution, 1))
        .collect();
    let stored = store.append(&next).await.unwrap();
    assert!(!stored.answers.contains(&Appended::Lost));
}

pub(crate) async fn of_two_that_step_an_execution_one_appends<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let paths: Vec<String> = (0..6).map(|n| format!("/do/{n}/a")).collect();
    let appends: Vec<Append> = paths
        .iter()
        .map(|path| first(id, &[step(id, path)]))
        .collect();
    let answers = join_all(appends.iter().map(|of| append(&*store, of))).await;
    let won = answers.iter().filter(|answer| **answer != Appended::Lost);
    assert_eq!(won.count(), 1);
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1)]);
    assert_eq!(log(&*store, id).await, ["entry 1"]);
}

pub(crate) async fn every_end_of_a_step_comes_to_its_execution_once<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let paths = ["done", "twice", "dead", "cancelled", "lowered"];
    let [done, twice, dead, cancelled, lowered] = paths.map(|path| {
        let mut step = step(id, path);
        if path == "twice" || path == "lowered" {
            step.task.replicas = 2;
        }
        step
    });
    let plain = row("q", "plain");
    insert_new(&*store, std::slice::from_ref(&plain)).await;
    let steps = [&done, &twice, &dead, &cancelled, &lowered].map(Clone::clone);
    appended(&*store, &first(id, &steps)).await;
    let mut expected = Vec::new();
    for _ in 0..2 {
        let reports = [
            completed(&plain, "w"),
            completed(&done, "w"),
            completed(&twice, "w"),
        ];
        settle(&*store, &reports).await;
    }
    expected.push(ended(&done, Completed));
    check_inbox(&*store, id, &expected).await;
    settle(&*store, &[completed(&twice, "v"), completed(&done, "late")]).await;
    expected.push(ended(&twice, Completed));
    check_inbox(&*store, id, &expected).await;

    for _ in 0..2 {
        settle(&*store, &[died(&dead)]).await;
    }
    expected.push(ended(&dead, Dead));
    check_inbox(&*store, id, &expected).await;
    assert_eq!(db.number("SELECT COUNT(*) FROM letters").await, 0);

    cancel(&*store, &cancelled, NOW + 30).await;
    expected.push(ended(&cancelled, StoredStatus::Cancelled));
    check_inbox(&*store, id, &expected).await;

    // A lower NUM completes a task.
    settle(&*store, &[completed(&lowered, "w")]).await;
    lower(&*store, &lowered).await;
    expected.push(ended(&lowered, Completed));
    check_inbox(&*store, id, &expected).await;

    // A task that is sent again has not ended, and ends again.
    let retried = store
        .retry_with_acts(&[dead.task.id], NOW + 50, "ops", "retry task")
        .await
        .unwrap();
    assert_eq!(retried.len(), 1);
    expected.retain(|happening| *happening != ended(&dead, Dead));
    check_inbox(&*store, id, &expected).await;
    settle(&*store, &[completed(&dead, "w")]).await;
    expected.push(ended(&dead, Completed));
    check_inbox(&*store, id, &expected).await;

    let page = store.inbox(None, &[], 100).await.unwrap();
    let of_done = |row: &&InboxRow| row.happening == ended(&done, Completed);
    let at = page.rows.iter().find(of_done).map(|row| row.at_unix_ms);
    assert_eq!(at, Some(NOW + 10), "the time of the report");

    // What is consumed does not come back.
    let consume = Append {
        consumed: expected.clone(),
        ..one(id, 1)
    };
    appended(&*store, &consume).await;
    check_inbox(&*store, id, &[]).await;
    settle(&*store, &[completed(&done, "w"), died(&dead)]).await;
    check_inbox(&*store, id, &[]).await;
}

/// Compares all that is in inboxes with what came to this execution.
async fn check_inbox(store: &dyn Store, id: ExecutionId, expected: &[Happening]) {
    let mut found = inbox(store).await;
    found.sort_unstable();
    let mut expected: Vec<_> = expected.iter().map(|one| (id, *one)).collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

/// Lowers the replicas of a task to 1.
async fn lower(store: &dyn Store, row: &NewRow) {
    let num = Change::Update(Update {
        replicas: Some(1),
        priority: None,
    });
    let ids = [row.task.id];
    let wanted = store.want(&ids, &num, NOW + 40, &[]).await.unwrap();
    let [Wanted::Kept(kept)] = &wanted[..] else {
        panic!("{wanted:?}");
    };
    let end = EndedChange {
        id: row.task.id,
        turn: Some(kept.turn),
        end: Decided::Updated {
            replicas: 1,
            priority: kept.task.priority,
        },
    };
    store.end_changes(&[end], NOW + 40).await.unwrap();
}

pub(crate) async fn a_step_stays_until_its_end_is_consumed<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let [read, unread] = ["read", "unread"].map(|path| step(id, path));
    appended(&*store, &first(id, &[read.clone(), unread.clone()])).await;
    settle(&*store, &[completed(&read, "w"), completed(&unread, "w")]).await;
    let consume = Append {
        consumed: vec![ended(&read, Completed)],
        ..one(id, 1)
    };
    appended(&*store, &consume).await;
    assert_eq!(store.remove_finished(Duration::ZERO, 100).await.unwrap(), 1);
    let states = store.states(&[read.task.id, unread.task.id]).await.unwrap();
    let left: Vec<TaskId> = states.iter().map(|state| state.id).collect();
    assert_eq!(left, [unread.task.id]);
    assert_eq!(inbox(&*store).await, [(id, ended(&unread, Completed))]);
    let consume = Append {
        consumed: vec![ended(&unread, Completed)],
        ..one(id, 2)
    };
    appended(&*store, &consume).await;
    assert_eq!(store.remove_finished(Duration::ZERO, 100).await.unwrap(), 1);
    assert_eq!(inbox(&*store).await, []);
}

pub(crate) async fn a_step_is_cancelled_with_its_append<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let [open, done] = ["open", "done"].map(|path| step(id, path));
    appended(&*store, &first(id, &[open.clone(), done.clone()])).await;
    settle(&*store, &[completed(&done, "w")]).await;
    let cancel = Append {
        cancelled: vec![open.task.id, done.task.id],
        ..last(id, 1)
    };
    appended(&*store, &cancel).await;
    let pages = KeptPages {
        kind: ChangeKind::Cancel,
        upto_unix_ms: NOW + 1,
        after: None,
        limit: 100,
    };
    let kept = store.kept_changes(&pages).await.unwrap().changes;
    let kept: Vec<TaskId> = kept.iter().map(|kept| kept.task.id).collect();
    assert_eq!(kept, [open.task.id]);
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 1);
}

pub(crate) async fn a_timer_is_due_until_an_append_disarms_it<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let [a, b] = [(); 2].map(|()| ExecutionId::new());
    let (a, b) = (a.min(b), a.max(b));
    for id in [a, b] {
        let execution = NewExecution {
            id,
            ..new("order", None)
        };
        assert_eq!(start(&*store, &execution).await, StartedExecution::New);
    }
    let arm = |execution, armed: &[(u64, i64)]| Append {
        armed: armed.to_vec(),
        ..first(execution, &[])
    };
    appended(&*store, &arm(a, &[(0, NOW + 100), (1, NOW + 200)])).await;
    appended(&*store, &arm(b, &[(0, NOW + 100), (1, NOW + 300)])).await;
    let timer = |execution, number, due| Timer {
        due_unix_ms: NOW + due,
        execution,
        number,
    };
    let due = async |at: i64, after: Option<&Timer>, limit: u32| {
        store.due_timers(NOW + at, after, limit).await.unwrap()
    };
    assert_eq!(due(99, None, 10).await, []);
    let both = [timer(a, 0, 100), timer(b, 0, 100)];
    assert_eq!(due(100, None, 10).await, both);
    assert_eq!(due(100, None, 10).await, both, "reading changes nothing");
    assert_eq!(due(200, None, 1).await, [timer(a, 0, 100)]);
    assert_eq!(
        due(200, Some(&timer(a, 0, 100)), 1).await,
        [timer(b, 0, 100)]
    );
    assert_eq!(
        due(200, Some(&timer(b, 0, 100)), 10).await,
        [timer(a, 1, 200)]
    );

    let fire = Append {
        disarmed: vec![0, 7],
        armed: vec![(2, NOW + 150)],
        ..one(a, 1)
    };
    appended(&*store, &fire).await;
    assert_eq!(append(&*store, &fire).await, Appended::Lost);
    assert_eq!(
        due(1000, None, 10).await,
        [
            timer(b, 0, 100),
            timer(a, 2, 150),
            timer(a, 1, 200),
            timer(b, 1, 300)
        ]
    );
    // What has ended waits for nothing.
    appended(&*store, &last(b, 1)).await;
    assert_eq!(
        due(1000, None, 10).await,
        [timer(a, 2, 150), timer(a, 1, 200)]
    );
    let counts = store.execution_counts().await.unwrap();
    assert_eq!(counts, ExecutionCounts { open: 1, timers: 2 });
}

pub(crate) async fn an_inbox_is_read_in_pages_until_it_is_consumed<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let mut expected = Vec::new();
    for n in 0..5 {
        let execution = NewExecution {
            created_unix_ms: NOW + n % 2,
            ..new("order", None)
        };
        start(&*store, &execution).await;
        expected.push((execution.created_unix_ms, execution.id));
    }
    expected.sort_unstable();
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let page = store.inbox(after.as_ref(), &[], 2).await.unwrap();
        found.extend(page.rows.iter().map(|row| (row.at_unix_ms, row.execution)));
        after = page.last;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(found, expected);
    let others = store.inbox(None, &[expected[0].1, expected[2].1], 2).await;
    let others = others.unwrap().rows.into_iter();
    let others: Vec<_> = others.map(|row| row.execution).collect();
    assert_eq!(others, [expected[1].1, expected[3].1]);

    let ids: Vec<ExecutionId> = expected.iter().map(|(_, id)| *id).collect();
    let [a, b, c, ..] = ids[..] else {
        unreachable!("there are five");
    };
    // Something is left to do, and a process may die before it does it.
    let more = Append {
        goes_on: true,
        ..first(a, &[])
    };
    appended(&*store, &more).await;
    let act = act("cancel execution");
    for _ in 0..2 {
        let status = store.cancel_execution(a, &act).await.unwrap();
        assert_eq!(status, Some(ExecutionStatus::Waiting));
    }
    appended(&*store, &last(b, 0)).await;
    appended(&*store, &first(c, &[])).await;
    store
        .wake_executions(&[b, c, ExecutionId::new()])
        .await
        .unwrap();
    let status = store.cancel_execution(b, &act).await.unwrap();
    assert_eq!(status, Some(ExecutionStatus::Completed));
    let unknown = ExecutionId::new();
    let status = store.cancel_execution(unknown, &act).await;
    assert_eq!(status.unwrap(), None);
    let of = |id: ExecutionId, found: &[(ExecutionId, Happening)]| {
        let found = found.iter().filter(|(execution, _)| *execution == id);
        found.map(|(_, happening)| *happening).collect::<Vec<_>>()
    };
    let found = inbox(&*store).await;
    assert_eq!(
        of(a, &found),
        [Happening::Cancel, Happening::GoOn],
        "a cancel comes first"
    );
    assert_eq!(of(b, &found), []);
    assert_eq!(of(c, &found), [Happening::LookAgain]);

    // An append that changes nothing else consumes, too.
    let ignored = Append {
        entries: vec![],
        consumed: vec![Happening::GoOn, Happening::Cancel],
        ..one(a, 1)
    };
    appended(&*store, &ignored).await;
    assert_eq!(of(a, &inbox(&*store).await), []);
}

pub(crate) async fn an_ended_execution_takes_nothing_more<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let step = step(id, "a");
    appended(&*store, &first(id, std::slice::from_ref(&step))).await;
    let end = Append {
        goes_on: true,
        summary: Some("output".into()),
        ..last(id, 1)
    };
    appended(&*store, &end).await;
    assert_eq!(append(&*store, &one(id, 2)).await, Appended::Lost);
    let execution = store.execution(id).await.unwrap().unwrap();
    assert_eq!(execution.listed.ended_unix_ms, NOW + 1);
    assert_eq!(execution.summary, "output");
    // Its steps may end later.
    settle(&*store, &[completed(&step, "w")]).await;
    let rows = "SELECT COUNT(*) FROM execution_inbox";
    assert_eq!(db.number(rows).await, 1);
    assert_eq!(inbox(&*store).await, []);
    assert_eq!(db.number(rows).await, 0, "nobody would consume it");
}

pub(crate) async fn executions_are_listed_newest_first<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    deploy(&*store, "refund").await;
    let mut ids = Vec::new();
    for n in 0..6 {
        let name = if n % 3 == 0 { "refund" } else { "order" };
        let id = started(&*store, name).await;
        if n % 2 == 0 {
            appended(&*store, &last(id, 0)).await;
        }
        ids.push(id);
    }
    let list = async |pages: ExecutionPages| {
        let found = store.executions(&pages).await.unwrap();
        let place = |id| ids.iter().position(|known| *known == id).unwrap();
        found.iter().map(|one| place(one.id)).collect::<Vec<_>>()
    };
    let all = ExecutionPages {
        limit: 100,
        ..ExecutionPages::default()
    };
    let of = |name: &str| Some(("shop".to_owned(), name.to_owned()));
    assert_eq!(list(all.clone()).await, [5, 4, 3, 2, 1, 0]);
    let page = ExecutionPages {
        limit: 2,
        after: Some(ids[4]),
        ..all.clone()
    };
    assert_eq!(list(page).await, [3, 2]);
    let orders = ExecutionPages {
        workflow: of("order"),
        ..all.clone()
    };
    assert_eq!(list(orders.clone()).await, [5, 4, 2, 1]);
    let completed = ExecutionPages {
        status: Some(ExecutionStatus::Completed),
        ..all.clone()
    };
    assert_eq!(list(completed.clone()).await, [4, 2, 0]);
    let both = ExecutionPages {
        status: Some(ExecutionStatus::Pending),
        ..orders
    };
    assert_eq!(list(both).await, [5, 1]);
    let created = |id: ExecutionId| {
        let [a, b, c, d, e, f, ..] = *id.as_bytes();
        i64::from_be_bytes([0, 0, a, b, c, d, e, f])
    };
    let long_ago = ExecutionPages {
        until_unix_ms: Some(created(ids[0])),
        ..all.clone()
    };
    assert_eq!(list(long_ago).await, [0; 0]);
    let since = ExecutionPages {
        since_unix_ms: Some(created(ids[0])),
        until_unix_ms: Some(created(ids[5]) + 1),
        ..completed
    };
    assert_eq!(list(since).await, [4, 2, 0]);

    let mut by_id = store.executions_by_id(&ids).await.unwrap();
    by_id.sort_unstable_by_key(|one| one.id);
    assert_eq!(by_id.iter().map(|one| one.id).collect::<Vec<_>>(), ids);
    // Those that have not ended, and whether anything but a step brings them on.
    let consumed = Append {
        consumed: vec![Happening::Start],
        ..one(ids[3], 0)
    };
    appended(&*store, &consumed).await;
    let open = store.open_executions(None, 2).await.unwrap();
    let quiet = OpenExecution::Quiet {
        id: ids[3],
        status: ExecutionStatus::Waiting,
        has_timer: false,
        seq: 1,
        summary: Bytes::new(),
    };
    assert_eq!(open, [OpenExecution::Due(ids[1]), quiet]);
    let next = store.open_executions(Some(ids[3]), 2).await.unwrap();
    assert_eq!(next.len(), 1);
}

pub(crate) async fn a_log_is_read_in_bounded_pages<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let id = started(&*store, "order").await;
    let large = Append {
        entries: vec![vec![1_u8; 7 << 20].into(); 3],
        ..first(id, &[])
    };
    appended(&*store, &large).await;
    let small = Append {
        entries: (0..300).map(|n| format!("{n}").into()).collect(),
        ..one(id, 3)
    };
    appended(&*store, &small).await;
    let page = async |after, limit| {
        let entries = store.entries(id, after, limit).await.unwrap();
        let bytes: usize = entries.iter().map(|entry| entry.entry.len()).sum();
        assert!(bytes <= PAGE_BYTES);
        let seq = |entry: Option<&store::StoredEntry>| entry.map(|entry| entry.seq);
        (seq(entries.first()), seq(entries.last()))
    };
    assert_eq!(page(0, 1000).await, (Some(1), Some(2)));
    assert_eq!(page(2, 1000).await, (Some(3), Some(303)));
    assert_eq!(page(3, 10).await, (Some(4), Some(13)));
    assert_eq!(page(303, 10).await, (None, None));
}

pub(crate) async fn a_removed_execution_leaves_nothing<D: Database>(db: &D) {
    let store = db.open().await;
    deploy(&*store, "order").await;
    let mut ids = Vec::new();
    for n in 0..4 {
        let execution = new("order", Some(&format!("order {n}")));
        start(&*store, &execution).await;
        let begin = Append {
            armed: vec![(0, NOW)],
            ..first(execution.id, &[step(execution.id, "a")])
        };
        appended(&*store, &begin).await;
        ids.push(execution.id);
    }
    // A long log, and an end that nobody consumed.
    let long = Append {
        entries: vec!["entry".into(); 12_000],
        at_unix_ms: NOW + 5,
        ..last(ids[0], 1)
    };
    appended(&*store, &long).await;
    appended(&*store, &last(ids[1], 1)).await;
    settle(&*store, &[completed(&step(ids[0], "a"), "w")]).await;
    appended(&*store, &last(ids[2], 1)).await;

    let delete = async |id, act: &Act| store.delete_execution(id, act).await.unwrap();
    let deleted = act("delete execution");
    assert_eq!(delete(ids[3], &deleted).await, Deleted::Running);
    for _ in 0..2 {
        assert_eq!(delete(ids[2], &deleted).await, Deleted::Yes);
    }
    assert_eq!(
        delete(ids[2], &act("delete execution")).await,
        Deleted::Unknown
    );
    let remove = async |age, limit| store.remove_ended_executions(age, limit).await.unwrap();
    let century = Duration::from_secs(100 * 365 * 86_400);
    assert_eq!(remove(century, 10).await, 0);
    assert_eq!(remove(Duration::ZERO, 1).await, 1, "the earliest first");
    assert!(store.execution(ids[1]).await.unwrap().is_none());
    assert_eq!(remove(Duration::ZERO, 10).await, 1);
    assert_eq!(remove(Duration::ZERO, 10).await, 0);
    for (table, left) in [
        ("executions", 1),
        ("execution_events", 1),
        ("execution_timers", 1),
        ("execution_inbox", 0),
    ] {
        let rows = db.number(&format!("SELECT COUNT(*) FROM {table}")).await;
        assert_eq!(rows, left, "{table}");
    }
    // The id is free again.
    let again = new("order", Some("order 0"));
    assert_eq!(start(&*store, &again).await, StartedExecution::New);
}
