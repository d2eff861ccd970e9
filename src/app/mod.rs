//! The composition root: the only file that knows which backends there are. It connects, starts the pipelines, and stops them in order.

mod memory;
mod partitions;

use std::{
    future::Future,
    io::{self, IsTerminal, Write},
    path::Path,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
pub use partitions::raise as raise_partitions;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    api::{Api, query},
    bus::{
        self, Bus,
        kafka::{self, Kafka},
        redis_streams::RedisStreams,
    },
    config::{Pipeline, Settings, without_password},
    coordination::{self, Coordination},
    dedup::Filter,
    embedded::{DataDir, RedisServer},
    ingress::{self, Budget, Waiting},
    pipelines::{
        admission::{Gates, Occupancy, QueueSync},
        discovery, fanout,
        publishing::{DeadLetters, Publisher},
        tasks, watchdog,
    },
    queue::Queue,
    redis_pool::{self, Redis},
    runtime::{Clock, Supervisor, in_short},
    store::{self, Store, mysql::MysqlStore, sqlite::SqliteStore},
    telemetry::metrics,
};

/// Runs until SIGTERM or Ctrl-C, then drains. A second signal ends the process at once.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    ingress::raise_limit();
    let settings = Arc::new(settings);
    let stop = CancellationToken::new();
    let own_redis = Arc::new(OnceLock::new());
    let signals = tokio::spawn(watch_signals(stop.clone(), settings.grace_period, Arc::clone(&own_redis))?);
    // Everything that uses Redis stops before Redis does.
    let base = Supervisor::new();
    let result = serve(&settings, &own_redis, &base, &stop).await;
    base.stop();
    base.wait().await;
    signals.abort();
    result?;
    tracing::info!("stopped");
    Ok(())
}

/// Applies the migrations of the store.
pub async fn migrate(settings: Settings) -> anyhow::Result<()> {
    let _lock = match settings.database_url {
        None => Some(DataDir::lock(&settings.data_dir)?),
        Some(_) => None,
    };
    let store = open_store(&settings).await?;
    println!("the database is up to date: {}", store_name(&settings));
    store.close().await;
    Ok(())
}

/// The name of a process with a Redis of its own: the lock on the data folder makes it the only one there.
const ALONE: &str = "alone";

/// What only a backend knows to be wrong with the settings, as far as it can be told without a server.
pub fn check(settings: &Settings) -> anyhow::Result<()> {
    match kafka_config(settings)? {
        Some(config) => Ok(Kafka::check(&config)?),
        None => Ok(()),
    }
}

/// How long a round lasts at least: what is lost again and again must not keep a machine busy.
const ROUND: Duration = Duration::from_secs(1);

/// Connects, and runs the pipelines until the stop, in one round unless Redis loses everything.
async fn serve(
    settings: &Arc<Settings>,
    own_redis: &OnceLock<Arc<RedisServer>>,
    base: &Supervisor,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let metrics = metrics::install(settings.watchdog.forget_queues_after)?;
    // Ports and the folder first: a mistake there shows before anything is started.
    let listeners = Listeners::bind(settings).await?;
    let embedded = settings.redis_url.is_none() || settings.database_url.is_none();
    let data_dir = if embedded { Some(DataDir::lock(&settings.data_dir)?) } else { None };

    let wait = Wait { door: Waiting::start(listeners.http()?), stop };
    let redis_url = match (&settings.redis_url, &data_dir) {
        (None, Some(data_dir)) => {
            let server = Arc::new(RedisServer::start_with(data_dir, settings.redis.max_memory).await?);
            watch_redis(own_redis.get_or_init(|| server), base)
        }
        (Some(url), _) => url.clone(),
        (None, None) => bail!("an embedded Redis needs a data folder"),
    };
    let Some(redis) = wait.until("Redis", || connect_redis(&redis_url, settings)).await? else {
        return Ok(());
    };
    let Some(store) = wait.until("the database", || open_store(settings)).await? else { return Ok(()) };
    let upkeep = metrics.clone();
    let upkeep_stop = base.stop_token();
    base.spawn_once(async move {
        upkeep_stop.run_until_cancelled(metrics::upkeep(upkeep)).await;
    });
    let process = match settings.redis_url {
        None => ALONE.to_owned(),
        Some(_) => Uuid::new_v4().to_string(),
    };
    let clock = Clock::of_this_machine();
    let budget = Budget::new(settings.limits.request_budget);
    let what = Foundation { settings: Arc::clone(settings), redis, store, metrics, budget, process, clock };
    let (mut listeners, mut wait, mut is_first) = (listeners, wait, true);
    loop {
        let began = Instant::now();
        listeners = match round(&what, listeners, wait, is_first).await? {
            Over::Stopped => break,
            Over::Lost(kept) => kept,
        };
        wait = Wait { door: Waiting::start(listeners.http()?), stop };
        is_first = false;
        // At the stop the next round ends as soon as it has begun.
        stop.run_until_cancelled(tokio::time::sleep(ROUND.saturating_sub(began.elapsed()))).await;
    }
    let closed = tokio::time::timeout(settings.grace_period, what.store.close()).await;
    if closed.is_err() {
        tracing::warn!("the database was not closed in time");
    }
    Ok(())
}

/// What stays from round to round.
struct Foundation {
    settings: Arc<Settings>,
    redis: Redis,
    store: Arc<dyn Store>,
    metrics: metrics::Handle,
    /// Callers of a round before may still be there in the next.
    budget: Budget,
    /// Names this process to the others. Whoever comes again under its name has at once what it had.
    process: String,
    clock: Clock,
}

/// How a round ended.
enum Over {
    Stopped,
    /// Redis or the bus has lost everything, so that what the pipelines know of them means nothing any more. The ports are kept: who comes
    /// meanwhile waits.
    Lost(Listeners),
}

/// The bound ports. A round listens on copies, so that they stay ours between two of them.
struct Listeners {
    http: std::net::TcpListener,
    grpc: std::net::TcpListener,
}

impl Listeners {
    async fn bind(settings: &Settings) -> anyhow::Result<Self> {
        let http = ingress::bind(settings.http_listen, "http").await?.into_std()?;
        Ok(Self { http, grpc: ingress::bind(settings.grpc_listen, "grpc").await?.into_std()? })
    }

    fn http(&self) -> io::Result<TcpListener> {
        TcpListener::from_std(self.http.try_clone()?)
    }

    fn grpc(&self) -> io::Result<TcpListener> {
        TcpListener::from_std(self.grpc.try_clone()?)
    }
}

/// Errors after which only a new round helps.
fn is_lost(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(bus::Error::is_lost)
}

/// Starts the pipelines and the ways in; ends them at the stop, or when Redis has lost everything. The next round finds the bus empty, in a
/// new generation, and shards without one, which the watchdog brings back from SQL. What was published into the emptied Redis before anybody
/// noticed is not marked, or is found missing.
async fn round(what: &Foundation, listeners: Listeners, wait: Wait<'_>, is_first: bool) -> anyhow::Result<Over> {
    let Foundation { settings, redis, store, metrics, budget, process, clock } = what;
    let Some(bus) = wait.until("the bus", || open_bus(settings, Some(redis), process)).await? else {
        return Ok(Over::Stopped);
    };

    let queue = Queue::of_process(redis.clone(), process.clone());
    // They may go away again at any moment from now on, also at this one.
    let unreachable = |error: store::Error| Unreachable::Yet(anyhow::Error::new(error).context("cannot read it"));
    let database = || async { store.store_id().await.map_err(unreachable) };
    let Some(store_id) = wait.until("the database", database).await? else { return Ok(Over::Stopped) };
    let coordination = Coordination::new(redis.clone(), process, clock.clone());
    let own = || async { own(&coordination, &store_id).await.map_err(of_coordination) };
    let Some(()) = wait.until("Redis", own).await? else { return Ok(Over::Stopped) };
    let publisher = Publisher::new(Arc::clone(store), Arc::clone(&bus), clock.clone());
    let letters = DeadLetters::new(Arc::clone(&bus), clock.clone());
    let (gates, occupancy) = (Gates::default(), Occupancy::default());
    let queues = || async {
        let (store, gates, occupancy) = (Arc::clone(store), gates.clone(), occupancy.clone());
        QueueSync::start(store, queue.clone(), gates, occupancy, clock.clone()).await.map_err(unreachable)
    };
    let Some(queues) = wait.until("the database", queues).await? else { return Ok(Over::Stopped) };
    let runs = |pipeline| settings.pipelines.contains(&pipeline);
    let filter = Filter::new(redis.clone());
    if runs(Pipeline::Discovery) {
        let check = || async {
            let checked = discovery::check_filter(&**store, &filter).await;
            checked.map_err(|error| Unreachable::Yet(error.into()))
        };
        let Some(()) = wait.until("the database", check).await? else { return Ok(Over::Stopped) };
    }
    let (http, grpc) = (listeners.http()?, listeners.grpc()?);
    let (http_addr, grpc_addr) = (http.local_addr()?, grpc.local_addr()?);

    // Nothing fails from here on: what is started is also awaited.
    let supervisor = &Supervisor::giving_up_at(is_lost);
    coordination.watch_owner(store_id, supervisor);
    partitions::watch(Arc::clone(&bus), supervisor);
    memory::watch(redis.clone(), settings.redis.max_memory, gates.clone(), queue.clone(), supervisor);
    coordination.watch_clock(supervisor);
    queues.keep_on(supervisor);
    queue.start_listening(supervisor);
    if runs(Pipeline::Watchdog) {
        let context = watchdog::Context {
            store: Arc::clone(store),
            bus: Arc::clone(&bus),
            queue: queue.clone(),
            coordination: coordination.clone(),
            filter: filter.clone(),
            publisher: publisher.clone(),
            letters: letters.clone(),
            gates: gates.clone(),
            occupancy: occupancy.clone(),
            clock: clock.clone(),
            settings: Arc::clone(settings),
        };
        watchdog::start(context, supervisor);
    }
    if runs(Pipeline::Fanout) {
        let context = fanout::Context {
            store: Arc::clone(store),
            bus: Arc::clone(&bus),
            queue: queue.clone(),
            coordination,
            letters: letters.clone(),
            gates: gates.clone(),
            clock: clock.clone(),
            settings: Arc::clone(settings),
        };
        fanout::start(context, supervisor);
    }
    let discovery = runs(Pipeline::Discovery).then(|| {
        let context = discovery::Context {
            store: Arc::clone(store),
            bus: Arc::clone(&bus),
            filter,
            publisher,
            letters,
            gates: gates.clone(),
            occupancy,
            clock: clock.clone(),
            settings: Arc::clone(settings),
        };
        discovery::start(context, supervisor)
    });
    let tasks = runs(Pipeline::Tasks)
        .then(|| tasks::start(queue.clone(), Arc::clone(store), Arc::clone(&bus), settings, supervisor));
    let query = query::Handle::new(Arc::clone(store), queue.clone(), clock.clone());
    let end = wait.stop.child_token();
    let state = ingress::State {
        api: Api { discovery, tasks, query: Some(query), stop: end.clone() },
        progress: supervisor.progress().clone(),
        gates,
        settings: Arc::clone(settings),
        metrics: metrics.clone(),
        budget: budget.clone(),
        stop: end.clone(),
    };
    let stop = wait.stop;
    wait.door.end().await;
    let servers = tokio::spawn(async move {
        tokio::join!(ingress::http::serve(http, state.clone()), ingress::grpc::serve(grpc, state)).1
    });
    if is_first {
        greet(settings, http_addr, grpc_addr);
    }

    let over = tokio::select! {
        () = stop.cancelled() => {
            tracing::info!("stopping: no new work; finishing what is in hand");
            // From now on connections are refused.
            drop(listeners);
            Over::Stopped
        }
        error = supervisor.given_up() => {
            tracing::warn!("starting over: {}", in_short(error));
            Over::Lost(listeners)
        }
    };
    // First the ways in, while the pipelines still answer; then the pipelines, for which a part of the grace period is kept.
    end.cancel();
    let deadline = tokio::time::Instant::now() + settings.grace_period;
    let served = tokio::time::timeout_at(deadline - settings.grace_period / 4, servers).await;
    supervisor.stop();
    let drained = tokio::time::timeout_at(deadline, async {
        supervisor.wait().await;
        queue.drained().await;
        bus.close().await;
    });
    let grace = humantime::format_duration(settings.grace_period);
    if drained.await.is_err() {
        bail!("what was in hand did not end within the grace period ({grace}); it is put back when its leases run out");
    }
    match (served, &over) {
        (Ok(served), _) => served.context("a listener panicked")??,
        // They do not read their answers. Nothing is promised to them: a stop that was asked for has gone well.
        (Err(_), Over::Stopped) => tracing::warn!("some callers did not end within the grace period ({grace})"),
        // They are told to try again, whenever they end.
        (Err(_), Over::Lost(_)) => tracing::warn!("some callers of before are still there"),
    }
    Ok(over)
}

/// Sets this process's clock, and claims Redis for the database.
async fn own(coordination: &Coordination, store_id: &str) -> coordination::Result<()> {
    coordination.follow_clock().await?;
    coordination.own(store_id).await
}

fn of_coordination(error: coordination::Error) -> Unreachable {
    if error.is_transient() { Unreachable::Yet(error.into()) } else { Unreachable::Ever(error.into()) }
}

/// Starts it again whenever it dies; answers its URL.
fn watch_redis(server: &Arc<RedisServer>, base: &Supervisor) -> String {
    let (watched, stop) = (Arc::clone(server), base.stop_token());
    base.spawn("redis-server", move || {
        let (server, stop) = (Arc::clone(&watched), stop.clone());
        async move {
            server.supervise(stop).await;
            Ok(())
        }
    });
    server.url().to_owned()
}

/// Why something cannot be reached: wait for it, or give up.
enum Unreachable {
    Yet(anyhow::Error),
    Ever(anyhow::Error),
}

/// For servers that are not there yet.
struct Wait<'a> {
    /// Where callers are told.
    door: Waiting,
    stop: &'a CancellationToken,
}

impl Wait<'_> {
    /// Tries until it works, says once what it waits for, and how it went on. `None` at the stop.
    async fn until<T, Fut>(&self, what: &'static str, mut connect: impl FnMut() -> Fut) -> anyhow::Result<Option<T>>
    where
        Fut: Future<Output = Result<T, Unreachable>>,
    {
        self.door.wait_for(what);
        let (mut waited, mut pause) = (false, Duration::from_millis(100));
        loop {
            let connected = tokio::select! {
                connected = connect() => connected,
                () = self.stop.cancelled() => return Ok(None),
            };
            match connected {
                Ok(connected) => {
                    if waited {
                        tracing::info!("{what} is there: going on");
                    }
                    return Ok(Some(connected));
                }
                Err(Unreachable::Ever(error)) => return Err(error),
                Err(Unreachable::Yet(error)) if !waited => {
                    tracing::warn!("waiting for {what}: {}", in_short(&*error));
                    waited = true;
                }
                Err(Unreachable::Yet(error)) => tracing::debug!("still waiting for {what}: {}", in_short(&*error)),
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_secs(5)),
                () = self.stop.cancelled() => return Ok(None),
            }
        }
    }
}

async fn connect_redis(url: &str, settings: &Settings) -> Result<Redis, Unreachable> {
    let sort = |error: redis_pool::Error| {
        let is_transient = error.is_transient();
        let error = anyhow::Error::new(error).context(format!("cannot use {}", without_password(url)));
        if is_transient { Unreachable::Yet(error) } else { Unreachable::Ever(error) }
    };
    let redis = Redis::connect_as(url, &settings.redis_prefix, &settings.redis).await.map_err(sort)?;
    redis.check().await.map_err(sort)?;
    Ok(redis)
}

async fn open_store(settings: &Settings) -> Result<Arc<dyn Store>, Unreachable> {
    let opened: store::Result<Arc<dyn Store>> = match settings.database_url.as_deref() {
        None => sqlite(&settings.data_dir.join("taskd.db")).await,
        Some(url) => match url.strip_prefix("sqlite://") {
            Some(path) => sqlite(Path::new(path)).await,
            None => {
                MysqlStore::connect(url, settings.database_pool).await.map(|store| Arc::new(store) as Arc<dyn Store>)
            }
        },
    };
    opened.map_err(|error| {
        let transient = error.is_transient();
        let error = anyhow::Error::new(error).context(format!("cannot open {}", store_name(settings)));
        if transient { Unreachable::Yet(error) } else { Unreachable::Ever(error) }
    })
}

async fn sqlite(path: &Path) -> store::Result<Arc<dyn Store>> {
    Ok(Arc::new(SqliteStore::open(path, None).await?))
}

/// `redis` where the bus is in it.
async fn open_bus(settings: &Settings, redis: Option<&Redis>, process: &str) -> Result<Arc<dyn Bus>, Unreachable> {
    let opened: bus::Result<Arc<dyn Bus>> = match kafka_config(settings).map_err(Unreachable::Ever)? {
        None => {
            let redis = redis.context("Redis Streams need a Redis").map_err(Unreachable::Ever)?;
            let opened = RedisStreams::open(redis.clone(), &settings.topic_prefix, settings.partitions).await;
            opened.map(|bus| Arc::new(bus.process(process)) as Arc<dyn Bus>)
        }
        Some(config) => Kafka::open(config).await.map(|bus| Arc::new(bus) as Arc<dyn Bus>),
    };
    opened.map_err(unreachable_bus)
}

/// Who is refused for a password or a certificate will not be let in later.
fn unreachable_bus(error: bus::Error) -> Unreachable {
    match error {
        bus::Error::Misconfigured(_) => Unreachable::Ever(error.into()),
        _ => Unreachable::Yet(error.into()),
    }
}

fn kafka_config(settings: &Settings) -> anyhow::Result<Option<kafka::Config>> {
    let Some(url) = settings.bus_url.as_deref() else { return Ok(None) };
    Ok(Some(kafka::Config {
        brokers: url.strip_prefix("kafka://").unwrap_or(url).to_owned(),
        properties: settings.kafka.resolved().map_err(anyhow::Error::msg)?,
        topic_prefix: settings.topic_prefix.clone(),
        partitions: settings.partitions,
        retention: settings.topic_retention,
    }))
}

impl From<Unreachable> for anyhow::Error {
    fn from(unreachable: Unreachable) -> Self {
        match unreachable {
            Unreachable::Yet(error) | Unreachable::Ever(error) => error,
        }
    }
}

fn store_name(settings: &Settings) -> String {
    match &settings.database_url {
        Some(url) => without_password(url),
        None => format!("SQLite in {}", settings.data_dir.join("taskd.db").display()),
    }
}

/// The first signal cancels `stop`; the second ends the process.
fn watch_signals(
    stop: CancellationToken,
    grace: Duration,
    own_redis: Arc<OnceLock<Arc<RedisServer>>>,
) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    Ok(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        let grace = humantime::format_duration(grace);
        tracing::info!("draining, at most {grace}; a second signal ends at once");
        stop.cancel();
        next().await;
        tracing::warn!("ended by a second signal");
        if let Some(server) = own_redis.get() {
            server.terminate();
        }
        std::process::exit(130);
    })
}

/// On a terminal: what runs where, and what to try next.
fn greet(settings: &Settings, http: std::net::SocketAddr, grpc: std::net::SocketAddr) {
    let pipelines: Vec<_> = settings.pipelines.iter().map(|pipeline| pipeline.as_str()).collect();
    let redis = settings
        .redis_url
        .as_deref()
        .map_or_else(|| format!("redis-server of its own in {}", settings.data_dir.display()), without_password);
    let bus = settings.bus_url.as_deref().map_or_else(|| "Redis Streams in that Redis".to_owned(), without_password);
    tracing::info!(pipelines = pipelines.join(","), %http, %grpc, "taskd is up: http {http}, grpc {grpc}");
    if !std::io::stdout().is_terminal() {
        return;
    }
    let store = store_name(settings);
    let pipelines = pipelines.join(", ");
    let text = format!(
        "\n  taskd runs {pipelines}\n  http   http://{http}\n  grpc   http://{grpc}\n  queue  {redis}\n  store  {store}\n  bus    {bus}\n\n  Try next:\n    \
         curl --json '{{\"queue\":\"demo\",\"key\":\"hello\"}}' http://{http}/v1/tasks\n    \
         curl --json '{{\"worker\":\"me\",\"queues\":[\"demo\"],\"wait\":\"10s\"}}' http://{http}/v1/tasks:get\n    \
         curl http://{http}/v1/queues\n\n"
    );
    // A terminal that went away is no reason to stop.
    drop(std::io::stdout().write_all(text.as_bytes()));
}
