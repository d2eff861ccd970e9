//! What the two databases write differently.

use std::time::Duration;

/// Connections have it.
pub trait Dialect {
    /// Opens a transaction that may write.
    const BEGIN: &'static str;

    /// Behind a select: locks what it found. SQLite has one writer at a time.
    const FOR_UPDATE: &'static str;

    /// Behind a select: reads what is there now, and nobody changes it until the end of the transaction.
    const FOR_SHARE: &'static str;

    /// The server's clock, in milliseconds.
    const NOW_MS: &'static str;

    /// How long a statement may take. `None`: no limit, because the database is a file.
    const ANSWER_WITHIN: Option<Duration>;

    /// What to do when all connections are in use.
    const BUSY_HINT: &'static str;

    /// A task's id where nothing says which type the question mark has.
    const ID: &'static str;

    /// Behind an insert: rows whose unique keys are taken are left out. `column` is any one of the table.
    fn keep_first(column: &str) -> String;

    /// Such an insert says how many rows it inserted: when all were, nothing needs to be read back.
    const COUNTS_INSERTED: bool;

    /// Behind an insert: where `key` is taken, `column = new value` for each of `columns`.
    fn replace(key: &str, columns: &[&str]) -> String;

    /// Behind an insert: where `key` is taken, the number in `column` is added.
    fn add(key: &str, column: &str) -> String;

    /// Behind a table's name: this index or an error. No query here may scan a table, whatever the planner believes.
    fn by_index(index: &str) -> String;

    /// The same for the primary key, where the planner may take a small table for a cheap scan and lock all of it.
    const BY_PRIMARY_KEY: &'static str;

    /// The condition of the index `queue_counts_unfinished`: the unfinished tasks of a queue that has any.
    const IS_UNFINISHED: &'static str;

    /// Whether a statement of a migration failed only because it was run before.
    fn is_there_already(error: &sqlx::Error) -> bool;

    /// Around a select that has a `task_id`: sets the columns of each such task from its row.
    fn update_tasks(set: &str) -> [String; 2];
}
