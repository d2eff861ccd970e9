//! The differences between the SQL dialects of the two databases.

use super::statement::{Statement, Value};
use crate::{
    model::{StoredStatus, TaskId},
    store::Error,
};

/// The dialect of a database, implemented by its connection.
pub trait Dialect {
    /// SELECT suffix that locks the rows found. SQLite needs none, because it has a single writer.
    const FOR_UPDATE: &'static str;

    /// SELECT suffix that reads the latest versions of rows, and keeps others from changing them
    /// until the transaction ends.
    const FOR_SHARE: &'static str;

    /// The present time by the server's clock, in milliseconds.
    const NOW_MS: &'static str;

    /// The [era](super::tasks::era) of the transaction: a variable, or a placeholder for
    /// [`Session::era`](super::session::Session::era).
    const ERA: &'static str;

    /// The column of `tasks` with a number by which the row and its `results` are found, or `None`
    /// if the id finds both just as fast. With such a column, `results` also store the
    /// [group](super::tasks::groups) of the task's id.
    const NUMBER: Option<&'static str>;

    /// The condition that a row of `results` belongs to the row of `tasks`.
    const IS_RESULT_OF: &'static str;

    /// The expression for the [group](super::tasks::groups) of the id in column `id`.
    fn group(id: &str) -> String;

    /// The group of an id.
    fn group_of(id: &TaskId) -> Value<'_>;

    /// The condition that a row of `results` belongs to one of these tasks.
    fn of_tasks(ids: &[TaskId]) -> Statement<'_>;

    /// A placeholder for a finder (see [`Self::update_tasks`]) in places where nothing else
    /// determines its type.
    const FINDER: &'static str;

    /// Begins an INSERT of many rows. On error some of them may stay inserted, because the
    /// transaction is rolled back anyway.
    const INSERT: &'static str;

    /// Begins an UPDATE of many rows. On error some of them may stay changed, because the
    /// transaction is rolled back anyway.
    const UPDATE: &'static str;

    /// INSERT suffix that skips rows whose unique key exists. `column` may be any column (MySQL
    /// must assign one).
    fn keep_first(column: &str) -> String;

    /// True if such an INSERT returns the number of rows that it inserted. If it inserted all rows,
    /// nothing needs to be read back.
    const COUNTS_INSERTED: bool;

    /// SELECT of key, task and last status from `seen`, up to the list of keys.
    const SEEN_KEYS: &'static str;

    /// Begins an INSERT suffix that changes the row if `key` already exists.
    fn on_conflict(key: &str) -> String;

    /// The value that such an INSERT has for a column.
    fn new_value(column: &str) -> String;

    /// INSERT suffix that sets `columns` to the new values if `key` already exists.
    fn replace(key: &str, columns: &[&str]) -> String {
        let set: Vec<String> = columns
            .iter()
            .map(|column| format!("{column} = {}", Self::new_value(column)))
            .collect();
        format!("{} {}", Self::on_conflict(key), set.join(", "))
    }

    /// INSERT suffix that adds to the number in `column` if `key` already exists.
    fn add(key: &str, column: &str) -> String {
        let new = Self::new_value(column);
        format!("{} {column} = {column} + {new}", Self::on_conflict(key))
    }

    /// Table suffix: use this index or fail. No statement may scan a table, whatever the planner
    /// estimates.
    fn by_index(index: &str) -> String;

    /// Table suffix: use the primary key. A planner may prefer to scan a small table, which would
    /// lock all of it.
    const BY_PRIMARY_KEY: &'static str;

    /// Table suffix and condition: the tasks with this status, by the index that sorts those of a
    /// queue by id.
    fn of_status(status: StoredStatus) -> String;

    /// Table suffix: the index that finds tasks on the bus between two ids that lie close together.
    const BY_IDS_ON_BUS: &'static str;

    /// Table suffix and condition: all tasks on the bus, by an index that has their queues.
    const ON_BUS: &'static str;

    /// The condition of the index `queue_counts_unfinished`: a count of unfinished tasks other than
    /// zero.
    const IS_UNFINISHED: &'static str;

    /// The text before and after a SELECT whose column `finder` has the [`Self::NUMBER`] or the id
    /// of a task. Together they set the columns of each such task from its row of the SELECT.
    fn update_tasks(set: &str) -> [String; 2];

    /// True if a statement of a migration failed only because it has already been executed.
    fn is_there_already(error: &Error) -> bool;

    /// True if a migration that failed with this may succeed later.
    fn is_transient(error: &sqlx::Error) -> bool;
}
