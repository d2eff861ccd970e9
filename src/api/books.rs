//! The books of the queues: what came in, what went out, and where the rest is.

use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
};
use crate::model::{Books, Caller, QueueName};

impl Api {
    /// The books of the queues that the caller reaches, or of one.
    ///
    /// All queues: those with unfinished tasks or an open shard.
    pub async fn books(&self, caller: &Caller, queue: &str) -> Result<Books, Error> {
        let queue = Some(queue).filter(|queue| !queue.is_empty()).map(QueueName::new).transpose();
        let queue = queue.map_err(|error| Error::Invalid(error.to_string()))?;
        if let Some(queue) = &queue {
            reaches(caller, queue.as_str())?;
        }
        let ledger = &self.query()?.ledger;
        let mut books = async {
            let mut books = ledger.books().await?;
            if let Some(queue) = &queue {
                books.queues.retain(|of| of.queue == *queue);
                if books.queues.is_empty() {
                    books.queues.push(ledger.of_idle(queue).await?);
                }
            }
            Ok::<_, Error>(books)
        }
        .instrument(span("books", caller))
        .await
        .map_err(|error| match error {
            // The queue of another tenant has no name here.
            Error::Shard { shard, cause } if !caller.access.reaches(shard.queue.as_str()) => Error::Queue(cause),
            error => error,
        })?;
        books.queues.retain(|of| caller.access.reaches(of.queue.as_str()));
        if !caller.access.reaches_everything() {
            books.rejected_elsewhere = 0;
        }
        Ok(books)
    }
}
