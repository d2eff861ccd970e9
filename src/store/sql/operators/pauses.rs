//! Paused queues.
//!
//! Each change raises `meta.pauses_version`, whose row stays locked until the transaction ends, so
//! changes are serialized.

use crate::{
    model::{Act, PausedQueue, QueueName},
    store::{
        MOST_PAUSED, Pausing, Result,
        sql::{
            access::tokens, backend::Backend, meta, rows::queue_name, runner::Runner,
            session::Session, statement::Statement,
        },
    },
};

pub(crate) const VERSION: &str = "pauses_version";

pub(crate) async fn paused_queues<DB: Backend>(sql: &Runner<DB>) -> Result<Vec<PausedQueue>> {
    let paused = Statement::new("SELECT queue, at_ms, who FROM paused_queues ORDER BY queue");
    let rows: Vec<(String, i64, String)> = sql.read("paused_queues", paused).await?;
    let paused = |(queue, at_unix_ms, who): (String, i64, String)| {
        Ok(PausedQueue {
            queue: queue_name(&queue)?,
            at_unix_ms,
            who,
        })
    };
    rows.into_iter().map(paused).collect()
}

pub(crate) async fn pause<S: Session>(
    session: &mut S,
    paused: &PausedQueue,
    act: &Act,
) -> Result<Pausing> {
    meta::raise(session, VERSION).await?;
    // The call is being repeated, because the response to its COMMIT was lost.
    if tokens::is_recorded(session, act).await? {
        return Ok(Pausing::Done);
    }
    let same =
        Statement::new("SELECT COUNT(*) FROM paused_queues WHERE queue = ?").bind(&paused.queue);
    if tokens::count(session, same).await? > 0 {
        return Ok(Pausing::Already);
    }
    if tokens::count(
        session,
        Statement::new("SELECT COUNT(*) FROM paused_queues"),
    )
    .await?
        >= i64::from(MOST_PAUSED)
    {
        return Ok(Pausing::NoRoom);
    }
    let row = [
        (&paused.queue).into(),
        paused.at_unix_ms.into(),
        paused.who.as_str().into(),
    ];
    let insert =
        Statement::new("INSERT INTO paused_queues (queue, at_ms, who)").values([row].into_iter());
    session.execute(insert).await?;
    tokens::keep(session, act).await?;
    Ok(Pausing::Done)
}

pub(crate) async fn resume<S: Session>(
    session: &mut S,
    queue: &QueueName,
    act: &Act,
) -> Result<Pausing> {
    meta::raise(session, VERSION).await?;
    if tokens::is_recorded(session, act).await? {
        return Ok(Pausing::Done);
    }
    let remove = Statement::new("DELETE FROM paused_queues WHERE queue = ?").bind(queue);
    if session.execute(remove).await? == 0 {
        return Ok(Pausing::Already);
    }
    tokens::keep(session, act).await?;
    Ok(Pausing::Done)
}
