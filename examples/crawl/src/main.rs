//! Crawls sites: a task is a page, its key the page's URL, and what it discovers are the pages it
//! links to.
//!
//!     taskd --config taskd.toml &
//!     cargo run --release --package taskd-crawl -- --url http://127.0.0.1:8000/
//!
//! with, in taskd.toml,
//!
//!     pipelines = "all"
//!     [queues.default]
//!     limit_by = "host"
//!     limit_at_a_time = 2
//!     limit_pace = "5/1s"
//!
//! A worker is a function: it fetches the page of a task, and returns what it found. taskd sends
//! the tasks on a stream. It knows which URLs it has seen, tries again what failed, counts, and
//! keeps the limits of each host for all workers together; so there is none of it here. What a
//! worker learns of a host it reports: the Crawl-delay of robots.txt as a pace, and Retry-After as
//! a hold. Without limits it crawls as fast as it can.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::IsTerminal,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use clap::Parser;
use html5gum::{Token, Tokenizer};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, LOCATION, RETRY_AFTER},
};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use indicatif::{ProgressBar, ProgressDrawTarget};
use serde::{Deserialize, Serialize};
use taskd_client::{Client, Done, Ended, Event, Failure, InsertedAs, NewTask, Task, Worker};
use tokio::{sync::mpsc, task::JoinSet, time::timeout};
use url::Url;

/// The pages that a worker fetches at a time.
const PAGES: usize = 8;
/// The longest fetch of a page.
const FETCH_WITHIN: Duration = Duration::from_secs(20);
const MOST_REDIRECTS: usize = 10;

/// Crawls a site with taskd
#[derive(Parser, Clone)]
pub(crate) struct Args {
    /// Where to begin, any number of times; only what is in these folders of these hosts is crawled
    #[arg(long = "url", value_name = "URL", required = true)]
    pub(crate) urls: Vec<Url>,
    /// taskd's gRPC; if there are several processes, all of them, with commas between
    #[arg(long, value_delimiter = ',', default_value = "http://127.0.0.1:7601")]
    pub(crate) grpc: Vec<String>,
    /// taskd's HTTP
    #[arg(long, default_value = "http://127.0.0.1:7600")]
    pub(crate) http: String,
    #[arg(long, default_value_t = 4)]
    pub(crate) workers: usize,
    /// What the names of the workers begin with; each process that crawls needs another
    #[arg(long, default_value = "crawler")]
    pub(crate) name: String,
    /// How many different workers fetch each page
    #[arg(long, default_value_t = 1)]
    pub(crate) replicas: u32,
    /// By default one of this run: a key counts once in a queue, for ever
    #[arg(long, default_value_t = queue_of_this_run())]
    pub(crate) queue: String,
    /// How soon others get the pages of a worker that died
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    pub(crate) lease: Duration,
}

fn queue_of_this_run() -> String {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    format!("crawl-{}", now.as_secs())
}

/// The result of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Page {
    pub(crate) status: u16,
    pub(crate) title: String,
    pub(crate) bytes: usize,
    pub(crate) links: BTreeSet<String>,
}

/// A page, and what taskd said to it.
pub(crate) struct Report {
    pub(crate) worker: String,
    pub(crate) url: String,
    pub(crate) page: Page,
    pub(crate) ended: Ended,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let started = Instant::now();
    let progress = ProgressBar::new_spinner();
    if !std::io::stderr().is_terminal() {
        progress.set_draw_target(ProgressDrawTarget::hidden());
    }
    progress.enable_steady_tick(Duration::from_millis(100));
    let (mut pages, mut by_worker) = (BTreeMap::new(), BTreeMap::<String, usize>::new());
    crawl(&args, |report| {
        if report.ended == Ended::Completed {
            *by_worker.entry(report.worker).or_default() += 1;
            progress.set_message(format!("{} pages, {}", pages.len(), report.url));
            pages.insert(report.url, report.page);
        }
    })
    .await?;
    progress.finish_and_clear();

    let seconds = started.elapsed().as_secs_f64();
    let mut table = comfy_table::Table::new();
    table.set_header([
        "pages",
        "links",
        "bytes",
        "seconds",
        "pages/s",
        "results by worker",
    ]);
    let by_worker: Vec<String> = by_worker
        .iter()
        .map(|(worker, results)| format!("{worker} {results}"))
        .collect();
    table.add_row([
        pages.len().to_string(),
        pages
            .values()
            .map(|page| page.links.len())
            .sum::<usize>()
            .to_string(),
        pages
            .values()
            .map(|page| page.bytes)
            .sum::<usize>()
            .to_string(),
        format!("{seconds:.1}"),
        format!("{:.0}", pages.len() as f64 / seconds),
        by_worker.join("\n"),
    ]);
    println!("{table}");
    Ok(())
}

/// Puts the first pages in and works until nothing is left; `seen` is told of every page.
pub(crate) async fn crawl(args: &Args, mut seen: impl FnMut(Report)) -> anyhow::Result<()> {
    let client = Client::builder(args.grpc.clone()).build()?;
    let first = args.urls.iter().cloned().map(normalised);
    let first: Vec<_> = first.map(|url| new_task(args, url.as_str())).collect();
    let inserted = client.insert(first).await?;
    let refused = inserted
        .iter()
        .find(|answer| answer.status == InsertedAs::Rejected);
    anyhow::ensure!(
        refused.is_none(),
        "taskd did not take a first page: {refused:?}"
    );

    let (sender, mut reports) = mpsc::unbounded_channel();
    let site = Site::new();
    let (mut workers, mut stops) = (JoinSet::new(), Vec::new());
    for number in 1..=args.workers {
        let (name, args, site) = (
            format!("{}-{number}", args.name),
            args.clone(),
            site.clone(),
        );
        let crawler = Arc::new(Crawler {
            name,
            args,
            site,
            reports: sender.clone(),
            pages: Mutex::default(),
        });
        let worker = crawler.worker();
        stops.push(worker.stop());
        let client = client.clone();
        workers.spawn(async move {
            let work = move |task| {
                let crawler = crawler.clone();
                async move { crawler.work(task).await }
            };
            worker.run(&client, work).await
        });
    }
    drop(sender);
    let mut done = std::pin::pin!(all_done(args));
    loop {
        tokio::select! {
            Some(report) = reports.recv() => seen(report),
            Some(ended) = workers.join_next() => {
                ended??;
                anyhow::bail!("a worker ended by itself");
            }
            done = &mut done => break done?,
        }
    }
    stops.iter().for_each(taskd_client::Stop::drain);
    while let Some(report) = reports.recv().await {
        seen(report);
    }
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    Ok(())
}

struct Crawler {
    name: String,
    args: Args,
    site: Site,
    reports: mpsc::UnboundedSender<Report>,
    /// The pages whose completion taskd has not answered, by the ids of their tasks.
    pages: Mutex<HashMap<String, Page>>,
}

impl Crawler {
    fn worker(self: &Arc<Self>) -> Worker {
        let crawler = self.clone();
        let worker = Worker::new(&self.name, [&self.args.queue])
            .concurrency(PAGES)
            .lease(self.args.lease);
        worker.on_event(move |event| {
            let Event::Ended { task, ended, .. } = event else {
                return;
            };
            let page = crawler
                .pages
                .lock()
                .expect("nothing panics with it")
                .remove(task.id());
            if let Some(page) = page {
                let (worker, url) = (crawler.name.clone(), task.key().into_owned());
                // Whoever crawls may have heard enough.
                crawler
                    .reports
                    .send(Report {
                        worker,
                        url,
                        page,
                        ended,
                    })
                    .ok();
            }
        })
    }

    async fn work(&self, task: Task<()>) -> Result<Done, Failure> {
        let url = Url::parse(&task.key())?;
        let mut delay = None;
        // Without limits there is nobody who keeps a delay.
        if !task.limit_key().is_empty() {
            let Some(known) = self.site.delay_of(&url) else {
                let answer = self.get(url.join("/robots.txt")?, &task).await?;
                // It was a request of its host, so that the page comes with another start.
                let again = Failure::new("robots.txt comes first").not_started();
                return Err(match self.site.learn_delay(&url, &answer) {
                    Some(delay) => again.pace(delay),
                    None => again,
                });
            };
            delay = known;
        }
        let page = self.read(self.get(url, &task).await?);
        let mut done =
            Done::json(&page)?.discover(page.links.iter().map(|link| new_task(&self.args, link)));
        if let Some(delay) = delay {
            done = done.pace(delay);
        }
        self.pages
            .lock()
            .expect("nothing panics with it")
            .insert(task.id().to_owned(), page);
        Ok(done)
    }

    /// Gets what a task needs. A host in trouble is asked again later; if it says when, it costs no
    /// attempt, and no worker asks it before.
    async fn get(&self, url: Url, task: &Task<()>) -> Result<Answer, Failure> {
        let answer = timeout(FETCH_WITHIN, self.site.get(url)).await??;
        let status = answer.status;
        let failure = Failure::new(format!("the site answers {status}"));
        match answer.retry_after {
            Some(wait) if matches!(status, 429 | 503) => {
                let failure = failure.put_off(wait);
                Err(match task.limit_key() {
                    "" => failure,
                    _ => failure.hold(wait),
                })
            }
            _ if status == 429 || status >= 500 => Err(failure),
            _ => Ok(answer),
        }
    }

    fn read(&self, answer: Answer) -> Page {
        let mut page = Page {
            status: answer.status,
            title: String::new(),
            bytes: answer.body.len(),
            links: BTreeSet::new(),
        };
        if answer.is_html {
            let (title, hrefs) = read(&answer.body);
            page.title = title;
            let links = hrefs.iter().filter_map(|href| answer.url.join(href).ok());
            let is_inside = |link: &Url| self.args.urls.iter().any(|site| inside(site, link));
            let links = links.map(normalised).filter(is_inside);
            page.links = links.map(String::from).collect();
        }
        page
    }
}

/// A client of the sites: HTTP/1 without TLS.
#[derive(Clone)]
struct Site {
    client: HttpClient<HttpConnector, Empty<Bytes>>,
    /// The Crawl-delay of each host whose robots.txt was read.
    delays: Arc<Mutex<HashMap<String, Option<Duration>>>>,
}

struct Answer {
    /// After all redirects.
    url: Url,
    status: u16,
    is_html: bool,
    retry_after: Option<Duration>,
    body: Bytes,
}

impl Site {
    fn new() -> Self {
        Self {
            client: HttpClient::builder(TokioExecutor::new()).build_http(),
            delays: Arc::default(),
        }
    }

    async fn get(&self, mut url: Url) -> anyhow::Result<Answer> {
        for _ in 0..=MOST_REDIRECTS {
            let answer: Response<Incoming> = self.client.get(url.as_str().parse()?).await?;
            let status = answer.status();
            if let Some(to) = answer
                .headers()
                .get(LOCATION)
                .filter(|_| status.is_redirection())
            {
                url = url.join(to.to_str()?)?;
                continue;
            }
            let kind = answer.headers().get(CONTENT_TYPE);
            let is_html = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
            let retry_after = answer.headers().get(RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok());
            return Ok(Answer {
                url,
                status: status.as_u16(),
                is_html,
                retry_after: retry_after.map(Duration::from_secs),
                body: answer.into_body().collect().await?.to_bytes(),
            });
        }
        anyhow::bail!("there are more than {MOST_REDIRECTS} redirects")
    }

    /// What robots.txt of the URL's host asks for; `None` if it was not read yet.
    fn delay_of(&self, url: &Url) -> Option<Option<Duration>> {
        let delays = self.delays.lock().expect("nothing panics with it");
        delays.get(&url.origin().ascii_serialization()).copied()
    }

    fn learn_delay(&self, url: &Url, robots: &Answer) -> Option<Duration> {
        let delay = match robots.status {
            200 => crawl_delay(&robots.body),
            _ => None,
        };
        let mut delays = self.delays.lock().expect("nothing panics with it");
        delays.insert(url.origin().ascii_serialization(), delay);
        delay
    }
}

/// The Crawl-delay of a robots.txt for all crawlers.
fn crawl_delay(robots: &[u8]) -> Option<Duration> {
    let mut is_for_all = false;
    for line in String::from_utf8_lossy(robots).lines() {
        let line = line.split('#').next().unwrap_or_default();
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim();
        match name.trim().to_ascii_lowercase().as_str() {
            "user-agent" => is_for_all = value == "*",
            "crawl-delay" if is_for_all => {
                let seconds = value.parse().ok()?;
                return Duration::try_from_secs_f64(seconds).ok();
            }
            _ => {}
        }
    }
    None
}

/// The title of a page, and where its links lead.
fn read(html: &[u8]) -> (String, Vec<String>) {
    let mut title = String::new();
    let mut is_title = false;
    let mut hrefs = Vec::new();
    for Ok(token) in Tokenizer::new(html) {
        match token {
            Token::StartTag(tag) => {
                is_title = tag.name == b"title" && title.is_empty();
                if tag.name == b"a"
                    && let Some(href) = tag.attributes.get(&b"href"[..])
                {
                    hrefs.push(String::from_utf8_lossy(href).into_owned());
                }
            }
            Token::EndTag(_) => is_title = false,
            Token::String(text) if is_title => title.push_str(&String::from_utf8_lossy(&text)),
            _ => {}
        }
    }
    (title, hrefs)
}

fn new_task(args: &Args, url: &str) -> NewTask {
    NewTask::new(&args.queue, url.to_owned()).replicas(args.replicas)
}

/// One name for one page: the fragment is a place inside it.
fn normalised(mut url: Url) -> Url {
    url.set_fragment(None);
    url
}

fn inside(site: &Url, url: &Url) -> bool {
    let folder = site
        .path()
        .rfind('/')
        .map_or("/", |end| &site.path()[..=end]);
    url.origin() == site.origin() && url.path().starts_with(folder)
}

/// Waits until the queue is drained: no page waits, is being worked on, or is tried again later.
async fn all_done(args: &Args) -> anyhow::Result<()> {
    let http = Site::new();
    let path = format!("/v1/queues/{}?wait=drained&timeout=15s", args.queue);
    let url = Url::parse(&args.http)?.join(&path)?;
    let ask = async || {
        let answer = timeout(FETCH_WITHIN, http.get(url.clone())).await??;
        anyhow::ensure!(answer.status == 200, "taskd answers {}", answer.status);
        let answer: serde_json::Value = serde_json::from_slice(&answer.body)?;
        anyhow::Ok(answer["drained"] == true)
    };
    loop {
        match ask().await {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // taskd is away for a moment.
            Err(_) => tokio::time::sleep(Duration::from_millis(250)).await,
        }
    }
}
