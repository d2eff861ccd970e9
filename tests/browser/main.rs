//! The dashboard in a browser: Debian's Chromium, driven over WebDriver, with the real binary.
//!
//! A script that fails or a page that breaks its own policy fails each of these tests.

// A test awaits what it spawns, or ends with it.
#![allow(clippy::disallowed_methods)]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod driver;
mod prefix;

use std::{
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{
    driver::{Browser, processes_of},
    prefix::PathProxy,
    support::{
        daemon::Daemon,
        mariadb::MariadbServer,
        redis::{Fsync, RedisServer},
        until,
    },
};

const HOSTILE: &str = "<img src=x onerror=alert(1)>\"><script>alert(2)</script>'";

async fn browser(daemon: &Daemon) -> Browser {
    Browser::start(&format!("{}/ui/", daemon.http())).await
}

/// A task of each kind, a letter, a worker, a bulk change. Returns the ids of a task with results,
/// of a dead task, and of the bulk change.
async fn fill(daemon: &Daemon) -> [String; 3] {
    let ids = daemon
        .insert(&[
            json!({"queue": "crawl.pages", "key": "results", "replicas": 3, "payload": {"n": 1}}),
            json!({"queue": "dead", "key": HOSTILE, "payload": HOSTILE, "headers": {"h": HOSTILE}}),
            json!({"queue": "crawl.images", "key": "later", "delay": "1h"}),
            json!({"queue": "crawl.images", "key": "waits", "sequence": "example.org"}),
            json!({"queue": "held", "key": "held"}),
        ])
        .await;
    for (worker, result) in [("w1", "a"), ("w2", "a"), ("w3", "b")] {
        let leased = daemon.lease_all(worker, "crawl.pages", 1).await;
        let item = json!({
            "id": leased[0]["id"],
            "lease_token": leased[0]["lease_token"],
            "result": {"sha": result},
        });
        let body = json!({"worker": worker, "completions": [item]});
        assert_eq!(daemon.post("/v1/tasks:complete", &body).await.0, 200);
    }
    let leased = daemon.lease_all("w1", "dead", 1).await;
    let item = json!({
        "id": leased[0]["id"],
        "lease_token": leased[0]["lease_token"],
        "reason": HOSTILE,
        "retry": false,
    });
    let body = json!({"worker": "w1", "rejections": [item]});
    assert_eq!(daemon.post("/v1/tasks:reject", &body).await.0, 200);
    daemon.lease_all("w4", "held", 1).await;
    until("the task is dead", async || {
        daemon.get(&format!("/v1/tasks/{}", ids[1])).await.1["status"] == "DEAD"
    })
    .await;
    let body = json!({"filter": {"queue": "crawl.images"}, "priority": "high", "yes": true});
    let (status, answer) = daemon.post("/v1/tasks:change", &body).await;
    assert_eq!(status, 200, "{answer}");
    let bulk = answer["bulk"]["id"].as_str().unwrap().to_owned();
    [ids[0].clone(), ids[1].clone(), bulk]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_page_is_accessible_in_both_themes_and_two_widths() {
    let daemon = Daemon::start("", &[]).await;
    let browser = browser(&daemon).await;
    browser.open("").await;
    browser.shows("#frame", "No queue has a task").await;
    browser.is_accessible().await;
    let [results, dead, bulk] = fill(&daemon).await;
    browser.shows("#q-held", "ok").await;
    until("the queue has charts", async || {
        browser.open("queues/held").await;
        browser.has("figure svg").await
    })
    .await;
    let images = daemon.get("/v1/tasks?queue=crawl.images&key=waits").await.1;
    let id = images["tasks"][0]["id"].as_str().unwrap();
    browser.open(&format!("tasks/{id}")).await;
    browser.shows(".facts", "example.org").await;
    let letters = daemon.get("/v1/dead-letters").await.1;
    let letter = letters["letters"][0]["id"].as_str().unwrap().to_owned();
    let paths = [
        String::new(),
        "?group=crawl".to_owned(),
        "?q=nothing".to_owned(),
        "queues/held".to_owned(),
        "queues/held/live".to_owned(),
        "tasks".to_owned(),
        "tasks?queue=dead&status=DEAD".to_owned(),
        format!("tasks/{results}"),
        format!("tasks/{dead}"),
        format!("tasks/{dead}/retry"),
        format!("tasks/{results}/num"),
        "dead".to_owned(),
        "dead?queue=dead".to_owned(),
        format!("dead/{letter}"),
        "dead/purge?queue=dead".to_owned(),
        "workers".to_owned(),
        "workers?queue=held".to_owned(),
        "processes".to_owned(),
        "books".to_owned(),
        "bulk".to_owned(),
        format!("bulk/{bulk}"),
        "bulk/new?what=cancel&queue=held".to_owned(),
        "acts".to_owned(),
        "find?q=nowhere".to_owned(),
        "queues/never".to_owned(),
    ];
    for (width, theme) in [
        (1280, "light"),
        (1280, "dark"),
        (390, "light"),
        (390, "dark"),
    ] {
        browser.look(width, theme).await;
        for path in &paths {
            browser.open(path).await;
            browser.is_accessible().await;
        }
    }
    browser.end().await;
}

/// Where the keyboard is, what is selected, and what is typed: all of it must stay.
const MARK: &str = "const link = document.querySelector('#q-q7 a'); link.focus(); window.marked = link; \
    const range = document.createRange(); range.selectNodeContents(document.querySelector('#q-q3 th')); \
    getSelection().removeAllRanges(); getSelection().addRange(range); \
    document.querySelector('#find').value = 'half a word'; \
    window.seen = [0, 0]; \
    const look = () => { window.seen[0] += 1; \
        if (document.activeElement !== window.marked || getSelection().toString() !== 'q3') window.seen[1] += 1; }; \
    new MutationObserver(look).observe(document.querySelector('#frame'), \
        {subtree: true, childList: true, characterData: true, attributes: true}); \
    return true;";

/// Inserts and completes tasks of all queues until it is told to stop. Counts them in `done`. Each
/// queue has one task before that.
async fn steady(daemon: &Daemon, queues: &[String], done: &AtomicUsize, stop: &AtomicBool) {
    /// Tasks of each queue in a round.
    const EACH: usize = 25;
    let mut round = 0;
    let mut left = queues.len();
    while !stop.load(Ordering::Relaxed) {
        let tasks: Vec<Value> = queues
            .iter()
            .flat_map(|queue| {
                (0..EACH).map(move |key| json!({"queue": queue, "key": format!("{round} {key}")}))
            })
            .collect();
        daemon.insert(&tasks).await;
        round += 1;
        left += tasks.len();
        while left > 0 {
            let body = json!({"worker": "w", "queues": queues, "max_tasks": 500, "wait": "5s"});
            let (status, answer) = daemon.post("/v1/tasks:get", &body).await;
            assert_eq!(status, 200, "{answer}");
            let leased = answer["tasks"].as_array().unwrap();
            let statuses = daemon.complete("w", leased).await;
            assert!(statuses.iter().all(|status| status == "OK"), "{statuses:?}");
            left -= leased.len();
            done.fetch_add(leased.len(), Ordering::Relaxed);
        }
    }
}

/// The rows of a page change for half a minute, by thousands of completed tasks, while its reader
/// does something else there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn focus_and_selection_stay_while_tasks_are_completed() {
    const FOR: Duration = Duration::from_secs(30);
    const TASKS: usize = 9_000;
    const CHANGES: usize = 10;
    let daemon = Daemon::start("", &[]).await;
    let queues: Vec<String> = (0..20).map(|number| format!("q{number}")).collect();
    let tasks: Vec<Value> = queues
        .iter()
        .map(|queue| json!({"queue": queue, "key": "first"}))
        .collect();
    daemon.insert(&tasks).await;
    let complete = async || {
        daemon
            .insert(&[json!({"queue": "q7", "key": "last"})])
            .await;
        let leased = daemon.lease_all("w", "q7", 1).await;
        daemon.complete("w", &leased).await;
    };
    let browser = browser(&daemon).await;
    browser.open("").await;
    browser.shows("#q-q19", "q19").await;
    browser.run(MARK, vec![]).await;
    let done = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let watch = async {
        let began = Instant::now();
        let mut shown = vec![browser.text("#q-q7 td:nth-of-type(8)").await];
        while began.elapsed() < FOR
            || done.load(Ordering::Relaxed) < TASKS
            || shown.len() <= CHANGES
        {
            until("the row changes", async || {
                browser.text("#q-q7 td:nth-of-type(8)").await != *shown.last().unwrap()
            })
            .await;
            shown.push(browser.text("#q-q7 td:nth-of-type(8)").await);
            let script = "return [document.activeElement === window.marked, getSelection().toString(), \
                document.querySelector('#find').value, window.seen];";
            let kept = browser.run(script, vec![]).await;
            let [changes, lost] = [0, 1].map(|at| kept[3][at].as_u64().unwrap());
            let kept = [&kept[0], &kept[1], &kept[2]];
            assert_eq!(kept, [&json!(true), &json!("q3"), &json!("half a word")]);
            assert!(
                changes > 0 && lost == 0,
                "lost at {lost} of {changes} changes"
            );
        }
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(watch, steady(&daemon, &queues, &done, &stop));
    until("SQL has all of them", async || {
        daemon.unfinished("q7").await == 0
    })
    .await;

    // A reader pauses, and nothing changes until it goes on.
    let completed = daemon.queue("q7").await["completed"].as_u64().unwrap();
    until("the page shows it", async || {
        let shown = browser.text("#q-q7 td:nth-of-type(8)").await;
        shown.replace(',', "") == completed.to_string()
    })
    .await;
    browser.click("#fresh button").await;
    browser.shows("#fresh", "paused").await;
    let before = browser.text("#q-q7").await;
    let paused = browser.client.window().await.unwrap();
    browser.window().await;
    browser.open("").await;
    complete().await;
    until("another viewer sees the change", async || {
        let shown = browser.text("#q-q7 td:nth-of-type(8)").await;
        shown.replace(',', "") == (completed + 1).to_string()
    })
    .await;
    browser.no_fault().await;
    browser.client.close_window().await.unwrap();
    browser.client.switch_to_window(paused).await.unwrap();
    assert_eq!(browser.text("#q-q7").await, before);
    browser.click("#fresh button").await;
    until("the page goes on", async || {
        browser.text("#q-q7").await != before
    })
    .await;
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_change_goes_on_after_taskd_was_killed() {
    let mut daemon = Daemon::start("", &[]).await;
    let tasks: Vec<Value> = (0..300)
        .map(|key| json!({"queue": "q", "key": key.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    let browser = browser(&daemon).await;
    browser.open("tasks?queue=q&status=UNFINISHED").await;
    browser.click("a[href*='what=cancel']").await;
    browser.shows("h1", "Cancel many tasks").await;
    let is_disabled = "return document.querySelector('form.form button').disabled;";
    browser.write("#typed", "30").await;
    assert_eq!(browser.run(is_disabled, vec![]).await, true);
    browser.write("#typed", "0").await;
    assert_eq!(browser.run(is_disabled, vec![]).await, false);
    // So that it is not done before taskd is killed: the tasks wait in Redis.
    assert!(daemon.signal_redis(Signal::SIGSTOP));
    browser.click("form.form button").await;
    browser.shows("#frame", "RUNNING").await;
    browser.shows("#fresh", "live").await;
    daemon.kill9();
    browser.shows("#fresh", "lost").await;
    assert!(daemon.signal_redis(Signal::SIGCONT));
    daemon.start_again();
    daemon.ready().await;
    browser.shows("#frame", "DONE").await;
    browser.shows("#fresh", "live").await;
    browser.shows(".says", "300 tasks changed").await;
    let cancelled = daemon.get("/v1/queues/q").await.1;
    assert_eq!(cancelled["cancelled"], 300, "{cancelled}");
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_windows_are_live_at_once() {
    let daemon = Daemon::start("", &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "0"})]).await;
    let browser = browser(&daemon).await;
    browser.open("").await;
    for _ in 1..10 {
        browser.window().await;
        browser.open("").await;
        browser.shows("#q-q", "q").await;
    }
    daemon.insert(&[json!({"queue": "late", "key": "1"})]).await;
    let windows = browser.client.windows().await.unwrap();
    assert_eq!(windows.len(), 10);
    for window in windows {
        browser.client.switch_to_window(window).await.unwrap();
        let hidden = browser.run("return document.hidden;", vec![]).await;
        assert_eq!(hidden, false, "a hidden page asks nothing");
        browser.shows("#q-late", "late").await;
        browser.shows("#fresh", "live").await;
        browser.no_fault().await;
    }
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_and_forms_work_below_the_path_of_a_proxy() {
    let daemon = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(["token", "create", "ops", "--roles", "admin,insert"])
        .args(daemon.database())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let token = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    until("the queue has a task", async || {
        let body = json!([{"queue": "q", "key": "1"}]);
        let request = support::http_client()
            .post(format!("{}/v1/tasks", daemon.http()))
            .bearer_auth(&token)
            .json(&body);
        request.send().await.unwrap().status() == 200
    })
    .await;
    let proxy = PathProxy::start("/ops/taskd", &daemon.http()).await;
    let browser = Browser::start(&format!("{}/ops/taskd/ui/", proxy.url())).await;
    browser.open("queues/q").await;
    browser.shows("h1", "Log in").await;
    browser.is_accessible().await;
    browser.write("input[name=token]", &token).await;
    browser.click("main button").await;
    browser.shows("h1", "q").await;
    assert_eq!(browser.path().await, "/ops/taskd/ui/queues/q");
    browser.click(".title button").await;
    browser.shows(".did", "paused").await;
    browser.shows("#fresh", "live").await;
    browser.click(".title button").await;
    browser.shows(".did", "goes on").await;
    browser.click("nav a").await;
    browser.shows("#q-q", "q").await;
    assert_eq!(browser.path().await, "/ops/taskd/ui/");
    // Commands name the address that the browser uses.
    browser.open("workers").await;
    let address = format!("--url {}/ops/taskd hello", proxy.url());
    browser.shows("#frame pre", &address).await;
    browser.open("").await;
    browser.shows("#q-q", "q").await;
    // The API does not get the cookie.
    let script = "const done = arguments[arguments.length - 1]; \
        fetch('../v1/queues').then((answer) => done(answer.status));";
    let status = browser.client.execute_async(script, vec![]).await.unwrap();
    assert_eq!(status, 401);
    browser.click("header form[method=post] button").await;
    browser.shows("h1", "Log in").await;
    browser.open("tasks").await;
    browser.shows("h1", "Log in").await;
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_says_that_redis_is_away_and_goes_on() {
    let mut redis = RedisServer::start(Fsync::Always);
    let daemon = Daemon::start("", &["--redis-url", &redis.url()]).await;
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    let browser = browser(&daemon).await;
    browser.open("").await;
    browser.shows("#q-q", "ok").await;
    redis.kill9();
    browser.shows(".banner", "cannot be read").await;
    browser.is_accessible().await;
    assert!(
        browser.text("#q-q").await.contains('q'),
        "the old numbers stay"
    );
    browser.open("queues/q").await;
    browser.shows(".banner", "cannot be read").await;
    browser.shows("h1", "q").await;
    browser.open("").await;
    redis.restart();
    until("the numbers are read again", async || {
        !browser.has(".banner.bad").await && browser.has("#q-q").await
    })
    .await;
    browser.shows("#fresh", "live").await;
    browser.end().await;
}

/// What comes from Redis alone goes on while the database is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_says_that_the_database_is_away_and_goes_on() {
    let database = MariadbServer::start(&[]);
    let daemon = Daemon::start("", &["--database-url", database.url()]).await;
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    daemon.lease_all("w", "q", 1).await;
    let browser = browser(&daemon).await;
    browser.open("").await;
    browser.shows("#q-q", "ok").await;
    browser.open("workers").await;
    browser.shows("#frame", "working").await;
    browser.open("").await;
    browser.shows("#q-q", "ok").await;
    database.kill9();
    browser.shows(".banner", "cannot be read").await;
    browser.is_accessible().await;
    until("the numbers of SQL are grey", async || {
        browser.has("#q-q td.old").await
    })
    .await;
    assert!(
        !browser.has("#q-q td:nth-child(4).old").await,
        "the leases are Redis's, which answers"
    );
    assert!(!browser.has("#alerts:empty").await, "it is announced");
    assert!(
        browser.text("#q-q").await.contains('q'),
        "the old numbers stay"
    );
    let status = async |path: &str| {
        let url = format!("{}/ui/{path}", daemon.http());
        let answer = support::http_client().get(url).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let pages = ["tasks", "tasks?queue=q", "dead"].map(status);
    for (status, page) in futures::future::join_all(pages).await {
        assert!(
            status == 503 && page.contains("A server does not answer"),
            "{status} {page}"
        );
    }
    for (path, row) in [("workers", "w"), ("processes", "watchdog")] {
        browser.open(path).await;
        browser.shows("#frame tbody", row).await;
        browser.shows("#fresh", "live").await;
        assert!(!browser.has("#frame.old").await, "{path} has old numbers");
    }
    browser.open("").await;
    browser.shows("#q-q", "q").await;
    database.start_again();
    until("the numbers are read again", async || {
        !browser.has(".banner.bad").await && browser.has("#q-q").await
    })
    .await;
    browser.shows("#fresh", "live").await;
    until("tasks are listed again", async || {
        status("tasks").await.0 == 200
    })
    .await;
    browser.end().await;
}

/// Only started by the test below, which kills it.
#[tokio::test]
#[ignore = "waits to be killed"]
async fn a_browser_that_waits() {
    let browser = Browser::start("about:blank#").await;
    println!("profile {}", browser.profile().display());
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_suite_that_is_killed_leaves_no_browser() {
    let mut suite = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_browser_that_waits",
            "--ignored",
            "--nocapture",
        ])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(suite.stdout.take().unwrap()).lines();
    let profile = loop {
        let line = lines.next_line().await.unwrap().expect("it has a profile");
        if let Some((_, profile)) = line.split_once("profile ") {
            break PathBuf::from(profile);
        }
    };
    assert!(processes_of(&profile) > 0);
    suite.kill().await.unwrap();
    until("its browser has ended", async || {
        processes_of(&profile) == 0
    })
    .await;
    std::fs::remove_dir_all(&profile).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_tab_shows_events_as_text() {
    let daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "first"})])
        .await;
    let browser = browser(&daemon).await;
    browser.open("queues/q").await;
    browser.click("a[href='q/live']").await;
    browser.shows("#stream", "live").await;
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": HOSTILE})])
        .await;
    browser.shows("tbody", HOSTILE).await;
    assert!(!browser.has("tbody img").await);
    let link = format!("tbody a[href$='tasks/{}']", ids[0]);
    assert!(browser.has(&link).await);
    browser.click("#stream-pause").await;
    browser.shows("#stream", "paused").await;
    daemon
        .insert(&[json!({"queue": "q", "key": "unheard"})])
        .await;
    browser.click("#stream-pause").await;
    browser.shows("#stream", "live").await;
    daemon
        .insert(&[json!({"queue": "q", "key": "heard"})])
        .await;
    browser.shows("tbody", "heard").await;
    browser
        .shows("tbody", "Events in between are not shown")
        .await;
    assert!(!browser.text("tbody").await.contains("unheard"));
    browser.is_accessible().await;
    browser.end().await;
}
