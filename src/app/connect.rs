//! Connects to Redis, the database and the bus, and waits for servers that are not up yet.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};
use tokio_util::sync::CancellationToken;

use crate::{
    bus::{
        self, Bus,
        kafka::{self, Kafka},
        redis_streams::RedisStreams,
    },
    config::{DatabaseUrl, EventQueues, Rules, Settings, without_password},
    coordination,
    ingress::{Tls, Waiting},
    model::in_short,
    redis_pool::{self, Redis},
    runtime::pauses,
    store::{self, Store, mysql::MysqlStore, sqlite::SqliteStore},
};

/// Why a server cannot be used.
pub(super) enum Unreachable {
    /// The server may come up later.
    Yet(anyhow::Error),
    /// The user has to change something.
    Ever(anyhow::Error),
}

impl From<Unreachable> for anyhow::Error {
    fn from(unreachable: Unreachable) -> Self {
        match unreachable {
            Unreachable::Yet(error) | Unreachable::Ever(error) => error,
        }
    }
}

impl Unreachable {
    fn new(error: anyhow::Error, is_transient: bool) -> Self {
        if is_transient {
            Self::Yet(error)
        } else {
            Self::Ever(error)
        }
    }
}

impl From<coordination::Error> for Unreachable {
    fn from(error: coordination::Error) -> Self {
        let is_transient = error.is_transient();
        Self::new(error.into(), is_transient)
    }
}

/// Waits for servers, and meanwhile tells callers what is missing.
pub(super) struct Wait<'a> {
    pub(super) door: Waiting,
    pub(super) stop: &'a CancellationToken,
}

impl Wait<'_> {
    /// Retries until it works. Logs once that it waits for `what`, and once that it continues.
    /// Returns `None` at the stop.
    pub(super) async fn until<T, Fut>(
        &self,
        what: &'static str,
        mut connect: impl FnMut() -> Fut,
    ) -> anyhow::Result<Option<T>>
    where
        Fut: Future<Output = Result<T, Unreachable>>,
    {
        self.door.wait_for(what);
        let mut waited = false;
        for pause in pauses() {
            match self.stop.run_until_cancelled(connect()).await {
                None => break,
                Some(Ok(connected)) => {
                    if waited {
                        tracing::info!("{what} is there: going on");
                    }
                    return Ok(Some(connected));
                }
                Some(Err(Unreachable::Ever(error))) => return Err(error),
                Some(Err(Unreachable::Yet(error))) if !waited => {
                    tracing::warn!("waiting for {what}: {}", in_short(&*error));
                    waited = true;
                }
                Some(Err(Unreachable::Yet(error))) => {
                    tracing::debug!("still waiting for {what}: {}", in_short(&*error));
                }
            }
            if self
                .stop
                .run_until_cancelled(tokio::time::sleep(pause))
                .await
                .is_none()
            {
                break;
            }
        }
        Ok(None)
    }
}

pub(super) async fn redis(url: &str, settings: &Settings) -> Result<Redis, Unreachable> {
    let unreachable = |error: redis_pool::Error| {
        let is_transient = error.is_transient();
        let error =
            anyhow::Error::new(error).context(format!("cannot use {}", without_password(url)));
        Unreachable::new(error, is_transient)
    };
    let redis = Redis::connect_as(url, &settings.redis_prefix, &settings.redis)
        .await
        .map_err(unreachable)?;
    redis.check().await.map_err(unreachable)?;
    Ok(redis)
}

pub(super) async fn store(settings: &Settings) -> Result<Arc<dyn Store>, Unreachable> {
    let opened: store::Result<Arc<dyn Store>> = match &settings.database_url {
        None => sqlite(&sqlite_file(settings)).await,
        Some(DatabaseUrl::Sqlite(path)) => sqlite(path).await,
        Some(DatabaseUrl::Server(url)) => MysqlStore::connect(url, settings.database_pool)
            .await
            .map(|store| Arc::new(store) as Arc<dyn Store>),
    };
    let opened = opened.map_err(|error| {
        let is_transient = error.is_transient();
        let error =
            anyhow::Error::new(error).context(format!("cannot open {}", store_name(settings)));
        Unreachable::new(error, is_transient)
    })?;
    opened.keep_events_of(EventQueues::of(&settings.queues));
    Ok(opened)
}

/// The file of the embedded store.
pub(super) fn sqlite_file(settings: &Settings) -> PathBuf {
    settings.data_dir.join("taskd.db")
}

/// Locks the SQLite file, by means of another file next to it, for a process that runs a Redis of
/// its own: two such processes would both hand out the tasks. Processes that use the Redis of this
/// one may share the file.
///
/// A lock on the file itself would lock out SQLite on file systems, such as NFS, where both kinds
/// of locks are one.
pub(super) fn lock_file(settings: &Settings) -> anyhow::Result<Option<File>> {
    let path = match &settings.database_url {
        _ if settings.redis_url.is_some() => return Ok(None),
        None => sqlite_file(settings),
        Some(DatabaseUrl::Sqlite(path)) => path.clone(),
        Some(DatabaseUrl::Server(_)) => return Ok(None),
    };
    // The file may be a symbolic link.
    let mut beside = path.canonicalize().unwrap_or(path.clone()).into_os_string();
    beside.push("-lock");
    let mut options = OpenOptions::new();
    let options = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    let file = options
        .open(&beside)
        .with_context(|| format!("cannot write to {}", beside.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => bail!(
            "another taskd with another Redis has {} open, and both would hand out its tasks; stop that one, or give \
             this one a database of its own",
            path.display()
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", beside.display()))
        }
    }
}

/// A store for a while, in a file that nobody else has open.
pub async fn temporary_store(path: &Path) -> store::Result<Arc<dyn Store>> {
    sqlite(path).await
}

async fn sqlite(path: &Path) -> store::Result<Arc<dyn Store>> {
    Ok(Arc::new(SqliteStore::open(path, None).await?))
}

/// The name of the store for messages to people, without a password.
pub(super) fn store_name(settings: &Settings) -> String {
    match &settings.database_url {
        Some(url) => url.to_string(),
        None => format!("SQLite in {}", sqlite_file(settings).display()),
    }
}

/// An error in reading an open store. It may pass: the database may go away at any moment.
pub(super) fn unreadable(error: store::Error) -> Unreachable {
    Unreachable::Yet(anyhow::Error::new(error).context("cannot read it"))
}

/// Opens the bus: Kafka if the settings name it, otherwise Redis Streams in `redis`.
pub(super) async fn bus(
    settings: &Settings,
    redis: Option<&Redis>,
    process: &str,
) -> Result<Arc<dyn Bus>, Unreachable> {
    let opened: bus::Result<Arc<dyn Bus>> =
        match kafka_config(settings).map_err(Unreachable::Ever)? {
            None => {
                let redis = redis
                    .context("Redis Streams need a Redis")
                    .map_err(Unreachable::Ever)?;
                let opened =
                    RedisStreams::open(redis.clone(), &settings.topic_prefix, settings.partitions)
                        .await;
                opened.map(|bus| Arc::new(bus.process(process)) as Arc<dyn Bus>)
            }
            Some(config) => Kafka::open(config)
                .await
                .map(|bus| Arc::new(bus) as Arc<dyn Bus>),
        };
    opened.map_err(|error| {
        // A refused password or certificate is not transient.
        let is_transient = error.is_transient();
        Unreachable::new(error.into(), is_transient)
    })
}

/// Returns those of `topics` that the bus does not have. Creates none.
pub(super) async fn missing_topics(
    settings: &Settings,
    redis: Option<&Redis>,
    topics: &[&str],
) -> anyhow::Result<Vec<String>> {
    match kafka_config(settings)? {
        None => {
            let redis = redis.context("Redis Streams need a Redis")?;
            Ok(RedisStreams::missing(redis, &settings.topic_prefix, topics).await?)
        }
        Some(config) => Ok(Kafka::missing(config, topics).await?),
    }
}

/// Kafka's rules for its properties.
pub const PROPERTY_RULES: Rules = kafka::RULES;

/// Checks the settings that only a backend can judge, as far as it can without a server.
pub fn check(settings: &Settings) -> anyhow::Result<()> {
    Tls::load(&settings.tls)?;
    if let Some(url) = &settings.redis_url {
        Redis::check_settings(url.as_str(), &settings.redis)?;
    }
    if let Some(DatabaseUrl::Server(url)) = &settings.database_url {
        let shown = without_password(url);
        MysqlStore::check(url)
            .with_context(|| format!("database_url = {shown:?} is not usable"))?;
    }
    match kafka_config(settings)? {
        Some(config) => Ok(Kafka::check(&config)?),
        None => Ok(()),
    }
}

fn kafka_config(settings: &Settings) -> anyhow::Result<Option<kafka::Config>> {
    let Some(url) = &settings.bus_url else {
        return Ok(None);
    };
    Ok(Some(kafka::Config {
        brokers: url.brokers.clone(),
        properties: kafka::resolved(&settings.kafka)?,
        topic_prefix: settings.topic_prefix.clone(),
        partitions: settings.partitions,
        retention: settings.topic_retention,
        needs_events: EventQueues::of(&settings.queues).are_some_on(),
    }))
}
