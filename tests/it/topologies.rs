//! Topologies on a running taskd: outputs become tasks of the next stages, whatever is killed.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use serde_json::{Value, json};
use taskd::{
    model::{Act, TopologyName},
    pipelines::admission::KnownTopologies,
    store::{Leaving, StoredTopology},
    wire::pb::{self, discovery_client::DiscoveryClient},
};
use tonic::Code;

use crate::support::{daemon::Daemon, sqlite::SqliteFile, store_contract::Database as _, until};

const CRAWL: &str = r#"
name = "crawl"
then = "reports"

[stage.fetch]
start = true
from = "parse.link"
loop = true
lease = "3s"
max_attempts = 9

[stage.parse]
from = "fetch"
ports = ["page", "link"]

[stage.index]
from = [{ stage = "parse.page", match = { "/lang" = "en" } }]
"#;

/// Runs a command of taskd. Returns its exit code and what it printed.
fn run(daemon: Option<&Daemon>, folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.args(args).current_dir(folder);
    if let Some(daemon) = daemon {
        command.args(["--server", &daemon.http()]);
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// Applies a file, and returns the exit code and stderr.
fn apply(daemon: &Daemon, text: &str) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("t.toml"), text).unwrap();
    let args = ["topology", "apply", "t.toml"];
    let (code, _, stderr) = run(Some(daemon), folder.path(), &args);
    (code, stderr)
}

/// What a page of a made-up site has: itself, two pages of the next level, and its parent.
fn outputs(url: &str) -> Value {
    let lang = if url.ends_with('b') { "de" } else { "en" };
    let mut outputs = vec![
        json!({"port": "page", "payload": {"url": url, "lang": lang}}),
        json!({"port": "link", "key": url.rsplit_once('/').map_or(url, |(up, _)| up)}),
    ];
    if url.matches('/').count() < 3 {
        outputs.push(json!({"port": "link", "key": format!("{url}/a")}));
        outputs.push(json!({"port": "link", "key": format!("{url}/b")}));
    }
    json!({"discovered": outputs})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crawl_with_a_loop_ends_once_whatever_is_killed() {
    let mut daemon = Daemon::start("", &[]).await;
    assert_eq!(apply(&daemon, CRAWL), (0, String::new()));
    let root = json!({"queue": "crawl.fetch", "key": "root"});
    let (_, answer) = daemon.post("/v1/tasks", &root).await;
    let tree = answer["results"][0]["tree"].as_str().unwrap().to_owned();
    assert_eq!(answer["results"][0]["id"], json!(tree), "{answer}");

    let mut indexed = BTreeSet::new();
    let mut rounds = 0;
    until("the site is crawled", async || {
        rounds += 1;
        for task in daemon.try_lease("crawl.fetch", 10).await {
            // A plain result is one output.
            daemon
                .try_report(&task, json!({"result": {"url": task["key"]}}))
                .await;
        }
        for task in daemon.try_lease("crawl.parse", 10).await {
            let url = task["payload"]["url"].as_str().unwrap();
            daemon.try_report(&task, outputs(url)).await;
        }
        if rounds % 4 == 2 {
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
        for task in daemon.try_lease("crawl.index", 10).await {
            let answer = daemon.try_report(&task, json!({"result": "indexed"})).await;
            if answer.is_some_and(|answer| answer["status"] == "OK") {
                let url = task["payload"]["url"].as_str().unwrap().to_owned();
                assert!(indexed.insert(url), "{task} comes twice");
            }
        }
        let answer = daemon.try_get(&format!("/v1/trees/{tree}")).await;
        matches!(answer, Some((200, tree)) if tree["state"] == "DONE")
    })
    .await;
    // 15 pages, of which those that end with b are no English ones.
    let (_, ended) = daemon.get(&format!("/v1/trees/{tree}")).await;
    assert_eq!(
        (&ended["tasks"], &ended["completed"], &ended["epoch"]),
        (&json!(38), &json!(38), &json!(0)),
        "{ended}"
    );
    assert_eq!(indexed.len(), 8, "{indexed:?}");
    let reports = daemon.lease_all("w", "reports", 1).await;
    assert_eq!(reports[0]["payload"]["tree"], json!(tree));
    daemon.complete("w", &reports).await;
    let none = daemon.lease("w", "reports", 10, "300ms").await;
    assert!(none.is_empty(), "one task for the end: {none:?}");
    let (_, checked) = daemon.post("/v1/fsck", &json!({})).await;
    assert_eq!(checked["finds"], json!([]), "{checked}");
}

/// Two joins, one within the other.
const LANDS: &str = r#"
name = "geo"
then = "reports"

[stage.land]
start = true

[stage.town]
from = "land"
ports = ["street", "bare"]

[stage.street]
from = "town.street"
lease = "3s"
max_attempts = 9

[stage.town_map]
join = "town"
from = ["street", "town.bare"]

[stage.land_map]
join = "land"
from = "town_map"
"#;

/// What the worker of a stage of [`LANDS`] reports: a land has three towns, of which the first one has
/// no street and the others two, and the second street of a town sends nothing.
fn of_stage(stage: &str, task: &Value) -> Value {
    let output = |port: &str, payload: Value| json!({"port": port, "payload": payload});
    let outputs = match stage {
        "land" => (0..3).map(|town| output("out", json!(town))).collect(),
        "town" if task["payload"] == 0 => vec![output("bare", json!("bare"))],
        "town" => (0..2)
            .map(|street| output("street", json!(street)))
            .collect(),
        "street" if task["payload"] == 1 => vec![],
        "street" => vec![output("out", task["payload"].clone())],
        "town_map" => {
            let parts = task["payload"]["parts"].as_array().unwrap();
            let parts: Vec<&Value> = parts.iter().map(|part| &part["payload"]).collect();
            vec![output(
                "out",
                json!({"town": task["payload"]["fork"]["payload"], "parts": parts}),
            )]
        }
        _ => vec![],
    };
    json!({"discovered": outputs})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joins_have_all_parts_once_whatever_is_killed() {
    let mut daemon = Daemon::start("", &[]).await;
    assert_eq!(apply(&daemon, LANDS), (0, String::new()));
    let lands = ["a", "b"].map(|key| json!({"queue": "geo.land", "key": key}));
    let (_, answer) = daemon.post("/v1/tasks", &json!(lands)).await;
    let trees: Vec<String> = (0..2)
        .map(|land| answer["results"][land]["tree"].as_str().unwrap().to_owned())
        .collect();

    let mut maps: Vec<Value> = Vec::new();
    let mut rounds = 0;
    until("both lands are drawn", async || {
        rounds += 1;
        for stage in ["land", "town", "street", "town_map", "land_map"] {
            for task in daemon.try_lease(&format!("geo.{stage}"), 10).await {
                let answer = daemon.try_report(&task, of_stage(stage, &task)).await;
                let is_done = answer.is_some_and(|answer| answer["status"] == "OK");
                if is_done && stage == "land_map" {
                    maps.push(task);
                }
            }
            if rounds % 3 == 1 && ["town", "town_map"].contains(&stage) {
                daemon.kill9_and_restart();
                daemon.ready().await;
            }
        }
        let mut done = 0;
        for tree in &trees {
            let answer = daemon.try_get(&format!("/v1/trees/{tree}")).await;
            done += usize::from(matches!(answer, Some((200, tree)) if tree["state"] == "DONE"));
        }
        done == 2
    })
    .await;
    assert_eq!(maps.len(), 2, "one for each land: {maps:?}");
    for map in &maps {
        let payload = &map["payload"];
        assert_eq!(payload["missing"], json!([]), "{payload}");
        assert!(["a", "b"].contains(&payload["fork"]["key"].as_str().unwrap()));
        let parts = payload["parts"].as_array().unwrap();
        let mut towns: Vec<(i64, &Value)> = parts
            .iter()
            .map(|part| {
                assert_eq!(
                    (&part["stage"], &part["port"]),
                    (&json!("town_map"), &json!("out"))
                );
                let town = part["payload"]["town"].as_i64().unwrap();
                (town, &part["payload"]["parts"])
            })
            .collect();
        towns.sort_by_key(|(town, _)| *town);
        let expected = [(0, json!(["bare"])), (1, json!([0])), (2, json!([0]))];
        assert_eq!(
            towns,
            expected.each_ref().map(|(town, parts)| (*town, parts))
        );
    }
    for tree in &trees {
        let (_, ended) = daemon.get(&format!("/v1/trees/{tree}")).await;
        // A land, three towns, four streets, three maps of towns, and one of the land.
        let counts = ["tasks", "completed", "late", "joins", "epoch"].map(|name| &ended[name]);
        assert_eq!(
            counts,
            [&json!(12), &json!(12), &json!(0), &json!(0), &json!(0)],
            "{ended}"
        );
    }
    let (_, checked) = daemon.post("/v1/fsck", &json!({})).await;
    assert_eq!(checked["finds"], json!([]), "{checked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_that_goes_nowhere_is_invalid_and_its_task_goes_on() {
    let daemon = Daemon::start("", &[]).await;
    let root = |key: &str| json!({"queue": "crawl.parse", "key": key, "payload": {}});
    daemon.insert(&[root("a")]).await;
    let task = daemon.lease_all("w", "crawl.parse", 1).await.remove(0);
    let to_port = |port: &str| json!({"discovered": [{"port": port, "payload": {"lang": "en"}}]});
    let answer = daemon.try_report(&task, to_port("page")).await.unwrap();
    assert_eq!(answer["status"], "INVALID", "{answer}");
    let error = answer["error"].as_str().unwrap();
    assert!(error.contains("is no stage of a topology"), "{error}");

    assert_eq!(apply(&daemon, CRAWL), (0, String::new()));
    let answer = daemon.try_report(&task, to_port("lnk")).await.unwrap();
    assert_eq!(answer["status"], "INVALID", "{answer}");
    let error = answer["error"].as_str().unwrap();
    assert!(
        error.contains("has no port \"lnk\"; it has page, link"),
        "{error}"
    );
    // An insert is no output.
    let insert = json!({"queue": "crawl.parse", "key": "x", "port": "page"});
    let (_, answer) = daemon.post("/v1/tasks", &insert).await;
    assert_eq!(answer["results"][0]["status"], "REJECTED", "{answer}");
    // A task that names a queue leaves the topology, and equal outputs are two tasks.
    let page = json!({"port": "page", "payload": {"lang": "en"}});
    let leaves = json!({"discovered": [page, page, {"queue": "elsewhere", "key": "k"}]});
    let answer = daemon.try_report(&task, leaves).await.unwrap();
    assert_eq!(answer["status"], "OK", "{answer}");
    daemon.lease_all("w", "crawl.index", 2).await;
    daemon.lease_all("w", "elsewhere", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_applied_shown_changed_and_deleted() {
    let daemon = Daemon::start("[queues.\"crawl.parse\"]\nmax_attempts = 3\n", &[]).await;
    let folder = tempfile::tempdir().unwrap();
    let on = |args: &[&str]| run(Some(&daemon), folder.path(), args);
    assert_eq!(apply(&daemon, CRAWL), (0, String::new()));
    let (code, shown, _) = on(&["topology", "show", "crawl"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (code, &shown["version"], &shown["then"]),
        (0, &json!(1), &json!("reports"))
    );
    let stage = |name: &str| {
        let stages = shown["stages"].as_array().unwrap();
        stages.iter().find(|stage| stage["name"] == name).unwrap()
    };
    // What the file leaves out is the setting of the queue.
    assert_eq!(stage("fetch")["lease"], "3s");
    assert_eq!(stage("parse")["max_attempts"], 3);
    assert_eq!(stage("parse")["lease"], "30s");
    assert_eq!(stage("parse")["edges"][1]["to"], "index");
    let (_, text, _) = on(&["topology", "show", "crawl", "--text"]);
    assert_eq!(text, CRAWL);
    let (_, listed, _) = on(&["topology", "list"]);
    assert!(listed.contains("crawl"), "{listed}");

    // Stages leave only without unfinished tasks.
    daemon
        .insert(&[json!({"queue": "crawl.index", "key": "k"})])
        .await;
    let smaller = CRAWL.replace("ports = [\"page\", \"link\"]", "ports = [\"link\"]");
    let smaller = smaller.split("[stage.index]").next().unwrap();
    let (code, error) = apply(&daemon, smaller);
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("unfinished tasks: crawl.index"), "{error}");
    let (code, _, error) = on(&["topology", "delete", "crawl"]);
    assert!(code == 2 && error.contains("crawl.index"), "{code} {error}");
    let tasks = daemon.lease_all("w", "crawl.index", 1).await;
    daemon.complete("w", &tasks).await;
    until("the stage leaves", async || apply(&daemon, smaller).0 == 0).await;
    let (_, shown) = daemon.get("/v1/topologies/crawl").await;
    assert_eq!(shown["version"], 2, "{shown}");

    // All mistakes are named, and nothing has changed.
    let wrong = format!("{smaller}\n[stage.x]\nfrom = \"y\"\nlaese = \"1s\"\n");
    let (status, answer) = put(&daemon, "crawl", &wrong).await;
    let detail = answer["detail"].as_str().unwrap();
    assert_eq!(status, 400, "{answer}");
    assert!(
        detail.contains("no stage \"y\"") && detail.contains("\"laese\""),
        "{detail}"
    );
    let (status, answer) = put(&daemon, "other", CRAWL).await;
    assert_eq!(status, 400, "{answer}");
    let (code, stderr) = apply(&daemon, &wrong);
    assert_eq!((code, stderr.lines().count()), (1, 2), "{stderr}");
    assert!(
        stderr.contains("t.toml:18:8: there is no stage \"y\""),
        "{stderr}"
    );

    assert_eq!(on(&["topology", "delete", "crawl"]).0, 0);
    assert_eq!(on(&["topology", "show", "crawl"]).0, 1);
    let (_, acts) = daemon.get("/v1/acts").await;
    assert_eq!(acts["acts"][0]["what"], "delete topology", "{acts}");
    assert_eq!(acts["acts"][1]["what"], "apply topology", "{acts}");
}

/// The last stage publishes, and a subscription reads what it published.
const NEWS: &str = r#"
name = "site"

[stage.page]

[stage.news]
from = "page"
topic = "pages"
lease = "1s"
max_attempts = 100
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_publishes_each_task_once_whatever_is_killed() {
    const PAGES: usize = 30;
    let mut daemon = Daemon::start("", &[]).await;
    let (code, stderr) = apply(&daemon, NEWS);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("there is no topic \"pages\""), "{stderr}");
    let folder = tempfile::tempdir().unwrap();
    let on = |args: &[&str]| run(Some(&daemon), folder.path(), args).0;
    assert_eq!(on(&["topic", "put", "pages"]), 0);
    let read = ["subscription", "put", "read", "--topic", "pages"];
    assert_eq!(on(&read), 0);
    assert_eq!(apply(&daemon, NEWS), (0, String::new()));
    let (_, shown) = daemon.get("/v1/topologies/site").await;
    assert_eq!(shown["stages"][1]["topic"], "pages", "{shown}");

    // A header of taskd's, as tasks of feeds have them.
    let headers = json!({"taskd-feed": "f", "lang": "en"});
    let pages: Vec<Value> = (0..PAGES)
        .map(|page| json!({"queue": "site.page", "key": page.to_string()}))
        .collect();
    daemon.insert(&pages).await;
    let mut rounds = 0;
    until("all trees are done", async || {
        rounds += 1;
        for task in daemon.lease("w", "site.page", 5, "0s").await {
            let output = json!({"payload": {"page": task["key"]}, "headers": headers});
            daemon
                .try_report(&task, json!({ "discovered": [output] }))
                .await;
        }
        if rounds < 10 && rounds % 3 == 2 {
            daemon.kill9_and_restart();
            daemon.ready().await;
        }
        let done = daemon.try_get("/v1/trees?state=DONE&limit=100").await;
        done.is_some_and(|(_, done)| done["trees"].as_array().map(Vec::len) == Some(PAGES))
    })
    .await;
    let mut published = daemon.work("w", "read", PAGES).await;
    published.extend(daemon.drain("w", "read").await);
    let keys: BTreeSet<&String> = published.iter().collect();
    assert_eq!((keys.len(), published.len()), (PAGES, PAGES));
    let (_, topic) = daemon.get("/v1/topics/pages/records?limit=100").await;
    let records = topic["records"].as_array().unwrap();
    assert!(records.len() >= PAGES, "{topic}");
    let is_right = |record: &Value| {
        let attributes = &record["attributes"];
        record["value"]["page"].is_string()
            && (&attributes["lang"], &attributes["taskd-feed"]) == (&json!(["en"]), &Value::Null)
    };
    assert!(records.iter().all(is_right), "{}", records[0]);
    let (_, checked) = daemon.post("/v1/fsck", &json!({})).await;
    assert_eq!(checked["finds"], json!([]), "{checked}");

    let stats = |more: &[&str]| {
        let args = [&["topology", "stats", "site"], more].concat();
        run(Some(&daemon), folder.path(), &args)
    };
    let (_, shown, _) = stats(&["--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    for (stage, name) in ["page", "news"].into_iter().enumerate() {
        let stage = &shown["stages"][stage];
        assert_eq!(
            (&stage["stage"], &stage["completed"]),
            (&json!(name), &json!(PAGES))
        );
    }
    let (code, table, _) = stats(&[]);
    assert_eq!(code, 0, "{table}");
    assert!(table.lines().any(|line| line.contains("news")), "{table}");
}

/// T7: a slow stage loses nothing, because inserts are refused beyond the bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inserts_beyond_max_open_are_refused_until_trees_end() {
    const TREES: usize = 40;
    let daemon = Daemon::start("", &[]).await;
    let file = "name = \"slow\"\nmax_open = 10\n[stage.a]\n[stage.b]\nfrom = \"a\"\n";
    assert_eq!(apply(&daemon, file), (0, String::new()));
    let root = |n: usize| json!({"queue": "slow.a", "key": format!("k{n}")});

    // Of a batch, as many as there is room for.
    let batch: Value = (0..15).map(root).collect();
    let (_, answer) = daemon.post("/v1/tasks", &batch).await;
    let statuses: Vec<&str> = answer["results"]
        .as_array()
        .unwrap_or_else(|| panic!("{answer}"))
        .iter()
        .map(|result| result["status"].as_str().unwrap())
        .collect();
    let (stored, refused) = statuses.split_at(10);
    assert!(stored.iter().all(|status| *status == "CREATED"), "{answer}");
    assert!(
        refused.iter().all(|status| *status == "TRY_LATER"),
        "{answer}"
    );
    let said = answer["results"][10]["error"].as_str().unwrap();
    assert_eq!(said, "topology slow has 10 open trees, its max_open");
    // As a full queue answers.
    let (status, answer) = daemon.post("/v1/tasks", &root(10)).await;
    assert_eq!(status, 429, "{answer}");
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let task = pb::NewTask {
        queue: "slow.a".into(),
        key: "k10".into(),
        ..Default::default()
    };
    let request = pb::InsertTasksRequest {
        tasks: vec![task],
        ..Default::default()
    };
    let error = client.insert_tasks(request).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    // What opens no tree is not refused.
    let (status, answer) = daemon
        .post("/v1/tasks", &json!({"queue": "slow.b", "key": "b"}))
        .await;
    assert_eq!(status, 200, "{answer}");
    let (_, shown) = daemon.get("/v1/topologies/slow").await;
    assert_eq!(
        (&shown["max_open"], &shown["open"]),
        (&json!(10), &json!(10))
    );

    let mut next = 10;
    let mut most = 0;
    // A report that is not accepted is made again by who gets the task next.
    let mut done = BTreeSet::new();
    until("all trees have ended", async || {
        while next < TREES && daemon.post("/v1/tasks", &root(next)).await.0 == 200 {
            next += 1;
        }
        let (_, shown) = daemon.get("/v1/topologies/slow").await;
        most = most.max(shown["open"].as_u64().unwrap());
        for task in daemon.try_lease("slow.a", 10).await {
            daemon.try_report(&task, json!({"result": "once"})).await;
        }
        for task in daemon.lease("w", "slow.b", 3, "50ms").await {
            daemon.try_report(&task, json!({"result": "done"})).await;
            if task["key"] != "b" {
                done.insert(task["id"].to_string());
            }
        }
        done.len() == TREES
    })
    .await;
    assert_eq!(most, 10);
    until("all trees are settled", async || {
        let path = "/v1/trees?state=DONE&queue=slow.a&limit=100";
        let (_, ended) = daemon.get(path).await;
        ended["trees"].as_array().unwrap().len() == TREES
    })
    .await;
}

async fn put(daemon: &Daemon, name: &str, text: &str) -> (u16, Value) {
    let url = format!("{}/v1/topologies/{name}", daemon.http());
    let client = crate::support::http_client();
    let response = client.put(url).json(&json!({"text": text})).send().await;
    let response = response.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[test]
fn files_are_made_checked_and_drawn_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let on = |args: &[&str]| run(None, folder.path(), args);
    assert_eq!(on(&["topology", "new", "site"]).0, 0);
    let (code, _, error) = on(&["topology", "new", "site"]);
    assert!(
        code == 2 && error.contains("cannot make site.toml"),
        "{code} {error}"
    );
    let text = fs::read_to_string(folder.path().join("site.toml")).unwrap();
    assert_eq!(text.lines().count(), 6);
    let (code, said, _) = on(&["topology", "check", "site.toml"]);
    assert_eq!(
        (code, said.as_str()),
        (0, "topology site: 2 stages, 1 edges, no mistakes\n")
    );
    let (_, dot, _) = on(&["topology", "graph", "site.toml"]);
    assert!(dot.contains("\"read\" -> \"count\""), "{dot}");
    let (_, mermaid, _) = on(&["topology", "graph", "site.toml", "--format", "mermaid"]);
    assert!(mermaid.contains("s0 --> s1"), "{mermaid}");
    fs::write(
        folder.path().join("bad.toml"),
        "name = \"bad\"\n[stage.a]\ntopic = \"events\"\nx = 1\n",
    )
    .unwrap();
    let (code, _, error) = on(&["topology", "check", "bad.toml"]);
    assert_eq!((code, error.lines().count()), (1, 2), "{error}");
    assert!(
        error.contains("bad.toml:3:9: topic \"events\" is one of taskd's own"),
        "{error}"
    );
}

/// A crawl with a join, and tests of it.
const TESTED: &str = r#"
name = "crawl"

[stage.fetch]
start = true
from = "parse.link"
loop = true

[stage.parse]
from = "fetch"
ports = ["page", "link"]

[stage.index]
from = "parse.page"
[stage.screenshot]
from = [{ stage = "parse.page", match = { "/lang" = ["en", "de"] } }]
max_attempts = 2

[stage.page]
join = "parse"
from = ["index", "screenshot"]

[[test]]
name = "a page with one link"
input = [{ key = "http://a/", payload = { url = "http://a/" } }]
workers.fetch = [{ payload = { body = "…" } }]
workers.parse = [{ port = "page", payload = { lang = "en" } }, { port = "link", key = "http://a/b" }]
workers.screenshot = "fail"
expect.page.count = 2
expect.screenshot = { count = 2, dead = 2 }
expect.trees.failed = 1
"#;

#[test]
fn the_tests_of_a_file_run_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let test = |text: &str| {
        fs::write(folder.path().join("t.toml"), text).unwrap();
        let args = ["topology", "test", "t.toml", "--seeds", "5"];
        run(None, folder.path(), &args)
    };
    let (code, said, stderr) = test(TESTED);
    assert_eq!(
        (code, said.as_str()),
        (
            0,
            "ok    a page with one link: fetch.count 2, parse.count 2, index.count 2, screenshot.count 2, \
             page.count 2, screenshot.dead 2, trees.failed 1\n"
        ),
        "{stderr}"
    );
    let (code, said, _) = test(&TESTED.replace("page.count = 2", "page.count = 3"));
    assert_eq!(code, 1);
    assert!(
        said.starts_with("WRONG a page with one link: page.count is 2, expected 3"),
        "{said}"
    );
    let (code, said, _) = test(&TESTED.replace("port = \"link\", key", "port = \"lnk\", key"));
    assert_eq!(code, 1);
    assert!(
        said.contains("the worker of parse: discovered[1]: stage parse has no port"),
        "{said}"
    );
    // A loop whose outputs have other keys each time ends by a bound.
    let (code, said, _) = test(&TESTED.replace(", key = \"http://a/b\"", ""));
    assert_eq!(code, 1);
    assert!(said.contains("give the outputs of a loop keys"), "{said}");
    let (code, _, stderr) = test(&TESTED.replace("expect.page", "expect.pages"));
    assert_eq!(code, 1);
    assert!(stderr.contains("there is no stage \"pages\""), "{stderr}");
}

#[tokio::test]
async fn another_process_learns_a_file_from_the_database() {
    let file = SqliteFile::create().await;
    let mine = file.open().await;
    let other = file.open().await;
    let known = KnownTopologies::default();
    known.follow(&*other).await.unwrap();
    assert!(known.stages().is_empty());
    let topology = StoredTopology {
        name: TopologyName::new("crawl").unwrap(),
        version: 0,
        text: CRAWL.to_owned(),
        applied_by: "ops".to_owned(),
        applied_unix_ms: 0,
    };
    let act = Act::new("ops", "apply topology", "crawl");
    mine.keep_topology(&topology, &Leaving::default(), &act)
        .await
        .unwrap();
    known.follow(&*other).await.unwrap();
    let stages = known.stages();
    let (topology, place) = stages.of("crawl.parse").unwrap();
    assert_eq!(topology.stages[place].name, "parse");
    assert!(stages.of("crawl").is_none());
}

/// Runs a topology with an input, and returns the exit code, stdout and stderr.
fn run_topology(folder: &Path, text: &str, input: &str) -> (i32, String, String) {
    fs::write(folder.join("t.toml"), text).unwrap();
    fs::write(folder.join("input"), input).unwrap();
    let args = ["topology", "run", "t.toml", "--input", "input"];
    run(None, folder, &[&args[..], &["--exit-when-done"]].concat())
}

#[test]
fn a_run_works_until_all_trees_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"
name = "site"
[stage.fetch]
start = true
from = "parse.link"
loop = true
on_start = ["sh", "-c", "echo start fetch $TASKD_QUEUE >> log"]
on_stop = ["sh", "-c", "echo stop fetch >> log"]
command = ["sh", "-c", "printf 'body of %s' {key}"]
[stage.parse]
from = "fetch"
ports = ["page", "link"]
command = ["sh", "-c", """
read -r body
page=${body#body of }
echo '{"port": "page", "payload": {"page": "'"$page"'"}}' >&3
[ "$page" != a ] || printf '%s\\n' '{"port": "link", "key": "b"}' '{"port": "link", "key": "a"}' >&3
"""]
[stage.store]
from = "parse.page"
max_attempts = 1
on_stop = ["sh", "-c", "echo stop store >> log"]
command = ["sh", "-c", "cat >> pages; echo >> pages; ! grep -q bad pages"]
"#;
    let (code, stdout, stderr) = run_topology(folder.path(), text, "a\n");
    assert_eq!(code, 0, "{stderr}");
    let last = stdout.lines().last().unwrap();
    assert_eq!(
        last, r#"{"trees":{"done":1,"failed":0,"open":0}}"#,
        "{stdout}"
    );
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let mut pages: Vec<Value> = Vec::new();
    for page in read("pages").lines() {
        pages.push(serde_json::from_str::<Value>(page).unwrap()["page"].take());
    }
    pages.sort_by_key(Value::to_string);
    assert_eq!(pages, ["a", "b"], "{stdout}");
    let log = "start fetch site.fetch\nstop fetch\nstop store\n";
    assert_eq!(read("log"), log);

    // A tree that fails.
    let (code, stdout, stderr) = run_topology(folder.path(), text, "bad\n");
    assert_eq!(code, 3, "{stderr}");
    let last = stdout.lines().last().unwrap();
    assert_eq!(
        last, r#"{"trees":{"done":0,"failed":1,"open":0}}"#,
        "{stdout}"
    );
    assert!(stderr.contains("site.store"), "{stderr}");

    // README's.
    assert_eq!(
        run(None, folder.path(), &["topology", "new"]).0,
        0,
        "words.toml is made"
    );
    let words = fs::read_to_string(folder.path().join("words.toml")).unwrap();
    let readme = include_str!("../../README.md");
    assert!(readme.contains(&format!("```toml\n{words}```")), "{words}");
    let (code, stdout, stderr) = run_topology(folder.path(), &words, "t.toml\n");
    assert_eq!(code, 0, "{stderr}");
    let mut events = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let result = events.find(|event: &Value| event["event"] == "result");
    let result = result.expect("the last stage has a result");
    assert_eq!(result["queue"], "words.count", "{stdout}");
    let count: usize = result["result"].as_str().unwrap().trim().parse().unwrap();
    assert_eq!(count, words.split_whitespace().count(), "{stdout}");

    // Nothing is started without commands, and what cannot start is named.
    let (code, _, stderr) = run_topology(folder.path(), "name = \"t\"\n[stage.a]\n", "a\n");
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("no command for stages a"), "{stderr}");
    let nothing = "name = \"t\"\n[stage.a]\ncommand = [\"no-such-program\"]\n";
    let (code, _, stderr) = run_topology(folder.path(), nothing, "a\n");
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("no-such-program"), "{stderr}");
    let takes = "name = \"t\"\n[feed.f]\ntype = \"redis_list\"\nurl = \"redis://127.0.0.1:1\"\nkey = \"k\"\n\
         into = \"a\"\n[stage.a]\ncommand = [\"true\"]\n";
    let (code, _, stderr) = run_topology(folder.path(), takes, "a\n");
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("feeds t.f would take records"), "{stderr}");
}
