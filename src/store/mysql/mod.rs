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

/// The longest wait for a connection: shorter than for a lock, so that callers behind a long lock
/// get an error.
const PATIENCE: Duration = Duration::from_secs(8);
/// The pool closes a connection after this idle time, before the server does: see [`SESSION`].
const IDLE: Duration = Duration::from_secs(5);
/// The longest that an idle connection may take to answer a ping.
const PING_WITHIN: Duration = Duration::from_secs(2);
/// The life of a connection. The next one finds a new primary, and the server gets its memory back.
const LIFETIME: Duration = Duration::from_secs(1800);
/// The longest that a start waits for the migration lock, with its connection. A server that
/// accepts and says nothing is asked again then.
const LOCKED_WITHIN: Duration = Duration::from_secs(75);
/// The longest that one attempt to connect may take, when it looks for the reason that the pool has
/// no connection.
const ONE_CONNECT: Duration = Duration::from_secs(2);
/// Callers share what such an attempt found for so long: they may be hundreds.
const SHARED_FOR: Duration = Duration::from_secs(1);
/// More than the shapes of all statements.
const PREPARED: usize = 256;

/// Settings of a session, which no setting of a server or a proxy may change.
///
/// Two statements, because the variable of the first one has different names in MySQL and MariaDB.
/// READ COMMITTED: after a wait for a row the transaction sees it, and a search locks no gaps
/// between keys; only the check of a unique key may. Strict: a value that does not fit is an error.
/// A long wait for a lock ends with a retry. The server ends a session that is silent for 10 s;
/// otherwise a client that was cut off would hold its locks for hours. That is half the time for
/// which a call that meets these locks is tried again.
const SESSION: &str = "\
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
    SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
                autocommit = 1, \
                innodb_lock_wait_timeout = 10, \
                wait_timeout = 10";

/// While another connection migrates, the one that holds the lock says something this often.
const AWAKE_EVERY: Duration = Duration::from_secs(3);

/// A start waits for so many seconds while another process migrates.
const MIGRATION_LOCK: &str = "SELECT GET_LOCK(CONCAT('taskd.', MD5(DATABASE())), 60) = 1";

/// Parameters of the URL that name a file, each by both of its names.
const FILES: &[&str] = &[
    "ssl-ca", "sslca", "ssl-cert", "sslcert", "ssl-key", "sslkey",
];

impl MysqlStore {
    /// Connects to `mysql://user:password@host:port/database` and migrates it.
    ///
    /// `?ssl-mode=` is DISABLED, PREFERRED (the default: TLS where the server offers it, without a
    /// check), REQUIRED (TLS, without a check), VERIFY_CA or VERIFY_IDENTITY (by the system's
    /// certificates and those of `ssl-ca`).
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
        // The lock ends with its connection.
        lock.close().await.map_err(error)?;
        Ok(store)
    }

    /// Refuses a URL with which no server can be used.
    pub fn check(url: &str) -> Result<()> {
        Self::options(url).map(drop)
    }

    fn options(url: &str) -> Result<MySqlConnectOptions> {
        check_files(url)?;
        MySqlConnectOptions::from_str(url).map_err(error)
    }
}

/// A connection that holds the migration lock. `None`: another process has held it for too long.
///
/// sqlx takes a lock of its own, but without a time limit, which MariaDB refuses and sqlx does not
/// notice.
async fn migration_lock(options: &MySqlConnectOptions) -> sqlx::Result<Option<MySqlConnection>> {
    let connected = tokio::time::timeout(PATIENCE, options.connect()).await;
    let mut lock = connected.map_err(|_| sqlx::Error::Io(io::ErrorKind::TimedOut.into()))??;
    // Here an error shows at once; the pool would try until it runs out of time.
    sqlx::raw_sql(SESSION).execute(&mut lock).await?;
    let locked: Option<bool> = sqlx::query_scalar(MIGRATION_LOCK)
        .fetch_one(&mut lock)
        .await?;
    Ok((locked == Some(true)).then_some(lock))
}

/// Keeps the server from ending the session. Answers how that failed: the lock is lost then, or the
/// server is silent.
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
        // A ping before each use keeps dead connections from callers. sqlx's own ping has no time
        // limit.
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

/// Names a file of the URL that cannot be read. sqlx reads them at each connection, and does not
/// name a missing one.
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

/// The server, by a pool of connections.
pub struct Server {
    pool: Pool<MySql>,
    /// When somebody last tried whether the server accepts connections, and what came of it.
    probed: Mutex<Option<(Instant, Probed)>>,
}

impl Backend for Server {
    type Connection = MySqlConnection;

    async fn transact<I, T>(&self, work: &Work<MySqlConnection, I, T>) -> Result<T>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
    {
        let mut tx = Tx::begin(self.connection().await?).await?;
        let done = work.on(&mut tx).await;
        tx.end(done).await
    }

    async fn read<T: Columns>(&self, statement: Statement<'_>) -> Result<Vec<T>> {
        let mut connection = self.connection().await?;
        let read = Session::fetch(&mut *connection, statement).await;
        connection.checked(read)
    }

    async fn ping(&self) -> Result<()> {
        // A connection that is free costs least. If it is broken, the server may be well: a new one
        // decides.
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

    /// Finds out why the pool had no connection to give. The pool does not tell, so this tries one
    /// of its own.
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

    /// Opens and closes a connection. Callers that ask at the same time share one.
    async fn probe(&self) -> Probed {
        let mut last = self.probed.lock().await;
        if let Some((at, probed)) = &*last
            && at.elapsed() < SHARED_FOR
        {
            return probed.clone();
        }
        let options = self.pool.connect_options();
        let connect = async {
            // The server accepts connections, which was the question: an error of the close does
            // not matter.
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
    // MySQL knows this form too; MariaDB has no other.
    const FOR_SHARE: &'static str = " LOCK IN SHARE MODE";
    const NOW_MS: &'static str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)";
    const NUMBER: Option<&'static str> = None;
    const IS_RESULT_OF: &'static str = "task_id = id";
    const FINDER: &'static str = "CAST(? AS BINARY(16))";
    const INSERT: &'static str = "INSERT";
    const UPDATE: &'static str = "UPDATE";
    const BY_PRIMARY_KEY: &'static str = "FORCE INDEX (PRIMARY)";
    const BY_IDS_ON_BUS: &'static str = "FORCE INDEX (tasks_on_bus)";
    const ON_BUS: &'static str = "FORCE INDEX (tasks_on_bus) WHERE on_bus = 1";
    // sqlx makes the server count found rows as well.
    const COUNTS_INSERTED: bool = false;
    const IS_UNFINISHED: &'static str = "unfinished = 1";
    const SEEN_KEYS: &'static str = "SELECT key_hash, task_id, status FROM seen WHERE key_hash IN ";

    // MySQL does not group ids: each id is its own group.
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
