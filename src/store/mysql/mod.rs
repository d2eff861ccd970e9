//! The store in a MySQL 8 or MariaDB server, shared by any number of processes.

mod error;
mod pooled;
mod session;

use std::{
    io,
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::{
    ConnectOptions, Connection, MySql, MySqlConnection, Pool,
    mysql::{MySqlConnectOptions, MySqlPoolOptions},
};
use tokio::sync::Mutex;

use super::{
    Error, Result,
    sql::{
        self, Backend, Columns, Dialect, MigrationFile, Session, SqlStore, Statement, Value, Work,
        migration_files,
    },
};

use crate::model::{StoredStatus, TaskId};

use self::{
    error::error,
    pooled::{Pooled, Tx},
};

pub type MysqlStore = SqlStore<Server>;

const MIGRATIONS: &[MigrationFile] = migration_files!("mysql");

/// How long to wait for a connection. Shorter than the wait for a lock, so that callers that queue
/// behind a long lock get an error.
const PATIENCE: Duration = Duration::from_secs(8);
/// The pool closes a connection that has been idle for this long, before the server does: see
/// [`SESSION`].
const IDLE: Duration = Duration::from_secs(5);
/// How long an idle connection may take to answer a ping.
const PING_WITHIN: Duration = Duration::from_secs(2);
/// The maximum age of a connection. A new connection finds a new primary, and lets the server free
/// memory.
const LIFETIME: Duration = Duration::from_secs(1800);
/// How long a start waits for the migration lock, including its connection. After that, a server
/// that accepts connections but does not respond is tried again.
const LOCKED_WITHIN: Duration = Duration::from_secs(75);
/// How long a single attempt to connect may take when it is made to find out why the pool has no
/// connection.
const ONE_CONNECT: Duration = Duration::from_secs(2);
/// How long callers share the result of such an attempt, because there may be hundreds of them.
const SHARED_FOR: Duration = Duration::from_secs(1);
/// More than the number of different statements.
const PREPARED: usize = 256;

/// Session settings that must not depend on the settings of a server or a proxy.
///
/// These are two statements, because the variable for the isolation level has different names in
/// MySQL and MariaDB. READ COMMITTED: after waiting for a row, the transaction sees its new
/// version, and searches lock no gaps between keys (only the check of a unique key may). Strict: a
/// value that does not fit is an error. A long wait for a lock ends with a retry. The server ends a
/// session that has been silent for 10 s; otherwise a client that was cut off would hold its locks
/// for hours. A call that runs into such locks is retried for twice as long.
const SESSION: &str = "\
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
    SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
                autocommit = 1, \
                innodb_lock_wait_timeout = 10, \
                wait_timeout = 10";

/// How often the connection that holds the lock sends a ping while another connection migrates.
const AWAKE_EVERY: Duration = Duration::from_secs(3);

/// Waits at most 60 s while another process migrates.
const MIGRATION_LOCK: &str = "SELECT GET_LOCK(CONCAT('taskd.', MD5(DATABASE())), 60) = 1";

/// URL parameters that name a file, each under both of its names.
const FILES: &[&str] = &[
    "ssl-ca", "sslca", "ssl-cert", "sslcert", "ssl-key", "sslkey",
];

impl MysqlStore {
    /// Connects to `mysql://user:password@host:port/database` and migrates it.
    ///
    /// `?ssl-mode=` is DISABLED, PREFERRED (the default: TLS if the server offers it, without
    /// verification), REQUIRED (TLS, without verification), VERIFY_CA or VERIFY_IDENTITY (verified
    /// with the system's certificates and those of `ssl-ca`).
    pub async fn connect(url: &str, connections: u32) -> Result<Self> {
        let options = Self::options(url)?;
        let options = options
            .statement_cache_capacity(PREPARED)
            .disable_statement_logging();
        let lock = tokio::time::timeout(LOCKED_WITHIN, migration_lock(&options)).await;
        let mut lock = lock
            .map_err(|_| Error::timed_out())?
            .map_err(error)?
            .ok_or(Error::Migrating)?;
        let migrate = async {
            let pool = pool(options, connections).await.map_err(error)?;
            let migrated =
                sql::migrate(MIGRATIONS, &mut *pool.acquire().await.map_err(error)?).await?;
            Ok::<_, Error>(Self::new(Server::new(pool), migrated))
        };
        let store = tokio::select! {
            store = migrate => store?,
            lost = keep_awake(&mut lock) => return Err(error(lost)),
        };
        // Closing the connection releases the lock.
        lock.close().await.map_err(error)?;
        Ok(store)
    }

    /// Rejects a URL that cannot work with any server.
    pub fn check(url: &str) -> Result<()> {
        Self::options(url).map(drop)
    }

    fn options(url: &str) -> Result<MySqlConnectOptions> {
        check_files(url)?;
        MySqlConnectOptions::from_str(url).map_err(error)
    }
}

/// Opens a connection that holds the migration lock. Returns `None` if another process has held the
/// lock for too long.
///
/// sqlx takes a lock of its own, but without a time limit, which MariaDB rejects without sqlx
/// noticing.
async fn migration_lock(options: &MySqlConnectOptions) -> sqlx::Result<Option<MySqlConnection>> {
    let connected = tokio::time::timeout(PATIENCE, options.connect()).await;
    let mut lock = connected.map_err(|_| sqlx::Error::Io(io::ErrorKind::TimedOut.into()))??;
    // Errors show up here immediately, whereas the pool would retry until its timeout.
    sqlx::raw_sql(SESSION).execute(&mut lock).await?;
    let locked: Option<bool> = sqlx::query_scalar(MIGRATION_LOCK)
        .fetch_one(&mut lock)
        .await?;
    Ok((locked == Some(true)).then_some(lock))
}

/// Keeps the server from ending the session. Returns only on failure, with the error: then the lock
/// is lost, or the server does not respond.
async fn keep_awake(lock: &mut MySqlConnection) -> sqlx::Error {
    loop {
        tokio::time::sleep(AWAKE_EVERY).await;
        match tokio::time::timeout(PING_WITHIN, lock.ping()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error,
            Err(_late) => return sqlx::Error::Io(io::ErrorKind::TimedOut.into()),
        }
    }
}

async fn pool(options: MySqlConnectOptions, connections: u32) -> sqlx::Result<Pool<MySql>> {
    MySqlPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(PATIENCE)
        .idle_timeout(IDLE)
        .max_lifetime(LIFETIME)
        // A ping before each use keeps dead connections away from callers. sqlx's own ping has no
        // time limit.
        .test_before_acquire(false)
        .before_acquire(|connection, _| {
            Box::pin(async {
                let ping = tokio::time::timeout(PING_WITHIN, connection.ping()).await;
                Ok(matches!(ping, Ok(Ok(()))))
            })
        })
        .after_connect(|connection, _| {
            Box::pin(async {
                sqlx::raw_sql(SESSION).execute(&mut *connection).await?;
                Ok(())
            })
        })
        .connect_with(options)
        .await
}

/// Returns an error that names a file of the URL that cannot be read. sqlx reads the files for each
/// connection, and its error does not name a missing one.
fn check_files(url: &str) -> Result<()> {
    let Ok(url) = url::Url::parse(url) else {
        return Ok(());
    };
    for (parameter, name) in url
        .query_pairs()
        .filter(|(parameter, _)| FILES.contains(&&**parameter))
    {
        if let Err(cause) = std::fs::metadata(&*name) {
            return Err(Error::File {
                parameter: parameter.into(),
                name: name.into(),
                cause,
            });
        }
    }
    Ok(())
}

type Probed = Result<(), Arc<sqlx::Error>>;

/// The server, accessed through a pool of connections.
pub struct Server {
    pool: Pool<MySql>,
    /// When somebody last checked whether the server accepts connections, and the result.
    probed: Mutex<Option<(Instant, Probed)>>,
}

impl Backend for Server {
    type Connection = MySqlConnection;

    async fn transact<I, T>(&self, work: &Work<MySqlConnection, I, T>) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        let mut tx = Tx::begin(self.connection().await?, work.is_in_era).await?;
        let done = work.on(&mut tx).await;
        tx.end(done).await
    }

    async fn read<T: Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        let mut connection = self.connection().await?;
        let read = Session::fetch(&mut *connection, statement).await;
        connection.checked(read)
    }

    async fn ping(&self) -> Result<()> {
        // A free connection is cheapest. If it is broken, the server may still be fine, so a new
        // connection decides.
        if let Some(mut connection) = Pooled::free(&self.pool) {
            let ping = tokio::time::timeout(ONE_CONNECT, connection.ping()).await;
            if matches!(ping, Ok(Ok(()))) {
                return Ok(());
            }
            connection.close();
        }
        self.probe().await.map_err(error::shared)
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}

impl Server {
    fn new(pool: Pool<MySql>) -> Self {
        Self {
            pool,
            probed: Mutex::default(),
        }
    }

    async fn connection(&self) -> Result<Pooled> {
        match Pooled::of(&self.pool).await {
            Err(sqlx::Error::PoolTimedOut) => Err(self.why_none().await),
            acquired => acquired.map_err(error),
        }
    }

    /// Finds out why the pool had no free connection. The pool does not say, so this tries to open
    /// a connection of its own.
    async fn why_none(&self) -> Error {
        match self.probe().await {
            Ok(()) => {
                let options = self.pool.options();
                let (connections, waited) =
                    (options.get_max_connections(), options.get_acquire_timeout());
                Error::Busy {
                    connections,
                    waited,
                    hint: "raise database_pool, or ask for less at once",
                }
            }
            Err(cause) => error::shared(cause),
        }
    }

    /// Opens and closes a connection. Callers that ask at about the same time share the result.
    async fn probe(&self) -> Probed {
        let mut last = self.probed.lock().await;
        if let Some((at, probed)) = &*last
            && at.elapsed() < SHARED_FOR
        {
            return probed.clone();
        }
        let options = self.pool.connect_options();
        let connect = async {
            // The server accepts connections, which is what was to be found out. An error from the
            // close does not matter.
            drop(options.connect().await?.close().await);
            Ok(())
        };
        let silent = |_| Err(sqlx::Error::Io(io::ErrorKind::TimedOut.into()));
        let probed = tokio::time::timeout(ONE_CONNECT, connect)
            .await
            .unwrap_or_else(silent)
            .map_err(Arc::new);
        *last = Some((Instant::now(), probed.clone()));
        probed
    }
}

impl Dialect for MySqlConnection {
    const FOR_UPDATE: &'static str = " FOR UPDATE";
    // MySQL understands this form, too; MariaDB has no other.
    const FOR_SHARE: &'static str = " LOCK IN SHARE MODE";
    const NOW_MS: &'static str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)";
    const ERA: &'static str = "@taskd_era";
    const NUMBER: Option<&'static str> = None;
    const IS_RESULT_OF: &'static str = "task_id = id";
    const FINDER: &'static str = "CAST(? AS BINARY(16))";
    const INSERT: &'static str = "INSERT";
    const UPDATE: &'static str = "UPDATE";
    const BY_PRIMARY_KEY: &'static str = "FORCE INDEX (PRIMARY)";
    const BY_IDS_ON_BUS: &'static str = "FORCE INDEX (tasks_on_bus)";
    const ON_BUS: &'static str = "FORCE INDEX (tasks_on_bus) WHERE on_bus = 1";
    // sqlx makes the server count rows that were found but not changed, too.
    const COUNTS_INSERTED: bool = false;
    const IS_UNFINISHED: &'static str = "unfinished = 1";
    const SEEN_KEYS: &'static str = "SELECT key_hash, task_id, status FROM seen WHERE key_hash IN ";

    // On MySQL ids are not grouped: each id is a group of its own.
    fn group(id: &str) -> String {
        id.to_owned()
    }

    fn group_of(id: &TaskId) -> Value<'_> {
        id.into()
    }

    fn of_tasks(ids: &[TaskId]) -> Statement<'_> {
        Statement::new("task_id IN ").list(ids)
    }

    // INSERT IGNORE would also hide values that do not fit.
    fn keep_first(column: &str) -> String {
        format!(" ON DUPLICATE KEY UPDATE {column} = {column}")
    }

    fn on_conflict(_key: &str) -> String {
        " ON DUPLICATE KEY UPDATE".into()
    }

    fn new_value(column: &str) -> String {
        format!("VALUES({column})")
    }

    fn by_index(index: &str) -> String {
        format!("FORCE INDEX ({index})")
    }

    fn of_status(status: StoredStatus) -> String {
        format!("FORCE INDEX (tasks_queue) WHERE status = {}", status as i64)
    }

    fn update_tasks(set: &str) -> [String; 2] {
        [
            "UPDATE tasks JOIN (".into(),
            format!(") AS reported ON id = finder SET {set}"),
        ]
    }

    fn is_there_already(error: &Error) -> bool {
        error::is_there_already(error)
    }

    fn is_transient(error: &sqlx::Error) -> bool {
        error::is_transient(error)
    }
}
