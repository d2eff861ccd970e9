//! The differences between the two databases.

use super::statement::{Statement, Value};
use crate::{
    model::{StoredStatus, TaskId},
    store::Error,
};

/// The dialect of a database, implemented by its connection.
pub trait Dialect {
    /// SELECT suffix that locks the rows it finds. SQLite needs none: it has one writer at a time.
    const FOR_UPDATE: &'static str;

    /// SELECT suffix that reads the latest rows and keeps others from changing them until the
    /// transaction ends.
    const FOR_SHARE: &'static str;

    /// The server's clock, in milliseconds.
    const NOW_MS: &'static str;

    /// The column of `tasks` with a number, which finds the row and its `results`. `None`: the id
    /// finds both as fast. Where there is one, `results` have the [groups](super::tasks::groups) of the
    /// ids.
    const NUMBER: Option<&'static str>;

    /// The condition that a row of `results` is one of the row of `tasks`.
    const IS_RESULT_OF: &'static str;

    /// The column with the [groups](super::tasks::groups) of the ids in this column.
    fn group(id: &str) -> String;

    /// The group of an id.
    fn group_of(id: &TaskId) -> Value<'_>;

    /// The condition that a row of `results` is one of these tasks.
    fn of_tasks(ids: &[TaskId]) -> Statement<'_>;

    /// A question mark for what finds a row of `tasks`, where nothing else gives it a type.
    const FINDER: &'static str;

    /// The beginning of an INSERT of many rows, of which an error may leave some, because its
    /// transaction is undone.
    const INSERT: &'static str;

    /// The beginning of an UPDATE of many rows, of which an error may leave some, because its
    /// transaction is undone.
    const UPDATE: &'static str;

    /// INSERT suffix that skips rows whose unique key exists. `column` may be any column (MySQL
    /// must assign one).
    fn keep_first(column: &str) -> String;

    /// True if such an INSERT tells how many rows it inserted. If it inserted all, nothing needs to
    /// be read back.
    const COUNTS_INSERTED: bool;

    /// SELECT of key, task and last status of the keys in `seen`, up to the list of keys.
    const SEEN_KEYS: &'static str;

    /// The beginning of an INSERT suffix that changes the row where `key` exists.
    fn on_conflict(key: &str) -> String;

    /// The value of a column that such an INSERT brings.
    fn new_value(column: &str) -> String;

    /// INSERT suffix that sets `columns` to the new values where `key` exists.
    fn replace(key: &str, columns: &[&str]) -> String {
        let set: Vec<String> = columns
            .iter()
            .map(|column| format!("{column} = {}", Self::new_value(column)))
            .collect();
        format!("{} {}", Self::on_conflict(key), set.join(", "))
    }

    /// INSERT suffix that adds to the number in `column` where `key` exists.
    fn add(key: &str, column: &str) -> String {
        let new = Self::new_value(column);
        format!("{} {column} = {column} + {new}", Self::on_conflict(key))
    }

    /// Table suffix: use this index or fail. No statement here may scan a table, whatever the
    /// planner believes.
    fn by_index(index: &str) -> String;

    /// Table suffix: use the primary key. A planner may prefer to scan a small table, and lock all
    /// of it.
    const BY_PRIMARY_KEY: &'static str;

    /// Table suffix and condition: the tasks with this status, by the index that has those of a
    /// queue in order of ids.
    fn of_status(status: StoredStatus) -> String;

    /// Table suffix: the index that finds tasks on the bus between two ids that lie close together.
    const BY_IDS_ON_BUS: &'static str;

    /// Table suffix and condition: all tasks on the bus, by an index that has their queues.
    const ON_BUS: &'static str;

    /// The condition of the index `queue_counts_unfinished`: a count of unfinished tasks other than
    /// zero.
    const IS_UNFINISHED: &'static str;

    /// The text before and behind a SELECT with a `finder`, the [`Self::NUMBER`] or the id of a
    /// task: sets the columns of each such task from its row.
    fn update_tasks(set: &str) -> [String; 2];

    /// True if a statement of a migration failed only because it ran before.
    fn is_there_already(error: &Error) -> bool;

    /// True if a migration that failed with this may succeed later.
    fn is_transient(error: &sqlx::Error) -> bool;
}
