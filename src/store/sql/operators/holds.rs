//! Long holds of limit keys, which workers reported. Redis has them, too; these are for the day on
//! which it loses them.

use std::collections::BTreeMap;

use crate::{
    model::{LimitHash, LimitHold, QueueName},
    store::{
        MOST_HOLDS, Result,
        sql::{
            access::tokens, backend::Backend, rows::corrupt, runner::Runner, session::Session,
            statement::Statement,
        },
    },
};

pub(crate) async fn keep<S: Session>(
    session: &mut S,
    queue: &QueueName,
    holds: &[LimitHold],
    now_unix_ms: i64,
) -> Result<()> {
    let remove = Statement::new("DELETE FROM limit_holds WHERE until_ms <= ?").bind(now_unix_ms);
    session.execute(remove).await?;
    let kept = tokens::count(session, Statement::new("SELECT COUNT(*) FROM limit_holds")).await?;
    let room = usize::try_from(i64::from(MOST_HOLDS) - kept).unwrap_or(0);
    // The last one of each limit key counts.
    let last: BTreeMap<LimitHash, i64> = holds
        .iter()
        .map(|hold| (hold.hash, hold.until_unix_ms))
        .collect();
    let rows = last.into_iter().take(room);
    let rows: Vec<_> = rows
        .map(|(hash, until)| [queue.into(), hash.to_vec().into(), until.into()])
        .collect();
    if rows.is_empty() {
        return Ok(());
    }
    let insert = Statement::new("INSERT INTO limit_holds (queue, limit_hash, until_ms)")
        .values(rows.into_iter())
        .sql(&S::replace("queue, limit_hash", &["until_ms"]));
    session.execute(insert).await.map(drop)
}

pub(crate) async fn of_queue<DB: Backend>(
    sql: &Runner<DB>,
    queue: &QueueName,
    now_unix_ms: i64,
) -> Result<Vec<LimitHold>> {
    let select = "SELECT limit_hash, until_ms FROM limit_holds WHERE queue = ? AND until_ms > ?";
    let rows = Statement::new(select).bind(queue).bind(now_unix_ms);
    let rows: Vec<(Vec<u8>, i64)> = sql.read("holds", rows).await?;
    let read = |(hash, until_unix_ms): (Vec<u8>, i64)| {
        let hash = LimitHash::try_from(&hash[..]);
        Ok(LimitHold {
            hash: hash.map_err(|_| corrupt("the hash of a limit key has eight bytes"))?,
            until_unix_ms,
        })
    };
    rows.into_iter().map(read).collect()
}
