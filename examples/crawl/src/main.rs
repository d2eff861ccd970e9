//! Crawls a site from one URL: a task is a page, its key the page's URL, and what it discovers are
//! the pages it links to.
//!
//!     taskd --pipelines all &
//!     cargo run --release --package taskd-crawl -- --url http://127.0.0.1:8000/
//!
//! A worker is a function: it fetches the page of a task, and returns what it found. taskd sends
//! the tasks on a stream. It knows which URLs it has seen, tries again what failed, and counts; so
//! there is none of it here.

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
    header::{CONTENT_TYPE, LOCATION},
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
    /// Where to begin; only what is in this folder of this host is crawled
    #[arg(long)]
    pub(crate) url: Url,
    /// taskd's gRPC
    #[arg(long, default_value = "http://127.0.0.1:7601")]
    pub(crate) grpc: String,
    /// taskd's HTTP
    #[arg(long, default_value = "http://127.0.0.1:7600")]
    pub(crate) http: String,
    #[arg(long, default_value_t = 4)]
    pub(crate) workers: usize,
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

/// Puts the first page in and works until nothing is left; `seen` is told of every page.
pub(crate) async fn crawl(args: &Args, mut seen: impl FnMut(Report)) -> anyhow::Result<()> {
    let client = Client::new(args.grpc.clone())?;
    let first = new_task(args, normalised(args.url.clone()).as_str());
    let inserted = client.insert([first]).await?;
    let refused = inserted
        .iter()
        .find(|answer| answer.status == InsertedAs::Rejected);
    anyhow::ensure!(
        refused.is_none(),
        "taskd did not take the first page: {refused:?}"
    );

    let (sender, mut reports) = mpsc::unbounded_channel();
    let site = Site::new();
    let (mut workers, mut stops) = (JoinSet::new(), Vec::new());
    for number in 1..=args.workers {
        let (name, args, site) = (format!("crawler-{number}"), args.clone(), site.clone());
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
        let page = self.fetch(&task.key()).await?;
        let done =
            Done::json(&page)?.discover(page.links.iter().map(|link| new_task(&self.args, link)));
        self.pages
            .lock()
            .expect("nothing panics with it")
            .insert(task.id().to_owned(), page);
        Ok(done)
    }

    async fn fetch(&self, url: &str) -> anyhow::Result<Page> {
        let (url, status, is_html, body) =
            timeout(FETCH_WITHIN, self.site.get(Url::parse(url)?)).await??;
        anyhow::ensure!(status < 500, "the site answers {status}");
        let mut page = Page {
            status,
            title: String::new(),
            bytes: body.len(),
            links: BTreeSet::new(),
        };
        if is_html {
            let (title, hrefs) = read(&body);
            page.title = title;
            let links = hrefs.iter().filter_map(|href| url.join(href).ok());
            let links = links
                .map(normalised)
                .filter(|link| inside(&self.args.url, link));
            page.links = links.map(String::from).collect();
        }
        Ok(page)
    }
}

/// A client of the site: HTTP/1 without TLS.
#[derive(Clone)]
struct Site(HttpClient<HttpConnector, Empty<Bytes>>);

impl Site {
    fn new() -> Self {
        Self(HttpClient::builder(TokioExecutor::new()).build_http())
    }

    /// Gets a page: its URL after all redirects, the status, whether it is HTML, and the body.
    async fn get(&self, mut url: Url) -> anyhow::Result<(Url, u16, bool, Bytes)> {
        for _ in 0..=MOST_REDIRECTS {
            let answer: Response<Incoming> = self.0.get(url.as_str().parse()?).await?;
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
            let body = answer.into_body().collect().await?.to_bytes();
            return Ok((url, status.as_u16(), is_html, body));
        }
        anyhow::bail!("there are more than {MOST_REDIRECTS} redirects")
    }
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
        let (_, status, _, body) = timeout(FETCH_WITHIN, http.get(url.clone())).await??;
        anyhow::ensure!(status == 200, "taskd answers {status}");
        let answer: serde_json::Value = serde_json::from_slice(&body)?;
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
