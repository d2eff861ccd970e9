//! Limits per key, seen by the site that is crawled: fifty hosts, the crawl of `examples/crawl` and
//! `taskd work --http-check`, and kills of all that takes part.

use std::{
    collections::BTreeSet,
    process::{Child, Command, Stdio},
    time::Duration,
};

use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use url::Url;
use uuid::Uuid;

use crate::{
    crawl::example,
    support::{
        PATIENCE,
        daemon::Daemon,
        kafka,
        mariadb::MysqlDatabase,
        redis::{Fsync, RedisServer},
        redis_cluster::{own_prefix, shared},
        site::{self, Seen, Site},
        store_contract::Database,
        until,
    },
};

const HOSTS: u8 = 50;
const PAGES: usize = 4;
/// The workers of each kind.
const WORKERS: usize = 4;
/// Longer than any hold and any absence of taskd here: who did not report still has its lease.
const LEASE: Duration = Duration::from_secs(10);
/// The host that answers 429 for a while, and what it asks for then.
const BUSY: u8 = 3;
const HOLD: Duration = Duration::from_secs(3);
/// The host with a Crawl-delay.
const SLOW: u8 = 7;
const CRAWL_DELAY: Duration = Duration::from_secs(1);
const FAULTS: usize = 12;

/// The limits of a queue, and how many workers do each page.
#[derive(Clone, Copy, Debug)]
struct Limits {
    at_a_time: usize,
    gap: Duration,
    from_end: bool,
    replicas: u32,
}

/// The site sees exactly these: no lease begins before the one before it has ended.
const ONE_BY_ONE: Limits = Limits {
    at_a_time: 1,
    gap: Duration::from_millis(300),
    from_end: true,
    replicas: 1,
};
const TWO_AT_A_TIME: Limits = Limits {
    at_a_time: 2,
    gap: Duration::from_millis(600),
    from_end: false,
    replicas: 3,
};

impl Limits {
    fn settings(&self, queue: &str) -> String {
        let from = if self.from_end { "end" } else { "start" };
        let gap = self.gap.as_millis();
        format!(
            "[queues.{queue}]\nlease = \"10s\"\nmax_attempts = 100\nbackoff = [\"100ms\"]\nlimit_by = \"host\"\n\
             limit_at_a_time = {}\nlimit_pace = \"1/{gap}ms\"\nlimit_from = \"{from}\"\n",
            self.at_a_time
        )
    }
}

/// The processes of taskd, and what keeps their tasks.
struct World {
    daemons: Vec<Daemon>,
    redis: Option<RedisServer>,
}

impl World {
    /// Kills Redis and starts it again with all that it has answered.
    fn restart_redis(&mut self) {
        match &mut self.redis {
            Some(redis) => tokio::task::block_in_place(|| {
                redis.kill9();
                redis.restart();
            }),
            // taskd starts its own again. A Redis Cluster that fails over may lose its last second.
            None => {
                self.daemons[0].kill9_redis();
            }
        }
    }
}

/// A `taskd work --http-check`.
struct Checker {
    child: Child,
    number: usize,
    server: String,
}

impl Checker {
    fn start(number: usize, server: String) -> Self {
        Self {
            child: Self::spawn(number, &server),
            number,
            server,
        }
    }

    fn spawn(number: usize, server: &str) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
        {
            command.env_remove(name);
        }
        // A machine has one worker of a name, and other tests run beside this one.
        let (_, port) = server.rsplit_once(':').unwrap();
        let name = format!("check-{number}-{port}");
        command
            .args(["work", "check", "--http-check", "--concurrency", "8"])
            .args(["--lease", "10s", "--server", server, "--name", &name])
            // What it would keep by itself, were the queue not limited.
            .args(["--host-delay", "1h"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().unwrap()
    }

    fn kill9_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(self.number, &self.server);
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The workers of `examples/crawl`. One that is aborted dies with what it has.
fn start_crawler(args: &example::Args, number: usize) -> JoinHandle<anyhow::Result<()>> {
    let args = example::Args {
        name: format!("crawler-{number}"),
        ..args.clone()
    };
    tokio::spawn(async move { example::crawl(&args, |_| ()).await })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_sees_no_more_than_its_limits_on_embedded() {
    let (crawl, check) = (ONE_BY_ONE, TWO_AT_A_TIME);
    let config = crawl.settings("crawl") + &check.settings("check");
    let world = World {
        daemons: vec![Daemon::start(&config, &[]).await],
        redis: None,
    };
    witness(world, crawl, check, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_sees_no_more_than_its_limits_on_mariadb_and_kafka() {
    let crawl = Limits {
        replicas: 1,
        ..TWO_AT_A_TIME
    };
    let check = Limits {
        replicas: 3,
        ..ONE_BY_ONE
    };
    let redis = RedisServer::start(Fsync::Always);
    let bus = format!("kafka://{}", kafka::shared().await);
    let prefix = format!("limits-{}-", Uuid::new_v4());
    let redis_url = redis.url();
    let args = [
        "--redis-url",
        &redis_url,
        "--bus-url",
        &bus,
        "--topic-prefix",
        &prefix,
    ];
    three_processes(&args, Some(redis), crawl, check).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_sees_no_more_than_its_limits_on_a_redis_cluster() {
    let crawl = Limits {
        replicas: 3,
        ..ONE_BY_ONE
    };
    let check = Limits {
        replicas: 1,
        ..TWO_AT_A_TIME
    };
    let prefix = own_prefix();
    let args = ["--redis-url", shared().await, "--redis-prefix", &prefix];
    three_processes(&args, None, crawl, check).await;
}

async fn three_processes(args: &[&str], redis: Option<RedisServer>, crawl: Limits, check: Limits) {
    let database = MysqlDatabase::create().await;
    let database_url = database.url();
    let args = [args, &["--database-url", &database_url]].concat();
    let queues = crawl.settings("crawl") + &check.settings("check");
    let config = format!("partitions = 3\n{queues}");
    let mut daemons = Vec::new();
    for _ in 0..3 {
        daemons.push(Daemon::start(&config, &args).await);
    }
    let restarts = redis.is_some();
    witness(World { daemons, redis }, crawl, check, restarts).await;
    database.remove().await;
}

/// `restarts_redis`: once, in the middle.
async fn witness(mut world: World, crawl: Limits, check: Limits, restarts_redis: bool) {
    let plan = site::Plan {
        hosts: HOSTS,
        pages: PAGES,
        latency: Duration::from_millis(30),
        crawl_delay: Some((SLOW, CRAWL_DELAY.as_secs_f64())),
    };
    let crawled = Site::start(plan.clone()).await;
    let checked = Site::start(plan).await;
    for site in [&crawled, &checked] {
        site.order(BUSY, 2, StatusCode::TOO_MANY_REQUESTS, HOLD);
    }
    let tasks = |queue: &str, site: &Site, replicas: u32| -> Vec<Value> {
        let pages = site.pages();
        pages
            .iter()
            .map(|page| json!({"queue": queue, "key": page, "replicas": replicas}))
            .collect()
    };
    let checks = tasks("check", &checked, check.replicas);
    world.daemons[0].insert(&checks).await;

    let roots = crawled.hosts();
    let roots = roots.map(|host| Url::parse(&crawled.pages_of(host)[0]).unwrap());
    let args = example::Args {
        urls: roots.collect(),
        grpc: world.daemons.iter().map(Daemon::grpc).collect(),
        http: world.daemons[0].http(),
        workers: 1,
        name: String::new(),
        replicas: crawl.replicas,
        queue: "crawl".into(),
        lease: LEASE,
    };
    let mut crawlers = Vec::new();
    let mut checkers = Vec::new();
    for number in 0..WORKERS {
        crawlers.push(start_crawler(&args, number));
        let server = world.daemons[number % world.daemons.len()].http();
        checkers.push(Checker::start(number, server));
    }
    until("the site is crawled", async || {
        // Three of the slow host: what follows knows its Crawl-delay.
        crawled.seen(SLOW).requests.len() >= 3 && !checked.seen(1).requests.is_empty()
    })
    .await;

    let all = u64::from(HOSTS) * PAGES as u64;
    let is_done = async |daemon: &Daemon| {
        daemon.queue("crawl").await["completed"] == all
            && daemon.queue("check").await["completed"] == all
    };
    let mut second = tokio::time::interval(Duration::from_secs(1));
    for fault in 0..FAULTS {
        // The pause between the faults; nothing waits for it.
        second.tick().await;
        let number = fault / 3;
        match fault % 3 {
            0 => {
                let processes = world.daemons.len();
                world.daemons[number % processes].kill9_and_restart();
            }
            1 => {
                let crawler = &mut crawlers[number % WORKERS];
                crawler.abort();
                *crawler = start_crawler(&args, number % WORKERS);
            }
            _ if restarts_redis && fault == 5 => world.restart_redis(),
            _ => checkers[number % WORKERS].kill9_and_restart(),
        }
    }
    for daemon in &mut world.daemons {
        daemon.ready().await;
    }
    let done = async {
        until("all pages are done", async || {
            is_done(&world.daemons[0]).await
        })
        .await;
        for crawler in crawlers {
            crawler.await.unwrap().unwrap();
        }
    };
    tokio::time::timeout(2 * PATIENCE, done).await.unwrap();
    drop(checkers);

    let crawls = tasks("crawl", &crawled, crawl.replicas);
    for (tasks, site, limits) in [(&crawls, &crawled, crawl), (&checks, &checked, check)] {
        let histories = histories(&world.daemons[0], tasks, limits).await;
        check_leases(&histories, site, limits);
        let delivery = longest_delivery(&histories, site);
        for host in site.hosts() {
            check_host(host, &site.seen(host), limits, delivery);
        }
        // The checks do not read robots.txt.
        if tasks == &crawls {
            let slow = site.seen(SLOW);
            let least = match limits.from_end {
                true => CRAWL_DELAY,
                false => less_delivery(CRAWL_DELAY, delivery),
            };
            assert!(
                slow.shortest_gap(limits.at_a_time) >= Some(least),
                "shorter than the Crawl-delay: {slow:?}"
            );
        }
    }
    for daemon in &mut world.daemons {
        assert!(daemon.stop().await.success());
    }
}

/// What a gap between two leases may be at the site: it takes time to deliver the first one, a
/// quarter of the gap or, on a busy machine, more.
fn less_delivery(gap: Duration, delivery: Duration) -> Duration {
    gap.saturating_sub(delivery.max(gap / 4))
}

/// The longest time from the beginning of a lease to the request that follows.
fn longest_delivery(histories: &[History], site: &Site) -> Duration {
    let mut longest = 0;
    for host in site.hosts() {
        let requests = site.seen(host).requests;
        let pages = site.pages_of(host);
        for history in histories.iter().filter(|one| pages.contains(&one.key)) {
            for (from, until) in &history.leases {
                let of_lease = requests.iter().find(|asked| {
                    (from..=until).contains(&&asked.began_unix_ms)
                        && history.key.ends_with(&asked.path)
                });
                let delivery = of_lease.map_or(0, |asked| asked.began_unix_ms - from);
                longest = delivery.max(longest);
            }
        }
    }
    Duration::from_millis(longest.cast_unsigned())
}

/// By what the site itself has seen.
fn check_host(host: u8, seen: &Seen, limits: Limits, delivery: Duration) {
    assert!(
        seen.most <= limits.at_a_time,
        "host {host}, {limits:?}: {} at a time: {seen:?}",
        seen.most
    );
    let often = seen.answered();
    assert!(
        often.len() == PAGES
            && often
                .values()
                .all(|times| *times >= limits.replicas as usize),
        "host {host}, {limits:?}: {often:?}"
    );
    let (least, shortest) = if limits.from_end {
        assert_eq!(seen.in_holds, 0, "host {host}, {limits:?}: {seen:?}");
        (limits.gap, seen.shortest_pause())
    } else {
        (less_delivery(limits.gap, delivery), seen.shortest_gap(0))
    };
    assert!(
        shortest >= Some(least),
        "host {host}, {limits:?}: {shortest:?} apart, not {least:?}: {seen:?}"
    );
}

/// The attempts of a task, of which taskd knows the beginning.
struct History {
    key: String,
    /// From, until (ms).
    leases: Vec<(i64, i64)>,
}

/// Checks that each task was done by NUM distinct workers.
async fn histories(daemon: &Daemon, tasks: &[Value], limits: Limits) -> Vec<History> {
    let (status, answer) = daemon.post("/v1/tasks", &json!(tasks)).await;
    assert_eq!(status, 200, "{answer}");
    let known = answer["results"].as_array().unwrap();
    let mut all = Vec::new();
    for (task, known) in tasks.iter().zip(known) {
        assert_eq!(known["status"], "DUPLICATE", "{task} was lost");
        let id = known["id"].as_str().unwrap();
        let (_, file) = daemon.get(&format!("/v1/tasks/{id}")).await;
        let attempts = file["history"].as_array().unwrap();
        let done = attempts
            .iter()
            .filter(|one| one["state"] == "COMPLETED" && one["surplus"] != true);
        let workers: Vec<&str> = done.map(|one| one["worker"].as_str().unwrap()).collect();
        let distinct: BTreeSet<_> = workers.iter().collect();
        let wanted = limits.replicas as usize;
        assert_eq!((workers.len(), distinct.len()), (wanted, wanted), "{file}");
        let time = |one: &Value, name: &str| taskd::wire::time::from_rfc_3339(one[name].as_str()?);
        let leases = attempts
            .iter()
            .filter_map(|one| Some((time(one, "from")?, time(one, "until")?)));
        all.push(History {
            key: task["key"].as_str().unwrap().to_owned(),
            leases: leases.collect(),
        });
    }
    all
}

/// By how much later than its lease the end of an attempt is written, at most.
const WRITTEN_WITHIN_MS: i64 = 100;

/// By the leases' own times, which are Redis's. From an end to the next beginning, the site knows
/// better.
fn check_leases(histories: &[History], site: &Site, limits: Limits) {
    for host in site.hosts() {
        let pages = site.pages_of(host);
        let of_host = histories.iter().filter(|one| pages.contains(&one.key));
        let mut leases: Vec<_> = of_host.flat_map(|one| one.leases.clone()).collect();
        leases.sort_unstable();
        assert!(leases.len() >= PAGES, "host {host}: {leases:?}");
        for (from, _) in &leases {
            let running = leases
                .iter()
                .filter(|(other, until)| other <= from && *from < until - WRITTEN_WITHIN_MS);
            assert!(
                running.count() <= limits.at_a_time,
                "host {host}, {limits:?}: too many at {from}: {leases:?}"
            );
        }
        let gap = limits.gap.as_millis() as i64;
        for pair in leases.windows(2) {
            assert!(
                pair[1].0 - pair[0].0 >= gap,
                "host {host}, {limits:?}: {pair:?} in {leases:?}"
            );
        }
    }
}
