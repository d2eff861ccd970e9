//! The taskd under test: the benchmark's own, or one that is already running.

use std::{
    net::ToSocketAddrs,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use redis::{AsyncConnectionConfig, aio::MultiplexedConnection};
use serde::Serialize;
use tokio::task::JoinSet;
use url::Url;

use super::{
    args::{Bench, Part},
    http::Http,
    machine::{self, Machine},
};
use crate::cli::{
    client::{self, Taskd},
    http::{ANSWER_TIMEOUT, HttpPort},
    own::{Own, Start},
    queues::Counts,
    trust::Trust,
};
use crate::config::without_password;

const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The queues that the benchmark's own taskd has for the phase limits, with their limits.
const LIMITED_QUEUES: &str = "\
[queues.bench-many]\nlimit_by = \"given\"\nlimit_at_a_time = 1000\n\
[queues.bench-few]\nlimit_by = \"given\"\nlimit_at_a_time = 1000\n\
[queues.bench-unblocked]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-blocked]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-bytes]\nlimit_by = \"given\"\nlimit_at_a_time = 1\n\
[queues.bench-paced]\nlimit_by = \"given\"\nlimit_pace = \"1/1s\"\n";

pub(super) struct Server {
    channels: Vec<Taskd>,
    http: Http,
    /// The process id of taskd; `None` if it runs on another machine, or this user may not see it.
    pid: Option<u32>,
    redis: Option<MultiplexedConnection>,
    own: Option<Own>,
    /// The time from the start of its process until it was ready.
    pub(super) ready_after: Option<Duration>,
}

/// The conditions of the figures: which server, on which machine, and with what durability.
#[derive(Clone, Serialize)]
pub(super) struct Conditions {
    /// `own`, or the URL.
    server: String,
    version: Option<String>,
    redis_version: Option<String>,
    appendfsync: Option<String>,
    /// SQLite's `synchronous` setting; `None` if the benchmark does not know the database.
    synchronous: Option<&'static str>,
    machine: Machine,
}

/// CPU seconds so far; `None` if unknown.
#[derive(Clone, Copy)]
pub(super) struct Usage {
    pub(super) taskd: Option<f64>,
    pub(super) redis: Option<f64>,
    pub(super) bench: Option<f64>,
}

impl Server {
    /// Connects to the taskd in `args`, or starts one with all pipelines.
    pub(super) async fn open(args: &Bench, part: Part) -> anyhow::Result<Self> {
        Self::open_with(args, part, "all").await
    }

    /// Like [`Self::open`], with these pipelines.
    pub(super) async fn open_with(
        args: &Bench,
        part: Part,
        pipelines: &str,
    ) -> anyhow::Result<Self> {
        let own = if args.server.is_none() {
            let wanted = Start {
                pipelines,
                config: settings(args, part),
                settings: &args.settings,
                with_token: args.with_token,
            };
            Some(Own::start(wanted).await?)
        } else {
            None
        };
        let trust = match &own {
            Some(own) => own.token.clone().map_or_else(Trust::default, Trust::from),
            None => args.trust.clone(),
        };
        let (url, redis) = match &own {
            Some(own) => (format!("http://{}", own.addresses.http), Some(own.redis())),
            None => (args.server.clone().unwrap_or_default(), args.redis.clone()),
        };
        let http = Http::new(&url, trust.clone())?;
        let ready_after = match &own {
            Some(own) => {
                http.wait_until_ready().await?;
                Some(own.started.elapsed())
            }
            None => None,
        };
        let grpc = match &own {
            Some(own) => format!("http://{}", own.addresses.grpc),
            None => client::grpc_of(&url, &trust).await?,
        };
        let first = client::connect(&grpc, &trust).await?;
        let others = (1..args.work.connections).map(|_| client::connect(&grpc, &trust));
        let mut channels = futures::future::try_join_all(others).await?;
        channels.push(first);
        let redis = match redis {
            Some(url) => Some(connect_redis(&url).await?),
            None => None,
        };
        let pid = own.as_ref().map(Own::pid).or_else(|| pid_behind(&grpc));
        let server = Self {
            channels,
            http,
            pid,
            redis,
            own,
            ready_after,
        };
        // An address that is no HTTP port shows before the work.
        server.counts(&[]).await?;
        Ok(server)
    }

    /// The connection that this caller uses.
    pub(super) fn channel(&self, caller: usize) -> Taskd {
        self.channels[caller % self.channels.len()].clone()
    }

    /// Its HTTP port.
    pub(super) fn http(&self) -> &HttpPort {
        self.http.port()
    }

    pub(super) async fn conditions(&self, args: &Bench) -> anyhow::Result<Conditions> {
        let is_local = self.pid.is_some();
        let (redis_version, appendfsync) = match &self.redis {
            Some(redis) => {
                let info: String = redis::cmd("INFO")
                    .arg("server")
                    .query_async(&mut redis.clone())
                    .await?;
                (
                    field(&info, "redis_version").map(str::to_owned),
                    appendfsync(redis.clone()).await,
                )
            }
            None => (None, None),
        };
        let folder = self.own.as_ref().map(Own::folder).filter(|_| is_local);
        Ok(Conditions {
            server: args
                .server
                .as_deref()
                .map_or_else(|| "own".to_owned(), without_password),
            version: self.http.version().await?,
            redis_version,
            appendfsync,
            synchronous: self.own.is_some().then_some("FULL"),
            machine: Machine::look(folder),
        })
    }

    pub(super) async fn usage(&self) -> Usage {
        let redis = match &self.redis {
            Some(redis) => redis_cpu_seconds(redis.clone()).await,
            None => None,
        };
        Usage {
            taskd: self.pid.and_then(machine::cpu_seconds),
            redis,
            bench: machine::own_cpu_seconds(),
        }
    }

    /// The resident memory of taskd.
    pub(super) fn resident_bytes(&self) -> Option<f64> {
        self.pid.and_then(machine::resident_bytes)
    }

    /// The memory of Redis, and that of the keys of one queue. Waits until no AOF rewrite is in
    /// progress.
    pub(super) async fn redis_bytes(&self, queue: &str) -> anyhow::Result<(f64, f64)> {
        let mut redis = self
            .redis
            .clone()
            .context("a taskd of its own has a Redis")?;
        loop {
            let info: String = redis::cmd("INFO").query_async(&mut redis).await?;
            let is_quiet =
                ["aof_rewrite_in_progress", "aof_rewrite_scheduled"].map(|name| field(&info, name));
            if is_quiet == [Some("0"); 2] {
                let used = field(&info, "used_memory")
                    .context("INFO has used_memory")?
                    .parse()?;
                return Ok((used, bytes_of_keys(redis, queue).await?));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Deletes all data in Redis.
    pub(super) async fn empty_redis(&self) -> anyhow::Result<()> {
        let mut redis = self
            .redis
            .clone()
            .context("a taskd of its own has a Redis")?;
        Ok(redis::cmd("FLUSHALL").exec_async(&mut redis).await?)
    }

    /// Appends records to a stream of Redis, so many a round trip, and returns how long it took.
    pub(super) async fn append_alone(
        &self,
        records: u32,
        batch: u32,
        callers: u16,
        payload: &[u8],
    ) -> anyhow::Result<Duration> {
        let redis = self
            .redis
            .clone()
            .context("a taskd of its own has a Redis")?;
        let next = Arc::new(AtomicU32::new(0));
        let payload: Arc<[u8]> = payload.into();
        let began = Instant::now();
        let mut appending = JoinSet::new();
        for _ in 0..callers {
            let mut redis = redis.clone();
            let next = Arc::clone(&next);
            let payload = Arc::clone(&payload);
            appending.spawn(async move {
                loop {
                    let first = next.fetch_add(batch, Ordering::Relaxed);
                    if first >= records {
                        return anyhow::Ok(());
                    }
                    let mut pipe = redis::pipe();
                    for number in first..records.min(first + batch) {
                        let append = pipe.cmd("XADD").arg("bench-alone").arg("*");
                        append
                            .arg("v")
                            .arg(&payload[..])
                            .arg("k")
                            .arg(number)
                            .ignore();
                    }
                    pipe.exec_async(&mut redis).await?;
                }
            });
        }
        while let Some(done) = appending.join_next().await {
            done??;
        }
        let took = began.elapsed();
        let mut redis = redis;
        redis::cmd("UNLINK")
            .arg("bench-alone")
            .exec_async(&mut redis)
            .await?;
        Ok(took)
    }

    pub(super) async fn counts(&self, queues: &[String]) -> anyhow::Result<Counts> {
        self.http.counts(queues).await
    }

    /// Waits until `is_reached` accepts the counts of the queues, and returns when it did. Returns
    /// `None` if the counts have not changed for `patience`.
    pub(super) async fn wait_for(
        &self,
        queues: &[String],
        patience: Duration,
        is_reached: impl Fn(&Counts) -> bool,
    ) -> anyhow::Result<Option<Instant>> {
        let (mut before, mut changed) = (Counts::default(), Instant::now());
        loop {
            let began = Instant::now();
            match self.counts(queues).await {
                Ok(counts) if is_reached(&counts) => return Ok(Some(Instant::now())),
                Ok(counts) if counts != before => (before, changed) = (counts, Instant::now()),
                Ok(_) if changed.elapsed() > patience => return Ok(None),
                // taskd may be starting over, and then answers again soon.
                Err(error) if changed.elapsed() > patience => return Err(error),
                Ok(_) | Err(_) => {}
            }
            // Counting a thousand queues is work for taskd, so poll less often if it takes long.
            tokio::time::sleep(LOOK_EVERY.max(3 * began.elapsed())).await;
        }
    }

    pub(super) async fn close(self) -> anyhow::Result<()> {
        match self.own {
            Some(own) => own.stop().await,
            None => Ok(()),
        }
    }
}

impl Conditions {
    /// The server software, and how durable an answer is.
    pub(super) fn durability(&self) -> String {
        let redis = match (&self.redis_version, &self.appendfsync) {
            (Some(version), Some(fsync)) => format!("Redis {version}, appendfsync {fsync}"),
            (Some(version), None) => format!("Redis {version}, appendfsync unknown"),
            (None, _) => "Redis and its durability unknown (--redis names it)".to_owned(),
        };
        let sql = self
            .synchronous
            .map_or("SQL and its durability unknown".to_owned(), |synchronous| {
                format!("SQLite, synchronous {synchronous}")
            });
        format!("{redis}; {sql}")
    }

    pub(super) fn server(&self) -> String {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        match &*self.server {
            "own" => format!("taskd {version}, started for this on embedded defaults"),
            url => format!("taskd {version} at {url}"),
        }
    }

    pub(super) fn machine(&self) -> &Machine {
        &self.machine
    }
}

impl Usage {
    /// The CPU used since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        let difference = |now: Option<f64>, then: Option<f64>| Some(now? - then?);
        Self {
            taskd: difference(self.taskd, before.taskd),
            redis: difference(self.redis, before.redis),
            bench: difference(self.bench, before.bench),
        }
    }
}

fn pid_behind(grpc: &str) -> Option<u32> {
    let url = Url::parse(grpc).ok()?;
    let host = url.host_str()?.trim_matches(['[', ']']);
    let addresses: Vec<_> = (host, url.port_or_known_default()?)
        .to_socket_addrs()
        .ok()?
        .collect();
    machine::listener(&addresses)
}

async fn connect_redis(url: &str) -> anyhow::Result<MultiplexedConnection> {
    let unreachable = || format!("cannot reach Redis at {}", without_password(url));
    let client = redis::Client::open(url).with_context(unreachable)?;
    // FLUSHALL with a million tasks takes longer than the default timeout of half a second.
    let patient = AsyncConnectionConfig::new().set_response_timeout(Some(ANSWER_TIMEOUT));
    client
        .get_multiplexed_async_connection_with_config(&patient)
        .await
        .with_context(unreachable)
}

async fn appendfsync(mut redis: MultiplexedConnection) -> Option<String> {
    let mut get = redis::cmd("CONFIG");
    get.arg("GET").arg("append*");
    let values: std::collections::HashMap<String, String> =
        get.query_async(&mut redis).await.ok()?;
    match values.get("appendonly").map(String::as_str) {
        Some("no") => Some("none (no append-only file)".to_owned()),
        _ => values.get("appendfsync").cloned(),
    }
}

/// The memory of the keys of a queue's shards.
async fn bytes_of_keys(mut redis: MultiplexedConnection, queue: &str) -> anyhow::Result<f64> {
    let (mut cursor, mut bytes) = (0_u64, 0.0);
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(format!("*{{{queue}:*"))
            .arg("COUNT")
            .arg(1000);
        let (next, keys): (u64, Vec<String>) = scan.query_async(&mut redis).await?;
        for key in keys {
            let mut usage = redis::cmd("MEMORY");
            usage.arg("USAGE").arg(key).arg("SAMPLES").arg(1000);
            bytes += usage
                .query_async::<Option<f64>>(&mut redis)
                .await?
                .unwrap_or_default();
        }
        cursor = next;
        if cursor == 0 {
            return Ok(bytes);
        }
    }
}

async fn redis_cpu_seconds(mut redis: MultiplexedConnection) -> Option<f64> {
    let info: String = redis::cmd("INFO")
        .arg("cpu")
        .query_async(&mut redis)
        .await
        .ok()?;
    let number = |name| field(&info, name)?.parse::<f64>().ok();
    Some(number("used_cpu_user")? + number("used_cpu_sys")?)
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}
fn settings(args: &Bench, part: Part) -> String {
    let (tasks, queues) = args.room(part);
    let (tasks, queues) = (2 * tasks.max(50_000), 4 * queues.max(250));
    let bytes = (tasks * (args.work.payload.0 + 1024)).max(256 << 20);
    let replicas = args.work.replicas.max(100);
    let auth = if args.with_token { "tokens" } else { "none" };
    let limited = match part {
        Part::Limits => LIMITED_QUEUES,
        Part::Calls | Part::Flat | Part::Start | Part::Topics | Part::Trees | Part::Workflow => "",
    };
    format!(
        "auth = \"{auth}\"\nmax_queues = {queues}\nmax_replicas = {replicas}\n\
         [queues.default]\nhigh_water_tasks = {tasks}\nhigh_water_bytes = {bytes}\n{limited}"
    )
}
