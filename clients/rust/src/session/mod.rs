//! The source that holds a stream: taskd sends tasks as they become available, and receives reports
//! on the same stream.
//!
//! A separate tokio task ([`Actor`]) serves the stream and reopens it after it breaks. If taskd has
//! no streams, the session falls back to long polls.

mod actor;
mod line;
mod open;
mod outbox;
mod shared;

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use self::{
    actor::Actor,
    shared::{Answer, Command, Items, Report, Shared, Taken},
};
use crate::{
    client::Client,
    error::Error,
    event::Tell,
    new_task::proto,
    pb,
    source::{EndedLease, Source},
    unary::{Unary, extend_within},
};

/// The range of session timeouts that taskd accepts.
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(2);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(600);

/// One worker's session. Dropping it ends the session; taskd then gives back the tasks that it
/// holds.
pub(crate) struct Session {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    /// Used if taskd has no streams.
    polls: Unary,
    extend_within: Duration,
    /// Aborted when dropped.
    _actor: JoinSet<()>,
}

impl Session {
    /// Opens the stream in the background. Must be called in a tokio runtime.
    pub(crate) fn new(
        client: &Client,
        worker: &str,
        queues: &[String],
        weights: &HashMap<String, u32>,
        lease: Duration,
        polls: Unary,
        tell: Tell,
    ) -> Self {
        // Unbounded is fine: each report waits for its answer, so the worker's calls bound their
        // number.
        let (commands, heard) = mpsc::unbounded_channel();
        let shared = Arc::<Shared>::default();
        let opening = pb::OpenSession {
            worker: worker.to_owned(),
            queues: queues.to_vec(),
            weights: weights.clone(),
            timeout: Some(proto(timeout(lease))),
            lease_duration: Some(proto(lease)),
            ..Default::default()
        };
        let actor = Actor::new(client.clone(), opening, shared.clone(), heard, tell);
        let mut running = JoinSet::new();
        running.spawn(actor.run());
        Self {
            commands,
            shared,
            polls,
            extend_within: extend_within(lease),
            _actor: running,
        }
    }

    async fn report(&self, items: Items) -> Result<Vec<pb::ItemResult>, Error> {
        let (reply, answer) = oneshot::channel();
        let sent = self.commands.send(Command::Report(Report {
            items,
            reply: Some(reply),
        }));
        let answer = match sent {
            Ok(()) => answer.await.unwrap_or_else(|_| Err(gone())),
            Err(mpsc::error::SendError(Command::Report(report))) => match self.shared.refusal() {
                Some(error) => Err(error),
                None => Ok(Answer::ByCall(report.items)),
            },
            Err(_) => Err(gone()),
        };
        match answer? {
            Answer::Items(results) => Ok(results),
            Answer::ByCall(Items::Completions(all)) => self.polls.complete(all).await,
            Answer::ByCall(Items::Rejections(all) | Items::Returns(all)) => {
                self.polls.reject(all).await
            }
            Answer::ByCall(Items::Extensions(all)) => self.polls.extend(all).await,
        }
    }
}

/// The session timeout for leases of this duration: short enough to notice a dead connection before
/// they expire.
fn timeout(lease: Duration) -> Duration {
    (lease / 2).clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT)
}

fn gone() -> Error {
    Error::Away {
        address: "the stream".to_owned(),
        message: "it has ended".to_owned(),
    }
}

impl Source for Session {
    async fn get(&self, most: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        match self.shared.take().await {
            Taken::Tasks(tasks) => Ok(Some(tasks)),
            Taken::Polls => self.polls.get(most).await,
            Taken::Refused(error) => Err(error),
        }
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        self.report(Items::Completions(all)).await
    }

    fn brings_tasks(&self) -> bool {
        self.shared.goes_by_polls()
    }

    async fn complete_and_get(
        &self,
        all: Vec<pb::Completion>,
        most: usize,
    ) -> Result<(Vec<pb::ItemResult>, Vec<pb::LeasedTask>), Error> {
        self.polls.complete_and_get(all, most).await
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        self.report(Items::Rejections(all)).await
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        let extended =
            tokio::time::timeout(self.extend_within, self.report(Items::Extensions(all)));
        let late = |_| Error::Away {
            address: "the stream".to_owned(),
            message: "no answer in time".to_owned(),
        };
        extended.await.map_err(late)?
    }

    async fn give_back(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        // What is given back has only an id. A report about a limit key needs a rejection.
        if all.iter().any(|rejection| rejection.limit.is_some()) {
            return self.reject(all).await;
        }
        self.report(Items::Returns(all)).await
    }

    fn room(&self, most: usize) {
        self.shared.set_room(most);
    }

    async fn arrived(&self) -> Vec<pb::LeasedTask> {
        self.shared.take_arrived().await
    }

    async fn ended(&self) -> Vec<EndedLease> {
        self.shared.ended().await
    }

    async fn drain(&self) -> Vec<pb::LeasedTask> {
        let (reply, drained) = oneshot::channel();
        if self.commands.send(Command::Drain(reply)).is_ok() {
            drained.await.ok();
        }
        self.shared.take_rest()
    }

    async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.commands.send(Command::Close(reply)).is_ok() {
            closed.await.ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_be_silent_for_half_of_its_lease() {
        let timeouts =
            [1, 30, 600, 3600].map(|lease| timeout(Duration::from_secs(lease)).as_secs());
        assert_eq!(timeouts, [2, 15, 300, 600]);
    }

    #[test]
    fn reports_that_nobody_waits_for_do_not_pile_up() {
        let mut outbox = outbox::Outbox::default();
        for _ in 0..10 {
            let (reply, answer) = oneshot::channel();
            outbox.report(Report {
                items: Items::Extensions(Vec::new()),
                reply: Some(reply),
            });
            // Its caller has given up.
            drop(answer);
        }
        assert_eq!(outbox.take_all().count(), 1);
    }
}
