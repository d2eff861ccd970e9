//! For the tests of the library: SQLite explains each statement before it runs it, and a test can count them.
//!
//! No statement may scan a table that grows.

use std::cell::RefCell;

use sqlx::{AssertSqlSafe, Row, SqliteConnection};

const GROWING: [&str; 5] = ["tasks", "outbox", "batches", "results", "seen"];

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

/// The work of a call for the database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::store) struct Asked {
    /// Each waits for the disk once.
    pub(in crate::store) commits: u64,
    /// Without BEGIN and COMMIT.
    pub(in crate::store) statements: u64,
    /// Rows that were inserted, changed or deleted.
    pub(in crate::store) rows: u64,
}

tokio::task_local! {
    static ASKED: RefCell<Asked>;
}

/// Counts what `call` asks of the database.
pub(in crate::store) async fn counted<T>(call: impl Future<Output = T>) -> (T, Asked) {
    let counted = async {
        let answer = call.await;
        (answer, ASKED.with(|asked| *asked.borrow()))
    };
    ASKED.scope(RefCell::default(), counted).await
}

pub(super) fn note_command(sql: &str) {
    note(|asked| asked.commits += u64::from(sql == "COMMIT"));
}

pub(super) fn note_statement(rows: u64) {
    note(|asked| {
        asked.statements += 1;
        asked.rows += rows;
    });
}

/// Nobody counts what runs in a task of its own.
fn note(change: impl FnOnce(&mut Asked)) {
    ASKED.try_with(|asked| change(&mut asked.borrow_mut())).ok();
}
