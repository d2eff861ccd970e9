//! The store in a MySQL 8 or MariaDB server, shared by any number of processes.

use std::{str::FromStr, time::Duration};

use sqlx::{
    ConnectOptions, Connection, Executor, MySql, MySqlConnection,
    mysql::{MySqlConnectOptions, MySqlDatabaseError, MySqlPoolOptions},
};

use super::{
    Error, Result,
    sql::{Dialect, MigrationFile, SqlStore, migration_files},
};

const MIGRATIONS: &[MigrationFile] = migration_files!("mysql");

pub type MysqlStore = SqlStore<MySql>;

/// How long a call may wait for a connection: less than for a lock, so that those behind a lock that is held for long are told.
const PATIENCE: Duration = Duration::from_secs(8);
/// The pool closes a connection that was idle for this time, before the server does: see [`SESSION`].
const IDLE: Duration = Duration::from_secs(10);
/// How long an idle connection may take to answer a ping.
const PING_WITHIN: Duration = Duration::from_secs(2);
/// Then another one is opened: it finds a new primary, and the server gets its memory back.
const LIFETIME: Duration = Duration::from_secs(1800);
/// More than the shapes of all statements.
const PREPARED: usize = 256;

/// Two statements, since MySQL and MariaDB give the variable of the first one different names.
///
/// READ COMMITTED: a row that was waited for is then seen, and no gaps are locked between other people's keys.
/// Strict: what does not fit is an error, not cut off. A lock that is held for long is a reason to start again.
/// Neither a server's setting nor a proxy's may change what our statements mean. Times are numbers; sqlx sets the zone to UTC all the same.
/// The server ends a session that is silent for 20 s. Otherwise a client that was cut off would hold its locks for
/// hours.
const SESSION: &str = "\
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
    SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
                autocommit = 1, \
                innodb_lock_wait_timeout = 10, \
                wait_timeout = 20";

/// For the connection that holds the migration lock, silent while another connection migrates.
const PATIENT_SESSION: &str = "SET SESSION wait_timeout = 86400";

/// How long a process that starts waits while another one migrates.
const MIGRATION_LOCK: &str = "SELECT GET_LOCK(CONCAT('taskd.', MD5(DATABASE())), 60) = 1";

/// Parameters of the URL that name a file, each by both of its names.
const FILES: &[&str] = &["ssl-ca", "sslca", "ssl-cert", "sslcert", "ssl-key", "sslkey"];

impl MysqlStore {
    /// Connects to `mysql://user:password@host:port/database`, with at most so many connections, and migrates it. `?ssl-mode=` is DISABLED,
    /// PREFERRED (the default: TLS where the server offers it, whoever it is), REQUIRED (TLS, whoever it is), VERIFY_CA or VERIFY_IDENTITY
    /// (by the system's certificates and those of `ssl-ca`).
    pub async fn connect(url: &str, connections: u32) -> Result<Self> {
        check_files(url).await?;
        let options =
            MySqlConnectOptions::from_str(url)?.statement_cache_capacity(PREPARED).disable_statement_logging();
        // sqlx takes a lock of its own, but without a time limit, which MariaDB refuses and sqlx does not notice.
        let mut lock = options.connect().await?;
        // Here an error is seen; the pool would try until it runs out of time.
        lock.execute(SESSION).await?;
        lock.execute(PATIENT_SESSION).await?;
        let locked: Option<bool> = sqlx::query_scalar(MIGRATION_LOCK).fetch_one(&mut lock).await?;
        if locked != Some(true) {
            return Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into());
        }
        let pool = MySqlPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(PATIENCE)
            .idle_timeout(IDLE)
            .max_lifetime(LIFETIME)
            // A ping before each use keeps dead connections from callers. sqlx's own ping has no time limit.
            .test_before_acquire(false)
            .before_acquire(|connection, _| {
                Box::pin(async {
                    let ping = tokio::time::timeout(PING_WITHIN, connection.ping()).await;
                    Ok(matches!(ping, Ok(Ok(()))))
                })
            })
            .after_connect(|connection, _| {
                Box::pin(async {
                    connection.execute(SESSION).await?;
                    Ok(())
                })
            })
            .connect_with(options)
            .await?;
        let store = Self::migrate(MIGRATIONS, pool.clone(), pool).await?;
        lock.close().await?; // which gives the lock back
        Ok(store)
    }
}

/// sqlx reads them at each connection, and says of one that is missing only that something is.
async fn check_files(url: &str) -> Result<()> {
    let Ok(url) = url::Url::parse(url) else { return Ok(()) };
    for (parameter, name) in url.query_pairs().filter(|(parameter, _)| FILES.contains(&&**parameter)) {
        if let Err(cause) = tokio::fs::metadata(&*name).await {
            return Err(Error::File { parameter: parameter.into(), name: name.into(), cause });
        }
    }
    Ok(())
}

impl Dialect for MySqlConnection {
    const BEGIN: &'static str = "START TRANSACTION";
    const FOR_UPDATE: &'static str = " FOR UPDATE";
    // Both servers know this form; MariaDB has no other.
    const FOR_SHARE: &'static str = " LOCK IN SHARE MODE";
    const NOW_MS: &'static str = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)";
    // Longer than a wait for a lock, and short enough for a second try before the call gives up.
    const ANSWER_WITHIN: Option<Duration> = Some(Duration::from_secs(15));
    const BUSY_HINT: &'static str = "raise database_pool, or ask for less at once";
    const ID: &'static str = "CAST(? AS BINARY(16))";
    const BY_PRIMARY_KEY: &'static str = "FORCE INDEX (PRIMARY)";
    // sqlx asks the server to count what was found as well.
    const COUNTS_INSERTED: bool = false;
    const IS_UNFINISHED: &'static str = "unfinished = 1";

    // Not INSERT IGNORE, which would also swallow data that does not fit.
    fn keep_first(column: &str) -> String {
        format!(" ON DUPLICATE KEY UPDATE {column} = {column}")
    }

    fn replace(_key: &str, columns: &[&str]) -> String {
        let set: Vec<String> = columns.iter().map(|column| format!("{column} = VALUES({column})")).collect();
        format!(" ON DUPLICATE KEY UPDATE {}", set.join(", "))
    }

    fn add(_key: &str, column: &str) -> String {
        format!(" ON DUPLICATE KEY UPDATE {column} = {column} + VALUES({column})")
    }

    fn by_index(index: &str) -> String {
        format!("FORCE INDEX ({index})")
    }

    fn is_there_already(error: &sqlx::Error) -> bool {
        // A table, a column, an index, a row.
        const THERE: [u16; 4] = [1050, 1060, 1061, 1062];
        let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
        error.is_some_and(|error| THERE.contains(&error.number()))
    }

    fn update_tasks(set: &str) -> [String; 2] {
        ["UPDATE tasks JOIN (".into(), format!(") AS changes ON id = task_id SET {set}")]
    }
}
