//! The composition root: the only module that names backends.
//!
//! `connect` connects to the servers; `round` starts and stops everything else once.

mod connect;
mod greeting;
mod holder;
mod partitions;
mod round;
mod servers;
mod signals;
mod topic;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::bail;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::{
    connect::Wait,
    holder::Holder,
    round::{Backends, Listeners, RoundEnd},
};
pub use self::{
    connect::{PROPERTY_RULES, check, temporary_store},
    partitions::raise as raise_partitions,
    signals::hangups,
    topic::open_events,
};
use crate::{
    config::{DatabaseUrl, Settings},
    embedded::{self, DataDir, RedisServer},
    ingress::{self, Budget, Tls, Waiting},
    model::now_unix_ms,
    runtime::{Clock, Supervisor},
    store::Store,
    telemetry::{metrics, traces},
};

/// The name of a process with an embedded Redis. The lock on the data folder makes it the only one
/// there.
const ALONE: &str = "alone";
/// The shortest time between two rounds, so that repeated losses do not keep a machine busy.
const ROUND: Duration = Duration::from_secs(1);

/// Runs until SIGTERM or Ctrl-C, then drains. A second signal ends the process at once.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    ingress::raise_limit();
    let settings = Arc::new(settings);
    let stop = CancellationToken::new();
    let own_redis = Arc::new(OnceLock::new());
    // Everything that uses Redis stops before Redis does, and signals are handled until the end.
    let signals = Supervisor::new();
    let base = Supervisor::new();
    signals::watch(
        stop.clone(),
        settings.grace_period,
        Arc::clone(&own_redis),
        &signals,
    )?;
    let result = serve(&settings, &own_redis, &base, &stop).await;
    base.stop();
    base.wait().await;
    signals.stop();
    result?;
    tracing::info!("stopped");
    Ok(())
}

/// Applies the migrations of the store. Returns a line about its state.
pub async fn migrate(settings: Settings) -> anyhow::Result<String> {
    let _lock = match settings.database_url {
        None => Some(DataDir::lock(&settings.data_dir)?),
        Some(_) => None,
    };
    let is_new = must_have_run(&settings).is_err();
    let store = connect::store(&settings).await?;
    let is = if is_new { "new" } else { "up to date" };
    let answer = format!("the database is {is}: {}", connect::store_name(&settings));
    store.close().await;
    Ok(answer)
}

/// Opens the store for a command that runs next to taskd processes. The embedded store may be in
/// use by one.
pub async fn open_store(settings: &Settings) -> anyhow::Result<Arc<dyn Store>> {
    let _lock = match &settings.database_url {
        Some(_) => None,
        // Creates the folder if it is missing. If a process uses it, SQLite itself keeps the two
        // apart.
        None => match DataDir::lock(&settings.data_dir) {
            Err(embedded::Error::InUse { .. }) => None,
            locked => Some(locked?),
        },
    };
    Ok(connect::store(settings).await?)
}

/// Opens the store if it exists. It does not if the settings name another folder than that of the
/// running taskd, or a relative path and the command runs in another directory.
pub async fn open_present_store(settings: &Settings) -> anyhow::Result<Arc<dyn Store>> {
    must_have_run(settings)?;
    open_store(settings).await
}

/// There is no database where a command expects one: its settings are probably not those of the
/// running taskd.
#[derive(Debug, thiserror::Error)]
pub enum NeverRan {
    #[error("no taskd has run in {}; --data-dir or --config names that of the running one", .0.display())]
    Folder(PathBuf),
    #[error("there is no database {}; --database-url or --config names that of the running taskd", .0.display())]
    File(PathBuf),
}

/// Fails if the database is a file that does not exist yet. A database server is not checked.
pub fn must_have_run(settings: &Settings) -> Result<(), NeverRan> {
    let missing = |path: &Path| !path.exists();
    match &settings.database_url {
        None if missing(&connect::sqlite_file(settings)) => {
            Err(NeverRan::Folder(settings.data_dir.clone()))
        }
        // Absolute, since a relative path means another file in each folder.
        Some(DatabaseUrl::Sqlite(path)) if missing(path) => Err(NeverRan::File(
            std::path::absolute(path).unwrap_or_else(|_| path.clone()),
        )),
        None | Some(DatabaseUrl::Sqlite(_) | DatabaseUrl::Server(_)) => Ok(()),
    }
}

/// Connects, and runs the pipelines until the stop: in one round, unless Redis or the bus loses
/// everything.
async fn serve(
    settings: &Arc<Settings>,
    own_redis: &OnceLock<Arc<RedisServer>>,
    base: &Supervisor,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let metrics = metrics::install(settings.watchdog.forget_queues_after)?;
    let exporter = traces::install(&settings.traces)?;
    // Ports and the folder first, so that a mistake there shows before anything starts.
    let listeners = Listeners::bind(settings).await?;
    let is_embedded = settings.redis_url.is_none() || settings.database_url.is_none();
    let data_dir = if is_embedded {
        Some(DataDir::lock(&settings.data_dir)?)
    } else {
        None
    };
    let _file = connect::lock_file(settings)?;

    if let Some(exporter) = exporter {
        base.spawn_once(exporter.run(base.stop_token()));
    }
    let tls = Tls::load(&settings.tls)?;
    if let Some(tls) = &tls {
        tls.keep_on(base);
    }
    let wait = Wait {
        door: Waiting::start(listeners.http()?, listeners.grpc()?, tls.clone()),
        stop,
    };
    let redis_url = match (&settings.redis_url, &data_dir) {
        (None, Some(data_dir)) => {
            // A server with much data takes long to load it.
            let starts = RedisServer::start_with(data_dir, settings.redis.max_memory);
            let Some(server) = wait.stop.run_until_cancelled(starts).await else {
                return Ok(());
            };
            let server = Arc::new(server?);
            let server = own_redis.get_or_init(|| server);
            server.keep_running(base);
            server.url().to_owned()
        }
        (Some(url), _) => url.as_str().to_owned(),
        (None, None) => bail!("an embedded Redis needs a data folder"),
    };
    let Some(redis) = wait
        .until("Redis", || connect::redis(&redis_url, settings))
        .await?
    else {
        return Ok(());
    };
    let Some(store) = wait
        .until("the database", || connect::store(settings))
        .await?
    else {
        return Ok(());
    };
    let upkeep = metrics.clone();
    let upkeep_stop = base.stop_token();
    base.spawn_once(async move {
        upkeep_stop
            .run_until_cancelled(metrics::upkeep(upkeep))
            .await;
    });
    let backends = Backends {
        settings: Arc::clone(settings),
        redis,
        store,
        metrics,
        tls,
        budget: Budget::new(settings.limits.request_budget),
        process: settings
            .redis_url
            .as_ref()
            .map_or_else(|| ALONE.to_owned(), |_| Uuid::new_v4().to_string()),
        clock: Clock::of_this_machine(),
        since_unix_ms: now_unix_ms(),
        // The embedded store needs none: the lock on its file keeps a taskd with another Redis
        // away.
        holder: settings.database_url.is_some().then(Holder::default),
    };
    run_rounds(&backends, listeners, wait).await?;
    if tokio::time::timeout(settings.grace_period, backends.store.close())
        .await
        .is_err()
    {
        tracing::warn!("the database was not closed in time");
    }
    Ok(())
}

async fn run_rounds(
    backends: &Backends,
    mut listeners: Listeners,
    mut wait: Wait<'_>,
) -> anyhow::Result<()> {
    let stop = wait.stop;
    let mut is_first = true;
    loop {
        let began = Instant::now();
        listeners = match round::run(backends, listeners, wait, is_first).await? {
            RoundEnd::Stopped => return Ok(()),
            RoundEnd::Lost(kept) => kept,
        };
        wait = Wait {
            door: Waiting::start(listeners.http()?, listeners.grpc()?, backends.tls.clone()),
            stop,
        };
        is_first = false;
        // If the stop comes here, the next round ends as soon as it has begun.
        stop.run_until_cancelled(tokio::time::sleep(ROUND.saturating_sub(began.elapsed())))
            .await;
    }
}
