//! The books of the queues: what came in, what went out, and where the rest is.

use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
};
use crate::model::{Books, Caller, QueueName};

impl Api {
    /// Returns the books of one queue, or of all that the caller reaches.
    ///
    /// All queues are those with unfinished tasks or an open shard. A shard that cannot be read
    /// fails the call only if the books of its queue are requested.
    pub async fn books(&self, caller: &Caller, queue: &str) -> Result<Books, Error> {
        let queue = Some(queue)
            .filter(|queue| !queue.is_empty())
            .map(QueueName::new)
            .transpose();
        let queue = queue.map_err(|error| Error::Invalid(error.to_string()))?;
        if let Some(queue) = &queue {
            reaches(caller, queue.as_str())?;
        }
        let ledger = &self.query()?.ledger;
        let mut books = async {
            let look = ledger.look().await?;
            let is_asked = |of: &QueueName| match &queue {
                Some(queue) => of == queue,
                None => caller.access.reaches(of.as_str()),
            };
            if let Some(unread) = look
                .unread
                .iter()
                .find(|unread| is_asked(&unread.shard.queue))
            {
                return Err(unread.clone().into());
            }
            let mut books = look.books.clone();
            books.queues.retain(|of| is_asked(&of.queue));
            if let Some(queue) = &queue
                && books.queues.is_empty()
            {
                books.queues.push(ledger.of_idle(queue).await?);
            }
            Ok::<_, Error>(books)
        }
        .instrument(span("books", caller))
        .await?;
        // These counts cover all queues.
        if !caller.access.reaches_everything() {
            books.bus = None;
            books.rejected_elsewhere = 0;
        }
        Ok(books)
    }
}
