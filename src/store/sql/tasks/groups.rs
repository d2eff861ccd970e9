//! Ranges of ids in the index `results_worker`.
//!
//! In SQLite this index has the ids in groups, each covering a quarter of a second of their
//! timestamps, so that rows that change together are stored together. A range reads all of its
//! groups, and sorts within each.

use crate::{
    model::TaskId,
    store::sql::{dialect::Dialect, statement::Statement},
};

/// The condition that an id is in one of the groups of a range, for the index. The exact range has
/// to be a separate condition.
pub(crate) fn in_groups<'a, D: Dialect>(
    id: &str,
    first: &'a TaskId,
    last: &'a TaskId,
) -> Statement<'a> {
    let between = format!("{} BETWEEN ? AND ?", D::group(id));
    Statement::new(between)
        .bind(D::group_of(first))
        .bind(D::group_of(last))
}

/// The `ORDER BY` terms that sort by id. `direction` is empty or ` DESC`.
pub(crate) fn order<D: Dialect>(id: &str, direction: &str) -> String {
    let group = D::group(id);
    if group == id {
        format!("{id}{direction}")
    } else {
        format!("{group}{direction}, {id}{direction}")
    }
}
