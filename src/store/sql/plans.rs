//! Checks for the tests of the library: each statement is checked with SQLite's EXPLAIN before it
//! is executed, and a test can count the statements.
//!
//! No statement may scan a table that grows. A walk over the tasks on the bus must read only an
//! index. A statement with `OR FAIL` must not make SQLite keep copies of pages, because these
//! statements change many rows of `tasks` or `results` in calls of workers.

use std::sync::Arc;

use parking_lot::Mutex;

const GROWING: [&str; 21] = [
    "tasks",
    "sequences",
    "outbox",
    "batches",
    "results",
    "seen",
    "new_keys",
    "letters",
    "changes",
    "history",
    "idempotency_keys",
    "kept_events",
    "trees",
    "tree_tasks",
    "subtrees",
    "parts",
    "feed_acks",
    "executions",
    "execution_events",
    "execution_inbox",
    "execution_timers",
];

pub(in crate::store) fn check(db: &rusqlite::Connection, text: &str) {
    let mut plan = db
        .prepare(&format!("EXPLAIN QUERY PLAN {text}"))
        .expect("SQLite explains what it can run");
    let mut steps = plan.raw_query();
    while let Some(step) = steps.next().expect("an explanation needs no values") {
        let step: String = step.get("detail").expect("a step has a text");
        let scans = GROWING.iter().any(|table| {
            step == format!("SCAN {table}") || step.starts_with(&format!("SCAN {table} "))
        });
        // This index has only the tasks that wait in sequences, and fsck counts all of them.
        let scans = scans && step != "SCAN outbox USING COVERING INDEX outbox_behind";
        let in_order = [
            "FROM outbox",
            "FROM letters ",
            "FROM history ",
            "INDEXED BY tasks_unfinished",
            "INDEXED BY tasks_completed",
            "INDEXED BY tasks_given_up",
            "INDEXED BY results_worker",
        ];
        // Only the last term is sorted, within a group that the index provides.
        let sorts = step.contains("ORDER BY")
            && !step.contains("LAST TERM")
            && in_order.iter().any(|part| text.contains(part));
        let reads_rows = text.contains("queue, id, on_bus, shard FROM tasks")
            && step.contains(" tasks ")
            && !step.contains("COVERING");
        assert!(
            !scans && !sorts && !reads_rows && !step.contains("AUTOMATIC"),
            "{step}: {text}"
        );
    }
    if text.contains(" OR FAIL ") {
        check_steps(db, text);
    }
}

/// Checks that a statement is compiled only once, and again only after a change of the schema.
pub(in crate::store) fn check_compiled(prepared: &rusqlite::Statement<'_>, text: &str) {
    let again = prepared.get_status(rusqlite::StatementStatus::RePrepare);
    assert!(again <= 2, "compiled {again} times more: {text}");
}

/// SQLite copies each page before a statement changes it if the statement may fail in a way that
/// undoes only this statement: by a constraint without OR FAIL, or by a function, including one in
/// an index.
fn check_steps(db: &rusqlite::Connection, text: &str) {
    const ABORT: i64 = 2;
    let mut program = db
        .prepare(&format!("EXPLAIN {text}"))
        .expect("SQLite explains what it can run");
    let mut steps = program.raw_query();
    while let Some(step) = steps.next().expect("an explanation needs no values") {
        let [code, how] =
            ["p1", "p2"].map(|column| step.get::<_, i64>(column).expect("a step has numbers"));
        let step: String = step.get("opcode").expect("a step has a name");
        let aborts = step.starts_with("Halt") && code != 0 && how == ABORT;
        assert!(
            !aborts && step != "Function" && step != "PureFunc",
            "{step}: {text}"
        );
    }
}

/// How much work a connection has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::store) struct Asked {
    /// Each commit waits for the disk once.
    pub(in crate::store) commits: u64,
    /// The number of statements, without BEGIN and COMMIT.
    pub(in crate::store) statements: u64,
    /// The number of rows that were inserted, changed or deleted.
    pub(in crate::store) rows: u64,
}

/// Counts the work of a connection.
#[derive(Clone, Default)]
pub(in crate::store) struct Counter(Arc<Mutex<Asked>>);

impl Counter {
    pub(in crate::store) fn note_command(&self, sql: &str) {
        self.0.lock().commits += u64::from(sql == "COMMIT");
    }

    pub(in crate::store) fn note_statement(&self, rows: u64) {
        let mut asked = self.0.lock();
        asked.statements += 1;
        asked.rows += rows;
    }

    /// Returns the count so far, and resets it.
    pub(in crate::store) fn take(&self) -> Asked {
        std::mem::take(&mut *self.0.lock())
    }
}
