//! The opening of shared sessions, and their takeovers.

use std::{collections::HashMap, time::Instant};

use futures::future;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::{error::Error, handle::Handle},
    order::ends,
    registry::most_of_worker,
    session::{Plan, heartbeat},
};
use crate::{
    model::{OpenSession, SessionOpened, TaskId, WorkerName},
    queue::{SharedNotes, SharedOpened, SharedSession, SharedWish, Started, WORKER_SESSIONS},
    telemetry::metrics::SessionEnd,
};

/// A worker's plan as its session's book in Redis stores it.
#[derive(Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) queues: Vec<String>,
    pub(super) timeout_ms: u64,
    pub(super) tells_started: bool,
    pub(super) lease_ms: Option<u64>,
    pub(super) max_bytes: u64,
    #[serde(default, skip_serializing_if = "HashMap::is_empty")]
    pub(super) weights: HashMap<String, u32>,
}

impl Written {
    pub(super) fn read(plan: &[u8]) -> Result<Self, Error> {
        serde_json::from_slice(plan)
            .map_err(|error| Error::Invalid(format!("the session cannot be read: {error}")))
    }
}

impl Handle {
    /// Opens a session that any process can serve, or resumes one. `is_own`: the caller is limited
    /// to this worker name.
    pub async fn open_shared(
        &self,
        open: OpenSession,
        is_own: bool,
    ) -> Result<SessionOpened, Error> {
        let plan = self.plan(&open)?;
        let written = serde_json::to_vec(&Written {
            queues: open.queues.clone(),
            timeout_ms: u64::try_from(plan.timeout.as_millis()).unwrap_or(u64::MAX),
            tells_started: open.tells_started,
            lease_ms: open
                .lease_duration
                .map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX)),
            max_bytes: open.max_bytes,
            weights: open.weights.clone(),
        });
        let written = written.map_err(|error| Error::Invalid(error.to_string()))?;
        let (session, resumed) = match self.go_on(&open, &plan, &written).await? {
            Some(session) => (session, true),
            None => (
                self.open_shared_anew(&plan, &written, open.takeover, is_own)
                    .await?,
                false,
            ),
        };
        self.sessions.slots.note(session.slot());
        if open.takeover {
            self.sessions
                .told
                .add(session.worker.clone(), session.id, Instant::now());
            self.take_over(&session.worker, session.id).await?;
        }
        let mut called = self
            .call(&session, SharedWish::More(open.want), &[])
            .await?;
        self.want_rest(&session, open.want, &mut called).await?;
        let max_tasks = self.settings.limits.max_session_tasks;
        let heartbeat = heartbeat(plan.timeout);
        Ok(SessionOpened {
            session: session.id.to_string(),
            resumed,
            granted: called.by,
            max_tasks,
            heartbeat,
            timeout: plan.timeout,
        })
    }

    /// Opens a new session, which then takes over if requested.
    async fn open_shared_anew(
        &self,
        plan: &Plan,
        written: &[u8],
        takes_over: bool,
        is_own: bool,
    ) -> Result<SharedSession, Error> {
        let worker = &plan.claim.worker;
        let id = self
            .sessions
            .next_id(worker, self.queue.announcer().now_unix_ms());
        let session = SharedSession {
            worker: worker.clone(),
            id,
        };
        let most = self.settings.limits.max_sessions;
        let most_of_worker = if is_own {
            most_of_worker(most).min(WORKER_SESSIONS)
        } else {
            WORKER_SESSIONS
        };
        // A worker with too many sessions may take over to get rid of them.
        let most_of_worker = if takes_over {
            2 * most_of_worker
        } else {
            most_of_worker
        };
        let anew = Some((most, most_of_worker));
        let why = match self
            .queue
            .open_shared(&session, anew, plan.timeout, written, &[])
            .await?
        {
            SharedOpened::Open(_) => return Ok(session),
            SharedOpened::WorkerFull => format!(
                "worker {worker} has {most_of_worker} sessions without streams, and may have no more: close some, \
                 take over (takeover), or give each program a worker name of its own. A process with streams of this \
                 worker counts as one, too"
            ),
            SharedOpened::Unknown | SharedOpened::Full => {
                format!(
                    "{most} sessions without streams are open in a part (max_sessions); try again later"
                )
            }
        };
        Err(Error::Full(why))
    }

    /// Resumes a session. Tasks that the worker does not hold did not reach it, and are given back.
    async fn go_on(
        &self,
        open: &OpenSession,
        plan: &Plan,
        written: &[u8],
    ) -> Result<Option<SharedSession>, Error> {
        if open.session.is_empty() {
            return Ok(None);
        }
        let session = named(&plan.claim.worker, &open.session)?;
        let holding: Vec<TaskId> = open
            .holding
            .iter()
            .filter_map(|id| id.parse().ok())
            .collect();
        let opened = self
            .queue
            .open_shared(&session, None, plan.timeout, written, &holding)
            .await?;
        let SharedOpened::Open(mut missing) = opened else {
            return Ok(None);
        };
        if !missing.is_empty() {
            missing
                .iter_mut()
                .for_each(|lease| lease.started = Started::No);
            let ended = missing
                .iter()
                .map(|lease| (lease.id, lease.token.clone(), false))
                .collect();
            // If a shard did not answer, they stay in the book until their leases run out.
            if self
                .end_leases(missing, "it did not reach its worker")
                .await
                .is_whole
            {
                self.queue
                    .note_shared(
                        &session,
                        &SharedNotes {
                            ended,
                            extended: Vec::new(),
                        },
                    )
                    .await?;
            }
        }
        Ok(Some(session))
    }

    /// Ends the shared sessions of the worker that were opened before this one.
    pub(super) async fn take_over_shared(
        &self,
        worker: &WorkerName,
        session: Uuid,
    ) -> Result<(), Error> {
        let mut earlier = self.queue.shared_of(worker).await?;
        earlier.retain(|other| ends(session, *other));
        let sessions = earlier.into_iter().map(|id| SharedSession {
            worker: worker.clone(),
            id,
        });
        let ends = sessions
            .map(|session| async move { self.end_shared(&session, SessionEnd::TakenOver).await });
        future::try_join_all(ends).await.map(drop)
    }
}

pub(super) fn named(worker: &WorkerName, session: &str) -> Result<SharedSession, Error> {
    let id = session
        .parse()
        .map_err(|_| Error::Invalid("session is not the name of a session".into()))?;
    Ok(SharedSession {
        worker: worker.clone(),
        id,
    })
}
