//! A connection that runs statements. Each call has a time limit, except those of migrations.

use std::{borrow::Cow, future::Future, io, time::Duration};

use sqlx::{Arguments, AssertSqlSafe, MySql, MySqlConnection, mysql::MySqlArguments};

use super::error::error;
use crate::store::{
    Result,
    sql::{Columns, Session, Statement, Value},
};

/// Longer than a wait for a lock, and short enough for a retry before the call gives up.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);

/// Waits for a response of the server, up to the time limit.
async fn answered<T>(answer: impl Future<Output = sqlx::Result<T>>) -> Result<T> {
    let silent = || {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer from the database within {ANSWER_WITHIN:?}"),
        )
    };
    match tokio::time::timeout(ANSWER_WITHIN, answer).await {
        Ok(answer) => answer.map_err(error),
        Err(_) => Err(error(silent().into())),
    }
}

/// Executes a command without values and rows. It need not be preparable.
pub(super) async fn command(connection: &mut MySqlConnection, sql: &'static str) -> Result<()> {
    answered(sqlx::raw_sql(sql).execute(connection))
        .await
        .map(drop)
}

fn arguments(values: Vec<Value<'_>>) -> Result<MySqlArguments> {
    let mut arguments = MySqlArguments::default();
    arguments.reserve(values.len(), 0);
    for value in values {
        match value {
            Value::Int(int) => arguments.add(int),
            Value::Text(Cow::Owned(text)) => arguments.add(text),
            Value::Text(Cow::Borrowed(text)) => arguments.add(text),
            Value::Bytes(bytes) => arguments.add(&*bytes),
        }
        .map_err(|cause| error(sqlx::Error::Encode(cause)))?;
    }
    Ok(arguments)
}

// AssertSqlSafe: all texts are taskd's own, and everything from outside is bound as a value.
impl Session for MySqlConnection {
    async fn execute(&mut self, statement: Statement<'_>) -> Result<u64> {
        let arguments = arguments(statement.values)?;
        let done =
            sqlx::query_with::<MySql, _>(AssertSqlSafe(statement.text), arguments).execute(self);
        Ok(answered(done).await?.rows_affected())
    }

    async fn execute_for_long(&mut self, statement: Statement<'_>) -> Result<u64> {
        let arguments = arguments(statement.values)?;
        let done =
            sqlx::query_with::<MySql, _>(AssertSqlSafe(statement.text), arguments).execute(self);
        Ok(done.await.map_err(error)?.rows_affected())
    }

    async fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> Result<Vec<T>> {
        let arguments = arguments(statement.values)?;
        let rows = sqlx::query_as_with::<MySql, T, _>(AssertSqlSafe(statement.text), arguments)
            .fetch_all(self);
        answered(rows).await
    }
}
