//! The store in a MySQL 8 or MariaDB server, shared by any number of processes.

use std::{str::FromStr, time::Duration};

use sqlx::{
    ConnectOptions, Connection, Executor, MySql, MySqlConnection,
    mysql::{MySqlConnectOptions, MySqlPoolOptions},
};

use super::{
    Result,
    sql::{Dialect, SqlStore},
};

pub type MysqlStore = SqlStore<MySql>;

/// How long a call may wait for a connection.
const PATIENCE: Duration = Duration::from_secs(10);
const CONNECTIONS: u32 = 16;
/// More than the shapes of all statements.
const PREPARED: usize = 256;

/// Two statements, since MySQL and MariaDB give the variable of the first one different names.
///
/// READ COMMITTED: a row that was waited for is then seen, and no gaps are locked between other people's keys.
/// Strict: what does not fit is an error, not cut off. A lock that is held for long is a reason to start again.
const SESSION: &str = "\
    SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
    SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
                innodb_lock_wait_timeout = 10";

/// How long a process that starts waits while another one migrates.
const MIGRATION_LOCK: &str = "SELECT GET_LOCK(CONCAT('taskd.', MD5(DATABASE())), 60) = 1";

impl MysqlStore {
    /// Connects to `mysql://user:password@host:port/database` and migrates it.
    pub async fn connect(url: &str) -> Result<Self> {
        let options =
            MySqlConnectOptions::from_str(url)?.statement_cache_capacity(PREPARED).disable_statement_logging();
        // sqlx takes a lock of its own, but without a time limit, which MariaDB refuses and sqlx does not notice.
        let mut lock = options.connect().await?;
        let locked: Option<bool> = sqlx::query_scalar(MIGRATION_LOCK).fetch_one(&mut lock).await?;
        if locked != Some(true) {
            return Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into());
        }
        let pool = MySqlPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(PATIENCE)
            .after_connect(|connection, _| {
                Box::pin(async {
                    connection.execute(SESSION).await?;
                    Ok(())
                })
            })
            .connect_with(options)
            .await?;
        let store = Self::migrate(sqlx::migrate!("migrations/mysql"), pool.clone(), pool).await?;
        lock.close().await?; // which gives the lock back
        Ok(store)
    }
}

impl Dialect for MySqlConnection {
    const BEGIN: &'static str = "START TRANSACTION";
    const FOR_UPDATE: &'static str = " FOR UPDATE";
    const ID: &'static str = "CAST(? AS BINARY(16))";
    // sqlx asks the server to count what was found as well.
    const COUNTS_INSERTED: bool = false;

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

    fn update_tasks(set: &str) -> [String; 2] {
        ["UPDATE tasks JOIN (".into(), format!(") AS changes ON id = task_id SET {set}")]
    }
}
