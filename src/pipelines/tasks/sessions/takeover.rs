//! Takeovers: a session ends the sessions of its worker that were opened before it.
//!
//! The id of a session is a UUIDv7 with the time of Redis's clock. So all processes agree on one
//! order of a worker's sessions. Of two takeovers at the same time the later one in that order
//! stays, no matter which is announced first, and a delayed message does not end a session that was
//! opened after the takeover. If the clocks of two processes differ, a session that is earlier in
//! this order may be opened later: the process of the other session then announces its takeover
//! again, and the earlier one ends.
//!
//! Processes notify each other by messages that may get lost, so a takeover is announced several
//! times. If all of these are lost, the old sessions end when their worker is silent.

use std::time::Instant;

use futures::future;
use uuid::Uuid;

use super::{
    super::{error::Error, handle::Handle},
    order::ends,
    session::Attached,
};
use crate::{model::WorkerName, telemetry::metrics::SessionEnd};

impl Handle {
    /// Ends all other sessions of the worker. If Redis fails, this is retried soon.
    pub async fn take_over_by(&self, attached: &Attached) {
        let session = &attached.session;
        session.takes_over(Instant::now());
        if let Err(error) = self.take_over(&session.worker, session.id).await {
            warn_of(&session.worker, &error);
        }
    }

    /// Ends the earlier sessions of the worker: here, in other processes, and those without a
    /// stream. Continues even if the caller stops waiting, because the sessions that end must give
    /// back what they hold.
    pub(super) async fn take_over(&self, worker: &WorkerName, session: Uuid) -> Result<(), Error> {
        let handle = self.clone();
        let worker = worker.clone();
        let takes_over = self.sessions.streams.spawn(async move {
            handle.end_earlier(&worker, session).await;
            handle.tell_takeover(&worker, session).await;
            handle.take_over_shared(&worker, session).await
        });
        takes_over
            .await
            .unwrap_or_else(|error| Err(Error::Full(format!("the takeover broke off: {error}"))))
    }

    /// Handles the notice that a session took over, here or elsewhere. Does not wait, because a
    /// Redis that hangs must not hold up the notices about other workers.
    pub(super) fn hear_takeover(&self, worker: WorkerName, session: Uuid) {
        self.sessions.heard.hear(session);
        let handle = self.clone();
        self.sessions.streams.spawn(async move {
            handle.end_earlier(&worker, session).await;
            let later = handle
                .sessions
                .of_worker(&worker)
                .into_iter()
                .rfind(|other| other.took_over());
            if let Some(later) = later.filter(|later| ends(later.id, session)) {
                // The session that took over may have no stream: then no process would end it.
                handle.tell_again(&worker, later.id).await;
            }
        });
    }

    /// Announces takeovers again if it is time. Waits for none of them, because a Redis that hangs
    /// must not hold up the sessions of other workers.
    pub(super) fn tell_takeovers_again(&self, now: Instant) {
        let of_streams = self
            .sessions
            .all()
            .into_iter()
            .filter(|session| session.tells_takeover_again(now));
        let of_streams = of_streams.map(|session| (session.worker.clone(), session.id));
        // Also ends the worker's shared sessions again, because ids do not say for sure which
        // session was opened last, and Redis may not have answered the first time.
        for (worker, session) in of_streams.chain(self.sessions.told.due(now)) {
            let handle = self.clone();
            self.sessions
                .streams
                .spawn(async move { handle.tell_again(&worker, session).await });
        }
    }

    async fn tell_again(&self, worker: &WorkerName, session: Uuid) {
        self.tell_takeover(worker, session).await;
        if let Err(error) = self.take_over_shared(worker, session).await {
            warn_of(worker, &error);
        }
    }

    async fn end_earlier(&self, worker: &WorkerName, session: Uuid) {
        let mut earlier = self.sessions.of_worker(worker);
        earlier.retain(|other| ends(session, other.id));
        future::join_all(
            earlier
                .iter()
                .map(|other| self.end_session(other, SessionEnd::TakenOver)),
        )
        .await;
    }

    async fn tell_takeover(&self, worker: &WorkerName, session: Uuid) {
        if let Err(error) = self.queue.tell_takeover(worker, session).await {
            tracing::warn!(
                "could not tell other processes that a session of {worker} takes over: {error}"
            );
        }
    }
}

fn warn_of(worker: &WorkerName, error: &Error) {
    tracing::warn!("could not end the sessions of {worker} that were taken over: {error}");
}
