//! What all lists have in common: a page, and the cursor after which the next one begins.

use uuid::Uuid;

use super::statement::Statement;
use crate::store::Result;

/// Completes a SELECT of rows whose ids begin with a time: the latest rows before `before`, or the
/// latest of all.
pub(super) fn latest(
    select: Statement<'static>,
    before: Option<Uuid>,
    limit: u32,
) -> Statement<'static> {
    let before = before.unwrap_or(Uuid::max());
    select
        .sql("WHERE id < ? ORDER BY id DESC LIMIT ?")
        .bind(before.as_bytes().to_vec())
        .bind(limit)
}

/// The cursor of the last row if the page is full, because there may be a next page.
pub(super) fn next<T, C>(
    page: &[T],
    limit: usize,
    cursor: impl FnOnce(&T) -> Result<C>,
) -> Result<Option<C>> {
    match page.last() {
        Some(last) if page.len() == limit => cursor(last).map(Some),
        _ => Ok(None),
    }
}
