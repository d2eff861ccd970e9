//! The crawl of `examples/crawl` over a real site, compared with a walk that knows nothing of
//! taskd.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{Router, extract::Request, middleware};
use serde_json::{Value, json};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient};
use tokio::sync::watch;
use tower_http::services::ServeDir;
use url::Url;

use crate::support::{
    daemon::Daemon, kafka, mariadb::MysqlDatabase, store_contract::Database, until,
};

#[path = "../../examples/crawl/src/main.rs"]
#[allow(dead_code, reason = "its main is not ours")]
pub(crate) mod example;

const CONFIG: &str = "[queues.crawl]\nmax_attempts = 100\nbackoff = [\"100ms\"]\n";
/// The leases are long enough that no page is handed out twice because the machine is slow.
const CALM: &str = "[queues.crawl]\nlease = \"2m\"\n";

/// URL → the site's answer and the links inside the site. A real site has links that lead nowhere.
type Graph = BTreeMap<String, (u16, BTreeSet<String>)>;

#[tokio::test(flavor = "multi_thread")]
async fn each_page_is_fetched_once() {
    let site = Site::serve().await;
    let mut daemon = Daemon::start(CALM, &[]).await;
    run(&site, &daemon, 4, 1).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_page_is_fetched_by_three_of_five_workers() {
    let site = Site::serve().await;
    let mut daemon = Daemon::start(CALM, &[]).await;
    run(&site, &daemon, 5, 3).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_while_taskd_and_redis_are_killed() {
    let site = Site::serve().await;
    let mut daemon = Daemon::start(CONFIG, &[]).await;
    let reference = site.walk().await;
    let pages = reference.len();
    // Shorter than the pauses of a killed taskd: what was on its way comes back soon.
    let args = example::Args {
        lease: Duration::from_secs(2),
        ..args(&site, &daemon, 5, 3)
    };
    let crawl = example::crawl(&args, |_| ());
    let kills = async {
        // At so many fetches, and each a bit later: the pause is the fault's moment, nothing waits
        // for it.
        let mut moments: Vec<usize> = (0..20).map(|_| random() % (2 * pages)).collect();
        moments.sort_unstable();
        let mut fetched = site.total.subscribe();
        for (number, moment) in moments.into_iter().enumerate() {
            fetched.wait_for(|total| *total >= moment).await.unwrap();
            tokio::time::sleep(Duration::from_millis((random() % 200) as u64)).await;
            if number % 2 == 0 {
                daemon.kill9_and_restart();
            } else {
                until("there is a redis-server to kill", async || {
                    daemon.kill9_redis()
                })
                .await;
            }
        }
        daemon.ready().await;
    };
    let both = async { tokio::join!(crawl, kills) };
    let (crawled, ()) = tokio::time::timeout(Duration::from_secs(240), Box::pin(both))
        .await
        .expect("the crawl ends");
    crawled.unwrap();
    check(&reference, &args).await;
    assert!(daemon.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_page_is_fetched_once_on_mariadb_and_kafka() {
    let site = Site::serve().await;
    let database = MysqlDatabase::create().await;
    let bus = format!("kafka://{}", kafka::shared().await);
    let prefix = format!("crawl-{}-", random());
    let mut daemon = Daemon::start(
        CALM,
        &[
            "--database-url",
            &database.url(),
            "--bus-url",
            &bus,
            "--topic-prefix",
            &prefix,
        ],
    )
    .await;
    run(&site, &daemon, 4, 1).await;
    assert!(daemon.stop().await.success());
    database.remove().await;
}

/// The site as a topology: a page is a task, and its links go back to the stage.
const SITE: &str = r#"
name = "site"
then = "walked"

[stage.page]
start = true
from = "page"
loop = true
lease = "2s"
max_attempts = 100
"#;

#[tokio::test(flavor = "multi_thread")]
async fn the_site_is_one_tree_that_ends_once_whatever_is_killed() {
    /// Between two kills.
    const PAUSE: Duration = Duration::from_secs(3);
    let site = Site::serve().await;
    let mut daemon = Daemon::start("", &[]).await;
    let reference = site.walk().await;
    let file = json!({ "text": SITE });
    let put = format!("{}/v1/topologies/site", daemon.http());
    let client = crate::support::http_client();
    let applied = client.put(put).json(&file).send().await.unwrap();
    assert!(applied.status().is_success(), "{applied:?}");
    let root = json!({"queue": "site.page", "key": site.url});
    let (_, answer) = daemon.post("/v1/tasks", &root).await;
    let tree = answer["results"][0]["tree"].as_str().unwrap().to_owned();
    let mut killed = Instant::now();
    let mut kills = 0;
    until("the tree has ended", async || {
        for task in daemon.try_lease("site.page", 10).await {
            let url = task["key"].as_str().unwrap();
            let (_, links) = of(&reference, url);
            // Without a result, which would be an output of a page without links.
            let outputs: Vec<Value> = links.iter().map(|link| json!({ "key": link })).collect();
            let page = json!({ "discovered": outputs });
            daemon.try_report(&task, page).await;
        }
        if killed.elapsed() > PAUSE {
            daemon.kill9_and_restart();
            daemon.ready().await;
            (killed, kills) = (Instant::now(), kills + 1);
        }
        let answer = daemon.try_get(&format!("/v1/trees/{tree}")).await;
        matches!(answer, Some((200, tree)) if tree["state"] != "OPEN")
    })
    .await;
    let (_, ended) = daemon.get(&format!("/v1/trees/{tree}")).await;
    let pages = json!(reference.len());
    assert_eq!(
        (&ended["state"], &ended["tasks"], &ended["completed"]),
        (&json!("DONE"), &pages, &pages),
        "{kills} kills: {ended}"
    );
    let tasks = reference
        .keys()
        .map(|url| json!({"queue": "site.page", "key": url}));
    let tasks: Vec<Value> = tasks.collect();
    for tasks in tasks.chunks(100) {
        let (_, known) = daemon.post("/v1/tasks", &json!(tasks)).await;
        let results = known["results"].as_array().unwrap();
        assert!(
            results.iter().all(|one| one["status"] == "DUPLICATE"),
            "{known}"
        );
    }
    let walked = daemon.lease_all("v", "walked", 1).await;
    assert_eq!(walked[0]["payload"]["tree"], json!(tree));
    daemon.complete("v", &walked).await;
    assert_eq!(
        daemon.lease("v", "walked", 1, "300ms").await,
        Vec::<Value>::new()
    );
    assert!(daemon.stop().await.success());
}

async fn run(site: &Site, daemon: &Daemon, workers: usize, replicas: u32) {
    let reference = site.walk().await;
    let args = args(site, daemon, workers, replicas);
    let mut seen: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let crawl = example::crawl(&args, |report| {
        assert_eq!(
            report.ended,
            taskd_client::Ended::Completed,
            "{}",
            report.url
        );
        assert_eq!(
            (report.page.status, &report.page.links),
            of(&reference, &report.url),
            "{}",
            report.url
        );
        assert!(
            seen.entry(report.url).or_default().insert(report.worker),
            "a worker was credited twice"
        );
    });
    tokio::time::timeout(Duration::from_secs(240), crawl)
        .await
        .expect("the crawl ends")
        .unwrap();
    assert!(
        seen.values()
            .all(|workers| workers.len() == replicas as usize)
    );
    assert!(seen.keys().eq(reference.keys()));
    let fetches = site.fetches.lock().unwrap().clone();
    assert!(fetches.keys().eq(reference.keys()));
    let often: Vec<_> = fetches
        .iter()
        .filter(|(_, times)| **times != replicas as usize)
        .collect();
    assert!(
        often.is_empty(),
        "fetched more or less often than {replicas} times: {often:?}"
    );
    check(&reference, &args).await;
}

fn args(site: &Site, daemon: &Daemon, workers: usize, replicas: u32) -> example::Args {
    let url = Url::parse(&site.url).unwrap();
    example::Args {
        urls: vec![url],
        grpc: vec![daemon.grpc()],
        http: daemon.http(),
        workers,
        name: "crawler".into(),
        replicas,
        queue: "crawl".into(),
        lease: Duration::from_secs(120),
    }
}

/// taskd kept the pages of `reference` and no others, each with the links of `reference` from
/// distinct workers.
async fn check(reference: &Graph, args: &example::Args) {
    let client = crate::support::http_client();
    let get = async |path: String| -> Value {
        let answer = client
            .get(format!("{}{path}", args.http))
            .send()
            .await
            .unwrap();
        answer.error_for_status().unwrap().json().await.unwrap()
    };
    let queues = get("/v1/queues".into()).await;
    assert_eq!(
        queues["queues"][0]["completed"],
        reference.len(),
        "{queues}"
    );
    assert_eq!(queues["queues"][0]["dead"], 0, "{queues}");

    // A page that is there already is answered with its id.
    let tasks = reference.keys().map(|url| pb::NewTask {
        queue: args.queue.clone(),
        key: url.clone().into(),
        ..Default::default()
    });
    let request = pb::InsertTasksRequest {
        tasks: tasks.collect(),
        ..Default::default()
    };
    let mut discovery = DiscoveryClient::connect(args.grpc[0].clone())
        .await
        .unwrap();
    let inserted = discovery
        .insert_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    for (url, known) in reference.keys().zip(inserted) {
        assert_eq!(
            known.status(),
            pb::InsertStatus::Duplicate,
            "{url} was lost"
        );
        let results = get(format!("/v1/tasks/{}/results", known.id)).await;
        let results: Vec<&Value> = results["results"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|one| one["surplus"] == false)
            .collect();
        let workers: BTreeSet<&str> = results
            .iter()
            .map(|one| one["worker"].as_str().unwrap())
            .collect();
        let wanted = args.replicas as usize;
        assert_eq!(
            (results.len(), workers.len()),
            (wanted, wanted),
            "{url}: {results:?}"
        );
        for result in results {
            let page: example::Page = serde_json::from_value(result["result"].clone()).unwrap();
            assert_eq!((page.status, &page.links), of(reference, url), "{url}");
        }
    }
}

fn of<'a>(reference: &'a Graph, url: &str) -> (u16, &'a BTreeSet<String>) {
    let (status, links) = &reference[url];
    (*status, links)
}

fn random() -> usize {
    usize::from_le_bytes(uuid::Uuid::new_v4().as_bytes()[8..].try_into().unwrap()) >> 8
}

/// Python's documentation, on loopback, with a count of what was fetched.
struct Site {
    url: String,
    fetches: Arc<Mutex<BTreeMap<String, usize>>>,
    total: Arc<watch::Sender<usize>>,
}

impl Site {
    async fn serve() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let root = format!("http://{}", listener.local_addr().unwrap());
        let (fetches, total) = (
            Arc::<Mutex<BTreeMap<_, _>>>::default(),
            Arc::new(watch::Sender::new(0)),
        );
        let count = {
            let (root, fetches, total) = (root.clone(), Arc::clone(&fetches), Arc::clone(&total));
            middleware::from_fn(move |request: Request, next: middleware::Next| {
                *fetches
                    .lock()
                    .unwrap()
                    .entry(format!("{root}{}", request.uri()))
                    .or_insert(0) += 1;
                total.send_modify(|total| *total += 1);
                next.run(request)
            })
        };
        let router = Router::new()
            .fallback_service(ServeDir::new(documentation()))
            .layer(count);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self {
            url: format!("{root}/"),
            fetches,
            total,
        }
    }

    /// Breadth first, one page after the other. Its fetches are not counted.
    async fn walk(&self) -> Graph {
        let (client, mut graph) = (crate::support::http_client(), Graph::new());
        let mut queue = VecDeque::from([self.url.clone()]);
        while let Some(url) = queue.pop_front() {
            if graph.contains_key(&url) {
                continue;
            }
            let answer = client.get(&url).send().await.unwrap();
            let status = answer.status().as_u16();
            let html = answer
                .headers()
                .get("content-type")
                .is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
            let text = String::from_utf8_lossy(&answer.bytes().await.unwrap()).into_owned();
            let links = if html {
                self.links(&url, &text)
            } else {
                BTreeSet::new()
            };
            queue.extend(links.iter().cloned());
            graph.insert(url, (status, links));
        }
        assert!(
            graph.len() > 500,
            "a site of {} pages is too small to be the documentation",
            graph.len()
        );
        self.fetches.lock().unwrap().clear();
        self.total.send_modify(|total| *total = 0);
        graph
    }

    fn links(&self, page: &str, text: &str) -> BTreeSet<String> {
        let page = Url::parse(page).unwrap();
        let text = without(&without(text, "<!--", "-->"), "<script", "</script>");
        let tags = text
            .split('<')
            .filter(|tag| tag.starts_with("a ") || tag.starts_with("a\n"));
        let hrefs = tags.filter_map(|tag| {
            tag.split('>')
                .next()?
                .split_once("href=\"")?
                .1
                .split('"')
                .next()
        });
        let links = hrefs.filter_map(|href| {
            page.join(&href.split('#').next()?.replace("&amp;", "&"))
                .ok()
        });
        links
            .map(String::from)
            .filter(|link| link.starts_with(&self.url))
            .collect()
    }
}

fn without(text: &str, from: &str, to: &str) -> String {
    let mut parts = text.split(from);
    let first = parts.next().unwrap_or_default().to_owned();
    first
        + &parts
            .filter_map(|part| part.split_once(to))
            .map(|(_, rest)| rest)
            .collect::<String>()
}

fn documentation() -> PathBuf {
    let folders = std::fs::read_dir("/usr/share/doc")
        .unwrap()
        .map(|entry| entry.unwrap().path().join("html"));
    let folder = folders
        .filter(|folder| folder.join("library/index.html").exists())
        .min();
    folder
        .expect("python3-doc is not installed: scripts/install-deps demo")
        .canonicalize()
        .unwrap()
}
