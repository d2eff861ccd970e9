//! The limits of the machine: the minimum that any queue needs from Redis, SQLite and gRPC for the
//! same work, with the same number of callers, the same batches and the same durability.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::ensure;
use redis::{Connection, ConnectionLike, Value};
use sqlx::{
    ConnectOptions, Connection as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};
use tonic::transport::Channel;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{daemon::Daemon, redis_server::RedisServer, work::pause};

/// The default rate of the phase `latency` of `taskd bench`.
pub(crate) const TASKS_A_SECOND: u32 = 500;

/// What Redis stores for a task with a payload of 100 bytes.
const ELEMENT: [u8; 200] = [b'x'; 200];
const STREAM: &str = "s";
const GROUP: &str = "g";

/// Redis with blocking connections, one thread each: this is the least work for a client, so that
/// the server is the bottleneck.
pub(crate) struct Redis {
    server: RedisServer,
}

impl Redis {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        Ok(Self {
            server: RedisServer::start().await?,
        })
    }

    fn connect(&self, count: usize) -> anyhow::Result<Vec<Connection>> {
        let client = self.server.client()?;
        let mut connections = (0..count)
            .map(|_| client.get_connection())
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(first) = connections.first_mut() {
            redis::cmd("FLUSHALL").exec(first)?;
            redis::cmd("XGROUP")
                .arg(&["CREATE", STREAM, GROUP, "0", "MKSTREAM"])
                .exec(first)?;
        }
        Ok(connections)
    }

    /// One PING per call. Returns round trips per second.
    pub(crate) fn ping(&self, callers: usize, calls: usize) -> anyhow::Result<f64> {
        let mut connections = self.connect(callers)?;
        let ping = redis::cmd("PING").get_packed_command();
        let each = calls / callers;
        let began = Instant::now();
        on_threads(&mut connections, |_, conn| {
            (0..each).try_for_each(|_| Ok(conn.req_packed_command(&ping).map(drop)?))
        })?;
        Ok((each * callers) as f64 / began.elapsed().as_secs_f64())
    }

    /// Adds tasks with one LPUSH per batch.
    pub(crate) fn insert(&self, callers: usize, batch: usize, tasks: usize) -> anyhow::Result<f64> {
        let mut connections = self.connect(callers)?;
        let mut push = redis::cmd("LPUSH");
        push.arg("l");
        for _ in 0..batch {
            push.arg(&ELEMENT[..]);
        }
        let push = push.get_packed_command();
        let left = AtomicUsize::new(tasks / batch);
        let began = Instant::now();
        on_threads(&mut connections, |_, conn| {
            while take(&left, 1) > 0 {
                conn.req_packed_command(&push)?;
            }
            Ok(())
        })?;
        Ok(tasks as f64 / began.elapsed().as_secs_f64())
    }

    /// Leases and finishes waiting tasks: XREADGROUP, then XACK and XDEL in one round trip.
    pub(crate) fn cycle(&self, callers: usize, batch: usize, tasks: usize) -> anyhow::Result<f64> {
        let mut connections = self.connect(callers)?;
        for _ in 0..tasks / 1000 {
            add(&mut connections[0], 1000)?;
        }
        let done = AtomicUsize::new(0);
        let began = Instant::now();
        on_threads(&mut connections, |number, conn| {
            let read = read(number, batch);
            while let ids @ [_, ..] = &read_ids(conn.req_packed_command(&read)?)[..] {
                end(conn, ids)?;
                done.fetch_add(ids.len(), Relaxed);
            }
            Ok(())
        })?;
        let seconds = began.elapsed().as_secs_f64();
        ensure!(
            done.load(Relaxed) == tasks,
            "Redis handed out {} of {tasks}",
            done.load(Relaxed)
        );
        Ok(tasks as f64 / seconds)
    }

    /// The CPU of redis-server per task, in µs: two sequential LPUSH commands with fsync, at
    /// [`TASKS_A_SECOND`].
    pub(crate) async fn cpu_of_writes(&self, tasks: u32) -> anyhow::Result<f64> {
        let mut conn = self
            .server
            .client()?
            .get_multiplexed_async_connection()
            .await?;
        let mut push = redis::cmd("LPUSH");
        push.arg("l").arg(&ELEMENT[..]);
        let before = self.cpu_seconds().await?;
        let mut pace = pace();
        for _ in 0..tasks {
            pace.tick().await;
            push.exec_async(&mut conn).await?;
            push.exec_async(&mut conn).await?;
        }
        Ok((self.cpu_seconds().await? - before) * 1e6 / f64::from(tasks))
    }

    async fn cpu_seconds(&self) -> anyhow::Result<f64> {
        Ok(self.server.info("cpu", "used_cpu_user:").await?
            + self.server.info("cpu", "used_cpu_sys:").await?)
    }

    /// The times from before an LPUSH until the waiting BLPOP is answered, in µs.
    pub(crate) fn hand_over(&self, samples: usize) -> anyhow::Result<Vec<f64>> {
        let mut connections = self.connect(2)?;
        let began: Vec<Mutex<Option<Instant>>> = (0..samples).map(|_| Mutex::default()).collect();
        let micros = Mutex::new(Vec::new());
        on_threads(&mut connections, |number, conn| {
            for (sample, began) in began.iter().enumerate() {
                if number == 0 {
                    std::thread::sleep(pause(sample));
                    *began.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                    redis::cmd("LPUSH").arg("l").arg(&ELEMENT[..]).exec(conn)?;
                } else {
                    redis::cmd("BLPOP").arg("l").arg(0).exec(conn)?;
                    let ended = Instant::now();
                    let began = began
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .unwrap_or(ended);
                    micros
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((ended - began).as_secs_f64() * 1e6);
                }
            }
            Ok(())
        })?;
        Ok(micros.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

fn on_threads(
    connections: &mut [Connection],
    each: impl Fn(usize, &mut Connection) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<()> {
    tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            let each = &each;
            let threads: Vec<_> = connections
                .iter_mut()
                .enumerate()
                .map(|(n, conn)| scope.spawn(move || each(n, conn)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| anyhow::bail!("a caller panicked"))
            })
        })
    })
}

/// Takes up to `most` of what is left, or 0 if nothing is.
pub(crate) fn take(left: &AtomicUsize, most: usize) -> usize {
    let before = left.fetch_update(Relaxed, Relaxed, |left| {
        (left > 0).then(|| left.saturating_sub(most))
    });
    before.map_or(0, |left| left.min(most))
}

fn add(conn: &mut Connection, count: usize) -> anyhow::Result<()> {
    let mut pipe = redis::pipe();
    for _ in 0..count {
        pipe.cmd("XADD")
            .arg(STREAM)
            .arg("*")
            .arg("v")
            .arg(&ELEMENT[..])
            .ignore();
    }
    Ok(pipe.exec(conn)?)
}

fn read(caller: usize, batch: usize) -> Vec<u8> {
    let mut read = redis::cmd("XREADGROUP");
    read.arg("GROUP")
        .arg(GROUP)
        .arg(caller)
        .arg("COUNT")
        .arg(batch)
        .arg("STREAMS")
        .arg(STREAM)
        .arg(">");
    read.get_packed_command()
}

/// The ids in the answer of XREADGROUP with one stream.
fn read_ids(answer: Value) -> Vec<Value> {
    let nth = |value: Value, n: usize| match value {
        Value::Array(items) => items.into_iter().nth(n),
        _ => None,
    };
    match nth(answer, 0).and_then(|stream| nth(stream, 1)) {
        Some(Value::Array(entries)) => entries
            .into_iter()
            .filter_map(|entry| nth(entry, 0))
            .collect(),
        _ => Vec::new(),
    }
}

fn end(conn: &mut Connection, ids: &[Value]) -> anyhow::Result<()> {
    let ids: Vec<&[u8]> = ids
        .iter()
        .filter_map(|id| {
            if let Value::BulkString(id) = id {
                Some(&id[..])
            } else {
                None
            }
        })
        .collect();
    let mut pipe = redis::pipe();
    pipe.cmd("XACK")
        .arg(STREAM)
        .arg(GROUP)
        .arg(&ids)
        .cmd("XDEL")
        .arg(STREAM)
        .arg(&ids);
    let (acknowledged, _): (usize, usize) = pipe.query(conn)?;
    ensure!(
        acknowledged == ids.len(),
        "Redis acknowledged {acknowledged} of {}",
        ids.len()
    );
    Ok(())
}

/// SQLite with taskd's pragmas and a minimal table that detects duplicates: two unique keys and the
/// other data.
pub(crate) struct Sqlite {
    conn: SqliteConnection,
    next: u64,
    _folder: tempfile::TempDir,
}

/// Rows per statement.
const ROWS: usize = 250;

impl Sqlite {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let folder = crate::folder::folder()?;
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("limit.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .pragma("cache_size", "-16384")
            .pragma("wal_autocheckpoint", "8192")
            .disable_statement_logging();
        let mut conn = options.connect().await?;
        let table = "CREATE TABLE t (id BLOB NOT NULL PRIMARY KEY, key BLOB NOT NULL UNIQUE, rest BLOB NOT NULL) STRICT";
        sqlx::query(table).execute(&mut conn).await?;
        Ok(Self {
            conn,
            next: 0,
            _folder: folder,
        })
    }

    /// Inserts a batch in one transaction.
    async fn insert_batch(&mut self, batch: usize) -> anyhow::Result<()> {
        let mut tx = self.conn.begin_with("BEGIN IMMEDIATE").await?;
        let mut left = batch;
        while left > 0 {
            let rows = left.min(ROWS);
            let text = format!(
                "INSERT INTO t VALUES {} ON CONFLICT DO NOTHING",
                vec!["(?, ?, ?)"; rows].join(", ")
            );
            let mut query = sqlx::query(sqlx::AssertSqlSafe(text));
            for _ in 0..rows {
                self.next += 1;
                // As in taskd, ids are ordered and hashes are random.
                let (id, hash) = (
                    uuid::Uuid::now_v7(),
                    <sha2::Sha256 as sha2::Digest>::digest(self.next.to_be_bytes()),
                );
                query = query
                    .bind(id.as_bytes().to_vec())
                    .bind(hash.to_vec())
                    .bind(&ELEMENT[..]);
            }
            query.execute(&mut *tx).await?;
            left -= rows;
        }
        Ok(tx.commit().await?)
    }

    /// Inserts rows with a single writer, which is all that SQLite allows. Returns rows per second.
    pub(crate) async fn insert(&mut self, batch: usize, rows: usize) -> anyhow::Result<f64> {
        let began = Instant::now();
        for _ in 0..rows / batch {
            self.insert_batch(batch).await?;
        }
        Ok(rows as f64 / began.elapsed().as_secs_f64())
    }
}

/// Makes calls that are nearly empty, to taskd's own health service. Returns calls per second.
pub(crate) async fn grpc(
    channels: &[Channel],
    callers: usize,
    calls: usize,
) -> anyhow::Result<f64> {
    let left = std::sync::Arc::new(AtomicUsize::new(calls));
    let mut tasks = tokio::task::JoinSet::new();
    let began = Instant::now();
    for caller in 0..callers {
        let (left, mut client) = (
            left.clone(),
            HealthClient::new(channels[caller % channels.len()].clone()),
        );
        tasks.spawn(async move {
            while take(&left, 1) > 0 {
                client.check(HealthCheckRequest::default()).await?;
            }
            Ok::<_, tonic::Status>(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(calls as f64 / began.elapsed().as_secs_f64())
}

/// The CPU of taskd for the three calls of a task (insert, get, complete), in µs: three sequential
/// empty calls, at [`TASKS_A_SECOND`].
pub(crate) async fn cpu_of_calls(
    daemon: &Daemon,
    channel: &Channel,
    tasks: u32,
) -> anyhow::Result<f64> {
    let mut client = HealthClient::new(channel.clone());
    let before = daemon.used().await?.taskd_cpu;
    let mut pace = pace();
    for _ in 0..tasks {
        pace.tick().await;
        for _ in 0..3 {
            client.check(HealthCheckRequest::default()).await?;
        }
    }
    Ok((daemon.used().await?.taskd_cpu - before) * 1e6 / f64::from(tasks))
}

fn pace() -> tokio::time::Interval {
    tokio::time::interval(Duration::from_secs(1) / TASKS_A_SECOND)
}
