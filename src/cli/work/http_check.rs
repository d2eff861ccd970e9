//! The built-in worker that requests each key as a URL. Any answer of the server, whatever its
//! status, becomes the result.

mod gate;
mod hop;
mod put_offs;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::ensure;
use humantime::format_duration;
use hyper::{Method, StatusCode, header::HeaderValue};
use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;
use taskd_client::{Done, Failure, Task};
use tokio::time::timeout;
use url::Url;

use self::{
    gate::Gates,
    hop::{Answer, Hop, is_of_own_network},
    put_offs::{PutOffs, within_bounds},
};
use super::args::Checks;

pub(super) struct Checker {
    is_head: bool,
    redirects: u8,
    answer_timeout: Duration,
    timeout: Duration,
    gates: Gates,
    hop: Hop,
    put_offs: PutOffs,
}

/// The result of a task, as JSON.
#[derive(Serialize)]
struct Checked<'a> {
    url: &'a str,
    status: u16,
    method: &'a str,
    /// The URL after all redirects.
    final_url: &'a str,
    redirects: &'a [Redirect],
    /// From the first request to the end of the last answer, without the time spent waiting for a
    /// turn at a host.
    seconds: f64,
    /// Until the head of the last answer.
    first_byte_seconds: f64,
    /// How many bytes of the body were read.
    bytes: u64,
    /// True if the body was longer.
    truncated: bool,
    content_length: Option<u64>,
    content_type: Option<String>,
    server: SocketAddr,
    tls_expires_at: Option<&'a str>,
}

#[derive(Serialize)]
struct Redirect {
    status: u16,
    to: String,
}

/// The time that a check has spent so far.
#[derive(Default)]
struct Spent {
    /// Waiting for its turn at a host.
    waiting: Duration,
    /// Waiting for answers.
    asking: Duration,
}

impl Checker {
    pub(super) fn new(checks: &Checks, timeout: Duration) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let user_agent = HeaderValue::from_bytes(checks.user_agent.as_bytes());
        ensure!(
            user_agent.is_ok(),
            "--user-agent {:?} is no value of a header",
            checks.user_agent
        );
        let tls = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            is_head: checks.head,
            redirects: checks.redirects,
            answer_timeout: checks.answer_timeout.0,
            timeout,
            gates: Gates::new(checks.per_host.into(), checks.host_delay.0),
            hop: Hop {
                tls: Arc::new(tls),
                user_agent: user_agent?,
                most_bytes: checks.max_body.0,
            },
            put_offs: PutOffs::default(),
        })
    }

    /// Makes one request, once it is its turn at the host.
    async fn ask(
        &self,
        url: &Url,
        method: &Method,
        sent_by: Option<IpAddr>,
        is_limited: bool,
        spent: &mut Spent,
    ) -> Result<Answer, Failure> {
        let came = Instant::now();
        let patience = self.timeout.saturating_sub(spent.waiting);
        // If taskd spaces the tasks of this host, all workers together keep its limits.
        let turn = async {
            match is_limited {
                true => None,
                false => self.gates.enter(url.host_str().unwrap_or_default()).await,
            }
        };
        let Ok(_place) = timeout(patience, turn).await else {
            let why = format!(
                "{url}: no turn at its host within {}",
                format_duration(self.timeout)
            );
            return Err(Failure::new(why).not_started());
        };
        let began = Instant::now();
        spent.waiting += began - came;
        let left = self.timeout.saturating_sub(spent.asking);
        let answer = timeout(
            left.min(self.answer_timeout),
            self.hop.ask(url, method, sent_by),
        )
        .await;
        spent.asking += began.elapsed();
        match answer {
            Ok(answer) => answer.map_err(|why| Failure::new(format!("{url}: {why}"))),
            Err(_) if left <= self.answer_timeout => Err(Failure::new(format!(
                "it took longer than {}",
                format_duration(self.timeout)
            ))),
            Err(_) => Err(Failure::new(format!(
                "{url}: no answer within {:?}",
                self.answer_timeout
            ))),
        }
    }

    /// Handles a host that asks to wait: puts the check off, at no cost. If the host keeps asking,
    /// it eventually becomes a failed attempt.
    fn put_off(&self, task: &str, failure: Failure, asked: Duration) -> Failure {
        match self.put_offs.next(task, asked) {
            Some(wait) => failure.put_off(wait),
            None => failure.again_after(within_bounds(asked)),
        }
    }

    /// `is_limited`: the task has a limit key.
    async fn follow(&self, task: &str, first: Url, is_limited: bool) -> Result<Done, Failure> {
        // Prevents server-side request forgery: a public site must not make the check request
        // internal servers.
        let mut sent_by = None;
        let mut method = if self.is_head {
            Method::HEAD
        } else {
            Method::GET
        };
        let mut url = first.clone();
        let mut redirects = Vec::new();
        let mut spent = Spent::default();
        loop {
            let is_first = redirects.is_empty();
            let answer = self
                .ask(&url, &method, sent_by, is_limited && is_first, &mut spent)
                .await?;
            if method == Method::HEAD
                && matches!(
                    answer.status,
                    StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
                )
            {
                method = Method::GET;
                continue;
            }
            if let Some(wait) = answer.asks_to_wait() {
                let failure = Failure::new(format!("{url}: {} with Retry-After", answer.status));
                let failure = self.put_off(task, failure, wait);
                return Err(match is_limited && is_first {
                    true => failure.hold(within_bounds(wait)),
                    false => failure,
                });
            }
            if let Some(target) = answer.redirect() {
                let to = url.join(&target).ok().filter(is_http);
                let to = to.ok_or_else(|| {
                    Failure::new(format!("{url}: a redirect to {target:?}")).never_again()
                })?;
                if redirects.len() == usize::from(self.redirects) {
                    return Err(Failure::new(format!(
                        "{first}: more than {} redirects",
                        self.redirects
                    ))
                    .never_again());
                }
                redirects.push(Redirect {
                    status: answer.status.as_u16(),
                    to: to.to_string(),
                });
                url = to;
                sent_by = Some(answer.server.ip()).filter(|ip| !is_of_own_network(*ip));
                continue;
            }
            self.put_offs.forget(task);
            return Ok(Done::json(&Checked {
                url: first.as_str(),
                status: answer.status.as_u16(),
                method: method.as_str(),
                final_url: url.as_str(),
                redirects: &redirects,
                seconds: spent.asking.as_secs_f64(),
                first_byte_seconds: answer.first_byte.as_secs_f64(),
                bytes: answer.bytes,
                truncated: answer.is_truncated,
                content_length: answer.content_length(),
                content_type: answer.content_type(),
                server: answer.server,
                tls_expires_at: answer.tls_expires_at.as_deref(),
            })?);
        }
    }
}

/// Checks the URL that is the key of a task.
pub(super) async fn check(checker: Arc<Checker>, task: Task<()>) -> Result<Done, Failure> {
    let key = task.key();
    let url = Url::parse(&key).ok().filter(is_http);
    let url = url
        .ok_or_else(|| Failure::new("the key is no URL with http:// or https://").never_again())?;
    let is_limited = !task.limit_key().is_empty();
    checker.follow(task.id(), url, is_limited).await
}

fn is_http(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https") && url.host_str().is_some()
}
