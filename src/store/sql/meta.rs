//! The values of `meta`. A migration sets the initial value of each.

use std::str::FromStr;

use super::{
    backend::Backend, rows::corrupt, runner::Runner, session::Session, statement::Statement,
};
use crate::store::Result;

/// Reads a value, as part of `operation`.
pub(super) async fn read<DB: Backend, T: FromStr>(
    sql: &Runner<DB>,
    operation: &'static str,
    name: &str,
) -> Result<T> {
    parsed(name, sql.read(operation, select(name)).await?)
}

/// Reads a value in a transaction.
pub(super) async fn value<S: Session, T: FromStr>(session: &mut S, name: &str) -> Result<T> {
    parsed(name, session.fetch(select(name)).await?)
}

/// Gives the value if it is still `first`, in a transaction.
pub(super) async fn set_once<S: Session>(
    session: &mut S,
    name: &str,
    first: &str,
    value: &str,
) -> Result<()> {
    let set = Statement::new("UPDATE meta SET value = ? WHERE name = ? AND value = ?")
        .bind(value)
        .bind(name)
        .bind(first);
    session.execute(set).await.map(drop)
}

/// Increments a number. Its row stays locked until the transaction ends.
pub(super) async fn raise<S: Session>(session: &mut S, name: &str) -> Result<()> {
    let raise = "UPDATE meta SET value = CAST(CAST(value AS SIGNED) + 1 AS CHAR) WHERE name = ?";
    session
        .execute(Statement::new(raise).bind(name))
        .await
        .map(drop)
}

fn select(name: &str) -> Statement<'_> {
    Statement::new("SELECT value FROM meta WHERE name = ?").bind(name)
}

fn parsed<T: FromStr>(name: &str, rows: Vec<(String,)>) -> Result<T> {
    rows.first()
        .and_then(|(value,)| value.parse().ok())
        .ok_or_else(|| corrupt(format!("no {name}")))
}
