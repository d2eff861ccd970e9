//! Events that SQL stores until topic `events` has them.

use crate::store::{
    KeptEvents, Result,
    sql::{
        backend::Backend,
        dialect::Dialect,
        runner::Runner,
        session::Session,
        statement::{Statement, lists},
    },
};

pub(crate) async fn kept_events<DB: Backend>(
    sql: &Runner<DB>,
    limit: u32,
) -> Result<Vec<KeptEvents>> {
    let kept = Statement::new("SELECT number, at_ms, records FROM kept_events ")
        .sql(DB::Connection::BY_PRIMARY_KEY)
        .sql(" WHERE number > 0 ORDER BY number LIMIT ?")
        .bind(limit);
    let kept = sql.read::<(i64, i64, Vec<u8>)>("kept_events", kept).await?;
    let read = |(number, at_unix_ms, records): (i64, i64, Vec<u8>)| {
        let events = records.into();
        KeptEvents {
            number,
            at_unix_ms,
            events,
        }
    };
    Ok(kept.into_iter().map(read).collect())
}

pub(crate) async fn remove<S: Session>(session: &mut S, numbers: &[i64]) -> Result<()> {
    for numbers in lists(numbers) {
        session
            .execute(Statement::new("DELETE FROM kept_events WHERE number IN ").list(numbers))
            .await?;
    }
    Ok(())
}
