//! Events that SQL keeps for their topic.

use std::sync::Arc;

use async_trait::async_trait;

use crate::store::sql::{
    SqlStore,
    backend::Backend,
    dialect::Dialect,
    session::Session,
    statement::{Statement, lists},
};
use crate::{
    config::EventQueues,
    store::{Events, KeptEvents, Result},
};

#[async_trait]
impl<DB: Backend> Events for SqlStore<DB> {
    fn keep_events_of(&self, queues: EventQueues) {
        *self.events.write() = Arc::new(queues);
    }

    async fn kept_events(&self, limit: u32) -> Result<Vec<KeptEvents>> {
        let kept = Statement::new("SELECT number, at_ms, records FROM kept_events ")
            .sql(DB::Connection::BY_PRIMARY_KEY)
            .sql(" WHERE number > 0 ORDER BY number LIMIT ?")
            .bind(limit);
        let kept = self
            .sql
            .read::<(i64, i64, Vec<u8>)>("kept_events", kept)
            .await?;
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

    async fn remove_events(&self, numbers: &[i64]) -> Result<()> {
        let remove = self
            .sql
            .run("remove_events", numbers.to_vec(), |session, numbers| {
                Box::pin(remove(session, numbers))
            });
        remove.await
    }
}

async fn remove<S: Session>(session: &mut S, numbers: &[i64]) -> Result<()> {
    for numbers in lists(numbers) {
        session
            .execute(Statement::new("DELETE FROM kept_events WHERE number IN ").list(numbers))
            .await?;
    }
    Ok(())
}
