//! Three taskd processes on private servers, and the crowd that uses them.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::{
    check,
    crowd::Running,
    disk::SmallDisk,
    fault::Fault,
    hostile::Hostile,
    ledger::Ledger,
    records,
    servers::{Cluster, Redis, Scripted, Server},
    support::{
        daemon::Daemon,
        proxy::{Proxy, Upstream},
    },
};

/// The servers of a run. They outlive the worlds that use them.
pub(crate) struct Servers {
    pub(crate) redis: Redis,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) sql: Scripted,
    /// One or more brokers; empty if no world needs Kafka.
    pub(crate) kafka: Vec<Scripted>,
    /// Proxies between the processes and the brokers, if these are to be cut off.
    pub(crate) kafka_proxies: Vec<Proxy>,
    /// Small disks that hold the files of some servers.
    pub(crate) disks: Vec<SmallDisk>,
    root: Option<TempDir>,
}

/// The servers to start.
pub(crate) struct Wanted {
    pub(crate) redis_program: String,
    pub(crate) sql_script: &'static str,
    pub(crate) brokers: usize,
    pub(crate) cluster: bool,
    pub(crate) proxied: bool,
}

impl Servers {
    pub(crate) async fn start(wanted: &Wanted) -> Self {
        let root = tempfile::Builder::new()
            .prefix("taskd-faults-")
            .tempdir_in("/tmp")
            .unwrap();
        Self::start_in(root, wanted).await
    }

    pub(crate) async fn start_in(root: TempDir, wanted: &Wanted) -> Self {
        let path = root.path().to_owned();
        let mut kafka_proxies = Vec::new();
        if wanted.proxied {
            for _ in 0..wanted.brokers {
                kafka_proxies.push(Proxy::start().await);
            }
        }
        let advertised: Vec<_> = kafka_proxies
            .iter()
            .map(|proxy| proxy.port().to_string())
            .collect();
        let env = vec![
            (
                "TASKD_TEST_KAFKA_BROKERS".to_owned(),
                wanted.brokers.to_string(),
            ),
            (
                "TASKD_TEST_KAFKA_ADVERTISED".to_owned(),
                advertised.join(" "),
            ),
        ];
        let (kafka, sql, cluster) = {
            let (with_cluster, cluster_dir) = (wanted.cluster, path.join("cluster"));
            let cluster = move || with_cluster.then(|| Cluster::start(cluster_dir));
            let (kafka_dir, sql_dir, script) =
                (path.join("kafka"), path.join("sql"), wanted.sql_script);
            let with_kafka = wanted.brokers > 0;
            let kafka = move || with_kafka.then(|| Scripted::start("start-kafka", kafka_dir, env));
            let sql = move || Scripted::start(script, sql_dir, Vec::new());
            let (kafka, sql, cluster) = tokio::join!(
                tokio::task::spawn_blocking(kafka),
                tokio::task::spawn_blocking(sql),
                tokio::task::spawn_blocking(cluster)
            );
            (kafka.unwrap(), sql.unwrap(), cluster.unwrap())
        };
        let kafka = brokers(kafka, wanted.brokers);
        for (proxy, broker) in kafka_proxies.iter().zip(&kafka) {
            let port = std::fs::read_to_string(broker.pid_file().with_file_name("port")).unwrap();
            proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", port.trim())));
        }
        let redis = Redis::start(&wanted.redis_program, path.join("redis"));
        Self {
            redis,
            cluster,
            sql,
            kafka,
            kafka_proxies,
            disks: Vec::new(),
            root: Some(root),
        }
    }

    fn brokers(&self) -> String {
        if self.kafka_proxies.is_empty() {
            return self.kafka[0].address().to_owned();
        }
        let addresses: Vec<_> = self
            .kafka_proxies
            .iter()
            .map(|proxy| format!("127.0.0.1:{}", proxy.port()))
            .collect();
        addresses.join(",")
    }

    /// Brings all servers back to normal, whatever fault affected them.
    pub(crate) async fn recover(&mut self) {
        let all = [&mut self.redis as &mut dyn Server, &mut self.sql].into_iter();
        let all = all.chain(
            self.kafka
                .iter_mut()
                .map(|broker| broker as &mut dyn Server),
        );
        tokio::task::block_in_place(|| {
            for server in all {
                server.signal(Signal::SIGCONT);
                server.start();
            }
            if let Some(cluster) = &mut self.cluster {
                cluster.start_again();
            }
        });
    }

    /// Keeps their data and logs after the run.
    pub(crate) fn keep(&mut self) {
        if let Some(root) = self.root.take() {
            eprintln!(
                "the servers' data and logs are kept in {}",
                root.keep().display()
            );
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.redis.dir().parent().unwrap()
    }
}

fn brokers(kafka: Option<Scripted>, count: usize) -> Vec<Scripted> {
    match kafka {
        None => Vec::new(),
        Some(one) if count == 1 => vec![one],
        Some(all) => (1..=count)
            .map(|n| all.member(all.dir().join(format!("broker-{n}/pid"))))
            .collect(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bus {
    Kafka,
    Streams,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) bus: Bus,
    /// The queue uses the Redis Cluster.
    pub(crate) cluster: bool,
    /// Each process has its own proxies to Redis and SQL, which can cut the connections.
    pub(crate) proxied: bool,
    /// The clock of each process can be changed.
    pub(crate) clocks: bool,
    pub(crate) seed: u64,
}

pub(crate) const PROCESSES: usize = 3;
pub(crate) const PARTITIONS: i32 = 3;
/// The limits of the queue `limited`, and the duration of a lease, as in [`CONFIG`].
pub(crate) const LIMIT_AT_A_TIME: usize = 2;
pub(crate) const LIMIT_GAP_MS: u128 = 400;
pub(crate) const LEASE_MS: u128 = 1500;
/// Leases are short, so that lost tasks are quickly delivered again.
const CONFIG: &str = r#"
partitions = 3
grace = "2s"
republish_after = "1s"
reconcile_every = "500ms"
[queues.default]
lease = "1500ms"
max_attempts = 1000
backoff = ["50ms", "200ms"]
[queues.two]
replicas = 2
[queues.three]
replicas = 3
[queues.doomed]
max_attempts = 2
[queues.limited]
limit_by = "given"
limit_at_a_time = 2
limit_pace = "1/400ms"
"#;

pub(crate) struct World<'a> {
    pub(crate) servers: &'a mut Servers,
    pub(crate) plan: Plan,
    /// The prefix of all names on the servers.
    pub(crate) name: String,
    pub(crate) database: String,
    pub(crate) daemons: Vec<Daemon>,
    /// The proxies of each process: to Redis and to SQL.
    pub(crate) proxies: Vec<[Proxy; 2]>,
    running: Option<Running>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) hostile: Option<Hostile>,
}

impl<'a> World<'a> {
    pub(crate) async fn start(servers: &'a mut Servers, plan: Plan) -> Self {
        let name = format!("f{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        check::execute(servers.sql.address(), &format!("CREATE DATABASE {name}")).await;
        let database = with_database(servers.sql.address(), &name);
        let mut world = Self {
            servers,
            plan,
            name,
            database,
            daemons: Vec::new(),
            proxies: Vec::new(),
            running: None,
            ledger: Arc::default(),
            hostile: None,
        };
        for n in 0..PROCESSES {
            world.start_process(n).await;
        }
        for daemon in &mut world.daemons {
            daemon.ready().await;
        }
        let urls = world.daemons.iter().map(Daemon::http).collect();
        let ports = world.daemons.iter().map(Daemon::grpc_port).collect();
        let running = Running::start(urls, ports, plan.seed);
        world.ledger = Arc::clone(&running.crowd.ledger);
        world.running = Some(running);
        world
    }

    async fn start_process(&mut self, n: usize) {
        let (mut redis, mut database) = (self.redis_url(), self.database.clone());
        if self.plan.proxied {
            let [to_redis, to_sql] = [Proxy::start().await, Proxy::start().await];
            to_redis.lead_to(Upstream::Unix(self.servers.redis.socket()));
            if !self.plan.cluster {
                redis = format!("redis://127.0.0.1:{}", to_redis.port());
            }
            let mut url = url::Url::parse(&database).unwrap();
            to_sql.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", url.port().unwrap())));
            url.set_port(Some(to_sql.port())).unwrap();
            database = url.into();
            self.proxies.push([to_redis, to_sql]);
        }
        let topic_prefix = format!("{}-", self.name);
        let mut args = vec![
            "--redis-url",
            &redis,
            "--database-url",
            &database,
            "--redis-prefix",
            &self.name,
        ];
        args.extend(["--topic-prefix", &topic_prefix]);
        let bus = match self.plan.bus {
            Bus::Kafka => format!("kafka://{}", self.servers.brokers()),
            Bus::Streams => String::new(),
        };
        if !bus.is_empty() {
            args.extend(["--bus-url", &bus]);
        }
        let env = if self.plan.clocks {
            self.clock_env(n)
        } else {
            Vec::new()
        };
        let config = format!("{CONFIG}{}", records::CONFIG);
        self.daemons.push(Daemon::begin_in(&config, &args, env));
    }

    pub(crate) fn redis_url(&self) -> String {
        match &self.servers.cluster {
            Some(cluster) if self.plan.cluster => cluster.url(),
            _ => self.servers.redis.url(),
        }
    }

    /// Connections to all Redis nodes that hold keys.
    pub(crate) async fn redis_nodes(&self) -> Vec<redis::aio::MultiplexedConnection> {
        match &self.servers.cluster {
            Some(cluster) if self.plan.cluster => cluster
                .masters()
                .await
                .into_iter()
                .map(|(_, node)| node)
                .collect(),
            _ => vec![self.servers.redis.connect().await],
        }
    }

    /// Environment variables that let [`Fault::Clock`] set the clock of a process.
    fn clock_env(&self, n: usize) -> Vec<(String, String)> {
        let file = self.clock_file(n);
        std::fs::write(&file, "+0").unwrap();
        let library = crate::fault::faketime().expect("libfaketime: scripts/install-deps test");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        vec![
            pair("LD_PRELOAD", library.to_str().unwrap()),
            pair("FAKETIME_TIMESTAMP_FILE", file.to_str().unwrap()),
            pair("FAKETIME_NO_CACHE", "1"),
            pair("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ]
    }

    pub(crate) fn clock_file(&self, n: usize) -> std::path::PathBuf {
        self.servers.dir().join(format!("{}-clock-{n}", self.name))
    }

    /// Waits for this many further completions.
    pub(crate) async fn work(&mut self, completions: usize) {
        let target = self.ledger.completed() + completions;
        let ledger = Arc::clone(&self.ledger);
        self.wait("work goes on", async || {
            (ledger.completed() >= target)
                .then_some(())
                .ok_or(String::new())
        })
        .await;
    }

    /// Waits until each hostile client has done its worst, and checks that the honest workers make
    /// progress.
    pub(crate) async fn hostile_have_harmed_nobody(&mut self) {
        let mut hostile = self.hostile.take().expect("they were started");
        self.wait("hostile clients did their worst", async || {
            hostile.missing()
        })
        .await;
        self.work(500).await;
    }

    /// Injects the faults, lets them last, heals them, and prints how long it took until work
    /// continued.
    pub(crate) async fn suffer(&mut self, faults: &[Fault], lasting: Duration) {
        let names: Vec<_> = faults.iter().map(ToString::to_string).collect();
        println!("    {} {}", clock(), names.join(", and "));
        for fault in faults {
            fault.inject(self, faults.len() == 1).await;
        }
        tokio::time::sleep(lasting).await;
        for fault in faults {
            fault.heal(self).await;
        }
        let healed = Instant::now();
        let ledger = Arc::clone(&self.ledger);
        let goes_on = async || match ledger.book().last_ok {
            Some(at) if at > healed => Ok(()),
            _ => Err("nothing was completed".to_owned()),
        };
        self.wait("the first completion after the fault", goes_on)
            .await;
        println!(
            "    {} healed; first completion after {:.1} s",
            clock(),
            healed.elapsed().as_secs_f64()
        );
    }

    /// Stops the inserts, waits until all work is done, and checks everything.
    pub(crate) async fn end(mut self) {
        let began = Instant::now();
        let mut running = self.running.take().expect("it runs");
        running.calm_down().await;
        let urls: Vec<String> = self.daemons.iter().map(Daemon::http).collect();
        self.wait("all records are read", async || {
            check::is_read(&urls[0]).await
        })
        .await;
        let database = self.database.clone();
        self.wait("all work is done", async || check::is_done(&database).await)
            .await;
        println!(
            "    {} drained after {:.1} s",
            clock(),
            began.elapsed().as_secs_f64()
        );
        self.wait("the books balance and fsck finds nothing", async || {
            check::books_and_fsck(&urls).await
        })
        .await;
        running.stop().await;
        let mut backlog = check::Leftovers::open(&self).await;
        self.wait("nothing is left over", async || backlog.none().await)
            .await;
        let settled = began.elapsed();
        check::everything(&self).await;
        let finds = check::books_and_fsck(&urls).await;
        assert_eq!(finds, Ok(()), "where nothing is left, everything agrees");
        for daemon in &mut self.daemons {
            daemon.ready().await;
            let status = daemon.stop().await;
            assert!(status.success(), "taskd ended with {status}");
        }
        println!(
            "    {} nothing is left over after {:.1} s",
            clock(),
            settled.as_secs_f64()
        );
        check::execute(
            self.servers.sql.address(),
            &format!("DROP DATABASE {}", self.name),
        )
        .await;
    }

    /// Waits up to two minutes until `look` returns `Ok`. Panics if a process ends by itself or a
    /// promise is broken.
    async fn wait(&mut self, what: &str, mut look: impl AsyncFnMut() -> Result<(), String>) {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let found = look().await;
            for (n, daemon) in self.daemons.iter_mut().enumerate() {
                assert!(
                    daemon.end().is_none(),
                    "process {n} ended by itself: {:?}",
                    daemon.end()
                );
            }
            let violations = self.ledger.book().violations.clone();
            assert!(
                violations.is_empty(),
                "{} promises broken:\n{}",
                violations.len(),
                violations.join("\n")
            );
            match found {
                Ok(()) => return,
                Err(why) => assert!(
                    Instant::now() < deadline,
                    "waited in vain until {what}: {why}"
                ),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) fn server(&mut self, which: crate::fault::Which) -> &mut dyn Server {
        use crate::fault::Which;
        match which {
            Which::Redis => &mut self.servers.redis,
            Which::Sql => &mut self.servers.sql,
            Which::Kafka(n) => &mut self.servers.kafka[n],
        }
    }

    pub(crate) fn signal(&self, n: usize, signal: Signal) {
        self.daemons[n].signal(signal);
    }
}

fn with_database(url: &str, name: &str) -> String {
    let mut url = url::Url::parse(url).unwrap();
    url.set_path(name);
    url.into()
}

/// The time of day, as in the logs.
pub(crate) fn clock() -> String {
    let now = humantime::format_rfc3339_millis(std::time::SystemTime::now()).to_string();
    now[11..23].to_owned()
}

/// The counts of a ledger, in one line.
pub(crate) fn summary(ledger: &Ledger) -> String {
    let book = ledger.book();
    let answers: BTreeMap<_, _> = book.refused.iter().collect();
    let (inserted, completed, pushed) = (book.inserts.len(), book.completed, book.pushed);
    format!(
        "{inserted} inserted, {pushed} leases on streams, {completed} completed, answers {answers:?}, {} lies; {}; {}; {}",
        book.lies,
        book.records.summary(),
        book.executions.summary(),
        book.topologies.summary()
    )
}
