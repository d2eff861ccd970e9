//! Migrations on a server that commits each statement by itself: a start may be killed between any
//! two of them.

use std::path::Path;

use sqlx::{
    AssertSqlSafe, Connection, MySqlConnection,
    migrate::{Migrate, Migrator},
};
use taskd::store::{Store, mysql::MysqlStore};

use crate::support::{
    mariadb::MysqlDatabase,
    store_contract::{Database, insert_new, rows},
};

async fn migrator() -> Migrator {
    Migrator::new(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/migrations/mysql"
    )))
    .await
    .unwrap()
}

/// No text in the migrations has a semicolon or two dashes.
fn statements(sql: &str) -> Vec<String> {
    let lines = sql.lines().map(|line| line.split("--").next().unwrap());
    let code = lines.collect::<Vec<_>>().join("\n");
    code.split(';')
        .map(str::trim)
        .filter(|statement| !statement.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Every table's definition, and the rows of `meta`, without the random name of the store.
async fn schema(database: &MysqlDatabase) -> Vec<String> {
    let mut connection = MySqlConnection::connect(&database.url()).await.unwrap();
    let tables: Vec<String> = sqlx::query_scalar("SHOW TABLES")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let mut schema = Vec::new();
    for table in tables {
        let show = AssertSqlSafe(format!("SHOW CREATE TABLE {table}"));
        let (_, text): (String, String) = sqlx::query_as(show)
            .fetch_one(&mut connection)
            .await
            .unwrap();
        schema.push(text);
    }
    let meta = "SELECT CONCAT(name, '=', IF(name = 'store_id', LENGTH(value), value)) FROM meta ORDER BY name";
    schema.extend(
        sqlx::query_scalar::<_, String>(meta)
            .fetch_all(&mut connection)
            .await
            .unwrap(),
    );
    let applied = "SELECT CONCAT(version, ' ', success, ' ', HEX(checksum)) FROM _sqlx_migrations ORDER BY version";
    schema.extend(
        sqlx::query_scalar::<_, String>(applied)
            .fetch_all(&mut connection)
            .await
            .unwrap(),
    );
    schema
}

#[tokio::test]
async fn a_migration_that_was_interrupted_anywhere_is_finished_by_the_next_start() {
    let clean = MysqlDatabase::create().await;
    clean.open().await.close().await;
    let expected = schema(&clean).await;
    let migrator = migrator().await;
    let mut before = 0;
    for migration in migrator.iter() {
        let statements = statements(migration.sql.as_str());
        assert!(!statements.is_empty());
        for done in 0..=statements.len() {
            let database = MysqlDatabase::create().await;
            let mut killed = MySqlConnection::connect(&database.url()).await.unwrap();
            killed
                .ensure_migrations_table("_sqlx_migrations")
                .await
                .unwrap();
            if before > 0 {
                migrator
                    .run_direct(Some(before), &mut killed, false)
                    .await
                    .unwrap();
            }
            // sqlx notes this before the first statement.
            let note = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                        VALUES (?, ?, FALSE, ?, -1)";
            let note = sqlx::query(note)
                .bind(migration.version)
                .bind(&*migration.description);
            note.bind(&*migration.checksum)
                .execute(&mut killed)
                .await
                .unwrap();
            for statement in &statements[..done] {
                sqlx::raw_sql(AssertSqlSafe(statement.as_str()))
                    .execute(&mut killed)
                    .await
                    .unwrap();
            }
            killed.close().await.unwrap();

            let store = MysqlStore::connect(&database.url(), 2).await;
            let store = store.unwrap_or_else(|error| {
                panic!("{} after {done} statements: {error}", migration.version)
            });
            insert_new(&store, &rows("q", 3)).await;
            store.close().await;
            assert_eq!(
                schema(&database).await,
                expected,
                "{} after {done} statements",
                migration.version
            );
            database.remove().await;
        }
        before = migration.version;
    }
    clean.remove().await;
}
