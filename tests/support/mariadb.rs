//! A database for one test on a MySQL or MariaDB server: the server at `TASKD_TEST_MYSQL_URL`, or
//! one that we start and leave running.

use std::{env, fs, process::Command, sync::Arc, time::Duration};

use nix::sys::signal::{Signal, kill};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use taskd::store::{self, Store, mysql::MysqlStore};
use tempfile::TempDir;
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::store_contract::Database;

pub(crate) struct MysqlDatabase {
    server: String,
    name: String,
}

/// The URL of the server's database `taskd`, with a user that may create other databases.
async fn server() -> &'static str {
    static URL: OnceCell<String> = OnceCell::const_new();
    URL.get_or_init(async || match env::var("TASKD_TEST_MYSQL_URL") {
        Ok(url) => url,
        Err(_) => tokio::task::spawn_blocking(start_mariadb).await.unwrap(),
    })
    .await
}

fn start_mariadb() -> String {
    run_script(&[])
}

/// Runs the script; returns the URL that it prints.
fn run_script(args: &[&str]) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/start-mariadb");
    let output = Command::new(script).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A server for one test, which may kill and restart it.
pub(crate) struct MariadbServer {
    dir: TempDir,
    options: Vec<String>,
    url: String,
}

impl MariadbServer {
    pub(crate) fn start(options: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("taskd-db-")
            .tempdir_in("/tmp")
            .unwrap();
        let options: Vec<String> = options.iter().map(ToString::to_string).collect();
        let mut server = Self {
            dir,
            options,
            url: String::new(),
        };
        server.url = server.run("0");
        server
    }

    /// Starts it again on the same port.
    pub(crate) fn start_again(&self) {
        let port = url::Url::parse(&self.url)
            .unwrap()
            .port()
            .unwrap()
            .to_string();
        assert_eq!(self.run(&port), self.url);
    }

    fn run(&self, port: &str) -> String {
        let mut args = vec![self.dir.path().to_str().unwrap(), port];
        args.extend(self.options.iter().map(String::as_str));
        run_script(&args)
    }

    /// The URL of its database `taskd`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn file(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.path().join(name)).unwrap_or_default())
            .into_owned()
    }

    /// Kills it with SIGKILL, and waits until it is gone.
    pub(crate) fn kill9(&self) {
        while let Some(pid) = super::process_of(&self.dir.path().join("pid"), self.dir.path()) {
            kill(pid, Signal::SIGKILL).ok();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for MariadbServer {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            eprintln!("{} is kept", self.dir.path().display());
        }
    }
}

impl MysqlDatabase {
    /// Creates a database on the test's own server.
    pub(crate) async fn on(server: &str) -> Self {
        let name = format!("taskd_{}", Uuid::now_v7().simple());
        let database = Self {
            server: server.to_owned(),
            name,
        };
        database
            .on_server(format!("CREATE DATABASE {}", database.name))
            .await;
        database
    }

    pub(crate) fn url(&self) -> String {
        let mut url = url::Url::parse(&self.server).unwrap();
        url.set_path(&self.name);
        url.into()
    }

    async fn on_server(&self, sql: String) {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }

    /// Waits until a transaction other than `but` waits for a lock in this database; returns which
    /// one.
    pub(crate) async fn wait_for_lock_wait_but(&self, but: &str) -> String {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        let waiting = "SELECT CONCAT(trx_id, ' ', trx_started) FROM information_schema.innodb_trx \
                       JOIN information_schema.processlist ON id = trx_mysql_thread_id \
                       WHERE trx_state = 'LOCK WAIT' AND db = ?";
        for _ in 0..150 {
            let waiting: Vec<String> = sqlx::query_scalar(waiting)
                .bind(&self.name)
                .fetch_all(&mut connection)
                .await
                .unwrap();
            if let Some(waiting) = waiting.into_iter().find(|waiting| waiting != but) {
                return waiting;
            }
            // The server returns a cached copy of this table, which it refreshes only if it was not
            // read for 0.1 s.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        panic!("nobody waits for a lock");
    }

    pub(crate) async fn wait_for_lock_wait(&self) {
        self.wait_for_lock_wait_but("").await;
    }

    /// Kills all connections to this database; returns how many.
    pub(crate) async fn kill_connections(&self) -> usize {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        let ids: Vec<i64> = sqlx::query_scalar(
            "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = ?",
        )
        .bind(&self.name)
        .fetch_all(&mut connection)
        .await
        .unwrap();
        let mut killed = 0;
        for id in ids {
            // A connection may have ended by itself, which is no error.
            killed += usize::from(
                sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}")))
                    .execute(&mut connection)
                    .await
                    .is_ok(),
            );
        }
        killed
    }
}

impl Database for MysqlDatabase {
    async fn create() -> Self {
        Self::on(server().await).await
    }

    async fn try_open(&self) -> store::Result<Arc<dyn Store>> {
        Ok(Arc::new(MysqlStore::connect(&self.url(), 16).await?))
    }

    async fn execute(&self, sql: &str) {
        let mut connection = MySqlConnection::connect(&self.url()).await.unwrap();
        sqlx::query(AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }

    async fn number(&self, sql: &str) -> i64 {
        let mut connection = MySqlConnection::connect(&self.url()).await.unwrap();
        sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(&mut connection)
            .await
            .unwrap()
    }

    async fn remove(self) {
        self.on_server(format!("DROP DATABASE {}", self.name)).await;
    }
}
