//! Crawls a site from one URL: a task is a page, its key the page's URL, and what it discovers are the pages it links to.
//!
//!     taskd --pipelines all &
//!     cargo run --release --example crawl -- --url http://127.0.0.1:8000/
//!
//! A worker is three calls: GetTasks leases pages, CompleteTasks reports them with their links, RejectTasks gives back what
//! failed. Who has seen a URL before, who tries again, who counts: that is taskd's business, so there is none of it here.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io::IsTerminal,
    time::{Duration, Instant},
};

use anyhow::Context;
use backon::{ExponentialBuilder, Retryable};
use clap::Parser;
use futures::future::join_all;
use indicatif::{ProgressBar, ProgressDrawTarget};
use reqwest::header::CONTENT_TYPE;
use scraper::{Html, Selector};
use serde::{Deserialize, Serialize};
use taskd::wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Response, Status, transport::Channel};
use url::Url;

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
    #[arg(long, default_value = "crawl")]
    pub(crate) queue: String,
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
    pub(crate) status: pb::ItemStatus,
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
        if report.status == pb::ItemStatus::Ok {
            *by_worker.entry(report.worker).or_default() += 1;
            progress.set_message(format!("{} pages, {}", pages.len(), report.url));
            pages.insert(report.url, report.page);
        }
    })
    .await?;
    progress.finish_and_clear();

    let seconds = started.elapsed().as_secs_f64();
    let mut table = comfy_table::Table::new();
    table.set_header(["pages", "links", "bytes", "seconds", "pages/s", "results by worker"]);
    let by_worker: Vec<String> = by_worker.iter().map(|(worker, results)| format!("{worker} {results}")).collect();
    table.add_row([
        pages.len().to_string(),
        pages.values().map(|page| page.links.len()).sum::<usize>().to_string(),
        pages.values().map(|page| page.bytes).sum::<usize>().to_string(),
        format!("{seconds:.1}"),
        format!("{:.0}", pages.len() as f64 / seconds),
        by_worker.join("\n"),
    ]);
    println!("{table}");
    Ok(())
}

/// Puts the first page in and works until nothing is left; `seen` is told of every page.
pub(crate) async fn crawl(args: &Args, mut seen: impl FnMut(Report)) -> anyhow::Result<()> {
    let channel = Channel::from_shared(args.grpc.clone())?.connect_lazy();
    let first =
        pb::InsertTasksRequest { tasks: vec![new_task(args, normalised(args.url.clone()).as_str())], wait: None };
    let discovery = DiscoveryClient::new(channel.clone());
    let inserted = patiently(async || discovery.clone().insert_tasks(first.clone()).await).await?;
    let refused = inserted.results.iter().find(|result| result.status() == pb::InsertStatus::Rejected);
    anyhow::ensure!(refused.is_none(), "taskd did not take the first page: {refused:?}");

    let stop = CancellationToken::new();
    let _stop_when_dropped = stop.clone().drop_guard();
    let (sender, mut reports) = mpsc::channel(64);
    let mut workers = tokio::task::JoinSet::new();
    for number in 1..=args.workers {
        let worker = Worker {
            name: format!("crawler-{number}"),
            args: args.clone(),
            tasks: TasksClient::new(channel.clone()),
            site: reqwest::Client::builder().timeout(Duration::from_secs(20)).build()?,
            reports: sender.clone(),
        };
        let stop = stop.clone();
        workers.spawn(async move { stop.run_until_cancelled(worker.run()).await });
    }
    drop(sender);
    let mut done = std::pin::pin!(all_done(args));
    loop {
        tokio::select! {
            Some(report) = reports.recv() => seen(report),
            Some(ended) = workers.join_next() => ended?.context("only `stop` ends a worker")??,
            done = &mut done => break done?,
        }
    }
    stop.cancel();
    while let Some(report) = reports.recv().await {
        seen(report);
    }
    Ok(())
}

struct Worker {
    name: String,
    args: Args,
    tasks: TasksClient<Channel>,
    site: reqwest::Client,
    reports: mpsc::Sender<Report>,
}

impl Worker {
    async fn run(self) -> anyhow::Result<()> {
        let (worker, queues) = (self.name.clone(), vec![self.args.queue.clone()]);
        let wait = Some(prost_types::Duration { seconds: 5, nanos: 0 });
        // An answer fits what the client takes by default (4 MiB) unless a single task is larger, and a URL is not.
        let get = pb::GetTasksRequest { worker, queues, max_tasks: 8, wait, ..Default::default() };
        loop {
            let leased = patiently(async || self.tasks.clone().get_tasks(get.clone()).await).await?.tasks;
            let fetched =
                join_all(leased.iter().map(async |task| self.fetch(std::str::from_utf8(&task.key)?).await)).await;
            let (mut pages, mut completions, mut rejections) = (Vec::new(), Vec::new(), Vec::new());
            for (task, fetched) in leased.into_iter().zip(fetched) {
                let (id, lease_token) = (task.id, task.lease_token);
                match fetched {
                    Ok(page) => {
                        let result = serde_json::to_vec(&page)?.into();
                        let discovered = page.links.iter().map(|link| new_task(&self.args, link)).collect();
                        let result_encoding = pb::Encoding::Json.into();
                        completions.push(pb::Completion { id, lease_token, result, discovered, result_encoding });
                        pages.push((String::from_utf8_lossy(&task.key).into_owned(), page));
                    }
                    Err(error) => {
                        let reason = format!("{error:#}");
                        rejections.push(pb::Rejection { id, lease_token, reason, ..Default::default() });
                    }
                }
            }
            if !completions.is_empty() {
                // Sent again when the answer did not arrive: taskd knows the lease tokens and counts nothing twice.
                let request = pb::CompleteTasksRequest { worker: self.name.clone(), completions };
                let answer = patiently(async || self.tasks.clone().complete_tasks(request.clone()).await).await?;
                for ((url, page), result) in pages.into_iter().zip(answer.results) {
                    anyhow::ensure!(result.status() != pb::ItemStatus::Invalid, "{url}: {}", result.error);
                    let report = Report { worker: self.name.clone(), url, page, status: result.status() };
                    self.reports.send(report).await?;
                }
            }
            if !rejections.is_empty() {
                let request = pb::RejectTasksRequest { worker: self.name.clone(), rejections };
                patiently(async || self.tasks.clone().reject_tasks(request.clone()).await).await?;
            }
        }
    }

    async fn fetch(&self, url: &str) -> anyhow::Result<Page> {
        let response = self.site.get(url).send().await?;
        let (status, base) = (response.status(), response.url().clone());
        anyhow::ensure!(!status.is_server_error(), "the site answers {status}");
        let html = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
        let body = response.bytes().await?;
        let mut page =
            Page { status: status.as_u16(), title: String::new(), bytes: body.len(), links: BTreeSet::new() };
        if html {
            let document = Html::parse_document(&String::from_utf8_lossy(&body));
            let select = |selector| Selector::parse(selector).expect("a selector");
            page.title =
                document.select(&select("title")).next().map_or_else(String::new, |title| title.text().collect());
            let anchors = select("a[href]");
            let links = document.select(&anchors).filter_map(|a| base.join(a.attr("href")?).ok());
            let links = links.map(normalised).filter(|link| inside(&self.args.url, link));
            page.links = links.map(String::from).collect();
        }
        Ok(page)
    }
}

fn new_task(args: &Args, url: &str) -> pb::NewTask {
    let (queue, key) = (args.queue.clone(), url.to_owned().into());
    pb::NewTask { queue, key, replicas: Some(args.replicas), ..Default::default() }
}

/// One name for one page: the fragment is a place inside it.
fn normalised(mut url: Url) -> Url {
    url.set_fragment(None);
    url
}

fn inside(site: &Url, url: &Url) -> bool {
    let folder = site.path().rfind('/').map_or("/", |end| &site.path()[..=end]);
    url.origin() == site.origin() && url.path().starts_with(folder)
}

/// Until taskd answers: it may be restarting, or ask to try later.
async fn patiently<T, F: Future<Output = Result<Response<T>, Status>>>(call: impl FnMut() -> F) -> anyhow::Result<T> {
    let pauses = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(1))
        .with_jitter()
        .without_max_times();
    let ours = |status: &Status| matches!(status.code(), Code::InvalidArgument | Code::Unimplemented);
    Ok(call.retry(pauses).when(|status| !ours(status)).await?.into_inner())
}

/// Until two looks in a row find nothing that waits or is being worked on.
async fn all_done(args: &Args) -> anyhow::Result<()> {
    let (http, url) = (reqwest::Client::new(), format!("{}/v1/queues", args.http));
    let look = async || {
        let answer = http.get(&url).send().await?.error_for_status()?.json::<serde_json::Value>().await?;
        let queue = answer["queues"].as_array().and_then(|all| all.iter().find(|queue| queue["queue"] == args.queue));
        let left = |queue: &serde_json::Value| {
            ["pending", "queued", "assigned", "delayed"].iter().all(|state| queue[*state].as_u64() == Some(0))
        };
        Ok::<bool, reqwest::Error>(queue.is_some_and(left))
    };
    let mut empty = 0;
    while empty < 2 {
        tokio::time::sleep(Duration::from_millis(250)).await;
        // Not answered: taskd is away for a moment.
        empty = if look().await.unwrap_or(false) { empty + 1 } else { 0 };
    }
    Ok(())
}
