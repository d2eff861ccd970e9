//! A SQLite file of one test.

use std::{path::PathBuf, sync::Arc};

use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use taskd::store::{self, Store, sqlite::SqliteStore};
use tempfile::TempDir;

use super::store_contract::Database;

pub(crate) struct SqliteFile(TempDir);

impl SqliteFile {
    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("taskd.db")
    }
}

impl Database for SqliteFile {
    async fn create() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    async fn try_open(&self) -> store::Result<Arc<dyn Store>> {
        Ok(Arc::new(SqliteStore::open(&self.path(), None).await?))
    }

    async fn execute(&self, sql: &str) {
        let url = format!("sqlite://{}", self.path().display());
        let mut connection = SqliteConnection::connect(&url).await.unwrap();
        sqlx::query(AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }

    async fn number(&self, sql: &str) -> i64 {
        let url = format!("sqlite://{}", self.path().display());
        let mut connection = SqliteConnection::connect(&url).await.unwrap();
        sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(&mut connection)
            .await
            .unwrap()
    }

    async fn remove(self) {
        self.0.close().unwrap();
    }
}
