//! Ranges of ids in the index `results_worker`.
//!
//! SQLite has the ids there in groups, a quarter of a second of their times each: rows that change
//! together lie together in a group. A range reads all of its groups, and sorts within each.

use crate::{
    model::TaskId,
    store::sql::{dialect::Dialect, statement::Statement},
};

/// The condition that an id lies in the groups of a range, for the index. The range itself is
/// another condition.
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

/// The order of ids, for `ORDER BY`; `direction` is empty or ` DESC`.
pub(crate) fn order<D: Dialect>(id: &str, direction: &str) -> String {
    let group = D::group(id);
    if group == id {
        format!("{id}{direction}")
    } else {
        format!("{group}{direction}, {id}{direction}")
    }
}
