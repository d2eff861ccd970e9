//! Trees on a running taskd: they end exactly when nothing of them is left, whatever is killed.

use std::process::Command;

use serde_json::{Value, json};

use crate::{
    columns::access::{TOKENS, post, token},
    support::{daemon::Daemon, http_client, until},
};

/// Inserts a task that asks for a tree, and returns its answer.
async fn insert(daemon: &Daemon, task: Value) -> Value {
    let (status, answer) = daemon.post("/v1/tasks", &task).await;
    assert!(status == 200 || status == 422, "{status} {answer}");
    answer["results"][0].clone()
}

/// Begins a tree with the task of this key in queue `crawl`, and returns its id.
async fn begin(daemon: &Daemon, key: &str, tree: Value) -> String {
    let answer = insert(daemon, json!({"queue": "crawl", "key": key, "tree": tree})).await;
    assert_eq!(answer["status"], "CREATED", "{answer}");
    assert_eq!(
        answer["id"], answer["tree"],
        "a root has the id of its tree"
    );
    answer["tree"].as_str().unwrap().to_owned()
}

async fn tree(daemon: &Daemon, id: &str) -> Value {
    let (status, tree) = daemon.get(&format!("/v1/trees/{id}")).await;
    assert_eq!(status, 200, "{tree}");
    tree
}

async fn until_it_is(daemon: &Daemon, id: &str, state: &str) -> Value {
    until(&format!("the tree is {state}"), async || {
        // taskd may be starting again.
        let answer = daemon.try_get(&format!("/v1/trees/{id}")).await;
        matches!(answer, Some((200, tree)) if tree["state"] == state)
    })
    .await;
    tree(daemon, id).await
}

/// Completes tasks, each with what it discovers, and returns the statuses of the answers.
async fn complete(
    daemon: &Daemon,
    tasks: &[Value],
    discovers: impl Fn(&Value) -> Vec<Value>,
) -> Option<Vec<String>> {
    let completions: Vec<Value> = tasks
        .iter()
        .map(|task| {
            json!({
                "id": task["id"],
                "lease_token": task["lease_token"],
                "discovered": discovers(task),
            })
        })
        .collect();
    let body = json!({"worker": "w", "completions": completions});
    let (status, answer) = daemon.try_post("/v1/tasks:complete", &body).await?;
    if status != 200 {
        return None;
    }
    let results = answer["results"].as_array().unwrap();
    let statuses = results.iter().map(|result| result["status"].as_str());
    Some(statuses.map(|status| status.unwrap().to_owned()).collect())
}

/// What a page of a made-up site links to: two pages of the next level, and its own parent.
fn links(task: &Value, levels: usize) -> Vec<Value> {
    let key = task["key"].as_str().unwrap();
    let level = key.matches('/').count();
    let link = |key: String| json!({"queue": "crawl", "key": key});
    let mut links = vec![link(
        key.rsplit_once('/').map_or(key, |(up, _)| up).to_owned(),
    )];
    if level < levels {
        links.push(link(format!("{key}/a")));
        links.push(link(format!("{key}/b")));
    }
    links
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_is_done_when_all_that_came_out_of_its_root_is() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!({"then": "reports"})).await;
    let open = tree(&daemon, &id).await;
    assert_eq!((&open["state"], &open["open"]), (&json!("OPEN"), &json!(1)));
    assert_eq!(open["then"], "reports");
    assert_eq!(open["waits_for"][0]["id"], json!(id));
    let mut done = 0;
    until("the site is crawled", async || {
        let tasks = daemon.lease("w", "crawl", 10, "100ms").await;
        done += tasks.len();
        complete(&daemon, &tasks, |task| links(task, 4)).await;
        done == 31
    })
    .await;
    let ended = until_it_is(&daemon, &id, "DONE").await;
    assert_eq!(
        (&ended["tasks"], &ended["completed"], &ended["epoch"]),
        (&json!(31), &json!(31), &json!(0)),
        "{ended}"
    );
    assert_eq!(ended["queues"][0]["completed"], 31);
    let reports = daemon.lease_all("w", "reports", 1).await;
    let report = &reports[0]["payload"];
    assert_eq!(
        (&report["tree"], &report["state"], &report["completed"]),
        (&json!(id), &json!("DONE"), &json!(31))
    );
    daemon.complete("w", &reports).await;
    let none = daemon.lease("w", "reports", 10, "300ms").await;
    assert!(none.is_empty(), "one task for the end: {none:?}");

    // What ended takes nothing more; a duplicate names the tree that it is in.
    let late = insert(
        &daemon,
        json!({"queue": "crawl", "key": "late", "tree": id}),
    )
    .await;
    assert_eq!(late["status"], "REJECTED");
    assert!(
        late["error"].as_str().unwrap().contains("has ended"),
        "{late}"
    );
    // An insert whose answer was lost comes again.
    for key in ["root/a", "root"] {
        let again = json!({"queue": "crawl", "key": key, "tree": id});
        let again = insert(&daemon, again).await;
        assert_eq!(
            (&again["status"], &again["tree"]),
            (&json!("DUPLICATE"), &json!(id))
        );
    }
    let again = insert(
        &daemon,
        json!({"queue": "crawl", "key": "root/a", "tree": "new"}),
    )
    .await;
    assert_eq!(
        (&again["status"], &again["tree"]),
        (&json!("DUPLICATE"), &json!(id))
    );
    let (_, task) = daemon
        .get(&format!("/v1/tasks/{}", again["id"].as_str().unwrap()))
        .await;
    assert_eq!(task["tree"], json!(id), "{task}");
    let (_, of_tree) = daemon
        .get(&format!("/v1/tasks?tree={id}&status=completed&limit=100"))
        .await;
    assert_eq!(of_tree["tasks"].as_array().unwrap().len(), 31);
    let (_, trees) = daemon.get("/v1/trees?queue=crawl&state=done").await;
    assert_eq!(trees["trees"].as_array().unwrap().len(), 1, "{trees}");
    let (_, explained) = daemon.get(&format!("/v1/tasks:explain?id={id}")).await;
    let notes = explained["notes"].to_string();
    assert!(notes.contains(&format!("tree {id}: DONE")), "{explained}");
}

/// B2, B3, B5 to B8: taskd is killed at any step, and the tree ends once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_ends_once_whenever_taskd_is_killed() {
    const LEVELS: usize = 6;
    const TASKS: u64 = (1 << (LEVELS + 1)) - 1;
    let mut daemon =
        Daemon::start("[queues.crawl]\nlease = \"2s\"\nmax_attempts = 100\n", &[]).await;
    let id = begin(&daemon, "root", json!({"then": "reports"})).await;
    let is_done = async |daemon: &Daemon| {
        let answer = daemon.try_get(&format!("/v1/trees/{id}")).await;
        matches!(answer, Some((200, tree)) if tree["state"] != "OPEN")
    };
    let mut rounds = 0;
    while !is_done(&daemon).await {
        rounds += 1;
        assert!(rounds < 600, "{}", daemon.log());
        for _ in 0..3 {
            let tasks = daemon.lease("w", "crawl", 5, "100ms").await;
            // From time to time a worker keeps its tasks to itself until their leases expire.
            if rounds % 9 == 3 && tasks.len() > 1 {
                continue;
            }
            let answers = complete(&daemon, &tasks, |task| links(task, LEVELS)).await;
            // A report whose answer was lost comes again.
            if answers.is_none() || rounds % 5 == 0 {
                complete(&daemon, &tasks, |task| links(task, LEVELS)).await;
            }
        }
        if rounds % 4 == 0 {
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
    }
    let ended = tree(&daemon, &id).await;
    assert_eq!(
        (&ended["state"], &ended["tasks"], &ended["open"]),
        (&json!("DONE"), &json!(TASKS), &json!(0)),
        "{ended}"
    );
    assert_eq!(ended["epoch"], 0, "it has ended once");
    daemon.kill9_and_restart();
    daemon.ready().await;
    let reports = daemon.lease_all("w", "reports", 1).await;
    assert_eq!(reports[0]["payload"]["completed"], json!(TASKS));
    daemon.complete("w", &reports).await;
    let none = daemon.lease("w", "reports", 10, "300ms").await;
    assert!(none.is_empty(), "{none:?}");
    let (_, checked) = daemon.post("/v1/fsck", &json!({})).await;
    assert_eq!(checked["finds"], json!([]), "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_survives_an_emptied_redis() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!("new")).await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    complete(&daemon, &tasks, |task| links(task, 3)).await;
    until("the children are stored", async || {
        tree(&daemon, &id).await["tasks"] == 3
    })
    .await;
    let mut redis = daemon.redis().await;
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut redis)
        .await
        .expect("FLUSHALL");
    let mut done = 0;
    until("the rest is crawled", async || {
        let body = json!({"worker": "w", "queues": ["crawl"], "max_tasks": 10, "wait": "200ms"});
        let Some((200, answer)) = daemon.try_post("/v1/tasks:get", &body).await else {
            return false;
        };
        let tasks = answer["tasks"].as_array().unwrap().clone();
        done += tasks.len();
        complete(&daemon, &tasks, |task| links(task, 3)).await;
        let answer = daemon.try_get(&format!("/v1/trees/{id}")).await;
        matches!(answer, Some((200, tree)) if tree["state"] == "DONE")
    })
    .await;
    assert_eq!(tree(&daemon, &id).await["completed"], 15);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_task_fails_its_tree_and_is_sent_again() {
    let daemon = Daemon::start("[queues.crawl]\nmax_attempts = 1\nevents = true\n", &[]).await;
    let id = begin(&daemon, "root", json!({"then": "reports"})).await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    let rejection = json!({
        "id": tasks[0]["id"], "lease_token": tasks[0]["lease_token"], "reason": "no luck",
    });
    let body = json!({"worker": "w", "rejections": [rejection]});
    daemon.post("/v1/tasks:reject", &body).await;
    let failed = until_it_is(&daemon, &id, "FAILED").await;
    assert_eq!((&failed["dead"], &failed["epoch"]), (&json!(1), &json!(0)));
    let reports = daemon.lease_all("w", "reports", 1).await;
    assert_eq!(reports[0]["payload"]["state"], "FAILED");
    daemon.complete("w", &reports).await;

    let (status, bulk) = daemon
        .post(&format!("/v1/trees/{id}:retry"), &json!({}))
        .await;
    assert_eq!((status, &bulk["what"]), (200, &json!("retry")), "{bulk}");
    let open = until_it_is(&daemon, &id, "OPEN").await;
    assert_eq!((&open["dead"], &open["epoch"]), (&json!(0), &json!(1)));
    let tasks = daemon.lease_all("w2", "crawl", 1).await;
    let completions = json!([{"id": tasks[0]["id"], "lease_token": tasks[0]["lease_token"]}]);
    daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w2", "completions": completions}),
        )
        .await;
    let done = until_it_is(&daemon, &id, "DONE").await;
    assert_eq!(done["epoch"], 1);
    let reports = daemon.lease_all("w", "reports", 1).await;
    assert_eq!(reports[0]["payload"]["epoch"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_tree_waits_until_its_dead_task_is_purged() {
    let config = "grace = \"1s\"\nrepublish_after = \"1s\"\n[queues.crawl]\nmax_attempts = 1\n";
    let daemon = Daemon::start(config, &[]).await;
    let id = begin(&daemon, "root", json!({"on_dead": "hold"})).await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    let rejection = json!({
        "id": tasks[0]["id"], "lease_token": tasks[0]["lease_token"], "reason": "no luck",
    });
    let body = json!({"worker": "w", "rejections": [rejection]});
    daemon.post("/v1/tasks:reject", &body).await;
    until("the task holds its tree", async || {
        tree(&daemon, &id).await["held"] == 1
    })
    .await;
    let held = tree(&daemon, &id).await;
    assert_eq!((&held["state"], &held["open"]), (&json!("OPEN"), &json!(0)));
    assert_eq!(held["waits_for"][0]["status"], "DEAD");
    until("the letter may be purged", async || {
        let body = json!({"ids": [id]});
        let (_, purged) = daemon.post("/v1/dead-letters:purge", &body).await;
        purged["changed"] == 1
    })
    .await;
    until_it_is(&daemon, &id, "FAILED").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_tree_takes_nothing_more() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!("new")).await;
    for n in 0..40 {
        let key = format!("task {n}");
        let answer = insert(&daemon, json!({"queue": "crawl", "key": key, "tree": id})).await;
        assert_eq!(
            (&answer["status"], &answer["tree"]),
            (&json!("CREATED"), &json!(id))
        );
    }
    let held = daemon.lease_all("w", "crawl", 5).await;
    let (status, bulk) = daemon
        .post(&format!("/v1/trees/{id}:cancel"), &json!({}))
        .await;
    assert_eq!((status, &bulk["what"]), (200, &json!("cancel")), "{bulk}");
    // Workers that finish meanwhile discover more, which is dropped.
    complete(&daemon, &held, |task| links(task, 9)).await;
    let refused = insert(
        &daemon,
        json!({"queue": "crawl", "key": "late", "tree": id}),
    )
    .await;
    assert_eq!(refused["status"], "REJECTED", "{refused}");
    let ended = until_it_is(&daemon, &id, "FAILED").await;
    assert_eq!(ended["tasks"], 41, "{ended}");
    let (status, answer) = daemon
        .post(&format!("/v1/trees/{id}:cancel"), &json!({}))
        .await;
    assert_eq!(status, 409, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_ends_by_its_time_out() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!({"timeout": "1s"})).await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    complete(&daemon, &tasks, |task| links(task, 3)).await;
    let ended = until_it_is(&daemon, &id, "FAILED").await;
    assert_eq!((&ended["dead"], &ended["tasks"]), (&json!(2), &json!(3)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_wait_for_a_tree_and_watch_it() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!("new")).await;
    let (status, open) = daemon.get(&format!("/v1/trees/{id}?wait=100ms")).await;
    assert_eq!((status, &open["state"]), (200, &json!("OPEN")));
    let url = format!("{}/v1/trees/{id}", daemon.http());
    let waiting = tokio::spawn({
        let url = url.clone();
        async move {
            let answer = http_client().get(format!("{url}?wait=60s")).send().await;
            answer.unwrap().json::<Value>().await.unwrap()
        }
    });
    let watching = tokio::spawn(async move {
        let answer = http_client().get(format!("{url}/events")).send().await;
        // The stream ends with the tree.
        answer.unwrap().text().await.unwrap()
    });
    until("both wait", async || {
        let text = http_client()
            .get(format!("{}/metrics", daemon.http()))
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        text.contains("taskd_waiting_calls 2")
    })
    .await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    daemon.complete("w", &tasks).await;
    assert_eq!(waiting.await.unwrap()["state"], "DONE");
    let events = watching.await.unwrap();
    let states: Vec<&str> = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    assert!(states.first().unwrap().contains("\"OPEN\""), "{events}");
    assert!(states.last().unwrap().contains("\"DONE\""), "{events}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_insert_waits_for_the_end_of_its_tree() {
    let daemon = Daemon::start("", &[]).await;
    let task = json!({"queue": "crawl", "key": "root", "tree": "new"});
    let answer = async |query: &str, task: &Value| {
        let (status, answer) = daemon.post(&format!("/v1/tasks?{query}"), task).await;
        assert_eq!(status, 200, "{answer}");
        answer["results"][0].clone()
    };
    let open = answer("wait=100ms&wait_for=tree", &task).await;
    assert_eq!(open["status"], "CREATED", "{open}");
    assert_eq!(open["tree_state"], "OPEN", "{open}");
    // A task that names no tree is waited for itself.
    let plain = json!({"queue": "other", "key": "plain"});
    let alone = answer("wait=100ms&wait_for=tree", &plain).await;
    assert_eq!(alone["task_status"], "QUEUED", "{alone}");
    assert!(alone.get("tree_state").is_none(), "{alone}");
    for query in ["wait_for=tree", "wait=1s&wait_for=root"] {
        let (status, answer) = daemon.post(&format!("/v1/tasks?{query}"), &task).await;
        assert_eq!(status, 400, "{answer}");
    }
    // One waits for the ended root, the others for the tree, over both protocols.
    let url = format!("{}/v1/tasks?wait=60s", daemon.http());
    let waits = |url: String| {
        let task = task.clone();
        tokio::spawn(async move {
            let answer = http_client().post(url).json(&task).send().await.unwrap();
            answer.json::<Value>().await.unwrap()["results"][0].clone()
        })
    };
    let for_task = waits(url.clone());
    let for_tree = waits(format!("{url}&wait_for=tree"));
    let server = daemon.http();
    let command = tokio::task::spawn_blocking(move || {
        let mut insert = Command::new(env!("CARGO_BIN_EXE_taskd"));
        insert.args(["insert", "crawl", "--key", "root", "--tree", "new"]);
        insert.args(["--wait", "60s", "--wait-for", "tree", "--server", &server]);
        insert.output().unwrap()
    });
    until("all wait", async || {
        let metrics = http_client().get(format!("{}/metrics", daemon.http()));
        let text = metrics.send().await.unwrap().text().await.unwrap();
        text.contains("taskd_waiting_calls 3")
    })
    .await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    let id = open["tree"].as_str().unwrap();
    let reasons = tree(&daemon, id).await["waits_for"].clone();
    assert_eq!(reasons[0]["says"], "worker w holds it", "{reasons}");
    assert!(reasons[0]["next"].as_str().unwrap().contains("completes"));
    complete(&daemon, &tasks, |task| links(task, 1)).await;
    let for_task = for_task.await.unwrap();
    assert_eq!(for_task["task_status"], "COMPLETED", "{for_task}");
    assert!(for_task.get("tree_state").is_none(), "{for_task}");
    assert!(!for_tree.is_finished(), "two tasks are left");
    let tasks = daemon.lease_all("w", "crawl", 2).await;
    complete(&daemon, &tasks, |_| Vec::new()).await;
    let for_tree = for_tree.await.unwrap();
    assert_eq!(for_tree["tree_state"], "DONE", "{for_tree}");
    assert_eq!(for_tree["task_status"], "COMPLETED", "{for_tree}");
    let output = command.await.unwrap();
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{line}");
    assert_eq!(
        (&line["tree"], &line["tree_state"]),
        (&json!(id), &json!("DONE"))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_letter_that_is_sent_again_leaves_its_tree() {
    let daemon = Daemon::start("[queues.full]\nmax_unfinished = 1\n", &[]).await;
    daemon
        .insert(&[json!({"queue": "full", "key": "first"})])
        .await;
    let id = begin(&daemon, "root", json!({"timeout": "1h"})).await;
    let tasks = daemon.lease_all("w", "crawl", 1).await;
    let found = |key: &str| json!({"queue": "full", "key": key});
    complete(&daemon, &tasks, |_| vec![found("a"), found("b")]).await;
    let failed = until_it_is(&daemon, &id, "FAILED").await;
    assert_eq!(failed["letters"], 2, "{failed}");
    let letter = async |key: &str| {
        let (_, list) = daemon.get("/v1/dead-letters?queue=full").await;
        let mut letters = list["letters"].as_array().unwrap().iter();
        let letter = letters.find(|letter| letter["key"] == key);
        letter.unwrap_or_else(|| panic!("no letter of {key}: {list}"))["id"].clone()
    };
    let send_again = async |id: &Value| {
        until("the letter is sent again", async || {
            let body = json!({"ids": [id]});
            let (_, answer) = daemon.post("/v1/dead-letters:retry", &body).await;
            answer["changed"] == 1
        })
        .await;
    };
    let [first, second] = [letter("a").await, letter("b").await];
    assert_eq!(daemon.work("w", "full", 1).await, ["first"]);
    send_again(&first).await;
    let open = tree(&daemon, &id).await;
    assert_eq!(
        (&open["state"], &open["epoch"], &open["letters"]),
        (&json!("OPEN"), &json!(1), &json!(1))
    );
    assert_eq!(open["waits_for"][0]["deadline"], open["deadline"], "{open}");
    assert_eq!(daemon.work("w", "full", 1).await, ["a"]);
    until_it_is(&daemon, &id, "FAILED").await;
    // Somebody else inserts the other task, so its letter is a duplicate, which the filter knows.
    until("the other task is stored", async || {
        let (status, _) = daemon.post("/v1/tasks", &found("b")).await;
        status == 200
    })
    .await;
    assert_eq!(daemon.work("w", "full", 1).await, ["b"]);
    send_again(&second).await;
    let done = until_it_is(&daemon, &id, "DONE").await;
    assert_eq!(
        (&done["epoch"], &done["letters"], &done["tasks"]),
        (&json!(2), &json!(0), &json!(2))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_cancels_only_a_tree_that_it_reaches() {
    let daemon = Daemon::start(TOKENS, &[]).await;
    let all = token(&daemon, "all", &["--roles", "admin"]).await;
    let args = ["--roles", "admin", "--queues", "crawl"];
    let some = token(&daemon, "some", &args).await;
    let root = json!({"queue": "crawl", "key": "root", "tree": "new"});
    let (_, answer) = post(&daemon, "/v1/tasks", &all, root).await;
    let id = answer["results"][0]["tree"].clone();
    let other = json!({"queue": "other", "key": "child", "tree": id});
    let (status, answer) = post(&daemon, "/v1/tasks", &all, other).await;
    assert_eq!(status, 200, "{answer}");
    let child = answer["results"][0]["id"].clone();
    let cancel = format!("/v1/trees/{}:cancel", id.as_str().unwrap());
    let (status, answer) = post(&daemon, &cancel, &some, json!({})).await;
    assert_eq!(status, 403, "{answer}");
    let detail = answer["detail"].as_str().unwrap();
    assert!(detail.contains("does not reach all queues"), "{detail}");
    let (status, answer) = post(&daemon, "/v1/tasks:cancel", &all, json!({"ids": [child]})).await;
    assert_eq!(status, 200, "{answer}");
    until("only what the token reaches is left", async || {
        post(&daemon, &cancel, &some, json!({})).await.0 == 200
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistake_about_a_tree_is_named() {
    let daemon = Daemon::start("", &[]).await;
    let id = begin(&daemon, "root", json!("new")).await;
    for (tree, said) in [
        (json!("old"), "neither \"new\" nor the id of a tree"),
        (json!({"then": "a b"}), "queue \"a b\" contains ' '"),
        (json!({"timeout": "soon"}), "\"soon\" is not a duration"),
        (json!({"timeout": "0s"}), "must be 1ms to 3650days"),
        (json!({"on_dead": "next"}), "unknown value \"next\""),
        (json!({"queue": "q"}), "unknown field `queue`"),
        (
            json!("0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44"),
            "there is no tree 0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44",
        ),
    ] {
        let task = json!({"queue": "crawl", "key": "k", "tree": tree});
        let answer = insert(&daemon, task).await;
        assert_eq!(answer["status"], "REJECTED", "{tree}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(
            error.contains(said),
            "{tree}: {error:?} should say {said:?}"
        );
    }
    let (status, answer) = daemon.get("/v1/trees/none").await;
    assert_eq!(status, 400, "{answer}");
    let (status, answer) = daemon
        .get("/v1/trees/0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44")
        .await;
    assert_eq!(status, 404, "{answer}");
    let (status, answer) = daemon.post(&format!("/v1/trees/{id}"), &json!({})).await;
    assert_eq!(status, 404, "{answer}");
    let (status, answer) = daemon.get("/v1/trees?state=gone").await;
    assert_eq!(status, 400, "{answer}");
    assert_eq!(tree(&daemon, &id).await["tasks"], 1, "nothing was added");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_inserts_waits_and_cancels() {
    let daemon = Daemon::start("", &[]).await;
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
            .args(args)
            .args(["--server", &daemon.http()])
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap();
        (code, text(output.stdout), text(output.stderr))
    };
    let (code, stdout, stderr) = run(&["insert", "crawl", "--key", "root", "--tree", "new"]);
    assert_eq!(code, 0, "{stderr}");
    let (_, trees) = daemon.get("/v1/trees").await;
    let id = trees["trees"][0]["id"].as_str().unwrap().to_owned();
    assert!(stdout.contains(&id), "{stdout}");
    let (code, stdout, _) = run(&["tree", "list", "--state", "open"]);
    assert!(code == 0 && stdout.contains(&id), "{stdout}");
    let (code, stdout, _) = run(&["tree", "show", &id]);
    let shown: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &shown["open"]), (0, &json!(1)));
    let (code, _, stderr) = run(&["tree", "wait", &id, "--timeout", "100ms"]);
    assert_eq!(code, 1, "{stderr}");
    let (code, stdout, stderr) = run(&["tree", "cancel", &id, "--watch"]);
    assert_eq!(code, 0, "{stdout} {stderr}");
    let (code, stdout, _) = run(&["tree", "watch", &id]);
    assert!(code == 1 && stdout.contains("FAILED"), "{stdout}");
    let (code, _, stderr) = run(&["tree", "show", "0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44"]);
    assert!(code == 1 && stderr.contains("there is no tree"), "{stderr}");
    let (code, _, _) = run(&["tree", "retry", &id, "--watch"]);
    assert_eq!(code, 0, "it has no dead task");
    let (code, _, stderr) = run(&["insert", "crawl", "--key", "k", "--tree", "old"]);
    assert!(code == 2 && stderr.contains("neither \"new\""), "{stderr}");
}
