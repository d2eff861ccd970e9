//! A site with up to fifty hosts: 127.0.0.1 to 127.0.0.50 on one port, told apart by the address that
//! was called. It notes what a crawler that keeps limits per key is measured by.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{ConnectInfo, connect_info::Connected},
    http::{StatusCode, Uri, header},
    response::{Html, IntoResponse as _, Response},
    serve::IncomingStream,
};
use tokio::{net::TcpListener, task::JoinHandle};

/// Each host links to the first pages of so many others, so that a crawl soon knows all.
const LINKED_HOSTS: usize = 8;

/// What the site is like.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) hosts: u8,
    /// Of each host.
    pub(crate) pages: usize,
    /// How long an answer takes.
    pub(crate) latency: Duration,
    /// The host whose robots.txt has a Crawl-delay, in seconds. The others have none.
    pub(crate) crawl_delay: Option<(u8, f64)>,
}

/// A request of a page.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) began: Instant,
    pub(crate) began_unix_ms: i64,
    /// `None` while it is under way. A request that its sender broke off has ended, too.
    pub(crate) ended: Option<Instant>,
    pub(crate) answer: Option<StatusCode>,
}

/// What one host has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// In the order of their beginnings, with those of robots.txt.
    pub(crate) requests: Vec<Asked>,
    /// The most requests under way at a time.
    pub(crate) most: usize,
    /// Requests that began while the host had asked to wait.
    pub(crate) in_holds: usize,
    under_way: usize,
    hold_until: Option<Instant>,
    /// The next answers: so many, with this status and this Retry-After.
    order: Option<(usize, StatusCode, Duration)>,
}

impl Seen {
    /// How often each page was answered with 200.
    pub(crate) fn answered(&self) -> BTreeMap<&str, usize> {
        let mut all = BTreeMap::new();
        for asked in &self.requests {
            if asked.answer == Some(StatusCode::OK) && asked.path != "/robots.txt" {
                *all.entry(asked.path.as_str()).or_default() += 1;
            }
        }
        all
    }

    /// The shortest time between the beginnings of two requests, of those from this one on.
    pub(crate) fn shortest_gap(&self, from: usize) -> Option<Duration> {
        let requests = self.requests.get(from..)?;
        let gaps = requests
            .windows(2)
            .map(|pair| pair[1].began.saturating_duration_since(pair[0].began));
        gaps.min()
    }

    /// The shortest time from the end of a request to the beginning of the next one.
    pub(crate) fn shortest_pause(&self) -> Option<Duration> {
        let pauses = self.requests.windows(2).map(|pair| {
            let ended = pair[0].ended.unwrap_or(pair[1].began);
            pair[1].began.saturating_duration_since(ended)
        });
        pauses.min()
    }
}

/// The address of the site that a connection called.
#[derive(Clone, Copy)]
struct Called(Option<SocketAddr>);

impl Connected<IncomingStream<'_, TcpListener>> for Called {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        Self(stream.io().local_addr().ok())
    }
}

/// A running site. Dropping it stops it.
pub(crate) struct Site {
    plan: Plan,
    port: u16,
    state: Arc<State>,
    serving: JoinHandle<()>,
}

struct State {
    plan: Plan,
    port: u16,
    hosts: Mutex<BTreeMap<u8, Seen>>,
}

impl Site {
    pub(crate) async fn start(plan: Plan) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            plan: plan.clone(),
            port,
            hosts: Mutex::default(),
        });
        let answering = Arc::clone(&state);
        let answer = move |ConnectInfo(called): ConnectInfo<Called>, uri: Uri| {
            let answering = Arc::clone(&answering);
            async move { answering.answer(called, uri.path()).await }
        };
        let router = Router::new().fallback(answer);
        let service = router.into_make_service_with_connect_info::<Called>();
        let serving = tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self {
            plan,
            port,
            state,
            serving,
        }
    }

    /// The pages of a host.
    pub(crate) fn pages_of(&self, host: u8) -> Vec<String> {
        let root = root(host, self.port);
        let others = (1..self.plan.pages).map(|page| format!("{root}{page}.html"));
        std::iter::once(root.clone()).chain(others).collect()
    }

    pub(crate) fn hosts(&self) -> std::ops::RangeInclusive<u8> {
        1..=self.plan.hosts
    }

    /// All pages of all hosts.
    pub(crate) fn pages(&self) -> Vec<String> {
        self.hosts().flat_map(|host| self.pages_of(host)).collect()
    }

    /// The next `times` requests of the host's pages are answered with this status and Retry-After.
    pub(crate) fn order(&self, host: u8, times: usize, status: StatusCode, retry_after: Duration) {
        self.state.hosts().entry(host).or_default().order = Some((times, status, retry_after));
    }

    pub(crate) fn seen(&self, host: u8) -> Seen {
        self.state.hosts().get(&host).cloned().unwrap_or_default()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn root(host: u8, port: u16) -> String {
    format!("http://127.0.0.{host}:{port}/")
}

impl State {
    /// The guard of a request takes this lock, also while a test fails.
    fn hosts(&self) -> MutexGuard<'_, BTreeMap<u8, Seen>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self: &Arc<Self>, called: Called, path: &str) -> Response {
        let host = match called.0.map(|address| address.ip()) {
            Some(IpAddr::V4(address)) => address.octets()[3],
            _ => return StatusCode::NOT_FOUND.into_response(),
        };
        let mut under_way = UnderWay::begin(self, host, path);
        tokio::time::sleep(self.plan.latency).await;
        under_way.end(self.page(host, path))
    }

    /// The page, without what was ordered.
    fn page(&self, host: u8, path: &str) -> Response {
        if path == "/robots.txt" {
            return match self.plan.crawl_delay {
                Some((slow, seconds)) if slow == host => {
                    format!("User-agent: *\nDisallow:\nCrawl-delay: {seconds}\n").into_response()
                }
                _ => StatusCode::NOT_FOUND.into_response(),
            };
        }
        let mut links = vec!["/".to_owned()];
        if path == "/" {
            links.extend((1..self.plan.pages).map(|page| format!("{page}.html")));
            let first = (usize::from(host) - 1) * LINKED_HOSTS + 2;
            let others = first..first + LINKED_HOSTS;
            let others = others.filter_map(|other| u8::try_from(other).ok());
            let others = others.filter(|other| *other <= self.plan.hosts);
            links.extend(others.map(|other| root(other, self.port)));
        } else if !self.has(path) {
            return StatusCode::NOT_FOUND.into_response();
        }
        let links: String = links
            .iter()
            .map(|link| format!("<a href=\"{link}\">{link}</a>\n"))
            .collect();
        Html(format!("<title>{path} of host {host}</title>\n{links}")).into_response()
    }

    fn has(&self, path: &str) -> bool {
        let number = path
            .strip_prefix('/')
            .and_then(|rest| rest.strip_suffix(".html"));
        let number = number.and_then(|number| number.parse::<usize>().ok());
        number.is_some_and(|number| (1..self.plan.pages).contains(&number))
    }
}

/// A request under way, until it is dropped.
struct UnderWay {
    state: Arc<State>,
    host: u8,
    number: usize,
}

impl UnderWay {
    fn begin(state: &Arc<State>, host: u8, path: &str) -> Self {
        let mut hosts = state.hosts();
        let seen = hosts.entry(host).or_default();
        let began = Instant::now();
        seen.under_way += 1;
        seen.most = seen.under_way.max(seen.most);
        seen.in_holds += usize::from(seen.hold_until.is_some_and(|until| began < until));
        seen.requests.push(Asked {
            path: path.to_owned(),
            began,
            began_unix_ms: taskd::model::now_unix_ms(),
            ended: None,
            answer: None,
        });
        Self {
            state: Arc::clone(state),
            host,
            number: seen.requests.len() - 1,
        }
    }

    /// The answer: this one, or what was ordered.
    fn end(&mut self, mut answer: Response) -> Response {
        let mut hosts = self.state.hosts();
        let seen = hosts.entry(self.host).or_default();
        let asked = &mut seen.requests[self.number];
        let is_page = asked.path != "/robots.txt";
        if let Some((times, status, retry_after)) = seen.order.filter(|_| is_page) {
            seen.order = (times > 1).then_some((times - 1, status, retry_after));
            seen.hold_until = Some(Instant::now() + retry_after);
            let seconds = retry_after.as_secs().to_string();
            answer = (status, [(header::RETRY_AFTER, seconds)]).into_response();
        }
        asked.answer = Some(answer.status());
        answer
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut hosts = self.state.hosts();
        let seen = hosts.entry(self.host).or_default();
        seen.under_way -= 1;
        seen.requests[self.number].ended = Some(Instant::now());
    }
}

/// Serves a router on a free port of the loopback interface. Returns its URL without a path.
pub(crate) async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}
