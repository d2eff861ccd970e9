//! Paused queues.

use tracing::Instrument as _;

use super::{
    access::{reaches, who},
    error::Error,
    handle::{Api, span},
};
use crate::{
    model::{Act, Caller, PausedQueue, QueueName},
    store::{MOST_PAUSED, Pausing},
};

impl Api {
    /// Pauses a queue: no worker gets anything from it. Returns false if it was paused already.
    pub async fn pause_queue(&self, caller: &Caller, queue: &str) -> Result<bool, Error> {
        self.set_paused(caller, queue, true)
            .instrument(span("pause_queue", caller))
            .await
    }

    /// Resumes a queue. Returns false if it was not paused.
    pub async fn resume_queue(&self, caller: &Caller, queue: &str) -> Result<bool, Error> {
        self.set_paused(caller, queue, false)
            .instrument(span("resume_queue", caller))
            .await
    }

    async fn set_paused(
        &self,
        caller: &Caller,
        queue: &str,
        is_paused: bool,
    ) -> Result<bool, Error> {
        let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
        reaches(caller, queue.as_str())?;
        let query = self.query()?;
        let who = who(caller);
        let at_unix_ms = query.now_unix_ms();
        let act = Act::at_time(
            at_unix_ms,
            who,
            if is_paused {
                "pause queue"
            } else {
                "resume queue"
            },
            queue.as_str(),
        );
        let done = match is_paused {
            true => {
                let who = who.to_owned();
                query
                    .store()
                    .pause(
                        &PausedQueue {
                            queue: queue.clone(),
                            at_unix_ms,
                            who,
                        },
                        &act,
                    )
                    .await?
            }
            false => query.store().resume(&queue, &act).await?,
        };
        if done == Pausing::NoRoom {
            return Err(Error::Invalid(format!(
                "{MOST_PAUSED} queues are paused; resume one before"
            )));
        }
        // The other processes notice within a second.
        query.queue.set_paused(&queue, is_paused);
        Ok(done == Pausing::Done)
    }
}
