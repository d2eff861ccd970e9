//! One round: opens the bus, starts the pipelines and the HTTP and gRPC servers, and stops them in
//! order.
//!
//! A round ends at the stop, or when Redis or the bus has lost everything. The next round finds an
//! empty bus of a new generation, and shards without a generation, which the watchdog rebuilds from
//! SQL. Tasks that were published into the emptied Redis before a process noticed are either not
//! marked as published, or found missing by the watchdog.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use tokio::{
    net::TcpListener,
    task::JoinHandle,
    time::{Instant, timeout_at},
};

use super::{
    connect::{self, Unreachable, Wait, unreadable},
    greeting::greet,
    holder::Holder,
    servers,
};
use crate::{
    api::{
        self, Api, Authentication, ExecutionWatches, HeardWorkers, KnownDepths, KnownKeys,
        KnownTopics, Ledger, OpenExecutions, Reader, SettledReports, TokenSync, TreeWatches, Waits,
        WorkflowQueues, publish_stages,
    },
    bus::{self, Bus, Topic},
    config::{Auth, EventQueues, Pipeline, Settings},
    coordination::Coordination,
    dedup::Filter,
    ingress::{self, Budget, Tls, http::Ports},
    model::{Presence, in_short},
    outbound::Outbound,
    pipelines::{
        admission::{Gates, LimitSync, Occupancy, QueueSync},
        changing::Changing,
        context::{Context, ExecutionWakes},
        discovery, fanout, memory,
        publishing::{DeadLetters, Publisher},
        shortcut::Shortcut,
        tasks, watchdog, workflows,
    },
    queue::{Queue, QueueLimits},
    redis_pool::Redis,
    runtime::{Clock, Servers, Supervisor},
    store::Store,
    telemetry::metrics,
};

/// The backends that are kept from round to round.
pub(super) struct Backends {
    pub(super) settings: Arc<Settings>,
    pub(super) redis: Redis,
    pub(super) store: Arc<dyn Store>,
    pub(super) metrics: metrics::Handle,
    pub(super) tls: Option<Tls>,
    /// Shared by all rounds, since callers of an earlier one may still hold a part of it.
    pub(super) budget: Budget,
    /// The name of this process. A process that starts again under its name keeps what it owned.
    pub(super) process: String,
    pub(super) clock: Clock,
    /// When this process began, by its machine's clock.
    pub(super) since_unix_ms: i64,
    /// `None` if no other process can open the database.
    pub(super) holder: Option<Holder>,
}

/// How a round ended.
pub(super) enum RoundEnd {
    Stopped,
    /// Redis or the bus has lost everything. The next round keeps the ports; until it serves them,
    /// callers are told to try again later.
    Lost(Listeners),
}

/// The bound ports. A round listens on duplicates, so that the ports stay bound between rounds.
pub(super) struct Listeners {
    http: std::net::TcpListener,
    grpc: std::net::TcpListener,
}

impl Listeners {
    pub(super) async fn bind(settings: &Settings) -> anyhow::Result<Self> {
        let http = ingress::bind(settings.http_listen, "http")
            .await?
            .into_std()?;
        Ok(Self {
            http,
            grpc: ingress::bind(settings.grpc_listen, "grpc")
                .await?
                .into_std()?,
        })
    }

    pub(super) fn http(&self) -> io::Result<TcpListener> {
        TcpListener::from_std(self.http.try_clone()?)
    }

    pub(super) fn grpc(&self) -> io::Result<TcpListener> {
        TcpListener::from_std(self.grpc.try_clone()?)
    }
}

/// Runs one round.
pub(super) async fn run(
    backends: &Backends,
    listeners: Listeners,
    wait: Wait<'_>,
    is_first: bool,
) -> anyhow::Result<RoundEnd> {
    let Some(opened) = open(backends, &wait).await? else {
        return Ok(RoundEnd::Stopped);
    };
    let http = listeners.http()?;
    let grpc = listeners.grpc()?;
    let http_addr = http.local_addr()?;
    let grpc_addr = grpc.local_addr()?;

    // Nothing fails from here on, so whatever starts is also awaited.
    let supervisor = Supervisor::with_clock(backends.clock.clone());
    let doors = Supervisor::new();
    let servers = Servers::default();
    let (cx, authentication) = opened.start_upkeep(backends, &servers, &supervisor);
    let ports = Ports {
        http: http_addr.port(),
        grpc: grpc_addr.port(),
    };
    let state = state(
        backends,
        &cx,
        authentication,
        servers,
        ports,
        &supervisor,
        &doors,
    );
    let presence = presence(backends, http_addr, grpc_addr);
    state.api.workers.announce(
        presence,
        backends.settings.stall_after,
        cx.coordination.clone(),
        &supervisor,
    );
    let stop = wait.stop;
    wait.door.end().await;
    let served = doors.spawn_once(async move {
        Ok(tokio::join!(
            ingress::http::serve(http, state.clone()),
            ingress::grpc::serve(grpc, state)
        )
        .1?)
    });
    if is_first {
        greet(&backends.settings, http_addr, grpc_addr);
    }

    let end = tokio::select! {
        () = stop.cancelled() => {
            tracing::info!("stopping: no new work; finishing what is in hand");
            // From now on connections are refused.
            drop(listeners);
            RoundEnd::Stopped
        }
        error = supervisor.given_up() => {
            tracing::warn!("starting over: {}", in_short(error));
            RoundEnd::Lost(listeners)
        }
    };
    doors.stop();
    drain(&cx, &supervisor, served, &end).await?;
    Ok(end)
}

/// A round before its loops run.
struct Opened {
    cx: Context,
    store_id: String,
    queues: QueueSync,
    /// `None` if no queue has limits per key.
    limits: Option<LimitSync>,
    /// `None` if everybody may call.
    tokens: Option<TokenSync>,
}

/// Opens the bus and checks the backends. Each step retries, because any server may be away again.
/// Returns `None` at the stop.
async fn open(backends: &Backends, wait: &Wait<'_>) -> anyhow::Result<Option<Opened>> {
    let Backends {
        settings,
        redis,
        store,
        process,
        clock,
        holder,
        ..
    } = backends;
    let bus = || connect::bus(settings, Some(redis), process);
    let Some(bus) = wait.until("the bus", bus).await? else {
        return Ok(None);
    };
    let store_id = || async { store.store_id().await.map_err(unreadable) };
    let Some(store_id) = wait.until("the database", store_id).await? else {
        return Ok(None);
    };

    let coordination = Coordination::new(redis.clone(), process, clock.clone());
    let own = || async {
        coordination.follow_clock().await?;
        Ok(coordination.own(&store_id).await?)
    };
    let Some(()) = wait.until("Redis", own).await? else {
        return Ok(None);
    };

    if let Some(holder) = holder {
        let take = || async { Ok(holder.take(&**store, &coordination).await?) };
        let Some(()) = wait.until("the database", take).await? else {
            return Ok(None);
        };
    }

    let limit_partitions = || limit_partitions(settings, &**store, &*bus);
    let Some(limit_partitions) = wait.until("the database", limit_partitions).await? else {
        return Ok(None);
    };
    let queue = queue(backends);
    queue.set_limit_partitions(match limit_partitions {
        0 => bus.partitions(Topic::Pipeline),
        limited => limited,
    });
    let gates = Gates::default();
    let occupancy = Occupancy::default();
    let queues = || follow_queues(backends, &queue, &gates, &occupancy);
    let Some(queues) = wait.until("the database", queues).await? else {
        return Ok(None);
    };
    let limits = || follow_limits(backends, &queue);
    let Some(limits) = wait.until("the database", limits).await? else {
        return Ok(None);
    };
    let tokens = || follow_tokens(backends, &occupancy);
    let Some(tokens) = wait.until("the database", tokens).await? else {
        return Ok(None);
    };
    let filter = Filter::new(redis.clone());
    let check = || check_filter(settings, &**store, &filter);
    let Some(()) = wait.until("the database", check).await? else {
        return Ok(None);
    };
    let topics = || declare_topics(settings, &**store, &*bus, clock);
    let Some(()) = wait.until("the topics", topics).await? else {
        return Ok(None);
    };
    let shortcut = shortcut(settings, &*bus, &queue, &gates);
    let cx = Context {
        publisher: Publisher::new(
            store.clone(),
            Arc::clone(&bus),
            clock.clone(),
            Arc::clone(settings),
        ),
        letters: DeadLetters::new(store.clone(), &*bus, clock.clone()),
        settings: Arc::clone(settings),
        store: Arc::clone(store),
        clock: clock.clone(),
        executions: ExecutionWakes::default(),
        outbound: Outbound::new(&settings.calls),
        bus,
        queue,
        coordination,
        filter,
        gates,
        shortcut,
        occupancy,
        limit_partitions,
    };
    Ok(Some(Opened {
        cx,
        store_id,
        queues,
        limits,
        tokens,
    }))
}

/// Begins to follow what SQL has of queues: their shards, pauses and unfinished tasks.
async fn follow_queues(
    backends: &Backends,
    queue: &Queue,
    gates: &Gates,
    occupancy: &Occupancy,
) -> Result<QueueSync, Unreachable> {
    QueueSync::start(
        Arc::clone(&backends.store),
        queue.shards.clone(),
        gates.clone(),
        occupancy.clone(),
        backends.clock.clone(),
    )
    .await
    .map_err(unreadable)
}

/// Begins to follow own limits of limit keys, if a queue has limits per key.
async fn follow_limits(
    backends: &Backends,
    queue: &Queue,
) -> Result<Option<LimitSync>, Unreachable> {
    if !backends.settings.queues.any_limited() {
        return Ok(None);
    }
    let limits = LimitSync::start(Arc::clone(&backends.store), queue.shards.clone());
    limits.await.map(Some).map_err(unreadable)
}

/// Begins to follow the tokens of callers, if they need one.
async fn follow_tokens(
    backends: &Backends,
    occupancy: &Occupancy,
) -> Result<Option<TokenSync>, Unreachable> {
    let Backends {
        settings,
        store,
        clock,
        ..
    } = backends;
    match settings.auth {
        Auth::None => Ok(None),
        Auth::Tokens => TokenSync::start(store.clone(), occupancy.clone(), clock.clone())
            .await
            .map(Some)
            .map_err(unreadable),
    }
}

/// Checks the filter against the database, if this process runs discovery.
async fn check_filter(
    settings: &Settings,
    store: &dyn Store,
    filter: &Filter,
) -> Result<(), Unreachable> {
    if !settings.pipelines.contains(&Pipeline::Discovery) {
        return Ok(());
    }
    let checked = discovery::check_filter(store, filter).await;
    checked.map_err(|error| Unreachable::Yet(error.into()))
}

/// Returns the partitions among which limit keys are distributed; 0 if no queue has limits per key.
async fn limit_partitions(
    settings: &Settings,
    store: &dyn Store,
    bus: &dyn Bus,
) -> Result<u32, Unreachable> {
    if !settings.queues.any_limited() {
        return Ok(0);
    }
    let asked = store.limit_partitions(bus.partitions(Topic::Pipeline));
    asked.await.map_err(|error| Unreachable::Yet(error.into()))
}

/// Makes the topics and the subscriptions that the settings declare.
async fn declare_topics(
    settings: &Settings,
    store: &dyn Store,
    bus: &dyn Bus,
    clock: &Clock,
) -> Result<(), Unreachable> {
    let logs = bus.logs();
    for (name, topic) in &settings.topics {
        let now = clock.now_unix_ms();
        let declared = api::declare_topic(store, &*logs, name, topic, now).await;
        declared.map_err(|error| {
            let is_final = error.kind() == api::Kind::Invalid;
            let error = anyhow::Error::new(error).context(format!("cannot make topic {name}"));
            if is_final {
                Unreachable::Ever(error)
            } else {
                Unreachable::Yet(error)
            }
        })?;
    }
    for (name, put) in &settings.subscriptions {
        let now = clock.now_unix_ms();
        let queues = &settings.queues;
        let declared = api::declare_subscription(store, &*logs, queues, name, put, now).await;
        declared.map_err(|error| {
            let is_final = matches!(error.kind(), api::Kind::Invalid | api::Kind::NotFound);
            let error =
                anyhow::Error::new(error).context(format!("cannot make subscription {name}"));
            if is_final {
                Unreachable::Ever(error)
            } else {
                Unreachable::Yet(error)
            }
        })?;
    }
    Ok(())
}

/// Returns the shortcut past the bus, if discovery and the fanout both run in this process and no
/// other program reads the bus.
fn shortcut(
    settings: &Arc<Settings>,
    bus: &dyn Bus,
    queue: &Queue,
    gates: &Gates,
) -> Option<Shortcut> {
    let runs = |pipeline| settings.pipelines.contains(&pipeline);
    let is_whole = runs(Pipeline::Discovery) && runs(Pipeline::Fanout);
    let shortcut = || Shortcut::new(queue.enqueuer.clone(), gates.clone(), Arc::clone(settings));
    (is_whole && !bus.has_other_readers()).then(shortcut)
}

/// Makes the queue, with the settings for histories and events.
fn queue(backends: &Backends) -> Queue {
    let Backends {
        settings,
        redis,
        process,
        clock,
        ..
    } = backends;
    let queue = Queue::with_clock(redis.clone(), process.clone(), clock.clone());
    queue.keep_grants_secret();
    let named = settings.queues.named.iter();
    queue.set_limits(QueueLimits {
        default: settings.queues.default.key_limits(),
        named: named
            .map(|(name, queue)| (name.clone(), queue.key_limits()))
            .collect(),
        horizon: settings.watchdog.horizon,
    });
    queue
        .announcer()
        .always_announce(EventQueues::of(&settings.queues));
    if !settings.history {
        queue.history().turn_off();
    }
    queue
}

impl Opened {
    /// Starts the loops that every process runs, whatever its pipelines.
    fn start_upkeep(
        self,
        backends: &Backends,
        servers: &Servers,
        supervisor: &Supervisor,
    ) -> (Context, Authentication) {
        let Self {
            cx,
            store_id,
            queues,
            limits,
            tokens,
        } = self;
        let gates = cx.gates.clone();
        let most = cx.settings.redis.max_memory;
        cx.coordination.watch_owner(store_id, supervisor);
        if let Some(holder) = &backends.holder {
            holder.keep(&cx.store, &cx.coordination, supervisor);
        }
        bus::watch_partitions(Arc::clone(&cx.bus), supervisor);
        servers::watch(&cx.store, &cx.bus, servers, supervisor);
        memory::watch(
            backends.redis.clone(),
            most,
            gates,
            cx.queue.shards.clone(),
            servers.clone(),
            supervisor,
        );
        cx.coordination.watch_clock(supervisor);
        queues.keep_on(supervisor);
        if let Some(limits) = limits {
            limits.keep_on(supervisor);
        }
        cx.queue.start_listening(supervisor);
        let authentication = tokens.map_or(Authentication::Open, |tokens| {
            Authentication::ByToken(tokens.keep_on(supervisor))
        });
        (cx, authentication)
    }
}

/// Starts the pipelines that the settings name. Returns the handles of those that callers use.
fn start(
    cx: &Context,
    supervisor: &Supervisor,
) -> (Option<discovery::Handle>, Option<tasks::Handle>) {
    let runs = |pipeline| cx.settings.pipelines.contains(&pipeline);
    if runs(Pipeline::Watchdog) {
        watchdog::start(cx, supervisor);
    }
    if runs(Pipeline::Fanout) {
        fanout::start(cx, supervisor);
    }
    if runs(Pipeline::Workflow) {
        workflows::start(cx, supervisor);
    }
    let discovery = runs(Pipeline::Discovery).then(|| discovery::start(cx, supervisor));
    let queue = cx.queue.clone();
    let store = Arc::clone(&cx.store);
    let bus = Arc::clone(&cx.bus);
    let topologies = cx.occupancy.topologies().clone();
    let tasks = runs(Pipeline::Tasks)
        .then(|| tasks::start(queue, store, bus, topologies, &cx.settings, supervisor));
    if let Some(tasks) = &tasks {
        workflows::start_calls(cx, tasks.clone(), supervisor);
    }
    (discovery, tasks)
}

/// Starts the pipelines, and returns what the HTTP and gRPC servers need.
fn state(
    backends: &Backends,
    cx: &Context,
    authentication: Authentication,
    servers: Servers,
    ports: Ports,
    supervisor: &Supervisor,
    doors: &Supervisor,
) -> ingress::State {
    let (discovery, tasks) = start(cx, supervisor);
    let store = Arc::clone(&cx.store);
    let bus = Arc::clone(&cx.bus);
    let ledger = Ledger::new(store, cx.queue.shards.clone(), bus, cx.clock.clone());
    let store = Arc::clone(&cx.store);
    let bus = Arc::clone(&cx.bus);
    let settled = SettledReports::new(Arc::clone(&store), cx.queue.upkeep.clone(), bus);
    let filter = cx.filter.clone();
    let bus = Arc::clone(&cx.bus);
    let kept = &cx.settings.watchdog;
    let changing = Changing::new(
        store,
        cx.queue.upkeep.changer(),
        filter,
        bus,
        cx.clock.clone(),
        kept,
    );
    let reader = Reader {
        store: Arc::clone(&cx.store),
        queue: cx.queue.shards.clone(),
        bus: Arc::clone(&cx.bus),
        coordination: cx.coordination.clone(),
        gates: cx.gates.clone(),
        occupancy: cx.occupancy.clone(),
        settings: Arc::clone(&cx.settings),
        clock: cx.clock.clone(),
        ledger: Arc::new(ledger),
        settled: Arc::new(settled),
        known_keys: KnownKeys::default(),
        topics: KnownTopics::default(),
        depths: KnownDepths::default(),
        tree_watches: TreeWatches::default(),
        execution_watches: ExecutionWatches::default(),
        executions: cx.executions.clone(),
        open_executions: OpenExecutions::default(),
        outbound: cx.outbound.clone(),
        workflow_queues: WorkflowQueues::default(),
    };
    reader.inform_watchers(supervisor);
    reader.read_for_watchers(supervisor);
    reader.depths.keep_while_used(supervisor);
    let api = Arc::new(Api {
        discovery,
        tasks,
        query: Some(reader),
        changing: Some(changing),
        authentication,
        waits: Waits::default(),
        workers: HeardWorkers::new(cx.clock.clone()),
        stop: doors.stop_token(),
    });
    publish_stages(&api, supervisor);
    ingress::State {
        api,
        progress: supervisor.progress().clone(),
        gates: cx.gates.clone(),
        servers,
        settings: Arc::clone(&cx.settings),
        metrics: backends.metrics.clone(),
        ports,
        tls: backends.tls.clone(),
        budget: backends.budget.clone(),
        stop: doors.stop_token(),
    }
}

/// What this process tells the others of itself, without its workers.
fn presence(backends: &Backends, http: SocketAddr, grpc: SocketAddr) -> Presence {
    let host = nix::unistd::gethostname().ok();
    let host = host.and_then(|host| host.into_string().ok());
    let pipelines = &backends.settings.pipelines;
    Presence {
        process: backends.process.clone(),
        host: host.unwrap_or_default(),
        pid: std::process::id(),
        http: http.to_string(),
        grpc: grpc.to_string(),
        pipelines: pipelines.iter().map(ToString::to_string).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        since_unix_ms: backends.since_unix_ms,
        ..Presence::default()
    }
}

/// The least time for ending a round that has lost Redis or the bus. Nobody waits for this process
/// to exit, and a record on its way to Kafka takes up to half a minute to fail.
const END_OF_LOST: Duration = Duration::from_secs(60);

/// Ends a round within the grace period: first the HTTP and gRPC servers, while the pipelines still
/// answer, then the pipelines and the bus.
async fn drain(
    cx: &Context,
    supervisor: &Supervisor,
    served: JoinHandle<anyhow::Result<()>>,
    end: &RoundEnd,
) -> anyhow::Result<()> {
    let period = match end {
        RoundEnd::Stopped => cx.settings.grace_period,
        RoundEnd::Lost(_) => cx.settings.grace_period.max(END_OF_LOST),
    };
    let deadline = Instant::now() + period;
    let grace = humantime::format_duration(period);
    // A quarter of the period is left for the pipelines.
    let served = timeout_at(deadline - period / 4, served).await;
    supervisor.stop();
    let drained = async {
        if timeout_at(deadline, supervisor.wait()).await.is_err() {
            let loops = supervisor.progress().running().join(", ");
            return Err(if loops.is_empty() {
                "batches in flight".to_owned()
            } else {
                loops
            });
        }
        timeout_at(deadline, cx.queue.drained())
            .await
            .map_err(|_| "calls of the queue in Redis".to_owned())?;
        timeout_at(deadline, cx.bus.close())
            .await
            .map_err(|_| "the bus".to_owned())
    };
    if let Err(running) = drained.await {
        bail!(
            "what was in hand did not end within the grace period ({grace}); it is put back when its leases run out; \
             still running: {running}"
        );
    }
    match (served, end) {
        (Ok(served), _) => served.context("a listener panicked")??,
        // These callers do not read their answers. An answer that nobody got promises nothing, so
        // the stop went well.
        (Err(_), RoundEnd::Stopped) => {
            tracing::warn!("some callers did not end within the grace period ({grace})")
        }
        // These callers get an answer that tells them to try again, whenever they end.
        (Err(_), RoundEnd::Lost(_)) => tracing::warn!("some callers of before are still there"),
    }
    Ok(())
}
