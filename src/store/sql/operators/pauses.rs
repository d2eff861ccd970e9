//! Paused queues.
//!
//! Each change raises `meta.pauses_version`. Its row stays locked until the transaction ends, so
//! changes come one after the other.

use async_trait::async_trait;

use crate::model::{Act, PausedQueue, QueueName};
use crate::store::sql::{
    SqlStore, access::tokens, backend::Backend, meta, rows::queue_name, session::Session,
    statement::Statement,
};
use crate::store::{MOST_PAUSED, Pauses, Pausing, Result};

const VERSION: &str = "pauses_version";

#[async_trait]
impl<DB: Backend> Pauses for SqlStore<DB> {
    async fn pauses_version(&self) -> Result<u64> {
        meta::read(&self.sql, VERSION, VERSION).await
    }

    async fn paused_queues(&self) -> Result<Vec<PausedQueue>> {
        let paused = Statement::new("SELECT queue, at_ms, who FROM paused_queues ORDER BY queue");
        let rows: Vec<(String, i64, String)> = self.sql.read("paused_queues", paused).await?;
        let paused = |(queue, at_unix_ms, who): (String, i64, String)| {
            Ok(PausedQueue {
                queue: queue_name(&queue)?,
                at_unix_ms,
                who,
            })
        };
        rows.into_iter().map(paused).collect()
    }

    async fn pause(&self, paused: &PausedQueue, act: &Act) -> Result<Pausing> {
        let pause = self.sql.run(
            "pause",
            (paused.clone(), act.clone()),
            |session, (paused, act)| Box::pin(pause(session, paused, act)),
        );
        pause.await
    }

    async fn resume(&self, queue: &QueueName, act: &Act) -> Result<Pausing> {
        let resume = self.sql.run(
            "resume",
            (queue.clone(), act.clone()),
            |session, (queue, act)| Box::pin(resume(session, queue, act)),
        );
        resume.await
    }
}

async fn pause<S: Session>(session: &mut S, paused: &PausedQueue, act: &Act) -> Result<Pausing> {
    meta::raise(session, VERSION).await?;
    // A call that is repeated because its COMMIT had no answer.
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

async fn resume<S: Session>(session: &mut S, queue: &QueueName, act: &Act) -> Result<Pausing> {
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
