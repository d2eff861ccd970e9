//! A database of one test on a MySQL or MariaDB server: the one at `TASKD_TEST_MYSQL_URL`, or one of our own that stays running.

use std::{env, process::Command, sync::Arc, time::Duration};

use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use taskd::store::{Store, mysql::MysqlStore};
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::store_contract::Database;

pub(crate) struct MysqlDatabase {
    server: String,
    name: String,
}

/// The URL of the server's database `taskd`, whose user may create others.
async fn server() -> &'static str {
    static URL: OnceCell<String> = OnceCell::const_new();
    URL.get_or_init(async || match env::var("TASKD_TEST_MYSQL_URL") {
        Ok(url) => url,
        Err(_) => tokio::task::spawn_blocking(start_mariadb).await.unwrap(),
    })
    .await
}

fn start_mariadb() -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/start-mariadb");
    let output = Command::new(script).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl MysqlDatabase {
    pub(crate) fn url(&self) -> String {
        let mut url = url::Url::parse(&self.server).unwrap();
        url.set_path(&self.name);
        url.into()
    }

    async fn on_server(&self, sql: String) {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    }

    /// Until somebody waits for a lock in this database.
    pub(crate) async fn wait_for_lock_wait(&self) {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        let waiting = "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist \
                       ON id = trx_mysql_thread_id WHERE trx_state = 'LOCK WAIT' AND db = ?";
        for _ in 0..50 {
            let waiting: i64 = sqlx::query_scalar(waiting).bind(&self.name).fetch_one(&mut connection).await.unwrap();
            if waiting > 0 {
                return;
            }
            // The server shows a copy of its state, made only when nobody has looked for a tenth of a second.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        panic!("nobody waits for a lock");
    }

    /// The one number that `sql` answers.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        let mut connection = MySqlConnection::connect(&self.url()).await.unwrap();
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap()
    }

    /// Cuts all connections to this database.
    pub(crate) async fn kill_connections(&self) {
        let mut connection = MySqlConnection::connect(&self.server).await.unwrap();
        let ids: Vec<i64> =
            sqlx::query_scalar("SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = ?")
                .bind(&self.name)
                .fetch_all(&mut connection)
                .await
                .unwrap();
        assert!(!ids.is_empty());
        for id in ids {
            sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}"))).execute(&mut connection).await.unwrap();
        }
    }
}

impl Database for MysqlDatabase {
    async fn create() -> Self {
        let name = format!("taskd_{}", Uuid::now_v7().simple());
        let database = Self { server: server().await.to_owned(), name };
        database.on_server(format!("CREATE DATABASE {}", database.name)).await;
        database
    }

    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(MysqlStore::connect(&self.url(), 16).await.unwrap())
    }

    async fn execute(&self, sql: &str) {
        let mut connection = MySqlConnection::connect(&self.url()).await.unwrap();
        sqlx::query(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    }

    async fn remove(self) {
        self.on_server(format!("DROP DATABASE {}", self.name)).await;
    }
}
