//! A check for the tests of the library: SQLite explains each statement before it runs it. None may scan a table that
//! grows.

use sqlx::{AssertSqlSafe, Row, SqliteConnection};

const GROWING: [&str; 4] = ["tasks", "outbox", "results", "seen"];

pub(super) async fn check(connection: &mut SqliteConnection, text: &str) {
    let plan = sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"))).fetch_all(connection).await;
    let plan = plan.expect("SQLite explains what it can run");
    for row in plan {
        let step: String = row.try_get("detail").expect("a step has a text");
        let scans =
            GROWING.iter().any(|table| step == format!("SCAN {table}") || step.starts_with(&format!("SCAN {table} ")));
        let sorts = step.contains("ORDER BY") && text.contains("FROM outbox");
        assert!(!scans && !sorts && !step.contains("AUTOMATIC"), "{step}: {text}");
    }
}
